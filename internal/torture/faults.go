package main

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"syscall"
	"time"

	"reveille/internal/faultproxy"
)

// planned is a fault of the schedule.
type planned struct {
	at   time.Duration
	kind kind
	rng  *rand.Rand // of this fault alone, so that a seed means the same whatever order things happen in
}

// kind is a kind of fault. do brings it about and returns when it is over, and says what it did it to.
type kind struct {
	name string
	do   func(ctx context.Context, f *faults, rng *rand.Rand) (target string, err error)
	// can says whether the world is one where it can be had; nil: in any.
	can func(w *world) bool
}

// faults brings faults about.
type faults struct {
	w *world
	h *history
	l *load
}

// kinds are all of them.
var kinds = []kind{
	{name: "kill worker", do: func(_ context.Context, f *faults, rng *rand.Rand) (string, error) {
		return f.place(rng, true).signal(syscall.SIGKILL).name, nil
	}},
	{name: "kill scanner", do: func(_ context.Context, f *faults, rng *rand.Rand) (string, error) {
		return f.place(rng, false).signal(syscall.SIGKILL).name, nil
	}},
	{name: "stop worker", do: func(ctx context.Context, f *faults, rng *rand.Rand) (string, error) { return f.stop(ctx, rng, true) }},
	{name: "stop scanner", do: func(ctx context.Context, f *faults, rng *rand.Rand) (string, error) { return f.stop(ctx, rng, false) }},
	{name: "rolling restart", do: rollingRestart},
	{name: "cut database", do: func(ctx context.Context, f *faults, rng *rand.Rand) (string, error) {
		return f.spoil(ctx, rng, f.any(rng).door.link, func(l *link) error { l.cut(); return nil })
	}},
	{name: "cut NATS", do: func(ctx context.Context, f *faults, rng *rand.Rand) (string, error) {
		return f.spoil(ctx, rng, f.natsLink(rng), func(l *link) error { l.cut(); return nil })
	}},
	{name: "half-open database", do: func(ctx context.Context, f *faults, rng *rand.Rand) (string, error) {
		return f.spoil(ctx, rng, f.any(rng).door.link, func(l *link) error { return l.spoil("timeout", direction(rng), `"timeout":0`) })
	}},
	{name: "half-open NATS", do: func(ctx context.Context, f *faults, rng *rand.Rand) (string, error) {
		return f.spoil(ctx, rng, f.natsLink(rng), func(l *link) error { return l.spoil("timeout", direction(rng), `"timeout":0`) })
	}},
	{name: "slow link", do: func(ctx context.Context, f *faults, rng *rand.Rand) (string, error) {
		return f.spoil(ctx, rng, f.link(rng), func(l *link) error { return l.spoil("latency", direction(rng), `"latency":120,"jitter":80`) })
	}},
	{name: "narrow link", do: func(ctx context.Context, f *faults, rng *rand.Rand) (string, error) {
		return f.spoil(ctx, rng, f.link(rng), func(l *link) error { return l.spoil("bandwidth", direction(rng), `"rate":24`) })
	}},
	{name: "clock jumps", do: clockJumps},
	{name: "restarts (40001)", do: func(_ context.Context, f *faults, rng *rand.Rand) (string, error) {
		return f.arm(rng, 12, []int{faultproxy.Commit, 1, 2, 3}, faultproxy.Restart)
	}},
	{name: "ambiguous commits", do: func(_ context.Context, f *faults, rng *rand.Rand) (string, error) {
		return f.arm(rng, 8, []int{faultproxy.Commit}, faultproxy.UnknownApplied, faultproxy.UnknownDropped, faultproxy.CutBefore,
			faultproxy.CutDuring, faultproxy.CutAfter, faultproxy.Late, faultproxy.Stall)
	}},
	{name: "crash database", do: crashDatabase, can: func(w *world) bool { return !w.external }},
	{name: "kill NATS leader", do: killLeader},
	{name: "lose stream tail", do: loseTail, can: func(w *world) bool { return len(w.nodes) == 1 }},
	{name: "disk full", do: diskFull, can: func(w *world) bool { return w.nodes[0].mounted }},
}

// extra is how often each kind of more comes besides, in a minute.
const extra = 5

// schedule is what goes wrong when: each kind that can be had once, in some order, and again until the time is over, and
// those named in more some times besides.
func schedule(w *world, seed uint64, total time.Duration, more []string) (plan []planned, left []string) {
	rng := rand.New(rand.NewPCG(seed, 1000))
	var can []kind
	for _, k := range kinds {
		if k.can == nil || k.can(w) {
			can = append(can, k)
		} else {
			left = append(left, k.name)
		}
	}
	rounds := max(1, int(total/(time.Duration(len(can))*3*time.Second)))
	gap := total / time.Duration(rounds*len(can)+1)
	for range rounds {
		for _, i := range rng.Perm(len(can)) {
			n := uint64(len(plan) + 1)
			plan = append(plan, planned{at: time.Duration(n) * gap, kind: can[i], rng: rand.New(rand.NewPCG(seed, 2000+n))})
		}
	}
	for _, name := range more {
		k := kinds[slices.IndexFunc(kinds, func(k kind) bool { return k.name == name })]
		count := extra * max(1, int(total/time.Minute))
		for i := range count {
			n := uint64(len(plan) + 1)
			at := total * time.Duration(2*i+1) / time.Duration(2*count)
			plan = append(plan, planned{at: at, kind: k, rng: rand.New(rand.NewPCG(seed, 2000+n))})
		}
	}
	slices.SortStableFunc(plan, func(a, b planned) int { return int(a.at - b.at) })
	return plan, left
}

// run brings the faults of a schedule about and returns when all are over.
func (f *faults) run(ctx context.Context, plan []planned) {
	var all sync.WaitGroup
	defer all.Wait()
	began := time.Now()
	for _, p := range plan {
		if !pause(ctx, time.Until(began.Add(p.at))) {
			return
		}
		all.Go(func() {
			from := time.Now()
			target, err := p.kind.do(ctx, f, p.rng)
			switch {
			case errors.Is(err, errInTheWay):
				f.h.note("no %s of %s: %v", p.kind.name, target, err)
				return
			case err != nil:
				f.h.wrong("fault %q: %v", p.kind.name, err)
			}
			f.h.fault(fault{kind: p.kind.name, target: target, from: from})
		})
	}
}

// errInTheWay: nothing was done.
var errInTheWay = errors.New("another fault is in the way")

// place is one of a worker or a scanner.
func (f *faults) place(rng *rand.Rand, ofWorker bool) *place {
	for {
		if p := f.any(rng); (p.program != scanner) == ofWorker {
			return p
		}
	}
}

func (f *faults) any(rng *rand.Rand) *place { return f.w.places[rng.IntN(len(f.w.places))] }

func (f *faults) natsLink(rng *rand.Rand) *link {
	p := f.any(rng)
	return p.nats[rng.IntN(len(p.nats))]
}

func (f *faults) link(rng *rand.Rand) *link {
	if rng.IntN(2) == 0 {
		return f.natsLink(rng)
	}
	return f.any(rng).door.link
}

func direction(rng *rand.Rand) string { return []string{up, down}[rng.IntN(2)] }

// between is a time between half a lease and a lease and a half: some are short enough to be lived through.
func between(rng *rand.Rand) time.Duration {
	return lease/2 + time.Duration(rng.Int64N(int64(lease)))
}

// stop stops a process beyond its lease, until others have what it had, and go on with it.
func (f *faults) stop(ctx context.Context, rng *rand.Rand, ofWorker bool) (string, error) {
	p := f.place(rng, ofWorker)
	d := lease + lease/4 + time.Duration(rng.Int64N(int64(lease/2)))
	from := time.Now()
	proc := p.signal(syscall.SIGSTOP)
	pause(ctx, d)
	p.mu.Lock()
	_ = proc.cmd.Process.Signal(syscall.SIGCONT) // it may be gone
	p.mu.Unlock()
	f.h.stopped(proc.name, from)
	return proc.name, nil
}

func rollingRestart(_ context.Context, f *faults, _ *rand.Rand) (string, error) {
	for _, p := range f.w.places {
		if p.program == scanner {
			continue
		}
		proc := p.signal(syscall.SIGTERM)
		select {
		case <-proc.done:
		case <-time.After(2 * lease): // it may be one that is stopped or cut off
		}
	}
	return "workers", nil
}

// spoil spoils a link for a while.
func (f *faults) spoil(ctx context.Context, rng *rand.Rand, l *link, how func(*link) error) (string, error) {
	if err := how(l); err != nil { // another fault has it already
		return l.proxy.Name, errInTheWay
	}
	pause(ctx, between(rng))
	return l.proxy.Name, l.heal()
}

// clockJumps lets the clock that a process is told jump forward or back.
func clockJumps(ctx context.Context, f *faults, rng *rand.Rand) (string, error) {
	p := f.any(rng)
	g := 1 + rng.IntN(2)
	if err := p.door.turn(g); err != nil {
		return p.name, err
	}
	pause(ctx, between(rng))
	return fmt.Sprintf("%s by %v", p.name, skews[g]), p.door.turn(0)
}

// arm lets transactions of all processes fail.
func (f *faults) arm(rng *rand.Rand, each int, at []int, how ...faultproxy.Kind) (string, error) {
	for _, p := range f.w.places {
		for range each {
			p.door.gateway[0].Arm(faultproxy.Fault{Kind: how[rng.IntN(len(how))], At: at[rng.IntN(len(at))]})
		}
	}
	return fmt.Sprintf("%d of each process", each), nil
}

func crashDatabase(ctx context.Context, f *faults, rng *rand.Rand) (string, error) {
	f.w.dbMu.Lock()
	defer f.w.dbMu.Unlock()
	if err := f.w.killDatabase(); err != nil {
		return "all of it", err
	}
	pause(ctx, between(rng)/4)
	return "all of it", f.w.startDatabase(context.WithoutCancel(ctx))
}

// killLeader kills the server that leads the stream of events.
func killLeader(ctx context.Context, f *faults, rng *rand.Rand) (string, error) {
	f.w.natsMu.Lock()
	defer f.w.natsMu.Unlock()
	n := f.w.leader(ctx)
	return n.name, f.restart(ctx, n, func() error {
		n.stop(syscall.SIGKILL)
		pause(ctx, between(rng)/4)
		return nil
	})
}

// restart starts a server again after something was done to it. What it had acknowledged may be lost by that.
func (f *faults) restart(ctx context.Context, n *node, meanwhile func() error) error {
	f.l.publishing.Lock()
	defer f.l.publishing.Unlock()
	f.l.restarts.Add(1)
	if err := meanwhile(); err != nil {
		return err
	}
	if err := n.start(); err != nil {
		return err
	}
	return within(context.WithoutCancel(ctx), patience, "the stream of commands", func() error {
		look, cancel := context.WithTimeout(context.WithoutCancel(ctx), 2*time.Second)
		defer cancel()
		s, err := f.w.js.Stream(look, "RV_COMMANDS")
		if err != nil {
			return err
		}
		f.h.kept(s.CachedInfo().State.LastSeq)
		return nil
	})
}

// leader is the server that leads the stream of events.
func (w *world) leader(ctx context.Context) *node {
	look, cancel := context.WithTimeout(ctx, 2*time.Second)
	defer cancel()
	if s, err := w.js.Stream(look, "RV_EVENTS"); err == nil && s.CachedInfo().Cluster != nil {
		for _, n := range w.nodes {
			if n.name == s.CachedInfo().Cluster.Leader {
				return n
			}
		}
	}
	return w.nodes[0]
}

// loseTail takes a copy of the server's store, and a while later puts it in the place of what the server then has.
func loseTail(ctx context.Context, f *faults, rng *rand.Rand) (string, error) {
	f.w.natsMu.Lock()
	defer f.w.natsMu.Unlock()
	n := f.w.nodes[0]
	backup := filepath.Join(f.w.dir, "backup")
	err := f.restart(ctx, n, func() error {
		n.stop(syscall.SIGTERM)
		return copyDir(backup, n.store)
	})
	if err != nil {
		return n.name, err
	}
	pause(ctx, between(rng)/2)
	return n.name, f.restart(ctx, n, func() error {
		n.stop(syscall.SIGKILL)
		if err := empty(n.store); err != nil {
			return err
		}
		f.h.rewound()
		return copyInto(n.store, backup)
	})
}

// diskFull fills the file system of a server's store for a while.
func diskFull(ctx context.Context, f *faults, rng *rand.Rand) (string, error) {
	f.w.natsMu.Lock()
	defer f.w.natsMu.Unlock()
	n := f.w.nodes[rng.IntN(len(f.w.nodes))]
	ballast := filepath.Join(n.store, "ballast")
	if err := fill(ballast); err != nil {
		return n.name, err
	}
	pause(ctx, between(rng)/2)
	if err := os.Remove(ballast); err != nil {
		return n.name, err
	}
	return n.name, f.restart(ctx, n, func() error { // it does not go on by itself
		n.stop(syscall.SIGTERM)
		return nil
	})
}

// fill writes a file until the file system is full.
func fill(path string) error {
	f, err := os.Create(path)
	if err != nil {
		return err
	}
	defer f.Close()
	block := make([]byte, 1<<20)
	for size := len(block); size > 0; size /= 2 {
		for {
			if _, err := f.Write(block[:size]); err != nil {
				break // full, for blocks of this size
			}
		}
	}
	return nil
}

// Command torture breaks Reveille on purpose, and proves that nothing broke. It starts a database, NATS servers, workers
// and scanners as processes, has load put on them, brings faults about, waits until the system is idle, and holds what is
// left against what was sent, by a checker that knows the contract with the users and the tables, and nothing else.
//
//	make torture                    a minute, each kind of fault at least once
//	make torture TIME=1h NATS=3     an hour, on a cluster
//	make torture SEED=7             the same schedule of faults and the same load again
//
// A seed decides what is sent and what goes wrong when; it does not decide how the processes interleave, so the same seed
// shows a rare fault again only with luck. What is wrong is printed with the slice of history around it, and the exit
// code is 1; the folder with all logs stays then.
package main

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"os/signal"
	"slices"
	"strings"
	"syscall"
	"time"

	"github.com/alecthomas/kong"
	"github.com/nats-io/nats.go"

	"reveille/internal/torture/truth"
)

type options struct {
	Seed        uint64        `help:"Seed of the schedule and of the load; 0 takes a fresh one."`
	Time        time.Duration `help:"How long faults go on." default:"60s"`
	Nats        int           `help:"NATS servers." enum:"1,3" default:"1"`
	Workers     int           `help:"Workers at once; one in three has a handler in Go." default:"3"`
	Scanners    int           `help:"Scanners at once." default:"2"`
	Race        bool          `help:"Build the programs with the race detector."`
	Mutant      string        `help:"Build the programs with a rule broken; the run succeeds iff that is found." placeholder:"NAME"`
	DatabaseURL string        `help:"A database to use, which must be empty; it is not taken away then." env:"RV_TEST_TORTURE_DATABASE_URL"`
	Keep        bool          `help:"Keep the folder with the logs."`
}

// settleLimit bounds how long the system may take to be idle when the faults have stopped.
const settleLimit = 90 * time.Second

// mutantLimit is how long it may take to find a mutant.
const mutantLimit = 5 * time.Minute

// hunt runs a mutant, under one seed after the other, until it is found. Only what the mutant's rule is found by counts.
func hunt(ctx context.Context, o options) (found int, err error) {
	began := time.Now()
	for {
		start := time.Now()
		found, err = run(ctx, o)
		if found > 0 || err != nil || time.Since(began)+time.Since(start) > mutantLimit { // another would take as long
			return found, err
		}
		o.Seed++
	}
}

func main() {
	var o options
	kong.Parse(&o, kong.Name("torture"), kong.Description("Breaks Reveille on purpose, and proves that nothing broke."))
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM)
	defer stop()
	if o.Seed == 0 {
		o.Seed = rand.Uint64()
	}
	do := run
	if o.Mutant != "" {
		do = hunt
	}
	found, err := do(ctx, o)
	switch {
	case err != nil:
		fmt.Fprintln(os.Stderr, "torture:", err)
		os.Exit(1)
	case o.Mutant != "" && found == 0:
		fmt.Printf("the mutant %q was not found\n", o.Mutant)
		os.Exit(1)
	case o.Mutant == "" && found > 0:
		os.Exit(1)
	}
}

// run is one run. It returns how many violations were found.
func run(ctx context.Context, o options) (found int, err error) {
	fmt.Printf("seed %d: make torture SEED=%d TIME=%v NATS=%d\n", o.Seed, o.Seed, o.Time, o.Nats)
	h := newHistory()
	w, err := newWorld(ctx, o, h)
	defer func() {
		w.close()
		if !o.Keep && (err == nil && found == 0 || o.Mutant != "") {
			err = errors.Join(err, w.remove())
		} else {
			fmt.Println("the logs and the handlers' lines are in", w.dir)
		}
	}()
	if err != nil {
		return 0, err
	}
	heard, err := w.nc.Subscribe("rv.event.>", func(m *nats.Msg) { h.hear(truth.Dir(w.dir), m) })
	if err != nil {
		return 0, err
	}
	if err := heard.SetPendingLimits(-1, -1); err != nil {
		return 0, err
	}
	l := &load{w: w, h: h, until: time.Now().Add(o.Time)}
	watching, watched := context.WithCancel(ctx)
	defer watched()
	go h.watchStalls(watching)
	m, err := findMutant(o.Mutant)
	if err != nil {
		return 0, err
	}
	plan, left := schedule(w, o.Seed, o.Time, m.faults)
	h.began = time.Now()
	loading, stopLoading := context.WithTimeout(ctx, o.Time+2*time.Second)
	defer stopLoading()
	done := make(chan struct{})
	go func() {
		defer close(done)
		l.run(loading, o.Seed)
	}()
	f := &faults{w: w, h: h, l: l}
	f.run(loading, plan)
	for _, p := range w.places {
		if err := p.heal(); err != nil {
			return 0, err
		}
	}
	stopLoading()
	<-done
	if ctx.Err() != nil {
		return 0, ctx.Err()
	}
	began := time.Now()
	if err := w.settle(ctx); err != nil {
		h.wrong("the system is not idle %v after the faults stopped (I32): %v\n%s", settleLimit, err, w.waiting(ctx))
	}
	idle := time.Since(began)
	if err := w.stop(); err != nil {
		h.wrong("%v", err)
	}
	v, err := verify(ctx, w, h)
	if err != nil {
		return 0, err
	}
	v.report(o, idle, left)
	if o.Mutant == "" {
		return len(v.found), nil
	}
	found = m.found(v.found)
	fmt.Printf("%d of them are what the mutant is found by: %q\n", found, m.finds)
	return found, nil
}

// settle waits until nothing is left to do. The order matters: what was queued is in the tables once it is not.
func (w *world) settle(ctx context.Context) error {
	began, said := time.Now(), 0
	say := func(err error) error {
		if waited := int(time.Since(began) / (15 * time.Second)); waited > said {
			said = waited
			w.history.note("waiting for the system to be idle: %v", err)
		}
		return err
	}
	return within(ctx, settleLimit, "the system to be idle", func() error {
		look, cancel := context.WithTimeout(ctx, 5*time.Second)
		defer cancel()
		queued, err := w.queued(look)
		if err != nil {
			return err
		}
		busy, err := w.busy(look)
		if err != nil {
			return err
		}
		claims, err := w.number(look, "SELECT count(*) FROM claims")
		if err != nil {
			return err
		}
		unrelayed, err := w.number(look, "SELECT count(*) FROM sessions WHERE relayed_seq < last_seq")
		if err != nil {
			return err
		}
		events, err := w.number(look, "SELECT COALESCE(sum(last_seq), 0) FROM sessions")
		if err != nil {
			return err
		}
		stream, err := w.js.Stream(look, "RV_EVENTS")
		if err != nil {
			return err
		}
		lost := events - int(stream.CachedInfo().State.Msgs) // a scanner sees to them
		if queued+busy+claims+unrelayed > 0 || lost != 0 {
			return say(fmt.Errorf("%d commands, %d sessions with work, %d claims, %d sessions whose events are not published, %d events that the stream lacks",
				queued, busy, claims, unrelayed, lost))
		}
		return nil
	})
}

// waiting is what is left in the queues, and who is to take it.
func (w *world) waiting(ctx context.Context) string {
	ctx, cancel := context.WithTimeout(ctx, 10*time.Second)
	defer cancel()
	return w.queue(ctx, "RV_COMMANDS") + w.queue(ctx, "RV_READY")
}

func (w *world) queue(ctx context.Context, stream string) string {
	s, err := w.js.Stream(ctx, stream)
	if err != nil {
		return err.Error()
	}
	var b strings.Builder
	consumers := s.ListConsumers(ctx)
	for c := range consumers.Info() {
		fmt.Fprintf(&b, "durable %s: delivered up to %d, all acknowledged up to %d, %d to come, %d in hand, %d pulls\n",
			c.Name, c.Delivered.Stream, c.AckFloor.Stream, c.NumPending, c.NumAckPending, c.NumWaiting)
	}
	state := s.CachedInfo().State
	for seq, n := state.FirstSeq, 0; seq <= state.LastSeq && n < 10; seq++ {
		if m, err := s.GetMsg(ctx, seq); err == nil {
			n++
			fmt.Fprintf(&b, "message %d of %s: %s %.80s\n", seq, m.Time.Format(time.RFC3339Nano), m.Subject, m.Data)
		}
	}
	return b.String()
}

// report prints what was done, and what is wrong.
func (v *verifier) report(o options, idle time.Duration, left []string) {
	for _, text := range v.found {
		fmt.Printf("VIOLATION: %s\n", text)
	}
	byKind := map[string]int{}
	for _, f := range v.h.faults {
		byKind[f.kind]++
	}
	c := v.counts
	fmt.Printf("\n%d sessions, %d commands (%d malformed), %d events, %d handler calls, %d quarantined\n",
		c.sessions, c.commands, len(v.h.rejects), c.events, c.calls, c.quarantined)
	fmt.Printf("faults by kind:")
	for _, k := range kinds {
		if byKind[k.name] > 0 {
			fmt.Printf(" %s %d,", k.name, byKind[k.name])
		}
	}
	fmt.Printf(" %d in all\n", len(v.h.faults))
	if len(left) > 0 {
		fmt.Printf("not possible here: %q\n", left)
	}
	if len(c.overlaps) > 0 {
		fmt.Printf("handlers of workers that could not run overlapped with the next %d times, for at most %v (I7)\n", len(c.overlaps), slices.Max(c.overlaps))
	}
	if len(v.h.stalls) > 0 {
		fmt.Printf("this machine stood still %d times for more than %v\n", len(v.h.stalls), stall)
	}
	fmt.Printf("linearizable: %d sessions, not decided in time: %d\n", c.linear, c.unknown)
	fmt.Printf("idle %.1fs after the faults; violations: %d (seed %d)\n", idle.Seconds(), len(v.found), o.Seed)
}

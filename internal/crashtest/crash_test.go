package crashtest

import (
	"context"
	"math/rand/v2"
	"os"
	"strconv"
	"sync"
	"testing"

	"reveille/bus"
	"reveille/claims"
)

// seedVariable names the environment variable with the seed of a run that is to be done again.
const seedVariable = "RV_TEST_CRASH_SEED"

// Processes at once.
const (
	workers  = 3
	scanners = 2
)

// trial is one loop of kills.
type trial struct {
	name  string
	kills int // in all, at the least
	// scanner are the flags of the scanners.
	scanner []string
	// deadly is a session whose every step kills its worker.
	deadly claims.SessionID
	// reasons are those for which a session may be quarantined.
	reasons []claims.Reason
}

// Seventy kills without a limit on recoveries, where all that was interrupted in vain is closed: every session runs on.
// Thirty with the limits as they are, where sessions are quarantined.
var trials = []trial{
	{
		name: limitless, kills: 70,
		scanner: []string{"--max-recoveries", "1000", "--max-takeovers", "1000", "--uncertain-cancel", "interrupt"},
	},
	{
		name: limited, kills: 30, deadly: "deadly",
		reasons: []claims.Reason{claims.ReasonOutcomeUnknown, claims.ReasonAttemptsExhausted, claims.ReasonNoProgress},
	},
}

// From any crash every session runs on, is cancelled or is quarantined, and every input is covered by one step and its
// continuations: workers and scanners are killed at every point of the table, a hundred times, under load.
func TestI32I23KilledAtEveryCrashPoint(t *testing.T) {
	seed := rand.Uint64()
	if text := os.Getenv(seedVariable); text != "" {
		var err error
		if seed, err = strconv.ParseUint(text, 10, 64); err != nil {
			t.Fatalf("%s: %v", seedVariable, err)
		}
	}
	t.Logf("%s=%d does this run again", seedVariable, seed)
	ran, total, reached := 0, 0, map[*point]bool{}
	for i, tr := range trials {
		t.Run(tr.name, func(t *testing.T) {
			ran++
			plan := newPlan(tr, rand.New(rand.NewPCG(seed, uint64(i))))
			tr.run(t, seed+uint64(i), plan)
			total += plan.kills
			for p := range plan.reached {
				reached[p] = true
			}
		})
	}
	if t.Failed() || ran < len(trials) { // one was asked for by its name
		return
	}
	if total < 100 {
		t.Errorf("%d kills, want a hundred", total)
	}
	for _, p := range points {
		if !reached[p] {
			t.Errorf("nobody was killed at %q", p)
		}
	}
}

// run runs the load and the kills, and checks what is left.
func (tr trial) run(t *testing.T, seed uint64, plan *plan) {
	w := newWorld(t)
	for n := range workers {
		w.add(worker, n, "--exec", w.handler(), "--slots", "12", "--history", "0", "--grace", "0s", "--kill-after", "500ms",
			"--retry-base", retryBase.String(), "--retry-max", "1s")
	}
	for n := range scanners {
		w.add(scanner, n, append([]string{"--every", "300ms"}, tr.scanner...)...)
	}
	l := &load{w: w, pub: bus.NewPublisher(w.conn), wanted: plan.wanted}
	if tr.deadly != "" {
		for _, p := range w.places {
			p.mu.Lock()
			p.deadly = string(tr.deadly)
			p.mu.Unlock()
		}
		l.publish(sent{session: tr.deadly, kind: claims.Wake, input: "deadly", delivery: claims.Queue, body: plain})
	}
	ctx, stopLoad := context.WithCancel(w.ctx)
	defer stopLoad()
	var loading, killing sync.WaitGroup
	loading.Go(func() { l.run(ctx, seed) })
	for _, p := range w.places {
		killing.Go(func() {
			for at := plan.next(p.program); at != nil && p.kill(at); at = plan.next(p.program) {
				plan.done(at)
			}
		})
	}
	killing.Wait()
	stopLoad()
	loading.Wait()
	w.until("all sessions idle or quarantined, all events relayed, all commands acknowledged", func() bool { return w.idle() })
	w.stop()
	if w.ctx.Err() != nil {
		return
	}
	t.Logf("%d kills, %d commands to %d sessions, %d quarantined", plan.kills, len(l.sent),
		len(w.texts("SELECT session_id FROM sessions")), len(w.texts("SELECT session_id FROM quarantines")))
	verify(w, l.sent, tr)
}

// idle reports whether nothing is left to do. The order matters: what was queued is in the tables once it is not.
func (w *world) idle() bool {
	return w.queued() == 0 && w.busy() == 0 &&
		len(w.texts("SELECT session_id FROM claims")) == 0 &&
		len(w.texts("SELECT session_id FROM sessions WHERE relayed_seq < last_seq")) == 0
}

// plan is what is killed where, and what was.
type plan struct {
	mu      sync.Mutex // guards all below; trial.run reads kills and reached when nobody kills any more
	rng     *rand.Rand
	all     []*point            // of the trial
	left    map[string][]*point // by program, next first
	armed   map[*point]int
	reached map[*point]bool
	kills   int
}

// newPlan takes each point of the trial once, and then as many at random as make up the kills.
func newPlan(tr trial, rng *rand.Rand) *plan {
	pl := &plan{rng: rng, left: map[string][]*point{}, armed: map[*point]int{}, reached: map[*point]bool{}}
	for _, p := range points {
		if p.trial == "" || p.trial == tr.name {
			pl.all = append(pl.all, p)
		}
	}
	chosen := append([]*point(nil), pl.all...)
	if tr.name == limited { // the other trial goes to them all
		chosen = nil
		for _, p := range pl.all {
			if p.trial == tr.name {
				chosen = append(chosen, p)
			}
		}
	}
	for len(chosen) < tr.kills {
		chosen = append(chosen, pl.all[rng.IntN(len(pl.all))])
	}
	rng.Shuffle(len(chosen), func(i, j int) { chosen[i], chosen[j] = chosen[j], chosen[i] })
	for _, p := range chosen {
		pl.left[p.program] = append(pl.left[p.program], p)
	}
	return pl
}

// next is where a process of a program is to be killed next; nil: nowhere any more. While a scanner waits for what a
// worker's death leaves, a worker is killed so, also where the plan has no such kill left.
func (pl *plan) next(program string) *point {
	pl.mu.Lock()
	defer pl.mu.Unlock()
	p := pl.choose(program)
	if p != nil {
		pl.armed[p]++
	}
	return p
}

func (pl *plan) choose(program string) *point {
	if program == worker {
		if need := pl.needed(); need != "" {
			var leaving []*point
			for _, p := range pl.all {
				if p.leaves == need {
					leaving = append(leaving, p)
				}
			}
			return leaving[pl.rng.IntN(len(leaving))]
		}
	}
	if left := pl.left[program]; len(left) > 0 {
		pl.left[program] = left[1:]
		return left[0]
	}
	if program == worker && pl.scannersWait() { // for claims that expire
		for {
			if p := pl.all[pl.rng.IntN(len(pl.all))]; p.program == worker && p.row == rows[3] {
				return p
			}
		}
	}
	return nil
}

// needed is what a scanner that is to be killed waits for, and no worker is about to leave.
func (pl *plan) needed() string {
	coming := map[string]bool{}
	for p, n := range pl.armed {
		if n > 0 && p.leaves != "" {
			coming[p.leaves] = true
		}
	}
	for _, p := range pl.all { // in their order, so that a seed means the same again
		if pl.armed[p] > 0 && p.needs != "" && !coming[p.needs] {
			return p.needs
		}
	}
	return ""
}

// wanted are the scripts that lead to where processes are to be killed now.
func (pl *plan) wanted() (scripts []string) {
	pl.mu.Lock()
	defer pl.mu.Unlock()
	for _, p := range pl.all {
		for range pl.armed[p] {
			scripts = append(scripts, p.by...)
		}
	}
	return scripts
}

func (pl *plan) scannersWait() bool {
	for p, n := range pl.armed {
		if n > 0 && p.program == scanner {
			return true
		}
	}
	return len(pl.left[scanner]) > 0
}

// done notes a kill.
func (pl *plan) done(p *point) {
	pl.mu.Lock()
	defer pl.mu.Unlock()
	pl.armed[p]--
	pl.kills++
	pl.reached[p] = true
}

package systemtest

import (
	"context"
	"fmt"
	"slices"
	"sync"
	"testing"

	"reveille/bus"
	"reveille/claims"
)

// With all slots of all workers busy, wakes are still admitted and nothing is
// parked anywhere; steers reach running sessions at their next step, interrupts
// hit; and each slot that frees, on whichever worker, takes the session that
// became ready first, past which no new wake gets.
func TestSaturation(t *testing.T) {
	const slots, ordered, flood = 2, 10, 200
	w := newWorld(t)
	w.askSteps()
	w.asking(command, "a", "--slots", fmt.Sprint(slots))
	w.asking(inGo, "b", "--slots", fmt.Sprint(slots))
	w.start("scanner", "scan")
	var running []*call
	for i := range 2 * slots {
		w.publish(wakeOf(session("run", i), input("in", claims.Queue)))
		running = append(running, w.steps.next("a step in each slot"))
	}
	for i := range ordered {
		w.publish(wakeOf(session("next", i), input("in", claims.Queue)))
		w.until("it is announced", func() bool { n, _ := w.messages("RV_READY"); return n == uint64(i)+1 })
	}
	for i := range flood {
		w.publish(wakeOf(session("flood", i), input("in", claims.Queue)))
	}
	w.until("all wakes are admitted, with no slot free", func() bool {
		return w.count("SELECT count(*) FROM inputs WHERE session_id LIKE 'flood%'") == flood
	})
	w.saturated(running)

	// A steer joins the running session's next step; its slot stays its own.
	steered := running[0]
	w.publish(wakeOf(steered.Request.Session, input("steer", claims.Steer)))
	w.until("the steer is admitted", func() bool {
		return w.count("SELECT count(*) FROM inputs WHERE input_id = 'steer'") == 1
	})
	w.saturated(running)
	steered.end(w)
	running[0] = w.steps.next("the steered step")
	if r := running[0].Request; r.Session != steered.Request.Session || r.Execution != steered.Request.Execution || r.Index != 2 || running[0].inputs() != "steer" {
		t.Fatalf("after the steer, %s runs step %d with %q", r.Session, r.Index, running[0].inputs())
	}

	// Interrupts hit a running session of each worker, and what is next takes the slot.
	next, interrupted := 0, []claims.SessionID{}
	for _, worker := range []string{"a", "b"} {
		i := slices.IndexFunc(running, func(c *call) bool { return c.Worker == worker && c != running[0] })
		hit := running[i]
		interrupted = append(interrupted, hit.Request.Session)
		w.publish(interruptOf(hit.Request.Session))
		hit.stopped(w)
		running[i] = w.takes(worker, next)
		next++
	}

	// Only b frees its slots, while sessions behind those are woken all the time.
	quiet := w.wakeAgain(flood)
	for ; next < ordered; next++ {
		i := slices.IndexFunc(running, func(c *call) bool { return c.Worker == "b" })
		running[i].end(w)
		running[i] = w.takes("b", next)
	}
	quiet()
	w.applied()
	w.saturated(running)
	for _, c := range running {
		c.end(w)
	}
	for range flood {
		w.steps.next("a step of the flood").end(w)
	}
	w.idle(2*slots + 1 + ordered + flood)
	w.verify()
	for _, s := range interrupted {
		w.wantLog(s, `input.admitted(in) execution.started input.promoted(in) step.started(in)
			execution.cancelling step.interrupted execution.ended(interrupted)`)
	}
}

// wakeAgain wakes the sessions of the flood once more, one after the other as
// fast as it can, until it is told to be quiet.
func (w *world) wakeAgain(flood int) (quiet func()) {
	stop := make(chan struct{})
	var wg sync.WaitGroup
	for i := range 4 {
		wg.Go(func() {
			p := bus.NewPublisher(w.conn)
			for n := i; ; n++ {
				select {
				case <-stop:
					return
				default:
				}
				if _, err := p.Publish(context.Background(), wakeOf(session("flood", n%flood), nil), bus.Publishing{}); err != nil {
					w.t.Errorf("waking: %v", err)
					return
				}
			}
		})
	}
	quiet = sync.OnceFunc(func() {
		close(stop)
		wg.Wait()
	})
	w.t.Cleanup(quiet)
	return quiet
}

// saturated checks that the steps run on, and nothing else does.
func (w *world) saturated(running []*call) {
	w.t.Helper()
	for _, c := range running {
		if !c.running() {
			w.t.Fatalf("the step of %s is over", c.Request.Session)
		}
	}
	w.steps.none("with no slot free")
	if n := w.count("SELECT count(*) FROM claims"); n != len(running) {
		w.t.Errorf("%d claims with %d steps", n, len(running))
	}
}

// takes wants the n-th ordered session to be the next that starts, and where.
func (w *world) takes(worker string, n int) *call {
	w.t.Helper()
	c := w.steps.next("the freed slot takes a session")
	if want := session("next", n); c.Request.Session != want || c.Worker != worker {
		w.t.Fatalf("the freed slot of %s: %s starts on %s, want %s", worker, c.Request.Session, c.Worker, want)
	}
	return c
}

func session(name string, n int) claims.SessionID {
	return claims.SessionID(fmt.Sprintf("%s%d", name, n))
}

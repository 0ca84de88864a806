package systemtest

import (
	"testing"
	"time"

	"reveille/claims"
	"reveille/internal/faultproxy"
	"reveille/internal/systemtest/ask"
	"reveille/sql"
)

// times are those of the events of a type, by the database's clock.
func (w *world) times(log []claims.Record, typ claims.EventType) (out []time.Time) {
	w.t.Helper()
	for _, r := range log {
		if r.Type != typ {
			continue
		}
		at, err := time.Parse(claims.TimeFormat, r.Time)
		if err != nil {
			w.t.Fatal(err)
		}
		out = append(out, at)
	}
	return out
}

// ended waits until the last event of a session is the end of an execution with
// an outcome.
func (w *world) ended(session claims.SessionID, outcome claims.ExecutionOutcome) {
	w.t.Helper()
	w.until("the execution of "+string(session)+" ended as "+string(outcome), func() bool {
		log := w.records(session)
		return len(log) > 0 && log[len(log)-1].Type == claims.ExecutionEnded &&
			dataOf[claims.ExecutionEndedData](w.t, log[len(log)-1]).Outcome == outcome
	})
}

// continues wants a step to continue another in a way.
func (c *call) continues(w *world, kind claims.ContinuationKind, attempt int, before *call) {
	w.t.Helper()
	want := claims.Continues{Kind: kind, Attempt: attempt, Step: before.Request.Step}
	if got := c.Request.Continues; got == nil || *got != want {
		w.t.Fatalf("the step continues %+v, want %+v", got, want)
	}
}

// A step that exits with 75 is tried again after its backoff, whatever dies
// meanwhile: all processes and the database are killed in two backoffs, and the
// step comes back with its attempt number, on a worker of another kind, not
// before its time, up to --max-attempts.
func TestRetrySurvivesCrashesInItsBackoff(t *testing.T) {
	const base = 2 * time.Second // the shortest delay is half of it
	flags := []string{"--retry-base", base.String(), "--retry-max", base.String(), "--max-attempts", "3"}
	w := newLastingWorld(t)
	w.askSteps()
	w.asking(command, "w1", flags...)
	w.start("scanner", "scan1")
	w.publish(wakeOf("s", input("in", claims.Queue)))
	first := w.steps.of("s")
	for attempt, handler := range []string{inGo, byURL} {
		before := first
		if attempt > 0 {
			before = w.steps.of("s")
			before.continues(w, claims.KindRetry, attempt, first)
			first = before
		}
		before.answer(w, ask.Answer{Error: "not now", Retryable: true})
		w.ended("s", claims.OutcomeRetrying)
		w.crash()
		w.startDatabase()
		w.asking(handler, "again", flags...)
		w.start("scanner", "scan")
	}
	last := w.steps.of("s")
	last.continues(w, claims.KindRetry, 2, first)
	last.answer(w, ask.Answer{Error: "not now", Retryable: true})
	w.ended("s", claims.OutcomeFailed)
	w.publish(wakeOf("s", input("next", claims.Queue)))
	w.steps.of("s").end(w)
	w.idle(2)
	w.verify()
	w.wantLog("s", `input.admitted(in) execution.started input.promoted(in) step.started(in) step.failed(exit) execution.ended(retrying)
		execution.started step.started(in<retry1) step.failed(handler) execution.ended(retrying)
		execution.started step.started(in<retry2) step.failed(handler) execution.ended(failed)
		input.admitted(next) execution.started input.promoted(next) step.started(next) step.ended execution.ended(completed)`)
	log := w.records("s")
	started, failed := w.times(log, claims.StepStartedEvent), w.times(log, claims.StepFailedEvent)
	for i := range 2 {
		if waited := started[i+1].Sub(failed[i]); waited < base/2 {
			t.Errorf("attempt %d was started after %v, want at least %v", i+1, waited, base/2)
		}
	}
}

// A step that asks for another one has its promise in the transaction that ends
// it: killed before the next step starts, the session goes on with it.
func TestContinueSurvivesACrash(t *testing.T) {
	w := newLastingWorld(t)
	w.askSteps()
	reached, release := w.holdStatement(sql.ClaimStartStep)
	defer release()
	w.asking(inGo, "a")
	w.start("scanner", "scan1")
	w.publish(wakeOf("s", input("in", claims.Queue)))
	first := w.steps.of("s")
	first.answer(w, ask.Answer{Continue: true})
	select {
	case <-reached:
	case <-time.After(patience):
		t.Fatalf("not within %v: the next step is about to start", patience)
	}
	w.crash()
	release()
	w.startDatabase()
	w.asking(command, "b")
	w.start("scanner", "scan2")
	second := w.steps.of("s")
	second.continues(w, claims.KindContinue, 0, first)
	second.end(w)
	w.idle(1)
	w.verify()
	w.wantLog("s", `input.admitted(in) execution.started input.promoted(in) step.started(in) step.ended execution.ended(recovered)
		execution.started step.started(<continue0) step.ended execution.ended(completed)`)
}

// holdStatement has processes that start from here reach the database through a
// proxy, and holds the first of them that is about to send a statement, until it
// is released (or its process killed).
func (w *world) holdStatement(statement string) (reached <-chan struct{}, release func()) {
	w.t.Helper()
	var err error
	if w.proxy, err = faultproxy.New(w.db.URL(), 0); err != nil {
		w.t.Fatal(err)
	}
	proxy, held, open := w.proxy, make(chan struct{}), make(chan struct{})
	once, opened := make(chan struct{}, 1), false
	once <- struct{}{}
	proxy.Watch(func(at faultproxy.Moment, tx []faultproxy.Statement) bool {
		if at != faultproxy.BeforeStatement || tx[len(tx)-1].SQL != statement {
			return true
		}
		select {
		case <-once:
			close(held)
			<-open
		default:
		}
		return true
	})
	return held, func() {
		if !opened {
			opened = true
			close(open)
			proxy.Close()
			w.proxy = nil
		}
	}
}

// A session that always goes on yields after --max-steps: another that became
// ready meanwhile has its turn, and then it goes on in a new execution.
func TestMaxStepsYields(t *testing.T) {
	w := newWorld(t)
	w.askSteps()
	w.asking(command, "a", "--slots", "1", "--max-steps", "2")
	w.publish(wakeOf("greedy", input("in", claims.Queue)))
	first := w.steps.of("greedy")
	w.publish(wakeOf("other", input("in", claims.Queue)))
	w.until("the other one waits", func() bool { n, _ := w.messages("RV_READY"); return n == 1 })
	again := ask.Answer{Continue: true}
	first.answer(w, again)
	second := w.steps.next("its next step")
	second.continues(w, claims.KindContinue, 0, first)
	second.answer(w, again)
	other := w.steps.next("the other session's turn")
	if other.Request.Session != "other" {
		t.Fatalf("%s has its turn", other.Request.Session)
	}
	other.end(w)
	third := w.steps.next("its next execution")
	third.continues(w, claims.KindContinue, 0, second)
	if third.Request.Index != 1 {
		t.Errorf("its next execution begins with step %d", third.Request.Index)
	}
	third.end(w)
	w.idle(2)
	w.verify()
	w.wantLog("greedy", `input.admitted(in) execution.started input.promoted(in) step.started(in) step.ended
		step.started(<continue0) step.ended execution.ended(yielded)
		execution.started step.started(<continue0) step.ended execution.ended(completed)`)
}

// A step past --step-timeout is told to stop, fails with its own code, and is
// tried again.
func TestStepTimeout(t *testing.T) {
	for _, handler := range []string{command, inGo} {
		t.Run(handler, func(t *testing.T) {
			w := newWorld(t)
			w.askSteps()
			w.newHold() // stays closed
			flags := []string{"--step-timeout", "200ms", "--retry-base", "1s", "--max-attempts", "100"}
			var hasty *proc
			if handler == command {
				hasty = w.start("worker", "hasty", append(flags, "--exec", "read -r _ <"+newGate(t).fifo)...)
			} else {
				hasty = w.beginDoing("hasty", flags...)
				hasty.wait()
			}
			w.start("scanner", "scan")
			in := input("in", claims.Queue)
			in.Body = []byte(`"hold"`)
			w.publish(wakeOf("s", in))
			w.ended("s", claims.OutcomeRetrying)
			hasty.terminate()
			w.asking(handler, "patient")
			c := w.steps.of("s")
			failed := 0 // more than once where there was the time to try again before hasty ended
			for _, r := range w.records("s") {
				if r.Type != claims.StepFailedEvent {
					continue
				}
				failed++
				if code := dataOf[claims.Failure](t, r).Code; code != claims.CodeTimeout {
					t.Errorf("a step failed with code %s", code)
				}
			}
			if got := c.Request.Continues; got == nil || got.Kind != claims.KindRetry || got.Attempt != failed {
				t.Errorf("after %d attempts, the step continues %+v", failed, got)
			}
			c.end(w)
			w.idle(1)
			w.verify()
		})
	}
}

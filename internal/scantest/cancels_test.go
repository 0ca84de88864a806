package scantest

import (
	"errors"
	"testing"
	"time"

	"reveille/claims"
	"reveille/recovery"
)

// S1: an expired cancelled claim has a known outcome. It goes, and nothing of
// it stays: the session is free, and what waits goes on.
func TestS1I26DeclinedIsRemoved(t *testing.T) {
	for name, uncertain := range map[string]bool{"quarantine": false, "interrupt": true} { // of no meaning here
		t.Run(name, func(t *testing.T) {
			e := newEnv(t)
			worker := e.lease("worker")
			for _, id := range []claims.SessionID{"alone", "busy"} {
				declined := e.wake(id, worker)
				if err := e.store.Decline(t.Context(), declined.Claim, declined.Step, nil, "no", token()); err != nil {
					t.Fatal(err)
				}
			}
			e.wakeWith("busy", "", "in2", claims.Queue)
			e.expire(worker)
			if r := e.pass(recovery.Options{UncertainInterrupted: uncertain}); r.Done != 2 || r.Quarantined != 0 {
				t.Errorf("%+v", r)
			}
			for _, id := range []claims.SessionID{"alone", "busy"} {
				if e.number("claims", id) != int64(0) || e.number("continuations", id) != int64(0) || e.reason(id) != nil {
					t.Errorf("%s: the claim was not just removed", id)
				}
				e.tail(id, `execution.ended {"outcome":"declined"}`)
				if n := e.count(id, claims.SessionQuarantined, "") + e.count(id, claims.StepFailedEvent, ""); n != 0 {
					t.Errorf("%s: %d events tell of a failure or a quarantine", id, n)
				}
				if n := e.count(id, claims.StepInterruptedEvent, `{"reason":"no","joined":false}`); n != 1 {
					t.Errorf("%s: its step was closed %d times", id, n)
				}
			}
			if _, err := e.store.Acquire(t.Context(), "alone", acquisition(e.lease("worker"))); !errors.Is(err, claims.ErrNotReady) {
				t.Errorf("the declined session has something to run: %v", err)
			}
			next := e.wakeWith("alone", e.lease("worker"), "in2", claims.Queue)
			if next.Claim.Epoch != 2 || len(next.Step.Inputs) != 1 || next.Step.Inputs[0].ID != "in2" || next.Step.Continues != nil {
				t.Errorf("the free session started %+v", next)
			}
			next = e.acquire("busy", e.lease("worker"))
			if len(next.Step.Inputs) != 1 || next.Step.Inputs[0].ID != "in2" || next.Step.Continues != nil {
				t.Errorf("the session goes on with %+v", next.Step)
			}
		})
	}
}

// S1: nobody knows how an expired cancelling claim ended. It is quarantined,
// and neither a pass nor a wake ever runs it.
func TestS1I26CancellingIsQuarantined(t *testing.T) {
	e := newEnv(t)
	worker := e.lease("worker")
	e.wake("s", worker)
	e.interrupt("s")
	e.wakeWith("s", "", "in2", claims.Queue)
	e.expire(worker)
	s := e.scanner(e.parts(), recovery.Options{Reannounce: time.Microsecond})
	if r := s.Pass(t.Context()).Lanes[recovery.LaneClaims]; r.Quarantined != 1 || r.Done != 0 {
		t.Errorf("%+v", r)
	}
	e.tail("s",
		`session.quarantined {"lane":"claims","reason":"cancellation_outcome_unknown","detail":"its worker was lost while it cancelled the step"}`,
		`execution.ended {"outcome":"quarantined"}`)
	for range 3 {
		for lane, r := range s.Pass(t.Context()).Lanes {
			if r.Seen != 0 && lane != recovery.LaneRelay {
				t.Errorf("it is in lane %s: %+v", lane, r)
			}
		}
	}
	if _, err := e.store.Acquire(t.Context(), "s", acquisition(e.lease("worker"))); !errors.Is(err, claims.ErrQuarantined) {
		t.Errorf("acquiring it: %v", err)
	}
	if len(e.announced) != 0 {
		t.Errorf("announced %v", e.announced)
	}
	if started := e.wakeWith("s", e.lease("worker"), "in1", claims.Queue); started.Claim.Execution != "" {
		t.Errorf("a wake ran it: %+v", started)
	}
	if n := e.count("s", claims.StepStartedEvent, ""); n != 1 {
		t.Errorf("%d steps were started", n)
	}
}

// S1: --uncertain-cancel=interrupt closes it instead, unjoined, and pending work
// goes on.
func TestS1I26UncertainCancelInterrupted(t *testing.T) {
	e := newEnv(t)
	worker := e.lease("worker")
	e.wake("alone", worker)
	e.wake("busy", worker)
	for _, id := range []claims.SessionID{"alone", "busy"} {
		e.interrupt(id)
	}
	e.wakeWith("busy", "", "in2", claims.Queue)
	e.expire(worker)
	if r := e.pass(recovery.Options{UncertainInterrupted: true}); r.Done != 2 || r.Quarantined != 0 {
		t.Errorf("%+v", r)
	}
	for _, id := range []claims.SessionID{"alone", "busy"} {
		e.tail(id, `step.interrupted {"reason":"stop","joined":false}`, `execution.ended {"outcome":"interrupted"}`)
		if e.number("claims", id) != int64(0) || e.number("continuations", id) != int64(0) || e.reason(id) != nil {
			t.Errorf("something of %s is left", id)
		}
	}
	if len(e.announced) != 1 || e.announced[0] != "busy" {
		t.Errorf("announced %v", e.announced)
	}
	next := e.acquire("busy", e.lease("worker"))
	if len(next.Step.Inputs) != 1 || next.Step.Inputs[0].ID != "in2" || next.Step.Continues != nil {
		t.Errorf("pending work goes on as %+v", next.Step)
	}
}

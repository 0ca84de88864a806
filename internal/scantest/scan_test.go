package scantest

import (
	"errors"
	"slices"
	"testing"

	"reveille/claims"
	"reveille/recovery"
)

func TestI32LostWorkerIsRecovered(t *testing.T) {
	e := newEnv(t)
	worker := e.lease("worker")
	started := e.wake("s", worker)
	if r := e.pass(recovery.Options{}); r.Seen != 0 {
		t.Fatalf("a live claim is in the lane: %+v", r)
	}
	e.expire(worker)
	if r := e.pass(recovery.Options{}); r.Seen != 1 || r.Done != 1 {
		t.Fatalf("%+v", r)
	}
	e.tail("s",
		`step.failed {"code":"worker_lost","message":"the worker was lost","retryable":true}`,
		`execution.ended {"outcome":"recovered"}`)
	if !slices.Equal(e.announced, []claims.SessionID{"s"}) || !slices.Equal(e.poked, []claims.SessionID{"s"}) {
		t.Errorf("announced %v, poked %v", e.announced, e.poked)
	}
	for _, r := range e.events("s") {
		if r.Type == claims.StepFailedEvent && (r.Epoch != 2 || r.Execution != started.Claim.Execution || r.Step != started.Step.ID) {
			t.Errorf("step.failed is told of %s at epoch %d", r.Execution, r.Epoch)
		}
	}
	// The old owner wakes up.
	if _, err := e.store.Finish(t.Context(), started.Claim, claims.Ending{Step: started.Step}, token()); !errors.Is(err, claims.ErrFenced) {
		t.Errorf("the lost worker finished its step: %v", err)
	}
	again, err := e.store.Acquire(t.Context(), "s", acquisition(e.lease("worker")))
	if err != nil {
		t.Fatal(err)
	}
	c := again.Step.Continues
	if c == nil || c.Kind != claims.KindRecovery || c.Attempt != 1 || c.Step != started.Step.ID || again.Claim.Epoch != 3 ||
		len(again.Step.Inputs) != 1 || again.Step.Inputs[0].ID != "in1" {
		t.Errorf("%+v continues %+v", again, c)
	}
}

func TestRevokedClaimsOfALiveHolder(t *testing.T) {
	e := newEnv(t)
	worker := e.lease("worker")
	for _, cause := range []claims.Cause{claims.None, claims.Unknown, claims.Interrupted, claims.NeverJoined} {
		id := claims.SessionID("running" + string(cause))
		started := e.wake(id, worker)
		if cause != claims.None {
			if err := e.store.Revoke(t.Context(), started.Claim, cause); err != nil {
				t.Fatal(err)
			}
		}
	}
	for _, cause := range []claims.Cause{claims.Unknown, claims.NeverJoined} {
		id := claims.SessionID("cancelled" + string(cause))
		started := e.wake(id, worker)
		if err := e.store.Decline(t.Context(), started.Claim, started.Step, nil, "no", token()); err != nil {
			t.Fatal(err)
		}
		if err := e.store.Revoke(t.Context(), started.Claim, cause); err != nil {
			t.Fatal(err)
		}
	}
	if r := e.pass(recovery.Options{}); r.Seen != 5 || r.Done != 3 || r.Quarantined != 2 {
		t.Errorf("%+v", r)
	}
	for id, want := range map[claims.SessionID]string{
		"runningunknown":        `execution.ended {"outcome":"recovered"}`,
		"runninginterrupted":    `execution.ended {"outcome":"interrupted"}`,
		"runningnever_joined":   `execution.ended {"outcome":"quarantined"}`,
		"cancelledunknown":      `execution.ended {"outcome":"declined"}`,
		"cancellednever_joined": `execution.ended {"outcome":"quarantined"}`,
	} {
		e.tail(id, want)
	}
	if e.reason("runningnever_joined") != "never_joined" || e.reason("cancellednever_joined") != "never_joined" {
		t.Error("what never joined was quarantined for another reason")
	}
	if e.number("claims", "running") != int64(1) {
		t.Error("a claim that is not revoked is gone")
	}
}

// An interrupt meets a claim whose worker is gone, or one that a scanner holds
// already: the step closes as interrupted, without a join, and promises nothing.
func TestI20InterruptedVerdict(t *testing.T) {
	t.Run("expired", func(t *testing.T) {
		e := newEnv(t)
		worker := e.lease("worker")
		e.wake("s", worker)
		e.expire(worker)
		e.interrupt("s")
		if r := e.pass(recovery.Options{}); r.Done != 1 {
			t.Errorf("%+v", r)
		}
		e.checkInterrupted("s")
	})
	t.Run("held by a scanner", func(t *testing.T) {
		e := newEnv(t)
		worker := e.lease("worker")
		e.wake("s", worker)
		e.expire(worker)
		p := e.gated(e.store, once(converting, func() { e.interrupt("s") }))
		if r := e.scanner(p, recovery.Options{}).Pass(t.Context()).Lanes[recovery.LaneClaims]; r.Done != 1 {
			t.Errorf("%+v", r)
		}
		e.checkInterrupted("s")
	})
}

func (e *env) checkInterrupted(session claims.SessionID) {
	e.Helper()
	e.tail(session, `step.interrupted {"reason":"stop","joined":false}`, `execution.ended {"outcome":"interrupted"}`)
	if e.number("continuations", session) != int64(0) || e.number("claims", session) != int64(0) || len(e.announced) != 0 {
		e.Errorf("something of %s is left, or it was announced: %v", session, e.announced)
	}
}

// A scanner that dies between takeover and conversion leaves a claim that
// expires with it.
func TestI32TakeoverOfATakeover(t *testing.T) {
	e := newEnv(t)
	worker := e.lease("worker")
	started := e.wake("s", worker)
	e.expire(worker)
	dead := e.lease("scanner")
	found, err := e.store.ExpiredClaims(t.Context(), 1)
	if err != nil || len(found) != 1 {
		t.Fatal(found, err)
	}
	claim, err := e.store.TakeOver(t.Context(), found[0], dead, claims.ExecutionID(acquisition(dead).Execution))
	if err != nil || claim.Epoch != 2 {
		t.Fatal(claim, err)
	}
	if r := e.pass(recovery.Options{}); r.Seen != 0 {
		t.Fatalf("a live recovery claim is in the lane: %+v", r)
	}
	e.expire(dead)
	if r := e.pass(recovery.Options{}); r.Done != 1 {
		t.Fatalf("%+v", r)
	}
	last := e.events("s")
	if r := last[len(last)-1]; r.Epoch != 3 || r.Execution != started.Claim.Execution {
		t.Errorf("%s", r.Line)
	}
	if _, err := e.store.Convert(t.Context(), claim, claims.Limits{Recoveries: 3, Takeovers: 10}, token()); !errors.Is(err, claims.ErrFenced) {
		t.Errorf("the dead scanner converts: %v", err)
	}
}

func TestRelayLaneTouchesAndRelays(t *testing.T) {
	e := newEnv(t)
	e.wake("s", "")
	s := e.scanner(e.parts(), recovery.Options{})
	if r := s.Pass(t.Context()).Lanes[recovery.LaneRelay]; r.Done != 1 {
		t.Errorf("%+v", r)
	}
	if r := s.Pass(t.Context()).Lanes[recovery.LaneRelay]; r.Seen != 0 {
		t.Errorf("it is not away for a while: %+v", r)
	}
}

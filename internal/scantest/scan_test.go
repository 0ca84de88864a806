package scantest

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"testing"
	"time"

	"reveille/claims"
	"reveille/claims/crdb"
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

func TestI26Cancels(t *testing.T) {
	for _, uncertain := range []bool{false, true} {
		t.Run(fmt.Sprintf("uncertain interrupted %v", uncertain), func(t *testing.T) {
			e := newEnv(t)
			worker := e.lease("worker")
			declined := e.wake("declined", worker)
			if err := e.store.Decline(t.Context(), declined.Claim, declined.Step, nil, "no", token()); err != nil {
				t.Fatal(err)
			}
			e.wake("cancelling", worker)
			e.interrupt("cancelling")
			pending := e.command(claims.Wake, "cancelling")
			pending.Input = &claims.Input{ID: "in2", Delivery: claims.Queue, Body: []byte(`2`)}
			if _, err := e.store.Apply(t.Context(), pending, nil); err != nil {
				t.Fatal(err)
			}
			e.expire(worker)
			r := e.pass(recovery.Options{UncertainInterrupted: uncertain})

			if e.number("claims", "declined") != int64(0) || e.number("continuations", "declined") != int64(0) || e.reason("declined") != nil {
				t.Error("the declined claim was not just removed")
			}
			e.tail("declined", `execution.ended {"outcome":"declined"}`)
			if _, err := e.store.Acquire(t.Context(), "declined", acquisition(e.lease("worker"))); !errors.Is(err, claims.ErrNotReady) {
				t.Errorf("the declined session: %v", err)
			}
			_, err := e.store.Acquire(t.Context(), "cancelling", acquisition(e.lease("worker")))
			if uncertain {
				e.tail("cancelling", `step.interrupted {"reason":"stop","joined":false}`, `execution.ended {"outcome":"interrupted"}`,
					`execution.started {"worker":"w","recovery":0}`, `input.promoted {"input":"in2"}`, `step.started {"index":1,"inputs":["in2"],"continues":null}`)
				if err != nil || r.Done != 2 {
					t.Errorf("%v, %+v", err, r)
				}
				return
			}
			e.tail("cancelling",
				`session.quarantined {"lane":"claims","reason":"cancellation_outcome_unknown","detail":"its worker was lost while it cancelled the step"}`,
				`execution.ended {"outcome":"quarantined"}`)
			if !errors.Is(err, claims.ErrQuarantined) || r.Done != 1 || r.Quarantined != 1 {
				t.Errorf("%v, %+v", err, r)
			}
		})
	}
}

func TestI31ThreeScannersOver100Claims(t *testing.T) {
	e := newEnv(t)
	worker := e.lease("worker")
	for i := range 100 {
		e.wake(claims.SessionID(fmt.Sprintf("s%d", i)), worker)
	}
	e.expire(worker)
	var wg sync.WaitGroup
	results := make([]recovery.Result, 3)
	for i := range results {
		s := e.scanner(e.parts(), recovery.Options{})
		wg.Go(func() {
			r := s.Pass(t.Context()).Lanes[recovery.LaneClaims]
			if r.Failed != 0 || r.Skipped != 0 || r.Err != nil {
				t.Errorf("%+v", r)
			}
			results[i] = r
		})
	}
	wg.Wait()
	if sum := results[0].Done + results[1].Done + results[2].Done; sum != 100 {
		t.Errorf("%d counted as done: %+v", sum, results)
	}
	for i := range 100 {
		id := claims.SessionID(fmt.Sprintf("s%d", i))
		e.tail(id, `step.started {"index":1,"inputs":["in1"],"continues":null}`,
			`step.failed {"code":"worker_lost","message":"the worker was lost","retryable":true}`,
			`execution.ended {"outcome":"recovered"}`)
		if e.number("continuations", id) != int64(1) || e.number("claims", id) != int64(0) {
			t.Errorf("%s has not one continuation and no claim", id)
		}
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
		p := e.parts()
		p.Conversions = gated{Store: e.store, convert: func() { e.interrupt("s") }}
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

// gated holds a pass before a conversion, or before the quarantine for one
// that failed. What a gate does is done once.
type gated struct {
	*crdb.Store
	convert, quarantine func()
	once                *sync.Once
}

func (g gated) Convert(ctx context.Context, c claims.Claim, l claims.Limits, token *claims.Token) (claims.Settlement, error) {
	if g.convert != nil {
		if g.once == nil {
			g.convert()
		} else {
			g.once.Do(g.convert)
		}
	}
	return g.Store.Convert(ctx, c, l, token)
}

func (g gated) ConversionFailed(ctx context.Context, c claims.Claim, detail string, token *claims.Token) (claims.Settlement, error) {
	if g.quarantine != nil {
		g.quarantine()
	}
	return g.Store.ConversionFailed(ctx, c, detail, token)
}

// A scanner is stopped at a gate for longer than its lease, and another one
// goes by: the loser changes nothing and counts nothing.
func TestI28StoppedScannerLoses(t *testing.T) {
	for _, at := range []string{"conversion", "quarantine"} {
		t.Run("before "+at, func(t *testing.T) {
			e := newEnv(t)
			worker := e.lease("worker")
			e.wake("s", worker)
			e.expire(worker)
			p := e.parts()
			own, _ := p.Holder()
			overtake := func() {
				if at == "quarantine" {
					e.exec("ALTER TABLE continuations DROP CONSTRAINT refuse")
				}
				e.expire(own)
				if r := e.pass(recovery.Options{}); r.Done != 1 {
					t.Errorf("the other scanner: %+v", r)
				}
			}
			g := gated{Store: e.store, once: &sync.Once{}}
			if at == "quarantine" {
				e.exec("ALTER TABLE continuations ADD CONSTRAINT refuse CHECK (session_id <> 's')")
				g.quarantine = overtake
			} else {
				g.convert = overtake
			}
			p.Conversions = g
			if r := e.scanner(p, recovery.Options{}).Pass(t.Context()).Lanes[recovery.LaneClaims]; r.Left != 1 || r.Done+r.Quarantined+r.Failed != 0 {
				t.Errorf("the loser: %+v", r)
			}
			e.tail("s", `step.failed {"code":"worker_lost","message":"the worker was lost","retryable":true}`, `execution.ended {"outcome":"recovered"}`)
			if e.reason("s") != nil || e.number("continuations", "s") != int64(1) {
				t.Error("the loser changed something")
			}
		})
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

func TestI27RefusedConversionAndHealthyClaim(t *testing.T) {
	e := newEnv(t)
	e.exec("ALTER TABLE continuations ADD CONSTRAINT refuse CHECK (session_id <> 'refused')")
	worker := e.lease("worker")
	e.wake("refused", worker)
	e.wake("healthy", worker)
	e.expire(worker)
	if r := e.pass(recovery.Options{}); r.Seen != 2 || r.Quarantined != 1 || r.Done != 1 {
		t.Errorf("%+v", r)
	}
	if e.reason("refused") != "conversion_failed" || e.number("claims", "refused") != int64(0) {
		t.Errorf("refused: %v", e.reason("refused"))
	}
	e.tail("refused", `execution.ended {"outcome":"quarantined"}`)
	e.tail("healthy", `execution.ended {"outcome":"recovered"}`)
}

func TestI27PoisonIsQuarantinedWithItsReason(t *testing.T) {
	e := newEnv(t)
	worker := e.lease("worker")
	steps := map[claims.SessionID]string{
		"invalid_step":      `UPDATE claims SET step = 'not JSON' WHERE session_id = 'invalid_step'`,
		"identity_conflict": `UPDATE claims SET step = replace(step, 'identity_conflict', 'another') WHERE session_id = 'identity_conflict'`,
		"no_progress":       `UPDATE sessions SET takeovers = 10 WHERE session_id = 'no_progress'`,
		"attempts_exhausted": `UPDATE claims SET step = replace(step, '"recoveries":0', '"recoveries":3')
			WHERE session_id = 'attempts_exhausted'`,
	}
	continuations := map[claims.SessionID]string{
		"invalid_continuation": `UPDATE continuations SET body = '{"kind":"dream"}' WHERE session_id = 'invalid_continuation'`,
		"foreign_continuation": `UPDATE continuations SET body = replace(body, 'foreign_continuation', 'another') WHERE session_id = 'foreign_continuation'`,
	}
	for id := range continuations {
		e.wake(id, worker)
	}
	e.expire(worker)
	if r := e.pass(recovery.Options{Reannounce: time.Microsecond}); r.Done != 2 {
		t.Fatalf("%+v", r)
	}
	worker = e.lease("worker")
	for id, damage := range steps {
		e.wake(id, worker)
		e.exec(damage)
	}
	for _, damage := range continuations {
		e.exec(damage)
	}
	e.expire(worker)
	e.wake("valid", "")
	p := e.scanner(e.parts(), recovery.Options{}).Pass(t.Context())
	if r := p.Lanes[recovery.LaneClaims]; r.Quarantined != 4 || r.Done+r.Failed+r.Left != 0 {
		t.Errorf("claims: %+v", r)
	}
	if r := p.Lanes[recovery.LaneRecovery]; r.Quarantined != 2 || r.Done+r.Failed+r.Left != 0 {
		t.Errorf("recovery: %+v", r)
	}
	for _, ids := range []map[claims.SessionID]string{steps, continuations} {
		for id := range ids {
			if e.reason(id) != string(id) {
				t.Errorf("%s was quarantined as %v", id, e.reason(id))
			}
			if _, err := e.store.Acquire(t.Context(), id, acquisition(e.lease("worker"))); !errors.Is(err, claims.ErrQuarantined) {
				t.Errorf("%s: %v", id, err)
			}
		}
	}
	if !slices.Contains(e.announced, "valid") {
		t.Error("a valid wake was not announced in the same pass")
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

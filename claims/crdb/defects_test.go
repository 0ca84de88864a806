package crdb_test

import (
	"testing"
	"time"

	"reveille/claims"
)

// TestI5StartStepInDoubtAfterATakeover.
//
//	owner: StartStep commits step.started; the answer of COMMIT is lost
//	scanner: the lease expires, the claim is taken over
//	owner: tries again under its token, which is found
//
// It must hear that it is fenced. A settlement as completed is not true: the step is open, and will be recovered.
func TestI5StartStepInDoubtAfterATakeover(t *testing.T) {
	r := newRig(t)
	betweenSteps(r)
	id := claims.StepID(newID())
	token := &claims.Token{ID: newID()}
	_, _, err := r.store.StartStep(r.ctx(), r.claim, id, token)
	r.ok(err)
	mine := r.claim
	r.lose()
	r.ok(r.takeOver())
	token.Doubt = true
	step, settled, err := r.store.StartStep(r.ctx(), mine, id, token)
	if step != nil || settled.Outcome == claims.OutcomeCompleted {
		t.Errorf("answered step %v, %+v, %v", step, settled, err)
	}
	r.wantErr(err, claims.ErrFenced)
	r.check()
}

// TestI5FinishInDoubtAfterATakeover: the same for a Finish that committed as "again".
func TestI5FinishInDoubtAfterATakeover(t *testing.T) {
	r := newRig(t)
	running(r)
	r.wake(input("b"))
	token := &claims.Token{ID: newID()}
	ending := claims.Ending{Step: r.step}
	_, err := r.store.Finish(r.ctx(), r.claim, ending, token)
	r.ok(err)
	mine := r.claim
	r.lose()
	r.ok(r.takeOver())
	token.Doubt = true
	settled, err := r.store.Finish(r.ctx(), mine, ending, token)
	if settled.Outcome == claims.OutcomeCompleted {
		t.Errorf("answered %+v, %v; the execution did not end", settled, err)
	}
	r.wantErr(err, claims.ErrFenced)
	r.check()
}

// TestI12DeclineWithAnyReason: the reason is what a handler wrote, and a handler writes anything. PostgreSQL takes no
// NUL and no broken UTF-8 in a TEXT; a decline that can never be written is a claim that never ends.
func TestI12DeclineWithAnyReason(t *testing.T) {
	base := newRig(t)
	for name, reason := range map[string]string{"NUL": "no\x00no", "not UTF-8": "no\xffno", "empty": ""} {
		t.Run(name, func(t *testing.T) {
			r := base.fresh(name)
			r.t = t
			running(r)
			r.ok(r.store.Decline(r.ctx(), r.claim, r.step, nil, reason, r.newToken()))
			r.ok(r.settle())
			r.wantTail(4, "step.interrupted(unjoined) execution.ended(declined)")
		})
	}
}

// TestI29LanesAreDisjoint: the ordinary lane is for "other ready sessions" than the recovery lane's. Where it returns
// those whose head is a due continuation too, they take the places of fresh ordinary ones in its batch, and one pass
// makes fewer than two batches of first announcements.
func TestI29LanesAreDisjoint(t *testing.T) {
	base := newRig(t)
	const batch = 5
	past := func(r *rig) {
		r.exec("UPDATE sessions SET ready_due_at = ready_at - INTERVAL '1 minute' WHERE session_id = $1", string(r.session))
	}
	for _, name := range []string{"a", "b", "c", "d", "e", "f"} {
		r := base.fresh("continued " + name)
		continuing(r)
		r.exec("UPDATE continuations SET due_at = not_before WHERE session_id = $1", string(r.session))
		past(r)
	}
	for _, name := range []string{"a", "b", "c", "d", "e", "f"} {
		r := base.fresh("ordinary " + name)
		r.wake(input("x"))
		r.exec("UPDATE sessions SET ready_due_at = statement_timestamp() WHERE session_id = $1", string(r.session))
	}
	due, err := base.store.DueContinuations(base.ctx(), batch)
	base.ok(err)
	first := map[claims.SessionID]bool{}
	for _, d := range due {
		first[d.Session] = true
	}
	sessions, err := base.store.DueSessions(base.ctx(), batch)
	base.ok(err)
	for _, s := range sessions {
		first[s.Session] = true
	}
	if len(first) != 2*batch {
		t.Errorf("a pass announces %d different sessions (%d continuations, ordinary %v), want %d", len(first), len(due), sessions, 2*batch)
	}
}

// TestScannersMarkIsNeverMissing: a session that becomes ready, is claimed and becomes ready again is still found by the
// scanner, at the latest one grace after it is due.
func TestScannersMarkIsNeverMissing(t *testing.T) {
	base := newRig(t)
	for name, c := range map[string]struct {
		setup func(*rig)
		found bool
	}{
		"woken":              {func(r *rig) { r.wake(input("a")) }, true},
		"running":            {running, false},
		"drained":            {func(r *rig) { running(r); r.ok(r.finish(nil)) }, false},
		"handed over":        {continuing, false}, // by the recovery lane
		"retry waits":        {func(r *rig) { running(r); r.ok(r.finish(retried)) }, false},
		"retry is due":       {func(r *rig) { running(r); r.ok(r.finish(retried)); r.pass() }, false}, // by the recovery lane
		"retry and an input": {func(r *rig) { running(r); r.ok(r.finish(retried)); r.wake(input("b")) }, true},
		"delayed then woken": {func(r *rig) { r.wakeAt(input("a"), time.Hour); r.wake(input("b")) }, true},
		"yielded": {func(r *rig) {
			running(r)
			r.wake(input("b"))
			r.ok(r.finish(func(e *claims.Ending) { e.Yield = true }))
		}, true},
		"cancelled": {func(r *rig) { r.wake(input("a")); r.interrupt() }, false},
		"touched too early": {func(r *rig) {
			r.wake(input("a"))
			r.sweep()
		}, true},
		"swept, then woken": {func(r *rig) {
			running(r)
			r.sweep()
			r.wake(input("b"))
			r.ok(r.finish(func(e *claims.Ending) { e.Yield = true }))
		}, true},
	} {
		t.Run(name, func(t *testing.T) {
			r := base.fresh(name)
			r.t = t
			c.setup(r)
			r.check()
			// The grace passes.
			r.exec("UPDATE sessions SET ready_due_at = ready_due_at - INTERVAL '1 minute' WHERE session_id = $1", string(r.session))
			found := func() bool {
				due, err := r.store.DueSessions(r.ctx(), 1000)
				r.ok(err)
				for _, s := range due {
					if s.Session == r.session {
						return true
					}
				}
				return false
			}
			if got := found(); got != c.found {
				t.Errorf("found %v, want %v", got, c.found)
			}
			r.exec("UPDATE sessions SET ready_due_at = ready_due_at + INTERVAL '10 years' WHERE session_id = $1 AND ready_at IS NOT NULL", string(r.session))
		})
	}
}

// sweep is a scanner's touch of the session, as soon as its mark is due.
func (r *rig) sweep() {
	r.t.Helper()
	r.exec("UPDATE sessions SET ready_due_at = statement_timestamp() WHERE session_id = $1 AND ready_due_at IS NOT NULL", string(r.session))
	_, err := r.store.TouchSessions(r.ctx(), []claims.SessionID{r.session}, time.Millisecond)
	r.ok(err)
}

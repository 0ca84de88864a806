package crdb_test

import (
	"slices"
	"strings"
	"testing"
	"time"

	"reveille/claims"
)

// age makes all that the session keeps older.
func (r *rig) age(by time.Duration) {
	r.t.Helper()
	r.exec("UPDATE events SET created_at = created_at - $2::INT8 * INTERVAL '1 microsecond' WHERE session_id = $1", string(r.session), by.Microseconds())
	r.exec("UPDATE sessions SET kept_since = kept_since - $2::INT8 * INTERVAL '1 microsecond' WHERE session_id = $1", string(r.session), by.Microseconds())
}

// relayed is the relay's mark at the end of the log.
func (r *rig) relayed() {
	r.t.Helper()
	r.exec("UPDATE sessions SET relayed_seq = last_seq, relay_due_at = NULL WHERE session_id = $1", string(r.session))
}

func (r *rig) inputStates() string {
	return scan[string](r, `SELECT COALESCE(string_agg(input_id || ' ' || state, ', ' ORDER BY position), '') FROM inputs WHERE session_id = $1`, string(r.session))
}

// TestRetention: what is past its retention goes, oldest first; what somebody still needs stays, and all that is newer.
func TestRetention(t *testing.T) {
	base := newRig(t)
	const day = 24 * time.Hour
	served := func(r *rig, id string) {
		r.run(input(id))
		r.ok(r.finish(nil))
	}
	for name, c := range map[string]struct {
		setup  func(*rig)
		gone   bool // something is deleted
		inputs string
		log    string // what is left of it
		due    bool   // the session is found again at once
	}{
		"served": {func(r *rig) { served(r, "a"); r.relayed(); r.age(2 * day) }, true, "", "", false},
		"newer": {func(r *rig) {
			served(r, "a")
			r.relayed()
			r.age(2 * day)
			served(r, "b")
			r.relayed()
		}, true, "b covered", "input.admitted(b) execution.started input.promoted(b) step.started(b) step.ended execution.ended(completed)", false},
		"not relayed": {func(r *rig) { served(r, "a"); r.age(2 * day) }, false, "a covered", "input.admitted(a) execution.started input.promoted(a) step.started(a) step.ended execution.ended(completed)", false},
		"pending":     {func(r *rig) { r.admit(input("a")); r.wake(input("b")); r.relayed(); r.age(2 * day) }, true, "a armed, b armed", "", false},
		"cancelled": {func(r *rig) {
			r.wake(input("a"))
			r.interrupt()
			r.relayed()
			r.age(2 * day)
		}, true, "", "", false},
		"open step": {func(r *rig) {
			served(r, "a")
			r.run(input("b"))
			r.relayed()
			r.age(2 * day)
		}, true, "b covered", "input.admitted(b) execution.started input.promoted(b) step.started(b)", false},
		"a retry that waits": {func(r *rig) {
			served(r, "a")
			r.run(input("b"))
			r.ok(r.finish(retried))
			r.relayed()
			r.age(2 * day)
		}, true, "b covered", "input.admitted(b) execution.started input.promoted(b) step.started(b) step.failed(handler) execution.ended(retrying)", false},
		"a promise that does not decode": {func(r *rig) {
			continuing(r)
			r.relayed()
			r.age(2 * day)
			poisoned(r)
		}, false, "a covered", "input.admitted(a) execution.started input.promoted(a) step.started(a) step.failed(shutdown) execution.ended(handed_over)", false},
		"quarantined": {func(r *rig) {
			r.run(input("a"))
			r.interrupt()
			r.lose()
			r.find()
			r.ok(r.endExpired(false))
			r.relayed()
			r.age(2 * day)
		}, false, "a covered", "input.admitted(a) execution.started input.promoted(a) step.started(a) execution.cancelling session.quarantined(cancellation_outcome_unknown) execution.ended(quarantined)", false},
	} {
		t.Run(name, func(t *testing.T) {
			r := base.fresh(strings.ReplaceAll(name, " ", "-"))
			r.t = t
			c.setup(r)
			due := func() bool {
				all, err := r.store.DueRetentions(r.ctx(), day, 1000)
				r.ok(err)
				return slices.Contains(all, r.session)
			}
			if !due() {
				t.Error("not found, and it keeps something of two days")
			}
			won, err := r.store.TouchRetentions(r.ctx(), []claims.SessionID{r.session}, day, time.Minute)
			r.ok(err)
			again, err := r.store.TouchRetentions(r.ctx(), []claims.SessionID{r.session}, day, time.Minute)
			r.ok(err)
			if len(won) != 1 || len(again) != 0 || due() {
				t.Errorf("two scanners touched it: %v %v", won, again)
			}
			before := scan[int64](r, "SELECT last_seq FROM sessions WHERE session_id = $1", string(r.session))
			deleted, more, err := r.store.DeleteExpired(r.ctx(), r.session, day, 100)
			r.ok(err)
			if (deleted > 0) != c.gone || more {
				t.Errorf("deleted %d, more %v", deleted, more)
			}
			if got := r.inputStates(); got != c.inputs {
				t.Errorf("inputs are %q, want %q", got, c.inputs)
			}
			if got := strings.Join(r.briefs(), " "); got != c.log {
				t.Errorf("log is\n%s, want\n%s", got, c.log)
			}
			if due() != c.due {
				t.Errorf("due again: %v", due())
			}
			if after := scan[int64](r, "SELECT last_seq FROM sessions WHERE session_id = $1", string(r.session)); after != before {
				t.Errorf("the last number went from %d to %d", before, after)
			}
		})
	}
	t.Run("goes on after it", func(t *testing.T) {
		r := base.fresh("on")
		r.t = t
		r.run(input("a"))
		r.ok(r.finish(retried))
		r.relayed()
		r.age(2 * day)
		_, _, err := r.store.DeleteExpired(r.ctx(), r.session, day, 100)
		r.ok(err)
		r.pass()
		r.ok(r.acquire())
		if len(r.step.Inputs) != 1 || r.step.Inputs[0].ID != "a" || string(r.step.Inputs[0].Body) != `{"of":"a"}` {
			t.Errorf("the retry gets %+v", r.step.Inputs)
		}
		r.ok(r.finish(nil))
		r.relayed()
		r.age(2 * day)
		_, _, err = r.store.DeleteExpired(r.ctx(), r.session, day, 100)
		r.ok(err)
		served(r, "b")
		if n := scan[int64](r, "SELECT count(*) FROM sessions WHERE session_id = $1 AND epoch = 3", string(r.session)); n != 1 {
			t.Error("the session's row went, or its epoch back")
		}
	})
	t.Run("in batches", func(t *testing.T) {
		r := base.fresh("batches")
		r.t = t
		for _, id := range []string{"a", "b", "c"} {
			served(r, id)
		}
		r.relayed()
		r.age(2 * day)
		for i, want := range []struct {
			more bool
			left int64
		}{{true, 4}, {true, 2}, {false, 0}} {
			_, more, err := r.store.DeleteExpired(r.ctx(), r.session, day, 2)
			r.ok(err)
			left := scan[int64](r, "SELECT count(*) FROM events WHERE session_id = $1", string(r.session))
			if more != want.more || left != want.left {
				t.Errorf("round %d: %d appends left, more %v", i, left, more)
			}
		}
	})
	r := base.fresh("nobody")
	_, _, err := r.store.DeleteExpired(r.ctx(), r.session, day, 2)
	r.wantErr(err, claims.ErrFenced)
}

package scantest

import (
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"reveille/claims"
	"reveille/recovery"
)

// poisonClaims are the ways in which the step of a claim says that it is not what
// it should be. The transaction that validates a step is the one that writes, so
// the last moment at which it may be so, or not, is before that one; the first
// is before the takeover. @s stands for the session.
var poisonClaims = []struct {
	name   string
	reason claims.Reason
	damage string
}{
	{"no JSON", claims.ReasonInvalidStep, `UPDATE claims SET step = 'not JSON' WHERE session_id = '@s'`},
	{"no step of ours", claims.ReasonInvalidStep, `UPDATE claims SET step = replace(step, '"index":1', '"index":0') WHERE session_id = '@s'`},
	{"another session's", claims.ReasonIdentityConflict, `UPDATE claims SET step = replace(step, '"session":"@s"', '"session":"another"') WHERE session_id = '@s'`},
	{"another step's", claims.ReasonIdentityConflict, `UPDATE claims SET step_id = '00000000-0000-4000-8000-000000000001' WHERE session_id = '@s'`},
	{"another execution's", claims.ReasonIdentityConflict, `UPDATE claims SET ran_as = '00000000-0000-4000-8000-000000000001' WHERE session_id = '@s'`},
	{"of a later epoch", claims.ReasonIdentityConflict, `UPDATE claims SET step = replace(step, '"epoch":1', '"epoch":99') WHERE session_id = '@s'`},
	{"superseded by a newer step", claims.ReasonSuperseded, `UPDATE claims SET steps = 2 WHERE session_id = '@s'`},
}

// damage runs statements about a session, none where there are none.
func (e *env) damage(statements string, session claims.SessionID) {
	e.Helper()
	for statement := range strings.SplitSeq(strings.ReplaceAll(statements, "@s", string(session)), "; ") {
		if statement != "" {
			e.exec(statement)
		}
	}
}

// numbered is the session of a case, and which case a session is of.
func numbered(i int) claims.SessionID { return claims.SessionID(fmt.Sprintf("s%d", i)) }

func number(id claims.SessionID) (i int) {
	_, _ = fmt.Sscanf(string(id), "s%d", &i) // numbered made it
	return i
}

// S5: poison that is there when the scanner finds the claim, and poison that it
// turns into between the takeover and the validation, is quarantined with its
// reason, and never run.
func TestS5I27PoisonClaims(t *testing.T) {
	for _, when := range []operation{taking, converting} {
		t.Run("before the "+string(when), func(t *testing.T) {
			e := newEnv(t)
			worker := e.lease("worker")
			for i := range poisonClaims {
				e.wake(numbered(i), worker)
			}
			e.expire(worker)
			parts := e.gated(e.store, func(op operation, id claims.SessionID) {
				if op == when {
					e.damage(poisonClaims[number(id)].damage, id)
				}
			})
			r := e.scanner(parts, recovery.Options{}).Pass(t.Context()).Lanes[recovery.LaneClaims]
			if r.Quarantined != len(poisonClaims) || r.Done+r.Left+r.Failed != 0 {
				t.Errorf("%+v", r)
			}
			for i, tc := range poisonClaims {
				e.checkQuarantined(numbered(i), "claims", tc.reason)
			}
		})
	}
}

// checkQuarantined checks that a session is quarantined for a reason, once, with
// the row as it was, and that nothing runs it.
func (e *env) checkQuarantined(session claims.SessionID, lane string, reason claims.Reason) {
	e.Helper()
	if got := e.reason(session); got != string(reason) {
		e.Errorf("%s is quarantined as %v, want %s", session, got, reason)
	}
	n := 0
	for _, r := range e.events(session) {
		if r.Type == claims.SessionQuarantined {
			n++
			if !strings.HasPrefix(string(r.Data), fmt.Sprintf(`{"lane":%q,"reason":%q,"detail":"`, lane, reason)) {
				e.Errorf("%s", r.Data)
			}
		}
	}
	if n != 1 {
		e.Errorf("%s: %d events tell of a quarantine", session, n)
	}
	if lane == "claims" {
		if n := e.count(session, claims.ExecutionEnded, `{"outcome":"quarantined"}`); n != 1 || e.number("claims", session) != int64(0) {
			e.Errorf("%s: its execution ended %d times, %v claims", session, n, e.number("claims", session))
		}
	} else if e.number("continuations", session) != int64(0) {
		e.Errorf("%s: its continuation is still to be promoted", session)
	}
	if evidence, _ := e.row("SELECT evidence FROM quarantines WHERE session_id = $1", string(session)).(string); len(evidence) <= len(`{"claim":{}}`) {
		e.Errorf("%s: the evidence is %q", session, evidence)
	}
	if _, err := e.store.Acquire(e.Context(), session, acquisition(e.lease("worker"))); !errors.Is(err, claims.ErrQuarantined) {
		e.Errorf("%s: acquiring it: %v", session, err)
	}
}

// S5: what is poison when the scanner finds it, and is not by the time of the
// write, is left alone, or rather is what it is by then: a claim to be recovered.
func TestS5I27ClaimThatIsNoPoisonByTheWrite(t *testing.T) {
	e := newEnv(t)
	worker := e.lease("worker")
	for i := range poisonClaims {
		e.wake(numbered(i), worker)
	}
	e.expire(worker)
	e.exec("CREATE TABLE healthy AS SELECT session_id, step, step_id, ran_as, steps FROM claims")
	for i, tc := range poisonClaims {
		e.damage(tc.damage, numbered(i))
	}
	parts := e.gated(e.store, func(op operation, id claims.SessionID) {
		if op == converting {
			e.damage(`UPDATE claims SET step = h.step, step_id = h.step_id, ran_as = h.ran_as, steps = h.steps
				FROM healthy h WHERE h.session_id = claims.session_id AND h.session_id = '@s'`, id)
		}
	})
	r := e.scanner(parts, recovery.Options{}).Pass(t.Context()).Lanes[recovery.LaneClaims]
	if r.Done != len(poisonClaims) || r.Quarantined+r.Left+r.Failed != 0 {
		t.Errorf("%+v", r)
	}
	for i, tc := range poisonClaims {
		if reason := e.reason(numbered(i)); reason != nil {
			t.Errorf("%s: quarantined as %v", tc.name, reason)
		}
		e.tail(numbered(i), `execution.ended {"outcome":"recovered"}`)
	}
}

// S5: a claim that a newer step has superseded before the takeover is no longer
// the one that was found: the newer step's owner keeps it, and nobody is told
// anything.
func TestS5I28SupersededBeforeTheTakeover(t *testing.T) {
	e := newEnv(t)
	worker := e.lease("worker")
	old := e.wake("s", worker)
	e.wakeWith("s", "", "in2", claims.Queue)
	e.expire(worker)
	var before string
	parts := e.gated(e.store, once(taking, func() {
		// The old owner is still its own: it ends its step; a new one starts the next.
		if _, err := e.store.Finish(t.Context(), old.Claim, claims.Ending{Step: old.Step, Yield: true}, token()); err != nil {
			t.Error(err)
		}
		e.acquire("s", e.lease("worker"))
		before = e.rows()
	}))
	r := e.scanner(parts, recovery.Options{}).Pass(t.Context()).Lanes[recovery.LaneClaims]
	if r.Left != 1 || r.Done+r.Quarantined+r.Failed != 0 {
		t.Errorf("%+v", r)
	}
	e.unchanged(before)
}

// poisonContinuations are the ways in which a continuation says that it is not
// what it should be.
var poisonContinuations = []struct {
	name           string
	reason         claims.Reason
	damage, repair string // repair: what more than writing the body back is needed
}{
	{"no JSON", claims.ReasonInvalidContinuation, `UPDATE continuations SET body = 'not JSON' WHERE session_id = '@s'`, ""},
	{"no kind of ours", claims.ReasonInvalidContinuation, `UPDATE continuations SET body = replace(body, 'handover', 'dream') WHERE session_id = '@s'`, ""},
	{"another session's", claims.ReasonForeignContinuation, `UPDATE continuations SET body = replace(body, '"@s"', '"another"') WHERE session_id = '@s'`, ""},
	{"under another number", claims.ReasonIdentityConflict, `UPDATE continuations SET body = replace(body, '"number":1', '"number":7') WHERE session_id = '@s'`, ""},
	{"of a later epoch", claims.ReasonIdentityConflict, `UPDATE continuations SET body = replace(body, '"epoch":1', '"epoch":99') WHERE session_id = '@s'`, ""},
	{"superseded by a newer promise", claims.ReasonSuperseded, newerPromise, forgetNewer},
	{
		"without a step, superseded", claims.ReasonSuperseded,
		`UPDATE continuations SET body = regexp_replace(body, '"step":"[^"]*"', '"step":""') WHERE session_id = '@s'; ` + newerPromise, forgetNewer,
	},
}

// newerPromise has the chain promise again, due much later than the older one.
const (
	newerPromise = `INSERT INTO continuations (session_id, number, shard, lineage, not_before, due_at, body)
		SELECT session_id, 2, shard, lineage, not_before + INTERVAL '1 hour', due_at + INTERVAL '1 hour', replace(body, '"number":1', '"number":2')
		FROM continuations WHERE session_id = '@s'; UPDATE sessions SET continuations = 2, promised = 2 WHERE session_id = '@s'`
	forgetNewer = `DELETE FROM continuations WHERE session_id = '@s' AND number = 2; UPDATE sessions SET continuations = 1 WHERE session_id = '@s'`
)

// continued leaves a continuation for each case.
func (e *env) continued() {
	e.Helper()
	worker := e.lease("worker")
	for i := range poisonContinuations {
		e.handOver(e.wake(numbered(i), worker))
	}
}

// S5: each continuation that is poison is quarantined with its reason.
func TestS5I27PoisonContinuations(t *testing.T) {
	e := newEnv(t)
	e.continued()
	for i, tc := range poisonContinuations {
		e.damage(tc.damage, numbered(i))
	}
	r := e.scanner(e.parts(), recovery.Options{}).Pass(t.Context()).Lanes[recovery.LaneRecovery]
	if r.Quarantined != len(poisonContinuations) || r.Done+r.Left+r.Failed != 0 {
		t.Errorf("%+v", r)
	}
	e.exec("DELETE FROM continuations WHERE number = 2") // the newer ones are no poison, and not due
	for i, tc := range poisonContinuations {
		e.checkQuarantined(numbered(i), "recovery", tc.reason)
	}
}

// S5: where it is not poison any more by the time of the write, the pass leaves
// it alone, and the next one announces it.
func TestS5I28ContinuationThatIsNoPoisonByTheWrite(t *testing.T) {
	e := newEnv(t)
	e.continued()
	e.exec("CREATE TABLE healthy AS SELECT session_id, number, body FROM continuations")
	healthy := e.rows()
	for i, tc := range poisonContinuations {
		e.damage(tc.damage, numbered(i))
	}
	parts := e.gated(e.store, func(op operation, id claims.SessionID) {
		if op == removing {
			e.damage(poisonContinuations[number(id)].repair, id)
			e.damage(`UPDATE continuations SET body = h.body FROM healthy h
				WHERE continuations.session_id = h.session_id AND continuations.number = h.number AND h.session_id = '@s'`, id)
		}
	})
	s := e.scanner(parts, recovery.Options{Reannounce: time.Microsecond})
	if r := s.Pass(t.Context()).Lanes[recovery.LaneRecovery]; r.Left != len(poisonContinuations) || r.Done+r.Quarantined+r.Failed != 0 {
		t.Errorf("%+v", r)
	}
	e.exec("UPDATE sessions SET promised = 1")
	e.unchanged(healthy)
	if r := s.Pass(t.Context()).Lanes[recovery.LaneRecovery]; r.Done != len(poisonContinuations) || len(e.announced) != len(poisonContinuations) {
		t.Errorf("they are not announced afterwards: %+v, %v", r, e.announced)
	}
}

// S5: a row may say so much that telling of it would make an event larger than
// the stream takes. It is quarantined all the same.
func TestS5I27HugeFieldIsQuarantined(t *testing.T) {
	t.Run("claim", func(t *testing.T) {
		e := newEnv(t)
		worker := e.lease("worker")
		e.wake("s", worker)
		e.exec(`UPDATE claims SET step = replace(step, '"session":"s"', '"session":"' || repeat('x', 2000000) || '"')`)
		e.expire(worker)
		if r := e.pass(recovery.Options{}); r.Quarantined != 1 {
			t.Errorf("%+v", r)
		}
		e.checkQuarantined("s", "claims", claims.ReasonIdentityConflict)
	})
	t.Run("continuation", func(t *testing.T) {
		e := newEnv(t)
		e.handOver(e.wake("s", e.lease("worker")))
		e.exec(`UPDATE continuations SET body = replace(body, '"kind":"handover"', '"kind":"' || repeat('x', 2000000) || '"')`)
		if r := e.scanner(e.parts(), recovery.Options{}).Pass(t.Context()).Lanes[recovery.LaneRecovery]; r.Quarantined != 1 {
			t.Errorf("%+v", r)
		}
		e.checkQuarantined("s", "recovery", claims.ReasonInvalidContinuation)
	})
}

// refusals are ways in which a database does not take a conversion.
var refusals = map[string]struct{ refuse, allow string }{
	"a CHECK": {
		`ALTER TABLE continuations ADD CONSTRAINT refuse CHECK (session_id <> 'refused')`,
		`ALTER TABLE continuations DROP CONSTRAINT refuse`,
	},
	"a trigger": {
		`CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
			IF NEW.session_id = 'refused' THEN RAISE EXCEPTION 'no' USING ERRCODE = '22000'; END IF; RETURN NEW; END $$;
		CREATE TRIGGER refuse BEFORE INSERT ON continuations FOR EACH ROW EXECUTE FUNCTION refuse()`,
		`DROP TRIGGER refuse ON continuations`,
	},
	"a trigger at COMMIT": {
		`CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
			IF NEW.session_id = 'refused' THEN RAISE EXCEPTION 'no' USING ERRCODE = '23514'; END IF; RETURN NEW; END $$;
		CREATE CONSTRAINT TRIGGER refuse AFTER INSERT ON continuations DEFERRABLE INITIALLY DEFERRED FOR EACH ROW EXECUTE FUNCTION refuse()`,
		`DROP TRIGGER refuse ON continuations`,
	},
}

// S5: a conversion that the database refuses in three fresh transactions is
// quarantined, and the healthy claim behind it in the batch is converted.
func TestS5I27RefusedConversion(t *testing.T) {
	for name, how := range refusals {
		t.Run(name, func(t *testing.T) {
			e := newEnv(t)
			e.exec(how.refuse)
			worker := e.lease("worker")
			e.wake("refused", worker)
			e.wake("healthy", worker)
			e.expire(worker)
			tried := map[claims.SessionID]int{}
			parts := e.gated(e.store, func(op operation, id claims.SessionID) {
				if op == converting {
					tried[id]++
				}
			})
			r := e.scanner(parts, recovery.Options{}).Pass(t.Context()).Lanes[recovery.LaneClaims]
			if r.Seen != 2 || r.Quarantined != 1 || r.Done != 1 || tried["refused"] != 3 || tried["healthy"] != 1 {
				t.Errorf("%+v, tried %v", r, tried)
			}
			e.checkQuarantined("refused", "claims", claims.ReasonConversionFailed)
			if n := e.count("refused", claims.StepFailedEvent, ""); n != 0 {
				t.Errorf("%d events of a conversion that was refused", n)
			}
			e.tail("healthy", `execution.ended {"outcome":"recovered"}`)
		})
		t.Run(name+" that is gone by the third try", func(t *testing.T) {
			e := newEnv(t)
			e.exec(how.refuse)
			worker := e.lease("worker")
			e.wake("refused", worker)
			e.expire(worker)
			tried := 0
			parts := e.gated(e.store, func(op operation, _ claims.SessionID) {
				if op != converting {
					return
				}
				if tried++; tried == 3 {
					e.exec(how.allow)
				}
			})
			r := e.scanner(parts, recovery.Options{}).Pass(t.Context()).Lanes[recovery.LaneClaims]
			if r.Done != 1 || r.Quarantined+r.Failed+r.Left != 0 || e.reason("refused") != nil {
				t.Errorf("%+v, quarantined as %v", r, e.reason("refused"))
			}
			e.tail("refused", `execution.ended {"outcome":"recovered"}`)
		})
	}
}

// S5: a chain is recovered as often as is allowed, and the next time its session
// is quarantined.
func TestS5I27AttemptsExhausted(t *testing.T) {
	e := newEnv(t)
	const allowed = 3
	o := recovery.Options{Limits: claims.Limits{Recoveries: allowed, Takeovers: 10}}
	worker := e.lease("worker")
	e.wake("s", worker)
	for n := 1; n <= allowed; n++ {
		e.expire(worker)
		if r := e.pass(o); r.Done != 1 || r.Quarantined != 0 {
			t.Fatalf("recovery %d: %+v", n, r)
		}
		worker = e.lease("worker")
		if c := e.acquire("s", worker).Step.Continues; c == nil || c.Kind != claims.KindRecovery || c.Attempt != n {
			t.Fatalf("recovery %d continues %+v", n, c)
		}
	}
	e.expire(worker)
	if r := e.pass(o); r.Quarantined != 1 || r.Done != 0 {
		t.Errorf("%+v", r)
	}
	e.checkQuarantined("s", "claims", claims.ReasonAttemptsExhausted)
}

// S5: it is not so any more where somebody has interrupted the session by the
// time of the write: nothing is to be recovered then.
func TestS5I27NotExhaustedByTheWrite(t *testing.T) {
	e := newEnv(t)
	worker := e.lease("worker")
	e.wake("s", worker)
	e.exec(`UPDATE claims SET step = replace(step, '"recoveries":0', '"recoveries":3')`)
	e.expire(worker)
	parts := e.gated(e.store, once(converting, func() { e.interrupt("s") }))
	if r := e.scanner(parts, recovery.Options{}).Pass(t.Context()).Lanes[recovery.LaneClaims]; r.Done != 1 || r.Quarantined != 0 {
		t.Errorf("%+v", r)
	}
	e.checkInterrupted("s")
}

// S5: a worker dies ten times before a step.started: each time it had failed a
// step, and was about to start the next. That is what dying before the first
// step of an execution leaves too: an acquisition starts its step in the same
// transaction. No chain is at fault, and none is recovered. The eleventh time
// the session is quarantined, with what would have started next.
func TestS5I27NoProgress(t *testing.T) {
	e := newEnv(t)
	const allowed = 10
	for n := range allowed + 3 {
		e.wakeWith("s", "", fmt.Sprintf("in%02d", n), claims.Queue)
	}
	die := func() recovery.Result {
		worker := e.lease("worker")
		started := e.acquire("s", worker)
		settled, err := e.store.Finish(t.Context(), started.Claim, claims.Ending{
			Step: started.Step, Failure: &claims.Failure{Code: claims.CodeHandler, Message: "no"},
		}, token())
		if err != nil || !settled.Again {
			t.Fatalf("%+v, %v: want a claim without a step", settled, err)
		}
		e.expire(worker)
		return e.pass(recovery.Options{Limits: claims.Limits{Recoveries: 3, Takeovers: allowed}})
	}
	for n := range allowed {
		if r := die(); r.Done != 1 || r.Quarantined != 0 || e.number("continuations", "s") != int64(0) {
			t.Fatalf("death %d: %+v", n+1, r)
		}
	}
	if r := die(); r.Quarantined != 1 || r.Done != 0 {
		t.Errorf("death %d: %+v", allowed+1, r)
	}
	e.checkQuarantined("s", "claims", claims.ReasonNoProgress)
	if state := e.row("SELECT string_agg(input_id, ' ') FROM inputs WHERE state = 'quarantined'"); state != "in11" {
		t.Errorf("the head that was quarantined is %v", state)
	}
}

// S5: where a step ended by the time of the takeover there was progress.
func TestS5I27ProgressBeforeTheTakeover(t *testing.T) {
	e := newEnv(t)
	worker := e.lease("worker")
	started := e.wake("s", worker)
	e.exec("UPDATE sessions SET takeovers = 10")
	e.expire(worker)
	var before string
	parts := e.gated(e.store, once(taking, func() {
		if _, err := e.store.Finish(t.Context(), started.Claim, claims.Ending{Step: started.Step}, token()); err != nil {
			t.Error(err)
		}
		before = e.rows()
	}))
	if r := e.scanner(parts, recovery.Options{}).Pass(t.Context()).Lanes[recovery.LaneClaims]; r.Left != 1 || r.Done+r.Quarantined != 0 {
		t.Errorf("%+v", r)
	}
	e.unchanged(before)
	if n := e.row("SELECT takeovers FROM sessions"); n != int64(0) {
		t.Errorf("%v takeovers are counted after a step that ended", n)
	}
}

// S5: what its worker could not join is quarantined as that in each phase. There
// is no time at which that is not so any more: marks are only raised, and no
// statement of the owner matches a marked claim.
func TestS5I27NeverJoined(t *testing.T) {
	e := newEnv(t)
	worker := e.lease("worker")
	for _, phase := range []claims.SessionID{"running", "cancelling", "cancelled"} {
		started := e.wake(phase, worker)
		switch phase {
		case "cancelling":
			e.interrupt(phase)
		case "cancelled":
			if err := e.store.Decline(t.Context(), started.Claim, started.Step, nil, "no", token()); err != nil {
				t.Fatal(err)
			}
		}
		if err := e.store.Revoke(t.Context(), started.Claim, claims.NeverJoined); err != nil {
			t.Fatal(err)
		}
		if _, err := e.store.HandOver(t.Context(), started.Claim, nil, token()); !errors.Is(err, claims.ErrFenced) {
			t.Errorf("%s: its owner goes on: %v", phase, err)
		}
	}
	if r := e.pass(recovery.Options{UncertainInterrupted: true}); r.Quarantined != 3 || r.Done != 0 {
		t.Errorf("%+v", r)
	}
	for _, phase := range []claims.SessionID{"running", "cancelling", "cancelled"} {
		e.checkQuarantined(phase, "claims", claims.ReasonNeverJoined)
	}
}

// S5: an expired cancelling claim whose owner, late, settles it by the time of
// the write has a known outcome.
func TestS5I28CancellingSettledByTheWrite(t *testing.T) {
	e := newEnv(t)
	worker := e.lease("worker")
	started := e.wake("s", worker)
	e.interrupt("s")
	e.expire(worker)
	var before string
	parts := e.gated(e.store, once(ending, func() {
		if _, err := e.store.Settle(t.Context(), started.Claim, nil, token()); err != nil {
			t.Error(err)
		}
		before = e.rows()
	}))
	if r := e.scanner(parts, recovery.Options{}).Pass(t.Context()).Lanes[recovery.LaneClaims]; r.Left != 1 || r.Done+r.Quarantined != 0 {
		t.Errorf("%+v", r)
	}
	e.unchanged(before)
	e.tail("s", `step.interrupted {"reason":"stop","joined":true}`, `execution.ended {"outcome":"interrupted"}`)
}

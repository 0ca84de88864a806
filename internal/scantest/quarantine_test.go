package scantest

import (
	"errors"
	"slices"
	"strings"
	"testing"
	"time"

	"reveille/claims"
	"reveille/recovery"
)

// quarantinedWith makes a session s whose continuation, of input in1, is
// quarantined, while a steer in2 and a queued in3 wait, and in4 is admitted.
func quarantinedWith(t *testing.T) *env {
	t.Helper()
	e := newEnv(t)
	e.handOver(e.wake("s", e.lease("worker")))
	e.exec("UPDATE continuations SET body = '{'")
	e.wakeWith("s", "", "in2", claims.Steer)
	e.wakeWith("s", "", "in3", claims.Queue)
	admit := e.command(claims.Admit, "s")
	admit.Input = &claims.Input{ID: "in4", Delivery: claims.Queue, Body: []byte(`"x"`)}
	e.apply(admit, nil)
	if r := e.scanner(e.parts(), recovery.Options{}).Pass(t.Context()).Lanes[recovery.LaneRecovery]; r.Quarantined != 1 {
		t.Fatalf("%+v", r)
	}
	return e
}

func (e *env) apply(cmd claims.Command, acq *claims.Acquisition) claims.Outcome {
	e.Helper()
	out, err := e.store.Apply(e.Context(), cmd, acq)
	if err != nil {
		e.Fatal(err)
	}
	return out
}

// pending is the inputs of session s with their states.
func (e *env) pending() string {
	e.Helper()
	s, _ := e.row("SELECT string_agg(input_id || ' ' || state, ', ' ORDER BY position) FROM inputs WHERE session_id = 's'").(string)
	return s
}

// runsNothing tries all that could run session s, and checks that nothing does.
func (e *env) runsNothing() {
	e.Helper()
	steps := e.count("s", claims.StepStartedEvent, "")
	offer := func(cmd claims.Command) {
		acq := acquisition(e.lease("worker"))
		if out := e.apply(cmd, &acq); out.Started != nil || out.Ready {
			e.Errorf("a wake ran it or made it ready: %+v", out)
		}
	}
	for in, d := range map[string]claims.Delivery{"in1": claims.Queue, "in2": claims.Steer, "in3": claims.Queue} { // those that are there
		cmd := e.command(claims.Wake, "s")
		cmd.Input = &claims.Input{ID: in, Delivery: d, Body: []byte(`"x"`)}
		offer(cmd)
	}
	offer(e.command(claims.Wake, "s")) // a bare one
	later := e.command(claims.Wake, "s")
	later.NotBefore = time.Now().Add(-time.Hour)
	offer(later)
	if _, err := e.store.Acquire(e.Context(), "s", acquisition(e.lease("worker"))); !errors.Is(err, claims.ErrQuarantined) {
		e.Errorf("acquiring it: %v", err)
	}
	s := e.scanner(e.parts(), recovery.Options{Reannounce: time.Microsecond})
	e.announced = nil
	for range 3 {
		for lane, r := range s.Pass(e.Context()).Lanes {
			if r.Seen != 0 && lane != recovery.LaneRelay {
				e.Errorf("it is in lane %s: %+v", lane, r)
			}
		}
	}
	if n := e.count("s", claims.StepStartedEvent, ""); n != steps || len(e.announced) != 0 || e.number("claims", "s") != int64(0) {
		e.Errorf("%d steps were started, %v announced", n-steps, e.announced)
	}
}

// promotions is which inputs were promoted, in order.
func (e *env) promotions() (ids []string) {
	e.Helper()
	for _, r := range e.events("s") {
		if r.Type == claims.InputPromoted {
			ids = append(ids, strings.Trim(strings.TrimPrefix(string(r.Data), `{"input":`), `"}`))
		}
	}
	return ids
}

// S7: a quarantined session goes on admitting inputs and runs none. What was
// quarantined is not promoted as anything then, nor after a release that gives it up.
func TestS7I30QuarantinedContinuationIsNeverPromoted(t *testing.T) {
	e := quarantinedWith(t)
	if got := e.pending(); got != "in1 covered, in2 armed, in3 armed, in4 unarmed" {
		t.Fatal(got)
	}
	e.runsNothing()
	if e.wakeWith("s", e.lease("worker"), "in5", claims.Steer).Claim.Execution != "" {
		t.Error("a new steer ran it")
	}
	e.tail("s", `input.admitted {"input":"in5","delivery":"steer","armed":true}`)
	e.wakeWith("s", "", "in6", claims.Queue)
	if got := e.pending(); got != "in1 covered, in2 armed, in3 armed, in4 armed, in5 armed, in6 armed" {
		t.Error(got)
	}
	e.checkQuarantined("s", "recovery", claims.ReasonInvalidContinuation)

	e.release(claims.ReleaseInterrupted)
	worker := e.lease("worker")
	started := e.acquire("s", worker)
	var covered [][]string
	for {
		var ids []string
		for _, in := range started.Step.Inputs {
			ids = append(ids, in.ID)
		}
		covered = append(covered, ids)
		if started.Step.Continues != nil {
			t.Errorf("a step goes on with %+v", started.Step.Continues)
		}
		settled, err := e.store.Finish(t.Context(), started.Claim, claims.Ending{Step: started.Step}, token())
		if err != nil {
			t.Fatal(err)
		}
		if !settled.Again {
			break
		}
		step, _, err := e.store.StartStep(t.Context(), started.Claim, claims.StepID(acquisition(worker).Step), token())
		if err != nil {
			t.Fatal(err)
		}
		started.Step = *step
	}
	want := [][]string{{"in2", "in3", "in5"}, {"in4"}, {"in6"}}
	if !slices.EqualFunc(covered, want, slices.Equal) {
		t.Errorf("after the release the steps covered %v, want %v", covered, want)
	}
	if got := e.promotions(); !slices.Equal(got, []string{"in1", "in2", "in3", "in5", "in4", "in6"}) {
		t.Errorf("promoted %v", got)
	}
}

func (e *env) release(how claims.ReleaseHow) {
	e.Helper()
	id := e.row("SELECT quarantine_id::TEXT FROM quarantines WHERE session_id = 's'").(string)
	r := claims.Release{Session: "s", Quarantine: id, How: how, By: "somebody", Why: "a test"}
	if _, err := e.store.Release(e.Context(), r, token()); err != nil {
		e.Fatal(err)
	}
}

// S7: where no step was open, what would have started next is quarantined too:
// steers and the queued input with them. They are promoted as nothing.
func TestS7I30QuarantinedHeadIsNeverPromoted(t *testing.T) {
	e := newEnv(t)
	worker := e.lease("worker")
	started := e.wake("s", worker)
	e.wakeWith("s", "", "in2", claims.Steer)
	e.wakeWith("s", "", "in3", claims.Queue)
	settled, err := e.store.Finish(t.Context(), started.Claim, claims.Ending{
		Step: started.Step, Failure: &claims.Failure{Code: claims.CodeHandler, Message: "no"},
	}, token())
	if err != nil || !settled.Again {
		t.Fatalf("%+v, %v: want a claim without a step", settled, err)
	}
	e.exec("UPDATE sessions SET takeovers = 10")
	e.expire(worker)
	if r := e.pass(recovery.Options{}); r.Quarantined != 1 {
		t.Fatalf("%+v", r)
	}
	e.checkQuarantined("s", "claims", claims.ReasonNoProgress)
	if got := e.pending(); got != "in1 covered, in2 quarantined, in3 quarantined" {
		t.Fatal(got)
	}
	e.runsNothing()
	e.release(claims.ReleaseInterrupted)
	// A bare wake came in meanwhile, in runsNothing; it buys a step of its own.
	if next := e.acquire("s", e.lease("worker")); len(next.Step.Inputs) != 0 || next.Step.Continues != nil {
		t.Errorf("after the release it goes on as %+v", next.Step)
	}
	if got := e.promotions(); !slices.Equal(got, []string{"in1"}) {
		t.Errorf("promoted %v", got)
	}
}

// S7: an interrupt of a quarantined session changes nothing; with pending:
// discard it cancels the inputs that wait, and nothing of the quarantine.
func TestS7I30InterruptsOfAQuarantinedSession(t *testing.T) {
	e := quarantinedWith(t)
	// What a command changes by being applied is the session's mark, and no more.
	same := func(what string, f func()) {
		t.Helper()
		const all = `SELECT (SELECT jsonb_agg(to_jsonb(q)) FROM quarantines q)::TEXT || (SELECT jsonb_agg(to_jsonb(i) ORDER BY position) FROM inputs i)::TEXT
			|| (SELECT jsonb_agg(to_jsonb(v) ORDER BY last_seq) FROM events v)::TEXT || (SELECT count(*) FROM continuations)
			|| (SELECT jsonb_agg(to_jsonb(s) - '{command_seq,command_time,updated_at}'::TEXT[]) FROM sessions s)::TEXT`
		before := e.row(all)
		f()
		if after := e.row(all); before != after {
			t.Errorf("%s changed\n%v into\n%v", what, before, after)
		}
	}
	same("an interrupt", func() { e.interrupt("s") })
	same("an interrupt of an execution", func() {
		cmd := e.command(claims.Interrupt, "s")
		for _, r := range e.events("s") {
			if r.Execution != "" {
				cmd.Execution = r.Execution
			}
		}
		e.apply(cmd, nil)
	})
	quarantine := e.row("SELECT to_jsonb(q)::TEXT FROM quarantines q")
	discard := e.command(claims.Interrupt, "s")
	discard.Discard = true
	e.apply(discard, nil)
	if got := e.pending(); got != "in1 covered, in2 cancelled, in3 cancelled, in4 cancelled" {
		t.Error(got)
	}
	e.tail("s", `input.cancelled {"input":"in2","reason":"stop"}`, `input.cancelled {"input":"in3","reason":"stop"}`, `input.cancelled {"input":"in4","reason":"stop"}`)
	if after := e.row("SELECT to_jsonb(q)::TEXT FROM quarantines q"); after != quarantine {
		t.Errorf("the quarantine was\n%v, is\n%v", quarantine, after)
	}
	if n := e.count("s", claims.ContinuationCancelled, ""); n != 0 {
		t.Error("what is quarantined was cancelled")
	}
	e.runsNothing()
}

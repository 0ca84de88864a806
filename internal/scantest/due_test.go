package scantest

import (
	"context"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"reveille/claims"
	"reveille/claims/crdb"
	"reveille/recovery"
)

// runs runs a scanner whose pauses would never end by themselves, and gives the
// sessions it announces.
func (e *env) runs(p recovery.Parts, o recovery.Options) <-chan claims.SessionID {
	e.Helper()
	heard := make(chan claims.SessionID, 100)
	e.heard = heard
	o.Every, o.Reannounce = 1000*time.Hour, 1000*time.Hour
	s := e.scanner(p, o)
	ctx, cancel := context.WithCancel(e.Context())
	ended := make(chan error, 1)
	go func() { ended <- s.Run(ctx) }()
	e.Cleanup(func() {
		cancel()
		if err := <-ended; err != nil {
			e.Error(err)
		}
	})
	return heard
}

// A delayed input, a delayed bare wake and a retry in its backoff are announced
// when they are due, by the database's clock, whatever the time between passes.
func TestAnnouncedAtItsTime(t *testing.T) {
	e := newEnv(t)
	worker := e.lease("worker")
	in := time.Second
	retried := e.wake("retry", worker)
	if _, err := e.store.Finish(t.Context(), retried.Claim, claims.Ending{
		Step: retried.Step, Failure: &claims.Failure{Code: claims.CodeHandler, Message: "no", Retryable: true}, Retry: &in,
	}, token()); err != nil {
		t.Fatal(err)
	}
	at := e.row("SELECT clock_timestamp() + INTERVAL '1 second'").(time.Time)
	for _, id := range []claims.SessionID{"input", "bare"} {
		cmd := e.command(claims.Wake, id)
		cmd.NotBefore = at
		if id == "input" {
			cmd.Input = &claims.Input{ID: "in1", Delivery: claims.Queue, Body: []byte(`"x"`)}
		}
		e.apply(cmd, nil)
	}
	heard := e.runs(e.parts(), recovery.Options{})
	for range 3 {
		id := wait(e, "what waits for its time is announced", heard)
		if due := e.row("SELECT ready_at <= clock_timestamp() FROM sessions WHERE session_id = $1", string(id)); due != true {
			t.Errorf("%s was announced before its time", id)
		}
		if next := e.acquire(id, worker); id == "retry" && (next.Step.Continues == nil || next.Step.Continues.Kind != claims.KindRetry) {
			t.Errorf("%s continues %+v", id, next.Step.Continues)
		}
	}
}

// slowRelays holds a pass in its relay lane, behind the lanes of what is due.
type slowRelays struct {
	*crdb.Store
	hold func()
}

func (s slowRelays) DueRelays(ctx context.Context, limit int) ([]claims.DueSession, error) {
	s.hold()
	return s.Store.DueRelays(ctx, limit)
}

// What becomes due while a pass is made, behind its lane, does not wait for the
// pause after it either.
func TestDueWhileAPassIsMade(t *testing.T) {
	e := newEnv(t)
	cmd := e.command(claims.Wake, "s")
	cmd.NotBefore = e.row("SELECT clock_timestamp() + INTERVAL '1 hour'").(time.Time)
	e.apply(cmd, nil)
	p := e.parts()
	first := true
	p.Relays = slowRelays{e.store, func() {
		if first {
			first = false
			e.exec("UPDATE sessions SET ready_at = statement_timestamp(), ready_due_at = statement_timestamp()")
			e.exec("UPDATE wakes SET not_before = statement_timestamp()")
		}
	}}
	if id := wait(e, "what became due meanwhile is announced", e.runs(p, recovery.Options{})); id != "s" {
		t.Errorf("announced %s", id)
	}
}

// The oldest row of a lane is as old as it is by the database, also to a scanner
// that sees it for the first time.
func TestOldestSecondsAreTheDatabases(t *testing.T) {
	e := newEnv(t)
	worker := e.lease("worker")
	e.wake("claims", worker)
	e.handOver(e.wake("recovery", e.lease("worker")))
	e.wake("ordinary", "")
	e.exec("UPDATE leases SET expires_at = statement_timestamp() - INTERVAL '1 hour' WHERE holder = $1::UUID", string(worker))
	e.exec("UPDATE continuations SET not_before = not_before - INTERVAL '2 hours'")
	e.exec("UPDATE sessions SET ready_at = ready_at - INTERVAL '3 hours' WHERE session_id = 'ordinary'")
	e.exec("UPDATE events SET created_at = created_at - INTERVAL '4 hours' WHERE session_id = 'ordinary'")
	s := e.scanner(e.parts(), recovery.Options{})
	reg := prometheus.NewPedanticRegistry()
	reg.MustRegister(s.Collectors()...)
	s.Pass(t.Context())
	families, err := reg.Gather()
	if err != nil {
		t.Fatal(err)
	}
	got := map[string]float64{}
	for _, f := range families {
		if f.GetName() == "reveille_oldest_seconds" {
			for _, m := range f.GetMetric() {
				got[m.GetLabel()[0].GetValue()] = m.GetGauge().GetValue()
			}
		}
	}
	for lane, hours := range map[string]float64{"claims": 1, "recovery": 2, "ordinary": 3, "relay": 4} {
		if least := hours * 3600; got[lane] < least || got[lane] > least+1800 {
			t.Errorf("the oldest of lane %s is %v s old, want %v", lane, got[lane], least)
		}
	}
	if len(got) != 4 {
		t.Errorf("ages of %v", got)
	}
}

// The retention lane deletes what is relayed, served and old, and nothing else;
// it is visited again at once only where there was something.
func TestRetentionLane(t *testing.T) {
	e := newEnv(t)
	worker := e.lease("worker")
	for _, id := range []claims.SessionID{"old", "unrelayed", "young"} {
		started := e.wake(id, worker)
		if _, err := e.store.Finish(t.Context(), started.Claim, claims.Ending{Step: started.Step}, token()); err != nil {
			t.Fatal(err)
		}
	}
	e.wake("open", worker)
	e.wake("pending", "")
	e.exec("UPDATE sessions SET relayed_seq = last_seq, relay_due_at = NULL WHERE session_id <> 'unrelayed'")
	e.exec("UPDATE events SET created_at = created_at - INTERVAL '10 days' WHERE session_id <> 'young'")
	e.exec("UPDATE inputs SET admitted_at = admitted_at - INTERVAL '10 days' WHERE session_id <> 'young'")
	e.exec("UPDATE sessions SET kept_since = kept_since - INTERVAL '10 days' WHERE session_id <> 'young'")
	left := func() map[claims.SessionID]string {
		out := map[claims.SessionID]string{}
		for _, id := range []claims.SessionID{"old", "unrelayed", "young", "open", "pending"} {
			out[id] = e.row(`SELECT (SELECT count(*) FROM sessions WHERE session_id = $1) || ' ' || (SELECT count(*) > 0 FROM events WHERE session_id = $1)
				|| ' ' || (SELECT count(*) FROM inputs WHERE session_id = $1)`, string(id)).(string)
		}
		return out
	}
	s := e.scanner(e.parts(), recovery.Options{Retention: 7 * 24 * time.Hour})
	if r := s.Pass(t.Context()).Lanes[recovery.LaneRetention]; r.Seen != 4 || r.Done != 4 {
		t.Errorf("%+v", r)
	}
	if r, visited := s.Pass(t.Context()).Lanes[recovery.LaneRetention]; !visited || r.Seen != 0 {
		t.Errorf("the visit after one that found something: %v, %+v", visited, r)
	}
	if _, visited := s.Pass(t.Context()).Lanes[recovery.LaneRetention]; visited {
		t.Error("the lane was visited though nothing was there")
	}
	for id, want := range map[claims.SessionID]string{
		"old": "1 false 0", "unrelayed": "1 true 1", "young": "1 true 1", "open": "1 true 1", "pending": "1 false 1",
	} {
		if got := left()[id]; got != want {
			t.Errorf("of %s there is left (session, events, inputs): %s, want %s", id, got, want)
		}
	}
	// What the open step and the wake promised is as it was.
	if next := e.acquire("pending", worker); len(next.Step.Inputs) != 1 {
		t.Errorf("pending starts %+v", next.Step)
	}
}

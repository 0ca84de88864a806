package crdb_test

import (
	"errors"
	"strings"
	"testing"
	"time"

	"reveille/claims"
	"reveille/claims/crdb"
	"reveille/internal/dbtest"
	"reveille/internal/faultproxy"
)

func newProxy(t testing.TB, url string, skew time.Duration) *faultproxy.Proxy {
	t.Helper()
	p, err := faultproxy.New(url, skew)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(p.Close)
	return p
}

// proxied is a rig whose store is behind a proxy. The store closes first: its Close waits for its connections.
func proxied(t testing.TB, o crdb.Options) (*rig, *faultproxy.Proxy) {
	t.Helper()
	url := dbtest.New(t)
	p := newProxy(t, url, 0)
	return rigOn(t, url, p.URL(), o), p
}

// faults are all that can happen to a transaction of n statements.
func faults(n int) []faultproxy.Fault {
	var out []faultproxy.Fault
	for at := 1; at <= n; at++ {
		out = append(out, faultproxy.Fault{Kind: faultproxy.Restart, At: at})
	}
	// To lose a connection before COMMIT is the same wherever it is, and a new one is dear: once, where most was done.
	out = append(out, faultproxy.Fault{Kind: faultproxy.CutBefore, At: n})
	for _, k := range []faultproxy.Kind{
		faultproxy.Restart, faultproxy.UnknownApplied, faultproxy.UnknownDropped,
		faultproxy.CutBefore, faultproxy.CutDuring, faultproxy.CutAfter, faultproxy.Late,
	} {
		out = append(out, faultproxy.Fault{Kind: k, At: faultproxy.Commit})
	}
	return out
}

// ambiguous are the faults after which nobody can know whether the transaction committed.
func ambiguous(f faultproxy.Fault) bool {
	return f.At == faultproxy.Commit && f.Kind != faultproxy.Restart && f.Kind != faultproxy.CutAfter
}

// TestOperationsUnderFaults runs each operation under each fault at each position. Afterwards its answer is true and its
// effect is there exactly once; an acquisition may not know, and then HandOver resolves it (I3).
func TestOperationsUnderFaults(t *testing.T) {
	url := dbtest.New(t) // for all: what a database costs is more than what runs in it
	for _, sc := range scenarios() {
		t.Run(sc.name, func(t *testing.T) {
			t.Parallel()
			p := newProxy(t, url, 0)
			base := rigOn(t, url, p.URL(), crdb.Options{})
			plain := base.fresh(sc.name + ", plain")
			sc.prepare(plain)
			plain.ok(sc.op(plain))
			for _, f := range faults(p.Stats().Last) {
				t.Run(f.String(), func(t *testing.T) {
					r := base.fresh(sc.name + ", " + f.String())
					r.t = t
					before := sc.prepare(r)
					p.Arm(f)
					err := sc.op(r)
					if fired := p.Disarm(); fired != 1 {
						t.Fatalf("the fault happened %d times", fired)
					}
					r.reconnect()
					sc.judge(r, before, f, err)
				})
			}
			checkInvariants(t, url, func(id string) bool { return strings.HasPrefix(id, sc.name+", ") })
		})
	}
}

// reconnect lets the store find out about a connection that was cut behind an answer: its reads are not tried again.
func (r *rig) reconnect() {
	r.t.Helper()
	for range 10 {
		if r.store.Ping(r.ctx()) == nil {
			return
		}
	}
	r.t.Fatal("the store does not reach its database")
}

// judge holds the answer of an operation under a fault against what is there.
func (sc *scenario) judge(r *rig, before int, f faultproxy.Fault, err error) {
	r.t.Helper()
	if !errors.Is(err, claims.ErrOutcomeUnknown) {
		r.ok(err)
		sc.verify(r, before)
		return
	}
	if !sc.acquires || !ambiguous(f) {
		r.t.Fatalf("does not know its outcome: %v", err)
	}
	r.claim = claims.Claim{Session: r.session, Execution: r.acq.Execution}
	err = r.handOver()
	for tries := 0; f.Kind == faultproxy.Late && errors.Is(err, claims.ErrFenced) && tries < 10_000; tries++ {
		err = r.handOver() // "deleted nothing" proves nothing: the old commit lands any moment
	}
	if errors.Is(err, claims.ErrFenced) {
		r.wantTail(before, "")
		r.ok(sc.op(r))
		sc.verify(r, before)
		return
	}
	r.ok(err)
	r.wantTail(before, sc.log+" step.failed(shutdown) execution.ended(handed_over)")
	r.wantSettled(claims.Settlement{Outcome: claims.OutcomeHandedOver, Ready: true})
	r.wantClaim("", false)
	r.wantReady(true)
}

// TestCommitThatStalls holds a COMMIT until the store has given up waiting for its answer, and lets it happen then.
func TestCommitThatStalls(t *testing.T) {
	stalls := map[string]bool{"wake of a new session": true, "wake acquires a new session": true, "finish drains": true, "convert": true, "interrupt of the open step": true}
	for _, sc := range scenarios() {
		if !stalls[sc.name] {
			continue
		}
		t.Run(sc.name, func(t *testing.T) {
			t.Parallel()
			r, p := proxied(t, crdb.Options{Timeout: 500 * time.Millisecond})
			before := sc.prepare(r)
			f := faultproxy.Fault{Kind: faultproxy.Stall, At: faultproxy.Commit}
			p.Arm(f)
			err := sc.op(r)
			if fired := p.Disarm(); fired != 1 {
				t.Fatalf("the fault happened %d times", fired)
			}
			f.Kind = faultproxy.Late // what it is from here on
			sc.judge(r, before, f, err)
			r.check()
		})
	}
}

// TestHeartbeatUnderFaults: a heartbeat tries once, and says nothing where it does not know.
func TestHeartbeatUnderFaults(t *testing.T) {
	r, p := proxied(t, crdb.Options{})
	for _, k := range []faultproxy.Kind{faultproxy.Restart, faultproxy.CutBefore, faultproxy.CutDuring} {
		r.exec("UPDATE leases SET expires_at = statement_timestamp() + INTERVAL '10 seconds' WHERE holder = $1", string(r.holder))
		p.Arm(faultproxy.Fault{Kind: k, At: faultproxy.Single})
		if alive, err := r.store.Heartbeat(r.ctx(), r.holder, time.Hour); err == nil || alive {
			t.Errorf("%v: heartbeat answers %v, %v", k, alive, err)
		}
		if fired := p.Disarm(); fired != 1 {
			t.Fatalf("%v: the fault happened %d times", k, fired)
		}
		extended := scan[bool](r, "SELECT expires_at > statement_timestamp() + INTERVAL '30 minutes' FROM leases WHERE holder = $1", string(r.holder))
		if extended != (k == faultproxy.CutDuring) {
			t.Errorf("%v: extended is %v", k, extended)
		}
		if alive, err := r.store.Heartbeat(r.ctx(), r.holder, time.Hour); err != nil || !alive {
			t.Errorf("%v: the next heartbeat answers %v, %v", k, alive, err)
		}
	}
}

// TestGatewaysWithOtherClocks runs a session through two gateways whose clocks are 1.6 s apart, by turns. What a slow
// clock does not find due yet waits; nothing is lost, and the fences hold.
func TestGatewaysWithOtherClocks(t *testing.T) {
	url := dbtest.New(t)
	fast := rigOn(t, url, newProxy(t, url, 800*time.Millisecond).URL(), crdb.Options{})
	slow := fast.as(newProxy(t, url, -800*time.Millisecond).URL())
	// turn makes the other gateway's rig the one to go on with.
	turn := func(from, to *rig) *rig {
		store := to.store
		*to = *from
		to.store = store
		return to
	}
	r := fast
	r.run(input("a"))
	r = turn(r, slow)
	r.ok(r.record("by the slow one"))
	r = turn(r, fast)
	r.ok(r.finish(continued))
	r = turn(r, slow)
	r.ok(r.startStep()) // promised by the fast one, it is not due yet: settled, and ready later
	if r.nextStep != nil || r.settled.Outcome != claims.OutcomeCompleted {
		t.Fatalf("started %+v, settled %+v", r.nextStep, r.settled)
	}
	r.check()
	r = turn(r, fast)
	r.ok(r.acquire())
	r = turn(r, slow)
	r.wake(input("b"))
	r.interrupt()
	r = turn(r, fast)
	r.ok(r.settle())
	r.ok(r.acquire())
	r = turn(r, slow)
	r.ok(r.handOver())
	r = turn(r, fast)
	r.ok(r.acquire())
	r.ok(r.finish(nil))
	r.wantLog(`input.admitted(a) execution.started input.promoted(a) step.started(a) text step.ended execution.ended(completed)
		execution.started step.started(<continue0) input.admitted(b) execution.cancelling step.interrupted execution.ended(interrupted)
		execution.started input.promoted(b) step.started(b) step.failed(shutdown) execution.ended(handed_over)
		execution.started step.started(b<handover0) step.ended execution.ended(completed)`)
	r.check()
}

// A read that the database breaks off decides nothing, so it is done again; one that it breaks off again and again is an
// error that a program which starts waits out.
func TestReadsUnderFaults(t *testing.T) {
	r, p := proxied(t, crdb.Options{})
	for _, f := range []faultproxy.Fault{
		{Kind: faultproxy.Restart, At: 1},
		{Kind: faultproxy.Restart, At: faultproxy.Commit},
		{Kind: faultproxy.UnknownApplied, At: faultproxy.Commit},
		{Kind: faultproxy.UnknownDropped, At: faultproxy.Commit},
	} {
		p.Arm(f)
		if err := r.store.CheckSchema(t.Context()); err != nil {
			t.Errorf("%v: %v", f, err)
		}
		if p.Disarm() != 1 {
			t.Errorf("%v did not happen", f)
		}
		for range 3 {
			p.Arm(f)
		}
		if err := r.store.CheckSchema(t.Context()); err == nil || !crdb.Unavailable(err) {
			t.Errorf("%v, three times: %v, want an error that is worth waiting for", f, err)
		}
		p.Disarm()
	}
}

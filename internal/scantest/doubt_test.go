package scantest

import (
	"fmt"
	"testing"

	"reveille/claims"
	"reveille/internal/faultproxy"
	"reveille/recovery"
)

// A COMMIT of the scanner that gets no answer was done or was not: each
// operation ends its row once and counts it once all the same (I28, I31).
func TestI28UnknownCommits(t *testing.T) {
	kinds := []faultproxy.Kind{
		faultproxy.Restart, faultproxy.UnknownApplied, faultproxy.UnknownDropped, faultproxy.CutBefore, faultproxy.CutDuring, faultproxy.CutAfter, faultproxy.Late,
	}
	for _, op := range []operation{taking, converting, quarantining, ending, removing} {
		t.Run(string(op), func(t *testing.T) {
			e := newEnv(t)
			proxy, err := faultproxy.New(e.url, 0)
			if err != nil {
				t.Fatal(err)
			}
			t.Cleanup(proxy.Close)
			if op == quarantining {
				e.exec("ALTER TABLE continuations ADD CONSTRAINT refuse CHECK (session_id NOT LIKE 's%')")
			}
			var kind faultproxy.Kind
			parts := e.gated(open(t, proxy.URL()), func(at operation, _ claims.SessionID) {
				if at == op {
					proxy.Arm(faultproxy.Fault{Kind: kind, At: faultproxy.Commit})
				}
			})
			s := e.scanner(parts, recovery.Options{})
			for _, kind = range kinds {
				id := claims.SessionID(fmt.Sprintf("s%d", kind))
				worker := e.lease("worker")
				started := e.wake(id, worker)
				lane, want := recovery.LaneClaims, recovery.Result{Seen: 1, Done: 1}
				switch op {
				case quarantining:
					want = recovery.Result{Seen: 1, Quarantined: 1}
				case ending:
					e.interrupt(id)
					want = recovery.Result{Seen: 1, Quarantined: 1}
				case removing:
					e.handOver(started)
					e.damage("UPDATE continuations SET body = 'bad' WHERE session_id = '@s'", id)
					lane, want = recovery.LaneRecovery, recovery.Result{Seen: 1, Quarantined: 1}
				}
				e.expire(worker)
				if got := s.Pass(t.Context()).Lanes[lane]; got != want {
					t.Errorf("%v: %+v, want %+v", kind, got, want)
				}
				if n := proxy.Disarm(); n != 1 {
					t.Errorf("%v: the fault happened %d times", kind, n)
				}
				quarantines := e.count(id, claims.SessionQuarantined, "")
				if n := e.count(id, claims.ExecutionEnded, ""); n != 1 || quarantines != want.Quarantined || e.number("claims", id) != int64(0) {
					t.Errorf("%v: %d ends, %d quarantines", kind, n, quarantines)
				}
				if (e.reason(id) != nil) != (want.Quarantined == 1) {
					t.Errorf("%v: quarantined as %v", kind, e.reason(id))
				}
				e.exec("DELETE FROM continuations")                        // the next case is alone in its lane
				if got := s.Pass(t.Context()).Lanes[lane]; got.Seen != 0 { // it may meet connections that were cut
					t.Errorf("%v: and in the next pass %+v", kind, got)
				}
			}
		})
	}
}

// The mark of a claim becomes its verdict at the takeover, stays through later
// ones, and is raised by what comes meanwhile.
func TestI32VerdictOutlivesScanners(t *testing.T) {
	for _, tc := range []struct {
		name  string
		cause claims.Cause
		later func(e *env) // while a scanner that is dead has it
		want  string
	}{
		{"none", claims.None, nil, `execution.ended {"outcome":"recovered"}`},
		{"unknown", claims.Unknown, nil, `execution.ended {"outcome":"recovered"}`},
		{"interrupted", claims.Interrupted, nil, `execution.ended {"outcome":"interrupted"}`},
		{"never joined", claims.NeverJoined, nil, `execution.ended {"outcome":"quarantined"}`},
		{"interrupted later", claims.None, func(e *env) { e.interrupt("s") }, `execution.ended {"outcome":"interrupted"}`},
		{"interrupted later by its first execution", claims.Unknown, func(e *env) {
			cmd := e.command(claims.Interrupt, "s")
			cmd.Execution = e.events("s")[1].Execution
			e.apply(cmd, nil)
		}, `execution.ended {"outcome":"interrupted"}`},
		{"never joined, interrupted later", claims.NeverJoined, func(e *env) { e.interrupt("s") }, `execution.ended {"outcome":"quarantined"}`},
	} {
		t.Run(tc.name, func(t *testing.T) {
			e := newEnv(t)
			worker := e.lease("worker")
			started := e.wake("s", worker)
			if tc.cause != claims.None {
				if err := e.store.Revoke(t.Context(), started.Claim, tc.cause); err != nil {
					t.Fatal(err)
				}
			}
			e.expire(worker)
			for range 2 { // two scanners die between takeover and conversion
				e.expire(e.takeOver())
			}
			if tc.later != nil {
				tc.later(e)
			}
			if r := e.pass(recovery.Options{}); r.Done+r.Quarantined != 1 {
				t.Errorf("%+v", r)
			}
			e.tail("s", tc.want)
			if n := e.row("SELECT takeovers FROM sessions"); n != int64(1) {
				t.Errorf("%v takeovers are counted: a scanner that dies is not the session's doing", n)
			}
		})
	}
}

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

// Each test of this file was written to show a defect of the store as it stood
// when the scanner was built, and failed then. It passes once the store is right.

// A transaction judges a lease by the database's clock at its statement, but by
// the row of its snapshot, which may be older: where it stalls in between, a
// lease that a heartbeat has extended meanwhile looks expired. Reading the
// lease locks nothing, so nothing makes the transaction fail.
func TestI1StalledScannerSparesExtendedLease(t *testing.T) {
	for _, phase := range []claims.Phase{claims.Running, claims.Cancelling} {
		t.Run(string(phase), func(t *testing.T) {
			e := newEnv(t)
			worker := e.lease("worker")
			started := e.wake("s", worker)
			if phase == claims.Cancelling {
				e.interrupt("s")
			}
			c := claims.Candidate{Session: "s", Execution: started.Claim.Execution, Phase: phase}
			// Whoever reads claims stalls, with the snapshot taken already.
			stall, err := e.db.Begin(t.Context())
			if err != nil {
				t.Fatal(err)
			}
			defer func() { _ = stall.Rollback(context.WithoutCancel(t.Context())) }()
			if _, err := stall.Exec(t.Context(), "LOCK TABLE claims IN ACCESS EXCLUSIVE MODE"); err != nil {
				t.Fatal(err)
			}
			e.exec("UPDATE leases SET expires_at = clock_timestamp() + INTERVAL '2 seconds' WHERE holder = $1::UUID", string(worker))
			expires := e.row("SELECT expires_at FROM leases WHERE holder = $1::UUID", string(worker))
			scanner := e.lease("scanner")
			answer := make(chan error, 1)
			go func() {
				var err error
				if phase == claims.Running {
					_, err = e.store.TakeOver(t.Context(), c, scanner, acquisition(scanner).Execution)
				} else {
					_, err = e.store.EndExpired(t.Context(), c, false, token())
				}
				answer <- err
			}()
			e.blocked("the scanner's transaction waits")
			// The worker is alive: its heartbeat is in time.
			if ok, err := e.store.Heartbeat(t.Context(), worker, time.Hour); !ok || err != nil {
				t.Fatal(ok, err)
			}
			// The time at which the lease would have expired, by the database's clock, goes by.
			e.row("SELECT pg_sleep_until($1)::TEXT", expires)
			if err := stall.Commit(t.Context()); err != nil {
				t.Fatal(err)
			}
			if err := <-answer; !errors.Is(err, claims.ErrFenced) {
				t.Errorf("the claim of a live lease was taken or quarantined (%v)", err)
			}
			if _, err := e.store.Finish(t.Context(), started.Claim, claims.Ending{Step: started.Step}, token()); errors.Is(err, claims.ErrFenced) {
				t.Errorf("the owner, whose lease was never expired, has lost its claim: %v", err)
			}
		})
	}
}

// A step that says it is of another execution than its claim ran as is of
// another identity (I27).
func TestI27StepOfAnotherExecution(t *testing.T) {
	e := newEnv(t)
	worker := e.lease("worker")
	started := e.wake("s", worker)
	e.exec("UPDATE claims SET step = replace(step, $1, $2) WHERE session_id = 's'",
		string(started.Claim.Execution), string(acquisition(worker).Execution))
	e.expire(worker)
	if r := e.pass(recovery.Options{}); r.Quarantined != 1 || e.reason("s") != "identity_conflict" {
		t.Errorf("%+v, quarantined as %v", r, e.reason("s"))
	}
}

// The claim counts a newer step than the one that stands on it (I27).
func TestI27StepSuperseded(t *testing.T) {
	e := newEnv(t)
	worker := e.lease("worker")
	e.wake("s", worker)
	e.exec("UPDATE claims SET steps = 2 WHERE session_id = 's'")
	e.expire(worker)
	if r := e.pass(recovery.Options{}); r.Quarantined != 1 || e.reason("s") != "superseded" {
		t.Errorf("%+v, quarantined as %v", r, e.reason("s"))
	}
}

// Of two promises of one chain the older is superseded by the newer (I27).
func TestI27ContinuationSuperseded(t *testing.T) {
	e := newEnv(t)
	worker := e.lease("worker")
	e.wake("s", worker)
	e.expire(worker)
	e.pass(recovery.Options{Reannounce: time.Microsecond})
	e.exec(`INSERT INTO continuations (session_id, number, shard, lineage, not_before, due_at, body)
		SELECT session_id, 2, shard, lineage, not_before, due_at, replace(body, '"number":1', '"number":2') FROM continuations WHERE session_id = 's'`)
	e.exec("UPDATE sessions SET continuations = 2, promised = 2 WHERE session_id = 's'")
	p := e.scanner(e.parts(), recovery.Options{}).Pass(t.Context())
	if r := p.Lanes[recovery.LaneRecovery]; e.reason("s") != "superseded" {
		t.Errorf("%+v, quarantined as %v", r, e.reason("s"))
	}
}

// Sessions whose head is a continuation are the recovery lane's; where they
// fill the ordinary lane too, a pass makes half of the first announcements.
func TestI29OrdinaryLaneHasOtherSessions(t *testing.T) {
	e := newEnv(t)
	worker := e.lease("worker")
	for i := range 101 {
		e.wake(claims.SessionID(fmt.Sprintf("c%d", i)), worker)
	}
	e.expire(worker)
	p := e.parts()
	quiet := &bus{}
	p.Announcer, p.Relayer = quiet, quiet
	s := e.scanner(p, recovery.Options{Reannounce: time.Microsecond})
	for range 2 {
		s.Pass(t.Context())
	}
	for i := range 101 {
		e.wake(claims.SessionID(fmt.Sprintf("o%d", i)), "")
	}
	e.scanner(e.parts(), recovery.Options{}).Pass(t.Context())
	if n := len(slices.Compact(slices.Sorted(slices.Values(e.announced)))); n != 200 {
		t.Errorf("a pass over 101 continuations and 101 ordinary sessions announced %d sessions, want 2 × 100", n)
	}
}

// together lets two scanners read the same rows before either touches them.
type together struct {
	*crdb.Store
	read *sync.WaitGroup
}

func (s together) DueSessions(ctx context.Context, limit int) ([]claims.DueSession, error) {
	ids, err := s.Store.DueSessions(ctx, limit)
	s.read.Done()
	s.read.Wait()
	return ids, err
}

// The touch tells nobody whose it was, so both announce all of them.
func TestI31TwoScannersAnnounceOnce(t *testing.T) {
	e := newEnv(t)
	for i := range 10 {
		e.wake(claims.SessionID(fmt.Sprintf("s%d", i)), "")
	}
	var read, passes sync.WaitGroup
	read.Add(2)
	for range 2 {
		p := e.parts()
		p.Sessions = together{e.store, &read}
		s := e.scanner(p, recovery.Options{Reannounce: time.Minute})
		passes.Go(func() { s.Pass(t.Context()) })
	}
	passes.Wait()
	if n := len(e.announced); n != 10 {
		t.Errorf("10 ready sessions were announced %d times by 2 scanners", n)
	}
}

// What is poison is judged before the transaction that quarantines it; where
// it is not so any more by then, it is left alone (I28).
func TestI28ContinuationJudgedAgainUnderItsFence(t *testing.T) {
	e := newEnv(t)
	worker := e.lease("worker")
	e.wake("s", worker)
	e.expire(worker)
	e.pass(recovery.Options{Reannounce: time.Microsecond})
	epoch := e.row("SELECT epoch FROM sessions WHERE session_id = 's'")
	e.exec("UPDATE sessions SET epoch = 0 WHERE session_id = 's'")
	due, err := e.store.DueContinuations(t.Context(), 1)
	if err != nil || len(due) != 1 {
		t.Fatal(due, err)
	}
	_, bad := claims.DecodeContinuation("s", due[0].Number, due[0].Epoch, []byte(due[0].Body))
	if bad == nil || bad.Reason != claims.ReasonIdentityConflict {
		t.Fatal(bad)
	}
	e.exec("UPDATE sessions SET epoch = $1 WHERE session_id = 's'", epoch)
	if err := e.store.QuarantineContinuation(t.Context(), due[0], token()); !errors.Is(err, claims.ErrFenced) || e.reason("s") != nil {
		t.Errorf("a continuation that is valid was quarantined as %v (%v)", e.reason("s"), err)
	}
}

// A continuation whose session is not there comes back for ever: it can be
// neither started nor quarantined (I27: never recovered, always quarantined).
func TestI27ContinuationWithoutSession(t *testing.T) {
	e := newEnv(t)
	e.exec(`INSERT INTO continuations (session_id, number, shard, lineage, not_before, due_at, body)
		VALUES ('nobody', 1, 0, '00000000-0000-4000-8000-000000000001', statement_timestamp(), statement_timestamp(), '{}')`)
	s := e.scanner(e.parts(), recovery.Options{Reannounce: time.Microsecond})
	for range 3 {
		s.Pass(t.Context())
	}
	if e.number("continuations", "nobody") != int64(0) {
		t.Error("it is still in the recovery lane after three passes")
	}
}

// The same where the session's counter does not know it: taking it out makes
// the counter negative, and the database refuses that.
func TestI27ContinuationThatIsNotCounted(t *testing.T) {
	e := newEnv(t)
	e.wake("s", "")
	e.exec(`INSERT INTO continuations (session_id, number, shard, lineage, not_before, due_at, body)
		VALUES ('s', 1, 0, '00000000-0000-4000-8000-000000000001', statement_timestamp(), statement_timestamp(), 'not JSON')`)
	p := e.scanner(e.parts(), recovery.Options{}).Pass(t.Context())
	if r := p.Lanes[recovery.LaneRecovery]; r.Quarantined != 1 || e.reason("s") != "invalid_continuation" {
		t.Errorf("%+v, quarantined as %v", r, e.reason("s"))
	}
}

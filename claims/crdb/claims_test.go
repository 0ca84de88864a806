package crdb_test

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"reveille/claims"
	"reveille/claims/crdb"
	"reveille/internal/faultproxy"
)

// each phase and expiry that a claim can be in, by the store's own operations.
func claimSituations() map[string]func(*rig) {
	return map[string]func(*rig){
		"running":             running,
		"between steps":       betweenSteps,
		"running, expired":    func(r *rig) { running(r); r.expire(r.holder) },
		"running, no lease":   func(r *rig) { running(r); r.exec("DELETE FROM leases WHERE holder = $1", string(r.holder)) },
		"running, revoked":    func(r *rig) { running(r); r.ok(r.store.Revoke(r.ctx(), r.claim, claims.Unknown)) },
		"taken over":          takenOver,
		"cancelling":          func(r *rig) { running(r); r.interrupt() },
		"cancelling, expired": func(r *rig) { running(r); r.interrupt(); r.expire(r.holder) },
		"cancelled":           func(r *rig) { running(r); r.ok(r.decline()) },
		"cancelled and revoke": func(r *rig) {
			running(r)
			r.ok(r.decline())
			r.ok(r.store.Revoke(r.ctx(), r.claim, claims.NeverJoined))
		},
	}
}

func TestI2AcquisitionNeverOverwritesAClaim(t *testing.T) {
	base := newRig(t)
	for name, setup := range claimSituations() {
		t.Run(name, func(t *testing.T) {
			r := base.fresh(name)
			r.t = t
			setup(r)
			r.wake(input("more"))
			was, log := r.claimRow(), len(r.briefs())
			r.holder = r.lease("worker", longLease)
			r.wantErr(r.acquire(), claims.ErrBusy)
			cmd := r.command(claims.Wake)
			r.ok(r.apply(cmd, r.newAcquisition()))
			if r.out.Started != nil || r.out.Ready {
				t.Fatalf("a wake with a free slot answered %+v", r.out)
			}
			if now := r.claimRow(); now != was {
				t.Fatalf("the claim was %s, is %s", was, now)
			}
			r.wantTail(log, "")
			r.check()
		})
	}
	t.Run("without a live lease of its own", func(t *testing.T) {
		r := base.fresh("no lease")
		r.t = t
		r.wake(input("a"))
		r.expire(r.holder)
		r.wantErr(r.acquire(), claims.ErrLeaseLost)
		r.holder = claims.HolderID(newID()) // never had one
		r.wantErr(r.acquire(), claims.ErrLeaseLost)
		r.wantClaim("", false)
		r.wantLog("input.admitted(a)")
		r.check()
	})
	t.Run("of nothing", func(t *testing.T) {
		r := base.fresh("never heard of")
		r.t = t
		r.wantErr(r.acquire(), claims.ErrNotReady)
	})
}

// claimRow is the claim as it stands, or "".
func (r *rig) claimRow() string {
	return scan[string](r, "SELECT COALESCE((SELECT c::TEXT FROM claims c WHERE session_id = $1), '')", string(r.session))
}

// TestI1OneOfManyAcquires: many workers want the same session at once.
func TestI1OneOfManyAcquires(t *testing.T) {
	base := newRig(t)
	const workers, rounds = 4, 10
	for round := range rounds {
		r := base.fresh(fmt.Sprint("round ", round))
		r.wake(input("a"))
		var wg sync.WaitGroup
		results := make(chan error, workers)
		for range workers {
			acq := claims.Acquisition{Holder: r.lease("worker", longLease), Worker: "w", Execution: claims.ExecutionID(newID()), Step: claims.StepID(newID())}
			wg.Go(func() {
				_, err := r.store.Acquire(r.ctx(), r.session, acq)
				results <- err
			})
		}
		wg.Wait()
		close(results)
		won := 0
		for err := range results {
			switch {
			case err == nil:
				won++
			case !errors.Is(err, claims.ErrBusy):
				t.Fatal(err)
			}
		}
		if won != 1 {
			t.Fatalf("%d of %d acquired", won, workers)
		}
		r.wantLog("input.admitted(a) execution.started input.promoted(a) step.started(a)")
	}
	base.checkAll()
}

// TestI3UnknownAcquisition: an acquisition whose outcome is unknown is none; HandOver answers for it. (Under faults:
// TestOperationsUnderFaults.)
func TestI3UnknownAcquisition(t *testing.T) {
	acquire := func(r *rig) error { return r.acquire() }
	wake := func(r *rig) error {
		cmd := r.command(claims.Wake)
		return r.apply(cmd, r.newAcquisition())
	}
	for name, op := range map[string]func(*rig) error{"acquire": acquire, "wake": wake} {
		for _, interrupted := range []bool{false, true} {
			t.Run(fmt.Sprintf("%s, interrupted in between %v", name, interrupted), func(t *testing.T) {
				r, p := proxied(t, crdb.Options{})
				r.wake(input("a"))
				p.Arm(faultproxy.Fault{Kind: faultproxy.CutDuring, At: faultproxy.Commit})
				r.wantErr(op(r), claims.ErrOutcomeUnknown)
				r.wantClaim(claims.Running, true)
				if interrupted {
					r.interrupt()
				}
				r.claim = claims.Claim{Session: r.session, Execution: r.acq.Execution} // all that its caller knows
				r.ok(r.handOver())
				if interrupted {
					r.wantSettled(*settledAs(claims.OutcomeInterrupted, false))
					r.wantTail(4, "execution.cancelling step.interrupted execution.ended(interrupted)")
				} else {
					r.wantSettled(*settledAs(claims.OutcomeHandedOver, true))
					r.wantTail(4, "step.failed(shutdown) execution.ended(handed_over)")
					r.ok(r.acquire())
					if r.step.Attempt != 0 || r.step.Continues.Kind != claims.KindHandover || len(r.step.Inputs) != 1 {
						t.Fatalf("the successor is %+v", r.step)
					}
				}
				r.check()
			})
		}
	}
}

func TestI4AHeartbeatNeverRevives(t *testing.T) {
	r := newRig(t)
	alive, err := r.store.Heartbeat(r.ctx(), r.holder, time.Minute)
	r.ok(err)
	if !alive || !scan[bool](r, "SELECT expires_at < statement_timestamp() + INTERVAL '2 minutes' FROM leases WHERE holder = $1", string(r.holder)) {
		t.Fatal("a live lease was not set by the database's clock at the statement")
	}
	r.expire(r.holder)
	was := scan[time.Time](r, "SELECT expires_at FROM leases WHERE holder = $1", string(r.holder))
	alive, err = r.store.Heartbeat(r.ctx(), r.holder, time.Minute)
	r.ok(err)
	if alive || !scan[time.Time](r, "SELECT expires_at FROM leases WHERE holder = $1", string(r.holder)).Equal(was) {
		t.Fatal("a heartbeat revived an expired lease")
	}
	alive, err = r.store.Heartbeat(r.ctx(), claims.HolderID(newID()), time.Minute)
	r.ok(err)
	if alive {
		t.Fatal("a heartbeat of nobody found a lease")
	}
}

func TestLeaseStaysWhileAClaimNamesIt(t *testing.T) {
	r := newRig(t)
	r.run(input("a"))
	r.ok(r.store.CloseLease(r.ctx(), r.holder))
	r.expire(r.holder)
	r.ok(r.store.DeleteDeadLeases(r.ctx(), 0))
	if scan[int64](r, "SELECT count(*) FROM leases WHERE holder = $1", string(r.holder)) != 1 {
		t.Fatal("the lease is gone, a claim names it")
	}
	r.ok(r.finish(nil)) // closing needs no live lease
	r.ok(r.store.DeleteDeadLeases(r.ctx(), 0))
	if scan[int64](r, "SELECT count(*) FROM leases WHERE holder = $1", string(r.holder)) != 0 {
		t.Fatal("the lease is there, no claim names it")
	}
}

// ownerOps are all operations of an owner.
func ownerOps() map[string]func(*rig) error {
	return map[string]func(*rig) error{
		"start":    (*rig).startStep,
		"record":   func(r *rig) error { return r.record("late") },
		"decline":  (*rig).decline,
		"finish":   func(r *rig) error { return r.finish(nil) },
		"settle":   (*rig).settle,
		"handOver": (*rig).handOver,
		"revoke":   func(r *rig) error { return r.store.Revoke(r.ctx(), r.claim, claims.Unknown) },
	}
}

// TestI5I6TheOldOwnerIsFenced: whatever became of the claim, the one that had it writes nothing any more.
func TestI5I6TheOldOwnerIsFenced(t *testing.T) {
	gone := map[string]func(*rig){
		"taken over": func(r *rig) {
			running(r)
			mine := r.claim
			r.lose()
			r.ok(r.takeOver())
			r.claim = mine
		},
		"recovered and run by another": func(r *rig) {
			running(r)
			mine, step := r.claim, r.step
			r.lose()
			r.ok(r.takeOver())
			r.ok(r.convert())
			r.holder = r.lease("worker", longLease)
			r.ok(r.acquire())
			r.claim, r.step = mine, step
		},
		"quarantined": func(r *rig) { running(r); r.interrupt(); r.lose(); r.ok(r.endExpired(false)) },
		"removed by the scanner": func(r *rig) {
			running(r)
			r.ok(r.decline())
			r.lose()
			r.ok(r.endExpired(false))
		},
		"settled":               func(r *rig) { running(r); r.ok(r.finish(nil)) },
		"session never existed": func(r *rig) { r.claim = claims.Claim{Session: r.session, Execution: claims.ExecutionID(newID())} },
	}
	base := newRig(t)
	for situation, setup := range gone {
		for name, op := range ownerOps() {
			t.Run(situation+"/"+name, func(t *testing.T) {
				r := base.fresh(situation + name)
				r.t = t
				setup(r)
				was, log := r.claimRow(), len(r.briefs())
				r.wantErr(op(r), claims.ErrFenced)
				if now := r.claimRow(); now != was {
					t.Fatalf("the claim was %s, is %s", was, now)
				}
				r.wantTail(log, "")
			})
		}
	}
	base.checkAll()
}

// TestI5AfterExpiry: with the lease gone and nobody there yet, starting and recording are fenced; closing, settling and
// handing over are not.
func TestI5AfterExpiry(t *testing.T) {
	base := newRig(t)
	for name, c := range map[string]struct {
		setup func(*rig)
		op    func(*rig) error
		want  error
	}{
		"start":                {betweenSteps, (*rig).startStep, claims.ErrFenced},
		"record":               {running, func(r *rig) error { return r.record("x") }, claims.ErrFenced},
		"decline":              {running, (*rig).decline, claims.ErrFenced},
		"finish":               {running, func(r *rig) error { return r.finish(nil) }, nil},
		"hand over":            {running, (*rig).handOver, nil},
		"settle interrupted":   {func(r *rig) { running(r); r.interrupt() }, (*rig).settle, nil},
		"settle declined":      {func(r *rig) { running(r); r.ok(r.decline()) }, (*rig).settle, nil},
		"record cancelling":    {func(r *rig) { running(r); r.interrupt() }, func(r *rig) error { return r.record("x") }, claims.ErrFenced},
		"hand over cancelling": {func(r *rig) { running(r); r.interrupt() }, (*rig).handOver, nil},
	} {
		t.Run(name, func(t *testing.T) {
			r := base.fresh(name)
			r.t = t
			c.setup(r)
			r.expire(r.holder)
			r.wantErr(c.op(r), c.want)
			r.check()
		})
	}
}

// TestI5RevokedIsFenced: a revoked claim is nobody's but the scanner's, live lease or not.
func TestI5RevokedIsFenced(t *testing.T) {
	base := newRig(t)
	for name, op := range ownerOps() {
		if name == "revoke" {
			continue
		}
		r := base.fresh(name)
		running(r)
		if name == "settle" {
			r.interrupt()
		}
		r.ok(r.store.Revoke(r.ctx(), r.claim, claims.Unknown))
		r.wantErr(op(r), claims.ErrFenced)
	}
	base.checkAll()
}

// TestI6ATakeoverBetweenTwoWrites: the owner's second write, whose transaction began before the takeover, is fenced and
// leaves nothing behind.
func TestI6ATakeoverBetweenTwoWrites(t *testing.T) {
	for name, op := range map[string]func(*rig) error{
		"record": func(r *rig) error { return r.record("late") },
		"finish": func(r *rig) error { return r.finish(nil) },
	} {
		t.Run(name, func(t *testing.T) {
			r, p := proxied(t, crdb.Options{})
			scanner := r.as(r.url)
			running(r)
			r.ok(r.record("in time"))
			before := len(r.briefs())
			scanner.seq, scanner.holder = r.seq, r.holder
			// The owner's transaction has begun; its first statement waits in front of the database.
			gate := p.Hold(1)
			done := make(chan error, 1)
			go func() { done <- op(r) }()
			<-gate.Reached()
			scanner.lose()
			scanner.ok(scanner.takeOver())
			gate.Release()
			r.wantErr(<-done, claims.ErrFenced)
			r.wantTail(before, "")
			r.check()
		})
	}
}

func TestI9SettlementNeverOverwritesACancellation(t *testing.T) {
	base := newRig(t)
	for name, op := range map[string]func(*rig) error{
		"success":          func(r *rig) error { return r.finish(nil) },
		"success and more": func(r *rig) error { return r.finish(continued) },
		"failure":          func(r *rig) error { return r.finish(failed) },
		"retry":            func(r *rig) error { return r.finish(retried) },
		"decline":          (*rig).decline,
		"next step":        (*rig).startStep,
	} {
		t.Run(name, func(t *testing.T) {
			r := base.fresh(name)
			r.t = t
			running(r)
			r.interrupt()
			r.wantErr(op(r), claims.ErrCancelled)
			r.ok(r.record("what came out still")) // recording goes on while it cancels
			r.ok(r.settle())
			r.wantTail(4, "execution.cancelling text step.interrupted execution.ended(interrupted)")
			r.check()
		})
	}
	t.Run("a step that ended durably stays ended", func(t *testing.T) {
		r := base.fresh("ended")
		r.t = t
		running(r)
		r.ok(r.finish(nil))
		r.interrupt()
		r.wantTail(4, "step.ended execution.ended(completed)")
		r.check()
	})
}

// TestI9TheRaceOfFinishAndInterrupt: whichever commits first holds, with each stopped at its points.
func TestI9TheRaceOfFinishAndInterrupt(t *testing.T) {
	base, pa := proxied(t, crdb.Options{})
	pb := newProxy(t, base.url, 0)
	other := base.as(pb.URL())
	for _, finishFirst := range []bool{true, false} {
		for _, committed := range []bool{true, false} {
			name := fmt.Sprintf("finish first %v, committed %v", finishFirst, committed)
			t.Run(name, func(t *testing.T) {
				a := base.fresh(name)
				a.t = t
				running(a)
				b := *other
				b.t, b.session, b.seq = t, a.session, a.seq
				cmd := b.interruptCmd(nil)
				var finished error
				finish := func() error {
					finished = a.finish(nil)
					if errors.Is(finished, claims.ErrCancelled) {
						return nil
					}
					return finished
				}
				interrupt := func() error { return b.apply(cmd, nil) }
				if finishFirst {
					race(t, finish, interrupt, pa, pb, committed)
					a.ok(finished)
					a.wantTail(4, "step.ended execution.ended(completed)")
				} else {
					race(t, interrupt, finish, pb, pa, committed)
					a.wantErr(finished, claims.ErrCancelled)
					a.ok(a.settle())
					a.wantTail(4, "execution.cancelling step.interrupted execution.ended(interrupted)")
				}
				a.check()
			})
		}
	}
}

// TestI10NothingIsAcquiredBeforeTheJoin: until the finalizers have joined the claim stays, and is live.
func TestI10NothingIsAcquiredBeforeTheJoin(t *testing.T) {
	r := newRig(t)
	running(r)
	r.interrupt()
	r.interrupt()
	alive, err := r.store.Heartbeat(r.ctx(), r.holder, longLease)
	r.ok(err)
	if !alive {
		t.Fatal("the lease is lost")
	}
	r.wantClaim(claims.Cancelling, true)
	r.wantTail(4, "execution.cancelling")
	mine, step := r.claim, r.step
	me := r.holder
	r.holder = r.lease("worker", longLease)
	r.wantErr(r.acquire(), claims.ErrBusy)
	if all, err := r.store.ExpiredClaims(r.ctx(), 10); err != nil || len(all) != 0 {
		t.Fatalf("the scanner would take %v, %v", all, err)
	}
	r.holder, r.claim, r.step = me, mine, step
	r.ok(r.settle())
	r.wantTail(4, "execution.cancelling step.interrupted execution.ended(interrupted)")
	r.wantClaim("", false)
	r.check()
}

func TestI11AnInterruptionIsSettledOnce(t *testing.T) {
	r := newRig(t)
	running(r)
	r.wake(input("b"))
	r.interrupt()
	tail := []claims.Content{{Type: claims.TextEvent, Data: claims.TextData{Text: "last words"}}}
	token := &claims.Token{ID: newID()}
	settled, err := r.store.Settle(r.ctx(), r.claim, tail, token)
	r.ok(err)
	if settled != *settledAs(claims.OutcomeInterrupted, true) {
		t.Fatalf("answered %+v", settled)
	}
	// Again, in doubt: the same answer, nothing more. Again, without doubt: fenced.
	token.Doubt = true
	settled, err = r.store.Settle(r.ctx(), r.claim, tail, token)
	r.ok(err)
	if settled != *settledAs(claims.OutcomeInterrupted, true) {
		t.Fatalf("in doubt it answered %+v", settled)
	}
	r.wantErr(r.settle(), claims.ErrFenced)
	r.wantTail(5, "execution.cancelling text step.interrupted execution.ended(interrupted)")
	r.wantErr(r.handOver(), claims.ErrFenced)
	r.check()
}

func TestI11SettlingWhatNobodyInterruptedIsIllegal(t *testing.T) {
	r := newRig(t)
	running(r)
	r.wantErr(r.settle(), claims.ErrIllegal)
	r.wantClaim(claims.Running, true)
	r.wantErr(r.startStep(), claims.ErrIllegal) // a step is open
	other := r.step
	other.ID = claims.StepID(newID())
	_, err := r.store.Finish(r.ctx(), r.claim, claims.Ending{Step: other}, r.newToken())
	r.wantErr(err, claims.ErrIllegal)
	r.wantErr(r.store.Record(r.ctx(), r.claim, other, nil, r.newToken()), claims.ErrIllegal)
	r.check()
}

func TestI12DeclineSettlesInsideTheStep(t *testing.T) {
	r := newRig(t)
	running(r)
	r.ok(r.record("before"))
	r.ok(r.decline())
	r.wantClaim(claims.Cancelled, false)
	r.wantTail(4, "text step.interrupted(unjoined)")
	r.ok(r.decline()) // no change
	r.interrupt()     // no change
	r.wantErr(r.record("after"), claims.ErrCancelled)
	r.wantErr(r.finish(nil), claims.ErrCancelled)
	r.wantErr(r.startStep(), claims.ErrCancelled)
	mine := r.claim
	me := r.holder
	r.holder = r.lease("worker", longLease)
	r.wantErr(r.acquire(), claims.ErrBusy)
	r.holder, r.claim = me, mine
	r.ok(r.settle())
	r.wantSettled(*settledAs(claims.OutcomeDeclined, false))
	r.wantTail(4, "text step.interrupted(unjoined) execution.ended(declined)")
	r.check()
}

// TestI13TheDurablePhaseDecides: also where the step on the claim does not decode any more.
func TestI13TheDurablePhaseDecides(t *testing.T) {
	r := newRig(t)
	running(r)
	r.interrupt()
	r.exec("UPDATE claims SET step = 'rubbish' WHERE session_id = $1", string(r.session))
	r.wantErr(r.finish(failed), claims.ErrCancelled)
	r.ok(r.settle())
	r.wantSettled(*settledAs(claims.OutcomeInterrupted, false))
	r.wantTail(4, "execution.cancelling step.interrupted execution.ended(interrupted)")
	r.check()
}

// TestI13OutputThatCannotBeFlushed: an event too large for the stream is refused with all of its transaction; without
// it the execution settles.
func TestI13OutputThatCannotBeFlushed(t *testing.T) {
	r := newRig(t)
	running(r)
	large := []claims.Content{{Type: claims.TextEvent, Data: claims.TextData{Text: strings.Repeat("x", 1<<20)}}}
	r.wantErr(r.store.Record(r.ctx(), r.claim, r.step, large, r.newToken()), claims.ErrTooLarge)
	r.interrupt()
	_, err := r.store.Settle(r.ctx(), r.claim, large, r.newToken())
	r.wantErr(err, claims.ErrTooLarge)
	r.wantClaim(claims.Cancelling, true)
	r.ok(r.settle())
	r.wantTail(4, "execution.cancelling step.interrupted execution.ended(interrupted)")
	r.check()
}

func TestI24EventsCarryTheEpochAndExecutionOfTheirTime(t *testing.T) {
	r := newRig(t)
	running(r)
	first := r.claim.Execution
	r.lose()
	r.ok(r.takeOver())
	r.ok(r.convert())
	r.holder = r.lease("worker", longLease)
	r.ok(r.acquire())
	r.ok(r.finish(nil))
	want := []struct {
		typ   claims.EventType
		of    claims.ExecutionID
		epoch int64
	}{
		{claims.InputAdmitted, "", 0},
		{claims.ExecutionStarted, first, 1},
		{claims.InputPromoted, first, 1},
		{claims.StepStartedEvent, first, 1},
		{claims.StepFailedEvent, first, 2}, // the takeover raised it
		{claims.ExecutionEnded, first, 2},
		{claims.ExecutionStarted, r.claim.Execution, 3},
		{claims.StepStartedEvent, r.claim.Execution, 3},
		{claims.StepEndedEvent, r.claim.Execution, 3},
		{claims.ExecutionEnded, r.claim.Execution, 3},
	}
	log := r.log()
	if len(log) != len(want) {
		t.Fatalf("%d events, want %d", len(log), len(want))
	}
	for i, w := range want {
		if e := log[i]; e.Type != w.typ || e.Execution != w.of || e.Epoch != w.epoch || e.Seq != int64(i)+1 || (e.Step == "") != (w.typ == claims.InputAdmitted || w.typ == claims.ExecutionStarted || w.typ == claims.ExecutionEnded) {
			t.Errorf("event %d is %+v, want %+v", i+1, e.Event, w)
		}
	}
	relayed, records, err := r.store.Unrelayed(r.ctx(), r.session, 100)
	r.ok(err)
	if relayed != 0 || len(records) != len(log) {
		t.Fatalf("%d events after %d are to be relayed, want %d", len(records), relayed, len(log))
	}
	for i := range log {
		if string(records[i].Line) != string(log[i].Line) {
			t.Errorf("event %d is relayed as %s, stands as %s", i+1, records[i].Line, log[i].Line)
		}
	}
	r.check()
}

func TestRelayMarksNeverGoBack(t *testing.T) {
	r := newRig(t)
	running(r) // four events
	note := func(seq int64) int64 {
		r.ok(r.store.NoteRelayed(r.ctx(), []claims.Mark{{Session: r.session, Seq: seq}}))
		r.check()
		return scan[int64](r, "SELECT relayed_seq FROM sessions WHERE session_id = $1", string(r.session))
	}
	for _, c := range []struct{ seq, want int64 }{{2, 2}, {1, 2}, {5, 2}, {4, 4}, {3, 4}} {
		if got := note(c.seq); got != c.want {
			t.Fatalf("after noting %d the mark is %d, want %d", c.seq, got, c.want)
		}
	}
	// A mark inside an append: the rest of it is still to be relayed.
	r.exec("UPDATE sessions SET relayed_seq = 2, relay_due_at = statement_timestamp() WHERE session_id = $1", string(r.session))
	relayed, records, err := r.store.Unrelayed(r.ctx(), r.session, 10)
	r.ok(err)
	if relayed != 2 || len(records) != 2 || records[0].Seq != 3 {
		t.Fatalf("after %d: %v", relayed, records)
	}
}

// TestTakeoverNeedsBothLeases: the claim's has expired, the scanner's own is live.
func TestTakeoverNeedsBothLeases(t *testing.T) {
	base := newRig(t)
	for name, c := range map[string]struct {
		setup func(*rig)
		want  error
	}{
		"expired": {func(r *rig) { running(r); r.lose() }, nil},
		"live": {func(r *rig) {
			running(r)
			r.lose()
			r.exec("UPDATE leases SET expires_at = statement_timestamp() + INTERVAL '1 hour' WHERE holder = $1", string(r.holder))
		}, claims.ErrFenced},
		"scanner without lease": {func(r *rig) { running(r); r.lose(); r.expire(r.scanner) }, claims.ErrFenced},
		"another execution by now": {func(r *rig) {
			running(r)
			r.lose()
			r.ok(r.finish(nil))
			r.holder = r.lease("worker", longLease)
			r.run(input("b"))
		}, claims.ErrFenced},
		"gone by now":                 {func(r *rig) { running(r); r.lose(); r.ok(r.finish(nil)) }, claims.ErrFenced},
		"interrupted by now: revoked": {func(r *rig) { running(r); r.lose(); r.interrupt() }, nil},
		"taken by another scanner": {func(r *rig) {
			running(r)
			r.lose()
			c := r.candidate
			r.ok(r.takeOver())
			r.candidate, r.scanner = c, r.lease("scanner", longLease)
		}, claims.ErrFenced},
		"cancelling":                   {func(r *rig) { running(r); r.interrupt(); r.lose() }, claims.ErrFenced},
		"other scanner died after it":  {func(r *rig) { takenOver(r); r.expire(r.scanner); r.find(); r.scanner = r.lease("scanner", longLease) }, nil},
		"the taker itself is the dead": {func(r *rig) { running(r); r.lose(); r.scanner = r.holder }, claims.ErrFenced},
	} {
		t.Run(name, func(t *testing.T) {
			r := base.fresh(name)
			r.t = t
			c.setup(r)
			was := r.claimRow()
			r.wantErr(r.takeOver(), c.want)
			if c.want != nil && r.claimRow() != was {
				t.Fatal("the claim changed")
			}
			r.check()
		})
	}
}

// TestI28ConversionIsFenced: by the recovery owner and its live lease.
func TestI28ConversionIsFenced(t *testing.T) {
	base := newRig(t)
	for name, setup := range map[string]func(*rig){
		"its lease expired": func(r *rig) { takenOver(r); r.expire(r.scanner) },
		"taken over again": func(r *rig) {
			takenOver(r)
			mine := r.claim
			r.expire(r.scanner)
			r.find()
			r.scanner = r.lease("scanner", longLease)
			r.ok(r.takeOver())
			r.claim = mine
		},
		"converted already": func(r *rig) { takenOver(r); r.ok(r.convert()) },
		"a worker's claim":  running,
	} {
		t.Run(name, func(t *testing.T) {
			r := base.fresh(name)
			r.t = t
			setup(r)
			was, log := r.claimRow(), len(r.briefs())
			r.wantErr(r.convert(), claims.ErrFenced)
			_, err := r.store.ConversionFailed(r.ctx(), r.claim, "x", r.newToken())
			r.wantErr(err, claims.ErrFenced)
			if r.claimRow() != was {
				t.Fatal("the claim changed")
			}
			r.wantTail(log, "")
			r.check()
		})
	}
}

func TestI27WhatIsNeverRecovered(t *testing.T) {
	base := newRig(t)
	damaged := func(set string) func(*rig) {
		return func(r *rig) {
			running(r)
			r.exec("UPDATE claims SET "+set+" WHERE session_id = $1", string(r.session))
			r.lose()
			r.ok(r.takeOver())
		}
	}
	for name, c := range map[string]struct {
		setup  func(*rig)
		limits claims.Limits
		want   claims.Reason
	}{
		"step does not decode":     {damaged("step = '{'"), manyLimits, claims.ReasonInvalidStep},
		"step of another session":  {damaged(`step = replace(step, '"session":"', '"session":"x')`), manyLimits, claims.ReasonIdentityConflict},
		"step of another id":       {damaged(`step = replace(step, '"step":"', '"step":"x')`), manyLimits, claims.ReasonIdentityConflict},
		"step of a later epoch":    {damaged(`step = replace(step, '"epoch":1', '"epoch":99')`), manyLimits, claims.ReasonIdentityConflict},
		"too many recoveries":      {takenOver, claims.Limits{Recoveries: 0, Takeovers: 10}, claims.ReasonAttemptsExhausted},
		"too many takeovers":       {takenOver, claims.Limits{Recoveries: 3, Takeovers: 0}, claims.ReasonNoProgress},
		"takeovers without a step": {func(r *rig) { betweenSteps(r); r.lose(); r.ok(r.takeOver()) }, claims.Limits{Recoveries: 3, Takeovers: 0}, claims.ReasonNoProgress},
		"never joined, it decodes": {func(r *rig) {
			running(r)
			r.ok(r.store.Revoke(r.ctx(), r.claim, claims.NeverJoined))
			r.find()
			r.ok(r.takeOver())
		}, manyLimits, claims.ReasonNeverJoined},
		"interrupted, not decoding": {func(r *rig) { damaged("step = '{'")(r); r.interrupt() }, manyLimits, claims.ReasonInvalidStep},
	} {
		t.Run(name, func(t *testing.T) {
			r := base.fresh(name)
			r.t = t
			c.setup(r)
			var err error
			r.settled, err = r.store.Convert(r.ctx(), r.claim, c.limits, r.newToken())
			r.ok(err)
			r.wantSettled(*settledAs(claims.OutcomeQuarantined, false))
			if got := scan[string](r, "SELECT reason FROM quarantines WHERE session_id = $1", string(r.session)); got != string(c.want) {
				t.Fatalf("quarantined as %s, want %s", got, c.want)
			}
		})
	}
	t.Run("a chain that recovers within the limits", func(t *testing.T) {
		r := base.fresh("chain")
		r.t = t
		running(r)
		for range manyLimits.Recoveries {
			r.lose()
			r.ok(r.takeOver())
			r.ok(r.convert())
			r.wantSettled(*settledAs(claims.OutcomeRecovered, true))
			r.holder = r.lease("worker", longLease)
			r.ok(r.acquire())
		}
		r.lose()
		r.ok(r.takeOver())
		r.ok(r.convert())
		r.wantSettled(*settledAs(claims.OutcomeQuarantined, false))
		r.check()
	})
	t.Run("a step that ended resets both", func(t *testing.T) {
		r := base.fresh("reset")
		r.t = t
		running(r)
		r.lose()
		r.ok(r.takeOver())
		r.ok(r.convert())
		r.holder = r.lease("worker", longLease)
		r.ok(r.acquire())
		r.ok(r.finish(continued))
		if n := scan[int64](r, "SELECT takeovers FROM sessions WHERE session_id = $1", string(r.session)); n != 0 {
			t.Fatalf("%d takeovers", n)
		}
		r.ok(r.startStep())
		r.lose()
		r.ok(r.takeOver())
		_, err := r.store.Convert(r.ctx(), r.claim, claims.Limits{Recoveries: 1, Takeovers: 1}, r.newToken())
		r.ok(err)
		r.wantReady(true)
		r.check()
	})
	t.Run("an owner that meets a step that does not decode", func(t *testing.T) {
		for name, op := range map[string]func(*rig) error{"finish": func(r *rig) error { return r.finish(nil) }, "hand over": (*rig).handOver} {
			r := base.fresh("owner " + name)
			running(r)
			r.exec("UPDATE claims SET step = '{' WHERE session_id = $1", string(r.session))
			r.ok(op(r))
			r.wantSettled(*settledAs(claims.OutcomeQuarantined, false))
			r.wantTail(4, "session.quarantined(invalid_step) execution.ended(quarantined)")
		}
	})
	base.checkAll()
}

func TestI26WhatAnExpiredClaimBecomes(t *testing.T) {
	base := newRig(t)
	for name, c := range map[string]struct {
		setup       func(*rig)
		interrupted bool // --uncertain-cancel=interrupt
		want        claims.ExecutionOutcome
		err         error
	}{
		"cancelled": {func(r *rig) { running(r); r.ok(r.decline()); r.lose() }, false, claims.OutcomeDeclined, nil},
		"cancelled, unknown": {func(r *rig) {
			running(r)
			r.ok(r.decline())
			r.ok(r.store.Revoke(r.ctx(), r.claim, claims.Unknown))
			r.find()
		}, false, claims.OutcomeDeclined, nil},
		"cancelled, never joined": {func(r *rig) {
			running(r)
			r.ok(r.decline())
			r.ok(r.store.Revoke(r.ctx(), r.claim, claims.NeverJoined))
			r.find()
		}, false, claims.OutcomeQuarantined, nil},
		"cancelling":               {func(r *rig) { running(r); r.interrupt(); r.lose() }, false, claims.OutcomeQuarantined, nil},
		"cancelling, to interrupt": {func(r *rig) { running(r); r.interrupt(); r.lose() }, true, claims.OutcomeInterrupted, nil},
		"cancelling never joined, interrupt": {func(r *rig) {
			running(r)
			r.interrupt()
			r.ok(r.store.Revoke(r.ctx(), r.claim, claims.NeverJoined))
			r.find()
		}, true, claims.OutcomeQuarantined, nil},
		"running": {func(r *rig) { running(r); r.lose() }, false, "", claims.ErrFenced},
		"live by now": {func(r *rig) {
			running(r)
			r.interrupt()
			r.lose()
			r.exec("UPDATE leases SET expires_at = statement_timestamp() + INTERVAL '1 hour' WHERE holder = $1", string(r.holder))
		}, false, "", claims.ErrFenced},
		"settled by now": {func(r *rig) { running(r); r.interrupt(); r.lose(); r.ok(r.settle()) }, false, "", claims.ErrFenced},
	} {
		t.Run(name, func(t *testing.T) {
			r := base.fresh(name)
			r.t = t
			c.setup(r)
			r.settled = claims.Settlement{}
			r.wantErr(r.endExpired(c.interrupted), c.err)
			if r.settled.Outcome != c.want {
				t.Fatalf("outcome %q, want %q", r.settled.Outcome, c.want)
			}
			r.check()
		})
	}
}

// TestI28AContinuationIsQuarantinedOnlyAsItWasSeen.
func TestI28AContinuationIsQuarantinedOnlyAsItWasSeen(t *testing.T) {
	base := newRig(t)
	for name, c := range map[string]struct {
		move func(*rig)
		want error
	}{
		"as seen":     {nothing, nil},
		"changed":     {func(r *rig) { r.exec("UPDATE continuations SET body = '{}' WHERE session_id = $1", string(r.session)) }, claims.ErrFenced},
		"gone":        {func(r *rig) { r.exec("DELETE FROM continuations WHERE session_id = $1", string(r.session)) }, claims.ErrFenced},
		"quarantined": {func(r *rig) { r.wantErr(r.acquire(), claims.ErrQuarantined) }, claims.ErrFenced},
		"beside claim": {func(r *rig) {
			r.exec("UPDATE continuations SET not_before = not_before + INTERVAL '1 hour' WHERE session_id = $1", string(r.session))
			r.run(input("b"))
		}, claims.ErrFenced},
	} {
		t.Run(name, func(t *testing.T) {
			r := base.fresh(name)
			r.t = t
			continuing(r)
			all, err := r.store.DueContinuations(r.ctx(), 1000)
			r.ok(err)
			if len(all) != 0 {
				t.Fatalf("its grace is not over: %v", all)
			}
			poisoned(r)
			r.exec("UPDATE continuations SET due_at = not_before WHERE session_id = $1", string(r.session))
			all, err = r.store.DueContinuations(r.ctx(), 1000)
			r.ok(err)
			if len(all) != 1 || !all[0].Unstarted || all[0].Epoch != 1 {
				t.Fatalf("due are %+v", all)
			}
			c.move(r)
			log := len(r.briefs())
			r.wantErr(r.store.QuarantineContinuation(r.ctx(), all[0], r.newToken()), c.want)
			if c.want != nil {
				r.wantTail(log, "")
			}
			r.exec("DELETE FROM continuations WHERE session_id = $1", string(r.session)) // out of the way of the others
		})
	}
	t.Run("a sound one", func(t *testing.T) {
		r := base.fresh("sound")
		r.t = t
		continuing(r)
		body := scan[string](r, "SELECT body FROM continuations WHERE session_id = $1", string(r.session))
		d := claims.DueContinuation{Session: r.session, Number: 1, Body: body}
		r.wantErr(r.store.QuarantineContinuation(r.ctx(), d, r.newToken()), claims.ErrFenced)
		r.ok(r.acquire())
	})
}

// TestI30QuarantineMovesTheHead: claim, continuation and, where no step was open, the head are in the row.
func TestI30QuarantineMovesTheHead(t *testing.T) {
	r := newRig(t)
	r.run(input("a"))
	r.wake(input("b"), steer("c"), input("d"))
	r.wake()
	r.ok(r.finish(nil))
	r.lose()
	r.ok(r.takeOver())
	_, err := r.store.Convert(r.ctx(), r.claim, claims.Limits{}, r.newToken())
	r.ok(err)
	ev := scan[string](r, "SELECT evidence FROM quarantines WHERE session_id = $1", string(r.session))
	for _, want := range []string{`"inputs":["b","c"]`, `"wakes":1`, `"ran_as":`} {
		if !strings.Contains(ev, want) {
			t.Errorf("evidence has no %s: %s", want, ev)
		}
	}
	if got := scan[string](r, "SELECT string_agg(input_id || state, ' ' ORDER BY position) FROM inputs WHERE session_id = $1", string(r.session)); got != "acovered bquarantined cquarantined darmed" {
		t.Errorf("inputs are %s", got)
	}
	r.check()
}

// TestRevocationsAreOnlyRaised, and the holder hears of them.
func TestRevocationsAreOnlyRaised(t *testing.T) {
	r := newRig(t)
	running(r)
	for _, c := range []struct{ ask, want claims.Cause }{
		{claims.Unknown, claims.Unknown}, {claims.NeverJoined, claims.NeverJoined}, {claims.Unknown, claims.NeverJoined}, {claims.NeverJoined, claims.NeverJoined},
	} {
		r.ok(r.store.Revoke(r.ctx(), r.claim, c.ask))
		notices, err := r.store.Notices(r.ctx(), r.holder)
		r.ok(err)
		if len(notices) != 1 || notices[0].Revoked != c.want || notices[0].Execution != r.claim.Execution {
			t.Fatalf("after revoking as %s: %+v", c.ask, notices)
		}
	}
	r.interrupt()
	if got := scan[string](r, "SELECT revoked FROM claims WHERE session_id = $1", string(r.session)); got != string(claims.NeverJoined) {
		t.Fatalf("an interrupt lowered it to %s", got)
	}
	held, err := r.store.Held(r.ctx(), r.holder)
	r.ok(err)
	if len(held) != 1 {
		t.Fatalf("held are %v", held)
	}
	r.check()
}

// TestExpiredClaims is how a scanner finds claims: of dead holders, or revoked, those first that were touched longest ago;
// two scanners that read the same share them (I31).
func TestExpiredClaims(t *testing.T) {
	base := newRig(t)
	want := []string{}
	for _, c := range []struct {
		name  string
		setup func(*rig)
		found bool
	}{
		{"live", running, false},
		{"live between steps", betweenSteps, false},
		{"live cancelling", func(r *rig) { running(r); r.interrupt() }, false},
		{"dead", func(r *rig) { running(r); r.expire(r.holder) }, true},
		{"dead cancelled", func(r *rig) { running(r); r.ok(r.decline()); r.expire(r.holder) }, true},
		{"no lease row", func(r *rig) { running(r); r.exec("DELETE FROM leases WHERE holder = $1", string(r.holder)) }, true},
		{"revoked", func(r *rig) { running(r); r.ok(r.store.Revoke(r.ctx(), r.claim, claims.Unknown)) }, true},
		{"revoked and dead", func(r *rig) {
			running(r)
			r.ok(r.store.Revoke(r.ctx(), r.claim, claims.NeverJoined))
			r.expire(r.holder)
		}, true},
		{"a scanner's, live", takenOver, false},
		{"a scanner's, dead", func(r *rig) { takenOver(r); r.expire(r.scanner) }, true},
	} {
		r := base.fresh(c.name)
		c.setup(r)
		if c.found {
			want = append(want, c.name)
		}
	}
	read := func(limit int) (all []claims.Candidate, names []string) {
		all, err := base.store.ExpiredClaims(base.ctx(), limit)
		base.ok(err)
		for _, c := range all {
			names = append(names, string(c.Session))
		}
		return all, names
	}
	all, names := read(100)
	if fmt.Sprint(names) != fmt.Sprint(want) {
		t.Fatalf("found %q, want %q", names, want)
	}
	_, names = read(2)
	if fmt.Sprint(names) != fmt.Sprint(want[:2]) {
		t.Fatalf("the first two are %q, want %q", names, want[:2])
	}
	mine, err := base.store.TouchClaims(base.ctx(), all[:2])
	base.ok(err)
	theirs, err := base.store.TouchClaims(base.ctx(), all) // by a scanner that read before
	base.ok(err)
	if len(mine) != 2 || len(theirs) != len(all)-2 {
		t.Fatalf("one scanner touched %v, the other %v", mine, theirs)
	}
	_, names = read(100)
	slices.Sort(names[:2]) // touched by one statement, at one time
	if fmt.Sprint(names[:2]) != fmt.Sprint(want[:2]) || len(names) != len(want) {
		t.Fatalf("after the touches: %q", names)
	}
	base.checkAll()
}

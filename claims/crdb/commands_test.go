package crdb_test

import (
	"encoding/json"
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"reveille/claims"
	"reveille/claims/crdb"
	"reveille/internal/dbtest"
	"reveille/internal/faultproxy"
)

// deliver applies a command as it stands in the stream and wants a result or an error.
func (r *rig) deliver(seq, at int64, confirmed bool, want claims.ApplyResult, wantErr error) {
	r.t.Helper()
	out, err := r.store.Apply(r.ctx(), claims.Command{Kind: claims.Wake, Session: r.session, Sequence: seq, Time: at, Confirmed: confirmed}, nil)
	if !errors.Is(err, wantErr) || out.Result != want {
		r.t.Fatalf("command %d at %d, confirmed %v: %q, %v; want %q, %v", seq, at, confirmed, out.Result, err, want, wantErr)
	}
}

func (r *rig) wantMark(seq, at int64) {
	r.t.Helper()
	if got := scan[string](r, "SELECT command_seq || '@' || command_time FROM sessions WHERE session_id = $1", string(r.session)); got != fmt.Sprintf("%d@%d", seq, at) {
		r.t.Fatalf("mark is %s, want %d@%d", got, seq, at)
	}
}

func (r *rig) wantWakes(n int64) {
	r.t.Helper()
	if got := scan[int64](r, "SELECT wakes FROM sessions WHERE session_id = $1", string(r.session)); got != n {
		r.t.Fatalf("%d wakes were applied, want %d", got, n)
	}
}

func TestI18MarkComparison(t *testing.T) {
	const applied, duplicate, no = claims.Applied, claims.Duplicate, claims.ApplyResult("")
	r := newRig(t)
	t.Run("in order", func(t *testing.T) {
		r := r.fresh("order")
		r.t = t
		r.deliver(5, 100, false, applied, nil)
		r.deliver(5, 100, false, duplicate, nil) // redelivered
		r.deliver(4, 90, false, duplicate, nil)  // an older one, late
		r.deliver(5, 100, true, duplicate, nil)  // confirming changes nothing about what was applied
		r.deliver(9, 101, false, applied, nil)   // numbers have holes: other subjects
		r.wantMark(9, 101)
		r.wantWakes(2)
		r.check()
	})
	t.Run("nanoseconds", func(t *testing.T) {
		r := r.fresh("ns")
		r.t = t
		r.deliver(1, 1_700_000_000_123_456_789, false, applied, nil)
		r.deliver(1, 1_700_000_000_123_456_789, false, duplicate, nil)
		r.deliver(1, 1_700_000_000_123_456_790, false, applied, nil) // another message, on a stream made anew
		r.wantWakes(2)
	})
	t.Run("stream made anew: lower sequence, newer timestamp", func(t *testing.T) {
		r := r.fresh("anew")
		r.t = t
		r.deliver(50, 100, false, applied, nil)
		r.deliver(1, 200, false, applied, nil)
		r.wantMark(1, 200)
		r.deliver(1, 200, false, duplicate, nil)
		r.deliver(2, 201, false, applied, nil)
		// The old stream's last one comes once more: sequence newer, timestamp not. The leader does not hold it.
		r.deliver(50, 100, false, no, claims.ErrUnconfirmed)
		r.wantMark(2, 201)
		r.wantWakes(3)
	})
	t.Run("only the sequence is newer", func(t *testing.T) {
		r := r.fresh("sequence")
		r.t = t
		r.deliver(5, 100, false, applied, nil)
		r.deliver(6, 100, false, no, claims.ErrUnconfirmed) // same nanosecond, or a clock that went back
		r.deliver(6, 90, false, no, claims.ErrUnconfirmed)
		r.wantMark(5, 100)
		r.deliver(6, 90, true, applied, nil)
		r.wantMark(6, 100) // the greatest timestamp stays
		r.deliver(6, 90, true, duplicate, nil)
		r.deliver(6, 90, false, duplicate, nil)
		r.wantWakes(2)
	})
	t.Run("pass over moves the mark and nothing else", func(t *testing.T) {
		r := r.fresh("pass")
		r.t = t
		cmd := claims.Command{Kind: claims.Wake, Session: r.session, Sequence: 7, Time: 70}
		r.ok(r.store.PassOver(r.ctx(), cmd))
		r.ok(r.store.PassOver(r.ctx(), cmd))
		r.wantMark(7, 70)
		r.wantWakes(0)
		r.wantErr(r.store.PassOver(r.ctx(), claims.Command{Session: r.session, Sequence: 8, Time: 70}), claims.ErrUnconfirmed)
	})
	t.Run("a redelivery announces again", func(t *testing.T) {
		r := r.fresh("announce")
		r.t = t
		cmd := r.command(claims.Wake)
		r.ok(r.apply(cmd, nil))
		// With a free slot too it only announces: a duplicate acquires nothing.
		r.ok(r.apply(cmd, r.newAcquisition()))
		if r.out.Result != claims.Duplicate || !r.out.Ready || r.out.Started != nil {
			t.Fatalf("answered %+v", r.out)
		}
		r.ok(r.acquire())
		stop := r.interruptCmd(nil)
		r.ok(r.apply(stop, nil))
		r.ok(r.apply(stop, nil))
		if r.out.Result != claims.Duplicate || r.out.Notice == nil || r.out.Notice.Phase != claims.Cancelling {
			t.Fatalf("answered %+v", r.out)
		}
	})
}

func TestI20InputIDIsAnIdempotencyKey(t *testing.T) {
	same := input("a")
	reordered := &claims.Input{ID: "a", Delivery: claims.Queue, Body: json.RawMessage(` { "of" : "a" } `)}
	other := &claims.Input{ID: "a", Delivery: claims.Queue, Body: json.RawMessage(`{"of":"b"}`)}
	// The situations of input a, and what is in the log then.
	situations := []struct {
		name  string
		setup func(*rig)
		state string
		// wakes: what a wake of the same input makes of it.
		wakes string
	}{
		{"unarmed", func(r *rig) { r.admit(same) }, "unarmed", "armed"},
		{"armed", func(r *rig) { r.wake(same) }, "armed", "armed"},
		{"armed and delayed", func(r *rig) { r.wakeAt(same, time.Hour) }, "armed", "armed"},
		{"running", func(r *rig) { r.run(same) }, "covered", "covered"},
		{"served", func(r *rig) { r.run(same); r.ok(r.finish(nil)) }, "covered", "covered"},
		{"cancelled", func(r *rig) { r.wake(same); r.interrupt() }, "cancelled", "cancelled"},
		{"quarantined", func(r *rig) {
			// The head of a claim without an open step, that was lost too often.
			r.run(input("first"))
			r.wake(same)
			r.ok(r.finish(nil))
			r.lose()
			r.ok(r.takeOver())
			_, err := r.store.Convert(r.ctx(), r.claim, claims.Limits{}, r.newToken())
			r.ok(err)
		}, "quarantined", "quarantined"},
	}
	base := newRig(t)
	for _, s := range situations {
		for _, again := range []struct {
			name     string
			kind     claims.CommandKind
			in       *claims.Input
			conflict bool
		}{
			{"admit", claims.Admit, same, false},
			{"admit reordered", claims.Admit, reordered, false},
			{"wake", claims.Wake, same, false},
			{"admit other body", claims.Admit, other, true},
			{"wake other body", claims.Wake, other, true},
			{"wake other delivery", claims.Wake, steer("a"), true},
		} {
			t.Run(s.name+"/"+again.name, func(t *testing.T) {
				r := base.fresh(s.name + again.name)
				r.t = t
				s.setup(r)
				before := r.briefs()
				state := func() string {
					return scan[string](r, "SELECT state FROM inputs WHERE session_id = $1 AND input_id = 'a'", string(r.session))
				}
				if got := state(); got != s.state {
					t.Fatalf("the situation is %q, want %q", got, s.state)
				}
				notBefore := scan[time.Time](r, "SELECT not_before FROM inputs WHERE session_id = $1 AND input_id = 'a'", string(r.session))
				cmd := r.command(again.kind)
				cmd.Input = again.in
				want := s.state
				err := r.apply(cmd, nil)
				if again.conflict {
					r.wantErr(err, claims.ErrInputConflict)
					r.wantMark(r.seq-1, (r.seq-1)*1_000_000_007) // it moves only when the rejection is published
					r.ok(r.store.PassOver(r.ctx(), cmd))
					r.wantMark(r.seq, r.seq*1_000_000_007)
				} else {
					r.ok(err)
					if again.kind == claims.Wake {
						want = s.wakes
					}
				}
				if got := state(); got != want {
					t.Errorf("the input is %q, want %q", got, want)
				}
				if s.state != "unarmed" && !notBefore.Equal(scan[time.Time](r, "SELECT not_before FROM inputs WHERE session_id = $1 AND input_id = 'a'", string(r.session))) {
					t.Error("it is due at another time")
				}
				r.wantTail(len(before), "")
				r.check()
			})
		}
	}
}

func TestI20WakeOfAServedInputBuysNoStep(t *testing.T) {
	r := newRig(t)
	r.run(input("a"))
	r.ok(r.finish(nil))
	cmd := r.command(claims.Wake)
	cmd.Input = input("a")
	r.ok(r.apply(cmd, r.newAcquisition()))
	if r.out.Started != nil || r.out.Ready {
		t.Fatalf("answered %+v", r.out)
	}
	r.wantErr(r.acquire(), claims.ErrNotReady)
	r.check()
}

func TestI20WakeThatIsNewArmsWhatWasAdmitted(t *testing.T) {
	r := newRig(t)
	r.admit(input("a"), steer("b"))
	r.wantErr(r.acquire(), claims.ErrNotReady)
	r.wake(input("c"))
	r.ok(r.acquire())
	r.wantLog(`input.admitted(a) input.admitted(b) input.admitted(c)
		execution.started input.promoted(a) input.promoted(b) step.started(a+b)`)
	r.check()
}

// TestCommandsOfOneSession is what admit and wake do, by situation.
func TestCommandsOfOneSession(t *testing.T) {
	base := newRig(t)
	run := func(name string, f func(*rig)) {
		t.Run(name, func(t *testing.T) {
			r := base.fresh(name)
			r.t = t
			f(r)
			r.check()
		})
	}
	run("admitted inputs wait for a wake", func(r *rig) {
		r.admit(input("a"), input("b"))
		r.wantReady(false)
		r.wantErr(r.acquire(), claims.ErrNotReady)
		r.wake()
		r.wantReady(true)
		r.ok(r.acquire())
		r.ok(r.finish(nil))
		r.wantSettled(*again)
		r.ok(r.startStep())
		r.ok(r.finish(nil))
		r.wantLog(`input.admitted(a) input.admitted(b) execution.started input.promoted(a) step.started(a) step.ended
			input.promoted(b) step.started(b) step.ended execution.ended(completed)`)
	})
	run("several bare wakes coalesce", func(r *rig) {
		for range 5 {
			r.wake()
		}
		r.ok(r.acquire())
		r.ok(r.finish(nil))
		r.wantSettled(*settledAs(claims.OutcomeCompleted, false))
		r.wantLog("execution.started step.started() step.ended execution.ended(completed)")
	})
	run("a bare wake during a step buys one that starts after it", func(r *rig) {
		r.run(nil)
		r.wake()
		r.wake()
		r.ok(r.finish(nil))
		r.wantSettled(*again)
		r.ok(r.startStep())
		r.ok(r.finish(nil))
		r.wantLog("execution.started step.started() step.ended step.started() step.ended execution.ended(completed)")
	})
	run("a bare wake is served with the input that starts after it", func(r *rig) {
		r.wake()
		r.wake(input("a"))
		r.ok(r.acquire())
		r.ok(r.finish(nil))
		r.wantSettled(*settledAs(claims.OutcomeCompleted, false))
	})
	run("steers join at the next step boundary", func(r *rig) {
		r.run(input("a"))
		r.wake(steer("s1"), steer("s2"), input("b"))
		r.ok(r.finish(nil))
		r.ok(r.startStep())
		r.ok(r.finish(nil))
		r.wantTail(4, `input.admitted(s1) input.admitted(s2) input.admitted(b) step.ended
			input.promoted(s1) input.promoted(s2) input.promoted(b) step.started(s1+s2+b) step.ended execution.ended(completed)`)
	})
	run("a continuation runs alone", func(r *rig) {
		r.run(input("a"))
		r.wake(steer("s"))
		r.ok(r.finish(continued))
		r.ok(r.startStep())
		r.ok(r.finish(nil))
		r.ok(r.startStep())
		r.wantTail(5, `step.ended step.started(<continue0) step.ended input.promoted(s) step.started(s)`)
	})
	run("a delayed input blocks nothing", func(r *rig) {
		r.wakeAt(input("later"), time.Hour)
		r.wantReady(false)
		r.wantErr(r.acquire(), claims.ErrNotReady)
		r.run(input("now"))
		r.ok(r.finish(nil))
		r.wantSettled(*settledAs(claims.OutcomeCompleted, false))
		r.pass()
		r.wantReady(true)
		r.ok(r.acquire())
		r.wantTail(7, "execution.started input.promoted(later) step.started(later)")
	})
	run("a delayed bare wake arms what was admitted before it is due", func(r *rig) {
		r.wakeAt(nil, time.Hour)
		r.wakeAt(nil, 2*time.Hour)
		r.admit(input("a"))
		r.wantErr(r.acquire(), claims.ErrNotReady)
		r.pass()
		r.ok(r.acquire())
		r.ok(r.finish(nil))
		r.wantSettled(*settledAs(claims.OutcomeCompleted, false))
		r.wantLog("input.admitted(a) execution.started input.promoted(a) step.started(a) step.ended execution.ended(completed)")
	})
	run("a delayed wake that comes due while it runs is not lost", func(r *rig) {
		r.run(input("a"))
		r.wakeAt(nil, time.Hour)
		r.wakeAt(input("b"), time.Hour)
		r.pass()
		r.ok(r.finish(nil))
		r.wantSettled(*again)
	})
	run("a wake of a new input with an old time is due now", func(r *rig) {
		r.wakeAt(input("a"), -time.Hour)
		r.wantReady(true)
	})
	run("without a free slot a wake is recorded", func(r *rig) {
		r.wake(input("a"))
		r.wantClaim("", false)
		r.wantReady(true)
	})
	run("a wake by a holder whose lease is lost is recorded", func(r *rig) {
		r.expire(r.holder)
		cmd := r.command(claims.Wake)
		cmd.Input = input("a")
		r.ok(r.apply(cmd, r.newAcquisition()))
		if r.out.Started != nil || !r.out.Ready {
			r.t.Fatalf("answered %+v", r.out)
		}
		r.wantLog("input.admitted(a)")
		r.wantErr(r.acquire(), claims.ErrLeaseLost)
	})
	run("a final failure consumes only its own inputs", func(r *rig) {
		r.run(input("a"))
		r.wake(input("b"))
		r.admit(input("c"))
		r.ok(r.finish(failed))
		r.wantSettled(*again)
		r.ok(r.startStep())
		r.ok(r.finish(nil))
		r.wantTail(4, `input.admitted(b) input.admitted(c) step.failed(handler) input.promoted(b) step.started(b) step.ended execution.ended(completed)`)
	})
	run("a retry frees its slot and blocks nothing", func(r *rig) {
		r.run(input("a"))
		r.ok(r.finish(retried))
		r.wantSettled(*settledAs(claims.OutcomeRetrying, false))
		r.wantErr(r.acquire(), claims.ErrNotReady)
		r.run(input("b"))
		r.ok(r.finish(nil))
		r.wantSettled(*settledAs(claims.OutcomeCompleted, false))
		r.pass()
		r.ok(r.acquire())
		if r.step.Attempt != 1 || len(r.step.Inputs) != 1 || r.step.Inputs[0].ID != "a" {
			r.t.Fatalf("the retry is %+v", r.step)
		}
		r.ok(r.finish(retried))
		r.pass()
		r.ok(r.acquire())
		if r.step.Attempt != 2 {
			r.t.Fatalf("the second retry has attempt %d", r.step.Attempt)
		}
	})
	run("a hand-over costs no attempt", func(r *rig) {
		r.run(input("a"))
		r.ok(r.finish(retried))
		r.pass()
		r.ok(r.acquire())
		r.ok(r.handOver())
		r.ok(r.acquire())
		if r.step.Attempt != 1 || r.step.Continues.Kind != claims.KindHandover {
			r.t.Fatalf("the step is %+v", r.step)
		}
	})
	run("a quarantined session admits and runs nothing", func(r *rig) {
		continuing(r)
		poisoned(r)
		r.wantErr(r.acquire(), claims.ErrQuarantined)
		r.admit(input("b"))
		cmd := r.command(claims.Wake)
		cmd.Input = input("c")
		r.ok(r.apply(cmd, r.newAcquisition()))
		if r.out.Started != nil || r.out.Ready {
			r.t.Fatalf("answered %+v", r.out)
		}
		r.wantErr(r.acquire(), claims.ErrQuarantined)
		r.interrupt()
		r.wantTail(6, "session.quarantined(invalid_continuation) input.admitted(b) input.admitted(c)")
		r.discard()
		r.wantTail(9, "input.cancelled(b) input.cancelled(c)")
	})
}

// TestInterruptHitsOneThing is what an interrupt does, in each situation.
func TestInterruptHitsOneThing(t *testing.T) {
	base := newRig(t)
	run := func(name string, f func(*rig)) {
		t.Run(name, func(t *testing.T) {
			r := base.fresh(name)
			r.t = t
			f(r)
			r.check()
		})
	}
	run("nothing there", func(r *rig) {
		r.interrupt()
		r.discard()
		r.interruptOf(claims.ExecutionID(newID()))
		r.wantLog("")
		r.wantReady(false)
	})
	run("the open step, pending work survives", func(r *rig) {
		r.run(input("a"))
		r.wake(input("b"))
		r.interrupt()
		r.interrupt()
		r.ok(r.settle())
		r.wantSettled(*settledAs(claims.OutcomeInterrupted, true))
		r.wantTail(4, "input.admitted(b) execution.cancelling step.interrupted execution.ended(interrupted)")
		r.ok(r.acquire())
	})
	run("between steps it is the head", func(r *rig) {
		betweenSteps(r)
		r.wake(input("c"))
		r.interrupt()
		r.wantClaim(claims.Running, false)
		r.ok(r.startStep())
		r.wantTail(5, "step.ended input.admitted(c) input.cancelled(b) input.promoted(c) step.started(c)")
	})
	run("a promised next between steps", func(r *rig) {
		r.run(input("a"))
		r.ok(r.finish(continued))
		r.interrupt()
		r.ok(r.startStep())
		if r.nextStep != nil {
			r.t.Fatalf("started %+v", r.nextStep)
		}
		r.wantTail(4, "step.ended continuation.cancelled(continue) execution.ended(completed)")
	})
	run("a retry in its backoff", func(r *rig) {
		r.run(input("a"))
		r.ok(r.finish(retried))
		r.interrupt()
		r.wantTail(6, "continuation.cancelled(retry)")
		r.pass()
		r.wantErr(r.acquire(), claims.ErrNotReady)
	})
	run("a due input before a retry in its backoff", func(r *rig) {
		r.run(input("a"))
		r.ok(r.finish(retried))
		r.wake(input("b"))
		r.interrupt()
		r.wantTail(6, "input.admitted(b) input.cancelled(b)")
		r.pass()
		r.ok(r.acquire())
	})
	run("a due continuation with the bare wakes it would serve, not the inputs behind it", func(r *rig) {
		continuing(r)
		r.wake()
		r.wake(input("b"))
		r.interrupt()
		r.wantTail(6, "input.admitted(b) continuation.cancelled(handover) wake.cancelled")
		r.wantReady(true)
	})
	run("steers with the first queued input", func(r *rig) {
		r.wake(input("a"), steer("s"), input("b"))
		r.interrupt()
		r.wantTail(3, "input.cancelled(a) input.cancelled(s)")
		r.ok(r.acquire())
		r.wantTail(5, "execution.started input.promoted(b) step.started(b)")
	})
	run("bare wakes alone", func(r *rig) {
		r.wake()
		r.wake()
		r.interrupt()
		r.wantLog("wake.cancelled")
		r.wantErr(r.acquire(), claims.ErrNotReady)
	})
	run("what is not due is not the head", func(r *rig) {
		r.wakeAt(input("a"), time.Hour)
		r.wakeAt(nil, time.Hour)
		r.admit(input("b"))
		r.interrupt()
		r.wantLog("input.admitted(a) input.admitted(b)")
		r.pass()
		r.ok(r.acquire())
	})
	run("a delayed bare wake that is due is part of the head", func(r *rig) {
		r.admit(input("a"))
		r.wakeAt(nil, time.Hour)
		r.pass()
		r.interrupt()
		r.wantLog("input.admitted(a) input.cancelled(a) wake.cancelled")
		r.wantErr(r.acquire(), claims.ErrNotReady)
	})
	run("discard takes all pending inputs and the continuations", func(r *rig) {
		r.run(input("a"))
		r.ok(r.finish(retried))
		r.wakeAt(input("b"), time.Hour)
		r.admit(input("c"))
		r.discard()
		r.wantTail(6, "input.admitted(b) input.admitted(c) continuation.cancelled(retry) input.cancelled(b) input.cancelled(c)")
		r.pass()
		r.wantErr(r.acquire(), claims.ErrNotReady)
	})
	run("discard with a step open", func(r *rig) {
		r.run(input("a"))
		r.wake(input("b"))
		r.discard()
		r.ok(r.settle())
		r.wantSettled(*settledAs(claims.OutcomeInterrupted, false))
	})
	run("an expired claim is revoked, its conversion promises nothing", func(r *rig) {
		r.run(input("a"))
		r.expire(r.holder)
		r.interrupt()
		if n := r.out.Notice; n == nil || n.Revoked != claims.Interrupted {
			r.t.Fatalf("notice is %+v", n)
		}
		r.wantErr(r.finish(nil), claims.ErrFenced) // revoked: not its own any more
		r.find()
		r.ok(r.takeOver())
		r.ok(r.convert())
		r.wantSettled(*settledAs(claims.OutcomeInterrupted, false))
		r.wantTail(4, "step.interrupted(unjoined) execution.ended(interrupted)")
	})
	run("an expired claim without an open step: the head", func(r *rig) {
		betweenSteps(r)
		r.expire(r.holder)
		r.interrupt()
		r.wantTail(6, "input.cancelled(b)")
	})
	run("a claim that a scanner holds", func(r *rig) {
		takenOver(r)
		r.wake()
		r.interrupt()
		r.interrupt()
		r.ok(r.convert())
		r.wantSettled(*settledAs(claims.OutcomeInterrupted, true))
		r.wantTail(4, "step.interrupted(unjoined) execution.ended(interrupted)")
	})
	run("a claim of a scanner that died: through a second takeover", func(r *rig) {
		takenOver(r)
		r.expire(r.scanner)
		r.interrupt()
		r.find()
		r.scanner = r.lease("scanner", longLease)
		r.ok(r.takeOver())
		r.ok(r.convert())
		r.wantSettled(*settledAs(claims.OutcomeInterrupted, false))
	})
	run("a verdict stays through later takeovers and is not lowered", func(r *rig) {
		r.run(input("a"))
		r.ok(r.store.Revoke(r.ctx(), r.claim, claims.NeverJoined))
		r.find()
		r.ok(r.takeOver())
		r.interrupt()
		r.expire(r.scanner)
		r.interrupt()
		r.find()
		r.scanner = r.lease("scanner", longLease)
		r.ok(r.takeOver())
		r.ok(r.convert())
		r.wantSettled(*settledAs(claims.OutcomeQuarantined, false))
	})
	run("a declined step: nothing changes", func(r *rig) {
		r.run(input("a"))
		r.ok(r.decline())
		r.wake(input("b"))
		r.interrupt()
		r.ok(r.settle())
		r.wantSettled(*settledAs(claims.OutcomeDeclined, true))
	})
	run("an execution by name", func(r *rig) {
		r.run(input("a"))
		r.wake(input("b"))
		r.interruptOf(claims.ExecutionID(newID()))
		r.wantClaim(claims.Running, true)
		r.interruptOf(r.claim.Execution)
		r.wantClaim(claims.Cancelling, true)
	})
	run("an execution by name, after it ended", func(r *rig) {
		r.run(input("a"))
		was := r.claim.Execution
		r.ok(r.finish(nil))
		r.wake(input("b"))
		r.interruptOf(was)
		r.wantReady(true)
		r.run(nil)
		r.interruptOf(was)
		r.wantClaim(claims.Running, true)
	})
	run("an execution by name between its steps: its promise, never an armed input", func(r *rig) {
		r.run(input("a"))
		r.wake(input("b"))
		r.ok(r.finish(continued))
		r.interruptOf(r.claim.Execution)
		r.wantTail(5, "step.ended continuation.cancelled(continue)")
		r.interruptOf(r.claim.Execution)
		r.wantTail(7, "")
		r.ok(r.startStep())
	})
	run("an execution by name, after a takeover", func(r *rig) {
		r.run(input("a"))
		was := r.claim.Execution
		r.lose()
		r.ok(r.takeOver())
		r.interruptOf(was)
		r.ok(r.convert())
		r.wantSettled(*settledAs(claims.OutcomeInterrupted, false))
	})
	run("an execution by name, its recovery waiting", func(r *rig) {
		r.run(input("a"))
		was := r.claim.Execution
		r.lose()
		r.ok(r.takeOver())
		r.ok(r.convert())
		r.wake(input("b"))
		r.interruptOf(was)
		r.wantTail(6, "input.admitted(b) continuation.cancelled(recovery)")
		r.wantReady(true)
	})
	for i, which := range []string{"the first", "a middle", "the last but one", "the present"} {
		run(which+" execution of a lineage", func(r *rig) {
			r.run(input("a"))
			lineage := []claims.ExecutionID{r.claim.Execution}
			for range 3 {
				r.ok(r.handOver())
				r.ok(r.acquire())
				lineage = append(lineage, r.claim.Execution)
			}
			r.interruptOf(lineage[i])
			r.wantClaim(claims.Cancelling, true)
		})
	}
	run("a middle execution, its successor's promise waiting beside an open step", func(r *rig) {
		r.run(input("a"))
		r.ok(r.handOver())
		r.ok(r.acquire())
		middle := r.claim.Execution
		r.ok(r.handOver())
		r.ok(r.acquire())
		r.ok(r.finish(retried)) // waits
		r.run(input("b"))
		r.interruptOf(middle)
		r.wantClaim(claims.Running, true)
		r.ok(r.finish(nil))
		r.wantSettled(*settledAs(claims.OutcomeCompleted, false))
		r.pass()
		r.wantErr(r.acquire(), claims.ErrNotReady)
	})
	run("the successor's other work is not of the lineage", func(r *rig) {
		r.run(input("a"))
		first := r.claim.Execution
		r.ok(r.handOver())
		r.wake(input("b"))
		r.ok(r.acquire())
		r.ok(r.finish(nil))
		r.ok(r.startStep())
		r.interruptOf(first)
		r.wantClaim(claims.Running, true)
	})
}

func TestI21WakesSurviveAnInterruption(t *testing.T) {
	r := newRig(t)
	r.run(input("a"))
	r.wake() // recorded before it begins
	r.interrupt()
	r.wake() // while it is cancelling
	r.wake(input("b"), steer("c"))
	r.ok(r.settle())
	r.wantSettled(*settledAs(claims.OutcomeInterrupted, true))
	r.ok(r.acquire())
	r.ok(r.finish(nil))
	r.wantSettled(*settledAs(claims.OutcomeCompleted, false))
	r.wantTail(4, `execution.cancelling input.admitted(b) input.admitted(c) step.interrupted execution.ended(interrupted)
		execution.started input.promoted(b) input.promoted(c) step.started(b+c) step.ended execution.ended(completed)`)
	r.check()
}

// ending is a way a claim goes, that a wake races with.
type ending struct {
	name  string
	setup func(*rig)
	op    func(*rig) error
}

func endings() []ending {
	return []ending{
		{"drained", running, func(r *rig) error { return r.finish(nil) }},
		{"failed", running, func(r *rig) error { return r.finish(failed) }},
		{"retrying", running, func(r *rig) error { return r.finish(retried) }},
		{"handed over", running, (*rig).handOver},
		{"yielded", running, func(r *rig) error { return r.finish(func(e *claims.Ending) { e.Continue, e.Yield = true, true }) }},
		{"nothing due", func(r *rig) { betweenSteps(r); r.interrupt() }, (*rig).startStep},
		{"interrupted", func(r *rig) { running(r); r.interrupt() }, (*rig).settle},
		{"declined", func(r *rig) { running(r); r.ok(r.decline()) }, (*rig).settle},
		{"converted as interrupted", func(r *rig) { takenOver(r); r.interrupt() }, (*rig).convert},
		{"removed by the scanner", func(r *rig) { running(r); r.ok(r.decline()); r.lose() }, func(r *rig) error { return r.endExpired(false) }},
	}
}

// TestI22NoWakeIsLostAroundTheRemoval races a wake with the removal of the claim, gated so that each is stopped at each
// of its points while the other runs as far as it can.
//
// Interleavings, A the removal and B the wake:
//
//	A has read its claim and all that is pending, B begins, A commits, B goes on
//	A has committed and does not know it yet, B runs to its end
//	B has read the claim, A begins, B commits, A goes on
//	B has committed and does not know it yet, A runs to its end
func TestI22NoWakeIsLostAroundTheRemoval(t *testing.T) {
	url := dbtest.New(t)
	for _, e := range endings() {
		t.Run(e.name, func(t *testing.T) {
			t.Parallel()
			pa, pb := newProxy(t, url, 0), newProxy(t, url, 0)
			base := rigOn(t, url, pa.URL(), crdb.Options{})
			other := base.as(pb.URL())
			for _, bare := range []bool{true, false} {
				for _, point := range []string{"A before commit", "A committed", "B before commit", "B committed"} {
					name := fmt.Sprintf("%s, bare %v", point, bare)
					t.Run(name, func(t *testing.T) {
						a := base.fresh(e.name + ", " + name)
						a.t = t
						e.setup(a)
						b := *other
						b.t, b.session, b.seq = t, a.session, a.seq
						cmd := b.command(claims.Wake)
						if !bare {
							cmd.Input = input("woken")
						}
						remove := func() error { return e.op(a) }
						wake := func() error { return b.apply(cmd, nil) }
						first, second, pFirst, pSecond := remove, wake, pa, pb
						if point[0] == 'B' {
							first, second, pFirst, pSecond = wake, remove, pb, pa
						}
						race(t, first, second, pFirst, pSecond, point[2:] == "committed")
						a.wantWorkLeft()
						a.check()
					})
				}
			}
		})
	}
}

// race runs first up to its COMMIT, or to the answer of its COMMIT, then second as far as it can, then both to their end.
func race(t *testing.T, first, second func() error, pFirst, pSecond *faultproxy.Proxy, committed bool) {
	t.Helper()
	defer pFirst.Disarm()
	defer pSecond.Disarm()
	var gate *faultproxy.Gate
	if committed {
		gate = pFirst.HoldCommitted()
	} else {
		gate = pFirst.Hold(faultproxy.Commit)
	}
	defer gate.Release()
	done := make(chan error, 2)
	go func() { done <- first() }()
	<-gate.Reached()
	if committed {
		if err := second(); err != nil { // runs to its end: nothing of first is in its way
			t.Fatal(err)
		}
		gate.Release()
		if err := <-done; err != nil {
			t.Fatal(err)
		}
		return
	}
	// Second sends its reads, which wait for first's lock, before first goes on.
	sent := pSecond.Hold(1)
	go func() { done <- second() }()
	<-sent.Reached()
	sent.Release()
	gate.Release()
	for range 2 {
		if err := <-done; err != nil {
			t.Fatal(err)
		}
	}
}

// wantWorkLeft demands that the wake that was applied is there: it has its step, or the claim goes on, or the session is
// ready.
func (r *rig) wantWorkLeft() {
	r.t.Helper()
	switch {
	case r.nextStep != nil:
		r.wantClaim(claims.Running, true)
	case r.settled.Again:
		r.wantClaim(claims.Running, false)
		r.ok(r.startStep())
		if r.nextStep == nil {
			r.t.Fatal("the wake is lost: nothing to start")
		}
	default:
		r.wantClaim("", false)
		r.wantReady(true)
		r.runOn()
	}
	if left := scan[int64](r, "SELECT count(*) FROM inputs WHERE session_id = $1 AND input_id = 'woken' AND state <> 'covered'", string(r.session)); left > 0 && r.settled.Outcome != "" {
		r.t.Fatal("the session is drained and the woken input waits")
	}
}

// TestI22FirstWakesOfASession: two first commands of a session that has no row yet, nothing to lock.
func TestI22FirstWakesOfASession(t *testing.T) {
	a, pa := proxied(t, crdb.Options{})
	pb := newProxy(t, a.url, 0)
	b := a.as(pb.URL())
	for _, committed := range []bool{false, true} {
		name := claims.SessionID(fmt.Sprintf("first %v", committed))
		a.session, b.session, a.seq, b.seq = name, name, 0, 1
		one, two := a.command(claims.Wake), b.command(claims.Wake)
		one.Input, two.Input = input("a"), input("b")
		var outA, outB claims.Outcome
		acqA, acqB := *a.newAcquisition(), *b.newAcquisition()
		race(t,
			func() (err error) { outA, err = a.store.Apply(a.ctx(), one, &acqA); return err },
			func() (err error) { outB, err = b.store.Apply(b.ctx(), two, &acqB); return err },
			pa, pb, committed)
		switch {
		case outA.Result == claims.Applied && outB.Result == claims.Applied:
			if (outA.Started == nil) == (outB.Started == nil) {
				t.Fatalf("started %v and %v, want exactly one", outA.Started, outB.Started)
			}
		case outA.Result == claims.Duplicate: // b's was first: the caller applies in stream order, and so never asks this
		default:
			t.Fatalf("answered %+v and %+v", outA, outB)
		}
		a.check()
	}
}

func TestI23AnInputIsCoveredByOneStepAndItsContinuations(t *testing.T) {
	r := newRig(t)
	r.run(input("a"))
	r.ok(r.finish(retried))
	r.pass()
	r.ok(r.acquire())
	r.lose()
	r.ok(r.takeOver())
	r.ok(r.convert())
	r.holder = r.lease("worker", longLease)
	r.wake(input("b"))
	r.ok(r.acquire())
	if c := r.step.Continues; c.Kind != claims.KindRecovery || c.Attempt != 1 || r.step.Attempt != 1 {
		t.Fatalf("the recovery is %+v of %+v", c, r.step)
	}
	r.ok(r.handOver())
	r.ok(r.acquire())
	r.ok(r.finish(continued))
	r.ok(r.startStep())
	if len(r.step.Inputs) != 0 || r.step.Attempt != 0 {
		t.Fatalf("a continuation of a step that ended has %+v", r.step)
	}
	r.ok(r.finish(nil))
	r.ok(r.startStep())
	r.ok(r.finish(nil))
	r.wantLog(`input.admitted(a) execution.started input.promoted(a) step.started(a) step.failed(handler) execution.ended(retrying)
		execution.started step.started(a<retry1) step.failed(worker_lost) execution.ended(recovered) input.admitted(b)
		execution.started step.started(a<recovery1) step.failed(shutdown) execution.ended(handed_over)
		execution.started step.started(a<handover1) step.ended step.started(<continue0) step.ended
		input.promoted(b) step.started(b) step.ended execution.ended(completed)`)
	r.check()
}

// TestTraceGoesWithTheStep: the trace of the command whose input a step covers
// is on every event of that step and of its execution, however it was started,
// and goes to the handler and to who goes on with the step. That of another
// command, which only made it start, is not. A bare wake has no row to keep its
// trace in: it goes with the step that the wake itself starts.
func TestTraceGoesWithTheStep(t *testing.T) {
	const trace, other = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01", "00-0af7651916cd43dd8448eb211c80319d-b7ad6b7169203332-01"
	base := newRig(t)
	wake := func(r *rig, in *claims.Input, trace string, acq *claims.Acquisition) {
		r.t.Helper()
		cmd := r.command(claims.Wake)
		cmd.Input, cmd.Trace = in, trace
		r.ok(r.apply(cmd, acq))
	}
	for name, begin := range map[string]func(r *rig){
		"a slot is free":               func(r *rig) { wake(r, input("a"), trace, r.newAcquisition()) },
		"none is":                      func(r *rig) { wake(r, input("a"), trace, nil); r.ok(r.acquire()) },
		"bare wake":                    func(r *rig) { wake(r, nil, trace, r.newAcquisition()) },
		"another's wake makes it run":  func(r *rig) { wake(r, input("a"), trace, nil); wake(r, input("b"), other, r.newAcquisition()) },
		"another without a trace does": func(r *rig) { wake(r, input("a"), trace, nil); wake(r, nil, "", r.newAcquisition()) },
	} {
		for how, end := range map[string]func(r *rig){
			"ends":   func(r *rig) { r.ok(r.finish(nil)) },
			"fails":  func(r *rig) { r.ok(r.finish(failed)) },
			"handed": func(r *rig) { r.ok(r.handOver()); r.ok(r.acquire()); r.ok(r.record("more")); r.ok(r.finish(nil)) },
			"lost": func(r *rig) {
				r.lose()
				r.ok(r.takeOver())
				r.ok(r.convert())
				r.holder = r.lease("worker", longLease)
				r.ok(r.acquire())
				r.ok(r.record("more"))
				r.ok(r.finish(nil))
			},
		} {
			t.Run(name+", "+how, func(t *testing.T) {
				r := base.fresh(strings.ReplaceAll(strings.ReplaceAll(name+how, " ", "-"), "'", ""))
				r.t = t
				begin(r)
				if r.step.Trace != trace {
					t.Errorf("the handler gets %q", r.step.Trace)
				}
				r.ok(r.record("text"))
				end(r)
				records, err := r.store.Tail(r.ctx(), r.session, 100)
				r.ok(err)
				n := 0
				for _, e := range records {
					if e.Execution == "" { // a command's own
						continue
					}
					if n++; e.Trace != trace {
						t.Errorf("traceparent is %q in %s", e.Trace, e.Line)
					}
				}
				if n < 4 {
					t.Errorf("only %d events", n)
				}
			})
		}
	}
}

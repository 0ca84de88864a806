package crdb_test

import (
	"testing"
	"time"

	"reveille/claims"
	"reveille/claims/crdb"
)

// scenario is one operation of the store, from a situation to what it must have done, exactly once. It runs plainly in
// TestOperations and behind the fault proxy in TestOperationsUnderFaults.
type scenario struct {
	name  string
	setup func(*rig)
	op    func(*rig) error
	log   string // what op appends
	// settled is the answer of an operation that settles.
	settled *claims.Settlement
	// want demands what the log does not say.
	want func(*rig)
	// acquires: op may answer claims.ErrOutcomeUnknown, which HandOver resolves (I3).
	acquires bool
	ready    bool
	// prunes: op takes the beginning of the log away.
	prunes bool
}

func nothing(*rig) {}

func applies(cmd func(*rig) claims.Command) func(*rig) error {
	return func(r *rig) error { return r.apply(cmd(r), nil) }
}

func starts(cmd func(*rig) claims.Command) func(*rig) error {
	return func(r *rig) error { return r.apply(cmd(r), r.newAcquisition()) }
}

func waking(in *claims.Input) func(*rig) claims.Command {
	return func(r *rig) claims.Command {
		cmd := r.command(claims.Wake)
		cmd.Input = in
		return cmd
	}
}

func interrupting(r *rig) claims.Command { return r.interruptCmd(nil) }

func discarding(r *rig) claims.Command {
	return r.interruptCmd(func(c *claims.Command) { c.Discard = true })
}

func running(r *rig) { r.run(input("a")) }

func settledAs(o claims.ExecutionOutcome, ready bool) *claims.Settlement {
	return &claims.Settlement{Outcome: o, Ready: ready}
}

var again = &claims.Settlement{Again: true}

// poisoned makes the session's oldest continuation one that does not decode.
func poisoned(r *rig) {
	r.exec(`UPDATE continuations SET body = 'not JSON' WHERE session_id = $1`, string(r.session))
}

// continuing leaves a due continuation and no claim.
func continuing(r *rig) {
	running(r)
	r.ok(r.handOver())
}

// betweenSteps leaves a claim without an open step and an armed input.
func betweenSteps(r *rig) {
	running(r)
	r.wake(input("b"))
	r.ok(r.finish(nil))
}

func takenOver(r *rig) {
	running(r)
	r.lose()
	r.ok(r.takeOver())
}

// scenarios cover every operation of the store that writes.
func scenarios() []scenario {
	const ran = "input.admitted(a) execution.started input.promoted(a) step.started(a)"
	return []scenario{
		{
			name: "admit", setup: nothing,
			op: applies(func(r *rig) claims.Command {
				cmd := r.command(claims.Admit)
				cmd.Input = input("a")
				return cmd
			}),
			log: "input.admitted(a)", want: func(r *rig) { r.wantReady(false) },
		},
		{
			name: "wake of a new session", setup: nothing, op: applies(waking(input("a"))),
			log: "input.admitted(a)", want: func(r *rig) { r.wantReady(true) }, ready: true,
		},
		{
			name: "bare wake", setup: func(r *rig) { r.admit(input("a")) }, op: applies(waking(nil)),
			want: func(r *rig) { r.wantReady(true) }, ready: true,
		},
		{
			name: "delayed bare wake", setup: nothing, op: applies(func(r *rig) claims.Command {
				cmd := r.command(claims.Wake)
				cmd.NotBefore = time.Now().Add(time.Hour)
				return cmd
			}),
			want: func(r *rig) { r.wantReady(false) },
		},
		{
			name: "second delayed bare wake", setup: func(r *rig) { r.wakeAt(nil, time.Hour) }, op: applies(func(r *rig) claims.Command {
				cmd := r.command(claims.Wake)
				cmd.NotBefore = time.Now().Add(2 * time.Hour)
				return cmd
			}),
			want: func(r *rig) { r.wantReady(false) },
		},
		{
			name: "wake while it runs", setup: running, op: applies(waking(input("b"))),
			log: "input.admitted(b)", want: func(r *rig) { r.wantClaim(claims.Running, true) },
		},
		{
			name: "wake acquires a new session", setup: nothing, op: starts(waking(input("a"))), acquires: true,
			log: ran, want: func(r *rig) { r.wantClaim(claims.Running, true) },
		},
		{
			name: "wake acquires what was admitted", setup: func(r *rig) { r.admit(steer("a"), input("b"), input("c")) },
			op: starts(waking(nil)), acquires: true,
			log:  "execution.started input.promoted(a) input.promoted(b) step.started(a+b)",
			want: func(r *rig) { r.wantClaim(claims.Running, true) },
		},
		{
			name: "wake acquires a continuation", setup: continuing, op: starts(waking(input("b"))), acquires: true,
			log: "input.admitted(b) execution.started step.started(a<handover0)",
		},
		{
			name: "interrupt of the open step", setup: running, op: applies(interrupting),
			log: "execution.cancelling", want: func(r *rig) {
				r.wantClaim(claims.Cancelling, true)
				if n := r.out.Notice; n == nil || n.Holder != r.holder || n.Execution != r.claim.Execution || n.Phase != claims.Cancelling {
					r.t.Fatalf("notice is %+v", n)
				}
			},
		},
		{
			name: "interrupt of the head", setup: func(r *rig) { r.wake(steer("a"), input("b"), input("c")); r.wake() }, op: applies(interrupting),
			log: "input.cancelled(a) input.cancelled(b) wake.cancelled", want: func(r *rig) { r.wantReady(true) }, ready: true,
		},
		{
			name: "interrupt that discards", setup: func(r *rig) { running(r); r.wake(input("b")); r.admit(input("c")) }, op: applies(discarding),
			log: "execution.cancelling input.cancelled(b) input.cancelled(c)",
		},
		{
			name: "interrupt of a continuation", setup: continuing, op: applies(interrupting), log: "continuation.cancelled(handover)",
		},
		{
			name: "interrupt of an expired claim", setup: func(r *rig) { running(r); r.expire(r.holder) }, op: applies(interrupting),
			want: func(r *rig) {
				if got := scan[string](r, "SELECT revoked || ' ' || reason FROM claims WHERE session_id = $1", string(r.session)); got != "interrupted stop" {
					r.t.Fatalf("revoked as %q", got)
				}
			},
		},
		{
			name: "interrupt of a claim that a scanner holds", setup: takenOver, op: applies(interrupting),
			want: func(r *rig) {
				if got := scan[string](r, "SELECT verdict || ' ' || reason FROM claims WHERE session_id = $1", string(r.session)); got != "interrupted stop" {
					r.t.Fatalf("verdict is %q", got)
				}
			},
		},
		{
			name: "pass over", setup: nothing, op: func(r *rig) error { return r.store.PassOver(r.ctx(), r.command(claims.Wake)) },
			want: func(r *rig) {
				if got := scan[int64](r, "SELECT command_seq FROM sessions WHERE session_id = $1", string(r.session)); got != r.seq {
					r.t.Fatalf("mark is %d, want %d", got, r.seq)
				}
			},
		},
		{
			name: "acquire", setup: func(r *rig) { r.wake(input("a")) }, op: (*rig).acquire, acquires: true,
			log: "execution.started input.promoted(a) step.started(a)",
		},
		{
			name: "acquire a continuation", setup: continuing, op: (*rig).acquire, acquires: true,
			log: "execution.started step.started(a<handover0)",
		},
		{
			name: "start the next step", setup: betweenSteps, op: (*rig).startStep,
			log: "input.promoted(b) step.started(b)",
			want: func(r *rig) {
				if r.nextStep == nil || r.nextStep.Index != 2 || len(r.nextStep.Inputs) != 1 {
					r.t.Fatalf("started %+v", r.nextStep)
				}
			},
		},
		{
			name: "start a step where nothing is due", setup: func(r *rig) { betweenSteps(r); r.interrupt() }, op: (*rig).startStep,
			log: "execution.ended(completed)", settled: settledAs(claims.OutcomeCompleted, false),
		},
		{
			name: "start a step from a bad continuation", setup: func(r *rig) { running(r); r.ok(r.finish(continued)); poisoned(r) }, op: (*rig).startStep,
			log:     "session.quarantined(invalid_continuation) execution.ended(quarantined)",
			settled: settledAs(claims.OutcomeQuarantined, false),
		},
		{name: "record", setup: running, op: func(r *rig) error { return r.record("hello") }, log: "text"},
		{
			name: "decline", setup: running, op: (*rig).decline, log: "step.interrupted(unjoined)",
			want: func(r *rig) { r.wantClaim(claims.Cancelled, false) },
		},
		{
			name: "finish drains", setup: running, op: func(r *rig) error { return r.finish(nil) },
			log: "step.ended execution.ended(completed)", settled: settledAs(claims.OutcomeCompleted, false),
		},
		{
			name: "finish with more work", setup: func(r *rig) { running(r); r.wake(input("b")) }, op: func(r *rig) error { return r.finish(nil) },
			log: "step.ended", settled: again, want: func(r *rig) { r.wantClaim(claims.Running, false) },
		},
		{
			name: "finish and continue", setup: running, op: func(r *rig) error { return r.finish(continued) },
			log: "step.ended", settled: again,
		},
		{
			name: "finish and yield", setup: running, op: func(r *rig) error {
				return r.finish(func(e *claims.Ending) { e.Continue, e.Yield = true, true })
			},
			log: "step.ended execution.ended(yielded)", settled: settledAs(claims.OutcomeYielded, true), ready: true,
		},
		{
			name: "finish as failed", setup: func(r *rig) { running(r); r.admit(input("b")) }, op: func(r *rig) error { return r.finish(failed) },
			log: "step.failed(handler) execution.ended(failed)", settled: settledAs(claims.OutcomeFailed, false),
		},
		{
			name: "finish and retry", setup: func(r *rig) { running(r); r.wake(input("b")) }, op: func(r *rig) error { return r.finish(retried) },
			log: "step.failed(handler) execution.ended(retrying)", settled: settledAs(claims.OutcomeRetrying, true), ready: true,
		},
		{
			name: "settle an interrupted execution", setup: func(r *rig) { running(r); r.interrupt(); r.wake() }, op: (*rig).settle,
			log: "step.interrupted execution.ended(interrupted)", settled: settledAs(claims.OutcomeInterrupted, true), ready: true,
		},
		{
			name: "settle a declined execution", setup: func(r *rig) { running(r); r.ok(r.decline()) }, op: (*rig).settle,
			log: "execution.ended(declined)", settled: settledAs(claims.OutcomeDeclined, false),
		},
		{
			name: "hand over an open step", setup: running, op: (*rig).handOver,
			log: "step.failed(shutdown) execution.ended(handed_over)", settled: settledAs(claims.OutcomeHandedOver, true), ready: true,
		},
		{
			name: "hand over between steps", setup: betweenSteps, op: (*rig).handOver,
			log: "execution.ended(handed_over)", settled: settledAs(claims.OutcomeHandedOver, true), ready: true,
		},
		{
			name: "hand over what was interrupted", setup: func(r *rig) { running(r); r.interrupt() }, op: (*rig).handOver,
			log: "step.interrupted execution.ended(interrupted)", settled: settledAs(claims.OutcomeInterrupted, false),
		},
		{
			name: "hand over what was declined", setup: func(r *rig) { running(r); r.ok(r.decline()) }, op: (*rig).handOver,
			log: "execution.ended(declined)", settled: settledAs(claims.OutcomeDeclined, false),
		},
		{
			name: "revoke", setup: running, op: func(r *rig) error { return r.store.Revoke(r.ctx(), r.claim, claims.NeverJoined) },
			want: func(r *rig) {
				if got := scan[string](r, "SELECT revoked FROM claims WHERE session_id = $1", string(r.session)); got != "never_joined" {
					r.t.Fatalf("revoked as %q", got)
				}
			},
		},
		{
			name: "take over", setup: func(r *rig) { running(r); r.lose() }, op: (*rig).takeOver,
			want: func(r *rig) {
				if epoch := scan[int64](r, "SELECT epoch FROM sessions WHERE session_id = $1", string(r.session)); epoch != 2 || r.claim.Epoch != 2 {
					r.t.Fatalf("epoch is %d, the claim says %d, want 2", epoch, r.claim.Epoch)
				}
			},
		},
		{
			name: "convert", setup: takenOver, op: (*rig).convert,
			log: "step.failed(worker_lost) execution.ended(recovered)", settled: settledAs(claims.OutcomeRecovered, true), ready: true,
		},
		{
			name: "convert what was interrupted", setup: func(r *rig) { takenOver(r); r.interrupt() }, op: (*rig).convert,
			log: "step.interrupted(unjoined) execution.ended(interrupted)", settled: settledAs(claims.OutcomeInterrupted, false),
		},
		{
			name: "convert what never joined", setup: func(r *rig) {
				running(r)
				r.ok(r.store.Revoke(r.ctx(), r.claim, claims.NeverJoined))
				r.find()
				r.ok(r.takeOver())
			}, op: (*rig).convert,
			log:     "session.quarantined(never_joined) execution.ended(quarantined)",
			settled: settledAs(claims.OutcomeQuarantined, false),
		},
		{
			name: "conversion failed", setup: takenOver, op: func(r *rig) (err error) {
				r.settled, err = r.store.ConversionFailed(r.ctx(), r.claim, "23514", r.newToken())
				return err
			},
			log:     "session.quarantined(conversion_failed) execution.ended(quarantined)",
			settled: settledAs(claims.OutcomeQuarantined, false),
		},
		{
			name: "end an expired cancelled claim", setup: func(r *rig) { running(r); r.ok(r.decline()); r.wake(input("b")); r.lose() },
			op:  func(r *rig) error { return r.endExpired(false) },
			log: "execution.ended(declined)", settled: settledAs(claims.OutcomeDeclined, true), ready: true,
		},
		{
			name: "end an expired cancelling claim", setup: func(r *rig) { running(r); r.interrupt(); r.lose() },
			op:      func(r *rig) error { return r.endExpired(false) },
			log:     "session.quarantined(cancellation_outcome_unknown) execution.ended(quarantined)",
			settled: settledAs(claims.OutcomeQuarantined, false),
		},
		{
			name: "end an expired cancelling claim as interrupted", setup: func(r *rig) { running(r); r.interrupt(); r.wake(); r.lose() },
			op:  func(r *rig) error { return r.endExpired(true) },
			log: "step.interrupted(unjoined) execution.ended(interrupted)", settled: settledAs(claims.OutcomeInterrupted, true), ready: true,
		},
		{
			name: "quarantine a continuation", setup: func(r *rig) { continuing(r); poisoned(r) }, op: func(r *rig) error {
				d := claims.DueContinuation{Session: r.session, Number: 1, Body: "not JSON"}
				return r.store.QuarantineContinuation(r.ctx(), d, r.newToken())
			},
			log: "session.quarantined(invalid_continuation)",
		},
		{
			name: "release to try again", setup: outcomeUnknown, op: func(r *rig) error { return r.release(claims.ReleaseRetry) },
			log: "session.released(retry) step.failed(worker_lost)", want: func(r *rig) { r.wantReady(true) },
			settled: &claims.Settlement{Ready: true}, ready: true,
		},
		{
			name: "release as interrupted", setup: func(r *rig) { outcomeUnknown(r); r.wake(input("b")) },
			op:  func(r *rig) error { return r.release(claims.ReleaseInterrupted) },
			log: "session.released(interrupted) step.interrupted(unjoined)", want: func(r *rig) { r.wantReady(true) },
			settled: &claims.Settlement{Ready: true}, ready: true,
		},
		{
			name: "release and discard", setup: func(r *rig) { headOf(r); r.holder = r.lease("worker", longLease) },
			op:      func(r *rig) error { return r.release(claims.ReleaseDiscard) },
			log:     "session.released(discard) input.cancelled(b) input.cancelled(c) wake.cancelled input.cancelled(d)",
			settled: &claims.Settlement{}, want: func(r *rig) { r.wantReady(false) },
		},
		{
			name: "delete what is past its retention", setup: func(r *rig) { r.run(input("a")); r.ok(r.finish(nil)); r.wake(input("b")); r.relayed() },
			op: func(r *rig) error {
				// What it keeps is some milliseconds old, and so is what is pending, which stays.
				_, _, err := r.store.DeleteExpired(r.ctx(), r.session, 0, 100)
				return err
			},
			prunes: true,
			want: func(r *rig) {
				if got := r.inputStates(); got != "b armed" {
					r.t.Fatalf("inputs are %q", got)
				}
			},
		},
		{
			name: "note relayed", setup: running, op: func(r *rig) error {
				return r.store.NoteRelayed(r.ctx(), []claims.Mark{{Session: r.session, Seq: 4}})
			},
			want: func(r *rig) {
				if got := scan[int64](r, "SELECT relayed_seq FROM sessions WHERE session_id = $1", string(r.session)); got != 4 {
					r.t.Fatalf("relayed %d", got)
				}
			},
		},
		{
			name: "open a lease", setup: func(r *rig) { r.holder = claims.HolderID(newID()) }, op: func(r *rig) error {
				return r.store.OpenLease(r.ctx(), claims.Lease{Holder: r.holder, Kind: "worker", Name: "w", Version: "v", Slots: 1}, time.Hour)
			},
			want: func(r *rig) {
				if !scan[bool](r, "SELECT EXISTS (SELECT 1 FROM leases WHERE holder = $1 AND expires_at > statement_timestamp())", string(r.holder)) {
					r.t.Fatal("there is no live lease")
				}
			},
		},
		{
			name: "close a lease", setup: nothing, op: func(r *rig) error { return r.store.CloseLease(r.ctx(), r.holder) },
			want: func(r *rig) {
				if scan[bool](r, "SELECT EXISTS (SELECT 1 FROM leases WHERE holder = $1)", string(r.holder)) {
					r.t.Fatal("the lease is there")
				}
			},
		},
		{
			name: "touch a claim", setup: func(r *rig) { running(r); r.lose() }, op: func(r *rig) error {
				_, err := r.store.TouchClaims(r.ctx(), []claims.Candidate{r.candidate})
				return err
			},
			want: func(r *rig) {
				was := r.candidate.DueAt
				r.find()
				if !r.candidate.DueAt.After(was) {
					r.t.Fatal("the claim was not touched")
				}
			},
		},
		{
			name: "touch a continuation", setup: func(r *rig) {
				continuing(r)
				r.exec("UPDATE continuations SET due_at = not_before WHERE session_id = $1", string(r.session))
			}, op: func(r *rig) error {
				_, err := r.store.TouchContinuations(r.ctx(), []claims.DueContinuation{{Session: r.session, Number: 1}}, time.Hour)
				return err
			},
			want: func(r *rig) {
				if !scan[bool](r, "SELECT due_at > statement_timestamp() + INTERVAL '30 minutes' FROM continuations WHERE session_id = $1", string(r.session)) {
					r.t.Fatal("the continuation was not touched")
				}
			},
		},
		{
			name: "touch a session and its relay", setup: func(r *rig) {
				r.wake(input("a"))
				r.exec("UPDATE sessions SET ready_due_at = ready_at, relay_due_at = ready_at WHERE session_id = $1", string(r.session))
			}, op: func(r *rig) error {
				if _, err := r.store.TouchSessions(r.ctx(), []claims.SessionID{r.session}, time.Hour); err != nil {
					return err
				}
				_, err := r.store.TouchRelays(r.ctx(), []claims.SessionID{r.session}, time.Hour)
				return err
			},
			want: func(r *rig) {
				if !scan[bool](r, `SELECT LEAST(ready_due_at, relay_due_at) > statement_timestamp() + INTERVAL '30 minutes'
					FROM sessions WHERE session_id = $1`, string(r.session)) {
					r.t.Fatal("the session was not touched")
				}
			},
		},
		{
			name: "delete dead leases", setup: func(r *rig) { r.expire(r.holder) }, op: func(r *rig) error {
				return r.store.DeleteDeadLeases(r.ctx(), 500*time.Millisecond)
			},
			want: func(r *rig) {
				if scan[bool](r, "SELECT EXISTS (SELECT 1 FROM leases WHERE holder = $1)", string(r.holder)) {
					r.t.Fatal("the lease is there")
				}
			},
		},
	}
}

// verify demands that the scenario's operation was done exactly once, after a log of before events, and answered so.
func (sc *scenario) verify(r *rig, before int) {
	r.t.Helper()
	if !sc.prunes {
		r.wantTail(before, sc.log)
	}
	if sc.settled != nil {
		r.wantSettled(*sc.settled)
		if (r.settled.Reason != "") != (r.settled.Outcome == claims.OutcomeQuarantined) {
			r.t.Fatalf("answered %+v", r.settled)
		}
	}
	if sc.want != nil {
		sc.want(r)
	}
	if r.out.Ready && !sc.ready {
		r.t.Fatalf("answered ready: %+v", r.out)
	}
	if sc.ready && sc.settled == nil && !r.out.Ready {
		r.t.Fatalf("answered not ready: %+v", r.out)
	}
}

// prepare runs the setup and forgets what it answered.
func (sc *scenario) prepare(r *rig) (before int) {
	sc.setup(r)
	r.out, r.settled, r.nextStep = claims.Outcome{}, claims.Settlement{}, nil
	return len(r.briefs())
}

func TestOperations(t *testing.T) {
	base := newRig(t)
	for _, sc := range scenarios() {
		t.Run(sc.name, func(t *testing.T) {
			r := base.fresh("plain " + sc.name)
			r.t = t
			before := sc.prepare(r)
			r.ok(sc.op(r))
			sc.verify(r, before)
			r.check()
		})
	}
}

// TestOperationsOfAProcessThatIsNew runs each operation by a store that has seen nothing of the session before.
func TestOperationsOfAProcessThatIsNew(t *testing.T) {
	base := newRig(t)
	for _, sc := range scenarios() {
		t.Run(sc.name, func(t *testing.T) {
			r := base.fresh("new process " + sc.name)
			r.t = t
			before := sc.prepare(r)
			s, err := crdb.Open(t.Context(), r.url, crdb.Options{})
			r.ok(err)
			defer s.Close()
			r.store = s
			r.ok(sc.op(r))
			sc.verify(r, before)
		})
	}
	base.checkAll()
}

package crdb

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"

	"reveille/claims"
	"reveille/sql"
)

// Acquire takes the claim of a ready session and starts its first step, in one
// transaction. Errors: claims.ErrBusy, claims.ErrNotReady, claims.ErrQuarantined
// (also where the continuation that would be next is bad: it is quarantined),
// claims.ErrLeaseLost, and claims.ErrOutcomeUnknown: then no execution of this
// id may run before HandOver has answered for it (I3).
func (s *Store) Acquire(ctx context.Context, session claims.SessionID, acq claims.Acquisition) (claims.Started, error) {
	var started *claims.Started
	var answer error
	appended := uuid.NewString()
	err := s.session(ctx, "acquire", session, nil, false, func(ctx context.Context, t *txn) error {
		t.token = appended
		started, answer = nil, nil
		if t.s.quarantine != nil {
			return claims.ErrQuarantined
		}
		if t.c != nil {
			return claims.ErrBusy
		}
		h, err := t.head(ctx)
		if err != nil {
			return err
		}
		switch {
		case h.bad != nil:
			answer = claims.ErrQuarantined
			return t.quarantineContinuation(ctx, "owner", h)
		case h.empty():
			answer = claims.ErrNotReady
			_, err := t.rearm(ctx)
			return err
		}
		started, err = t.start(ctx, &acq, h, false)
		return err
	})
	switch {
	case errors.Is(err, errNoLease):
		return claims.Started{}, fmt.Errorf("acquire: session %s: %w", session, claims.ErrLeaseLost)
	case errors.Is(err, claims.ErrFenced): // no such session
		return claims.Started{}, fmt.Errorf("acquire: session %s: %w", session, claims.ErrNotReady)
	case err != nil:
		return claims.Started{}, err
	case answer != nil:
		return claims.Started{}, fmt.Errorf("acquire: session %s: %w", session, answer)
	}
	return *started, nil
}

// StartStep promotes the head and starts the next step under an id of the
// caller's. Where nothing is due any more the claim is settled as completed
// instead, and no step is returned. Errors: ErrFenced, ErrCancelled.
func (s *Store) StartStep(ctx context.Context, claim claims.Claim, id claims.StepID, token *claims.Token) (*claims.Step, claims.Settlement, error) {
	var step *claims.Step
	var settled claims.Settlement
	err := s.session(ctx, "start_step", claim.Session, token, false, func(ctx context.Context, t *txn) (err error) {
		step, settled = nil, claims.Settlement{}
		if t.done {
			step, settled, err = t.startedBefore(ctx, claim, id)
			return err
		}
		if _, err := t.own(claim.Execution, claims.OpStart); err != nil {
			return err
		}
		if t.c.stepID != nil {
			return fmt.Errorf("step %s is open: %w", *t.c.stepID, claims.ErrIllegal)
		}
		h, err := t.head(ctx)
		switch {
		case err != nil:
			return err
		case h.bad != nil:
			settled, err = t.quarantineHead(ctx, "owner", h)
			return err
		case h.empty():
			settled, err = t.end(ctx, claims.OutcomeCompleted, t.ownRemoval)
			return err
		}
		var body string
		step, body, err = t.promote(ctx, h, claims.OpenStep{
			Execution: t.c.ranAs, Step: id, Index: int(t.c.steps) + 1,
			Lineage: t.c.ranAs, Executions: []claims.ExecutionID{t.c.ranAs}, Trace: h.trace,
		})
		if err != nil {
			return err
		}
		if err := t.cover(ctx, h.inputs, id); err != nil {
			return err
		}
		t.must(sql.ClaimStartStep, string(t.id), string(claim.Execution), string(id), body)
		return nil
	})
	return step, settled, err
}

// startedBefore answers a StartStep whose earlier try did commit.
func (t *txn) startedBefore(ctx context.Context, claim claims.Claim, id claims.StepID) (*claims.Step, claims.Settlement, error) {
	settled, err := t.settledBefore(claim.Execution)
	if err != nil || !settled.Again {
		return nil, settled, err
	}
	if t.c.stepID == nil || *t.c.stepID != string(id) {
		return nil, claims.Settlement{}, claims.ErrFenced
	}
	o, err := t.openStep()
	if err != nil {
		return nil, claims.Settlement{}, err
	}
	st := &claims.Step{
		ID: o.Step, Index: o.Index, Inputs: []claims.Input{}, Continues: o.Continues,
		Attempt: o.Attempt, StartedAt: t.now, Trace: o.Trace,
	}
	if len(o.Inputs) > 0 {
		st.Inputs, err = t.inputs(ctx, o.Inputs)
	}
	return st, claims.Settlement{}, err
}

// Record appends content of the open step. Errors: ErrFenced, ErrCancelled
// (the step was declined), ErrTooLarge.
func (s *Store) Record(ctx context.Context, claim claims.Claim, step claims.Step, content []claims.Content, token *claims.Token) error {
	return s.session(ctx, "record", claim.Session, token, false, func(_ context.Context, t *txn) error {
		if t.done {
			return nil
		}
		if err := t.ownStep(claim, step, claims.OpRecord); err != nil {
			return err
		}
		t.content(content)
		return nil
	})
}

// ownStep is own for an operation on a step that must be the open one.
func (t *txn) ownStep(claim claims.Claim, step claims.Step, op claims.Op) error {
	if _, err := t.own(claim.Execution, op); err != nil {
		return err
	}
	if t.c.stepID == nil || *t.c.stepID != string(step.ID) {
		return fmt.Errorf("step %s is not open: %w", step.ID, claims.ErrIllegal)
	}
	t.trace = step.Trace
	return nil
}

// Decline closes the open step inside itself: phase cancelled and
// step.interrupted, in one transaction (I12). The claim stays until Settle.
// Errors: ErrFenced, ErrCancelled (an interrupt was first).
func (s *Store) Decline(ctx context.Context, claim claims.Claim, step claims.Step, tail []claims.Content, reason string, token *claims.Token) error {
	return s.session(ctx, "decline", claim.Session, token, false, func(ctx context.Context, t *txn) error {
		if t.done {
			return nil
		}
		effect, err := t.own(claim.Execution, claims.OpDecline)
		if err != nil || effect == claims.NoChange {
			return err
		}
		if err := t.ownStep(claim, step, claims.OpDecline); err != nil {
			return err
		}
		reason := claims.CleanText(reason)
		t.content(tail)
		t.event(claims.StepInterruptedEvent, claims.StepInterruptedData{Reason: reason, Joined: false})
		t.must(sql.ClaimDecline, string(t.id), string(claim.Execution), string(step.ID), reason)
		return nil
	})
}

// Finish closes the open step after the join, writes what comes next, and
// settles the execution unless more is due, all in one transaction. Errors:
// ErrFenced; ErrCancelled: the step ends as interrupted (I9), call Settle.
func (s *Store) Finish(ctx context.Context, claim claims.Claim, e claims.Ending, token *claims.Token) (claims.Settlement, error) {
	var settled claims.Settlement
	err := s.session(ctx, "finish", claim.Session, token, false, func(ctx context.Context, t *txn) (err error) {
		if t.done {
			settled, err = t.settledBefore(claim.Execution)
			return err
		}
		settled, err = t.finish(ctx, claim, e)
		return err
	})
	return settled, err
}

func (t *txn) finish(ctx context.Context, claim claims.Claim, e claims.Ending) (claims.Settlement, error) {
	if err := t.ownStep(claim, e.Step, claims.OpClose); err != nil {
		return claims.Settlement{}, err
	}
	open, err := t.openStep()
	if err != nil {
		return t.quarantineClaim(ctx, "owner", err, t.ownRemoval)
	}
	t.content(e.Tail)
	var next *claims.Continuation
	switch {
	case e.Failure != nil:
		t.event(claims.StepFailedEvent, e.Failure)
		if e.Retry != nil {
			next = open.Promise(claims.KindRetry, t.now.Add(*e.Retry))
		}
	default:
		t.event(claims.StepEndedEvent, claims.StepEndedData{Result: orNull(e.Result), Continue: e.Continue})
		t.s.takeovers = 0
		if e.Continue {
			next = open.Promise(claims.KindContinue, t.now)
		}
	}
	if next != nil {
		if err := t.promise(ctx, next); err != nil {
			return claims.Settlement{}, err
		}
	}
	outcome := e.Outcome()
	if outcome != claims.OutcomeRetrying { // a retry settles and frees its slot
		h, err := t.head(ctx)
		if err != nil {
			return claims.Settlement{}, err
		}
		switch {
		case h.empty():
		case e.Yield && outcome == claims.OutcomeCompleted:
			outcome = claims.OutcomeYielded
		case e.Yield: // a failure stays one; what else is due stays ready
		default:
			t.must(sql.ClaimCloseStep, string(t.id), string(claim.Execution), string(e.Step.ID))
			return claims.Settlement{Again: true}, nil
		}
	}
	return t.end(ctx, outcome, t.ownRemoval)
}

func orNull(raw []byte) []byte {
	if len(raw) == 0 {
		return []byte("null")
	}
	return raw
}

// Settle ends an execution that is cancelling or cancelled, after the join, in
// one transaction (I11): step.interrupted where the step is still open, the
// claim's removal, the rearming of pending work. Errors: ErrFenced; ErrIllegal
// where nobody interrupted it.
func (s *Store) Settle(ctx context.Context, claim claims.Claim, tail []claims.Content, token *claims.Token) (claims.Settlement, error) {
	return s.leave(ctx, "settle", claim, claims.OpSettleInterrupt, tail, token)
}

// HandOver gives the session up to the next worker, after the join: an open
// step fails with code shutdown and leaves a continuation that costs no
// attempt; one that is cancelling settles as interrupted. Of claim it needs only
// session and execution, and so it also resolves an acquisition whose outcome
// is unknown (I3): nothing of it has run. Error: ErrFenced, which then proves
// nothing.
func (s *Store) HandOver(ctx context.Context, claim claims.Claim, tail []claims.Content, token *claims.Token) (claims.Settlement, error) {
	return s.leave(ctx, "hand_over", claim, claims.OpHandOver, tail, token)
}

func (s *Store) leave(ctx context.Context, op string, claim claims.Claim, as claims.Op, tail []claims.Content, token *claims.Token) (claims.Settlement, error) {
	var settled claims.Settlement
	err := s.session(ctx, op, claim.Session, token, false, func(ctx context.Context, t *txn) (err error) {
		if t.done {
			settled, err = t.settledBefore(claim.Execution)
			return err
		}
		effect, err := t.own(claim.Execution, as)
		if err != nil {
			return err
		}
		switch effect {
		case claims.Remove: // declined: its step is closed already
			settled, err = t.end(ctx, claims.OutcomeDeclined, t.ownRemoval)
		case claims.CloseAndRemove:
			settled, err = t.settleInterrupted(ctx, tail)
		case claims.Continue:
			settled, err = t.handOver(ctx, tail)
		default:
			err = fmt.Errorf("%s has effect %d: %w", op, effect, claims.ErrIllegal)
		}
		return err
	})
	return settled, err
}

func (t *txn) settleInterrupted(ctx context.Context, tail []claims.Content) (claims.Settlement, error) {
	if _, err := t.openStep(); err != nil { // only its trace is wanted here; the outcome is known (I13)
		t.trace = ""
	}
	t.content(tail)
	t.event(claims.StepInterruptedEvent, claims.StepInterruptedData{Reason: t.c.reason, Joined: true})
	return t.end(ctx, claims.OutcomeInterrupted, t.ownRemoval)
}

func (t *txn) handOver(ctx context.Context, tail []claims.Content) (claims.Settlement, error) {
	open, err := t.openStep()
	if err != nil {
		return t.quarantineClaim(ctx, "owner", err, t.ownRemoval)
	}
	if open != nil {
		t.content(tail)
		t.event(claims.StepFailedEvent, claims.Failure{Code: claims.CodeShutdown, Message: "the worker shut down; another one goes on", Retryable: true})
		if err := t.promise(ctx, open.Promise(claims.KindHandover, t.now)); err != nil {
			return claims.Settlement{}, err
		}
	}
	return t.end(ctx, claims.OutcomeHandedOver, t.ownRemoval)
}

// Revoke marks a claim that its own holder can't answer for (I3, I10); the
// scanner takes it at once. Error: ErrFenced.
func (s *Store) Revoke(ctx context.Context, claim claims.Claim, cause claims.Cause) error {
	return s.session(ctx, "revoke", claim.Session, &claims.Token{}, false, func(ctx context.Context, t *txn) error {
		if _, err := t.own(claim.Execution, claims.OpRevoke); err != nil {
			return err
		}
		raised := t.c.revoked.Raise(cause)
		if raised == t.c.revoked {
			return nil
		}
		t.must(sql.ClaimRevoke, string(t.id), string(claim.Execution), string(raised), "")
		return nil
	})
}

// OpenLease writes the lease of a new holder. ttl is from the database's clock
// at the statement (I4).
func (s *Store) OpenLease(ctx context.Context, l claims.Lease, ttl time.Duration) error {
	_, err := s.exec(ctx, "open_lease", pgx.Serializable, sql.OpenLease, string(l.Holder), l.Kind, claims.CleanText(l.Name), claims.CleanText(l.Version), int64(l.Slots), ttl.Microseconds())
	return err
}

// Heartbeat extends the holder's lease, one row whatever it holds (I17). It
// reports false where the lease has expired or is gone: it is never revived
// (I4). It tries once, on a connection of its own: an error leaves the lease
// as it was or extended, and the caller trusts neither.
func (s *Store) Heartbeat(ctx context.Context, holder claims.HolderID, ttl time.Duration) (bool, error) {
	ctx, cancel := context.WithTimeout(ctx, s.opts.Timeout)
	defer cancel()
	tag, err := s.beat.Exec(ctx, sql.Heartbeat, string(holder), ttl.Microseconds())
	if err != nil {
		return false, fmt.Errorf("heartbeat: %w", err)
	}
	return tag.RowsAffected() == 1, nil
}

// CloseLease deletes the holder's lease where no claim names it; else it expires.
func (s *Store) CloseLease(ctx context.Context, holder claims.HolderID) error {
	_, err := s.exec(ctx, "close_lease", pgx.Serializable, sql.CloseLease, string(holder))
	return err
}

// Notices reads the holder's claims that are not plainly running (I17).
func (s *Store) Notices(ctx context.Context, holder claims.HolderID) ([]claims.Notice, error) {
	ctx, cancel := context.WithTimeout(ctx, s.opts.Timeout)
	defer cancel()
	return queryOn(ctx, s, s.beat, "notices", sql.Notices, scanNotice(holder), string(holder))
}

// Held reads all claims of the holder (I3).
func (s *Store) Held(ctx context.Context, holder claims.HolderID) ([]claims.Notice, error) {
	return queryOn(ctx, s, s.beat, "held", sql.Held, scanNotice(holder), string(holder))
}

func scanNotice(holder claims.HolderID) pgx.RowToFunc[claims.Notice] {
	return func(row pgx.CollectableRow) (claims.Notice, error) {
		n := claims.Notice{Holder: holder}
		err := row.Scan(&n.Session, &n.Execution, &n.Phase, &n.Revoked, &n.Since)
		return n, err
	}
}

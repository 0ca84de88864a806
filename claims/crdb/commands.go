package crdb

import (
	"context"
	"errors"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"

	"reveille/claims"
	"reveille/sql"
)

// Apply applies a command, exactly once whatever is delivered how often (I18),
// in one serializable transaction with the events it causes. With acq a wake
// takes the claim, promotes the head and starts its first step at once, where
// the session is idle and the holder's own lease is live.
//
// Errors: claims.ErrInputConflict (I20; nothing is written, see PassOver);
// claims.ErrUnconfirmed; with acq also claims.ErrOutcomeUnknown: the command
// may be applied, and no execution of acq's id may run (I3) before HandOver has
// answered for it. Anything else: nothing is written, try later.
func (s *Store) Apply(ctx context.Context, cmd claims.Command, acq *claims.Acquisition) (claims.Outcome, error) {
	var out claims.Outcome
	token := &claims.Token{} // a duplicate is recognised by the session's mark, not by a token
	if acq != nil {
		token = nil
	}
	appended := uuid.NewString()
	cmd.Reason = claims.CleanText(cmd.Reason)
	taking := acq
	apply := func(ctx context.Context, t *txn) error {
		out = claims.Outcome{Result: claims.Applied}
		t.token, t.trace = appended, cmd.Trace
		duplicate, err := t.mark(cmd)
		if err != nil {
			return err
		}
		if duplicate {
			out = t.duplicate(cmd)
			return nil
		}
		switch cmd.Kind {
		case claims.Admit:
			_, err = t.admit(ctx, cmd, "unarmed", "")
		case claims.Wake:
			out.Started, out.Ready, err = t.wake(ctx, cmd, taking)
		case claims.Interrupt:
			out.Notice, out.Ready, err = t.interrupt(ctx, cmd)
		}
		return err
	}
	op := "apply_" + string(cmd.Kind)
	err := s.session(ctx, op, cmd.Session, token, true, apply)
	if errors.Is(err, errNoLease) { // not ours to take; the wake is applied all the same
		taking = nil
		err = s.session(ctx, op, cmd.Session, &claims.Token{}, true, apply)
	}
	if err != nil {
		return claims.Outcome{}, err
	}
	return out, nil
}

// PassOver moves the session's mark past a command that can't be applied and
// was published as rejected (I19).
func (s *Store) PassOver(ctx context.Context, cmd claims.Command) error {
	return s.session(ctx, "pass_over", cmd.Session, &claims.Token{}, true, func(_ context.Context, t *txn) error {
		_, err := t.mark(cmd)
		return err
	})
}

// mark compares a command with the last one applied and moves the mark (I18).
func (t *txn) mark(cmd claims.Command) (duplicate bool, err error) {
	newerSeq, newerTime := cmd.Sequence > t.s.commandSeq, cmd.Time > t.s.commandTime
	switch {
	case !newerSeq && !newerTime:
		return true, nil
	case newerSeq && !newerTime && !cmd.Confirmed:
		return false, claims.ErrUnconfirmed
	}
	t.s.commandSeq = cmd.Sequence
	t.s.commandTime = max(t.s.commandTime, cmd.Time)
	return false, nil
}

// duplicate is what a redelivery says again: its first delivery may have died
// before it told anybody.
func (t *txn) duplicate(cmd claims.Command) claims.Outcome {
	out := claims.Outcome{Result: claims.Duplicate}
	out.Ready = t.s.readyAt != nil && !t.s.readyAt.After(t.now)
	if cmd.Kind == claims.Interrupt && t.c != nil {
		out.Notice = t.notice()
	}
	return out
}

// notice is what the claim's holder should hear; nil where it is plainly running.
func (t *txn) notice() *claims.Notice {
	if t.c.phase == claims.Running && t.c.revoked == claims.None {
		return nil
	}
	return &claims.Notice{Holder: t.c.holder, Session: t.id, Execution: t.c.execution, Phase: t.c.phase, Revoked: t.c.revoked, Since: t.c.phaseAt}
}

func (t *txn) idle() bool { return t.s.execution == nil && t.s.quarantine == nil }

// due is when an input of the command may run.
func (t *txn) due(cmd claims.Command) time.Time {
	if cmd.NotBefore.IsZero() {
		return t.now
	}
	return cmd.NotBefore
}

// admit records the command's input in a state. It reports false where the id
// was there: then nothing changes, or, with another body, it is a conflict (I20).
func (t *txn) admit(ctx context.Context, cmd claims.Command, state string, step claims.StepID) (inserted bool, err error) {
	in := cmd.Input
	var covered *string
	if step != "" {
		covered = (*string)(&step)
	}
	row := []any{
		[]string{string(t.id)},
		[]string{in.ID},
		[]int64{t.s.position + 1},
		[]string{string(in.Delivery)},
		[]string{state},
		[]time.Time{t.due(cmd)},
		[]string{string(in.Body)},
		[]string{cmd.Trace},
		[]*string{covered},
		[]time.Time{t.now},
	}
	inserted = t.isNew
	if inserted {
		t.must(sql.InsertInputs, row...)
		if due := t.due(cmd); state == "armed" {
			t.newDue = &due
		}
	} else {
		tag, err := t.tx.Exec(ctx, sql.InsertInputs, row...)
		if err != nil {
			return false, err
		}
		inserted = tag.RowsAffected() == 1
	}
	if inserted {
		t.s.position++
		switch state {
		case "unarmed":
			t.s.unarmed++
		case "armed":
			t.s.armed++
		}
		t.sessionEvent(claims.InputAdmitted, claims.InputAdmittedData{Input: in.ID, Delivery: in.Delivery, Armed: state != "unarmed"})
		return true, nil
	}
	_, err = t.existing(ctx, in)
	return false, err
}

// existing reads an input that is there already and compares it.
func (t *txn) existing(ctx context.Context, in *claims.Input) (state string, err error) {
	var (
		delivery claims.Delivery
		body     string
		due      time.Time
	)
	err = t.tx.QueryRow(ctx, sql.GetInput, string(t.id), in.ID).Scan(&delivery, &state, &body, &due)
	if errors.Is(err, pgx.ErrNoRows) {
		return "", errAgain // it came in since this transaction's snapshot
	}
	if err != nil {
		return "", err
	}
	if delivery != in.Delivery || !claims.SameJSON([]byte(body), in.Body) {
		return "", claims.ErrInputConflict
	}
	return state, nil
}

// errNoLease: the holder that wanted to acquire has no live lease.
var errNoLease = errors.New("no live lease of the acquiring holder")

func (t *txn) wake(ctx context.Context, cmd claims.Command, acq *claims.Acquisition) (*claims.Started, bool, error) {
	if !t.idle() {
		acq = nil
	}
	direct, err := t.recordWake(ctx, cmd, acq)
	if err != nil {
		return nil, false, err
	}
	if acq != nil {
		h := direct
		if h == nil {
			if h, err = t.head(ctx); err != nil {
				return nil, false, err
			}
		}
		if !h.empty() && h.bad == nil { // a bad continuation is left to the scanner
			if cmd.Input != nil && direct == nil { // what starts is not this command's
				t.trace = ""
			}
			started, err := t.start(ctx, acq, h, direct != nil)
			return started, false, err
		}
	}
	ready, err := t.rearm(ctx)
	return nil, ready, err
}

// recordWake records what a wake brings. Where its input is all that could
// start and the claim is about to be taken, the input is written once, as
// covered, and the head that consists of it is returned.
func (t *txn) recordWake(ctx context.Context, cmd claims.Command, acq *claims.Acquisition) (direct *head, err error) {
	now := cmd.NotBefore.IsZero() || !cmd.NotBefore.After(t.now)
	if cmd.Input == nil {
		if now {
			t.bareWake(1)
			return nil, t.armAll(ctx)
		}
		t.s.position++
		t.s.delayed++
		if t.isNew {
			t.newDue = &cmd.NotBefore
			t.must(sql.InsertWake, string(t.id), t.s.position, cmd.NotBefore)
			return nil, nil
		}
		return nil, t.atOnce(ctx, sql.InsertWake, string(t.id), t.s.position, cmd.NotBefore)
	}
	alone := t.s.unarmed == 0 && t.s.armed == 0 && t.s.delayed == 0 && t.s.continuations == 0
	state, step := "armed", claims.StepID("")
	if acq != nil && now && alone {
		state, step = "covered", acq.Step
	}
	inserted, err := t.admit(ctx, cmd, state, step)
	if err != nil {
		return nil, err
	}
	if !inserted {
		// A wake of an input that was admitted arms it; of one that is armed,
		// served or cancelled already it changes nothing (I20).
		tag, err := t.tx.Exec(ctx, sql.ArmInput, string(t.id), cmd.Input.ID, t.due(cmd), cmd.Trace)
		if err != nil || tag.RowsAffected() == 0 {
			return nil, err
		}
		t.s.unarmed--
		t.s.armed++
	}
	if state == "covered" && inserted {
		return &head{inputs: []claims.Input{*cmd.Input}, askedAt: t.now, trace: cmd.Trace, wakes: t.s.wakes - t.s.wakesServed}, nil
	}
	return nil, t.armAll(ctx)
}

// start takes the claim and starts its first step. covered tells that the
// inputs of the head are written as covered already.
func (t *txn) start(ctx context.Context, acq *claims.Acquisition, h *head, covered bool) (*claims.Started, error) {
	t.s.epoch++
	execution := string(acq.Execution)
	t.ran, t.step = acq.Execution, ""
	recovery := 0
	switch {
	case h.continuation == nil && len(h.inputs) == 0: // bare wakes: the trace of the one in hand, if it is one
		h.trace = t.trace
	case h.continuation == nil:
		t.trace = h.trace
	default:
		t.trace = h.continuation.Trace
		if h.continuation.Kind == claims.KindRecovery {
			recovery = h.continuation.Recoveries
		}
	}
	t.event(claims.ExecutionStarted, claims.ExecutionStartedData{Worker: acq.Worker, Recovery: recovery})
	step, body, err := t.promote(ctx, h, claims.OpenStep{
		Execution: acq.Execution, Step: acq.Step, Index: 1,
		Lineage: acq.Execution, Executions: []claims.ExecutionID{acq.Execution}, Trace: h.trace,
	})
	if err != nil {
		return nil, err
	}
	if !covered {
		if err := t.cover(ctx, h.inputs, acq.Step); err != nil {
			return nil, err
		}
	}
	t.queue(errNoLease, sql.InsertClaims, []string{string(t.id)}, []string{execution}, []string{string(acq.Holder)},
		[]int64{t.s.epoch}, []string{string(acq.Step)}, []string{body}, []time.Time{t.now})
	t.s.execution, t.s.readyAt = &execution, nil
	return &claims.Started{
		Claim: claims.Claim{Session: t.id, Execution: acq.Execution, Holder: acq.Holder, Epoch: t.s.epoch},
		Step:  *step,
	}, nil
}

// interrupt hits exactly one thing: the open step; else the head. It returns
// who must be told, and whether the session is ready afterwards.
func (t *txn) interrupt(ctx context.Context, cmd claims.Command) (*claims.Notice, bool, error) {
	if err := t.interruptOne(ctx, cmd); err != nil {
		return nil, false, err
	}
	if cmd.Discard && cmd.Execution == "" {
		if err := t.discard(ctx, cmd.Reason); err != nil {
			return nil, false, err
		}
	}
	ready, err := t.rearm(ctx)
	if err != nil || t.c == nil {
		return nil, ready, err
	}
	return t.notice(), ready, nil
}

func (t *txn) interruptOne(ctx context.Context, cmd claims.Command) error {
	if t.s.quarantine != nil {
		return nil // I30
	}
	if t.c == nil || !t.concerns(cmd) {
		return t.cancelHead(ctx, cmd)
	}
	if !t.c.leaseLive {
		if err := t.expired(ctx); err != nil {
			return err
		}
	}
	id, execution := string(t.id), string(t.c.execution)
	switch claims.Next(t.c.state(""), claims.OpInterrupt) {
	case claims.CancelHead:
		return t.cancelHead(ctx, cmd)
	case claims.ToCancelling:
		t.ran, t.step = t.c.ranAs, claims.StepID(*t.c.stepID)
		t.event(claims.ExecutionCancelling, claims.ReasonData{Reason: cmd.Reason})
		t.c.phase, t.c.phaseAt = claims.Cancelling, t.now
		t.must(sql.ClaimCancel, id, execution, cmd.Reason)
	case claims.MarkRevoked:
		raised := t.c.revoked.Raise(claims.Interrupted)
		if raised == t.c.revoked {
			return nil
		}
		t.c.revoked = raised
		t.must(sql.ClaimRevoke, id, execution, string(raised), cmd.Reason)
	case claims.RaiseVerdict:
		if raised := t.c.verdict.Raise(claims.Interrupted); raised != t.c.verdict {
			t.must(sql.ClaimVerdict, id, execution, string(raised), cmd.Reason)
		}
	}
	return nil
}

// concerns reports whether an interrupt is about the claim: it names no
// execution, or the claim's, or one of its open step's lineage.
func (t *txn) concerns(cmd claims.Command) bool {
	if cmd.Execution == "" || cmd.Execution == t.c.execution || cmd.Execution == t.c.ranAs {
		return true
	}
	if t.c.stepID == nil {
		return false
	}
	o, bad := claims.DecodeStep(t.stands(), []byte(*t.c.step))
	return bad == nil && claims.InLineage(cmd.Execution, o.Lineage, o.Executions)
}

// cancelHead cancels what would start next, with everything that its promotion
// would have covered or served. Where nothing is due, that is the continuation
// that waits, if there is one: a retry in its backoff would otherwise run after
// the caller had stopped it. With an execution it is only a continuation of
// that lineage, due or not.
func (t *txn) cancelHead(ctx context.Context, cmd claims.Command) error {
	if cmd.Execution == "" {
		h, err := t.head(ctx)
		if err != nil || h.bad != nil {
			return err // what does not decode is quarantined, not cancelled
		}
		if !h.empty() {
			return t.cancel(ctx, h, cmd.Reason)
		}
	}
	waiting, err := t.continuations(ctx)
	if err != nil {
		return err
	}
	for _, c := range waiting {
		if cmd.Execution == "" || claims.InLineage(cmd.Execution, c.Lineage, c.Executions) {
			return t.cancel(ctx, &head{continuation: c}, cmd.Reason)
		}
	}
	return nil
}

// continuations reads all continuations of the session that decode, oldest first.
func (t *txn) continuations(ctx context.Context) ([]*claims.Continuation, error) {
	if t.s.continuations == 0 {
		return nil, nil
	}
	rows, err := t.tx.Query(ctx, sql.SessionContinuations, string(t.id))
	if err != nil {
		return nil, err
	}
	defer rows.Close()
	var out []*claims.Continuation
	for rows.Next() {
		var number int64
		var body string
		if err := rows.Scan(&number, &body); err != nil {
			return nil, err
		}
		if c, bad := claims.DecodeContinuation(t.id, number, t.s.epoch, []byte(body)); bad == nil {
			out = append(out, c)
		}
	}
	return out, rows.Err()
}

func (t *txn) cancel(ctx context.Context, h *head, reason string) error {
	if c := h.continuation; c != nil {
		t.sessionEvent(claims.ContinuationCancelled, claims.ContinuationCancelledData{Reason: reason, Step: c.Step, Kind: c.Kind})
		if err := t.consume(ctx, c.Number); err != nil {
			return err
		}
	}
	if len(h.inputs) > 0 {
		tag, err := t.tx.Exec(ctx, sql.CancelInputs, string(t.id), inputIDs(h.inputs))
		if err != nil {
			return err
		}
		t.s.armed -= tag.RowsAffected()
		for _, in := range h.inputs {
			t.sessionEvent(claims.InputCancelled, claims.InputCancelledData{Input: in.ID, Reason: reason})
		}
	}
	if h.wakes > 0 {
		t.serveWakes()
		t.sessionEvent(claims.WakeCancelled, claims.ReasonData{Reason: reason})
	}
	return nil
}

// discard cancels all pending inputs, and the continuations where the session
// is not quarantined.
func (t *txn) discard(ctx context.Context, reason string) error {
	if t.s.armed+t.s.unarmed > 0 {
		rows, err := t.tx.Query(ctx, sql.PendingInputs, string(t.id))
		if err != nil {
			return err
		}
		ids, err := pgx.CollectRows(rows, pgx.RowTo[string])
		if err != nil {
			return err
		}
		if _, err := t.tx.Exec(ctx, sql.CancelPending, string(t.id)); err != nil {
			return err
		}
		t.s.armed, t.s.unarmed = 0, 0
		for _, id := range ids {
			t.sessionEvent(claims.InputCancelled, claims.InputCancelledData{Input: id, Reason: reason})
		}
	}
	if t.s.quarantine != nil {
		return nil
	}
	waiting, err := t.continuations(ctx)
	if err != nil {
		return err
	}
	for _, c := range waiting {
		if err := t.cancel(ctx, &head{continuation: c}, reason); err != nil {
			return err
		}
	}
	return nil
}

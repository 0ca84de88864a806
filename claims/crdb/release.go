package crdb

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"

	"reveille/claims"
	"reveille/sql"
)

// Release ends a quarantine as an operator decided, in one transaction under
// the fence of that quarantine (I30): the event that says who, why and how; what
// was quarantined restored or cancelled; the counters reset; what is pending
// rearmed. Nobody but a scanner announces it, so it is due at once. Errors:
// claims.ErrNotQuarantined, claims.ErrNothingToRetry; nothing is changed then.
func (s *Store) Release(ctx context.Context, r claims.Release, token *claims.Token) (claims.Settlement, error) {
	var settled claims.Settlement
	err := s.session(ctx, "release", r.Session, token, false, func(ctx context.Context, t *txn) error {
		if !t.done {
			if err := t.release(ctx, r); err != nil {
				return err
			}
		}
		settled = claims.Settlement{Ready: t.s.readyAt != nil && !t.s.readyAt.After(t.now)}
		return nil
	})
	if errors.Is(err, claims.ErrFenced) { // no such session
		err = fmt.Errorf("release: session %s: %w", r.Session, claims.ErrNotQuarantined)
	}
	return settled, err
}

func (t *txn) release(ctx context.Context, r claims.Release) error {
	if t.s.quarantine == nil || *t.s.quarantine != r.Quarantine {
		return claims.ErrNotQuarantined
	}
	soon := *t.opts
	soon.AnnounceGrace, soon.RelayGrace = 0, 0
	t.opts = &soon
	var id, lane, reason, raw string
	if err := t.tx.QueryRow(ctx, sql.GetQuarantine, string(t.id)).Scan(&id, &lane, &reason, &raw); err != nil {
		return err
	}
	var ev Evidence
	if err := json.Unmarshal([]byte(raw), &ev); err != nil {
		return fmt.Errorf("evidence of quarantine %s: %w", id, err)
	}
	why := claims.CleanText(r.Why)
	t.sessionEvent(claims.SessionReleased, claims.ReleasedData{How: string(r.How), By: claims.CleanText(r.By), Why: why})
	t.must(sql.DeleteQuarantine, string(t.id), id)
	t.s.quarantine, t.s.takeovers = nil, 0
	var err error
	switch r.How {
	case claims.ReleaseRetry:
		err = t.restore(ctx, claims.Reason(reason), &ev)
	case claims.ReleaseInterrupted:
		err = t.abandon(ctx, why, &ev)
	case claims.ReleaseDiscard:
		if err = t.abandon(ctx, why, &ev); err == nil {
			err = t.discardAll(ctx, why)
		}
	default:
		err = fmt.Errorf("release as %q: %w", r.How, claims.ErrIllegal)
	}
	if err != nil {
		return err
	}
	_, err = t.rearm(ctx)
	return err
}

// restore gives back what was quarantined: the open step as a continuation of
// kind release, a promise as one, the head as what it was.
func (t *txn) restore(ctx context.Context, reason claims.Reason, ev *Evidence) error {
	if ev.Claim != nil && ev.Claim.StepID != nil {
		open, err := t.loggedOpenStep(ctx, ev.Claim)
		if err != nil {
			return err
		}
		if open != nil {
			t.ran, t.step, t.trace = open.Execution, open.Step, open.Trace
			t.event(claims.StepFailedEvent, claims.Failure{Code: claims.CodeWorkerLost, Message: "released from quarantine, to be tried again", Retryable: true})
			if err := t.promiseRelease(ctx, open.Promise(claims.KindRelease, t.now)); err != nil {
				return err
			}
		}
	}
	if ev.Continuation != nil {
		if err := t.restoreContinuation(ctx, reason, ev.Continuation); err != nil {
			return err
		}
	}
	if len(ev.Inputs) > 0 {
		tag, err := t.tx.Exec(ctx, sql.RestoreInputs, string(t.id), ev.Inputs, "armed")
		if err != nil {
			return err
		}
		t.s.armed += tag.RowsAffected()
	}
	if ev.Wakes > 0 {
		t.bareWake(ev.Wakes)
	}
	return nil
}

// promiseRelease writes a continuation whose chain begins to count anew (I30).
func (t *txn) promiseRelease(ctx context.Context, c *claims.Continuation) error {
	c.Kind, c.Attempt, c.Recoveries, c.NotBefore = claims.KindRelease, 0, 0, t.now
	return t.promise(ctx, c)
}

// restoreContinuation promises again what a quarantined continuation promised.
// One that does not decode is made anew from the log, which tells which promise
// is open. One that its chain had overtaken is cancelled: the newer one is the
// chain's, and what both promise must not run twice.
func (t *txn) restoreContinuation(ctx context.Context, reason claims.Reason, ev *ContinuationEvidence) error {
	c, bad := claims.DecodeContinuation(t.id, ev.Number, t.s.epoch, []byte(ev.Body))
	switch {
	case bad == nil && reason == claims.ReasonSuperseded:
		t.sessionEvent(claims.ContinuationCancelled, claims.ContinuationCancelledData{Reason: string(reason), Step: c.Step, Kind: c.Kind})
		return nil
	case bad == nil:
		return t.promiseRelease(ctx, c)
	}
	c, err := t.loggedPromise(ctx)
	switch {
	case err != nil:
		return err
	case c == nil:
		return claims.ErrNothingToRetry
	}
	return t.promiseRelease(ctx, c)
}

// abandon cancels what was quarantined.
func (t *txn) abandon(ctx context.Context, why string, ev *Evidence) error {
	if ev.Claim != nil && ev.Claim.StepID != nil {
		open, err := t.loggedOpenStep(ctx, ev.Claim)
		if err != nil {
			return err
		}
		if open != nil {
			t.ran, t.step, t.trace = open.Execution, open.Step, open.Trace
			t.event(claims.StepInterruptedEvent, claims.StepInterruptedData{Reason: why, Joined: false})
		}
	}
	if ev.Continuation != nil {
		c, bad := claims.DecodeContinuation(t.id, ev.Continuation.Number, t.s.epoch, []byte(ev.Continuation.Body))
		if bad != nil {
			var err error
			if c, err = t.loggedPromise(ctx); err != nil {
				return err
			}
		}
		data := claims.ContinuationCancelledData{Reason: why}
		if c != nil {
			data.Step, data.Kind = c.Step, c.Kind
		}
		t.sessionEvent(claims.ContinuationCancelled, data)
	}
	if len(ev.Inputs) > 0 {
		if _, err := t.tx.Exec(ctx, sql.RestoreInputs, string(t.id), ev.Inputs, "cancelled"); err != nil {
			return err
		}
		for _, id := range ev.Inputs {
			t.sessionEvent(claims.InputCancelled, claims.InputCancelledData{Input: id, Reason: why})
		}
	}
	if ev.Wakes > 0 {
		t.sessionEvent(claims.WakeCancelled, claims.ReasonData{Reason: why})
	}
	return nil
}

// discardAll cancels all that is pending: inputs, continuations and wakes.
func (t *txn) discardAll(ctx context.Context, why string) error {
	if err := t.discard(ctx, why); err != nil {
		return err
	}
	if t.s.delayed > 0 {
		if _, err := t.tx.Exec(ctx, sql.DiscardWakes, string(t.id)); err != nil {
			return err
		}
	}
	if t.s.delayed > 0 || t.s.wakes > t.s.wakesServed {
		t.sessionEvent(claims.WakeCancelled, claims.ReasonData{Reason: why})
	}
	t.s.delayed = 0
	t.serveWakes()
	return nil
}

// logPage bounds one read of the log in search of a step.
const logPage = 256

// steps reads the log backwards, an append at a time, until f says that it has
// seen enough. It gives only the appends that tell of steps and continuations.
func (t *txn) steps(ctx context.Context, f func(records []claims.Record) (enough bool, err error)) error {
	type row struct {
		Last  int64
		Lines string
	}
	for before := int64(1) << 62; ; {
		rows, err := t.tx.Query(ctx, sql.StepEvents, string(t.id), before, int64(logPage))
		if err != nil {
			return err
		}
		page, err := pgx.CollectRows(rows, pgx.RowToStructByPos[row])
		if err != nil {
			return err
		}
		for _, r := range page {
			before = r.Last
			records, err := appendRecords(nil, r.Lines, 0)
			if err != nil {
				return err
			}
			if enough, err := f(records); enough || err != nil {
				return err
			}
		}
		if len(page) < logPage {
			return nil
		}
	}
}

// loggedOpenStep is the step that the log says is open, nil where there is none:
// whatever was quarantined with a claim, each step is closed once. What the claim
// says of it is taken where it is the same step and decodes.
func (t *txn) loggedOpenStep(ctx context.Context, ev *ClaimEvidence) (*claims.OpenStep, error) {
	var open *claims.OpenStep
	err := t.steps(ctx, func(records []claims.Record) (bool, error) {
		for i := len(records) - 1; i >= 0; i-- {
			switch r := records[i]; r.Type {
			case claims.StepStartedEvent:
				var err error
				open, err = openStepOf(r)
				return true, err
			case claims.StepEndedEvent, claims.StepFailedEvent, claims.StepInterruptedEvent:
				return true, nil
			}
		}
		return false, nil
	})
	if err != nil || open == nil || ev.Step == nil {
		return open, err
	}
	at := claims.Stands{Session: t.id, Step: open.Step, RanAs: open.Execution, Started: int(ev.Steps), Epoch: t.s.epoch}
	if o, bad := claims.DecodeStep(at, []byte(*ev.Step)); bad == nil {
		return o, nil
	}
	return open, nil
}

// openStepOf is what step.started alone tells of a step. The chain before it is
// not among that: an interrupt that names an earlier execution misses it.
func openStepOf(r claims.Record) (*claims.OpenStep, error) {
	var d claims.StepStartedData
	if err := json.Unmarshal(r.Data, &d); err != nil {
		return nil, fmt.Errorf("event %d of session %s: %w", r.Seq, r.Session, err)
	}
	return &claims.OpenStep{
		Session: r.Session, Execution: r.Execution, Step: r.Step, Epoch: r.Epoch, Index: d.Index, Inputs: d.Inputs, Continues: d.Continues,
		Lineage: r.Execution, Executions: []claims.ExecutionID{r.Execution}, Trace: r.Trace, Seq: r.Seq,
	}, nil
}

// loggedPromise is the newest promise that the log says is open and that no
// other continuation of the session is, nil where it tells of none.
func (t *txn) loggedPromise(ctx context.Context) (*claims.Continuation, error) {
	others, err := t.continuations(ctx)
	if err != nil {
		return nil, err
	}
	p := promises{kept: map[claims.StepID]bool{}}
	for _, c := range others {
		p.kept[c.Step] = true
	}
	err = t.steps(ctx, p.add)
	return p.found, err
}

// promises looks through a log, backwards, for the newest promise that nothing
// kept or cancelled.
type promises struct {
	kept  map[claims.StepID]bool // gone on with, cancelled, or waiting
	kind  claims.ContinuationKind
	step  claims.StepID // the step that promised; empty: not found yet
	found *claims.Continuation
}

func (p *promises) add(records []claims.Record) (enough bool, err error) {
	retrying := false
	for i := len(records) - 1; i >= 0; i-- {
		r := records[i]
		var d struct {
			Outcome  claims.ExecutionOutcome `json:"outcome"`
			Code     claims.FailureCode      `json:"code"`
			Step     claims.StepID           `json:"step"`
			Continue bool                    `json:"continue"`
		}
		if r.Type != claims.StepStartedEvent {
			if err := json.Unmarshal(r.Data, &d); err != nil {
				return false, fmt.Errorf("event %d of session %s: %w", r.Seq, r.Session, err)
			}
		}
		switch r.Type {
		case claims.ContinuationCancelled:
			p.kept[d.Step] = true
		case claims.ExecutionEnded:
			retrying = d.Outcome == claims.OutcomeRetrying
		case claims.StepEndedEvent:
			if d.Continue {
				p.promised(r.Step, claims.KindContinue)
			}
		case claims.StepFailedEvent:
			switch {
			case d.Code == claims.CodeShutdown:
				p.promised(r.Step, claims.KindHandover)
			case d.Code == claims.CodeWorkerLost:
				p.promised(r.Step, claims.KindRecovery)
			case retrying:
				p.promised(r.Step, claims.KindRetry)
			}
		case claims.StepStartedEvent:
			open, err := openStepOf(r)
			if err != nil {
				return false, err
			}
			if r.Step == p.step {
				p.found = open.Promise(p.kind, time.Time{})
				return true, nil
			}
			if open.Continues != nil {
				p.kept[open.Continues.Step] = true
			}
		}
	}
	return false, nil
}

// promised notes the newest step that promised something nobody kept.
func (p *promises) promised(step claims.StepID, kind claims.ContinuationKind) {
	if p.step == "" && !p.kept[step] {
		p.step, p.kind = step, kind
	}
}

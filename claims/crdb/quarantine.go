package crdb

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"strings"

	"github.com/google/uuid"

	"reveille/claims"
	"reveille/sql"
)

// maxDetail bounds what a quarantine says about its reason; the evidence has all of it.
const maxDetail = 1 << 10

// Evidence is what a quarantine keeps of what it moved, as it was: an operator
// decides by it, and a release restores or cancels it (I30).
type Evidence struct {
	Claim        *ClaimEvidence        `json:"claim,omitempty"`
	Continuation *ContinuationEvidence `json:"continuation,omitempty"`
	Inputs       []string              `json:"inputs,omitempty"` // of the head, where no step was open
	Wakes        int64                 `json:"wakes,omitempty"`  // bare wakes of the head
}

// ClaimEvidence is a claim as it was.
type ClaimEvidence struct {
	Execution claims.ExecutionID `json:"execution"`
	RanAs     claims.ExecutionID `json:"ran_as"`
	Holder    claims.HolderID    `json:"holder"`
	Epoch     int64              `json:"epoch"`
	Phase     claims.Phase       `json:"phase"`
	Reason    string             `json:"reason"`
	Revoked   claims.Cause       `json:"revoked"`
	Verdict   claims.Cause       `json:"verdict"`
	Steps     int64              `json:"steps"`
	StepID    *string            `json:"step_id"`
	Step      *string            `json:"step"` // as it stood, decodable or not
}

// ContinuationEvidence is a continuation as it was.
type ContinuationEvidence struct {
	Number int64  `json:"number"`
	Body   string `json:"body"` // as it stood, decodable or not
}

// quarantineClaim takes the session of a claim out of circulation: claim and,
// where no step was open, the head move into one row. cause says why; an error
// that is no poison is returned as it is, and nothing is written.
func (t *txn) quarantineClaim(ctx context.Context, lane string, cause error, remove func()) (claims.Settlement, error) {
	var bad *claims.Poison
	if !errors.As(cause, &bad) {
		return claims.Settlement{}, cause
	}
	c := t.c
	ev := Evidence{Claim: &ClaimEvidence{
		Execution: c.execution, RanAs: c.ranAs, Holder: c.holder, Epoch: c.epoch, Phase: c.phase, Reason: c.reason,
		Revoked: c.revoked, Verdict: c.verdict, Steps: c.steps, StepID: c.stepID, Step: c.step,
	}}
	if c.stepID == nil {
		h, err := t.head(ctx)
		if err != nil {
			return claims.Settlement{}, err
		}
		if err := t.moveHead(ctx, h, &ev); err != nil {
			return claims.Settlement{}, err
		}
	}
	return t.quarantineAs(ctx, lane, bad, ev, remove)
}

// quarantineHead quarantines a claim that has no step open, for its head.
func (t *txn) quarantineHead(ctx context.Context, lane string, h *head) (claims.Settlement, error) {
	return t.quarantineClaim(ctx, lane, h.bad, t.ownRemoval)
}

// quarantineContinuation quarantines a session without a claim, for its head.
func (t *txn) quarantineContinuation(ctx context.Context, lane string, h *head) error {
	var ev Evidence
	if err := t.moveHead(ctx, h, &ev); err != nil {
		return err
	}
	_, err := t.quarantineAs(ctx, lane, h.bad, ev, nil)
	return err
}

// moveHead takes the head out of what can be promoted.
func (t *txn) moveHead(ctx context.Context, h *head, ev *Evidence) error {
	number, body := h.badNumber, h.badBody
	if c := h.continuation; c != nil {
		raw, err := claims.Marshal(c)
		if err != nil {
			return err
		}
		number, body = c.Number, string(raw)
	}
	if number != 0 {
		ev.Continuation = &ContinuationEvidence{Number: number, Body: body}
		if err := t.consume(ctx, number); err != nil {
			return err
		}
	}
	if len(h.inputs) > 0 {
		ev.Inputs = inputIDs(h.inputs)
		tag, err := t.tx.Exec(ctx, sql.QuarantineInputs, string(t.id), ev.Inputs)
		if err != nil {
			return err
		}
		t.s.armed -= tag.RowsAffected()
	}
	if h.wakes > 0 {
		ev.Wakes = h.wakes
		t.serveWakes()
	}
	return nil
}

func (t *txn) quarantineAs(ctx context.Context, lane string, bad *claims.Poison, ev Evidence, remove func()) (claims.Settlement, error) {
	if t.s.quarantine != nil {
		return claims.Settlement{}, claims.ErrQuarantined
	}
	detail := claims.CleanText(bad.Detail)
	if len(detail) > maxDetail { // what does not decode may be of any size, and the event must fit (I24)
		detail = strings.ToValidUTF8(detail[:maxDetail], "") + "…"
	}
	raw, err := json.Marshal(ev)
	if err != nil {
		return claims.Settlement{}, fmt.Errorf("evidence: %w", err)
	}
	id := uuid.NewString()
	t.s.quarantine = &id
	settled := claims.Settlement{Outcome: claims.OutcomeQuarantined, Reason: bad.Reason}
	t.event(claims.SessionQuarantined, claims.QuarantinedData{Lane: lane, Reason: bad.Reason, Detail: detail})
	if remove != nil {
		if settled, err = t.end(ctx, claims.OutcomeQuarantined, remove); err != nil {
			return settled, err
		}
		settled.Reason = bad.Reason
	} else if _, err := t.rearm(ctx); err != nil {
		return settled, err
	}
	t.must(sql.InsertQuarantine, string(t.id), id, lane, string(bad.Reason), detail, string(raw), t.now)
	return settled, nil
}

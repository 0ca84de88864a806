package crdb

import (
	"context"
	"errors"
	"slices"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"

	"reveille/claims"
	"reveille/sql"
)

// allShards are what a lane reads its batch from.
var allShards = func() []int64 {
	out := make([]int64, shards)
	for i := range out {
		out[i] = int64(i)
	}
	return out
}()

// ExpiredClaims reads at most limit claims of dead holders, or revoked, those
// first that were touched longest ago. A holder without a lease row is dead.
func (s *Store) ExpiredClaims(ctx context.Context, limit int) ([]claims.Candidate, error) {
	const op = "expired_claims"
	scan := func(row pgx.CollectableRow) (claims.Candidate, error) {
		var c claims.Candidate
		err := row.Scan(&c.Session, &c.Execution, &c.Phase, &c.Revoked, &c.DueAt)
		return c, err
	}
	type holder struct {
		id   string
		live bool
	}
	out, err := query(ctx, s, op, sql.RevokedClaims, scan, int64(limit))
	if err != nil {
		return nil, err
	}
	for after := uuid.Nil.String(); ; {
		next, err := query(ctx, s, op, sql.NextHolder, func(row pgx.CollectableRow) (holder, error) {
			var h holder
			err := row.Scan(&h.id, &h.live)
			return h, err
		}, after)
		if err != nil {
			return nil, err
		}
		if len(next) == 0 {
			break
		}
		if after = next[0].id; next[0].live {
			continue
		}
		found, err := query(ctx, s, op, sql.HolderClaims, scan, after, int64(limit))
		if err != nil {
			return nil, err
		}
		for _, c := range found {
			if c.Revoked == claims.None { // the revoked are there already
				out = append(out, c)
			}
		}
	}
	slices.SortStableFunc(out, func(a, b claims.Candidate) int { return a.DueAt.Compare(b.DueAt) })
	return out[:min(limit, len(out))], nil
}

// TouchClaims sends claims to the back of their lane.
func (s *Store) TouchClaims(ctx context.Context, cs []claims.Candidate) error {
	ids, executions := make([]string, len(cs)), make([]string, len(cs))
	for i, c := range cs {
		ids[i], executions[i] = string(c.Session), string(c.Execution)
	}
	_, err := s.exec(ctx, "touch_claims", sql.TouchClaims, ids, executions)
	return err
}

// TakeOver makes an expired running claim the scanner's: a new execution id,
// one epoch more, the old owner fenced from that instant (I6). Error:
// claims.ErrFenced where the claim is another one by now, is live, or the
// scanner's own lease is not.
func (s *Store) TakeOver(ctx context.Context, c claims.Candidate, holder claims.HolderID, as claims.ExecutionID) (claims.Claim, error) {
	var claim claims.Claim
	err := s.session(ctx, "take_over", c.Session, &claims.Token{}, false, func(ctx context.Context, t *txn) error {
		if t.c != nil && t.c.execution == as { // an earlier try did commit
			claim = claims.Claim{Session: t.id, Execution: as, Holder: holder, Epoch: t.s.epoch}
			return nil
		}
		if t.c == nil || t.c.execution != c.Execution || claims.Next(t.c.state(""), claims.OpScan) != claims.TakeOver {
			return claims.ErrFenced
		}
		var live bool
		if err := t.tx.QueryRow(ctx, sql.OwnLease, string(holder)).Scan(&live); err != nil {
			return err
		}
		if !live {
			return claims.ErrFenced
		}
		t.s.epoch++
		t.s.takeovers++
		execution := string(as)
		t.s.execution = &execution
		claim = claims.Claim{Session: t.id, Execution: as, Holder: holder, Epoch: t.s.epoch}
		verdict := t.c.verdict.Raise(t.c.revoked)
		return t.must(ctx, sql.ClaimTakeOver, string(t.id), string(c.Execution), execution, string(holder), t.s.epoch, string(verdict))
	})
	return claim, err
}

// recoveryClaim reads the claim as the scanner that took it over: still its
// own, its recovery lease live.
func (t *txn) recoveryClaim(claim claims.Claim) error {
	if t.c == nil || t.c.execution != claim.Execution || !t.c.scanner || !t.c.state(claim.Execution).Live() {
		return claims.ErrFenced
	}
	t.ran = t.c.ranAs
	if t.c.stepID != nil {
		t.step = claims.StepID(*t.c.stepID)
	}
	return nil
}

// Convert ends a claim that was taken over, in one transaction under the
// recovery fence: an open step is closed, a continuation written where one was
// open, the claim removed; or the session is quarantined where validation
// finds it poison (I27). Errors: claims.ErrFenced; a refusal of the database
// (see Refused).
func (s *Store) Convert(ctx context.Context, claim claims.Claim, limits claims.Limits, token *claims.Token) (claims.Settlement, error) {
	var settled claims.Settlement
	err := s.session(ctx, "convert", claim.Session, token, false, func(ctx context.Context, t *txn) error {
		if t.done {
			settled = t.settledBefore(claims.OutcomeRecovered)
			return nil
		}
		err := t.recoveryClaim(claim)
		if err != nil {
			return err
		}
		settled, err = t.convert(ctx, limits)
		return err
	})
	return settled, err
}

func (t *txn) convert(ctx context.Context, limits claims.Limits) (claims.Settlement, error) {
	remove := t.recoveryRemoval
	if t.c.verdict == claims.NeverJoined {
		return t.quarantineClaim(ctx, "claims", &claims.Poison{
			Reason: claims.ReasonNeverJoined, Detail: "its worker could not join what the step had started",
		}, remove)
	}
	open, err := t.openStep()
	if err != nil {
		return t.quarantineClaim(ctx, "claims", err, remove)
	}
	interrupted := t.c.verdict == claims.Interrupted
	if open != nil && interrupted {
		t.event(claims.StepInterruptedEvent, claims.StepInterruptedData{Reason: t.c.reason, Joined: false})
		return t.end(ctx, claims.OutcomeInterrupted, remove)
	}
	recoveries := 0
	if open != nil {
		recoveries = open.Recoveries + 1
	}
	if bad := limits.Exceeded(recoveries, int(t.s.takeovers)); bad != nil {
		return t.quarantineClaim(ctx, "claims", bad, remove)
	}
	if open != nil {
		t.event(claims.StepFailedEvent, claims.Failure{Code: claims.CodeWorkerLost, Message: "the worker was lost", Retryable: true})
		if err := t.promise(ctx, open.Promise(claims.KindRecovery, t.now)); err != nil {
			return claims.Settlement{}, err
		}
	}
	return t.end(ctx, claims.OutcomeRecovered, remove)
}

func (t *txn) recoveryRemoval(ctx context.Context) error {
	return t.must(ctx, sql.RemoveRecoveryClaim, string(t.id), string(t.c.execution))
}

// ConversionFailed quarantines a claim that was taken over and that the
// database refuses to convert. Error: claims.ErrFenced.
func (s *Store) ConversionFailed(ctx context.Context, claim claims.Claim, detail string, token *claims.Token) (claims.Settlement, error) {
	var settled claims.Settlement
	err := s.session(ctx, "quarantine", claim.Session, token, false, func(ctx context.Context, t *txn) error {
		if t.done {
			settled = t.settledBefore(claims.OutcomeQuarantined)
			return nil
		}
		err := t.recoveryClaim(claim)
		if err != nil {
			return err
		}
		settled, err = t.quarantineClaim(ctx, "claims", &claims.Poison{Reason: claims.ReasonConversionFailed, Detail: detail}, t.recoveryRemoval)
		return err
	})
	return settled, err
}

// EndExpired ends an expired claim that is not running, in one transaction
// (I26): a cancelled one has a known outcome and is removed; a cancelling one
// is quarantined, or, where uncertain cancels are told to, closed as
// interrupted. Error: claims.ErrFenced where it is none of these any more.
func (s *Store) EndExpired(ctx context.Context, c claims.Candidate, uncertainInterrupted bool, token *claims.Token) (claims.Settlement, error) {
	var settled claims.Settlement
	err := s.session(ctx, "end_expired", c.Session, token, false, func(ctx context.Context, t *txn) (err error) {
		if t.done {
			settled = t.settledBefore(claims.OutcomeQuarantined)
			if c.Phase == claims.Cancelled {
				settled.Outcome = claims.OutcomeDeclined
			}
			return nil
		}
		if t.c == nil || t.c.execution != c.Execution {
			return claims.ErrFenced
		}
		t.ran = t.c.ranAs
		if t.c.stepID != nil {
			t.step = claims.StepID(*t.c.stepID)
		}
		remove := func(ctx context.Context) error {
			return t.must(ctx, sql.RemoveExpiredClaim, string(t.id), string(c.Execution), string(t.c.phase))
		}
		never := t.c.revoked == claims.NeverJoined
		switch claims.Next(t.c.state(""), claims.OpScan) {
		case claims.Remove:
			settled, err = t.end(ctx, claims.OutcomeDeclined, remove)
		case claims.ToQuarantine:
			switch {
			case never:
				settled, err = t.quarantineClaim(ctx, "claims", &claims.Poison{
					Reason: claims.ReasonNeverJoined, Detail: "its worker could not join what the step had started",
				}, remove)
			case uncertainInterrupted:
				t.event(claims.StepInterruptedEvent, claims.StepInterruptedData{Reason: t.c.reason, Joined: false})
				settled, err = t.end(ctx, claims.OutcomeInterrupted, remove)
			default:
				settled, err = t.quarantineClaim(ctx, "claims", &claims.Poison{
					Reason: claims.ReasonOutcomeUnknown, Detail: "its worker was lost while it cancelled the step",
				}, remove)
			}
		default:
			err = claims.ErrFenced
		}
		return err
	})
	return settled, err
}

// DueContinuations reads at most limit continuations that a scanner should look at.
func (s *Store) DueContinuations(ctx context.Context, limit int) ([]claims.DueContinuation, error) {
	return query(ctx, s, "due_continuations", sql.DueContinuations, func(row pgx.CollectableRow) (claims.DueContinuation, error) {
		var d claims.DueContinuation
		err := row.Scan(&d.Session, &d.Number, &d.Body, &d.Epoch, &d.Unstarted)
		return d, err
	}, allShards, int64(limit))
}

// TouchContinuations sends continuations to the back of their lane, for a time.
func (s *Store) TouchContinuations(ctx context.Context, ds []claims.DueContinuation, again time.Duration) error {
	ids, numbers := make([]string, len(ds)), make([]int64, len(ds))
	for i, d := range ds {
		ids[i], numbers[i] = string(d.Session), d.Number
	}
	_, err := s.exec(ctx, "touch_continuations", sql.TouchContinuations, ids, numbers, again.Microseconds())
	return err
}

// QuarantineContinuation quarantines a session for a continuation that is
// poison, where there is no claim, it is unstarted, unchanged, and there is no
// quarantine (I28); else claims.ErrFenced.
func (s *Store) QuarantineContinuation(ctx context.Context, d claims.DueContinuation, bad *claims.Poison, token *claims.Token) error {
	return s.session(ctx, "quarantine", d.Session, token, false, func(ctx context.Context, t *txn) error {
		if t.done {
			return nil
		}
		var body string
		err := t.tx.QueryRow(ctx, sql.GetContinuation, string(t.id), d.Number).Scan(&body)
		if errors.Is(err, pgx.ErrNoRows) || err == nil && (body != d.Body || !t.idle()) {
			return claims.ErrFenced
		}
		if err != nil {
			return err
		}
		return t.quarantineContinuation(ctx, "recovery", &head{bad: bad, badNumber: d.Number, badBody: body})
	})
}

// DueSessions reads at most limit ready sessions that a scanner should look at.
func (s *Store) DueSessions(ctx context.Context, limit int) ([]claims.SessionID, error) {
	return query(ctx, s, "due_sessions", sql.DueSessions, pgx.RowTo[claims.SessionID], allShards, int64(limit))
}

// TouchSessions sends ready sessions to the back of their lane, for a time.
func (s *Store) TouchSessions(ctx context.Context, ids []claims.SessionID, again time.Duration) error {
	_, err := s.exec(ctx, "touch_sessions", sql.TouchSessions, texts(ids), again.Microseconds())
	return err
}

// DueRelays reads at most limit sessions whose unpublished events are overdue.
func (s *Store) DueRelays(ctx context.Context, limit int) ([]claims.SessionID, error) {
	return query(ctx, s, "due_relays", sql.DueRelays, pgx.RowTo[claims.SessionID], allShards, int64(limit))
}

// TouchRelays sends sessions to the back of the relay lane, for a time.
func (s *Store) TouchRelays(ctx context.Context, ids []claims.SessionID, again time.Duration) error {
	_, err := s.exec(ctx, "touch_relays", sql.TouchRelays, texts(ids), again.Microseconds())
	return err
}

// DeleteDeadLeases deletes leases that expired longer ago than kept and that no
// claim names.
func (s *Store) DeleteDeadLeases(ctx context.Context, kept time.Duration) error {
	_, err := s.exec(ctx, "delete_dead_leases", sql.DeleteDeadLeases, kept.Microseconds())
	return err
}

func texts(ids []claims.SessionID) []string {
	out := make([]string, len(ids))
	for i, id := range ids {
		out[i] = string(id)
	}
	return out
}

// RefusedCode is Refused for packages that do not see the database's errors.
func (s *Store) RefusedCode(err error) (string, bool) { return Refused(err) }

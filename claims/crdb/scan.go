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
// What it reads is a small multiple of limit, however many claims are expired
// or live (I29).
func (s *Store) ExpiredClaims(ctx context.Context, limit int) ([]claims.Candidate, error) {
	const op = "expired_claims"
	out, err := query(ctx, s, op, sql.RevokedClaims, scanCandidate, int64(limit))
	if err != nil {
		return nil, err
	}
	holders, err := query(ctx, s, op, sql.DeadHolders, pgx.RowTo[string], int64(limit))
	if err != nil {
		return nil, err
	}
	orphans, err := s.orphanHolders(ctx)
	if err != nil {
		return nil, err
	}
	found, err := s.oldestClaims(ctx, append(holders, orphans...), limit)
	if err != nil {
		return nil, err
	}
	out = append(out, found...)
	slices.SortStableFunc(out, func(a, b claims.Candidate) int { return a.DueAt.Compare(b.DueAt) })
	return out[:min(limit, len(out))], nil
}

func scanCandidate(row pgx.CollectableRow) (claims.Candidate, error) {
	var c claims.Candidate
	var overdue int64
	err := row.Scan(&c.Session, &c.Execution, &c.Phase, &c.Revoked, &c.DueAt, &overdue)
	c.Overdue = time.Duration(overdue) * time.Microsecond
	return c, err
}

// holderSteps bounds how many holders one call looks at for a lease row.
const holderSteps = 16

// orphanHolders finds holders of claims that have no lease row: somebody else
// deleted it, since the store never does while a claim names it. The walk over
// all holders goes on where the call before stopped.
func (s *Store) orphanHolders(ctx context.Context) (out []string, err error) {
	type holder struct {
		id     string
		leased bool
	}
	s.walk.mu.Lock()
	defer s.walk.mu.Unlock()
	for range holderSteps {
		next, err := query(ctx, s, "expired_claims", sql.NextHolder, func(row pgx.CollectableRow) (holder, error) {
			var h holder
			err := row.Scan(&h.id, &h.leased)
			return h, err
		}, s.walk.after)
		if err != nil {
			return nil, err
		}
		if len(next) == 0 {
			s.walk.after = uuid.Nil.String()
			break
		}
		if s.walk.after = next[0].id; !next[0].leased {
			out = append(out, next[0].id)
		}
	}
	return out, nil
}

// holderPage is the least that is read of one holder at once.
const holderPage = 8

// oldestClaims merges the claims of some holders, those first that were
// touched longest ago, at most limit of them. It reads a page of each holder,
// and the next one only where the merge has used a page up.
func (s *Store) oldestClaims(ctx context.Context, holders []string, limit int) ([]claims.Candidate, error) {
	pages := make([]claimPage, len(holders))
	for i, h := range holders {
		pages[i] = claimPage{holder: h, more: true}
	}
	var out []claims.Candidate
	page := max(holderPage, limit/max(1, len(holders))+1)
	for len(out) < limit {
		if err := s.refill(ctx, pages, page); err != nil {
			return nil, err
		}
		oldest := -1
		for i, p := range pages {
			if len(p.rows) > 0 && (oldest < 0 || p.rows[0].DueAt.Before(pages[oldest].rows[0].DueAt)) {
				oldest = i
			}
		}
		if oldest < 0 {
			break
		}
		out = append(out, pages[oldest].rows[0])
		pages[oldest].rows = pages[oldest].rows[1:]
	}
	return out, nil
}

// claimPage is what was read of one holder's claims and not merged yet.
type claimPage struct {
	holder  string
	rows    []claims.Candidate
	due     time.Time // of the last row that was read
	session claims.SessionID
	more    bool // there may be rows after that
}

// refill reads on for the holders whose page is used up.
func (s *Store) refill(ctx context.Context, pages []claimPage, page int) error {
	at := map[string]*claimPage{}
	var holders, sessions []string
	var dues []time.Time
	for i := range pages {
		if p := &pages[i]; len(p.rows) == 0 && p.more {
			at[p.holder], p.more = p, false
			holders, dues, sessions = append(holders, p.holder), append(dues, p.due), append(sessions, string(p.session))
		}
	}
	if len(at) == 0 {
		return nil
	}
	_, err := query(ctx, s, "expired_claims", sql.HolderClaims, func(row pgx.CollectableRow) (struct{}, error) {
		var c claims.Candidate
		var overdue int64
		var holder string
		err := row.Scan(&c.Session, &c.Execution, &c.Phase, &c.Revoked, &c.DueAt, &overdue, &holder)
		if p := at[holder]; err == nil {
			c.Overdue = time.Duration(overdue) * time.Microsecond
			p.rows, p.due, p.session = append(p.rows, c), c.DueAt, c.Session
			p.more = len(p.rows) == page
		}
		return struct{}{}, err
	}, holders, dues, sessions, int64(page))
	return err
}

// touch runs a touch, its own committed statement, and keeps the rows that were
// this scanner's to touch: those it returned (I31). A touch whose answer was
// lost keeps none; they come again.
func touch[T any, K comparable](ctx context.Context, s *Store, op, statement string, rows []T, key func(T) K, scan pgx.RowToFunc[K], args ...any) ([]T, error) {
	won := map[K]bool{}
	err := s.run(ctx, op, pgx.ReadCommitted, &claims.Token{}, func(ctx context.Context, tx pgx.Tx) error {
		clear(won)
		found, err := tx.Query(ctx, statement, args...)
		if err != nil {
			return err
		}
		keys, err := pgx.CollectRows(found, scan)
		for _, k := range keys {
			won[k] = true
		}
		return err
	})
	if err != nil {
		return nil, err
	}
	return slices.DeleteFunc(slices.Clone(rows), func(r T) bool { return !won[key(r)] }), nil
}

func itself(id claims.SessionID) claims.SessionID { return id }

// TouchClaims sends claims to the back of their lane and returns those that no
// other scanner has touched since they were read.
func (s *Store) TouchClaims(ctx context.Context, cs []claims.Candidate) ([]claims.Candidate, error) {
	ids, executions, dues := make([]string, len(cs)), make([]string, len(cs)), make([]time.Time, len(cs))
	for i, c := range cs {
		ids[i], executions[i], dues[i] = string(c.Session), string(c.Execution), c.DueAt
	}
	return touch(ctx, s, "touch_claims", sql.TouchClaims, cs, func(c claims.Candidate) claims.SessionID { return c.Session },
		pgx.RowTo[claims.SessionID], ids, executions, dues)
}

// TakeOver makes an expired running claim the scanner's: a new execution id,
// one epoch more, the old owner fenced from that instant (I6). Error:
// claims.ErrFenced where the claim is another one by now, is live, or the
// scanner's own lease is not.
func (s *Store) TakeOver(ctx context.Context, c claims.Candidate, holder claims.HolderID, as claims.ExecutionID) (claims.Claim, error) {
	var claim claims.Claim
	err := s.session(ctx, "take_over", c.Session, &claims.Token{}, false, func(ctx context.Context, t *txn) error {
		if t.c != nil && t.c.execution == as { // an earlier try did commit
			t.done = true // nothing is left to write
			claim = claims.Claim{Session: t.id, Execution: as, Holder: holder, Epoch: t.s.epoch, Verdict: t.c.verdict}
			return nil
		}
		if t.c == nil || t.c.execution != c.Execution {
			return claims.ErrFenced
		}
		if err := t.expired(ctx); err != nil {
			return err
		}
		if claims.Next(t.c.state(""), claims.OpScan) != claims.TakeOver {
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
		if !t.c.scanner { // a scanner that died is not the session's doing
			t.s.takeovers++
		}
		execution := string(as)
		t.s.execution = &execution
		verdict := t.c.verdict.Raise(t.c.revoked)
		claim = claims.Claim{Session: t.id, Execution: as, Holder: holder, Epoch: t.s.epoch, Verdict: verdict}
		t.must(sql.ClaimTakeOver, string(t.id), string(c.Execution), execution, string(holder), t.s.epoch, string(verdict))
		return nil
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
	err := s.session(ctx, "convert", claim.Session, token, false, func(ctx context.Context, t *txn) (err error) {
		if t.done {
			settled, err = t.settledBefore(claim.Execution)
			return err
		}
		if err := t.recoveryClaim(claim); err != nil {
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

func (t *txn) recoveryRemoval() {
	t.must(sql.RemoveRecoveryClaim, string(t.id), string(t.c.execution))
}

// ConversionFailed quarantines a claim that was taken over and that the
// database refuses to convert. Error: claims.ErrFenced, also where the verdict
// is another one by now: what was refused is not what is to be written then.
func (s *Store) ConversionFailed(ctx context.Context, claim claims.Claim, detail string, token *claims.Token) (claims.Settlement, error) {
	var settled claims.Settlement
	err := s.session(ctx, "quarantine", claim.Session, token, false, func(ctx context.Context, t *txn) (err error) {
		if t.done {
			settled, err = t.settledBefore(claim.Execution)
			return err
		}
		if err := t.recoveryClaim(claim); err != nil {
			return err
		}
		if t.c.verdict != claim.Verdict {
			return claims.ErrFenced
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
			settled, err = t.settledBefore(c.Execution)
			return err
		}
		if t.c == nil || t.c.execution != c.Execution {
			return claims.ErrFenced
		}
		if err := t.expired(ctx); err != nil {
			return err
		}
		t.ran = t.c.ranAs
		if t.c.stepID != nil {
			t.step = claims.StepID(*t.c.stepID)
		}
		phase := string(t.c.phase)
		remove := func() { t.must(sql.RemoveExpiredClaim, string(t.id), string(c.Execution), phase) }
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
		var overdue int64
		err := row.Scan(&d.Session, &d.Number, &d.Body, &d.Epoch, &d.Unstarted, &d.Superseded, &overdue)
		d.Overdue = time.Duration(overdue) * time.Microsecond
		return d, err
	}, allShards, int64(limit))
}

// TouchContinuations sends continuations to the back of their lane, for a time,
// and returns those that no other scanner has touched meanwhile.
func (s *Store) TouchContinuations(ctx context.Context, ds []claims.DueContinuation, again time.Duration) ([]claims.DueContinuation, error) {
	type key struct {
		id     claims.SessionID
		number int64
	}
	ids, numbers := make([]string, len(ds)), make([]int64, len(ds))
	for i, d := range ds {
		ids[i], numbers[i] = string(d.Session), d.Number
	}
	return touch(ctx, s, "touch_continuations", sql.TouchContinuations, ds,
		func(d claims.DueContinuation) key { return key{d.Session, d.Number} },
		func(row pgx.CollectableRow) (key, error) {
			var k key
			err := row.Scan(&k.id, &k.number)
			return k, err
		}, ids, numbers, again.Microseconds())
}

// QuarantineContinuation quarantines a session for a continuation that is
// poison, judged again under the fence: no claim, unstarted, unchanged, no
// quarantine (I28); else claims.ErrFenced.
func (s *Store) QuarantineContinuation(ctx context.Context, d claims.DueContinuation, token *claims.Token) error {
	return s.session(ctx, "quarantine", d.Session, token, true, func(ctx context.Context, t *txn) error {
		if t.done {
			return nil
		}
		var body string
		var superseded bool
		err := t.tx.QueryRow(ctx, sql.GetContinuation, string(t.id), d.Number).Scan(&body, &superseded)
		if errors.Is(err, pgx.ErrNoRows) || err == nil && (body != d.Body || !t.idle()) {
			return claims.ErrFenced
		}
		if err != nil {
			return err
		}
		_, bad := claims.DecodeContinuation(t.id, d.Number, t.s.epoch, []byte(body))
		switch {
		case bad == nil && superseded:
			bad = claims.SupersededContinuation(d.Number)
		case bad == nil:
			return claims.ErrFenced // it was poison to who read it, and is not
		}
		return t.quarantineContinuation(ctx, "recovery", &head{bad: bad, badNumber: d.Number, badBody: body})
	})
}

// sweepRounds bounds how many batches of marks that are not needed any more one
// read of due sessions takes away.
const sweepRounds = 10

// DueSessions reads at most limit ready sessions that a scanner should look
// at. Sessions that are still marked and not ready it passes over and unmarks.
func (s *Store) DueSessions(ctx context.Context, limit int) ([]claims.DueSession, error) {
	type row struct {
		claims.DueSession
		ready bool
	}
	var ready []claims.DueSession
	for range sweepRounds {
		rows, err := query(ctx, s, "due_sessions", sql.DueSessions, func(r pgx.CollectableRow) (row, error) {
			var v row
			var overdue int64
			err := r.Scan(&v.Session, &v.ready, &overdue)
			v.Overdue = time.Duration(overdue) * time.Microsecond
			return v, err
		}, allShards, int64(limit))
		if err != nil {
			return nil, err
		}
		var marked []claims.SessionID
		ready = ready[:0]
		for _, r := range rows {
			if r.ready {
				ready = append(ready, r.DueSession)
			} else {
				marked = append(marked, r.Session)
			}
		}
		if len(marked) > 0 {
			if _, err := s.TouchSessions(ctx, marked, 0); err != nil {
				return nil, err
			}
		}
		if len(marked) == 0 || len(rows) < limit {
			break
		}
	}
	return ready, nil
}

// dueMarks bounds how many marks of one shard NextDue looks at.
const dueMarks = 64

// NextDue answers in how long the next delayed wake, input or continuation is
// due that the ordinary and the recovery lane have to announce at its time;
// false where none is found due within a while. It looks at a bounded number of
// marks, so that it can miss one while very many sessions are busy: it is for a
// scanner's pause, which is bounded otherwise.
func (s *Store) NextDue(ctx context.Context, within time.Duration) (in time.Duration, ok bool, err error) {
	rows, err := query(ctx, s, "next_due", sql.NextDue, pgx.RowTo[*int64], allShards, within.Microseconds(), int64(dueMarks))
	if err != nil || len(rows) == 0 || rows[0] == nil {
		return 0, false, err
	}
	return time.Duration(*rows[0]) * time.Microsecond, true, nil
}

// TouchSessions sends ready sessions to the back of their lane, for a time, and
// returns those that no other scanner has touched meanwhile.
func (s *Store) TouchSessions(ctx context.Context, ids []claims.SessionID, again time.Duration) ([]claims.SessionID, error) {
	return touch(ctx, s, "touch_sessions", sql.TouchSessions, ids, itself, pgx.RowTo[claims.SessionID], texts(ids), again.Microseconds())
}

// DueRelays reads at most limit sessions whose unpublished events are overdue.
func (s *Store) DueRelays(ctx context.Context, limit int) ([]claims.DueSession, error) {
	return query(ctx, s, "due_relays", sql.DueRelays, scanDueSession, allShards, int64(limit))
}

func scanDueSession(row pgx.CollectableRow) (claims.DueSession, error) {
	var d claims.DueSession
	var overdue int64
	err := row.Scan(&d.Session, &overdue)
	d.Overdue = time.Duration(overdue) * time.Microsecond
	return d, err
}

// TouchRelays sends sessions to the back of the relay lane, for a time, and
// returns those that no other scanner has touched meanwhile.
func (s *Store) TouchRelays(ctx context.Context, ids []claims.SessionID, again time.Duration) ([]claims.SessionID, error) {
	return touch(ctx, s, "touch_relays", sql.TouchRelays, ids, itself, pgx.RowTo[claims.SessionID], texts(ids), again.Microseconds())
}

// Quarantined counts the quarantined sessions by reason.
func (s *Store) Quarantined(ctx context.Context) (map[claims.Reason]int64, error) {
	type row struct {
		reason claims.Reason
		n      int64
	}
	rows, err := query(ctx, s, "quarantined", sql.Quarantined, func(r pgx.CollectableRow) (row, error) {
		var v row
		err := r.Scan(&v.reason, &v.n)
		return v, err
	})
	out := make(map[claims.Reason]int64, len(rows))
	for _, r := range rows {
		out[r.reason] = r.n
	}
	return out, err
}

// DeleteDeadLeases deletes leases that expired longer ago than kept and that no
// claim names.
func (s *Store) DeleteDeadLeases(ctx context.Context, kept time.Duration) error {
	_, err := s.exec(ctx, "delete_dead_leases", pgx.Serializable, sql.DeleteDeadLeases, kept.Microseconds())
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

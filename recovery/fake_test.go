package recovery

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"go.uber.org/goleak"

	"reveille/claims"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// world is a store, a stream and a relay in memory. Each method is one
// transaction, fenced as the interfaces say.
type world struct {
	mu     sync.Mutex
	clock  int64 // orders touches
	claims map[claims.SessionID]*worldClaim
	conts  []*worldContinuation
	ready  []*worldSession
	relays []*worldSession
	kept   []*worldSession // that keep something past retention
	copies []*worldCopy    // by session
	live   map[claims.HolderID]bool
	calls  []string // "operation session", in order

	// hook runs before an operation, outside the lock: an error of it is the
	// operation's, and it may wait (a gate).
	hook func(ctx context.Context, op string, session claims.SessionID) error

	quarantines map[claims.SessionID]claims.Reason
	outcomes    map[claims.SessionID]claims.ExecutionOutcome
	announced   []claims.SessionID
	relayed     []claims.SessionID
	poked       []claims.SessionID
	tokens      map[claims.SessionID][]string // of conversions
}

type worldClaim struct {
	claims.Candidate
	holder  claims.HolderID
	scanner bool
	due     int64
	poison  bool
	verdict claims.Cause
	epoch   int64
	takes   int
}

type worldContinuation struct {
	claims.DueContinuation
	due time.Time
}

type worldSession struct {
	id      claims.SessionID
	due     time.Time
	overdue time.Duration // what the store says of it
	rows    int           // past retention
}

func newWorld() *world {
	return &world{
		claims: map[claims.SessionID]*worldClaim{}, live: map[claims.HolderID]bool{"scanner": true},
		quarantines: map[claims.SessionID]claims.Reason{}, outcomes: map[claims.SessionID]claims.ExecutionOutcome{},
		tokens: map[claims.SessionID][]string{},
	}
}

// parts wires a scanner whose lease is always trusted.
func (w *world) parts(holder claims.HolderID) Parts {
	return Parts{
		Claims: w, Conversions: w, Held: w, Continuations: w, Sessions: w, Relays: w, Retentions: w, Database: w, Announcer: w, Relayer: w, Copies: w,
		Holder: func() (claims.HolderID, bool) { return holder, true },
	}
}

func (w *world) scanner(t *testing.T, o Options) *Scanner {
	t.Helper()
	return newScanner(t, w.parts("scanner"), o)
}

func newScanner(t *testing.T, p Parts, o Options) *Scanner {
	t.Helper()
	if o.Logger == nil {
		o.Logger = slog.New(slog.NewTextHandler(io.Discard, nil))
	}
	s, err := New(p, o)
	if err != nil {
		t.Fatal(err)
	}
	return s
}

// expired adds a claim of a dead worker, behind those that are there.
func (w *world) expired(id claims.SessionID, phase claims.Phase, revoked claims.Cause) *worldClaim {
	w.clock++
	c := &worldClaim{
		Candidate: claims.Candidate{Session: id, Execution: claims.ExecutionID("x-" + id), Phase: phase, Revoked: revoked},
		holder:    "worker", due: w.clock, epoch: 1,
	}
	w.claims[id] = c
	return c
}

func (w *world) continuation(id claims.SessionID, body string) *worldContinuation {
	if body == "" {
		body = fmt.Sprintf(`{"session":%q,"number":1,"kind":"recovery","lineage":"l","execution":"x","epoch":1}`, id)
	}
	c := &worldContinuation{
		DueContinuation: claims.DueContinuation{Session: id, Number: 1, Body: body, Epoch: 1, Unstarted: true}, due: time.Now(),
	}
	w.conts = append(w.conts, c)
	return c
}

func (w *world) op(ctx context.Context, op string, id claims.SessionID) error {
	w.mu.Lock()
	w.calls = append(w.calls, strings.TrimSpace(op+" "+string(id)))
	hook := w.hook
	w.mu.Unlock()
	if hook != nil {
		return hook(ctx, op, id)
	}
	return nil
}

func (c *worldClaim) isExpired(w *world) bool { return !w.live[c.holder] || c.Revoked != claims.None }

func (w *world) ExpiredClaims(ctx context.Context, limit int) ([]claims.Candidate, error) {
	if err := w.op(ctx, "expired", ""); err != nil {
		return nil, err
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	var found []*worldClaim
	for _, c := range w.claims {
		if c.isExpired(w) {
			found = append(found, c)
		}
	}
	slices.SortFunc(found, func(a, b *worldClaim) int { return cmp.Compare(a.due, b.due) })
	var out []claims.Candidate
	for _, c := range found[:min(limit, len(found))] {
		out = append(out, c.Candidate)
	}
	return out, nil
}

func (w *world) TouchClaims(ctx context.Context, cs []claims.Candidate) (won []claims.Candidate, err error) {
	if err := w.op(ctx, "touch claims", ""); err != nil {
		return nil, err
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, c := range cs {
		if have := w.claims[c.Session]; have != nil && have.Execution == c.Execution {
			w.clock++
			have.due = w.clock
			won = append(won, c)
		}
	}
	return won, nil
}

func (w *world) EndExpired(ctx context.Context, c claims.Candidate, uncertainInterrupted bool, _ *claims.Token) (claims.Settlement, error) {
	if err := w.op(ctx, "end", c.Session); err != nil {
		return claims.Settlement{}, err
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	have := w.claims[c.Session]
	if have == nil || have.Execution != c.Execution || have.Phase == claims.Running || !have.isExpired(w) {
		return claims.Settlement{}, claims.ErrFenced
	}
	switch {
	case have.Revoked == claims.NeverJoined:
		return w.end(have, claims.OutcomeQuarantined, claims.ReasonNeverJoined)
	case have.Phase == claims.Cancelled:
		return w.end(have, claims.OutcomeDeclined, "")
	case uncertainInterrupted:
		return w.end(have, claims.OutcomeInterrupted, "")
	default:
		return w.end(have, claims.OutcomeQuarantined, claims.ReasonOutcomeUnknown)
	}
}

func (w *world) end(c *worldClaim, outcome claims.ExecutionOutcome, r claims.Reason) (claims.Settlement, error) {
	if _, ended := w.outcomes[c.Session]; ended {
		panic("claim ended twice: " + c.Session)
	}
	delete(w.claims, c.Session)
	w.outcomes[c.Session] = outcome
	if outcome == claims.OutcomeQuarantined {
		w.quarantines[c.Session] = r
		return claims.Settlement{Outcome: outcome, Reason: r}, nil
	}
	return claims.Settlement{Outcome: outcome, Ready: true}, nil
}

func (w *world) TakeOver(ctx context.Context, c claims.Candidate, holder claims.HolderID, as claims.ExecutionID) (claims.Claim, error) {
	if err := w.op(ctx, "take", c.Session); err != nil && !errors.Is(err, errDone) {
		return claims.Claim{}, err
	} else if err != nil {
		defer func() { w.hook = nil }()
		_, _ = w.takeOver(c, holder, as)
		return claims.Claim{}, err // committed, and nobody heard
	}
	return w.takeOver(c, holder, as)
}

func (w *world) takeOver(c claims.Candidate, holder claims.HolderID, as claims.ExecutionID) (claims.Claim, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	have := w.claims[c.Session]
	switch {
	case have != nil && have.Execution == as:
	case have == nil || have.Execution != c.Execution || have.Phase != claims.Running || !have.isExpired(w) || !w.live[holder]:
		return claims.Claim{}, claims.ErrFenced
	default:
		w.clock++
		have.epoch++
		have.takes++
		have.verdict = have.verdict.Raise(have.Revoked)
		have.Execution, have.holder, have.scanner, have.Revoked, have.due = as, holder, true, claims.None, w.clock
	}
	return claims.Claim{Session: c.Session, Execution: as, Holder: holder, Epoch: have.epoch, Verdict: have.verdict}, nil
}

// ours answers the claim that a recovery owner names.
func (w *world) ours(claim claims.Claim) (*worldClaim, error) {
	have := w.claims[claim.Session]
	if have == nil || have.Execution != claim.Execution || !have.scanner || have.isExpired(w) {
		return nil, claims.ErrFenced
	}
	return have, nil
}

func (w *world) Convert(ctx context.Context, claim claims.Claim, limits claims.Limits, token *claims.Token) (claims.Settlement, error) {
	w.mu.Lock()
	w.tokens[claim.Session] = append(w.tokens[claim.Session], token.ID)
	w.mu.Unlock()
	if err := w.op(ctx, "convert", claim.Session); err != nil {
		return claims.Settlement{}, err
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	have, err := w.ours(claim)
	switch {
	case err != nil:
		return claims.Settlement{}, err
	case have.verdict == claims.NeverJoined:
		return w.end(have, claims.OutcomeQuarantined, claims.ReasonNeverJoined)
	case have.poison:
		return w.end(have, claims.OutcomeQuarantined, claims.ReasonInvalidStep)
	case have.verdict == claims.Interrupted:
		return w.end(have, claims.OutcomeInterrupted, "")
	}
	if bad := limits.Exceeded(0, have.takes); bad != nil {
		return w.end(have, claims.OutcomeQuarantined, bad.Reason)
	}
	return w.end(have, claims.OutcomeRecovered, "")
}

func (w *world) ConversionFailed(ctx context.Context, claim claims.Claim, _ string, _ *claims.Token) (claims.Settlement, error) {
	if err := w.op(ctx, "conversion failed", claim.Session); err != nil {
		return claims.Settlement{}, err
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	have, err := w.ours(claim)
	if err == nil && have.verdict != claim.Verdict {
		err = claims.ErrFenced
	}
	if err != nil {
		return claims.Settlement{}, err
	}
	return w.end(have, claims.OutcomeQuarantined, claims.ReasonConversionFailed)
}

// refusal is an error of the database with a code.
type refusal string

func (r refusal) Error() string { return "SQLSTATE " + string(r) }

var (
	errBroken = errors.New("connection refused")
	errDone   = errors.New("commit unanswered")
	errPart   = errors.New("published a part")
)

func (w *world) RefusedCode(err error) (string, bool) {
	var r refusal
	return string(r), errors.As(err, &r) && (strings.HasPrefix(string(r), "22") || strings.HasPrefix(string(r), "23"))
}

func (w *world) Held(ctx context.Context, holder claims.HolderID) ([]claims.Notice, error) {
	if err := w.op(ctx, "held", ""); err != nil {
		return nil, err
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	var out []claims.Notice
	for _, c := range w.claims {
		if c.holder == holder {
			out = append(out, claims.Notice{Holder: holder, Session: c.Session, Execution: c.Execution, Phase: c.Phase, Revoked: c.Revoked})
		}
	}
	return out, nil
}

func (w *world) Revoke(ctx context.Context, claim claims.Claim, cause claims.Cause) error {
	if err := w.op(ctx, "revoke", claim.Session); err != nil {
		return err
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	have := w.claims[claim.Session]
	if have == nil || have.Execution != claim.Execution {
		return claims.ErrFenced
	}
	have.Revoked = have.Revoked.Raise(cause)
	return nil
}

func (w *world) DueContinuations(ctx context.Context, limit int) ([]claims.DueContinuation, error) {
	if err := w.op(ctx, "due continuations", ""); err != nil {
		return nil, err
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	slices.SortStableFunc(w.conts, func(a, b *worldContinuation) int { return a.due.Compare(b.due) })
	var out []claims.DueContinuation
	for _, c := range w.conts {
		if len(out) < limit && !c.due.After(time.Now()) {
			out = append(out, c.DueContinuation)
		}
	}
	return out, nil
}

func (w *world) TouchContinuations(ctx context.Context, ds []claims.DueContinuation, again time.Duration) (won []claims.DueContinuation, err error) {
	if err := w.op(ctx, "touch continuations", ""); err != nil {
		return nil, err
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, d := range ds {
		for _, c := range w.conts {
			if c.Session == d.Session && c.Number == d.Number && !c.due.After(time.Now()) {
				c.due = time.Now().Add(again)
				won = append(won, d)
			}
		}
	}
	return won, nil
}

func (w *world) QuarantineContinuation(ctx context.Context, d claims.DueContinuation, _ *claims.Token) error {
	if err := w.op(ctx, "quarantine", d.Session); err != nil {
		return err
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	for i, c := range w.conts {
		if c.Session == d.Session && c.Number == d.Number && c.Body == d.Body && c.Unstarted {
			w.conts = slices.Delete(w.conts, i, i+1)
			_, bad := judge(d)
			w.quarantines[d.Session] = bad.Reason
			return nil
		}
	}
	return claims.ErrFenced
}

func dueSessions(list []*worldSession, limit int) []claims.DueSession {
	slices.SortStableFunc(list, func(a, b *worldSession) int { return a.due.Compare(b.due) })
	var out []claims.DueSession
	for _, s := range list {
		if len(out) < limit && !s.due.After(time.Now()) {
			out = append(out, claims.DueSession{Session: s.id, Overdue: s.overdue})
		}
	}
	return out
}

func touchSessions(list []*worldSession, ids []claims.SessionID, again time.Duration) (won []claims.SessionID) {
	for _, id := range ids {
		for _, s := range list {
			if s.id == id && !s.due.After(time.Now()) {
				s.due = time.Now().Add(again)
				won = append(won, id)
			}
		}
	}
	return won
}

func (w *world) DueSessions(ctx context.Context, limit int) ([]claims.DueSession, error) {
	err := w.op(ctx, "due sessions", "")
	w.mu.Lock()
	defer w.mu.Unlock()
	return dueSessions(w.ready, limit), err
}

func (w *world) TouchSessions(ctx context.Context, ids []claims.SessionID, again time.Duration) ([]claims.SessionID, error) {
	err := w.op(ctx, "touch sessions", "")
	w.mu.Lock()
	defer w.mu.Unlock()
	return touchSessions(w.ready, ids, again), err
}

func (w *world) NextDue(ctx context.Context, within time.Duration) (in time.Duration, ok bool, err error) {
	if err := w.op(ctx, "next due", ""); err != nil {
		return 0, false, err
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, s := range w.ready {
		if d := max(0, time.Until(s.due)); d <= within && (!ok || d < in) {
			in, ok = d, true
		}
	}
	return in, ok, nil
}

func (w *world) DueRetentions(ctx context.Context, _ time.Duration, limit int) (ids []claims.SessionID, err error) {
	err = w.op(ctx, "due retentions", "")
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, d := range dueSessions(w.kept, limit) {
		ids = append(ids, d.Session)
	}
	return ids, err
}

func (w *world) TouchRetentions(ctx context.Context, ids []claims.SessionID, _, again time.Duration) ([]claims.SessionID, error) {
	err := w.op(ctx, "touch retentions", "")
	w.mu.Lock()
	defer w.mu.Unlock()
	return touchSessions(w.kept, ids, again), err
}

func (w *world) DeleteExpired(ctx context.Context, session claims.SessionID, _ time.Duration, limit int) (deleted int, more bool, err error) {
	if err := w.op(ctx, "delete", session); err != nil {
		return 0, false, err
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	for i, s := range w.kept {
		if s.id == session {
			deleted = min(s.rows, limit)
			if s.rows -= deleted; s.rows == 0 {
				w.kept = slices.Delete(w.kept, i, i+1)
			}
			return deleted, s.rows > 0, nil
		}
	}
	return 0, false, nil
}

func (w *world) DueRelays(ctx context.Context, limit int) ([]claims.DueSession, error) {
	err := w.op(ctx, "due relays", "")
	w.mu.Lock()
	defer w.mu.Unlock()
	return dueSessions(w.relays, limit), err
}

func (w *world) TouchRelays(ctx context.Context, ids []claims.SessionID, again time.Duration) ([]claims.SessionID, error) {
	err := w.op(ctx, "touch relays", "")
	w.mu.Lock()
	defer w.mu.Unlock()
	return touchSessions(w.relays, ids, again), err
}

// worldCopy is a session's log: the mark, what the stream ends with, and what
// can be published again.
type worldCopy struct {
	claims.Mark
	stream int64
	aged   bool // what is not in the stream left it by its age
}

func (w *world) Relayed(ctx context.Context, after claims.SessionID, limit int) (page []claims.Mark, err error) {
	err = w.op(ctx, "relayed", after)
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, c := range w.copies {
		if c.Session > after && len(page) < limit {
			page = append(page, c.Mark)
		}
	}
	return page, err
}

func (w *world) Verify(ctx context.Context, marks []claims.Mark) (short []claims.SessionID, err error) {
	err = w.op(ctx, "verify", "")
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, m := range marks {
		if w.copy(m.Session).stream < m.Seq {
			short = append(short, m.Session)
		}
	}
	return short, err
}

func (w *world) copy(session claims.SessionID) *worldCopy {
	i := slices.IndexFunc(w.copies, func(c *worldCopy) bool { return c.Session == session })
	return w.copies[i]
}

func (w *world) Repair(ctx context.Context, session claims.SessionID, all bool) (published int64, err error) {
	err = w.op(ctx, "repair", session)
	w.mu.Lock()
	defer w.mu.Unlock()
	c := w.copy(session)
	switch {
	case all:
		panic("what left the stream by its age is not the scanner's to publish")
	case c.aged:
		return 0, err
	case err != nil: // it came one event further
		if errors.Is(err, errPart) && c.stream < c.Seq {
			published = 1
		}
		c.stream += published
		return published, err
	}
	published = max(0, c.Seq-c.stream)
	c.stream += published
	return published, nil
}

func (w *world) Ping(ctx context.Context) error { return w.op(ctx, "ping", "") }

func (w *world) Announce(ctx context.Context, session claims.SessionID) error {
	if err := w.op(ctx, "announce", session); err != nil {
		return err
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	w.announced = append(w.announced, session)
	return nil
}

func (w *world) RelayNow(ctx context.Context, session claims.SessionID) error {
	if err := w.op(ctx, "relay", session); err != nil {
		return err
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	w.relayed = append(w.relayed, session)
	w.relays = slices.DeleteFunc(w.relays, func(s *worldSession) bool { return s.id == session })
	return nil
}

func (w *world) Poke(session claims.SessionID) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.poked = append(w.poked, session)
}

// sessions names n sessions.
func sessions(prefix string, n int) []claims.SessionID {
	out := make([]claims.SessionID, n)
	for i := range out {
		out[i] = claims.SessionID(fmt.Sprintf("%s%03d", prefix, i))
	}
	return out
}

// count is how many calls of an operation there were.
func (w *world) count(op string) int {
	w.mu.Lock()
	defer w.mu.Unlock()
	n := 0
	for _, c := range w.calls {
		if c == op || strings.HasPrefix(c, op+" ") {
			n++
		}
	}
	return n
}

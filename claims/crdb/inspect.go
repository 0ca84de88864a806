package crdb

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/jackc/pgx/v5"

	"reveille/claims"
	"reveille/sql"
)

// Bounds of what people are shown.
const (
	// MaxPage is the most sessions or leases of one page.
	MaxPage = 1000
	// maxPending bounds each list of what waits in one session.
	maxPending = 100
	// maxShownBody is the longest body of an input that is shown.
	maxShownBody = 4 << 10
	// shownSteps and shownBytes bound the closed steps of one session.
	shownSteps, shownBytes = 5, 64 << 10
	// lookAttempts bounds the conflicts that a look sits out; CockroachDB has some.
	lookAttempts = 5
)

// ErrNoSession: nobody ever sent that session a command.
var ErrNoSession = errors.New("no such session")

// SessionState is what a session does, for people; no decision rests on it.
type SessionState string

// The states, besides the phases of a claim.
const (
	StateIdle        SessionState = "idle"    // nothing to do
	StateWaiting     SessionState = "waiting" // its head is due later
	StateReady       SessionState = "ready"
	StateRunning                  = SessionState(claims.Running)
	StateCancelling               = SessionState(claims.Cancelling) // as a filter also cancelled: on its way out
	StateQuarantined SessionState = "quarantined"
)

// SessionSummary is one session in a list.
type SessionSummary struct {
	Session   claims.SessionID `json:"session"`
	State     SessionState     `json:"state"`
	Since     time.Time        `json:"since"`
	Worker    string           `json:"worker,omitempty"`     // who holds its claim
	LeaseLive *bool            `json:"lease_live,omitempty"` // of its claim
	Reason    claims.Reason    `json:"quarantine_reason,omitempty"`
	Epoch     int64            `json:"epoch"`
	LastSeq   int64            `json:"last_seq"`
	Relayed   int64            `json:"relayed_seq"`

	Armed         int64 `json:"armed"`
	Unarmed       int64 `json:"unarmed"`
	DelayedWakes  int64 `json:"delayed_wakes"`
	BareWakes     int64 `json:"bare_wakes"` // that nobody served yet
	Continuations int64 `json:"continuations"`

	CreatedAt time.Time `json:"created_at"`
	UpdatedAt time.Time `json:"updated_at"`
	Now       time.Time `json:"now"` // the database's
}

// Pending is how many inputs, wakes and continuations wait.
func (s SessionSummary) Pending() int64 {
	return s.Armed + s.Unarmed + s.DelayedWakes + s.BareWakes + s.Continuations
}

// Cursor is where a list of sessions goes on; the zero value is its beginning.
type Cursor struct {
	since   time.Time
	session claims.SessionID
}

// Sessions reads a page of at most limit (and MaxPage) sessions in a state,
// oldest in that state first, or with no state all sessions by their id. It
// returns the cursor of the next page, or nil where this was the last.
func (s *Store) Sessions(ctx context.Context, state SessionState, after Cursor, limit int) ([]SessionSummary, *Cursor, error) {
	limit = max(1, min(limit, MaxPage))
	if after.since.IsZero() {
		after.since = time.Unix(0, 0)
	}
	since, session, n := after.since, string(after.session), int64(limit)
	var statement string
	var args []any
	switch state {
	case "":
		statement, args = sql.InspectSessions, []any{session, n}
	case StateReady:
		statement, args = sql.InspectReady, []any{allShards, since, session, n}
	case StateRunning:
		statement, args = sql.InspectClaimed, []any{[]string{string(claims.Running)}, since, session, n}
	case StateCancelling:
		statement, args = sql.InspectClaimed, []any{[]string{string(claims.Cancelling), string(claims.Cancelled)}, since, session, n}
	case StateQuarantined:
		statement, args = sql.InspectQuarantined, []any{since, session, n}
	default:
		return nil, nil, fmt.Errorf("sessions: no list of state %q", state)
	}
	var out []SessionSummary
	err := s.look(ctx, "sessions", func(ctx context.Context, tx pgx.Tx) error {
		rows, err := tx.Query(ctx, statement, args...)
		if err != nil {
			return err
		}
		out, err = pgx.CollectRows(rows, func(row pgx.CollectableRow) (SessionSummary, error) {
			var r summaryRow
			err := row.Scan(r.columns()...)
			return r.summary(), err
		})
		return err
	})
	if err != nil || len(out) < limit {
		return out, nil, err
	}
	last := out[len(out)-1]
	return out, &Cursor{since: last.Since, session: last.Session}, nil
}

// summaryRow is a row of the inspect_ statements on sessions.
type summaryRow struct {
	SessionSummary
	readyAt       *time.Time
	phase, worker *string
	acquired      *time.Time
	live          bool
	reason        *string
	quarantined   *time.Time
}

func (r *summaryRow) columns() []any {
	return []any{
		&r.Session, &r.Epoch, &r.LastSeq, &r.Relayed, &r.Armed, &r.Unarmed, &r.DelayedWakes, &r.BareWakes, &r.Continuations,
		&r.readyAt, &r.CreatedAt, &r.UpdatedAt, &r.phase, &r.acquired, &r.worker, &r.live, &r.reason, &r.quarantined, &r.Now,
	}
}

func (r *summaryRow) summary() SessionSummary {
	s := r.SessionSummary
	switch {
	case r.quarantined != nil:
		s.State, s.Since = StateQuarantined, *r.quarantined
		s.Reason = claims.Reason(orEmpty(r.reason))
	case r.phase != nil:
		s.State, s.Since, s.Worker, s.LeaseLive = SessionState(*r.phase), *r.acquired, orEmpty(r.worker), &r.live
	case r.readyAt != nil && r.readyAt.After(r.Now):
		s.State, s.Since = StateWaiting, s.UpdatedAt
	case r.readyAt != nil:
		s.State, s.Since = StateReady, *r.readyAt
	default:
		s.State, s.Since = StateIdle, s.UpdatedAt
	}
	return s
}

func orEmpty(s *string) string {
	if s == nil {
		return ""
	}
	return *s
}

// SessionDetail is all of one session that an operator may want to see.
type SessionDetail struct {
	SessionSummary
	Takeovers  int64               `json:"takeovers"` // since a step ended
	ReadyAt    *time.Time          `json:"ready_at,omitempty"`
	Claim      *ClaimDetail        `json:"claim,omitempty"`
	Quarantine *QuarantineDetail   `json:"quarantine,omitempty"`
	Inputs     []PendingInput      `json:"inputs"` // pending, at most 100
	Wakes      []time.Time         `json:"wakes"`  // bare, that wait for their time, at most 100
	Promised   []PromisedStep      `json:"promised"`
	Steps      []claims.ClosedStep `json:"steps"` // the last closed ones, oldest first
}

// ClaimDetail is the claim of a session.
type ClaimDetail struct {
	Execution  claims.ExecutionID `json:"execution"`
	Holder     claims.HolderID    `json:"holder"`
	Worker     string             `json:"worker"` // empty: its lease is gone
	Scanner    bool               `json:"scanner"`
	Phase      claims.Phase       `json:"phase"`
	PhaseAt    time.Time          `json:"phase_at"`
	Reason     string             `json:"reason,omitempty"`
	Revoked    claims.Cause       `json:"revoked,omitempty"`
	Verdict    claims.Cause       `json:"verdict,omitempty"`
	Steps      int64              `json:"steps"`
	Step       claims.StepID      `json:"step,omitempty"` // the open one
	AcquiredAt time.Time          `json:"acquired_at"`
	LeaseLive  bool               `json:"lease_live"`
	LeaseEnds  *time.Time         `json:"lease_expires_at,omitempty"`
}

// QuarantineDetail is why a session is out of circulation.
type QuarantineDetail struct {
	ID       string          `json:"id"`
	Lane     string          `json:"lane"`
	Reason   claims.Reason   `json:"reason"`
	Detail   string          `json:"detail"`
	Evidence json.RawMessage `json:"evidence"`
	Since    time.Time       `json:"since"`
}

// Quarantine is one in a list.
type Quarantine struct {
	Session claims.SessionID `json:"session"`
	ID      string           `json:"id"`
	Lane    string           `json:"lane"`
	Reason  claims.Reason    `json:"reason"`
	Detail  string           `json:"detail"`
	Since   time.Time        `json:"since"`
	Now     time.Time        `json:"now"` // the database's
}

// Quarantines reads a page of at most limit (and MaxPage) quarantines, the
// oldest first, of one reason, or of all where it is empty. It returns the
// cursor of the next page, or nil where this was the last.
func (s *Store) Quarantines(ctx context.Context, reason claims.Reason, after Cursor, limit int) ([]Quarantine, *Cursor, error) {
	limit = max(1, min(limit, MaxPage))
	if after.since.IsZero() {
		after.since = time.Unix(0, 0)
	}
	var out []Quarantine
	err := s.look(ctx, "quarantines", func(ctx context.Context, tx pgx.Tx) error {
		rows, err := tx.Query(ctx, sql.InspectQuarantines, after.since, string(after.session), string(reason), int64(limit))
		if err != nil {
			return err
		}
		out, err = pgx.CollectRows(rows, pgx.RowToStructByPos[Quarantine])
		return err
	})
	if err != nil || len(out) < limit {
		return out, nil, err
	}
	last := out[len(out)-1]
	return out, &Cursor{since: last.Since, session: last.Session}, nil
}

// Tail reads the last n events of a session that are kept, oldest first.
func (s *Store) Tail(ctx context.Context, session claims.SessionID, n int) ([]claims.Record, error) {
	// An append is one event or more, so the last n of them have n events.
	appends, err := query(ctx, s, "tail", sql.History, func(row pgx.CollectableRow) (string, error) {
		var seq int64
		var lines string
		err := row.Scan(&seq, &lines)
		return lines, err
	}, string(session), int64(1)<<62, int64(n))
	if err != nil {
		return nil, fmt.Errorf("session %s: %w", session, err)
	}
	var records []claims.Record
	for _, lines := range slices.Backward(appends) {
		if records, err = appendRecords(records, lines, 0); err != nil {
			return nil, fmt.Errorf("session %s: %w", session, err)
		}
	}
	return records[max(0, len(records)-n):], nil
}

// PendingInput is an input that no step has covered.
type PendingInput struct {
	ID         string          `json:"id"`
	State      string          `json:"state"` // unarmed or armed
	Delivery   claims.Delivery `json:"delivery"`
	NotBefore  time.Time       `json:"not_before"`
	AdmittedAt time.Time       `json:"admitted_at"`
	Body       json.RawMessage `json:"body,omitempty"` // where it is at most 4 KiB long
	Bytes      int64           `json:"bytes"`
}

// PromisedStep is a continuation.
type PromisedStep struct {
	Number    int64                   `json:"number"`
	NotBefore time.Time               `json:"not_before"`
	Kind      claims.ContinuationKind `json:"kind,omitempty"` // empty: it does not decode
	Step      claims.StepID           `json:"step,omitempty"` // which it continues
	Attempt   int                     `json:"attempt"`
}

// Session reads one session whole, in one snapshot but for its closed steps.
// Error: ErrNoSession.
func (s *Store) Session(ctx context.Context, id claims.SessionID) (SessionDetail, error) {
	var d SessionDetail
	err := s.look(ctx, "session", func(ctx context.Context, tx pgx.Tx) (err error) {
		if d, err = readSession(ctx, tx, id); err != nil {
			return err
		}
		return d.readPending(ctx, tx)
	})
	if err != nil {
		return SessionDetail{}, fmt.Errorf("session %s: %w", id, err)
	}
	d.Steps, err = s.History(ctx, id, shownSteps, shownBytes)
	return d, err
}

func readSession(ctx context.Context, tx pgx.Tx, id claims.SessionID) (SessionDetail, error) {
	var (
		r                                           summaryRow
		d                                           SessionDetail
		execution, holder, reason, revoked, verdict *string
		step, quarantine, lane, detail, evidence    *string
		scanner                                     *bool
		steps                                       *int64
		phaseAt, leaseEnds                          *time.Time
	)
	err := tx.QueryRow(ctx, sql.InspectSession, string(id)).Scan(append(r.columns(),
		&d.Takeovers, &execution, &holder, &scanner, &phaseAt, &reason, &revoked, &verdict,
		&steps, &step, &leaseEnds, &quarantine, &lane, &detail, &evidence)...)
	if errors.Is(err, pgx.ErrNoRows) {
		return d, ErrNoSession
	}
	if err != nil {
		return d, err
	}
	d.SessionSummary, d.ReadyAt = r.summary(), r.readyAt
	if execution != nil {
		d.Claim = &ClaimDetail{
			Execution: claims.ExecutionID(*execution), Holder: claims.HolderID(*holder), Worker: orEmpty(r.worker), Scanner: *scanner,
			Phase: claims.Phase(*r.phase), PhaseAt: *phaseAt, Reason: *reason, Revoked: claims.Cause(*revoked), Verdict: claims.Cause(*verdict),
			Steps: *steps, Step: claims.StepID(orEmpty(step)), AcquiredAt: *r.acquired, LeaseLive: r.live, LeaseEnds: leaseEnds,
		}
	}
	if quarantine != nil {
		d.Quarantine = &QuarantineDetail{
			ID: *quarantine, Lane: *lane, Reason: claims.Reason(*r.reason), Detail: *detail,
			Evidence: json.RawMessage(*evidence), Since: *r.quarantined,
		}
	}
	return d, nil
}

// readPending reads what waits in the session.
func (d *SessionDetail) readPending(ctx context.Context, tx pgx.Tx) error {
	id := string(d.Session)
	rows, err := tx.Query(ctx, sql.InspectInputs, id, int64(maxShownBody), int64(maxPending))
	if err != nil {
		return err
	}
	d.Inputs, err = pgx.CollectRows(rows, func(row pgx.CollectableRow) (PendingInput, error) {
		var in PendingInput
		var body *string
		err := row.Scan(&in.ID, &in.State, &in.Delivery, &in.NotBefore, &in.AdmittedAt, &body, &in.Bytes)
		if body != nil {
			in.Body = json.RawMessage(*body)
		}
		return in, err
	})
	if err != nil {
		return err
	}
	if rows, err = tx.Query(ctx, sql.InspectWakes, id, int64(maxPending)); err != nil {
		return err
	}
	if d.Wakes, err = pgx.CollectRows(rows, pgx.RowTo[time.Time]); err != nil {
		return err
	}
	if rows, err = tx.Query(ctx, sql.InspectContinuations, id, int64(maxPending)); err != nil {
		return err
	}
	d.Promised, err = pgx.CollectRows(rows, func(row pgx.CollectableRow) (PromisedStep, error) {
		var p PromisedStep
		var body string
		if err := row.Scan(&p.Number, &p.NotBefore, &body); err != nil {
			return p, err
		}
		if c, bad := claims.DecodeContinuation(d.Session, p.Number, d.Epoch, []byte(body)); bad == nil {
			as := c.ContinuesAs()
			p.Kind, p.Step, p.Attempt = as.Kind, as.Step, as.Attempt
		}
		return p, nil
	})
	return err
}

// LeaseDetail is a worker or a scanner, as its lease shows it.
type LeaseDetail struct {
	Holder    claims.HolderID `json:"holder"`
	Kind      string          `json:"kind"`
	Name      string          `json:"name"`
	Version   string          `json:"version"`
	Slots     int64           `json:"slots"`
	Claims    int64           `json:"claims"` // sessions it holds
	StartedAt time.Time       `json:"started_at"`
	ExpiresAt time.Time       `json:"expires_at"`
	Live      bool            `json:"live"`
	Now       time.Time       `json:"now"` // the database's
}

// Leases reads a page of the leases, live and expired, by holder: at most limit
// (and MaxPage) after one of them; empty is the beginning.
func (s *Store) Leases(ctx context.Context, after claims.HolderID, limit int) ([]LeaseDetail, error) {
	if after == "" {
		after = "00000000-0000-0000-0000-000000000000"
	}
	var out []LeaseDetail
	err := s.look(ctx, "leases", func(ctx context.Context, tx pgx.Tx) error {
		rows, err := tx.Query(ctx, sql.InspectLeases, string(after), int64(max(1, min(limit, MaxPage))))
		if err != nil {
			return err
		}
		out, err = pgx.CollectRows(rows, func(row pgx.CollectableRow) (LeaseDetail, error) {
			var l LeaseDetail
			err := row.Scan(&l.Holder, &l.Kind, &l.Name, &l.Version, &l.Slots, &l.StartedAt, &l.ExpiresAt, &l.Claims, &l.Now)
			l.Live = l.ExpiresAt.After(l.Now)
			return l, err
		})
		return err
	})
	return out, err
}

// look runs body in one read-only snapshot. It is not serializable where the
// database has less: on PostgreSQL a serializable reader that walks a table
// takes predicate locks on all of it, and the transactions of any two sessions
// would conflict because somebody looked. CockroachDB makes it serializable.
func (s *Store) look(ctx context.Context, op string, body func(context.Context, pgx.Tx) error) error {
	for attempt := 1; ; attempt++ {
		err := s.lookOnce(ctx, body)
		if err == nil {
			return nil
		}
		if classify(err, beforeCommit) != retryable || attempt == lookAttempts || ctx.Err() != nil {
			return fmt.Errorf("%s: %w", op, err)
		}
	}
}

func (s *Store) lookOnce(ctx context.Context, body func(context.Context, pgx.Tx) error) error {
	actx, cancel := context.WithTimeout(ctx, s.opts.Timeout)
	defer cancel()
	tx, err := s.pool.BeginTx(actx, pgx.TxOptions{IsoLevel: pgx.RepeatableRead, AccessMode: pgx.ReadOnly})
	if err != nil {
		return err
	}
	// It wrote nothing, so nothing has to be committed.
	defer rollback(ctx, tx, s.opts.Timeout)
	return body(actx, tx)
}

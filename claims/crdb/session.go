package crdb

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"hash/fnv"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"

	"reveille/claims"
	"reveille/sql"
)

// sessionRow is a row of sessions.
type sessionRow struct {
	shard                   int64
	epoch                   int64
	execution               *string
	quarantine              *string
	lastSeq, relayedSeq     int64
	commandSeq, commandTime int64
	position                int64
	unarmed, armed, delayed int64
	wakes, wakesServed      int64
	wokenAt                 *time.Time
	promised, continuations int64
	takeovers               int64
	readyAt, readyDueAt     *time.Time
	relayDueAt              *time.Time
	keptSince               *time.Time
}

// claimRow is a row of claims with whether its lease is live.
type claimRow struct {
	execution, ranAs claims.ExecutionID
	holder           claims.HolderID
	scanner          bool
	epoch            int64
	phase            claims.Phase
	reason           string
	revoked, verdict claims.Cause
	steps            int64
	stepID           *string
	step             *string
	phaseAt          time.Time
	leaseLive        bool
}

func (c *claimRow) state(asker claims.ExecutionID) claims.State {
	return claims.State{
		Phase: c.phase, LeaseLive: c.leaseLive, Revoked: c.revoked, StepOpen: c.stepID != nil,
		Own: c.execution == asker, Scanner: c.scanner,
	}
}

// txn is one transaction on one session: what it read, and what it will write.
// Statements whose answer decides something run at once; the session's row and
// its events are written by flush, together, at the end.
type txn struct {
	tx    pgx.Tx
	opts  *Options
	id    claims.SessionID
	now   time.Time // the database's, at the statement that locked the session
	isNew bool
	s     sessionRow
	c     *claimRow // nil: none

	done   bool            // in doubt, and the token was found: body only reads
	before []claims.Record // what it had appended
	token  string
	trace  string
	ran    claims.ExecutionID // stamped on events; empty: none
	step   claims.StepID      // stamped on events; empty: none
	lines  []string
	types  []claims.EventType
	events error // the first event that could not be made

	// newDue is when what a new session brings is due; nil: nothing.
	newDue *time.Time

	batch  pgx.Batch
	misses []error // one for each statement of batch
}

// session runs body on a locked session. Where the session does not exist,
// body sees a fresh one if create, else claims.ErrFenced is the answer (no
// claim can be anybody's). In doubt, where the token of the operation is
// found, body sees txn.done and nothing that it changes is written.
func (s *Store) session(ctx context.Context, op string, id claims.SessionID, token *claims.Token, create bool, body func(context.Context, *txn) error) error {
	var types []claims.EventType
	err := s.run(ctx, op, pgx.Serializable, token, func(ctx context.Context, tx pgx.Tx) error {
		t := &txn{tx: tx, opts: &s.opts, id: id, isNew: create && !s.seen.has(id)}
		if token != nil {
			t.token = token.ID
		}
		if err := t.load(ctx, create); err != nil {
			return err
		}
		if token != nil && token.Doubt && token.ID != "" {
			if err := t.findToken(ctx); err != nil {
				return err
			}
		}
		if err := body(ctx, t); err != nil || t.done {
			return err
		}
		types = t.types
		err := t.flush(ctx)
		if errors.Is(err, errExists) {
			s.seen.add(id)
		}
		return err
	})
	if err != nil {
		return fmt.Errorf("session %s: %w", id, err)
	}
	s.seen.add(id)
	for _, t := range types {
		s.appended.WithLabelValues(string(t)).Inc()
	}
	return nil
}

// findToken looks for what an earlier try of this operation appended.
func (t *txn) findToken(ctx context.Context) error {
	var lines string
	err := t.tx.QueryRow(ctx, sql.FindToken, string(t.id), t.token).Scan(&lines)
	if errors.Is(err, pgx.ErrNoRows) {
		return nil
	}
	if err != nil {
		return err
	}
	t.done = true
	for line := range strings.SplitSeq(lines, "\n") {
		r, err := claims.ParseRecord([]byte(line))
		if err != nil {
			return err
		}
		t.before = append(t.before, r)
	}
	return nil
}

// shardOf spreads sessions over the due indexes.
func shardOf(id claims.SessionID) int64 {
	h := fnv.New32a()
	_, _ = h.Write([]byte(id)) // a hash's Write does not fail
	return int64(h.Sum32() % shards)
}

// errExists: a session that was taken for new is there.
var errExists = errors.New("session exists")

// load locks the session and reads it with its claim. One that nobody here has
// seen is taken for new, without looking: on PostgreSQL the look would lock the
// index page into which all other new sessions go. Its insert tells the truth.
func (t *txn) load(ctx context.Context, create bool) error {
	if t.isNew {
		t.s = sessionRow{shard: shardOf(t.id)}
		return t.tx.QueryRow(ctx, sql.Now).Scan(&t.now)
	}
	b := &pgx.Batch{}
	b.Queue(sql.Now)
	b.Queue(sql.LockSession, string(t.id))
	res := t.tx.SendBatch(ctx, b)
	defer res.Close()
	if err := res.QueryRow().Scan(&t.now); err != nil {
		return err
	}
	var (
		c                               claimRow
		execution, ranAs, holder, phase *string
		reason, revoked, verdict        *string
		scanner                         *bool
		epoch, steps                    *int64
		phaseAt                         *time.Time
	)
	s := &t.s
	err := res.QueryRow().Scan(&s.shard, &s.epoch, &s.execution, &s.quarantine, &s.lastSeq, &s.relayedSeq,
		&s.commandSeq, &s.commandTime, &s.position, &s.unarmed, &s.armed, &s.delayed,
		&s.wakes, &s.wakesServed, &s.wokenAt, &s.promised, &s.continuations, &s.takeovers,
		&s.readyAt, &s.readyDueAt, &s.relayDueAt, &s.keptSince,
		&execution, &ranAs, &holder, &scanner, &epoch,
		&phase, &reason, &revoked, &verdict, &steps, &c.stepID, &c.step, &phaseAt, &c.leaseLive)
	if errors.Is(err, pgx.ErrNoRows) {
		if !create {
			return claims.ErrFenced
		}
		t.isNew = true // seen, and yet not there: its transaction was rolled back, or a test's
		t.s = sessionRow{shard: shardOf(t.id)}
		return res.Close()
	}
	if err != nil {
		return err
	}
	if (execution == nil) != (s.execution == nil) || execution != nil && *execution != *s.execution {
		return fmt.Errorf("session says its execution is %v, its claim %v", show(s.execution), show(execution))
	}
	if execution != nil {
		c.execution, c.ranAs, c.holder = claims.ExecutionID(*execution), claims.ExecutionID(*ranAs), claims.HolderID(*holder)
		c.scanner, c.epoch = *scanner, *epoch
		c.phase, c.reason, c.revoked, c.verdict = claims.Phase(*phase), *reason, claims.Cause(*revoked), claims.Cause(*verdict)
		c.steps, c.phaseAt = *steps, *phaseAt
		t.c = &c
	}
	return res.Close()
}

func show(s *string) string {
	if s == nil {
		return "none"
	}
	return *s
}

// own answers the effect of an owner's operation, or its sentinel.
func (t *txn) own(e claims.ExecutionID, op claims.Op) (claims.Effect, error) {
	if t.c == nil {
		return claims.Fenced, claims.ErrFenced
	}
	effect := claims.Next(t.c.state(e), op)
	if err := effect.Err(); err != nil {
		return effect, err
	}
	t.ran = t.c.ranAs
	if t.c.stepID != nil {
		t.step = claims.StepID(*t.c.stepID)
	}
	return effect, nil
}

// settledBefore answers an operation whose earlier try did commit: how it ended
// the execution, and, where it did not, whether that is still ours.
func (t *txn) settledBefore(execution claims.ExecutionID) (claims.Settlement, error) {
	for _, r := range t.before {
		if r.Type != claims.ExecutionEnded {
			continue
		}
		var d claims.ExecutionEndedData
		if err := json.Unmarshal(r.Data, &d); err != nil {
			return claims.Settlement{}, err
		}
		out := claims.Settlement{Outcome: d.Outcome, Ready: t.s.readyAt != nil && !t.s.readyAt.After(t.now)}
		for _, r := range t.before {
			if r.Type == claims.SessionQuarantined {
				var q claims.QuarantinedData
				if err := json.Unmarshal(r.Data, &q); err != nil {
					return claims.Settlement{}, err
				}
				out.Reason = q.Reason
			}
		}
		return out, nil
	}
	if t.c == nil || t.c.execution != execution {
		return claims.Settlement{}, claims.ErrFenced // it did not end, and was taken over since
	}
	return claims.Settlement{Again: true}, nil
}

// event appends an event under the execution and step at hand.
func (t *txn) event(typ claims.EventType, data any) {
	t.appendEvent(typ, t.ran, t.step, data)
}

// sessionEvent appends an event that is of no execution.
func (t *txn) sessionEvent(typ claims.EventType, data any) {
	t.appendEvent(typ, "", "", data)
}

// executionEvent appends an event of the execution but of no step.
func (t *txn) executionEvent(typ claims.EventType, data any) {
	t.appendEvent(typ, t.ran, "", data)
}

func (t *txn) appendEvent(typ claims.EventType, ran claims.ExecutionID, step claims.StepID, data any) {
	if t.events != nil {
		return
	}
	raw, err := claims.Marshal(data)
	if err != nil {
		t.events = fmt.Errorf("event %s: %w", typ, err)
		return
	}
	e := claims.Event{
		Session: t.id, Seq: t.s.lastSeq + 1, Type: typ, Time: claims.Stamp(t.now),
		Execution: ran, Step: step, Trace: t.trace, Data: raw,
	}
	if ran != "" {
		e.Epoch = t.s.epoch // I24: the session's, at commit
	}
	line, err := claims.Marshal(e)
	switch {
	case err != nil:
		t.events = fmt.Errorf("event %s: %w", typ, err)
	case len(line) > t.opts.MaxEventBytes:
		t.events = fmt.Errorf("event %s of %d bytes, at most %d go to the stream: %w", typ, len(line), t.opts.MaxEventBytes, claims.ErrTooLarge)
	default:
		t.s.lastSeq++
		t.lines = append(t.lines, string(line))
		t.types = append(t.types, typ)
	}
}

func (t *txn) content(tail []claims.Content) {
	for _, c := range tail {
		t.event(c.Type, c.Data)
	}
}

// queue adds a statement to those that flush sends together, and what it means
// where it does not write exactly one row.
func (t *txn) queue(miss error, statement string, args ...any) {
	t.batch.Queue(statement, args...)
	t.misses = append(t.misses, miss)
}

// must queues a fenced write that the read of this transaction allows. No row
// means that it moved in between; the transaction is tried again. It is for
// what this transaction does not read again: claims, events, the session.
func (t *txn) must(statement string, args ...any) {
	t.queue(errAgain, statement, args...)
}

// atOnce runs a write of one row that this transaction may read again.
func (t *txn) atOnce(ctx context.Context, statement string, args ...any) error {
	tag, err := t.tx.Exec(ctx, statement, args...)
	if err == nil && tag.RowsAffected() != 1 {
		err = errAgain
	}
	return err
}

// flush sends what is queued with the events and the session's row, in one
// round trip.
func (t *txn) flush(ctx context.Context) error {
	if t.events != nil {
		return t.events
	}
	s := &t.s
	id := []string{string(t.id)}
	if n := int64(len(t.lines)); n > 0 {
		if s.relayDueAt == nil {
			due := t.now.Add(t.opts.RelayGrace)
			s.relayDueAt = &due
		}
		if s.keptSince == nil {
			s.keptSince = &t.now
		}
		t.must(sql.InsertEvents, id, []int64{s.lastSeq}, []int64{s.lastSeq - n + 1}, []int64{s.epoch},
			[]string{t.token}, []string{strings.Join(t.lines, "\n")}, []time.Time{t.now})
	}
	row := []any{
		id,
		[]int64{s.shard},
		[]int64{s.epoch},
		[]*string{s.execution},
		[]*string{s.quarantine},
		[]int64{s.lastSeq},
		[]int64{s.commandSeq},
		[]int64{s.commandTime},
		[]int64{s.position},
		[]int64{s.unarmed},
		[]int64{s.armed},
		[]int64{s.delayed},
		[]int64{s.wakes},
		[]int64{s.wakesServed},
		[]*time.Time{s.wokenAt},
		[]int64{s.promised},
		[]int64{s.continuations},
		[]int64{s.takeovers},
		[]*time.Time{s.readyAt},
		[]*time.Time{s.readyDueAt},
		[]*time.Time{s.relayDueAt},
		[]*time.Time{s.keptSince},
		[]time.Time{t.now},
	}
	if t.isNew { // first: where it is there, what follows means nothing
		rest := t.batch
		t.batch = pgx.Batch{}
		t.batch.Queue(sql.InsertSessions, row...)
		t.batch.QueuedQueries = append(t.batch.QueuedQueries, rest.QueuedQueries...)
		t.misses = append([]error{errExists}, t.misses...)
	} else {
		t.must(sql.SaveSessions, row...)
	}
	res := t.tx.SendBatch(ctx, &t.batch)
	for _, miss := range t.misses {
		tag, err := res.Exec()
		if err == nil && tag.RowsAffected() != 1 {
			err = miss
		}
		if err != nil {
			_ = res.Close() // the first error is the one to tell
			return err
		}
	}
	return res.Close()
}

// head is what would start next of a session (docs/design.md section 1).
type head struct {
	continuation *claims.Continuation
	bad          *claims.Poison // the continuation that would be next does not decode
	badNumber    int64
	badBody      string
	inputs       []claims.Input
	trace        string
	askedAt      time.Time // when the oldest of what it serves was recorded
	wakes        int64     // bare wakes it would serve, besides
}

func (h *head) empty() bool {
	return h.continuation == nil && h.bad == nil && len(h.inputs) == 0 && h.wakes == 0
}

// wakeDelayed makes the delayed bare wakes that are due into plain ones, which
// arm what was admitted.
func (t *txn) wakeDelayed(ctx context.Context) error {
	if t.s.delayed == 0 || t.isNew {
		return nil
	}
	tag, err := t.tx.Exec(ctx, sql.TakeDueWakes, string(t.id), t.now)
	if err != nil || tag.RowsAffected() == 0 {
		return err
	}
	t.s.delayed -= tag.RowsAffected()
	t.bareWake(tag.RowsAffected())
	return t.armAll(ctx)
}

func (t *txn) bareWake(n int64) {
	t.s.wakes += n
	if t.s.wokenAt == nil {
		now := t.now
		t.s.wokenAt = &now
	}
}

func (t *txn) armAll(ctx context.Context) error {
	if t.s.unarmed == 0 {
		return nil
	}
	tag, err := t.tx.Exec(ctx, sql.ArmInputs, string(t.id))
	t.s.unarmed -= tag.RowsAffected()
	t.s.armed += tag.RowsAffected()
	return err
}

// head reads what would start next. What the counters say is not there is not
// looked for.
func (t *txn) head(ctx context.Context) (*head, error) {
	h := &head{}
	if err := t.wakeDelayed(ctx); err != nil {
		return nil, err
	}
	h.wakes = t.s.wakes - t.s.wakesServed
	if h.wakes > 0 && t.s.wokenAt != nil {
		h.askedAt = *t.s.wokenAt
	}
	if t.s.continuations > 0 {
		var number int64
		var body string
		var superseded bool
		err := t.tx.QueryRow(ctx, sql.DueContinuation, string(t.id), t.now).Scan(&number, &body, &superseded)
		switch {
		case err == nil:
			if h.continuation, h.bad = claims.DecodeContinuation(t.id, number, t.s.epoch, []byte(body)); h.bad == nil && superseded {
				h.continuation, h.bad = nil, claims.SupersededContinuation(number)
			}
			if h.bad != nil {
				h.badNumber, h.badBody = number, body
			}
			return h, nil
		case !errors.Is(err, pgx.ErrNoRows):
			return nil, err
		}
	}
	if t.s.armed == 0 || t.isNew { // what is new and due is started directly
		return h, nil
	}
	rows, err := t.tx.Query(ctx, sql.DueInputs, string(t.id), t.now)
	if err != nil {
		return nil, err
	}
	defer rows.Close()
	for rows.Next() {
		var (
			in       claims.Input
			body     string
			trace    string
			admitted time.Time
			position int64
		)
		if err := rows.Scan(&in.ID, &in.Delivery, &body, &trace, &admitted, &position); err != nil {
			return nil, err
		}
		in.Body = json.RawMessage(body)
		h.inputs = append(h.inputs, in)
		if h.trace == "" {
			h.trace = trace
		}
		if h.askedAt.IsZero() || admitted.Before(h.askedAt) {
			h.askedAt = admitted
		}
	}
	return h, rows.Err()
}

// serveWakes marks all bare wakes as served by what starts (or is cancelled) now.
func (t *txn) serveWakes() {
	t.s.wakesServed, t.s.wokenAt = t.s.wakes, nil
}

// promote makes the head into the open step: it covers its inputs, consumes
// its continuation and serves the bare wakes (I23). claim inserts or updates
// the claim's row with the step.
func (t *txn) promote(ctx context.Context, h *head, base claims.OpenStep) (*claims.Step, string, error) {
	o := base
	o.Session, o.Epoch, o.Inputs = t.id, t.s.epoch, []string{}
	st := &claims.Step{ID: o.Step, Index: o.Index, Inputs: []claims.Input{}, StartedAt: t.now, AskedAt: h.askedAt}
	if c := h.continuation; c != nil {
		o.Continues, o.Attempt, o.Recoveries = c.ContinuesAs(), c.Attempt, c.Recoveries
		o.Lineage, o.Executions = c.Lineage, claims.Extend(c.Executions, o.Execution)
		if c.Trace != "" {
			o.Trace = c.Trace
		}
		if err := t.consume(ctx, c.Number); err != nil {
			return nil, "", err
		}
		if len(c.Inputs) > 0 {
			var err error
			if st.Inputs, err = t.inputs(ctx, c.Inputs); err != nil {
				return nil, "", err
			}
			o.Inputs = c.Inputs
		}
	} else if len(h.inputs) > 0 {
		for _, in := range h.inputs {
			o.Inputs = append(o.Inputs, in.ID)
		}
		st.Inputs = h.inputs
	}
	t.serveWakes()
	st.Continues, st.Attempt, st.Trace = o.Continues, o.Attempt, o.Trace
	t.ran, t.step, t.trace = o.Execution, o.Step, o.Trace
	if h.continuation == nil {
		for _, id := range o.Inputs {
			t.event(claims.InputPromoted, claims.InputData{Input: id})
		}
	}
	t.event(claims.StepStartedEvent, claims.StepStartedData{Index: o.Index, Inputs: o.Inputs, Continues: o.Continues})
	o.Seq = t.s.lastSeq
	body, err := claims.Marshal(o)
	return st, string(body), err
}

// cover marks armed inputs as covered by a step.
func (t *txn) cover(ctx context.Context, inputs []claims.Input, step claims.StepID) error {
	if len(inputs) == 0 {
		return nil
	}
	tag, err := t.tx.Exec(ctx, sql.CoverInputs, string(t.id), inputIDs(inputs), string(step))
	if err != nil {
		return err
	}
	if tag.RowsAffected() != int64(len(inputs)) {
		return errAgain
	}
	t.s.armed -= tag.RowsAffected()
	return nil
}

func inputIDs(inputs []claims.Input) []string {
	ids := make([]string, len(inputs))
	for i, in := range inputs {
		ids[i] = in.ID
	}
	return ids
}

// consume takes a continuation out.
func (t *txn) consume(ctx context.Context, number int64) error {
	t.s.continuations = max(0, t.s.continuations-1) // a row that somebody else put there was not counted
	return t.atOnce(ctx, sql.DeleteContinuation, string(t.id), number)
}

// inputs reads the inputs that a continuation gives again. Those past their
// retention are gone; the ids still tell which they were.
func (t *txn) inputs(ctx context.Context, ids []string) ([]claims.Input, error) {
	rows, err := t.tx.Query(ctx, sql.GetInputs, string(t.id), ids)
	if err != nil {
		return nil, err
	}
	return pgx.CollectRows(rows, func(row pgx.CollectableRow) (claims.Input, error) {
		var in claims.Input
		var body string
		err := row.Scan(&in.ID, &in.Delivery, &body)
		in.Body = json.RawMessage(body)
		return in, err
	})
}

// openStep decodes the claim's open step. A step that does not decode, or is
// not this claim's, is a poison (I27).
func (t *txn) openStep() (*claims.OpenStep, error) {
	if t.c.stepID == nil {
		return nil, nil
	}
	o, bad := claims.DecodeStep(t.stands(), []byte(*t.c.step))
	if bad != nil {
		return nil, bad
	}
	t.trace = o.Trace
	return o, nil
}

// stands is what the claim says of its open step.
func (t *txn) stands() claims.Stands {
	return claims.Stands{Session: t.id, Step: claims.StepID(*t.c.stepID), RanAs: t.c.ranAs, Started: int(t.c.steps), Epoch: t.s.epoch}
}

// expired confirms that the claim's lease is expired, and not only was by the
// transaction's snapshot. It does nothing for a claim that is revoked.
func (t *txn) expired(ctx context.Context) error {
	if t.c.revoked != claims.None {
		return nil
	}
	err := t.tx.QueryRow(ctx, sql.LockLease, string(t.c.holder)).Scan(&t.c.leaseLive)
	if errors.Is(err, pgx.ErrNoRows) { // a holder without a lease is dead
		t.c.leaseLive = false
		return nil
	}
	return err
}

// promise writes a continuation.
func (t *txn) promise(ctx context.Context, c *claims.Continuation) error {
	t.s.promised++
	t.s.continuations++
	c.Number = t.s.promised
	body, err := claims.Marshal(c)
	if err != nil {
		return err
	}
	return t.atOnce(ctx, sql.InsertContinuation, string(t.id), c.Number, t.s.shard, string(c.Lineage), c.NotBefore, t.announceAt(c.NotBefore), string(body))
}

// rearm computes when the session is ready from what is pending (I22), and
// reports whether that is now. It is part of every removal of a claim and of
// every change of what is pending while there is none.
func (t *txn) rearm(ctx context.Context) (ready bool, err error) {
	s := &t.s
	s.readyAt = nil
	if s.execution != nil || s.quarantine != nil {
		return false, nil
	}
	var ordinary *time.Time // without the continuations, which have a lane of their own
	earliest := func(at *time.Time) {
		if at != nil && (s.readyAt == nil || at.Before(*s.readyAt)) {
			s.readyAt = at
		}
	}
	if s.wakes > s.wakesServed {
		earliest(s.wokenAt)
	}
	for _, q := range []struct {
		there     bool
		statement string
	}{
		{s.armed > 0 && !t.isNew, sql.NextInputDue},
		{s.delayed > 0 && !t.isNew, sql.NextWakeDue},
		{s.continuations > 0, sql.NextContinuationDue},
	} {
		if q.statement == sql.NextContinuationDue {
			earliest(t.newDue)
			ordinary = s.readyAt
		}
		if !q.there || s.readyAt != nil && !s.readyAt.After(t.now) {
			continue
		}
		var at *time.Time
		if err := t.tx.QueryRow(ctx, q.statement, string(t.id)).Scan(&at); err != nil {
			return false, err
		}
		earliest(at)
	}
	ready = s.readyAt != nil && !s.readyAt.After(t.now)
	if ordinary == nil {
		return ready, nil
	}
	due, late := t.announceAt(*ordinary), time.Duration(0)
	if due != *ordinary {
		late = t.opts.AnnounceGrace
	}
	// The scanner's mark is indexed, and so it is only moved to an earlier time,
	// and never taken back here: the scanner does that, when it finds the session
	// not ready. A session that is claimed and settled leaves the index alone.
	if s.readyDueAt == nil || s.readyDueAt.After(due.Add(late)) {
		s.readyDueAt = &due
	}
	return ready, nil
}

// announceAt is when the scanner announces what is due at a time. What is due
// now is announced by who made it so, and the scanner only makes up for one that
// died; what is due later is the scanner's, at its time.
func (t *txn) announceAt(due time.Time) time.Time {
	if due.After(t.now) {
		return due
	}
	return t.now.Add(t.opts.AnnounceGrace)
}

// end is the one place that ends an execution (I22): its event, the claim's
// removal by the statement of who removes it, and the rearming of what is
// pending, together.
func (t *txn) end(ctx context.Context, outcome claims.ExecutionOutcome, remove func()) (claims.Settlement, error) {
	t.executionEvent(claims.ExecutionEnded, claims.ExecutionEndedData{Outcome: outcome})
	remove()
	t.c, t.s.execution = nil, nil
	ready, err := t.rearm(ctx)
	return claims.Settlement{Outcome: outcome, Ready: ready}, err
}

// ownRemoval removes a claim as its owner, in the phase that was read.
func (t *txn) ownRemoval() {
	t.must(sql.RemoveClaims, []string{string(t.id)}, []string{string(t.c.execution)}, []string{string(t.c.phase)})
}

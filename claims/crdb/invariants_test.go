package crdb_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"reveille/claims"
)

// sessionState is what the tables say of one session.
type sessionState struct {
	id                      string
	epoch                   int64
	execution, quarantine   *string
	lastSeq, relayed        int64
	position                int64
	unarmed, armed, delayed int64
	wakes, served           int64
	wokenAt                 *time.Time
	promised, continuations int64
	readyAt, readyDueAt     *time.Time
	relayDueAt, keptSince   *time.Time
	updatedAt               time.Time

	claim   *claimState
	inputs  []inputState
	due     []time.Time // of armed inputs, delayed wakes, continuations
	conts   []contState
	delays  int64
	log     []claims.Record
	isQuar  bool
	quarIDs string
	quarEv  string
}

type claimState struct {
	execution, ranAs string
	epoch            int64
	phase            string
	steps            int64
	step             *string
}

type inputState struct {
	id, state string
	position  int64
	notBefore time.Time
	step      *string
}

type contState struct {
	number int64
	body   string
}

// checkInvariants reads the tables of a database and fails the test for each session that breaks an invariant of
// docs/design.md; with only, of the sessions that it says. It is one snapshot, so that it may be called while others write.
func checkInvariants(t testing.TB, url string, only func(session string) bool) {
	t.Helper()
	ctx := context.Background()
	c, err := pgx.Connect(ctx, url)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close(ctx)
	tx, err := c.BeginTx(ctx, pgx.TxOptions{IsoLevel: pgx.RepeatableRead, AccessMode: pgx.ReadOnly})
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = tx.Rollback(ctx) }()
	all, err := readSessions(ctx, tx)
	if err != nil {
		t.Fatal(err)
	}
	for _, s := range all {
		if only != nil && !only(s.id) {
			continue
		}
		for _, err := range s.broken() {
			t.Errorf("session %s: %v\nlog: %s", s.id, err, s.story())
		}
	}
	if t.Failed() {
		t.FailNow()
	}
}

func (s *sessionState) story() string {
	var out []string
	for _, r := range s.log {
		out = append(out, brief(r))
	}
	return strings.Join(out, " ")
}

// each runs a query and gives every row to f.
func each(ctx context.Context, tx pgx.Tx, sql string, f func(pgx.Rows) error) error {
	rows, err := tx.Query(ctx, sql)
	if err != nil {
		return err
	}
	defer rows.Close()
	for rows.Next() {
		if err := f(rows); err != nil {
			return fmt.Errorf("%s: %w", sql, err)
		}
	}
	return rows.Err()
}

func readSessions(ctx context.Context, tx pgx.Tx) ([]*sessionState, error) {
	var all []*sessionState
	byID := map[string]*sessionState{}
	of := func(id string) *sessionState {
		s := byID[id]
		if s == nil { // a row of no session: broken() says so, since its counters are zero
			s = &sessionState{id: id}
			byID[id], all = s, append(all, s)
		}
		return s
	}
	err := each(ctx, tx, `SELECT session_id, epoch, execution_id::TEXT, quarantine_id::TEXT, last_seq, relayed_seq, position, unarmed, armed, delayed,
		wakes, wakes_served, woken_at, promised, continuations, ready_at, ready_due_at, relay_due_at, kept_since, updated_at FROM sessions ORDER BY session_id`,
		func(r pgx.Rows) error {
			var s sessionState
			err := r.Scan(&s.id, &s.epoch, &s.execution, &s.quarantine, &s.lastSeq, &s.relayed, &s.position, &s.unarmed, &s.armed, &s.delayed,
				&s.wakes, &s.served, &s.wokenAt, &s.promised, &s.continuations, &s.readyAt, &s.readyDueAt, &s.relayDueAt, &s.keptSince, &s.updatedAt)
			byID[s.id], all = &s, append(all, &s)
			return err
		})
	return all, errors.Join(
		err,
		each(ctx, tx, `SELECT session_id, execution_id::TEXT, ran_as::TEXT, epoch, phase, steps, step_id::TEXT FROM claims`, func(r pgx.Rows) error {
			var id string
			var c claimState
			err := r.Scan(&id, &c.execution, &c.ranAs, &c.epoch, &c.phase, &c.steps, &c.step)
			of(id).claim = &c
			return err
		}),
		each(ctx, tx, `SELECT session_id, input_id, state, position, not_before, step_id::TEXT FROM inputs ORDER BY session_id, position`, func(r pgx.Rows) error {
			var id string
			var in inputState
			err := r.Scan(&id, &in.id, &in.state, &in.position, &in.notBefore, &in.step)
			s := of(id)
			s.inputs = append(s.inputs, in)
			if in.state == "armed" {
				s.due = append(s.due, in.notBefore)
			}
			return err
		}),
		each(ctx, tx, `SELECT session_id, not_before FROM wakes`, func(r pgx.Rows) error {
			var id string
			var at time.Time
			err := r.Scan(&id, &at)
			s := of(id)
			s.delays++
			s.due = append(s.due, at)
			return err
		}),
		each(ctx, tx, `SELECT session_id, number, not_before, body FROM continuations ORDER BY session_id, number`, func(r pgx.Rows) error {
			var id string
			var at time.Time
			var c contState
			err := r.Scan(&id, &c.number, &at, &c.body)
			s := of(id)
			s.conts = append(s.conts, c)
			s.due = append(s.due, at)
			return err
		}),
		each(ctx, tx, `SELECT session_id, quarantine_id::TEXT, evidence FROM quarantines`, func(r pgx.Rows) error {
			var id, quarantine, evidence string
			err := r.Scan(&id, &quarantine, &evidence)
			s := of(id)
			s.isQuar, s.quarIDs, s.quarEv = true, quarantine, evidence
			return err
		}),
		each(ctx, tx, `SELECT session_id, first_seq, last_seq, epoch, lines FROM events ORDER BY session_id, last_seq`, func(r pgx.Rows) error {
			var id, lines string
			var first, last, epoch int64
			if err := r.Scan(&id, &first, &last, &epoch, &lines); err != nil {
				return err
			}
			return of(id).addAppend(first, last, epoch, lines)
		}),
	)
}

func (s *sessionState) addAppend(first, last, epoch int64, lines string) error {
	parts := strings.Split(lines, "\n")
	if int64(len(parts)) != last-first+1 {
		return fmt.Errorf("append %d to %d has %d lines", first, last, len(parts))
	}
	for i, line := range parts {
		r, err := claims.ParseRecord([]byte(line))
		if err != nil {
			return err
		}
		if r.Seq != first+int64(i) || r.Epoch > epoch {
			return fmt.Errorf("line %d of append %d to %d at epoch %d has seq %d and epoch %d", i, first, last, epoch, r.Seq, r.Epoch)
		}
		s.log = append(s.log, r)
	}
	return nil
}

func show(s *string) string {
	if s == nil {
		return "none"
	}
	return *s
}

// broken lists what is wrong with the session.
func (s *sessionState) broken() (out []error) {
	bad := func(format string, args ...any) { out = append(out, fmt.Errorf(format, args...)) }
	s.brokenCounters(bad)
	s.brokenReadiness(bad)
	s.brokenLog(bad)
	return out
}

func (s *sessionState) brokenCounters(bad func(string, ...any)) {
	n := map[string]int64{}
	var last int64
	for _, in := range s.inputs {
		n[in.state]++
		if in.position <= last {
			bad("input %s has position %d after %d", in.id, in.position, last)
		}
		last = in.position
	}
	if n["unarmed"] != s.unarmed || n["armed"] != s.armed || s.delays != s.delayed || int64(len(s.conts)) != s.continuations {
		bad("counters say %d unarmed, %d armed, %d delayed, %d continuations; rows say %d, %d, %d, %d",
			s.unarmed, s.armed, s.delayed, s.continuations, n["unarmed"], n["armed"], s.delays, len(s.conts))
	}
	if last > s.position {
		bad("position is %d, an input has %d", s.position, last)
	}
	if s.served > s.wakes || (s.wokenAt == nil) != (s.served == s.wakes) {
		bad("%d of %d wakes are served, woken at %v", s.served, s.wakes, s.wokenAt)
	}
	// I1, and the mirror by which a session without a claim does not read that table.
	switch {
	case (s.claim == nil) != (s.execution == nil):
		bad("session says execution %s, claim is %+v", show(s.execution), s.claim)
	case s.claim == nil:
	case s.claim.execution != *s.execution || s.claim.epoch != s.epoch:
		bad("session says %s at epoch %d, claim %s at %d", *s.execution, s.epoch, s.claim.execution, s.claim.epoch)
	case s.claim.phase == "cancelling" && s.claim.step == nil:
		bad("claim is cancelling without an open step")
	}
	// I30
	if (s.quarantine != nil) != s.isQuar || s.isQuar && s.quarIDs != *s.quarantine {
		bad("session says quarantine %s, the row says %q", show(s.quarantine), s.quarIDs)
	}
	if s.isQuar && s.claim != nil {
		bad("session is quarantined and has a claim")
	}
}

// brokenReadiness holds I22: ready_at is when what is pending is due, NULL iff nothing can start.
func (s *sessionState) brokenReadiness(bad func(string, ...any)) {
	pending := len(s.due) > 0 || s.wakes > s.served
	want := pending && s.claim == nil && !s.isQuar
	// The scanner's mark is for the ordinary lane; it may stay longer than it is needed, and is never missing.
	ordinary := s.armed > 0 || s.delayed > 0 || s.wakes > s.served
	switch {
	case want != (s.readyAt != nil) || want && ordinary && s.readyDueAt == nil:
		bad("ready at %v, due %v; %d pending, %d wakes, claim %v, quarantined %v", s.readyAt, s.readyDueAt, len(s.due), s.wakes-s.served, s.claim != nil, s.isQuar)
	case !want:
	case s.wakes > s.served:
		if s.readyAt.After(s.updatedAt) {
			bad("ready only at %v, a wake is there since %v", s.readyAt, s.updatedAt)
		}
	default:
		earliest := slices.MinFunc(s.due, time.Time.Compare)
		if s.readyAt.After(s.updatedAt) && !s.readyAt.Equal(earliest) || s.readyAt.Before(earliest) && earliest.After(s.updatedAt) {
			bad("ready at %v, the earliest is due at %v", s.readyAt, earliest)
		}
	}
	if (s.relayDueAt == nil) != (s.relayed == s.lastSeq) || s.relayed > s.lastSeq {
		bad("relayed %d of %d, due at %v", s.relayed, s.lastSeq, s.relayDueAt)
	}
}

// stepState is what the log says of a step.
type stepState struct {
	execution claims.ExecutionID
	inputs    []string
	continues *claims.Continues
	promoted  []string
	closed    bool
	continued bool // another step goes on with it
}

// pruned reports whether the retention lane took the beginning of the log, or all of it: what is left has no gap.
func (s *sessionState) pruned() bool {
	next := s.lastSeq + 1
	for _, r := range slices.Backward(s.log) {
		if next--; r.Seq != next {
			return false
		}
	}
	return next > 1 && s.keptSince == nil == (len(s.log) == 0)
}

// brokenLog holds I23 and I24 and the life of executions and steps against the log and the rows.
func (s *sessionState) brokenLog(bad func(string, ...any)) {
	if s.pruned() {
		return // what is gone can't be held against the rows
	}
	if n := len(s.log); int64(n) != s.lastSeq || n > 0 && (s.log[0].Seq != 1 || s.log[n-1].Seq != s.lastSeq) {
		bad("last_seq is %d, the log has %d events", s.lastSeq, n)
	}
	l := &logState{steps: map[claims.StepID]*stepState{}, inputs: map[string]string{}, ended: map[claims.ExecutionID]bool{}, indexes: map[claims.ExecutionID]int{}, bad: bad}
	for i, r := range s.log {
		if r.Seq != int64(i)+1 || string(r.Session) != s.id {
			bad("event %d of session %s stands at %d", r.Seq, r.Session, i+1)
		}
		l.event(r)
	}
	if l.epoch > s.epoch {
		bad("the log is at epoch %d, the session at %d", l.epoch, s.epoch)
	}
	var evidence struct {
		Claim *struct {
			RanAs  claims.ExecutionID `json:"ran_as"`
			StepID claims.StepID      `json:"step_id"`
		} `json:"claim"`
	}
	if s.isQuar {
		if err := json.Unmarshal([]byte(s.quarEv), &evidence); err != nil {
			bad("evidence: %v", err)
		}
	}
	// Every step is closed, but the one on the claim, or in the quarantine's evidence.
	for id, st := range l.steps {
		onClaim := s.claim != nil && s.claim.step != nil && *s.claim.step == string(id)
		inEvidence := evidence.Claim != nil && evidence.Claim.StepID == id
		if st.closed == (onClaim || inEvidence) {
			bad("step %s: closed %v, on the claim %v, in the evidence %v", id, st.closed, onClaim, inEvidence)
		}
	}
	for id, ended := range l.ended {
		if running := s.claim != nil && s.claim.ranAs == string(id); running == ended {
			bad("execution %s: ended %v, has a claim %v", id, ended, running)
		}
	}
	if s.claim != nil {
		if started, ok := l.indexes[claims.ExecutionID(s.claim.ranAs)]; !ok || int64(started) != s.claim.steps {
			bad("claim of %s says %d steps, the log %d", s.claim.ranAs, s.claim.steps, started)
		}
		if s.claim.step != nil && l.steps[claims.StepID(*s.claim.step)] == nil {
			bad("the claim's open step %s is not in the log", *s.claim.step)
		}
	}
	s.brokenInputs(l, bad)
	s.brokenContinuations(l, bad)
}

// brokenInputs holds I20 and I23: an input's row says what the log says of it.
func (s *sessionState) brokenInputs(l *logState, bad func(string, ...any)) {
	for _, in := range s.inputs {
		got, ok := l.inputs[in.id]
		want := map[string]string{"unarmed": "admitted", "armed": "admitted", "covered": "promoted", "cancelled": "cancelled", "quarantined": "admitted"}[in.state]
		if !ok || got != want {
			bad("input %s is %s, the log says %q", in.id, in.state, got)
		}
		if (in.step != nil) != (in.state == "covered") {
			bad("input %s is %s, covered by %s", in.id, in.state, show(in.step))
		}
		if in.step == nil {
			continue
		}
		if st := l.steps[claims.StepID(*in.step)]; st == nil || !slices.Contains(st.promoted, in.id) {
			bad("input %s is covered by step %s, which did not promote it", in.id, *in.step)
		}
	}
	if len(l.inputs) != len(s.inputs) {
		bad("the log has %d inputs, the table %d", len(l.inputs), len(s.inputs))
	}
}

// brokenContinuations: each pending one goes on with a closed step that nothing else goes on with. One that does not
// decode is a test's own poison.
func (s *sessionState) brokenContinuations(l *logState, bad func(string, ...any)) {
	seen := map[claims.StepID]bool{}
	for _, row := range s.conts {
		c, poison := claims.DecodeContinuation(claims.SessionID(s.id), row.number, s.epoch, []byte(row.body))
		if poison != nil {
			continue
		}
		st := l.steps[c.Step]
		if row.number > s.promised || st == nil || !st.closed || st.continued || seen[c.Step] {
			bad("continuation %d of %d goes on with step %s: %+v, twice %v", row.number, s.promised, c.Step, st, seen[c.Step])
			continue
		}
		if len(c.Inputs) > 0 && !slices.Equal(c.Inputs, st.inputs) {
			bad("continuation %d gives %v again, its step had %v", row.number, c.Inputs, st.inputs)
		}
		seen[c.Step] = true
	}
}

// logState replays a log.
type logState struct {
	bad     func(string, ...any)
	epoch   int64
	running claims.ExecutionID
	open    claims.StepID
	left    claims.StepID // open when its session was quarantined
	leftBy  claims.ExecutionID
	steps   map[claims.StepID]*stepState
	inputs  map[string]string
	ended   map[claims.ExecutionID]bool
	indexes map[claims.ExecutionID]int
	pending []string // promoted, their step not yet started
}

func (l *logState) event(r claims.Record) {
	if r.Epoch != 0 {
		if r.Epoch < l.epoch { // I24
			l.bad("event %d has epoch %d after %d", r.Seq, r.Epoch, l.epoch)
		}
		l.epoch = r.Epoch
	}
	if r.Execution != "" && r.Type != claims.ExecutionStarted && r.Execution != l.running {
		l.bad("event %d %s is of execution %s, %q runs", r.Seq, r.Type, r.Execution, l.running)
	}
	var d struct {
		Index     int
		Inputs    []string
		Continues *claims.Continues
		Input     string
	}
	if err := json.Unmarshal(r.Data, &d); err != nil {
		l.bad("event %d: %v", r.Seq, err)
	}
	switch r.Type {
	case claims.InputAdmitted, claims.InputPromoted, claims.InputCancelled:
		l.input(r, d.Input)
	case claims.ExecutionStarted:
		if _, twice := l.ended[r.Execution]; twice || l.running != "" {
			l.bad("execution %s starts, twice %v, while %q runs", r.Execution, twice, l.running)
		}
		l.running, l.ended[r.Execution] = r.Execution, false
	case claims.ExecutionEnded:
		// A step may be open still where the session is quarantined; that is held against the rows. A release closes it.
		l.left, l.leftBy = l.open, l.running
		l.ended[r.Execution], l.running, l.open = true, "", ""
	case claims.SessionReleased:
		if l.left != "" {
			l.open, l.running, l.left = l.left, l.leftBy, ""
		}
	case claims.StepStartedEvent:
		l.start(r, d.Index, d.Inputs, d.Continues)
	case claims.StepEndedEvent, claims.StepFailedEvent, claims.StepInterruptedEvent:
		if l.open == "" || l.open != r.Step {
			l.bad("event %d %s closes step %s, %q is open", r.Seq, r.Type, r.Step, l.open)
			return
		}
		l.steps[r.Step].closed, l.open = true, ""
		if l.ended[l.running] {
			l.running = ""
		}
	case claims.TextEvent, claims.ToolCalled, claims.ToolSucceeded, claims.ToolFailed, claims.SnapshotEvent, claims.ExecutionCancelling:
		if l.open == "" || l.open != r.Step {
			l.bad("event %d %s is of step %s, %q is open", r.Seq, r.Type, r.Step, l.open)
		}
	}
}

func (l *logState) input(r claims.Record, id string) {
	was, there := l.inputs[id]
	switch {
	case r.Type == claims.InputAdmitted && !there:
		l.inputs[id] = "admitted"
	case r.Type == claims.InputPromoted && was == "admitted":
		l.inputs[id] = "promoted"
		l.pending = append(l.pending, id)
	case r.Type == claims.InputCancelled && was == "admitted":
		l.inputs[id] = "cancelled"
	default:
		l.bad("event %d %s of input %s that was %q", r.Seq, r.Type, id, was)
	}
}

func (l *logState) start(r claims.Record, index int, inputs []string, continues *claims.Continues) {
	l.indexes[r.Execution]++
	if l.open != "" || l.steps[r.Step] != nil || index != l.indexes[r.Execution] {
		l.bad("step %s starts at index %d, want %d, while %q is open", r.Step, index, l.indexes[r.Execution], l.open)
	}
	l.steps[r.Step] = &stepState{execution: r.Execution, inputs: inputs, continues: continues, promoted: l.pending}
	// I23: covered by this step, or given again by the continuation of the one that was.
	if continues == nil {
		if !slices.Equal(l.pending, inputs) {
			l.bad("step %s starts with %v, promoted were %v", r.Step, inputs, l.pending)
		}
	} else {
		from := l.steps[continues.Step]
		if from == nil || !from.closed || from.continued || len(l.pending) > 0 || len(inputs) > 0 && !slices.Equal(inputs, from.inputs) {
			l.bad("step %s with %v goes on with step %s: %+v, promoted %v", r.Step, inputs, continues.Step, from, l.pending)
		}
		if from != nil {
			from.continued = true
		}
	}
	l.open, l.pending = r.Step, nil
}

package crdb_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"

	"reveille/claims"
	"reveille/claims/crdb"
	"reveille/internal/dbtest"
)

// rig is a store over a database of its own, one session on it, and the worker and the scanner that want it. The
// scenarios are methods and functions on it, so that each runs plainly and behind the fault proxy.
type rig struct {
	t     testing.TB
	store *crdb.Store
	url   string    // of the database itself, never of a proxy
	db    *pgx.Conn // beside the store, for what only SQL brings about

	session   claims.SessionID
	holder    claims.HolderID // a worker with a live lease
	scanner   claims.HolderID // a scanner with a live lease
	seq       int64           // of the last command
	claim     claims.Claim    // what runs
	step      claims.Step
	acq       claims.Acquisition // the last one asked
	candidate claims.Candidate

	// What the last operation answered.
	out      claims.Outcome
	settled  claims.Settlement
	nextStep *claims.Step
	token    *claims.Token // the last one used
}

const longLease = time.Hour

func newRig(t testing.TB) *rig {
	t.Helper()
	url := dbtest.New(t)
	return rigOn(t, url, url, crdb.Options{})
}

// rigOn is a rig on the database of url whose store connects to through.
func rigOn(t testing.TB, url, through string, o crdb.Options) *rig {
	t.Helper()
	s, err := crdb.Open(t.Context(), through, o)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(s.Close)
	r := &rig{t: t, store: s, url: url, db: connect(t, url)}
	return r.fresh("s")
}

func connect(t testing.TB, url string) *pgx.Conn {
	t.Helper()
	c, err := pgx.Connect(t.Context(), url)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = c.Close(context.Background()) })
	return c
}

// fresh is a rig for another session, worker and scanner of the same database.
func (r *rig) fresh(session string) *rig {
	r.t.Helper()
	n := &rig{t: r.t, store: r.store, url: r.url, db: r.db, session: claims.SessionID(session)}
	n.holder, n.scanner = n.lease("worker", longLease), n.lease("scanner", longLease)
	return n
}

// as is a rig for the same session with a store, worker and scanner of its own: another process.
func (r *rig) as(through string) *rig {
	r.t.Helper()
	n := rigOn(r.t, r.url, through, crdb.Options{})
	n.session, n.seq = r.session, r.seq
	return n
}

func newID() string { return uuid.NewString() }

// newToken also remembers it.
func (r *rig) newToken() *claims.Token {
	r.token = &claims.Token{ID: newID()}
	return r.token
}

// lease opens a lease by SQL, so that the store under test is not asked.
func (r *rig) lease(kind string, ttl time.Duration) claims.HolderID {
	r.t.Helper()
	h := newID()
	r.exec(`INSERT INTO leases (holder, kind, name, version, slots, started_at, expires_at)
		VALUES ($1, $2, $2, 'test', 4, statement_timestamp(), statement_timestamp() + $3::INT8 * INTERVAL '1 microsecond')`, h, kind, ttl.Microseconds())
	return claims.HolderID(h)
}

func (r *rig) ctx() context.Context { return r.t.Context() }

func (r *rig) exec(sql string, args ...any) int64 {
	r.t.Helper()
	tag, err := r.db.Exec(context.Background(), sql, args...)
	if err != nil {
		r.t.Fatalf("%s: %v", sql, err)
	}
	return tag.RowsAffected()
}

func scan[T any](r *rig, sql string, args ...any) (v T) {
	r.t.Helper()
	if err := r.db.QueryRow(context.Background(), sql, args...).Scan(&v); err != nil {
		r.t.Fatalf("%s: %v", sql, err)
	}
	return v
}

func (r *rig) ok(err error) {
	r.t.Helper()
	if err != nil {
		r.t.Fatal(err)
	}
}

func (r *rig) wantErr(err, want error) {
	r.t.Helper()
	if !errors.Is(err, want) {
		r.t.Fatalf("answered %v, want %v", err, want)
	}
}

// expire makes a lease an expired one.
func (r *rig) expire(h claims.HolderID) {
	r.t.Helper()
	r.exec(`UPDATE leases SET expires_at = statement_timestamp() - INTERVAL '1 second' WHERE holder = $1`, string(h))
}

// pass lets time pass for what waits: every input, wake and continuation that is not due becomes due.
func (r *rig) pass() {
	r.t.Helper()
	for _, sql := range []string{
		`UPDATE inputs SET not_before = statement_timestamp() - INTERVAL '1 second' WHERE session_id = $1 AND not_before > statement_timestamp()`,
		`UPDATE wakes SET not_before = statement_timestamp() - INTERVAL '1 second' WHERE session_id = $1 AND not_before > statement_timestamp()`,
		`UPDATE continuations SET not_before = statement_timestamp() - INTERVAL '1 second', due_at = statement_timestamp() - INTERVAL '1 second'
		 WHERE session_id = $1 AND not_before > statement_timestamp()`,
		`UPDATE sessions SET ready_at = statement_timestamp() - INTERVAL '1 second', ready_due_at = statement_timestamp() - INTERVAL '1 second'
		 WHERE session_id = $1 AND ready_at > statement_timestamp()`,
	} {
		r.exec(sql, string(r.session))
	}
}

// command is the next one of the session's stream.
func (r *rig) command(kind claims.CommandKind) claims.Command {
	r.seq++
	return claims.Command{Kind: kind, Session: r.session, Sequence: r.seq, Time: r.seq * 1_000_000_007}
}

func input(id string) *claims.Input {
	return &claims.Input{ID: id, Delivery: claims.Queue, Body: json.RawMessage(`{"of":"` + id + `"}`)}
}

func steer(id string) *claims.Input {
	in := input(id)
	in.Delivery = claims.Steer
	return in
}

func (r *rig) apply(cmd claims.Command, acq *claims.Acquisition) error {
	out, err := r.store.Apply(r.ctx(), cmd, acq)
	r.out = out
	if err == nil && out.Started != nil {
		r.claim, r.step = out.Started.Claim, out.Started.Step
	}
	return err
}

func (r *rig) admit(ins ...*claims.Input) {
	r.t.Helper()
	for _, in := range ins {
		cmd := r.command(claims.Admit)
		cmd.Input = in
		r.ok(r.apply(cmd, nil))
	}
}

// wake wakes the session for each input, with no slot free; without any it is a bare wake.
func (r *rig) wake(ins ...*claims.Input) {
	r.t.Helper()
	if len(ins) == 0 {
		ins = []*claims.Input{nil}
	}
	for _, in := range ins {
		cmd := r.command(claims.Wake)
		cmd.Input = in
		r.ok(r.apply(cmd, nil))
	}
}

func (r *rig) wakeAt(in *claims.Input, delay time.Duration) {
	r.t.Helper()
	cmd := r.command(claims.Wake)
	cmd.Input, cmd.NotBefore = in, scan[time.Time](r, "SELECT statement_timestamp()").Add(delay)
	r.ok(r.apply(cmd, nil))
}

func (r *rig) newAcquisition() *claims.Acquisition {
	r.acq = claims.Acquisition{Holder: r.holder, Worker: "w", Execution: claims.ExecutionID(newID()), Step: claims.StepID(newID())}
	return &r.acq
}

// run wakes the session with a free slot and demands that it starts.
func (r *rig) run(in *claims.Input) {
	r.t.Helper()
	cmd := r.command(claims.Wake)
	cmd.Input = in
	r.ok(r.apply(cmd, r.newAcquisition()))
	if r.out.Started == nil {
		r.t.Fatalf("the wake did not start the session: %+v", r.out)
	}
}

func (r *rig) acquire() error {
	started, err := r.store.Acquire(r.ctx(), r.session, *r.newAcquisition())
	if err == nil {
		r.claim, r.step = started.Claim, started.Step
	}
	return err
}

func (r *rig) interruptCmd(change func(*claims.Command)) claims.Command {
	cmd := r.command(claims.Interrupt)
	cmd.Reason = "stop"
	if change != nil {
		change(&cmd)
	}
	return cmd
}

func (r *rig) interrupt() {
	r.t.Helper()
	r.ok(r.apply(r.interruptCmd(nil), nil))
}

func (r *rig) interruptOf(e claims.ExecutionID) {
	r.t.Helper()
	r.ok(r.apply(r.interruptCmd(func(c *claims.Command) { c.Execution = e }), nil))
}

func (r *rig) discard() {
	r.t.Helper()
	r.ok(r.apply(r.interruptCmd(func(c *claims.Command) { c.Discard = true }), nil))
}

func (r *rig) finish(change func(*claims.Ending)) error {
	e := claims.Ending{Step: r.step}
	if change != nil {
		change(&e)
	}
	var err error
	r.settled, err = r.store.Finish(r.ctx(), r.claim, e, r.newToken())
	return err
}

func continued(e *claims.Ending) { e.Continue = true }

func failed(e *claims.Ending) {
	e.Failure = &claims.Failure{Code: claims.CodeHandler, Message: "no"}
}

func retried(e *claims.Ending) {
	failed(e)
	e.Failure.Retryable = true
	d := time.Hour
	e.Retry = &d
}

func (r *rig) startStep() error {
	var err error
	r.nextStep, r.settled, err = r.store.StartStep(r.ctx(), r.claim, claims.StepID(newID()), r.newToken())
	if err == nil && r.nextStep != nil {
		r.step = *r.nextStep
	}
	return err
}

func (r *rig) record(text string) error {
	return r.store.Record(r.ctx(), r.claim, r.step, []claims.Content{{Type: claims.TextEvent, Data: claims.TextData{Text: text}}}, r.newToken())
}

func (r *rig) decline() error {
	return r.store.Decline(r.ctx(), r.claim, r.step, nil, "a person refused", r.newToken())
}

func (r *rig) settle() (err error) {
	r.settled, err = r.store.Settle(r.ctx(), r.claim, nil, r.newToken())
	return err
}

func (r *rig) handOver() (err error) {
	r.settled, err = r.store.HandOver(r.ctx(), r.claim, nil, r.newToken())
	return err
}

// lose makes the claim one of a dead worker, and the candidate of a scanner.
func (r *rig) lose() {
	r.t.Helper()
	r.expire(r.holder)
	r.find()
}

// find reads the claim as a scanner's candidate. (How the scanner finds it: TestExpiredClaims.)
func (r *rig) find() {
	r.t.Helper()
	c := claims.Candidate{Session: r.session}
	err := r.db.QueryRow(context.Background(), "SELECT execution_id::TEXT, phase, revoked, due_at FROM claims WHERE session_id = $1", string(r.session)).
		Scan(&c.Execution, &c.Phase, &c.Revoked, &c.DueAt)
	r.ok(err)
	r.candidate = c
}

func (r *rig) takeOver() error {
	claim, err := r.store.TakeOver(r.ctx(), r.candidate, r.scanner, claims.ExecutionID(newID()))
	if err == nil {
		r.claim = claim
	}
	return err
}

var manyLimits = claims.Limits{Recoveries: 3, Takeovers: 10}

func (r *rig) convert() (err error) {
	r.settled, err = r.store.Convert(r.ctx(), r.claim, manyLimits, r.newToken())
	return err
}

func (r *rig) endExpired(uncertainInterrupted bool) (err error) {
	r.settled, err = r.store.EndExpired(r.ctx(), r.candidate, uncertainInterrupted, r.newToken())
	return err
}

// log reads the session's events from the table.
func (r *rig) log() []claims.Record {
	r.t.Helper()
	rows, err := r.db.Query(context.Background(), "SELECT lines FROM events WHERE session_id = $1 ORDER BY last_seq", string(r.session))
	r.ok(err)
	all, err := pgx.CollectRows(rows, pgx.RowTo[string])
	r.ok(err)
	var out []claims.Record
	for _, lines := range all {
		for line := range strings.SplitSeq(lines, "\n") {
			rec, err := claims.ParseRecord([]byte(line))
			r.ok(err)
			out = append(out, rec)
		}
	}
	return out
}

// brief is an event in one word, with what tells it from others of its type.
func brief(rec claims.Record) string {
	var d struct {
		Input     string
		Inputs    []string
		Outcome   string
		Kind      string
		Code      string
		Joined    *bool
		Reason    string
		How       string
		Continues *claims.Continues
	}
	if err := json.Unmarshal(rec.Data, &d); err != nil {
		return err.Error()
	}
	s := string(rec.Type)
	switch rec.Type {
	case claims.InputAdmitted, claims.InputPromoted, claims.InputCancelled:
		s += "(" + d.Input + ")"
	case claims.StepStartedEvent:
		s += "(" + strings.Join(d.Inputs, "+")
		if d.Continues != nil {
			s += fmt.Sprintf("<%s%d", d.Continues.Kind, d.Continues.Attempt)
		}
		s += ")"
	case claims.ExecutionEnded:
		s += "(" + d.Outcome + ")"
	case claims.StepFailedEvent:
		s += "(" + d.Code + ")"
	case claims.StepInterruptedEvent:
		if d.Joined != nil && !*d.Joined {
			s += "(unjoined)"
		}
	case claims.ContinuationCancelled:
		s += "(" + d.Kind + ")"
	case claims.SessionQuarantined:
		s += "(" + d.Reason + ")"
	case claims.SessionReleased:
		s += "(" + d.How + ")"
	}
	return s
}

func (r *rig) briefs() []string {
	r.t.Helper()
	var out []string
	for _, rec := range r.log() {
		out = append(out, brief(rec))
	}
	return out
}

// wantTail demands that the log ends with these events, separated by blanks, and begins with skip others.
func (r *rig) wantTail(skip int, want string) {
	r.t.Helper()
	got := r.briefs()
	if len(got) < skip {
		r.t.Fatalf("the log lost events: %s", strings.Join(got, " "))
	}
	if tail := strings.Join(got[skip:], " "); tail != strings.Join(strings.Fields(want), " ") {
		r.t.Fatalf("log of %s after %d events:\n got %s\nwant %s", r.session, skip, tail, strings.Join(strings.Fields(want), " "))
	}
}

func (r *rig) wantLog(want string) {
	r.t.Helper()
	r.wantTail(0, want)
}

// wantClaim demands a phase of the session's claim, with or without an open step; "" is no claim.
func (r *rig) wantClaim(phase claims.Phase, open bool) {
	r.t.Helper()
	var got claims.Phase
	var step *string
	err := r.db.QueryRow(context.Background(), "SELECT phase, step_id::TEXT FROM claims WHERE session_id = $1", string(r.session)).Scan(&got, &step)
	if err != nil && !errors.Is(err, pgx.ErrNoRows) {
		r.t.Fatal(err)
	}
	if got != phase || (step != nil) != open {
		r.t.Fatalf("claim of %s is %q with step %v, want %q, open %v", r.session, got, step, phase, open)
	}
}

// wantReady demands whether the session is ready now.
func (r *rig) wantReady(want bool) {
	r.t.Helper()
	if got := scan[bool](r, "SELECT COALESCE(ready_at <= statement_timestamp(), FALSE) FROM sessions WHERE session_id = $1", string(r.session)); got != want {
		r.t.Fatalf("ready is %v, want %v", got, want)
	}
}

func (r *rig) wantSettled(want claims.Settlement) {
	r.t.Helper()
	want.Reason = r.settled.Reason // of a quarantine; the log says which
	if r.settled != want {
		r.t.Fatalf("answered %+v, want %+v", r.settled, want)
	}
}

// check is the invariants of the session.
func (r *rig) check() {
	r.t.Helper()
	checkInvariants(r.t, r.url, func(id string) bool { return id == string(r.session) })
}

// checkAll is the invariants of the whole database.
func (r *rig) checkAll() {
	r.t.Helper()
	checkInvariants(r.t, r.url, nil)
}

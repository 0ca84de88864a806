// Package pooltest holds the tests of runner.Pool over the real store: the
// regressions of claims and cancellation. Gates hold a store's operation before
// it begins or after it has committed; nothing here sleeps.
package pooltest

import (
	"context"
	"encoding/json"
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"go.uber.org/goleak"

	"reveille/claims"
	"reveille/claims/crdb"
	"reveille/internal/dbtest"
	"reveille/runner"
)

func TestMain(m *testing.M) {
	goleak.VerifyTestMain(dbtest.With(m, func(ctx context.Context, url string) error {
		_, err := crdb.Migrate(ctx, url, false)
		return err
	}))
}

// gate holds the operations that pass it. reached receives once for each that
// arrives; each goes on when open receives or is closed.
type gate struct {
	reached chan struct{}
	open    chan struct{}
	stands  bool // it holds all that come, and not only the first
}

func newGate() *gate { return &gate{reached: make(chan struct{}, 100), open: make(chan struct{})} }

func (g *gate) pass() {
	g.reached <- struct{}{}
	<-g.open
}

// gated is the real store with gates around its operations: "before:finish",
// "after:apply" and so on. fail answers an operation with an error after it has
// committed, as a lost answer does.
type gated struct {
	*crdb.Store
	mu    sync.Mutex
	gates map[string]*gate
	fails map[string]error
	calls map[string]int
}

func (g *gated) gate(at string) *gate {
	g.mu.Lock()
	defer g.mu.Unlock()
	gt := newGate()
	g.gates[at] = gt
	return gt
}

// standing is a gate that stays.
func (g *gated) standing(at string) *gate {
	gt := g.gate(at)
	g.mu.Lock()
	defer g.mu.Unlock()
	gt.stands = true
	return gt
}

func (g *gated) failOnce(op string, err error) {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.fails[op] = err
}

func (g *gated) around(op string, f func() error) error {
	g.at("before:" + op)
	err := f()
	g.at("after:" + op)
	g.mu.Lock()
	defer g.mu.Unlock()
	if lost := g.fails[op]; lost != nil && err == nil {
		delete(g.fails, op)
		return lost
	}
	return err
}

func (g *gated) at(where string) {
	g.mu.Lock()
	gt := g.gates[where]
	if gt != nil && !gt.stands {
		delete(g.gates, where)
	}
	g.mu.Unlock()
	if gt != nil {
		gt.pass()
	}
}

func (g *gated) Apply(ctx context.Context, cmd claims.Command, acq *claims.Acquisition) (out claims.Outcome, err error) {
	err = g.around("apply_"+string(cmd.Kind), func() (err error) { out, err = g.Store.Apply(ctx, cmd, acq); return err })
	return out, err
}

func (g *gated) Acquire(ctx context.Context, s claims.SessionID, acq claims.Acquisition) (st claims.Started, err error) {
	err = g.around("acquire", func() (err error) { st, err = g.Store.Acquire(ctx, s, acq); return err })
	return st, err
}

func (g *gated) StartStep(ctx context.Context, c claims.Claim, id claims.StepID, tok *claims.Token) (st *claims.Step, s claims.Settlement, err error) {
	err = g.around("start_step", func() (err error) { st, s, err = g.Store.StartStep(ctx, c, id, tok); return err })
	return st, s, err
}

func (g *gated) Record(ctx context.Context, c claims.Claim, st claims.Step, content []claims.Content, tok *claims.Token) error {
	return g.around("record", func() error { return g.Store.Record(ctx, c, st, content, tok) })
}

func (g *gated) Finish(ctx context.Context, c claims.Claim, e claims.Ending, tok *claims.Token) (s claims.Settlement, err error) {
	err = g.around("finish", func() (err error) { s, err = g.Store.Finish(ctx, c, e, tok); return err })
	return s, err
}

func (g *gated) Settle(ctx context.Context, c claims.Claim, tail []claims.Content, tok *claims.Token) (s claims.Settlement, err error) {
	err = g.around("settle", func() (err error) { s, err = g.Store.Settle(ctx, c, tail, tok); return err })
	return s, err
}

func (g *gated) HandOver(ctx context.Context, c claims.Claim, tail []claims.Content, tok *claims.Token) (s claims.Settlement, err error) {
	err = g.around("hand_over", func() (err error) { s, err = g.Store.HandOver(ctx, c, tail, tok); return err })
	return s, err
}

func (g *gated) Held(ctx context.Context, h claims.HolderID) ([]claims.Notice, error) {
	g.mu.Lock()
	g.calls["held"]++
	g.mu.Unlock()
	return g.Store.Held(ctx, h)
}

func (g *gated) count(op string) int {
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.calls[op]
}

func newID() string { return uuid.NewString() }

func (g *gated) Heartbeat(ctx context.Context, h claims.HolderID, ttl time.Duration) (ok bool, err error) {
	err = g.around("heartbeat", func() (err error) { ok, err = g.Store.Heartbeat(ctx, h, ttl); return err })
	return ok, err
}

// call is one call of the handler, in the hands of the test.
type call struct {
	ctx    context.Context
	req    runner.Request
	out    *runner.Output
	answer chan func() (runner.Result, error)
}

func (c *call) end()           { c.returns(runner.Result{}, nil) }
func (c *call) fail(err error) { c.returns(runner.Result{}, err) }
func (c *call) returns(r runner.Result, err error) {
	c.answer <- func() (runner.Result, error) { return r, err }
}

// told collects what a pool tells others.
type told struct {
	mu        sync.Mutex
	announced []claims.SessionID
	signal    chan claims.SessionID
}

func (e *told) Announce(_ context.Context, s claims.SessionID) error {
	e.mu.Lock()
	e.announced = append(e.announced, s)
	e.mu.Unlock()
	select {
	case e.signal <- s:
	default:
	}
	return nil
}
func (e *told) Poke(claims.SessionID)                                      {}
func (e *told) PublishLive(claims.SessionID, int64, claims.StepID, string) {}

// world is a database and the pools that work on it.
type world struct {
	t    *testing.T
	url  string
	db   *pgx.Conn
	seq  atomic.Int64
	live []*member
}

// member is one worker: a pool with its store, and the calls of its handler.
type member struct {
	w       *world
	store   *gated
	pool    *runner.Pool
	calls   chan *call
	told    *told
	handler runner.Handler
	lines   chan string // of its log, the first thousand that nobody read
	end     func()
}

func newWorld(t *testing.T) *world {
	t.Helper()
	w := &world{t: t, url: dbtest.New(t)}
	var err error
	if w.db, err = pgx.Connect(t.Context(), w.url); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = w.db.Close(context.Background()) })
	return w
}

func options() runner.Options {
	return runner.Options{
		LeaseOptions: runner.LeaseOptions{
			Lease: time.Minute, Heartbeat: 20 * time.Second, MaxClockSkew: time.Second, StopMargin: time.Second, DBTimeout: 10 * time.Second,
		},
		Worker: "w", Slots: 8, JoinTimeout: time.Minute, KillAfter: time.Minute, MaxSteps: 100, MaxAttempts: 5,
		RetryBase: time.Millisecond, RetryMax: time.Millisecond, History: 20,
	}
}

// worker starts a worker and waits for its lease.
func (w *world) worker(o runner.Options) *member { w.t.Helper(); return w.workerWith(o, nil) }

// workerWith wraps the handler.
func (w *world) workerWith(o runner.Options, with func(runner.Handler) runner.Handler) *member {
	w.t.Helper()
	store, err := crdb.Open(w.t.Context(), w.url, crdb.Options{Timeout: 10 * time.Second, AnnounceGrace: time.Nanosecond})
	if err != nil {
		w.t.Fatal(err)
	}
	m := &member{
		w: w, calls: make(chan *call, 100), lines: make(chan string, 1000), told: &told{signal: make(chan claims.SessionID, 100)},
		store: &gated{Store: store, gates: map[string]*gate{}, fails: map[string]error{}, calls: map[string]int{}},
	}
	m.handler = runner.HandlerFunc(func(ctx context.Context, req runner.Request, out *runner.Output) (runner.Result, error) {
		c := &call{ctx: ctx, req: req, out: out, answer: make(chan func() (runner.Result, error), 1)}
		m.calls <- c
		return (<-c.answer)()
	})
	if with != nil {
		m.handler = with(m.handler)
	}
	log := slog.New(slog.NewTextHandler(testWriter{w.t, m.lines}, &slog.HandlerOptions{Level: slog.LevelDebug}))
	if m.pool, err = runner.NewPool(m.store, m.told, m.handler, o, nil, log); err != nil {
		w.t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan struct{})
	go func() {
		defer close(done)
		_ = m.pool.Run(ctx)
	}()
	m.end = sync.OnceFunc(func() {
		m.pool.Drain()
		cancel()
		<-done
		store.Close()
	})
	w.t.Cleanup(m.end)
	w.wait("a lease", m.pool.Keeper().Opened())
	w.live = append(w.live, m)
	return m
}

// testWriter writes a log to the test's, and gives it to who waits for a line.
type testWriter struct {
	t     *testing.T
	lines chan string
}

func (w testWriter) Write(b []byte) (int, error) {
	line := strings.TrimSpace(string(b))
	w.t.Log(line)
	select {
	case w.lines <- line:
	default:
	}
	return len(b), nil
}

// awaitLog waits until the member's log says something.
func (m *member) awaitLog(text string) {
	m.w.t.Helper()
	for !strings.Contains(wait(m.w, fmt.Sprintf("log line with %q", text), m.lines), text) {
	}
}

const patience = 30 * time.Second

func wait[T any](w *world, what string, c <-chan T) T {
	w.t.Helper()
	select {
	case v := <-c:
		return v
	case <-time.After(patience):
		w.t.Fatalf("no %s within %v", what, patience)
		panic("unreachable")
	}
}

func (w *world) wait(what string, c <-chan struct{}) { w.t.Helper(); wait(w, what, c) }

func (w *world) command(cmd claims.Command) claims.Command {
	n := w.seq.Add(1)
	cmd.Sequence, cmd.Time = n, n
	return cmd
}

// wake applies a wake at a worker, and fails the test where that fails.
func (m *member) wake(session claims.SessionID, input string) claims.Outcome {
	m.w.t.Helper()
	cmd := claims.Command{Kind: claims.Wake, Session: session}
	if input != "" {
		cmd.Input = &claims.Input{ID: input, Delivery: claims.Queue, Body: json.RawMessage(`"` + input + `"`)}
	}
	out, err := m.pool.Apply(context.Background(), m.w.command(cmd), true)
	if err != nil {
		m.w.t.Fatalf("wake %s: %v", session, err)
	}
	return out
}

// interrupt applies an interrupt at a worker and tells the owner, whichever it is.
func (m *member) interrupt(session claims.SessionID) claims.Outcome {
	m.w.t.Helper()
	out, err := m.pool.Apply(context.Background(), m.w.command(claims.Command{Kind: claims.Interrupt, Session: session, Reason: "stop"}), false)
	if err != nil {
		m.w.t.Fatalf("interrupt %s: %v", session, err)
	}
	m.w.deliver(out)
	return out
}

func (w *world) deliver(out claims.Outcome) {
	if out.Notice == nil {
		return
	}
	for _, m := range w.live {
		m.pool.Notice(*out.Notice)
	}
}

func (m *member) call() *call { m.w.t.Helper(); return wait(m.w, "call of the handler", m.calls) }

// events reads a session's log.
func (w *world) events(session claims.SessionID) []claims.Record {
	w.t.Helper()
	rows, err := w.db.Query(context.Background(), "SELECT lines FROM events WHERE session_id = $1 ORDER BY last_seq", string(session))
	if err != nil {
		w.t.Fatal(err)
	}
	appends, err := pgx.CollectRows(rows, pgx.RowTo[string])
	if err != nil {
		w.t.Fatal(err)
	}
	var out []claims.Record
	for _, lines := range appends {
		for line := range strings.SplitSeq(lines, "\n") {
			r, err := claims.ParseRecord([]byte(line))
			if err != nil {
				w.t.Fatal(err)
			}
			if r.Seq != int64(len(out))+1 {
				w.t.Fatalf("event %d stands at place %d", r.Seq, len(out)+1)
			}
			out = append(out, r)
		}
	}
	return out
}

// types is a session's log as one line: types, with what tells them apart.
func (w *world) types(session claims.SessionID) string {
	w.t.Helper()
	var out []string
	for _, r := range w.events(session) {
		var d struct {
			Outcome, Code, Text string
			Joined              *bool
			Continues           *claims.Continues
		}
		_ = json.Unmarshal(r.Data, &d)
		s := string(r.Type)
		switch {
		case d.Outcome != "":
			s += "(" + d.Outcome + ")"
		case d.Code != "":
			s += "(" + d.Code + ")"
		case d.Joined != nil:
			s += fmt.Sprintf("(%v)", *d.Joined)
		case d.Continues != nil:
			s += fmt.Sprintf("(%s %d)", d.Continues.Kind, d.Continues.Attempt)
		case r.Type == claims.TextEvent:
			s += "(" + d.Text + ")"
		}
		out = append(out, s)
	}
	return strings.Join(out, " ")
}

func (w *world) wantTypes(session claims.SessionID, want ...string) {
	w.t.Helper()
	if got := w.types(session); got != strings.Join(want, " ") {
		w.t.Errorf("events of %s\n got %s\nwant %s", session, got, strings.Join(want, " "))
	}
}

// phase is the phase of a session's claim, or "none".
func (w *world) phase(session claims.SessionID) string {
	w.t.Helper()
	rows, err := w.db.Query(context.Background(), "SELECT phase || CASE WHEN revoked = '' THEN '' ELSE ' ' || revoked END FROM claims WHERE session_id = $1", string(session))
	if err != nil {
		w.t.Fatal(err)
	}
	phases, err := pgx.CollectRows(rows, pgx.RowTo[string])
	if err != nil {
		w.t.Fatal(err)
	}
	if len(phases) == 0 {
		return "none"
	}
	return phases[0]
}

func (w *world) wantPhase(session claims.SessionID, want string) {
	w.t.Helper()
	if got := w.phase(session); got != want {
		w.t.Errorf("claim of %s is %s, want %s", session, got, want)
	}
}

// until polls a condition of the database that nothing signals.
func (w *world) until(what string, ok func() bool) {
	w.t.Helper()
	deadline := time.After(patience)
	tick := time.NewTicker(2 * time.Millisecond)
	defer tick.Stop()
	for !ok() {
		select {
		case <-deadline:
			w.t.Fatalf("not within %v: %s", patience, what)
		case <-tick.C:
		}
	}
}

// settled waits until a session has no claim.
func (w *world) settled(session claims.SessionID) {
	w.t.Helper()
	w.until("claim of "+string(session)+" is gone", func() bool { return w.phase(session) == "none" })
}

func count(types, event string) int {
	return len(slices.DeleteFunc(strings.Fields(types), func(s string) bool { return !strings.HasPrefix(s, event) }))
}

// expire puts a holder's lease into the past.
func (w *world) expire(h claims.HolderID) {
	w.t.Helper()
	if _, err := w.db.Exec(context.Background(), "UPDATE leases SET expires_at = statement_timestamp() - INTERVAL '1 hour' WHERE holder = $1::UUID", string(h)); err != nil {
		w.t.Fatal(err)
	}
}

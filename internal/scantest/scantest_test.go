// Package scantest holds the scanner (recovery) to docs/design.md section 6 on the
// real store. It is apart from both since neither may import the other. TestS1…
// to TestS10… are the ten situations of recovery that are known to go wrong.
//
// A lease expires here by an UPDATE of its row; where it has to expire in the
// middle of a transaction, by waiting in the database until its time is over.
package scantest

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"reveille/claims"
	"reveille/claims/crdb"
	"reveille/internal/dbtest"
	"reveille/recovery"
)

// The store is all that a scanner needs of a database.
var (
	_ recovery.ClaimStore        = (*crdb.Store)(nil)
	_ recovery.Converter         = (*crdb.Store)(nil)
	_ recovery.HeldStore         = (*crdb.Store)(nil)
	_ recovery.ContinuationStore = (*crdb.Store)(nil)
	_ recovery.SessionStore      = (*crdb.Store)(nil)
	_ recovery.RelayStore        = (*crdb.Store)(nil)
	_ recovery.RetentionStore    = (*crdb.Store)(nil)
	_ recovery.Pinger            = (*crdb.Store)(nil)
)

func TestMain(m *testing.M) {
	if url := os.Getenv(childURL); url != "" {
		if err := scannerProcess(url, os.Stdin, os.Stdout); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		os.Exit(0)
	}
	dbtest.Main(m, func(ctx context.Context, url string) error {
		_, err := crdb.Migrate(ctx, url, false)
		return err
	})
}

// env is a database with a store, and what was announced and relayed.
type env struct {
	*testing.T
	*bus
	url   string
	store *crdb.Store
	db    *pgxpool.Pool // for what only a test does to the rows
	seq   *atomic.Int64
}

// bus stands for the stream.
type bus struct {
	mu        sync.Mutex
	announced []claims.SessionID // tried, or done
	poked     []claims.SessionID
	refuses   bool                    // no announcement succeeds
	heard     chan<- claims.SessionID // of each announcement; nil: nobody listens
}

func (b *bus) Announce(_ context.Context, session claims.SessionID) error {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.announced = append(b.announced, session)
	switch {
	case b.refuses:
		return errors.New("the stream refuses it")
	case b.heard != nil:
		b.heard <- session // it has room for all
	}
	return nil
}

func (b *bus) RelayNow(context.Context, claims.SessionID) error { return nil }

// Verify finds nothing lost.
func (b *bus) Verify(context.Context, []claims.Mark) ([]claims.SessionID, error) { return nil, nil }

func (b *bus) Repair(context.Context, claims.SessionID, bool) (int64, error) { return 0, nil }

func (b *bus) Poke(session claims.SessionID) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.poked = append(b.poked, session)
}

func newEnv(t *testing.T) *env {
	t.Helper()
	t.Parallel()
	url := dbtest.New(t)
	db, err := pgxpool.New(t.Context(), url)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(db.Close)
	return &env{T: t, bus: &bus{}, url: url, store: open(t, url), db: db, seq: &atomic.Int64{}}
}

// open opens a store. It has no grace: what a process would announce or relay
// itself is the scanner's at once.
func open(t *testing.T, url string) *crdb.Store {
	t.Helper()
	store, err := crdb.Open(t.Context(), url, storeOptions())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(store.Close)
	return store
}

func storeOptions() crdb.Options {
	return crdb.Options{Timeout: 20 * time.Second, MaxConns: 6, AnnounceGrace: time.Microsecond, RelayGrace: time.Microsecond}
}

// blocked waits until a transaction of this database waits for a lock of another.
func (e *env) blocked(what string) {
	e.Helper()
	for deadline := time.Now().Add(patience); ; {
		n := e.row(`SELECT count(*) FROM pg_locks l JOIN pg_stat_activity a ON a.pid = l.pid
			WHERE NOT l.granted AND a.datname = current_database()`)
		switch {
		case n != int64(0):
			return
		case time.Now().After(deadline):
			e.Fatalf("not within %v: %s", patience, what)
		}
	}
}

// lease opens a lease that nobody extends.
func (e *env) lease(kind string) claims.HolderID {
	e.Helper()
	h := claims.HolderID(uuid.NewString())
	if err := e.store.OpenLease(e.Context(), claims.Lease{Holder: h, Kind: kind, Name: kind, Version: "test", Slots: 100}, time.Hour); err != nil {
		e.Fatal(err)
	}
	return h
}

func (e *env) exec(statement string, args ...any) {
	e.Helper()
	tag, err := e.db.Exec(e.Context(), statement, args...)
	if err != nil {
		e.Fatalf("%s: %v", statement, err)
	}
	if (tag.Update() || tag.Insert()) && tag.RowsAffected() == 0 {
		e.Fatalf("%s changed nothing", statement)
	}
}

// expire is what the crash of a holder looks like after its lease.
func (e *env) expire(h claims.HolderID) {
	e.Helper()
	e.exec("UPDATE leases SET expires_at = statement_timestamp() - INTERVAL '1 second' WHERE holder = $1::UUID", string(h))
}

func (e *env) command(kind claims.CommandKind, session claims.SessionID) claims.Command {
	n := e.seq.Add(1)
	return claims.Command{Kind: kind, Session: session, Sequence: n, Time: n, Reason: "stop"}
}

func acquisition(h claims.HolderID) claims.Acquisition {
	return claims.Acquisition{
		Holder: h, Worker: "w", Execution: claims.ExecutionID(uuid.NewString()), Step: claims.StepID(uuid.NewString()),
	}
}

// wake admits an input in1 and, with a holder, starts its step.
func (e *env) wake(session claims.SessionID, h claims.HolderID) claims.Started {
	e.Helper()
	return e.wakeWith(session, h, "in1", claims.Queue)
}

func (e *env) wakeWith(session claims.SessionID, h claims.HolderID, input string, d claims.Delivery) claims.Started {
	e.Helper()
	cmd := e.command(claims.Wake, session)
	cmd.Input = &claims.Input{ID: input, Delivery: d, Body: json.RawMessage(`"x"`)}
	var acq *claims.Acquisition
	if h != "" {
		a := acquisition(h)
		acq = &a
	}
	out, err := e.store.Apply(e.Context(), cmd, acq)
	if err != nil {
		e.Fatal(err)
	}
	if h == "" || out.Started == nil {
		return claims.Started{}
	}
	return *out.Started
}

// acquire starts the session's next step.
func (e *env) acquire(session claims.SessionID, h claims.HolderID) claims.Started {
	e.Helper()
	started, err := e.store.Acquire(e.Context(), session, acquisition(h))
	if err != nil {
		e.Fatalf("acquiring %s: %v", session, err)
	}
	return started
}

// handOver leaves a continuation of the session's step, and no claim.
func (e *env) handOver(started claims.Started) {
	e.Helper()
	if _, err := e.store.HandOver(e.Context(), started.Claim, nil, token()); err != nil {
		e.Fatal(err)
	}
}

// many does something for n sessions, a few at once.
func (e *env) many(prefix string, n int, do func(claims.SessionID)) (ids []claims.SessionID) {
	e.Helper()
	for i := range n {
		ids = append(ids, claims.SessionID(fmt.Sprintf("%s%04d", prefix, i)))
	}
	const workers = 4
	var wg sync.WaitGroup
	for w := range workers {
		wg.Go(func() { // each its share: a Fatal ends only this one
			for i := w; i < n; i += workers {
				do(ids[i])
			}
		})
	}
	wg.Wait()
	if e.Failed() {
		e.FailNow()
	}
	return ids
}

// patience bounds every wait; nothing takes near as long.
const patience = 90 * time.Second

// wait waits for a channel to be closed or to give something.
func wait[T any](e *env, what string, c <-chan T) T {
	e.Helper()
	select {
	case v := <-c:
		return v
	case <-time.After(patience):
		e.Fatalf("not within %v: %s", patience, what)
		panic("unreachable")
	}
}

func (e *env) interrupt(session claims.SessionID) {
	e.Helper()
	if _, err := e.store.Apply(e.Context(), e.command(claims.Interrupt, session), nil); err != nil {
		e.Fatal(err)
	}
}

// parts wires a scanner with a lease of its own.
func (e *env) parts() recovery.Parts {
	h := e.lease("scanner")
	return recovery.Parts{
		Claims: e.store, Conversions: e.store, Held: e.store, Continuations: e.store, Sessions: e.store, Relays: e.store,
		Retentions: e.store, Database: e.store, Announcer: e.bus, Relayer: e.bus, Copies: e.bus,
		Holder: func() (claims.HolderID, bool) { return h, true },
	}
}

// operation is a place in a pass; an operation is about one session.
type operation string

// The operations that end something, or that begin to.
const (
	taking       operation = "takeover"
	converting   operation = "conversion"
	quarantining operation = "quarantine of a claim"
	ending       operation = "end of a claim that is not running"
	removing     operation = "quarantine of a continuation"
)

// gates stand around a store and hold a pass before an operation.
type gates struct {
	*crdb.Store
	before func(op operation, session claims.SessionID)
}

// gated wires a scanner of a store whose passes stop at gates.
func (e *env) gated(store *crdb.Store, before func(op operation, session claims.SessionID)) recovery.Parts {
	p := e.parts()
	g := gates{store, before}
	p.Claims, p.Conversions, p.Continuations = g, g, g
	return p
}

func (g gates) TakeOver(ctx context.Context, c claims.Candidate, h claims.HolderID, as claims.ExecutionID) (claims.Claim, error) {
	g.before(taking, c.Session)
	return g.Store.TakeOver(ctx, c, h, as)
}

func (g gates) Convert(ctx context.Context, c claims.Claim, l claims.Limits, token *claims.Token) (claims.Settlement, error) {
	g.before(converting, c.Session)
	return g.Store.Convert(ctx, c, l, token)
}

func (g gates) ConversionFailed(ctx context.Context, c claims.Claim, detail string, token *claims.Token) (claims.Settlement, error) {
	g.before(quarantining, c.Session)
	return g.Store.ConversionFailed(ctx, c, detail, token)
}

func (g gates) EndExpired(ctx context.Context, c claims.Candidate, uncertain bool, token *claims.Token) (claims.Settlement, error) {
	g.before(ending, c.Session)
	return g.Store.EndExpired(ctx, c, uncertain, token)
}

func (g gates) QuarantineContinuation(ctx context.Context, d claims.DueContinuation, token *claims.Token) error {
	g.before(removing, d.Session)
	return g.Store.QuarantineContinuation(ctx, d, token)
}

// once is a gate at one operation, that does something the first time.
func once(op operation, do func()) func(operation, claims.SessionID) {
	var first sync.Once
	return func(at operation, _ claims.SessionID) {
		if at == op {
			first.Do(do)
		}
	}
}

func (e *env) scanner(p recovery.Parts, o recovery.Options) *recovery.Scanner {
	e.Helper()
	o.Logger = slog.New(slog.NewTextHandler(io.Discard, nil))
	o.TimeBox = time.Minute // a busy machine is not what is tested
	s, err := recovery.New(p, o)
	if err != nil {
		e.Fatal(err)
	}
	return s
}

// pass makes a pass of a new scanner and answers what it did to the claims.
func (e *env) pass(o recovery.Options) recovery.Result {
	e.Helper()
	return e.scanner(e.parts(), o).Pass(e.Context()).Lanes[recovery.LaneClaims]
}

// events are the session's, oldest first.
func (e *env) events(session claims.SessionID) []claims.Record {
	e.Helper()
	_, records, err := e.store.Unrelayed(e.Context(), session, 1000)
	if err != nil {
		e.Fatal(err)
	}
	return records
}

// tail checks the last events of a session, each as "type {data}".
func (e *env) tail(session claims.SessionID, want ...string) {
	e.Helper()
	var got []string
	for _, r := range e.events(session) {
		got = append(got, fmt.Sprintf("%s %s", r.Type, r.Data))
	}
	if len(got) < len(want) || !slices.Equal(got[len(got)-len(want):], want) {
		e.Errorf("session %s ends in\n%q, want\n%q", session, got, want)
	}
}

// row reads one value of a session.
func (e *env) row(statement string, args ...any) (v any) {
	e.Helper()
	if err := e.db.QueryRow(e.Context(), statement, args...).Scan(&v); err != nil && err != pgx.ErrNoRows {
		e.Fatalf("%s: %v", statement, err)
	}
	return v
}

// count is how many events of a type a session has, with a data where one is given.
func (e *env) count(session claims.SessionID, typ claims.EventType, data string) (n int) {
	e.Helper()
	for _, r := range e.events(session) {
		if r.Type == typ && (data == "" || string(r.Data) == data) {
			n++
		}
	}
	return n
}

// rows is all that the database holds, as text: what must not have changed is
// compared as a whole. Only the leases and the marks that say when a scanner looks
// at a row are left out.
func (e *env) rows() string {
	e.Helper()
	var b strings.Builder
	for _, table := range []string{"sessions", "claims", "inputs", "wakes", "continuations", "events", "quarantines"} {
		rows, err := e.db.Query(e.Context(), "SELECT (to_jsonb(t) - '{due_at,ready_due_at,relay_due_at}'::TEXT[])::TEXT FROM "+table+" t ORDER BY 1")
		if err != nil {
			e.Fatal(err)
		}
		all, err := pgx.CollectRows(rows, pgx.RowTo[string])
		if err != nil {
			e.Fatal(err)
		}
		for _, row := range all {
			fmt.Fprintf(&b, "%s %s\n", table, row)
		}
	}
	return b.String()
}

// unchanged checks that rows says what it said before.
func (e *env) unchanged(before string) {
	e.Helper()
	after := e.rows()
	if before == after {
		return
	}
	var diff []string
	for _, line := range strings.Split(after, "\n") {
		if !strings.Contains(before, line) {
			diff = append(diff, "+ "+line)
		}
	}
	for _, line := range strings.Split(before, "\n") {
		if !strings.Contains(after, line) {
			diff = append(diff, "- "+line)
		}
	}
	e.Errorf("something changed:\n%s", strings.Join(diff, "\n"))
}

func (e *env) reason(session claims.SessionID) any {
	e.Helper()
	return e.row("SELECT reason FROM quarantines WHERE session_id = $1", string(session))
}

func (e *env) number(table string, session claims.SessionID) any {
	e.Helper()
	return e.row("SELECT count(*) FROM "+table+" WHERE session_id = $1", string(session))
}

func token() *claims.Token { return &claims.Token{ID: uuid.NewString()} }

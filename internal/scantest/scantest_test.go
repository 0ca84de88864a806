// Package scantest holds the scanner (recovery) to design.md section 6 on the
// real store. It is apart from both since neither may import the other.
//
// A lease expires here by an UPDATE of its row, never by waiting.
package scantest

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"log/slog"
	"slices"
	"sync"
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
	_ recovery.Pinger            = (*crdb.Store)(nil)
)

func TestMain(m *testing.M) {
	dbtest.Main(m, func(ctx context.Context, url string) error {
		_, err := crdb.Migrate(ctx, url, false)
		return err
	})
}

// env is a database with a store, and what was announced and relayed.
type env struct {
	*testing.T
	*bus
	store *crdb.Store
	db    *pgxpool.Pool // for what only a test does to the rows
	seq   int64
}

// bus stands for the stream.
type bus struct {
	mu        sync.Mutex
	announced []claims.SessionID
	poked     []claims.SessionID
}

func (b *bus) Announce(_ context.Context, session claims.SessionID) error {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.announced = append(b.announced, session)
	return nil
}

func (b *bus) RelayNow(context.Context, claims.SessionID) error { return nil }

func (b *bus) Poke(session claims.SessionID) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.poked = append(b.poked, session)
}

func newEnv(t *testing.T) *env {
	t.Helper()
	t.Parallel()
	url := dbtest.New(t)
	// No grace: what a process would announce or relay itself is the scanner's at once.
	store, err := crdb.Open(t.Context(), url, crdb.Options{
		Timeout: 20 * time.Second, MaxConns: 6, AnnounceGrace: time.Microsecond, RelayGrace: time.Microsecond,
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(store.Close)
	db, err := pgxpool.New(t.Context(), url)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(db.Close)
	return &env{T: t, bus: &bus{}, store: store, db: db}
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
	e.seq++
	return claims.Command{Kind: kind, Session: session, Sequence: e.seq, Time: e.seq, Reason: "stop"}
}

func acquisition(h claims.HolderID) claims.Acquisition {
	return claims.Acquisition{
		Holder: h, Worker: "w", Execution: claims.ExecutionID(uuid.NewString()), Step: claims.StepID(uuid.NewString()),
	}
}

// wake admits an input in1 and, with a holder, starts its step.
func (e *env) wake(session claims.SessionID, h claims.HolderID) claims.Started {
	e.Helper()
	cmd := e.command(claims.Wake, session)
	cmd.Input = &claims.Input{ID: "in1", Delivery: claims.Queue, Body: json.RawMessage(`"x"`)}
	var acq *claims.Acquisition
	if h != "" {
		a := acquisition(h)
		acq = &a
	}
	out, err := e.store.Apply(e.Context(), cmd, acq)
	if err != nil {
		e.Fatal(err)
	}
	if h == "" {
		return claims.Started{}
	}
	return *out.Started
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
		Database: e.store, Announcer: e.bus, Relayer: e.bus,
		Holder: func() (claims.HolderID, bool) { return h, true },
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

func (e *env) reason(session claims.SessionID) any {
	e.Helper()
	return e.row("SELECT reason FROM quarantines WHERE session_id = $1", string(session))
}

func (e *env) number(table string, session claims.SessionID) any {
	e.Helper()
	return e.row("SELECT count(*) FROM "+table+" WHERE session_id = $1", string(session))
}

func token() *claims.Token { return &claims.Token{ID: uuid.NewString()} }

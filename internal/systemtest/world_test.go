// Package systemtest runs the built programs as processes against a real
// database and a real NATS server, takes either away under load, and compares
// what is left: the stream with the database event for event, every input with
// the step that covers it.
package systemtest

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/nats-io/nats.go"

	"reveille/bus"
	"reveille/claims"
	"reveille/claims/crdb"
	"reveille/internal/faultproxy"
	"reveille/internal/localdb"
	"reveille/internal/systemtest/ask"
)

// patience bounds every wait; nothing takes near as long.
const patience = 90 * time.Second

// race: this test binary has the race detector; see race_test.go.
var race bool

// binaries are the folders of the built programs: as this test is, and without
// the race detector, for what would take too long with it.
var binaries, fast string

func TestMain(m *testing.M) {
	os.Exit(func() int {
		dir, err := os.MkdirTemp("", "reveille-systemtest-")
		if err != nil {
			fmt.Fprintln(os.Stderr, err)
			return 1
		}
		defer os.RemoveAll(dir)
		binaries, fast = filepath.Join(dir, "race"), filepath.Join(dir, "fast")
		if !race {
			binaries = fast
		}
		build := func(args ...string) error {
			cmd := exec.Command("go", append([]string{"build", "-o"}, args...)...)
			cmd.Stderr = os.Stderr
			return cmd.Run()
		}
		const worker, scanner, peer = "reveille/cmd/worker", "reveille/cmd/scanner", "reveille/internal/systemtest/peer"
		if race {
			err = build(binaries+"/", "-race", worker, scanner, peer)
		}
		if err = errors.Join(err, build(fast+"/", worker, scanner, peer)); err != nil {
			fmt.Fprintln(os.Stderr, "building the programs:", err)
			return 1
		}
		return m.Run()
	}())
}

// world is a database, a NATS server and the processes on them.
type world struct {
	t       testing.TB
	dir     string
	load    bool // many sessions: processes without the race detector
	lasting bool // the database outlives its own death; else it syncs nothing
	db      *localdb.Server
	nats    *proc
	port    int
	conn    *bus.Conn
	sql     *pgx.Conn // of query; nil before the first
	procs   []*proc
	steps   *steps
	hold    *holdGate
	watch   io.WriteCloser
	proxy   *faultproxy.Proxy // between processes and the database, or nil
	others  int               // sessions of other
}

func newWorld(t testing.TB) *world { t.Helper(); return startWorld(&world{t: t}) }

// newLastingWorld is one whose database may be stopped and killed.
func newLastingWorld(t testing.TB) *world { t.Helper(); return startWorld(&world{t: t, lasting: true}) }

func startWorld(w *world) *world {
	t := w.t
	t.Helper()
	var err error
	if w.dir, err = os.MkdirTemp("/var/tmp", "reveille-systemtest-"); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(w.close)
	w.startWatch()
	w.startDatabase()
	if _, err := crdb.Migrate(t.Context(), w.db.URL(), false); err != nil {
		t.Fatal(err)
	}
	w.startNATS()
	if w.conn, err = bus.Connect(t.Context(), bus.Options{URL: w.natsURL(), Name: "systemtest"}); err != nil {
		t.Fatal(err)
	}
	if _, err := w.conn.Ensure(t.Context(), bus.StreamOptions{MaxClockSkew: time.Millisecond}); err != nil {
		t.Fatal(err)
	}
	return w
}

// close ends everything, whatever of it has been started.
func (w *world) close() {
	if w.conn != nil {
		w.conn.Close()
	}
	for _, p := range w.procs {
		p.close()
	}
	if w.steps != nil {
		w.steps.close()
	}
	if w.sql != nil {
		_ = w.sql.Close(context.Background()) // its server may be gone
	}
	if w.db != nil {
		w.stopDatabase()
	}
	if w.watch != nil {
		_ = w.watch.Close()
	}
	if err := os.RemoveAll(w.dir); err != nil {
		w.t.Errorf("removing what the test left: %v", err)
	}
}

func (w *world) startDatabase() {
	w.t.Helper()
	var err error
	w.db, err = localdb.Start(context.Background(), localdb.Options{Dir: filepath.Join(w.dir, "db"), Ephemeral: !w.lasting})
	if err != nil {
		w.t.Fatal(err)
	}
}

func (w *world) stopDatabase() {
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	if err := w.db.Stop(ctx); err != nil {
		w.t.Errorf("stopping the database: %v", err)
	}
}

// killDatabase is a crash: it recovers at its next start.
func (w *world) killDatabase() {
	w.t.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	if err := w.db.Stop(ctx); err != nil && !errors.Is(err, context.Canceled) {
		w.t.Fatalf("killing the database: %v", err)
	}
}

// program is the path of a built program.
func (w *world) program(name string) string {
	if w.load {
		return filepath.Join(fast, name)
	}
	return filepath.Join(binaries, name)
}

// startNATS starts the server, at the port that it had.
func (w *world) startNATS() {
	w.t.Helper()
	port := w.port
	if port == 0 {
		port = -1
	}
	cmd := exec.Command(filepath.Join(fast, "peer"), "nats", w.json(ask.Server{Store: filepath.Join(w.dir, "nats"), Port: port}))
	w.nats = w.launch("nats", cmd, saysUp)
	w.nats.wait()
	if _, err := fmt.Sscanf(w.nats.output(), ask.Up+" nats://127.0.0.1:%d", &w.port); err != nil {
		w.t.Fatalf("NATS server says %q: %v", w.nats.output(), err)
	}
	if w.conn != nil {
		w.until("the test is connected again", func() bool { return w.conn.Health(w.t.Context()) == nil })
	}
}

func (w *world) stopNATS() { w.nats.terminate() }

// databaseURL is where processes find the database.
func (w *world) databaseURL() string {
	if w.proxy != nil {
		return w.proxy.URL()
	}
	return w.db.URL()
}

func (w *world) natsURL() string { return fmt.Sprintf("nats://127.0.0.1:%d", w.port) }

// until polls what no signal tells.
func (w *world) until(what string, ok func() bool) {
	w.t.Helper()
	w.within(patience, what, ok)
}

func (w *world) within(bound time.Duration, what string, ok func() bool) {
	w.t.Helper()
	deadline := time.After(bound)
	tick := time.NewTicker(20 * time.Millisecond)
	defer tick.Stop()
	for !ok() {
		select {
		case <-deadline:
			w.t.Fatalf("not within %v: %s", bound, what)
		case <-tick.C:
		}
	}
}

func input(id string, delivery claims.Delivery) *claims.Input {
	return &claims.Input{ID: id, Delivery: delivery, Body: json.RawMessage(`"` + id + `"`)}
}

func (w *world) wake(ctx context.Context, session claims.SessionID, id string) error {
	_, err := bus.NewPublisher(w.conn).Wake(ctx, session, input(id, claims.Queue), time.Time{}, bus.Publishing{})
	return err
}

// publish publishes commands, one after the other.
func (w *world) publish(cmds ...claims.Command) {
	w.t.Helper()
	p := bus.NewPublisher(w.conn)
	for _, cmd := range cmds {
		if _, err := p.Publish(w.t.Context(), cmd, bus.Publishing{}); err != nil {
			w.t.Fatal(err)
		}
	}
}

func wakeOf(session claims.SessionID, in *claims.Input) claims.Command {
	return claims.Command{Kind: claims.Wake, Session: session, Input: in}
}

func admitOf(session claims.SessionID, in *claims.Input) claims.Command {
	return claims.Command{Kind: claims.Admit, Session: session, Input: in}
}

func interruptOf(session claims.SessionID) claims.Command {
	return claims.Command{Kind: claims.Interrupt, Session: session, Reason: "stop"}
}

// publishRaw publishes a command body as it is.
func (w *world) publishRaw(subject string, body []byte) {
	w.t.Helper()
	if _, err := w.conn.JetStream().PublishMsg(w.t.Context(), &nats.Msg{Subject: subject, Data: body}); err != nil {
		w.t.Fatalf("publishing on %q: %v", subject, err)
	}
}

// messages is how many messages a stream holds, and the sequence of its last.
func (w *world) messages(stream string) (n, last uint64) {
	w.t.Helper()
	s, err := w.conn.JetStream().Stream(w.t.Context(), stream)
	if err != nil {
		w.t.Fatalf("stream %s: %v", stream, err)
	}
	state := s.CachedInfo().State
	return state.Msgs, state.LastSeq
}

// applied waits until no command waits.
func (w *world) applied() {
	w.t.Helper()
	w.until("all commands are applied", func() bool { n, _ := w.messages("RV_COMMANDS"); return n == 0 })
}

// query answers the rows of a statement with one TEXT column.
func (w *world) query(statement string, args ...any) []string {
	w.t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	if w.sql == nil || w.sql.Ping(ctx) != nil { // the database may have been away
		var err error
		if w.sql, err = pgx.Connect(ctx, w.db.URL()); err != nil {
			w.t.Fatal(err)
		}
	}
	rows, err := w.sql.Query(ctx, statement, args...)
	if err != nil {
		w.t.Fatal(err)
	}
	out, err := pgx.CollectRows(rows, pgx.RowTo[string])
	if err != nil {
		w.t.Fatal(err)
	}
	return out
}

// count is the one number that a statement answers.
func (w *world) count(statement string, args ...any) int {
	w.t.Helper()
	var n int
	if _, err := fmt.Sscan(w.query("SELECT ("+statement+")::TEXT", args...)[0], &n); err != nil {
		w.t.Fatal(err)
	}
	return n
}

// idle waits until no session has a claim, work that is due, or unpublished
// events, and this many inputs were covered or cancelled.
func (w *world) idle(inputs int) {
	w.t.Helper()
	w.until("the system is idle", func() bool {
		return w.count(`SELECT count(*) FROM sessions WHERE execution_id IS NOT NULL OR armed > 0 OR continuations > 0 OR relayed_seq < last_seq`) == 0 &&
			w.count(`SELECT count(*) FROM inputs WHERE state <> 'armed' AND state <> 'unarmed'`) == inputs
	})
}

// gate holds commands of a handler: they read a line each from fifo unless the
// file open is there.
type gate struct {
	t          testing.TB
	open, fifo string
	w          *os.File
}

func newGate(t testing.TB) *gate {
	t.Helper()
	g := &gate{t: t, open: filepath.Join(t.TempDir(), "open")}
	g.fifo = g.open + ".fifo"
	if err := syscall.Mkfifo(g.fifo, 0o600); err != nil {
		t.Fatal(err)
	}
	var err error
	if g.w, err = os.OpenFile(g.fifo, os.O_RDWR, 0); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = g.w.Close() })
	return g
}

// release lets all go on: those that wait, at most n, and those that come.
func (g *gate) release(n int) {
	g.t.Helper()
	if err := os.WriteFile(g.open, nil, 0o600); err != nil {
		g.t.Fatal(err)
	}
	if _, err := g.w.WriteString(strings.Repeat("\n", n)); err != nil {
		g.t.Fatal(err)
	}
}

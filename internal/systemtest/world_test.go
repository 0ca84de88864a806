// Package systemtest runs the built programs as processes against a real
// database and a real NATS server, takes either away under load, and compares
// what is left: the stream with the database event for event, every input with
// the step that covers it.
package systemtest

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/nats-io/nats-server/v2/server"
	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"reveille/bus"
	"reveille/claims"
	"reveille/claims/crdb"
	"reveille/internal/localdb"
)

// patience bounds every wait; nothing takes near as long.
const patience = 90 * time.Second

var binaries string // the folder of the built programs

func TestMain(m *testing.M) {
	os.Exit(func() int {
		dir, err := os.MkdirTemp("", "reveille-systemtest-")
		if err != nil {
			fmt.Fprintln(os.Stderr, err)
			return 1
		}
		defer os.RemoveAll(dir)
		build := exec.Command("go", "build", "-race", "-o", dir+"/", "reveille/cmd/worker", "reveille/cmd/scanner")
		build.Stderr = os.Stderr
		if err := build.Run(); err != nil {
			fmt.Fprintln(os.Stderr, "building the programs:", err)
			return 1
		}
		binaries = dir
		return m.Run()
	}())
}

// world is a database, a NATS server and the processes on them.
type world struct {
	t     *testing.T
	dir   string
	db    *localdb.Server
	nats  *server.Server
	port  int
	conn  *bus.Conn
	procs []*proc
}

func newWorld(t *testing.T) *world {
	t.Helper()
	w := &world{t: t}
	var err error
	if w.dir, err = os.MkdirTemp("/var/tmp", "reveille-systemtest-"); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(w.dir) })
	w.startDatabase()
	t.Cleanup(func() { w.stopDatabase() })
	if _, err := crdb.Migrate(t.Context(), w.db.URL(), false); err != nil {
		t.Fatal(err)
	}
	w.startNATS()
	t.Cleanup(func() { w.stopNATS() })
	if w.conn, err = bus.Connect(t.Context(), bus.Options{URL: w.nats.ClientURL(), Name: "systemtest"}); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(w.conn.Close)
	if _, err := w.conn.Ensure(t.Context(), bus.StreamOptions{MaxClockSkew: time.Millisecond}); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		for _, p := range w.procs {
			p.kill()
		}
	})
	return w
}

func (w *world) startDatabase() {
	w.t.Helper()
	var err error
	if w.db, err = localdb.Start(context.Background(), localdb.Options{Dir: filepath.Join(w.dir, "db")}); err != nil {
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

func (w *world) startNATS() {
	w.t.Helper()
	port := w.port
	if port == 0 {
		port = -1
	}
	s, err := server.NewServer(&server.Options{
		Host: "127.0.0.1", Port: port, JetStream: true, StoreDir: filepath.Join(w.dir, "nats"), NoSigs: true, NoLog: true,
	})
	if err != nil {
		w.t.Fatal(err)
	}
	s.Start()
	if !s.ReadyForConnections(patience) {
		w.t.Fatal("NATS server is not ready")
	}
	w.nats, w.port = s, s.Addr().(*net.TCPAddr).Port
}

func (w *world) stopNATS() {
	w.nats.Shutdown()
	w.nats.WaitForShutdown()
}

// proc is a process of ours.
type proc struct {
	w    *world
	name string
	cmd  *exec.Cmd
	http string
	done chan struct{}
	err  error

	mu  sync.Mutex
	log bytes.Buffer
}

func (p *proc) Write(b []byte) (int, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.log.Write(b)
}

func (p *proc) output() string {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.log.String()
}

// start starts a program and waits until it is ready.
func (w *world) start(program, name string, args ...string) *proc {
	w.t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		w.t.Fatal(err)
	}
	addr := l.Addr().String()
	_ = l.Close()
	p := &proc{w: w, name: name, http: addr, done: make(chan struct{})}
	p.cmd = exec.Command(filepath.Join(binaries, program), append([]string{
		"--nats-url", fmt.Sprintf("nats://127.0.0.1:%d", w.port), "--http", addr, "--worker-id", name, "--log-format", "text",
		"--lease", "6s", "--heartbeat", "1s", "--max-clock-skew", "200ms", "--stop-margin", "500ms",
	}, args...)...)
	p.cmd.Env = append(os.Environ(), "RV_DATABASE_URL="+w.db.URL())
	p.cmd.Stdout, p.cmd.Stderr = p, p
	p.cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	if err := p.cmd.Start(); err != nil {
		w.t.Fatal(err)
	}
	go func() {
		p.err = p.cmd.Wait()
		close(p.done)
	}()
	w.procs = append(w.procs, p)
	w.until(name+" is ready", func() bool { return p.get("/readyz") == http.StatusOK })
	return p
}

func (p *proc) get(path string) int {
	resp, err := http.Get("http://" + p.http + path)
	if err != nil {
		return 0
	}
	_ = resp.Body.Close()
	return resp.StatusCode
}

func (p *proc) alive() bool {
	select {
	case <-p.done:
		return false
	default:
		return true
	}
}

func (p *proc) kill() {
	_ = p.cmd.Process.Kill() // it may be gone already
	<-p.done
	if p.w.t.Failed() {
		p.w.t.Logf("log of %s:\n%s", p.name, p.output())
	}
}

// terminate is SIGTERM, and waits for the orderly end.
func (p *proc) terminate() {
	p.w.t.Helper()
	if err := p.cmd.Process.Signal(syscall.SIGTERM); err != nil {
		p.w.t.Fatal(err)
	}
	select {
	case <-p.done:
		if p.err != nil {
			p.w.t.Errorf("%s ended with %v", p.name, p.err)
		}
	case <-time.After(patience):
		p.w.t.Fatalf("%s does not end", p.name)
	}
}

// until polls what no signal tells.
func (w *world) until(what string, ok func() bool) {
	w.t.Helper()
	deadline := time.After(patience)
	tick := time.NewTicker(50 * time.Millisecond)
	defer tick.Stop()
	for !ok() {
		select {
		case <-deadline:
			w.t.Fatalf("not within %v: %s", patience, what)
		case <-tick.C:
		}
	}
}

func (w *world) wake(ctx context.Context, session claims.SessionID, input string) error {
	in := claims.Input{ID: input, Delivery: claims.Queue, Body: json.RawMessage(`"` + input + `"`)}
	_, err := bus.NewPublisher(w.conn).Wake(ctx, session, &in, time.Time{}, bus.Publishing{})
	return err
}

// publishRaw publishes a command body as it is.
func (w *world) publishRaw(subject string, body []byte) {
	w.t.Helper()
	if _, err := w.conn.JetStream().PublishMsg(w.t.Context(), &nats.Msg{Subject: subject, Data: body}); err != nil {
		w.t.Fatalf("publishing on %q: %v", subject, err)
	}
}

func (w *world) query(statement string, args ...any) []string {
	w.t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	db, err := pgx.Connect(ctx, w.db.URL())
	if err != nil {
		w.t.Fatal(err)
	}
	defer db.Close(ctx)
	rows, err := db.Query(ctx, statement, args...)
	if err != nil {
		w.t.Fatal(err)
	}
	out, err := pgx.CollectRows(rows, pgx.RowTo[string])
	if err != nil {
		w.t.Fatal(err)
	}
	return out
}

// logOf is a session's log in the database, an event a line.
func (w *world) logOf(session claims.SessionID) []string {
	w.t.Helper()
	var out []string
	for _, lines := range w.query("SELECT lines FROM events WHERE session_id = $1 ORDER BY last_seq", string(session)) {
		out = append(out, strings.Split(lines, "\n")...)
	}
	return out
}

// idle waits until no session has a claim, work that is due, or unpublished events.
func (w *world) idle(inputs int) {
	w.t.Helper()
	w.until("the system is idle", func() bool {
		n := w.query("SELECT (SELECT count(*) FROM inputs WHERE state <> 'armed' AND state <> 'unarmed')::TEXT")
		open := w.query("SELECT session_id FROM sessions WHERE execution_id IS NOT NULL OR armed > 0 OR continuations > 0 OR relayed_seq < last_seq")
		return len(open) == 0 && n[0] == fmt.Sprint(inputs)
	})
}

// stream reads all of RV_EVENTS, the bodies by session.
func (w *world) stream() map[claims.SessionID][]string {
	w.t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	s, err := w.conn.JetStream().Stream(ctx, "RV_EVENTS")
	if err != nil {
		w.t.Fatal(err)
	}
	info, err := s.Info(ctx)
	if err != nil {
		w.t.Fatal(err)
	}
	out := map[claims.SessionID][]string{}
	if info.State.Msgs == 0 {
		return out
	}
	cons, err := w.conn.JetStream().OrderedConsumer(ctx, "RV_EVENTS", jetstream.OrderedConsumerConfig{})
	if err != nil {
		w.t.Fatal(err)
	}
	msgs, err := cons.Messages()
	if err != nil {
		w.t.Fatal(err)
	}
	defer msgs.Stop()
	for range info.State.Msgs {
		m, err := msgs.Next()
		if err != nil {
			w.t.Fatal(err)
		}
		session := claims.SessionID(m.Subject()[strings.LastIndexByte(m.Subject(), '.')+1:])
		out[session] = append(out[session], string(m.Data()))
	}
	return out
}

// verify compares the stream with the database event for event, and every
// input with the steps that cover it.
func (w *world) verify() {
	w.t.Helper()
	stream := w.stream()
	for _, id := range w.query("SELECT session_id FROM sessions ORDER BY session_id") {
		session := claims.SessionID(id)
		log := w.logOf(session)
		if !slices.Equal(log, stream[session]) {
			w.t.Errorf("session %s: stream and database differ\ndatabase\n%s\nstream\n%s", id, strings.Join(log, "\n"), strings.Join(stream[session], "\n"))
		}
		w.verifySession(session, log)
	}
}

func (w *world) verifySession(session claims.SessionID, log []string) {
	w.t.Helper()
	promoted, terminal, epoch := map[string]int{}, map[claims.StepID]int{}, int64(0)
	for i, line := range log {
		r, err := claims.ParseRecord([]byte(line))
		if err != nil {
			w.t.Fatal(err)
		}
		if r.Seq != int64(i)+1 {
			w.t.Errorf("session %s: event %d stands at place %d", session, r.Seq, i+1)
		}
		if r.Epoch != 0 && r.Epoch < epoch {
			w.t.Errorf("session %s: epoch %d after %d", session, r.Epoch, epoch)
		}
		epoch = max(epoch, r.Epoch)
		switch r.Type {
		case claims.InputPromoted:
			promoted[string(r.Data)]++
		case claims.StepStartedEvent:
			terminal[r.Step] += 0
		case claims.StepEndedEvent, claims.StepFailedEvent, claims.StepInterruptedEvent:
			terminal[r.Step]++
		}
	}
	for in, n := range promoted {
		if n != 1 {
			w.t.Errorf("session %s: %s promoted %d times", session, in, n)
		}
	}
	for step, n := range terminal {
		if n != 1 {
			w.t.Errorf("session %s: step %s has %d terminal events", session, step, n)
		}
	}
}

// gate holds commands of a handler: they read a line each from fifo unless the
// file open is there.
type gate struct {
	t          *testing.T
	open, fifo string
	w          *os.File
}

func newGate(t *testing.T) *gate {
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

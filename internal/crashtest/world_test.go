// Package crashtest kills workers and scanners with SIGKILL at every crash point of docs/design.md section 7, under load,
// again and again, and then holds what is left against the invariants: every session has run on, was cancelled or is
// quarantined (I32), and every input is covered by one step and its continuations (I23).
//
// The processes are the built programs. Each is connected to the database through a proxy of its own, which sees the
// statements it sends and kills it when it has got to the point that is meant: nothing in the programs knows of this.
// What is checked at the end is read from the tables, the streams and a file that the handlers write, by code that
// shares nothing with the programs but the names of the events.
package crashtest

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/nats-io/nats-server/v2/server"

	"reveille/bus"
	"reveille/claims/crdb"
	"reveille/internal/dbtest"
	"reveille/internal/faultproxy"
)

const (
	// patience bounds every wait; nothing takes near as long.
	patience = 5 * time.Minute
	// lookEvery is between two looks at what no signal tells.
	lookEvery = 100 * time.Millisecond
	// ackWait is of the durables here: what a dead worker had in hand is delivered again after it. It is a good deal
	// less than what Reveille makes them with, which only costs deliveries.
	ackWait = 3 * time.Second
)

// lease are the times of the worker leases, about the shortest that I8 permits.
var lease = []string{
	"--lease", "3s", "--heartbeat", "300ms", "--max-clock-skew", "200ms", "--stop-margin", "200ms", "--db-timeout", "2s",
}

var binaries string // the folder of the built programs

func TestMain(m *testing.M) {
	os.Exit(func() int {
		dir, err := os.MkdirTemp("", "reveille-crashtest-")
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
		return dbtest.With(m, func(ctx context.Context, url string) error {
			_, err := crdb.Migrate(ctx, url, false)
			return err
		}).Run()
	}())
}

// world is a database, a NATS server and the places where processes run.
type world struct {
	t      *testing.T
	dir    string // of the logs and of what the handlers write
	url    string // of the database
	db     *pgxpool.Pool
	nats   *server.Server
	conn   *bus.Conn
	places []*place

	// ctx ends when something is wrong that makes going on useless.
	ctx  context.Context
	fail context.CancelFunc
}

func newWorld(t *testing.T) *world {
	t.Helper()
	w := &world{t: t, dir: t.TempDir(), url: dbtest.New(t)}
	w.ctx, w.fail = context.WithCancel(context.Background())
	t.Cleanup(w.fail)
	var err error
	if w.db, err = pgxpool.New(w.ctx, w.url); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(w.db.Close)
	w.nats, err = server.NewServer(&server.Options{
		Host: "127.0.0.1", Port: -1, JetStream: true, StoreDir: filepath.Join(w.dir, "nats"), NoSigs: true, NoLog: true,
	})
	if err != nil {
		t.Fatal(err)
	}
	w.nats.Start()
	t.Cleanup(func() {
		w.nats.Shutdown()
		w.nats.WaitForShutdown()
	})
	if !w.nats.ReadyForConnections(patience) {
		t.Fatal("NATS server is not ready")
	}
	if w.conn, err = bus.Connect(w.ctx, bus.Options{URL: w.nats.ClientURL(), Name: "crashtest"}); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(w.conn.Close)
	w.makeStreams()
	return w
}

// makeStreams makes the streams, with a shorter ack wait than usual.
func (w *world) makeStreams() {
	w.t.Helper()
	streams, err := w.conn.Ensure(w.ctx, bus.StreamOptions{MaxClockSkew: time.Millisecond})
	if err != nil {
		w.t.Fatal(err)
	}
	for _, of := range []struct{ stream, durable string }{
		{w.conn.Namespace().CommandStream(), streams.Intake()},
		{w.conn.Namespace().CommandStream(), streams.Interrupts()},
		{w.conn.Namespace().ReadyStream(), streams.Ready()},
	} {
		c, err := w.conn.JetStream().Consumer(w.ctx, of.stream, of.durable)
		if err != nil {
			w.t.Fatal(err)
		}
		cfg := c.CachedInfo().Config
		cfg.AckWait = ackWait
		if _, err := w.conn.JetStream().UpdateConsumer(w.ctx, of.stream, cfg); err != nil {
			w.t.Fatal(err)
		}
	}
}

// wrong is an error of the test that ends it early.
func (w *world) wrong(format string, args ...any) {
	w.t.Helper()
	if w.ctx.Err() == nil {
		w.t.Errorf(format, args...)
	}
	w.fail()
}

// until looks until something is so; it reports false where the test is over before, and is wrong where it takes too long.
func (w *world) until(what string, ok func() bool) bool {
	w.t.Helper()
	deadline := time.NewTimer(patience)
	defer deadline.Stop()
	tick := time.NewTicker(lookEvery)
	defer tick.Stop()
	for !ok() {
		select {
		case <-w.ctx.Done():
			return false
		case <-deadline.C:
			w.wrong("not within %v: %s", patience, what)
			return false
		case <-tick.C:
		}
	}
	return true
}

// texts runs a query of one text column.
func (w *world) texts(query string, args ...any) []string {
	w.t.Helper()
	rows, err := w.db.Query(context.Background(), query, args...)
	if err == nil {
		var out []string
		if out, err = pgx.CollectRows(rows, pgx.RowTo[string]); err == nil {
			return out
		}
	}
	w.wrong("%s: %v", query, err)
	return nil
}

// place is where one process of a program runs after the other, all through the same proxy.
type place struct {
	w       *world
	program string
	name    string
	args    []string
	proxy   *faultproxy.Proxy
	over    chan struct{} // closed when nothing is started here any more and the last process is gone

	mu       sync.Mutex // guards the rest
	proc     *process   // the present one
	started  int        // processes so far
	stopping bool
	armed    *point
	reached  chan struct{} // closed when a process was killed at armed
	deadly   string        // a session whose every step kills its worker; empty: none
}

// process is one process. Its killed and told are guarded by the place's mu.
type process struct {
	name   string
	cmd    *exec.Cmd
	log    string // the file's path
	done   chan struct{}
	err    error  // set when done is closed
	killed string // at which point; empty: it was not
	told   bool   // to end, by SIGTERM
}

// add makes a place and starts its first process.
func (w *world) add(program string, number int, args ...string) *place {
	w.t.Helper()
	proxy, err := faultproxy.New(w.url, 0)
	if err != nil {
		w.t.Fatal(err)
	}
	w.t.Cleanup(proxy.Close)
	p := &place{
		w: w, program: program, name: fmt.Sprintf("%s%d", program, number), proxy: proxy, over: make(chan struct{}),
		args: append(append([]string{
			"--nats-url", w.nats.ClientURL(), "--http", "127.0.0.1:0", "--log-format", "text", "--log-level", "debug",
		}, lease...), args...),
	}
	proxy.Watch(p.watch)
	if err := p.start(); err != nil {
		w.t.Fatal(err)
	}
	w.places = append(w.places, p)
	go p.keep()
	w.t.Cleanup(func() {
		p.mu.Lock()
		p.stopping = true
		_ = p.proc.cmd.Process.Kill() // it may be gone
		p.mu.Unlock()
		<-p.over
	})
	return p
}

// start starts a process, under a name that none had before.
func (p *place) start() error {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.stopping {
		return nil
	}
	p.started++
	proc := &process{name: fmt.Sprintf("%s-%d", p.name, p.started), done: make(chan struct{})}
	proc.log = filepath.Join(p.w.dir, proc.name+".log")
	out, err := os.Create(proc.log)
	if err != nil {
		return err
	}
	defer out.Close() // the process has its own
	proc.cmd = exec.Command(filepath.Join(binaries, p.program), append([]string{"--worker-id", proc.name}, p.args...)...)
	proc.cmd.Env = append(os.Environ(), "RV_DATABASE_URL="+p.proxy.URL())
	proc.cmd.Stdout, proc.cmd.Stderr = out, out // files: nothing that it leaves behind can keep Wait waiting
	proc.cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	if err := proc.cmd.Start(); err != nil {
		return err
	}
	go func() {
		proc.err = proc.cmd.Wait()
		close(proc.done)
	}()
	p.proc = proc
	return nil
}

// keep starts the next process when one has ended, until the place is stopping.
func (p *place) keep() {
	defer close(p.over)
	for {
		p.mu.Lock()
		proc := p.proc
		p.mu.Unlock()
		<-proc.done
		p.mu.Lock()
		stopping, killed, told := p.stopping, proc.killed, proc.told
		p.mu.Unlock()
		if told && proc.early() {
			proc.err = nil
		}
		if killed == "" && (proc.err != nil || !told) && p.w.ctx.Err() == nil {
			p.w.wrong("%s ended by itself: %v\n%s", proc.name, proc.err, tail(proc.log))
		}
		if stopping || p.w.ctx.Err() != nil {
			return
		}
		if err := p.start(); err != nil {
			p.w.wrong("starting a %s: %v", p.program, err)
			return
		}
	}
}

// early reports whether a process was told to end before it could take the signal.
func (proc *process) early() bool {
	status, ok := proc.cmd.ProcessState.Sys().(syscall.WaitStatus)
	text, err := os.ReadFile(proc.log)
	return err == nil && ok && status.Signaled() && status.Signal() == syscall.SIGTERM && !strings.Contains(string(text), ` up"`)
}

// watch kills the process that is at the armed point.
func (p *place) watch(at faultproxy.Moment, tx []faultproxy.Statement) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.proc.killed != "" {
		return true // what it had sent before it died
	}
	t := transaction{}
	if p.armed != nil && (p.armed.at == at || p.armed.tell != nil) || p.deadly != "" && at == afterCommit {
		t = read(tx)
	}
	if p.armed != nil && p.armed.tell != nil && !p.proc.told && p.armed.tell(at, t) {
		p.proc.told = true
		_ = p.proc.cmd.Process.Signal(syscall.SIGTERM) // it can't be gone: it is connected
	}
	switch {
	case p.armed != nil && p.armed.at == at && p.armed.in(t):
		p.proc.killed = p.armed.String()
		p.armed = nil
		close(p.reached)
	case p.deadly != "" && at == afterCommit && t.session == p.deadly && strings.Contains(t.appended, `"type":"step.started"`):
		p.proc.killed = "a step of session " + p.deadly
	default:
		return true
	}
	_ = p.proc.cmd.Process.Kill() // it can't be gone: it is connected
	return false
}

// arm has the next process that gets to a point killed there.
func (p *place) arm(at *point) (reached <-chan struct{}) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.armed, p.reached = at, make(chan struct{})
	return p.reached
}

// kill has a process of the place killed at a point, and reports whether that was done.
func (p *place) kill(at *point) bool {
	reached, began := p.arm(at), time.Now()
	deadline := time.NewTimer(patience)
	defer deadline.Stop()
	for {
		p.mu.Lock()
		proc := p.proc
		p.mu.Unlock()
		select {
		case <-reached:
			p.w.t.Logf("%s was killed after %.1fs at %s", p.name, time.Since(began).Seconds(), at)
			return true
		case <-proc.done: // it was told to end, and had nothing to do, or died of something else
		case <-p.w.ctx.Done():
			return false
		case <-deadline.C:
			p.w.wrong("%s was not within %v at %q\n%s", p.name, patience, at, tail(proc.log))
			return false
		}
		if !p.w.until("the next process of "+p.name, func() bool {
			p.mu.Lock()
			defer p.mu.Unlock()
			return p.proc != proc
		}) {
			return false
		}
	}
}

// terminate tells a process to end.
func (p *place) terminate(proc *process) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if !proc.told { // a second one would end it at once
		proc.told = true
		_ = proc.cmd.Process.Signal(syscall.SIGTERM) // it may be gone
	}
}

// stop ends all processes in an orderly way.
func (w *world) stop() {
	w.t.Helper()
	for _, p := range w.places {
		p.mu.Lock()
		p.stopping, p.armed, p.deadly = true, nil, ""
		proc := p.proc
		p.mu.Unlock()
		p.terminate(proc)
	}
	for _, p := range w.places {
		select {
		case <-p.over:
		case <-time.After(patience):
			w.wrong("%s does not end within %v", p.name, patience)
		}
	}
	logs, err := filepath.Glob(filepath.Join(w.dir, "*.log"))
	if err != nil {
		w.t.Fatal(err)
	}
	for _, path := range logs {
		text, err := os.ReadFile(path)
		if err != nil {
			w.t.Fatal(err)
		}
		for _, bad := range []string{"DATA RACE", "panic:", "level=ERROR"} {
			if at := strings.Index(string(text), bad); at >= 0 {
				w.t.Errorf("%s says %s:\n%.4000s", filepath.Base(path), bad, text[max(0, at-200):])
			}
		}
	}
}

// tail is the end of a log.
func tail(path string) string {
	text, err := os.ReadFile(path)
	if err != nil {
		return err.Error()
	}
	return string(text[max(0, len(text)-4000):])
}

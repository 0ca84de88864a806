package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"reveille/bus"
	"reveille/claims/crdb"
	"reveille/internal/localdb"
	"reveille/internal/torture/truth"
)

const (
	// maxSkew is what the processes are told, and clocks are off by less.
	maxSkew = 400 * time.Millisecond
	lease   = 3200 * time.Millisecond
	// killAfter of a command, and what it is told at a SIGTERM of its worker.
	killAfter = 700 * time.Millisecond
	// ackWait of the durables: what a dead worker had in hand is delivered again after it. It is a good deal less than
	// what Reveille makes them with, which only costs deliveries.
	ackWait = 3 * time.Second
	// patience bounds every wait for something to start or to end.
	patience = time.Minute
)

// skews are how far the clock of each gateway is off.
var skews = [3]time.Duration{0, maxSkew / 3, -maxSkew / 3}

// common are flags of workers and scanners.
var common = []string{
	"--http", "127.0.0.1:0", "--log-format", "text", "--log-level", "debug",
	"--lease", lease.String(), "--heartbeat", "400ms", "--max-clock-skew", maxSkew.String(), "--stop-margin", "400ms", "--db-timeout", "1500ms",
}

// world is a database, one or three NATS servers, workers and scanners, and the links between them.
type world struct {
	dir      string
	bin      string // of the programs
	history  *history
	links    links
	url      string // of the database, past all links
	external bool   // the database is not ours
	db       *localdb.Server
	dbMu     sync.Mutex // held by whoever takes the database away, and reads db
	pool     *pgxpool.Pool
	nodes    []*node
	natsMu   sync.Mutex // held by whoever takes servers away
	nc       *nats.Conn // straight to the servers
	js       jetstream.JetStream
	places   []*place
}

// newWorld starts everything. The caller closes it, also after an error.
func newWorld(ctx context.Context, o options, h *history) (*world, error) {
	w := &world{history: h, links: newLinks(), url: o.DatabaseURL, external: o.DatabaseURL != ""}
	var err error
	if w.dir, err = os.MkdirTemp("/var/tmp", "reveille-torture-"); err != nil {
		return w, err
	}
	w.bin = filepath.Join(w.dir, "bin")
	if err := w.build(ctx, o); err != nil {
		return w, err
	}
	if err := w.startDatabase(ctx); err != nil {
		return w, err
	}
	if _, err := crdb.Migrate(ctx, w.url, false); err != nil {
		return w, err
	}
	if w.pool, err = pgxpool.New(ctx, w.url); err != nil {
		return w, err
	}
	if n, err := w.number(ctx, "SELECT count(*) FROM sessions"); err != nil || n > 0 { // its workers would take what they find
		return w, cmp.Or(err, fmt.Errorf("the database has %d sessions: name an empty one", n))
	}
	if err := w.startNATS(ctx, o.Nats); err != nil {
		return w, err
	}
	for n := range o.Workers {
		p := worker
		args := []string{"--slots", "6", "--history", "3", "--grace", "1s", "--kill-after", killAfter.String(), "--retry-base", "300ms", "--retry-max", "1s"}
		if n%3 == 1 {
			p = goWorker
		} else {
			args = append(args, "--exec", "exec '"+w.program("deeds")+"' step")
		}
		if err := w.add(p, n, o.Nats, args...); err != nil {
			return w, err
		}
	}
	for n := range o.Scanners {
		if err := w.add(scanner, n, o.Nats, "--every", "300ms", "--max-takeovers", "20"); err != nil {
			return w, err
		}
	}
	return w, nil
}

func (w *world) program(name string) string { return filepath.Join(w.bin, name) }

// build builds the programs, with the mutation that is asked for.
func (w *world) build(ctx context.Context, o options) error {
	args := []string{"build", "-o", w.bin + "/"}
	if o.Race {
		args = append(args, "-race")
	}
	if o.Mutant != "" {
		m, err := findMutant(o.Mutant)
		if err != nil {
			return err
		}
		overlay, err := m.overlay(w.dir)
		if err != nil {
			return err
		}
		args = append(args, "-overlay", overlay)
	}
	for _, packages := range [][]string{
		append(args, "reveille/cmd/worker", "reveille/cmd/scanner", "reveille/cmd/reveille", "reveille/internal/torture/deeds"),
		{"build", "-o", w.bin + "/", "github.com/nats-io/nats-server/v2"},
	} {
		cmd := exec.CommandContext(ctx, "go", packages...)
		cmd.Stderr = os.Stderr
		if err := cmd.Run(); err != nil {
			return fmt.Errorf("building the programs: %w", err)
		}
	}
	return nil
}

// startDatabase starts the server, at the port that it had.
func (w *world) startDatabase(ctx context.Context) error {
	if w.external {
		return nil
	}
	db, err := localdb.Start(ctx, localdb.Options{Dir: filepath.Join(w.dir, "db")})
	if err != nil {
		return err
	}
	w.db = db
	if w.url == "" {
		w.url = db.URL()
	}
	if w.url != db.URL() {
		return fmt.Errorf("the database is at %s and was at %s: somebody took its port", db.URL(), w.url)
	}
	return nil
}

// killDatabase ends all its processes at once.
func (w *world) killDatabase() error {
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	if err := w.db.Stop(ctx); err != nil && !errors.Is(err, context.Canceled) {
		return err
	}
	return nil
}

// node is a NATS server.
type node struct {
	name    string
	bin     string
	config  string
	store   string
	mounted bool
	addr    string
	log     *os.File
	cmd     *exec.Cmd
	done    chan struct{}
}

// freePort is a port that nobody listens on.
func freePort() (int, error) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return 0, err
	}
	defer l.Close()
	return l.Addr().(*net.TCPAddr).Port, nil
}

// storeSize is of the file system that a server's store is on, where one can be mounted.
const storeSize = "192m"

// startNATS starts one or three servers, makes the streams and connects.
func (w *world) startNATS(ctx context.Context, count int) error {
	var routes []string
	ports := make([][2]int, count)
	for i := range ports {
		for k := range ports[i] {
			var err error
			if ports[i][k], err = freePort(); err != nil {
				return err
			}
		}
		routes = append(routes, fmt.Sprintf("nats://127.0.0.1:%d", ports[i][1]))
	}
	var urls []string
	for i := range count {
		n := &node{
			name: fmt.Sprintf("nats%d", i), bin: w.program("nats-server"), config: filepath.Join(w.dir, fmt.Sprintf("nats%d.conf", i)),
			store: filepath.Join(w.dir, fmt.Sprintf("nats%d", i)), addr: fmt.Sprintf("127.0.0.1:%d", ports[i][0]),
		}
		w.nodes = append(w.nodes, n)
		if err := os.Mkdir(n.store, 0o700); err != nil {
			return err
		}
		// So that its disk can be full. Where nothing may be mounted, that fault is left out, and the run says so.
		n.mounted = syscall.Mount("tmpfs", n.store, "tmpfs", 0, "size="+storeSize) == nil
		text := fmt.Sprintf("server_name: %s\nlisten: %q\njetstream { store_dir: %q, max_file_store: 1G }\n", n.name, n.addr, n.store)
		if count > 1 {
			text += fmt.Sprintf("cluster { name: torture, listen: \"127.0.0.1:%d\", no_advertise: true, routes: [%s] }\n", ports[i][1], strings.Join(routes, ", "))
		}
		if err := os.WriteFile(n.config, []byte(text), 0o600); err != nil {
			return err
		}
		var err error
		if n.log, err = os.Create(filepath.Join(w.dir, n.name+".nats-log")); err != nil {
			return err
		}
		if err := n.start(); err != nil {
			return err
		}
		urls = append(urls, "nats://"+n.addr)
	}
	var err error
	w.nc, err = nats.Connect(strings.Join(urls, ","), nats.Name("torture"), nats.MaxReconnects(-1), nats.ReconnectWait(50*time.Millisecond),
		nats.RetryOnFailedConnect(true), nats.IgnoreDiscoveredServers(), nats.Timeout(2*time.Second))
	if err != nil {
		return err
	}
	if w.js, err = jetstream.New(w.nc); err != nil {
		return err
	}
	return within(ctx, patience, "the streams", func() error { return w.makeStreams(ctx, urls, count) })
}

func (w *world) makeStreams(ctx context.Context, urls []string, replicas int) error {
	conn, err := bus.Connect(ctx, bus.Options{URL: strings.Join(urls, ","), Name: "torture"})
	if err != nil {
		return err
	}
	defer conn.Close()
	if _, err := conn.Ensure(ctx, bus.StreamOptions{MaxClockSkew: time.Millisecond, Replicas: replicas}); err != nil {
		return err
	}
	return w.shortenAckWait(ctx)
}

func (w *world) shortenAckWait(ctx context.Context) error {
	for _, stream := range []string{"RV_COMMANDS", "RV_READY"} {
		s, err := w.js.Stream(ctx, stream)
		if err != nil {
			return err
		}
		all := s.ListConsumers(ctx)
		for c := range all.Info() {
			c.Config.AckWait = ackWait
			if _, err := w.js.UpdateConsumer(ctx, stream, c.Config); err != nil {
				return fmt.Errorf("durable %s: %w", c.Name, err)
			}
		}
		if err := all.Err(); err != nil {
			return err
		}
	}
	return nil
}

// start starts the server; it is ready when somebody can connect.
func (n *node) start() error {
	n.cmd = exec.Command(n.bin, "-c", n.config)
	n.cmd.Stdout, n.cmd.Stderr = n.log, n.log
	n.cmd.SysProcAttr = ownGroup()
	if err := n.cmd.Start(); err != nil {
		return fmt.Errorf("starting %s: %w", n.name, err)
	}
	n.done = make(chan struct{})
	go func(cmd *exec.Cmd, done chan struct{}) {
		_ = cmd.Wait() // how it ended is in its log
		close(done)
	}(n.cmd, n.done)
	return within(context.Background(), patience, n.name+" to listen", func() error {
		c, err := net.DialTimeout("tcp", n.addr, time.Second)
		if err != nil {
			return err
		}
		return c.Close()
	})
}

// stop ends the server and waits until it is gone.
func (n *node) stop(sig os.Signal) {
	if n.cmd == nil || n.cmd.Process == nil {
		return
	}
	_ = n.cmd.Process.Signal(sig) // it may be gone
	select {
	case <-n.done:
	case <-time.After(20 * time.Second):
		_ = n.cmd.Process.Kill() // it may be gone
		<-n.done
	}
}

// Programs of places.
const (
	worker   = "worker"
	goWorker = "deeds"
	scanner  = "scanner"
)

// place is where one process of a program runs after the other, all through the same links.
type place struct {
	w       *world
	program string
	name    string
	args    []string
	door    *door
	nats    []*link
	gone    chan struct{} // closed when nothing is started here any more and the last process is gone

	mu       sync.Mutex // guards the rest
	proc     *process
	started  int
	stopping bool
}

// process is one process.
type process struct {
	name   string
	cmd    *exec.Cmd
	log    string
	done   chan struct{}
	ending bool // guarded by the place: it was told to end, or killed
}

// add makes a place and starts its first process.
func (w *world) add(program string, number, count int, args ...string) error {
	p := &place{w: w, program: program, name: fmt.Sprintf("%s%d", program, number), gone: make(chan struct{})}
	var err error
	if p.door, err = w.links.newDoor(p.name, w.url); err != nil {
		return err
	}
	var urls []string
	for i := range count { // each prefers another server
		n := w.nodes[(number+i)%count]
		l, err := w.links.add(p.name+" to "+n.name, n.addr)
		if err != nil {
			return err
		}
		p.nats = append(p.nats, l)
		urls = append(urls, "nats://"+l.addr)
	}
	p.args = append(append([]string{"--nats-url", strings.Join(urls, ","), "--replicas", fmt.Sprint(count)}, common...), args...)
	w.places = append(w.places, p)
	err = p.start()
	if p.proc == nil {
		close(p.gone)
		return err
	}
	go p.keep()
	return err
}

func ownGroup() *syscall.SysProcAttr {
	return &syscall.SysProcAttr{Setpgid: true, Pdeathsig: syscall.SIGKILL}
}

// start starts a process under a name that none had before.
func (p *place) start() error {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.stopping {
		return errStopping
	}
	p.started++
	proc := &process{name: fmt.Sprintf("%s-%d", p.name, p.started), done: make(chan struct{})}
	proc.log = filepath.Join(p.w.dir, proc.name+".log")
	out, err := os.Create(proc.log)
	if err != nil {
		return err
	}
	defer out.Close() // the process has its own
	proc.cmd = exec.Command(p.w.program(p.program), append([]string{"--worker-id", proc.name}, p.args...)...)
	proc.cmd.Env = append(os.Environ(), "RV_DATABASE_URL="+p.door.url, truth.EnvDir+"="+p.w.dir, truth.EnvWorker+"="+proc.name)
	proc.cmd.Stdout, proc.cmd.Stderr = out, out
	proc.cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	if err := proc.cmd.Start(); err != nil {
		return fmt.Errorf("starting %s: %w", proc.name, err)
	}
	go func() {
		_ = proc.cmd.Wait() // how it ended stands in its state
		close(proc.done)
	}()
	p.proc = proc
	return truth.Dir(p.w.dir).SetPID(proc.name, proc.cmd.Process.Pid)
}

// errStopping: no process is started in this place any more.
var errStopping = errors.New("the place is stopping")

// restartPause is between a process's death and the start of the next.
const restartPause = 200 * time.Millisecond

// keep starts the next process when one has ended, until the place is stopping.
func (p *place) keep() {
	defer close(p.gone)
	for {
		proc := p.now()
		<-proc.done
		p.mu.Lock()
		stopping, told := p.stopping, proc.ending
		p.mu.Unlock()
		if state := proc.cmd.ProcessState; !told && state.ExitCode() >= 0 { // handlers kill their worker, which is no end of its own
			p.w.history.wrong("%s ended by itself: %s\n%s", proc.name, state, tail(proc.log))
		}
		if stopping {
			return
		}
		time.Sleep(restartPause)
		switch err := p.start(); {
		case errors.Is(err, errStopping):
			return
		case err != nil:
			p.w.history.wrong("%v", err)
			return
		}
	}
}

func (p *place) now() *process {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.proc
}

// signal sends a signal to the present process, and returns that; nil where none could be started.
func (p *place) signal(sig syscall.Signal) *process {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.proc == nil {
		return nil
	}
	if sig == syscall.SIGTERM || sig == syscall.SIGKILL {
		if p.proc.ending && sig == syscall.SIGTERM { // a second one would end it at once
			return p.proc
		}
		p.proc.ending = true
	}
	_ = p.proc.cmd.Process.Signal(sig) // it may be gone
	return p.proc
}

// heal puts everything right that faults have done to a place.
func (p *place) heal() error {
	p.signal(syscall.SIGCONT)
	err := p.door.link.heal()
	for _, g := range p.door.gateway {
		g.Disarm()
	}
	for _, l := range p.nats {
		err = errors.Join(err, l.heal())
	}
	return err
}

// stop ends the processes in an orderly way.
func (w *world) stop() error {
	for _, p := range w.places {
		p.mu.Lock()
		p.stopping = true
		p.mu.Unlock()
		p.signal(syscall.SIGTERM)
	}
	var err error
	for _, p := range w.places {
		select {
		case <-p.gone:
		case <-time.After(patience):
			err = errors.Join(err, fmt.Errorf("%s does not end within %v of SIGTERM\n%s", p.name, patience, tail(p.now().log)))
		}
	}
	return errors.Join(err, w.complaints())
}

// complaint is what no log may say, unless a handler was told to panic.
var complaint = regexp.MustCompile(`DATA RACE|panic: .{0,40}|goroutine \d+ \[running\]`)

// complaints are what no log may say.
func (w *world) complaints() error {
	logs, err := filepath.Glob(filepath.Join(w.dir, "*.log"))
	for _, path := range logs {
		text, err2 := os.ReadFile(path)
		err = errors.Join(err, err2)
		for _, at := range complaint.FindAllIndex(text, -1) {
			if !strings.Contains(string(text[max(0, at[0]-200):min(len(text), at[1]+200)]), "it was told to panic") {
				w.history.wrong("%s complains:\n%.3000s", filepath.Base(path), text[max(0, at[0]-200):])
				break
			}
		}
	}
	return err
}

// close ends whatever is there, however far it got.
func (w *world) close() {
	for _, p := range w.places {
		p.mu.Lock()
		p.stopping = true
		p.mu.Unlock()
		p.signal(syscall.SIGCONT)
		p.signal(syscall.SIGKILL)
		<-p.gone
		p.door.close()
	}
	if w.nc != nil {
		w.nc.Close()
	}
	for _, n := range w.nodes {
		n.stop(syscall.SIGKILL)
		_ = n.log.Close()
		if n.mounted {
			_ = syscall.Unmount(n.store, syscall.MNT_DETACH)
		}
	}
	w.links.close()
	if w.pool != nil {
		w.pool.Close()
	}
	if w.db != nil {
		_ = w.killDatabase() // nothing of it is wanted any more
	}
}

// remove removes what a run left on disk.
func (w *world) remove() error { return os.RemoveAll(w.dir) }

// rows reads rows into structs by their columns' names.
func rows[T any](ctx context.Context, w *world, query string, args ...any) ([]T, error) {
	r, err := w.pool.Query(ctx, query, args...)
	if err != nil {
		return nil, err
	}
	return pgx.CollectRows(r, pgx.RowToStructByName[T])
}

// number is the one number of a query.
func (w *world) number(ctx context.Context, query string) (n int, err error) {
	err = w.pool.QueryRow(ctx, query).Scan(&n)
	return n, err
}

// pollEvery is between two looks at what no signal tells.
const pollEvery = 50 * time.Millisecond

// within tries until it succeeds; what is what it waits for.
func within(ctx context.Context, limit time.Duration, what string, try func() error) error {
	deadline := time.Now().Add(limit)
	for {
		err := try()
		switch {
		case err == nil:
			return nil
		case ctx.Err() != nil:
			return fmt.Errorf("waiting for %s: %w (%w)", what, err, ctx.Err())
		case time.Now().After(deadline):
			return fmt.Errorf("waited %v for %s: %w", limit, what, err)
		}
		time.Sleep(pollEvery)
	}
}

// tail is the end of a log.
func tail(path string) string {
	text, err := os.ReadFile(path)
	if err != nil {
		return err.Error()
	}
	return string(text[max(0, len(text)-2000):])
}

// copyDir copies a folder, in the place of what was there.
func copyDir(to, from string) error {
	if err := os.RemoveAll(to); err != nil {
		return err
	}
	return os.CopyFS(to, os.DirFS(from))
}

// copyInto copies a folder's files into an empty one.
func copyInto(to, from string) error { return os.CopyFS(to, os.DirFS(from)) }

// empty removes what is in a folder.
func empty(dir string) error {
	entries, err := os.ReadDir(dir)
	for _, e := range entries {
		err = errors.Join(err, os.RemoveAll(filepath.Join(dir, e.Name())))
	}
	return err
}

// Package localdb starts the private database server that `reveille dev` and the tests run on.
//
// Words: the state folder is the caller's (Options.Dir); the home is where the server keeps its data, which is
// the state folder too unless the server's user can't get there; a leftover is a server of the same data that an
// earlier process started and did not stop.
//
// What holds:
//
//   - One Server per state folder: a lock that dies with its process guards it. A leftover is stopped first.
//   - The server dies with the process that started it, even at kill -9 (Linux; elsewhere the next Start stops it).
//   - Data survive Stop, a killed server and a killed parent. With Options.Ephemeral they survive only until the
//     machine stops, because nothing is synced to disk.
//   - Other users of the machine can't sign in to PostgreSQL: it listens on 127.0.0.1 only and wants a random
//     password, which stands in the state folder, mode 0600.
//
// What is not promised: a private CockroachDB runs with --insecure, so any user of the machine can sign in to it;
// Windows is not supported.
package localdb

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/url"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"time"
)

// Engines, as Server.Engine reports them.
const (
	EnginePostgres  = "postgres"
	EngineCockroach = "cockroach"
	EngineExternal  = "external"
)

// Database is the name of the database that Server.URL points to.
const Database = "reveille"

const (
	// startTimeout bounds Start where the caller's context has no deadline: initdb on a slow disk takes most of it.
	startTimeout = 60 * time.Second
	// pollInterval is how often a file or a port is looked at that sends no signal of its own.
	pollInterval = 20 * time.Millisecond
	// portTries bounds the race for a free port: it can be taken between looking and binding.
	portTries = 5
	// tempBase is where data go that the server's user must reach whatever the modes of the caller's folders;
	// /tmp is often a small tmpfs.
	tempBase = "/var/tmp"
)

// ErrNoDatabase says that this machine has no database server, and what to type to get one.
var ErrNoDatabase = errors.New("no database server found: install PostgreSQL 15 or later " +
	"(apt-get install postgresql | dnf install postgresql-server | brew install postgresql@17), " +
	"put cockroach on PATH, or set RV_DATABASE_URL")

// ErrInUse says that another process runs a server on the same state folder.
var ErrInUse = errors.New("state folder is in use")

// Options say which server to start and where.
type Options struct {
	// Dir is the state folder; it is made if it is not there. Not used with URL.
	Dir string
	// URL of a server that runs already: nothing is started, Stop stops nothing.
	URL string
	// Port to listen on, on 127.0.0.1. 0 takes a free one and the same again at the next start, if it is still free.
	Port int
	// Ephemeral trades durability for speed; for tests.
	Ephemeral bool
	// Log hears, in a line each, of what Start does that takes time or surprises. May be nil.
	Log io.Writer
}

// Server is a running database server. Its methods may be called from any goroutine.
type Server struct {
	url      string
	engine   string
	describe string
	proc     *process // nil where external
	state    *state   // nil where external
	temp     string   // to be removed by Stop
	stopping atomic.Bool
	done     chan struct{}

	stopMu  sync.Mutex
	stopped bool
}

// engine is what differs between the servers that can be started here.
type engine interface {
	name() string
	// prepare makes the data directory if it is not there.
	prepare(ctx context.Context) error
	// command of the server, listening on port.
	command(port int) command
	// ready says whether it is p that takes connections on port.
	ready(ctx context.Context, p *process, port int) bool
	// url of a database of the server.
	url(port int, database string) string
}

// Start starts the server, or connects to the one at Options.URL, and returns when a connection to the database
// `reveille` (or that of the URL) has answered; it creates that database if it is not there. ctx bounds the start
// (60 s where it has no deadline), not the server's life. Errors are one line: ErrNoDatabase, ErrInUse, or what the server's log said last.
func Start(ctx context.Context, o Options) (*Server, error) {
	if _, has := ctx.Deadline(); !has {
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeout(ctx, startTimeout)
		defer cancel()
	}
	if o.Log == nil {
		o.Log = io.Discard
	}
	if o.URL != "" {
		return external(ctx, o.URL)
	}
	if o.Dir == "" {
		return nil, errors.New("localdb: no state folder given")
	}
	st, err := openState(o.Dir)
	if err != nil {
		return nil, err
	}
	s, err := start(ctx, o, st)
	if err != nil {
		return nil, errors.Join(err, st.close())
	}
	return s, nil
}

func start(ctx context.Context, o Options, st *state) (*Server, error) {
	eng, err := choose(ctx, o, st)
	if err != nil {
		return nil, err
	}
	if err := stopLeftovers(ctx, eng.name(), st.data, o.Log); err != nil {
		return nil, err
	}
	if err := eng.prepare(ctx); err != nil {
		return nil, err
	}
	proc, port, err := launch(ctx, o, st, eng)
	if err != nil {
		return nil, err
	}
	dbURL := eng.url(port, Database)
	if err := ensureDatabase(ctx, dbURL); err != nil {
		proc.kill(eng.name(), st.data)
		return nil, fmt.Errorf("%s (pid %d) does not take connections: %w", eng.name(), proc.pid, err)
	}
	if err := st.write("port", fmt.Sprintf("%d\n", port)); err != nil {
		proc.kill(eng.name(), st.data)
		return nil, err
	}
	s := &Server{
		url: dbURL, engine: eng.name(), proc: proc, state: st, done: make(chan struct{}),
		describe: fmt.Sprintf("%s (pid %d) on 127.0.0.1:%d, data in %s", proc.title, proc.pid, port, st.data),
	}
	if st.moved != "" {
		s.describe += " (" + st.moved + ")"
	}
	go s.watch()
	return s, nil
}

// choose picks the engine: the data that are there decide, then cockroach on PATH, then PostgreSQL.
func choose(ctx context.Context, o Options, st *state) (engine, error) {
	had := st.read("engine")
	if bin := findCockroach(); bin != "" && had != EnginePostgres {
		st.data = filepath.Join(st.dir, dataName(EngineCockroach))
		return &cockroach{bin: bin, state: st, ephemeral: o.Ephemeral}, nil
	}
	if had == EngineCockroach {
		return nil, fmt.Errorf("the data in %s are CockroachDB's and there is no cockroach on PATH: put it there, or remove that folder to begin anew", st.dir)
	}
	return newPostgres(ctx, o, st)
}

// launch starts the server and waits until it is ready, on another port where the chosen one was taken meanwhile.
func launch(ctx context.Context, o Options, st *state, eng engine) (*process, int, error) {
	logFile, err := st.openLog()
	if err != nil {
		return nil, 0, err
	}
	defer logFile.Close()
	for try := 1; ; try++ {
		port, err := st.choosePort(o.Port, try)
		if err != nil {
			return nil, 0, err
		}
		proc, err := startProcess(eng.command(port), logFile)
		if err != nil {
			return nil, 0, fmt.Errorf("starting %s: %w", eng.name(), err)
		}
		err = waitReady(ctx, eng, proc, port)
		if err == nil {
			return proc, port, nil
		}
		proc.kill(eng.name(), st.data)
		if errors.Is(err, errPortTaken) && o.Port == 0 && try < portTries {
			continue
		}
		return nil, 0, err
	}
}

var errPortTaken = errors.New("is taken by another process: give another port")

func waitReady(ctx context.Context, eng engine, proc *process, port int) error {
	tick := time.NewTicker(pollInterval)
	defer tick.Stop()
	for {
		if eng.ready(ctx, proc, port) {
			return nil
		}
		select {
		case <-tick.C:
		case <-proc.exited:
			tail := proc.log.tail()
			if strings.Contains(strings.ToLower(tail), "address already in use") {
				return fmt.Errorf("%s did not start: port %d %w (log: %s)", eng.name(), port, errPortTaken, tail)
			}
			return fmt.Errorf("%s did not start: %s (log %s: %s)", eng.name(), proc.exitText(), proc.log.path, tail)
		case <-ctx.Done():
			return fmt.Errorf("%s was not ready in time: %w (log %s: %s)", eng.name(), ctx.Err(), proc.log.path, proc.log.tail())
		}
	}
}

func external(ctx context.Context, rawURL string) (*Server, error) {
	dbURL, err := withDefaultDatabase(rawURL)
	if err != nil {
		return nil, err
	}
	if err := ensureDatabase(ctx, dbURL); err != nil {
		return nil, fmt.Errorf("the database of RV_DATABASE_URL does not answer: %w", err)
	}
	return &Server{url: dbURL, engine: EngineExternal, describe: "external database " + redact(dbURL), done: make(chan struct{})}, nil
}

// URL of the database, with its password in it.
func (s *Server) URL() string { return s.url }

// Engine is "postgres", "cockroach" or "external".
func (s *Server) Engine() string { return s.engine }

// Describe says in one line what runs where, without the password.
func (s *Server) Describe() string { return s.describe }

// Done is closed if the server ends without Stop. Nothing closes it after Stop, nor for an external server.
func (s *Server) Done() <-chan struct{} { return s.done }

// Pid of the server, or 0 where it is external.
func (s *Server) Pid() int {
	if s.proc == nil {
		return 0
	}
	return s.proc.pid
}

// Err says, after Done was closed, how the server ended; before that it is nil.
func (s *Server) Err() error {
	select {
	case <-s.done:
		return fmt.Errorf("%s (pid %d) ended by itself: %s (log %s: %s)", s.engine, s.proc.pid, s.proc.exitText(), s.proc.log.path, s.proc.log.tail())
	default:
		return nil
	}
}

// Stop ends the server: a fast shutdown, which ends its connections, and a kill of it and its children when ctx ends
// first (an error that wraps the context's; the data are recovered at the next start). It frees the state folder.
// Further calls wait for the first and do nothing.
func (s *Server) Stop(ctx context.Context) error {
	s.stopping.Store(true)
	s.stopMu.Lock()
	defer s.stopMu.Unlock()
	if s.stopped || s.proc == nil {
		return nil
	}
	s.stopped = true
	err := s.proc.stop(ctx, s.engine, s.state.data)
	if s.temp != "" {
		// Before the lock is freed, or another process's sweep gets in the way.
		err = errors.Join(err, os.RemoveAll(s.temp))
	}
	return errors.Join(err, s.state.close())
}

func (s *Server) watch() {
	<-s.proc.exited
	if !s.stopping.Load() {
		close(s.done)
	}
}

// StartTemp starts an ephemeral server in a new folder below /var/tmp, which Stop removes. It first removes the
// folders of processes that were killed before they could.
func StartTemp(ctx context.Context, log io.Writer) (*Server, error) {
	sweepTemp()
	dir, err := makeTemp()
	if err != nil {
		return nil, err
	}
	s, err := Start(ctx, Options{Dir: dir, Ephemeral: true, Log: log})
	if err != nil {
		return nil, errors.Join(err, os.RemoveAll(dir))
	}
	s.temp = dir
	return s, nil
}

func redact(rawURL string) string {
	u, err := url.Parse(rawURL)
	if err != nil {
		return "(not a URL)"
	}
	return u.Redacted()
}

// freePort takes a port that nobody listens on, preferring the one given; 0 prefers none.
func freePort(preferred int) (int, error) {
	if preferred != 0 {
		if l, err := net.Listen("tcp4", fmt.Sprintf("127.0.0.1:%d", preferred)); err == nil {
			return preferred, l.Close()
		}
	}
	l, err := net.Listen("tcp4", "127.0.0.1:0")
	if err != nil {
		return 0, fmt.Errorf("no free port on 127.0.0.1: %w", err)
	}
	port := l.Addr().(*net.TCPAddr).Port
	return port, l.Close()
}

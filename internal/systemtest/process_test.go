package systemtest

import (
	"bytes"
	"encoding/json"
	"fmt"
	"net"
	"net/http"
	"os"
	"os/exec"
	"strings"
	"sync"
	"syscall"
	"time"

	"reveille/internal/systemtest/ask"
)

// proc is a process of ours.
type proc struct {
	w     *world
	name  string
	cmd   *exec.Cmd
	ready func() bool
	gone  bool // it was ended by us
	done  chan struct{}
	err   error

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
	p := w.begin(program, name, args...)
	p.wait()
	return p
}

// begin starts a program.
func (w *world) begin(program, name string, args ...string) *proc {
	w.t.Helper()
	return w.beginAs(exec.Command(w.program(program)), name, args...)
}

// beginAs starts a command as a worker or a scanner.
func (w *world) beginAs(cmd *exec.Cmd, name string, args ...string) *proc {
	w.t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		w.t.Fatal(err)
	}
	addr := l.Addr().String()
	_ = l.Close()
	cmd.Args = append(cmd.Args, "--nats-url", w.natsURL(), "--http", addr, "--worker-id", name, "--log-format", "text",
		"--lease", "6s", "--heartbeat", "1s", "--max-clock-skew", "200ms", "--stop-margin", "500ms")
	cmd.Args = append(cmd.Args, args...)
	if cmd.Env == nil {
		cmd.Env = os.Environ()
	}
	cmd.Env = append(cmd.Env, "RV_DATABASE_URL="+w.databaseURL())
	return w.launch(name, cmd, func(*proc) bool { return get("http://"+addr+"/readyz") == http.StatusOK })
}

// launch starts a process, which is ready when it says so by itself.
func (w *world) launch(name string, cmd *exec.Cmd, ready func(*proc) bool) *proc {
	w.t.Helper()
	p := &proc{w: w, name: name, cmd: cmd, done: make(chan struct{})}
	p.ready = func() bool { return ready(p) }
	cmd.Stdout, cmd.Stderr = p, p
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	if err := cmd.Start(); err != nil {
		w.t.Fatal(err)
	}
	w.note("+", cmd.Process.Pid)
	go func() {
		p.err = cmd.Wait()
		close(p.done)
	}()
	w.procs = append(w.procs, p)
	return p
}

// wait waits until the process is ready.
func (p *proc) wait() {
	p.w.t.Helper()
	p.w.until(p.name+" is ready", func() bool {
		if !p.alive() {
			p.w.t.Fatalf("%s ended while it started: %v\n%s", p.name, p.err, p.output())
		}
		return p.ready()
	})
}

func get(url string) int {
	resp, err := http.Get(url)
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

// kill is SIGKILL; nothing is left running of the process itself.
func (p *proc) kill() {
	p.gone = true
	_ = p.cmd.Process.Kill() // it may be gone already
	<-p.done
	p.w.note("-", p.cmd.Process.Pid)
}

// close ends a process at the end of its test, and looks at what it said.
func (p *proc) close() {
	p.kill()
	if strings.Contains(p.output(), "WARNING: DATA RACE") {
		p.w.t.Errorf("%s has a data race", p.name)
	}
	if p.w.t.Failed() {
		p.w.t.Logf("log of %s:\n%s", p.name, p.output())
	}
}

// signal sends SIGTERM.
func (p *proc) signal() {
	p.w.t.Helper()
	p.gone = true
	if err := p.cmd.Process.Signal(syscall.SIGTERM); err != nil {
		p.w.t.Fatal(err)
	}
}

// ended waits for the orderly end after a signal.
func (p *proc) ended() {
	p.w.t.Helper()
	select {
	case <-p.done:
		if p.err != nil {
			p.w.t.Errorf("%s ended with %v", p.name, p.err)
		}
	case <-time.After(patience):
		p.w.t.Fatalf("%s does not end within %v", p.name, patience)
	}
}

// terminate is SIGTERM, and waits for the orderly end.
func (p *proc) terminate() {
	p.w.t.Helper()
	p.signal()
	p.ended()
}

// crash kills everything but NATS at once: all processes, and the database under them.
func (w *world) crash() {
	w.t.Helper()
	for _, p := range w.procs {
		if p != w.nats {
			p.gone = true
			_ = p.cmd.Process.Kill() // it may be gone already
		}
	}
	w.killDatabase()
	for _, p := range w.procs {
		if p != w.nats {
			p.kill()
		}
	}
}

// stayedUp complains of processes that ended and were not told to.
func (w *world) stayedUp() {
	w.t.Helper()
	for _, p := range w.procs {
		if !p.gone && !p.alive() {
			w.t.Errorf("%s did not stay up: %v", p.name, p.err)
		}
	}
}

// Handlers that let the test answer their steps: one in Go, a command, a URL.
const (
	inGo    = "go"
	command = "exec"
	byURL   = "http"
)

// asking starts a worker whose steps the test answers.
func (w *world) asking(handler, name string, args ...string) *proc {
	w.t.Helper()
	p := w.beginAsking(handler, name, args...)
	p.wait()
	return p
}

func (w *world) beginAsking(handler, name string, args ...string) *proc {
	w.t.Helper()
	switch handler {
	case command:
		return w.begin("worker", name, append([]string{"--exec", w.askCommand(name)}, args...)...)
	case byURL:
		return w.begin("worker", name, append([]string{"--handler", "http", "--http-url", w.steps.web.URL + "/" + name}, args...)...)
	}
	cmd := exec.Command(w.program("peer"))
	cmd.Env = append(os.Environ(), ask.EnvSocket+"="+w.steps.path, ask.EnvWorker+"="+name)
	return w.beginAs(cmd, name, args...)
}

// beginDoing starts a worker whose steps do what their inputs say.
func (w *world) beginDoing(name string, args ...string) *proc {
	w.t.Helper()
	cmd := exec.Command(w.program("peer"))
	cmd.Stdin = w.hold.read
	return w.beginAs(cmd, name, args...)
}

func saysUp(p *proc) bool { return strings.Contains(p.output(), ask.Up) }

func (w *world) json(v any) string {
	w.t.Helper()
	raw, err := json.Marshal(v)
	if err != nil {
		w.t.Fatal(err)
	}
	return string(raw)
}

// askCommand is a command for --exec that lets the test answer its steps.
func (w *world) askCommand(worker string) string {
	return ask.EnvSocket + "='" + w.steps.path + "' " + ask.EnvWorker + "=" + worker + " exec '" + w.program("peer") + "' step"
}

// holdGate holds steps of workers in Go until it is opened; it stays open.
type holdGate struct{ read, write *os.File }

// newHold makes the gate that "hold" waits for in all workers started from here:
// their standard input, which ends when the test closes its end.
func (w *world) newHold() *holdGate {
	w.t.Helper()
	r, wr, err := os.Pipe()
	if err != nil {
		w.t.Fatal(err)
	}
	w.hold = &holdGate{r, wr}
	w.t.Cleanup(func() {
		_ = r.Close()
		_ = wr.Close() // it may be open already
	})
	return w.hold
}

func (g *holdGate) open() { _ = g.write.Close() }

// startWatch starts what ends all processes of this world when the test binary is killed.
func (w *world) startWatch() {
	w.t.Helper()
	cmd := exec.Command(w.program("peer"), "watch")
	var err error
	if w.watch, err = cmd.StdinPipe(); err != nil {
		w.t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		w.t.Fatal(err)
	}
	go func() { _ = cmd.Wait() }() // it ends with its input
}

func (w *world) note(sign string, pid int) {
	w.t.Helper()
	if _, err := fmt.Fprintf(w.watch, "%s%d\n", sign, pid); err != nil {
		w.t.Fatal(err)
	}
}

package exec

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"go.uber.org/goleak"
	"golang.org/x/sys/unix"

	"reveille/claims"
	"reveille/runner"
	"reveille/runner/exec/members"
)

// patience ends a test that hangs; no test waits for it otherwise.
const patience = 60 * time.Second

// never is a KillAfter that no test reaches: what ends, ended by SIGTERM or Killed.
const never = time.Hour

func TestMain(m *testing.M) {
	if IsGuard(os.Args) {
		syscall.Exit(RunGuard(os.Stdin)) // not os.Exit, where the race detector sleeps for a second
	}
	if mode := os.Getenv(workerVariable); mode != "" {
		runTestWorker(mode)
	}
	goleak.VerifyTestMain(leakChecked{m})
}

// leakChecked fails a run that leaves processes behind, living or not: with a
// subreaper all descendants end up as its children. So it does for cgroups.
type leakChecked struct{ m *testing.M }

func (l leakChecked) Run() int {
	code := l.m.Run()
	if pid, err := unix.Wait4(-1, nil, unix.WNOHANG, nil); !errors.Is(err, unix.ECHILD) {
		fmt.Fprintf(os.Stderr, "the tests left processes behind: wait4 = %d, %v\n", pid, err)
		return 1
	}
	if cgroups, err := members.FindCgroups(); err == nil {
		if left, err := filepath.Glob(cgroups.String() + "/rv-" + stepPrefix() + "*"); err != nil || len(left) > 0 {
			fmt.Fprintf(os.Stderr, "the tests left cgroups behind: %v, %v\n", left, err)
			return 1
		}
	}
	return code
}

// everyWay runs a test as the members of a step are found: by what /proc shows,
// and by a cgroup too, where this machine lets one be made.
func everyWay(t *testing.T, f func(t *testing.T, handler func(Options) *Handler)) {
	t.Helper()
	t.Run("proc", func(t *testing.T) {
		f(t, func(o Options) *Handler {
			h := newHandler(t, o)
			h.cgroups = nil
			return h
		})
	})
	if newHandler(t, Options{Command: "true"}).cgroups != nil {
		t.Run("cgroup", func(t *testing.T) { f(t, func(o Options) *Handler { return newHandler(t, o) }) })
	}
}

// recorder is the log of a step.
type recorder struct {
	mu      sync.Mutex
	content []claims.Content
	reasons []string
	fail    func(claims.Content) error // called outside of mu; may block
}

func (r *recorder) output() *runner.Output {
	return runner.NewOutput(func(c claims.Content) error {
		if r.fail != nil {
			if err := r.fail(c); err != nil {
				return err
			}
		}
		r.mu.Lock()
		defer r.mu.Unlock()
		r.content = append(r.content, c)
		return nil
	}, func(reason string) error {
		r.mu.Lock()
		defer r.mu.Unlock()
		r.reasons = append(r.reasons, reason)
		return nil
	})
}

func (r *recorder) text() string {
	var b strings.Builder
	for _, c := range r.content {
		if d, ok := c.Data.(claims.TextData); ok {
			b.WriteString(d.Text)
		}
	}
	return b.String()
}

// lines are the events as type and data, one a line.
func (r *recorder) lines() string {
	var b strings.Builder
	for _, c := range r.content {
		data, err := json.Marshal(c.Data)
		if err != nil {
			panic(err)
		}
		fmt.Fprintf(&b, "%s %s\n", c.Type, data)
	}
	return b.String()
}

func newHandler(t *testing.T, o Options) *Handler {
	t.Helper()
	if o.KillAfter == 0 {
		o.KillAfter = never
	}
	h, err := New(o)
	if err != nil {
		t.Fatal(err)
	}
	return h
}

func request() runner.Request {
	return runner.Request{
		Session: "ses_1", Execution: "e0000000-0000-4000-8000-000000000001", Epoch: 3, Step: newStep(), Index: 1,
		Inputs: []claims.Input{{ID: "in_1", Delivery: claims.Queue, Body: json.RawMessage(`{"x":"<é>"}`)}},
		Killed: make(chan struct{}),
	}
}

var stepNumber struct {
	sync.Mutex
	n int
}

func newStep() claims.StepID {
	stepNumber.Lock()
	defer stepNumber.Unlock()
	stepNumber.n++
	return claims.StepID(fmt.Sprintf("%s0000-4000-8000-%012x", stepPrefix(), stepNumber.n))
}

// stepPrefix begins the ids of all steps of this process.
func stepPrefix() string { return fmt.Sprintf("%08x-", os.Getpid()) }

// answer is what Step returned.
type answer struct {
	result runner.Result
	err    error
}

// inBackground runs a step and gives its answer when it has returned.
func inBackground(ctx context.Context, h *Handler, req runner.Request, r *recorder) <-chan answer {
	c := make(chan answer, 1)
	go func() {
		result, err := h.Step(ctx, req, r.output())
		c <- answer{result, err}
	}()
	return c
}

func await[T any](t *testing.T, c <-chan T, what string) T {
	t.Helper()
	select {
	case v := <-c:
		return v
	case <-time.After(patience):
		t.Fatalf("%s did not happen", what)
		panic("unreachable")
	}
}

// fifo is a pipe with a name, for commands to say where they are and to wait at.
type fifo struct {
	path string
	file *os.File
	in   *bufio.Reader
}

func newFifo(t *testing.T) *fifo {
	t.Helper()
	path := filepath.Join(t.TempDir(), "fifo")
	if err := unix.Mkfifo(path, 0o600); err != nil {
		t.Fatal(err)
	}
	f, err := os.OpenFile(path, os.O_RDWR, 0) // both ends: nobody blocks in open
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { f.Close() })
	return &fifo{path: path, file: f, in: bufio.NewReader(f)}
}

func (f *fifo) line(t *testing.T) string {
	t.Helper()
	if err := f.file.SetReadDeadline(time.Now().Add(patience)); err != nil {
		t.Fatal(err)
	}
	line, err := f.in.ReadString('\n')
	if err != nil {
		t.Fatalf("a line of the command: %v (have %q)", err, line)
	}
	return strings.TrimSuffix(line, "\n")
}

func (f *fifo) open(t *testing.T) {
	t.Helper()
	if _, err := f.file.WriteString("go\n"); err != nil {
		t.Fatal(err)
	}
}

// life is a process of a test under a handle that no other process gets.
type life struct {
	members.ID
	handle int
}

// process reads the number of a living process.
func (f *fifo) process(t *testing.T) life {
	t.Helper()
	return lifeOf(t, f.line(t))
}

func lifeOf(t *testing.T, number string) life {
	t.Helper()
	pid, err := strconv.Atoi(number)
	if err != nil {
		t.Fatalf("number of a process: %v", err)
	}
	handle, err := unix.PidfdOpen(pid, 0)
	if err != nil {
		t.Fatalf("process %d: %v", pid, err)
	}
	t.Cleanup(func() { unix.Close(handle) })
	p, err := members.Read(pid)
	if err != nil {
		t.Fatalf("process %d: %v", pid, err)
	}
	return life{p.ID, handle}
}

func (l life) lives() bool {
	p, err := members.Read(l.PID)
	return err == nil && p.ID == l.ID && !p.Dead()
}

// awaitEnd waits until the process has ended, reaped or not.
func (l life) awaitEnd(t *testing.T) {
	t.Helper()
	for end := time.Now().Add(patience); ; {
		n, err := unix.Poll([]unix.PollFd{{Fd: int32(l.handle), Events: unix.POLLIN}}, int(time.Until(end).Milliseconds()))
		if errors.Is(err, unix.EINTR) {
			continue
		}
		if n != 1 || err != nil {
			t.Fatalf("process %d does not end: %v", l.PID, err)
		}
		return
	}
}

// endAndReap is for processes that became children of the test.
func (l life) endAndReap(t *testing.T) {
	t.Helper()
	l.awaitEnd(t)
	for {
		_, err := unix.Wait4(l.PID, nil, 0, nil)
		if errors.Is(err, unix.EINTR) {
			continue
		}
		if err != nil && !errors.Is(err, unix.ECHILD) {
			t.Fatal(err)
		}
		return
	}
}

// assertGone checks that nothing is left of processes, not even zombies.
func assertGone(t *testing.T, all ...life) {
	t.Helper()
	for _, l := range all {
		if p, err := members.Read(l.PID); err == nil && p.ID == l.ID {
			t.Errorf("process %d is still there: state %c, parent %d (we are %d)", l.PID, p.State, p.Parent, os.Getpid())
		}
	}
}

func assertFailure(t *testing.T, err error, want runner.Failure) {
	t.Helper()
	var f *runner.Failure
	if !errors.As(err, &f) || *f != want {
		t.Fatalf("Step = %#v, want %#v", err, &want)
	}
}

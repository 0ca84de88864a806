package exec

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"maps"
	"os"
	"os/exec"
	"runtime"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"reveille/runner"
)

// GuardArg is the one argument of a guard process.
const GuardArg = "__exec-guard"

const (
	// guardVariable keeps a program that never looks for GuardArg from starting
	// guards of guards.
	guardVariable = "RV_EXEC_GUARD"
	// guardReady is how long a guard has until it answers.
	guardReady = 10 * time.Second
	// guardWrite is how long a guard has to take a line before it counts as dead.
	guardWrite = time.Second
	// guardEnd is how long a guard has to end when it is asked to.
	guardEnd = 2 * time.Second
	// A guard that died is replaced at once, but ever later where that was in vain.
	firstRestart, lastRestart = 100 * time.Millisecond, 10 * time.Second

	guardHello = "guard\n" // its first line
	guardQuit  = "quit"    // ends it, and kills nothing
)

var (
	errGuardClosed  = errors.New("guard is closed")
	errGuardUnknown = errors.New("guard did not answer: main must begin with exec.IsGuard and exec.RunGuard")
)

// Guard ends the commands of a worker that can't (I7). It is this program
// again, as a process in a session of its own.
//
//   - Of a worker that was killed: it holds the read end of a pipe whose only
//     write end the worker has. When the worker is gone, however that came, the
//     guard reads to the end and kills every group and every marked process of the
//     steps that were registered.
//   - Of a worker that stands still (SIGSTOP, a debugger, swapped out): it is told
//     the deadline of the worker's lease (Request.Deadline) with each step and
//     whenever a heartbeat has moved it, and kills the lease's steps when that is
//     over, by the monotonic or the wall clock. A worker that runs does so itself.
//
// A command is registered by its step before it is started and by its group
// right after; on Linux the shell is also killed by the kernel when the worker
// ends (PR_SET_PDEATHSIG). A guard that dies is replaced, and learns what runs.
//
// Not promised: anything where worker and guard are killed both (a whole cgroup,
// a container; there the commands go with them), or stand still both (a frozen
// cgroup, a machine that sleeps: the commands stand still too, and all three
// race when they go on).
//
// All methods are safe for concurrent use. A nil *Guard guards nothing.
type Guard struct {
	log    atomic.Pointer[slog.Logger] // of the last handler that was made with it
	starts chan func()                 // for the thread that starts the commands
	ctx    context.Context             // done when Close was called
	cancel context.CancelFunc
	over   sync.WaitGroup

	mu      sync.Mutex
	current *guardProcess // nil while there is none
	steps   map[string]*guardedStep
	told    map[string]time.Time // by holder: the deadline that a guard may still go by

	// The deadlines have a lock of their own, so that no heartbeat waits for a guard that hangs.
	deadlines sync.Mutex
	until     map[string]time.Time // by holder
	moved     chan struct{}        // buffered: there is one to be told
}

// guardedStep is a step that runs.
type guardedStep struct {
	pgrp     int    // 0: not known yet
	holder   string // of the lease; empty: it has no deadline
	unfollow func()
	late     bool // a deadline was over before the next one was told: the guard may have killed it
}

type guardProcess struct {
	cmd  *exec.Cmd
	pipe *os.File // to its standard input; used under Guard.mu
}

// StartGuard starts a guard. It must be closed, after the handlers that use
// it. ctx bounds the start only, which takes as long as the program takes to
// start, at most 10 s.
func StartGuard(ctx context.Context) (*Guard, error) {
	return startGuard(ctx, func(int) {})
}

// startGuard calls started with the number of each guard process once it knows everything.
func startGuard(ctx context.Context, started func(pid int)) (*Guard, error) {
	if os.Getenv(guardVariable) != "" {
		return nil, errGuardUnknown
	}
	g := &Guard{
		starts: make(chan func()), steps: map[string]*guardedStep{}, told: map[string]time.Time{},
		until: map[string]time.Time{}, moved: make(chan struct{}, 1),
	}
	g.log.Store(slog.New(slog.DiscardHandler))
	g.ctx, g.cancel = context.WithCancel(context.Background())
	process, err := g.spawn(ctx)
	if err != nil {
		g.cancel()
		return nil, fmt.Errorf("start the guard of the commands: %w", err)
	}
	started(process.cmd.Process.Pid)
	g.over.Go(g.startCommands)
	g.over.Go(g.forward)
	g.over.Go(func() { g.watch(process, started) })
	return g, nil
}

// Close ends the guard and kills nothing. It returns when the process is gone.
// Commands can't be started with it afterwards; those that run go on.
func (g *Guard) Close() {
	if g == nil {
		return
	}
	g.cancel() // which tells it to quit
	g.over.Wait()
}

// start starts a process as os.StartProcess, on the guard's thread.
func (g *Guard) start(name string, argv []string, attr *os.ProcAttr) (p *os.Process, err error) {
	if g == nil {
		return os.StartProcess(name, argv, attr)
	}
	started := make(chan struct{})
	start := func() {
		defer close(started)
		dieWithThread(attr.Sys)
		p, err = os.StartProcess(name, argv, attr)
	}
	select {
	case g.starts <- start:
		<-started
		return p, err
	case <-g.ctx.Done():
		return nil, errGuardClosed
	}
}

// startCommands starts commands on one thread that lives as long as the
// process: the death signal is bound to the thread, not to the process.
func (g *Guard) startCommands() {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread() // the thread lives on; one that is locked at the end would be ended
	for {
		select {
		case start := <-g.starts:
			start()
		case <-g.ctx.Done():
			return
		}
	}
}

// add registers a step, before it is started.
func (g *Guard) add(step string, deadline runner.Deadline) {
	if g == nil {
		return
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	s := &guardedStep{unfollow: func() {}}
	if deadline != nil && deadline.Holder() != "" {
		s.holder = string(deadline.Holder())
		s.unfollow = deadline.Follow(func(until time.Time) { g.move(s.holder, until) })
	}
	g.steps[step] = s
	g.register(step, g.note)
}

// started tells the group of a registered step.
func (g *Guard) started(step string, pgrp int) {
	if g == nil {
		return
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	g.steps[step].pgrp = pgrp
	g.register(step, g.note)
}

// remove is called when the group is gone, and before its leader is reaped: a
// number that is somebody else's is not left with the guard. (One that is about
// to kill by a deadline may use it for the time of a look yet; no kernel gives a
// number again so soon.) It reports whether the guard may have killed the step.
func (g *Guard) remove(step string) (late bool) {
	if g == nil {
		return false
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	s := g.steps[step]
	delete(g.steps, step)
	g.note("-" + step)
	s.unfollow()
	late = s.late || isOver(g.told[s.holder])
	for _, other := range g.steps {
		if other.holder == s.holder {
			return late
		}
	}
	delete(g.told, s.holder)
	g.deadlines.Lock()
	defer g.deadlines.Unlock()
	delete(g.until, s.holder)
	return late
}

// isOver reports whether a deadline is, by either clock; the zero one is none.
func isOver(until time.Time) bool {
	return !until.IsZero() && deadline{until, until.Round(0)}.left(time.Now()) <= 0
}

// move takes a deadline of a lease. It does not block.
func (g *Guard) move(holder string, until time.Time) {
	g.deadlines.Lock()
	g.until[holder] = until
	g.deadlines.Unlock()
	select {
	case g.moved <- struct{}{}:
	default:
	}
}

// forward tells the guard the deadlines that were moved, until Close.
func (g *Guard) forward() {
	for {
		select {
		case <-g.moved:
			g.tellDeadlines()
		case <-g.ctx.Done():
			return
		}
	}
}

func (g *Guard) tellDeadlines() {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.deadlines.Lock()
	moved := maps.Clone(g.until)
	g.deadlines.Unlock()
	for holder, until := range moved {
		g.note(deadlineLine(holder, until))
		g.hasTold(holder, until)
	}
}

// register writes a line about a step, with one about its deadline behind it: in
// one piece, since this process may stop between two. Callers hold mu.
func (g *Guard) register(step string, write func(string)) {
	s := g.steps[step]
	line := strings.TrimSuffix(fmt.Sprintf("+%s %d %s", step, s.pgrp, s.holder), " ")
	g.deadlines.Lock()
	until, ok := g.until[s.holder]
	g.deadlines.Unlock()
	if !ok {
		write(line)
		return
	}
	write(line + "\n" + deadlineLine(s.holder, until))
	g.hasTold(s.holder, until)
}

// hasTold notes which deadline the guard goes by. Where the one before was over,
// as of a process that stood still between the heartbeat's answer and here, it
// may have killed steps that may live. Callers hold mu.
func (g *Guard) hasTold(holder string, until time.Time) {
	if isOver(g.told[holder]) {
		for _, s := range g.steps {
			s.late = s.late || s.holder == holder
		}
	}
	g.told[holder] = until
}

// deadlineLine tells a deadline as a distance and as a time: the first is of the
// monotonic clock, and counts from when it is read; should this process stand
// still in between, the second holds.
func deadlineLine(holder string, until time.Time) string {
	return fmt.Sprintf("=%s %d %d", holder, time.Until(until), until.UnixNano())
}

// note tells the guard, if there is one: the next one is told what counts then.
func (g *Guard) note(line string) {
	if g.current == nil {
		return
	}
	if err := g.current.tell(line); err != nil {
		// Dead, or as good as. Its pipe stays open until it is dead indeed: at the
		// end of its input it would kill what runs.
		_ = g.current.cmd.Process.Kill()
		g.current = nil
	}
}

// tell writes a line or two. They are shorter than PIPE_BUF, so they are written
// whole or not at all.
func (p *guardProcess) tell(line string) error {
	_ = p.pipe.SetWriteDeadline(time.Now().Add(guardWrite))
	_, err := io.WriteString(p.pipe, line+"\n")
	return err
}

// watch replaces the guard process when it dies, until Close.
func (g *Guard) watch(p *guardProcess, started func(pid int)) {
	for delay := time.Duration(0); ; {
		born := time.Now()
		err := p.cmd.Wait()
		_ = p.pipe.Close()
		g.mu.Lock()
		if g.current == p {
			g.current = nil
		}
		g.mu.Unlock()
		if time.Since(born) > lastRestart {
			delay = 0
		}
		for p = nil; p == nil; delay = min(max(2*delay, firstRestart), lastRestart) {
			select {
			case <-time.After(delay):
			case <-g.ctx.Done():
			}
			if g.ctx.Err() != nil {
				return
			}
			g.log.Load().Warn("there is no guard of the commands: starting another", "err", err)
			p, err = g.spawn(g.ctx)
		}
		started(p.cmd.Process.Pid)
	}
}

// spawn starts a guard process and tells it what runs.
func (g *Guard) spawn(ctx context.Context) (*guardProcess, error) {
	self, err := selfExecutable()
	if err != nil {
		return nil, err
	}
	input, pipe, err := os.Pipe() // close-on-exec: no command gets the write end
	if err != nil {
		return nil, err
	}
	hello, answer, err := os.Pipe()
	if err != nil {
		closeAll([]*os.File{input, pipe})
		return nil, err
	}
	p := &guardProcess{cmd: exec.CommandContext(g.ctx, self), pipe: pipe}
	p.cmd.Args = []string{os.Args[0], GuardArg}
	p.cmd.Env = []string{guardVariable + "=1"} // none of the worker's secrets
	p.cmd.Dir = "/"
	p.cmd.Stdin, p.cmd.Stdout = input, answer
	p.cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	p.cmd.Cancel = func() error {
		g.mu.Lock()
		defer g.mu.Unlock()
		return p.tell(guardQuit)
	}
	p.cmd.WaitDelay = guardEnd // then it is killed
	err = p.cmd.Start()
	closeAll([]*os.File{input, answer})
	if err == nil {
		if err = g.greet(ctx, p, hello); err != nil {
			_ = p.cmd.Process.Kill()
			_ = p.cmd.Wait()
		}
	}
	closeAll([]*os.File{hello})
	if err != nil {
		closeAll([]*os.File{pipe})
		return nil, err
	}
	return p, nil
}

// greet waits for the guard's first line, and makes it the one that is told.
func (g *Guard) greet(ctx context.Context, p *guardProcess, hello *os.File) error {
	_ = hello.SetReadDeadline(time.Now().Add(guardReady))
	stop := context.AfterFunc(ctx, func() { _ = hello.SetReadDeadline(time.Unix(1, 0)) })
	defer stop()
	line := make([]byte, len(guardHello))
	if _, err := io.ReadFull(hello, line); ctx.Err() != nil {
		return context.Cause(ctx)
	} else if err != nil || string(line) != guardHello {
		return errGuardUnknown
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	var failed error
	for step := range g.steps {
		g.register(step, func(line string) { failed = errors.Join(failed, p.tell(line)) })
	}
	if failed != nil {
		return failed
	}
	g.current = p
	return nil
}

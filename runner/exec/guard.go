package exec

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"os/exec"
	"os/signal"
	"runtime"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"reveille/runner/exec/members"
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

	// A guard looks until nothing was there three times in a row (a process is
	// hard to tell for an instant while it starts), and gives up after a while:
	// what it could not kill by then it can't.
	guardPoll   = 5 * time.Millisecond
	guardClear  = 3
	guardGiveUp = 30 * time.Second

	guardHello = "guard\n" // its first line
	guardQuit  = "quit"    // ends it, and kills nothing
)

var (
	errGuardClosed  = errors.New("guard is closed")
	errGuardUnknown = errors.New("guard did not answer: main must begin with exec.IsGuard and exec.RunGuard")
)

// Guard ends the commands of a worker that was itself killed and could not
// (I7). It is this program again, as a process in a session of its own, which
// holds the read end of a pipe whose only write end the worker has: when the
// worker is gone, however that came, the guard reads to the end and kills
// every group and every marked process of the steps that were registered.
//
// A command is registered by its step before it is started and by its group
// right after; on Linux the shell is also killed by the kernel when the worker
// ends (PR_SET_PDEATHSIG). A guard that dies is replaced, and learns what runs.
//
// Not promised: that worker and guard are not killed both (a whole cgroup, a
// container); there the commands go with them.
//
// All methods are safe for concurrent use. A nil *Guard guards nothing.
type Guard struct {
	log    atomic.Pointer[slog.Logger] // of the last handler that was made with it
	starts chan func()                 // for the thread that starts the commands
	ctx    context.Context             // done when Close was called
	cancel context.CancelFunc
	over   sync.WaitGroup

	mu      sync.Mutex
	current *guardProcess  // nil while there is none
	steps   map[string]int // the steps that run, with their groups; 0: not known yet
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
	g := &Guard{starts: make(chan func()), steps: map[string]int{}}
	g.log.Store(slog.New(slog.DiscardHandler))
	g.ctx, g.cancel = context.WithCancel(context.Background())
	process, err := g.spawn(ctx)
	if err != nil {
		g.cancel()
		return nil, fmt.Errorf("start the guard of the commands: %w", err)
	}
	started(process.cmd.Process.Pid)
	g.over.Go(g.startCommands)
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

// add registers a step, with its group when that is known.
func (g *Guard) add(step string, pgrp int) {
	if g == nil {
		return
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	g.steps[step] = pgrp
	g.note(registration(step, pgrp))
}

// remove is called when the group is gone, and before its leader is reaped:
// the guard must never have a number that is somebody else's.
func (g *Guard) remove(step string) {
	if g == nil {
		return
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	delete(g.steps, step)
	g.note("-" + step)
}

func registration(step string, pgrp int) string { return "+" + strconv.Itoa(pgrp) + " " + step }

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

// tell writes one line. It is shorter than PIPE_BUF, so it is written whole or
// not at all.
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
	for step, pgrp := range g.steps {
		if err := p.tell(registration(step, pgrp)); err != nil {
			return err
		}
	}
	g.current = p
	return nil
}

// IsGuard reports whether a program with these arguments (os.Args) was started
// as a guard. main asks first thing: if so, it calls RunGuard and nothing else.
func IsGuard(args []string) bool { return len(args) == 2 && args[1] == GuardArg }

// RunGuard is the guard process: it reads registrations until in (standard
// input) ends, and then kills what is left. It returns the exit code: 0, or 1
// where something lives that it couldn't kill within 30 s.
func RunGuard(in io.Reader) int {
	// Whoever wants the worker to end must not end the guard with it.
	signal.Ignore(unix.SIGINT, unix.SIGTERM, unix.SIGHUP, unix.SIGQUIT, unix.SIGPIPE)
	_, _ = io.WriteString(os.Stdout, guardHello)
	_ = os.Stdout.Close()

	cgroups, _ := members.FindCgroups() // the worker's: this process is in the same
	steps := map[string]int{}
	for lines := bufio.NewScanner(in); lines.Scan(); {
		line := lines.Text()
		if line == guardQuit {
			return 0
		}
		if step, ok := strings.CutPrefix(line, "-"); ok {
			delete(steps, step)
		} else if number, step, ok := strings.Cut(strings.TrimPrefix(line, "+"), " "); ok {
			if pgrp, err := strconv.Atoi(number); err == nil {
				steps[step] = pgrp
			}
		}
	}
	giveUp := time.Now().Add(guardGiveUp)
	for clear := 0; clear < guardClear; clear++ {
		if members.KillSteps(steps, cgroups) {
			clear = -1
		}
		if time.Now().After(giveUp) {
			return 1
		}
		time.Sleep(guardPoll)
	}
	return 0
}

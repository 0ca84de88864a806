package dev

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"runtime"
	"sync"
	"syscall"
	"time"
)

const (
	// The ports of /metrics and health, where they are free: those of the
	// programs' own defaults, then the next ones.
	firstWorkerPort = 9090
	scannerPort     = 9091
	portTries       = 200

	// A child that ended by itself is started again after firstPause, and ever
	// later; one that ran for steady begins with firstPause again.
	firstPause, longestPause = time.Second, 15 * time.Second
	steady                   = 30 * time.Second

	// outputDelay is how long a child's output is read after it is gone:
	// something that it started may hold it open.
	outputDelay = 2 * time.Second

	exitUsage = 2
)

// childVariable tells a worker or a scanner that its standard input is a pipe
// whose other end dev holds, and nobody writes to.
const childVariable = "RV_DEV_CHILD"

// EndWithParent ends a child of dev, at once, when dev is gone. On Linux the
// kernel does so too; this is for where it can't. It does nothing in any other process.
func EndWithParent() {
	if os.Getenv(childVariable) == "" {
		return
	}
	_ = os.Unsetenv(childVariable) // the commands of steps are no children of dev
	go func() {
		_, _ = io.Copy(io.Discard, os.Stdin)
		os.Exit(1)
	}()
}

func workerPort(i int) int {
	if i == 0 {
		return firstWorkerPort
	}
	return scannerPort + i
}

// child is a worker or a scanner.
type child struct {
	name string
	port int // where it serves /metrics, if that is free
	args func(address string) []string

	mu      sync.Mutex
	pid     int
	address string
	up      bool // it listens there
}

// where is what runs now: its pid and its HTTP address, and whether it has said
// that it listens there; before, it may be somebody else who does.
func (c *child) where() (pid int, address string, up bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.pid, c.address, c.up
}

func (c *child) set(pid int, address string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.pid, c.address = pid, address
}

func (c *child) setUp(up bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.up = up
}

// supervisor runs children.
type supervisor struct {
	self        string // this program
	env         []string
	console     *console
	stopTimeout time.Duration

	sleep func(time.Duration) // nil: time.Sleep

	mu    sync.Mutex
	taken map[int]string // ports, by the child they were given to
}

// A port that was just let go may be taken a moment longer: a process that is
// being forked has a copy of the socket until it is executed. So a child's own
// port is tried again for a while.
const ownPortPoll, ownPortTries = 10 * time.Millisecond, 50

// run runs a child until ctx ends, then stops it; it returns when the child is
// gone. Error: the child can't be started, or refuses its settings.
func (s *supervisor) run(ctx context.Context, c *child) error {
	for pause := firstPause; ; pause = min(2*pause, longestPause) {
		began := time.Now()
		p, err := s.start(c)
		if err != nil {
			return err
		}
		select {
		case <-ctx.Done():
			s.stop(c, p)
			return nil
		case <-p.exited:
		}
		p.output.end()
		var exit *exec.ExitError
		if errors.As(p.result, &exit) && exit.ExitCode() == exitUsage {
			return fmt.Errorf("%s refuses its settings (its line is above)", c.name)
		}
		if time.Since(began) >= steady {
			pause = firstPause
		}
		s.console.say("dev", "%s (pid %d) ended: %s; starting it again in %v", c.name, p.pid, p.exitText(), pause)
		select {
		case <-ctx.Done():
			return nil
		case <-time.After(pause):
		}
	}
}

func (s *supervisor) start(c *child) (*process, error) {
	address, err := s.freeAddress(c)
	if err != nil {
		return nil, err
	}
	c.setUp(false)
	output := &lineWriter{line: func(raw []byte) {
		if m := s.console.line(c.name, raw); m == workerUp || m == scannerUp {
			c.setUp(true)
		}
	}}
	p, err := startProcess(s.self, c.args(address), s.env, output)
	if err != nil {
		return nil, fmt.Errorf("starting %s: %w", c.name, err)
	}
	c.set(p.pid, address)
	s.console.say("dev", "%s started: pid %d, http://%s", c.name, p.pid, address)
	return p, nil
}

// freeAddress finds a port for a child: the one it had, else its own, else the next free one.
func (s *supervisor) freeAddress(c *child) (string, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for port := c.port; port < c.port+portTries; port++ {
		if who := s.taken[port]; who != "" && who != c.name {
			continue
		}
		address := fmt.Sprintf("127.0.0.1:%d", port)
		l, err := net.Listen("tcp", address)
		for try := 1; err != nil && s.taken[port] == c.name && try < ownPortTries; try++ {
			if s.sleep == nil {
				s.sleep = time.Sleep
			}
			s.sleep(ownPortPoll)
			l, err = net.Listen("tcp", address)
		}
		if err != nil {
			continue
		}
		if err := l.Close(); err != nil {
			return "", err
		}
		if s.taken == nil {
			s.taken = map[int]string{}
		}
		s.taken[port] = c.name
		c.port = port
		return address, nil
	}
	return "", fmt.Errorf("no free port on 127.0.0.1 from %d to %d for %s", c.port, c.port+portTries-1, c.name)
}

// stop stops a child in its own time, and kills it past that.
func (s *supervisor) stop(c *child, p *process) {
	p.signal(syscall.SIGTERM)
	timeout := time.NewTimer(s.stopTimeout)
	defer timeout.Stop()
	select {
	case <-p.exited:
	case <-timeout.C:
		s.console.say("dev", "%s (pid %d) did not stop within %v: killing it", c.name, p.pid, s.stopTimeout)
		p.signal(syscall.SIGKILL)
		<-p.exited
	}
	p.output.end()
}

// process is a child that was started.
type process struct {
	pid    int
	cmd    *exec.Cmd
	output *lineWriter
	exited chan struct{} // closed after it was reaped and its output was read
	result error         // read after exited
	alive  *os.File      // its standard input: the other end says that we are there
}

// startProcess starts a program in a process group of its own, so that a
// terminal's Ctrl-C reaches dev only, which stops things in order.
func startProcess(path string, args, env []string, output *lineWriter) (*process, error) {
	stdin, alive, err := os.Pipe()
	if err != nil {
		return nil, err
	}
	cmd := exec.Command(path, args...)
	cmd.Env, cmd.Stdin, cmd.Stdout, cmd.Stderr = env, stdin, output, output
	cmd.WaitDelay = outputDelay
	cmd.SysProcAttr = childAttr()
	p := &process{cmd: cmd, output: output, exited: make(chan struct{}), alive: alive}
	started := make(chan error, 1)
	go p.run(started)
	err = <-started
	_ = stdin.Close() // the child has its own
	if err != nil {
		_ = alive.Close()
		return nil, err
	}
	return p, nil
}

// run starts the child and waits for it on one thread: the kernel sends the
// parent-death signal when the *thread* that forked ends.
func (p *process) run(started chan<- error) {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	if err := p.cmd.Start(); err != nil {
		started <- err
		return
	}
	p.pid = p.cmd.Process.Pid
	started <- nil
	p.result = p.cmd.Wait()
	if errors.Is(p.result, exec.ErrWaitDelay) {
		p.result = nil // it ended well; something else held its output
	}
	_ = p.alive.Close()
	close(p.exited)
}

func (p *process) exitText() string {
	if p.result == nil {
		return "exit status 0"
	}
	return p.result.Error()
}

// signal sends to the process, where it is not gone yet.
func (p *process) signal(sig syscall.Signal) { _ = p.cmd.Process.Signal(sig) }

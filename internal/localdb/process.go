package localdb

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"syscall"
	"time"
)

const (
	// abandonTimeout is what a server that did not get ready is given to clean up its shared memory.
	abandonTimeout = 2 * time.Second
	// leftoverTimeout is what a leftover server is given for its fast shutdown.
	leftoverTimeout = 10 * time.Second
	// tailBytes of a log are looked at for an error message.
	tailBytes = 4 << 10
)

// command is a program to start as the server.
type command struct {
	title string // for people: name and version
	path  string
	args  []string
	dir   string
	cred  *syscall.Credential // nil: this process's user
}

// process is the server's main process, started by this one.
type process struct {
	title  string
	pid    int
	log    logPart
	exited chan struct{} // closed after the process was reaped
	result error         // read after exited
}

// startProcess starts c in a process group of its own, so that a terminal's Ctrl-C reaches only the parent, which
// stops things in order.
func startProcess(c command, logFile *os.File) (*process, error) {
	cmd := exec.Command(c.path, c.args...)
	cmd.Dir = c.dir
	cmd.Env = serverEnv()
	cmd.Stdout, cmd.Stderr = logFile, logFile
	cmd.SysProcAttr = serverAttr(c.cred)

	p := &process{title: c.title, exited: make(chan struct{}), log: logPart{path: logFile.Name()}}
	if info, err := logFile.Stat(); err == nil {
		p.log.from = info.Size()
	}
	started := make(chan error, 1)
	go p.run(cmd, started)
	if err := <-started; err != nil {
		return nil, err
	}
	return p, nil
}

// run starts the server and waits for it on one thread: the kernel sends the parent-death signal when the *thread*
// that forked ends, so that thread must live as long as the server does.
func (p *process) run(cmd *exec.Cmd, started chan<- error) {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	if err := cmd.Start(); err != nil {
		started <- err
		return
	}
	p.pid = cmd.Process.Pid
	started <- nil
	p.result = cmd.Wait()
	close(p.exited)
}

func (p *process) exitText() string {
	if p.result == nil {
		return "exit status 0"
	}
	return p.result.Error()
}

// signal sends to the process, which is known not to be reaped where exited is open; the moment between is the
// kernel's, and a pid is not used again that fast.
func (p *process) signal(sig syscall.Signal) {
	select {
	case <-p.exited:
	default:
		_ = syscall.Kill(p.pid, sig)
	}
}

// stop is a fast shutdown, and a kill when ctx ends first.
func (p *process) stop(ctx context.Context, engine, data string) error {
	p.signal(syscall.SIGINT)
	select {
	case <-p.exited:
		// A server that was killed leaves its children: they end soon by themselves, but busy ones not at once.
		killAll(serverProcesses(engine, data))
		return nil
	case <-ctx.Done():
		p.killNow(engine, data)
		return fmt.Errorf("%s (pid %d) did not stop in time and was killed: %w", engine, p.pid, ctx.Err())
	}
}

// kill ends a server that nobody uses.
func (p *process) kill(engine, data string) {
	p.signal(syscall.SIGQUIT)
	timeout := time.NewTimer(abandonTimeout)
	defer timeout.Stop()
	select {
	case <-p.exited:
	case <-timeout.C:
	}
	p.killNow(engine, data)
}

// killNow kills the children first, with the parent stopped: it can't fork others, and as it can't reap them either,
// none of their pids is used again meanwhile.
func (p *process) killNow(engine, data string) {
	p.signal(syscall.SIGSTOP)
	children := serverProcesses(engine, data)
	killAll(slices.DeleteFunc(children, func(pid int) bool { return pid == p.pid }))
	p.signal(syscall.SIGKILL)
	<-p.exited
}

// stopLeftovers stops a server of these data that an earlier process started, and what a killed one left. The caller
// holds the folder's lock, so no living process owns it.
func stopLeftovers(ctx context.Context, engine, data string, log io.Writer) error {
	pids := serverProcesses(engine, data)
	if len(pids) == 0 {
		return nil
	}
	fmt.Fprintf(log, "stopping %s (pid %d), which an earlier process left running\n", engine, pids[0])
	ctx, cancel := context.WithTimeout(ctx, leftoverTimeout)
	defer cancel()
	if main := mainProcess(engine, data, pids); main != 0 {
		_ = syscall.Kill(main, syscall.SIGINT)
	} else {
		killAll(pids)
	}
	tick := time.NewTicker(pollInterval)
	defer tick.Stop()
	killed := false
	for {
		pids = serverProcesses(engine, data)
		if len(pids) == 0 {
			return nil
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
			if killed {
				return fmt.Errorf("an older %s (pid %d) on %s can't be stopped: stop it and start again", engine, pids[0], data)
			}
			killed = true
			killAll(pids)
			// The kernel needs a moment to end them; a new bound, as the old one is over.
			var cancelKill context.CancelFunc
			ctx, cancelKill = context.WithTimeout(context.WithoutCancel(ctx), abandonTimeout)
			defer cancelKill()
		}
	}
}

func killAll(pids []int) {
	for _, pid := range pids {
		_ = syscall.Kill(pid, syscall.SIGKILL)
	}
}

// serverProcesses lists the processes of a server by its data directory, the main one and its children, from their
// command lines: those can be read whoever the server's user is.
func serverProcesses(engine, data string) []int {
	var pids []int
	for pid, line := range commandLines() {
		if isServer(engine, data, line) {
			pids = append(pids, pid)
		}
	}
	slices.Sort(pids)
	return pids
}

// isServer judges a command line, its arguments each followed by a NUL or, where the system shows it so, a space.
// PostgreSQL's children write "postgres: <cluster name>: what they do" over theirs.
func isServer(engine, data, line string) bool {
	line = strings.ReplaceAll(line, "\x00", " ") + " "
	if engine == EnginePostgres && strings.HasPrefix(line, "postgres: "+clusterName(data)+": ") {
		return true
	}
	program, args, _ := strings.Cut(line, " ")
	switch filepath.Base(program) {
	case "postgres":
		return engine == EnginePostgres && strings.Contains(" "+args, " -D "+data+" ")
	case "cockroach":
		return engine == EngineCockroach && strings.Contains(" "+args, " --pid-file="+cockroachPidFile(data)+" ")
	}
	return false
}

// serverEnv is this process's without what changes a server's behaviour (PG*, locale) and without this program's
// settings, which may hold secrets.
func serverEnv() []string {
	var env []string
	for _, kv := range os.Environ() {
		name, _, _ := strings.Cut(kv, "=")
		switch {
		case name == "PATH", name == "HOME", name == "TMPDIR", strings.HasPrefix(name, "LD_"), strings.HasPrefix(name, "DYLD_"),
			strings.HasPrefix(name, "COCKROACH_"):
			env = append(env, kv)
		}
	}
	return append(env, "LC_ALL=C", "TZ=UTC")
}

// logPart is what one process wrote to a log.
type logPart struct {
	path string
	from int64
}

// tail is the end of the log in one line: the last errors, or the last lines where there is none.
func (l logPart) tail() string {
	f, err := os.Open(l.path)
	if err != nil {
		return err.Error()
	}
	defer f.Close()
	from := l.from
	if info, err := f.Stat(); err == nil {
		from = max(from, info.Size()-tailBytes)
	}
	b, err := io.ReadAll(io.NewSectionReader(f, from, tailBytes))
	if err != nil && !errors.Is(err, io.EOF) {
		return err.Error()
	}
	return tailOf(string(b))
}

func tailOf(text string) string {
	const most = 3
	var all, bad []string
	for line := range strings.Lines(text) {
		line = strings.Join(strings.Fields(line), " ")
		if line == "" {
			continue
		}
		all = append(all, line)
		lower := strings.ToLower(line)
		if strings.Contains(lower, "error") || strings.Contains(lower, "fatal") || strings.Contains(lower, "panic") || strings.Contains(lower, "address already in use") {
			bad = append(bad, line)
		}
	}
	if len(bad) > 0 {
		all = bad
	}
	if len(all) == 0 {
		return "nothing"
	}
	return strings.Join(all[max(0, len(all)-most):], " | ")
}

package main

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"runtime"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"reveille/claims"
	"reveille/claims/crdb"
)

const (
	// patience bounds each wait of this test; a first start makes a database, on a machine that does other things.
	patience = 90 * time.Second
	poll     = 20 * time.Millisecond
)

// handler is the command of the steps. An input with "hold" waits for a file,
// so that the test decides how long the step runs.
const handler = `request=$(cat)
request=${request%%'"history":'*}
case $request in *'"continues":{'*) echo again ;; *) echo hello ;; esac
echo $$ >>"$HOME/steps"
case $request in
*'"body":{"hold":'*) while [ ! -e "$HOME/go-$RV_SESSION" ]; do sleep 0.05; done ;;
*'"body":"fail"'*) echo broken >&2; exit 7 ;;
esac
echo done
echo '{"type":"ended","result":"ok"}'`

// output is what a process wrote so far.
type output struct {
	mu      sync.Mutex
	text    bytes.Buffer
	changed chan struct{} // closed at the next write
}

func (o *output) Write(p []byte) (int, error) {
	o.mu.Lock()
	defer o.mu.Unlock()
	if o.changed != nil {
		close(o.changed)
		o.changed = nil
	}
	return o.text.Write(p)
}

func (o *output) String() string {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.text.String()
}

func (o *output) next() (string, <-chan struct{}) {
	o.mu.Lock()
	defer o.mu.Unlock()
	if o.changed == nil {
		o.changed = make(chan struct{})
	}
	return o.text.String(), o.changed
}

// program is this test binary, run as reveille in a folder.
type program struct {
	t              *testing.T
	name           string
	cmd            *exec.Cmd
	stdout, stderr output
	exited         chan struct{}
}

// start starts reveille; the end of the test kills what is left of it.
func start(t *testing.T, dir string, args ...string) *program {
	t.Helper()
	p := &program{t: t, name: "reveille " + args[0], cmd: exec.Command(os.Args[0], args...), exited: make(chan struct{})}
	p.cmd.Dir, p.cmd.Stdout, p.cmd.Stderr = dir, &p.stdout, &p.stderr
	p.cmd.WaitDelay = patience
	for _, kv := range os.Environ() { // nothing of the machine's settings
		if !strings.HasPrefix(kv, "RV_") && !strings.HasPrefix(kv, "HOME=") {
			p.cmd.Env = append(p.cmd.Env, kv)
		}
	}
	p.cmd.Env = append(p.cmd.Env, asProgram+"=1", "HOME="+dir)
	if err := p.cmd.Start(); err != nil {
		t.Fatal(err)
	}
	go func() {
		_ = p.cmd.Wait() // its exit code is in ProcessState
		close(p.exited)
	}()
	t.Cleanup(func() {
		_ = p.cmd.Process.Kill()
		<-p.exited
		if strings.Contains(p.stderr.String(), "DATA RACE") {
			t.Errorf("%s has a data race:\n%s", p.name, p.stderr.String())
		}
	})
	return p
}

// await waits until the output contains a text n times.
func (p *program) await(o *output, text string, n int) string {
	p.t.Helper()
	deadline := time.After(patience)
	for {
		got, changed := o.next()
		if strings.Count(got, text) >= n {
			return got
		}
		select {
		case <-changed:
		case <-p.exited:
			if got = o.String(); strings.Count(got, text) >= n {
				return got
			}
			p.t.Fatalf("%s ended before it printed %q %d times; printed:\n%s\n%s", p.name, text, n, p.stdout.String(), p.stderr.String())
		case <-deadline:
			p.t.Fatalf("%s did not print %q %d times; printed:\n%s\n%s", p.name, text, n, p.stdout.String(), p.stderr.String())
		}
	}
}

// exit waits for the end and returns the exit code, -1 where a signal ended it.
func (p *program) exit() int {
	p.t.Helper()
	select {
	case <-p.exited:
		return p.cmd.ProcessState.ExitCode()
	case <-time.After(patience):
		p.t.Fatalf("%s did not end; printed:\n%s\n%s", p.name, p.stdout.String(), p.stderr.String())
		return 0
	}
}

func (p *program) signal(sig syscall.Signal) {
	p.t.Helper()
	if err := p.cmd.Process.Signal(sig); err != nil {
		p.t.Fatal(err)
	}
}

// does runs a command to its end and wants an exit code.
func does(t *testing.T, dir string, code int, args ...string) (stdout, stderr string) {
	t.Helper()
	p := start(t, dir, args...)
	if got := p.exit(); got != code {
		t.Fatalf("reveille %q: exit %d, want %d; printed:\n%s\n%s", args, got, code, p.stdout.String(), p.stderr.String())
	}
	return p.stdout.String(), p.stderr.String()
}

// stateDir is a folder that the database's user can pass through, whatever t.TempDir's modes.
func stateDir(t *testing.T) string {
	t.Helper()
	base := "/var/tmp"
	if _, err := os.Stat(base); err != nil {
		base = ""
	}
	dir, err := os.MkdirTemp(base, "reveille-dev-")
	if err != nil {
		t.Fatal(err)
	}
	if err := os.Chmod(dir, 0o711); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := os.RemoveAll(dir); err != nil {
			t.Error(err)
		}
	})
	return dir
}

// alive reports whether a process is there and no zombie: in a container nobody may reap those of a killed parent.
func alive(pid int) bool {
	if runtime.GOOS != "linux" {
		return !errors.Is(syscall.Kill(pid, 0), syscall.ESRCH)
	}
	stat, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return false
	}
	_, state, _ := strings.Cut(string(stat), ") ")
	return !strings.HasPrefix(state, "Z") && !strings.HasPrefix(state, "X")
}

// gone waits until none of the processes is there.
func gone(t *testing.T, pids []int) {
	t.Helper()
	deadline := time.After(patience)
	tick := time.NewTicker(poll)
	defer tick.Stop()
	for _, pid := range pids {
		for alive(pid) {
			select {
			case <-tick.C:
			case <-deadline:
				line, _ := os.ReadFile(fmt.Sprintf("/proc/%d/cmdline", pid))
				t.Fatalf("process %d is left: %q", pid, bytes.ReplaceAll(line, []byte{0}, []byte(" ")))
			}
		}
	}
}

// descendants are all processes below one, on Linux, and those that the test was told of.
func descendants(t *testing.T, root int) []int {
	t.Helper()
	if runtime.GOOS != "linux" {
		return nil
	}
	children := map[int][]int{}
	stats, err := filepath.Glob("/proc/[0-9]*/stat")
	if err != nil {
		t.Fatal(err)
	}
	for _, file := range stats {
		stat, err := os.ReadFile(file)
		if err != nil { // ended meanwhile
			continue
		}
		_, rest, _ := strings.Cut(string(stat), ") ")
		fields := strings.Fields(rest)
		pid, err := strconv.Atoi(filepath.Base(filepath.Dir(file)))
		if err != nil || len(fields) < 2 {
			continue
		}
		parent, err := strconv.Atoi(fields[1])
		if err == nil {
			children[parent] = append(children[parent], pid)
		}
	}
	all := []int{root}
	for i := 0; i < len(all); i++ {
		all = append(all, children[all[i]]...)
	}
	return all[1:]
}

var pidRE = regexp.MustCompile(`(?m)^  (\S+) .*\bpid (\d+)\b`)

// banner reads the pids of what a dev said that it runs.
func banner(t *testing.T, text string) map[string]int {
	t.Helper()
	pids := map[string]int{}
	for _, m := range pidRE.FindAllStringSubmatch(text, -1) {
		pid, err := strconv.Atoi(m[2])
		if err != nil {
			t.Fatal(err)
		}
		pids[m[1]] = pid
	}
	for _, name := range []string{"database", "worker-1", "worker-2", "scanner"} {
		if !alive(pids[name]) {
			t.Fatalf("%s does not run, says the banner:\n%s", name, text)
		}
	}
	return pids
}

func startDev(t *testing.T, dir string) (*program, map[string]int) {
	t.Helper()
	p := start(t, dir, "dev", "--nats-port", "0", "--exec", handler, "--grace", "500ms", "--kill-after", "2s")
	text := p.await(&p.stdout, "\nready\n", 1)
	return p, banner(t, text)
}

// TestDev runs everything as a newcomer does, in one folder and without any environment: a wake, an interrupt, a worker
// that is killed, Ctrl-C, a second start that finds its data again, and kill -9 of all of it.
func TestDev(t *testing.T) {
	dir := stateDir(t)
	dev, pids := startDev(t, dir)

	t.Run("wake", func(t *testing.T) {
		stdout, stderr := does(t, dir, 0, "wake", "s1", "--input", `"hi"`, "--id", "in_1", "--wait")
		if stdout != "hello\ndone\n" {
			t.Errorf("the step said %q", stdout)
		}
		if !strings.Contains(stderr, `session s1: completed, result "ok"`) {
			t.Errorf("progress was %q", stderr)
		}
		again, stderr := does(t, dir, 0, "wake", "s1", "--input", `"hi"`, "--id", "in_1", "--wait")
		if again != stdout || !strings.Contains(stderr, "input in_1 was sent before: this is what is recorded of it\n") {
			t.Errorf("the same wake again: %q and %q", again, stderr)
		}
		_, stderr = does(t, dir, 1, "wake", "s1", "--input", `"other"`, "--id", "in_1", "--wait")
		if !strings.Contains(stderr, "rejected: input id was used before with another body or delivery: in_1 (input_conflict)") {
			t.Errorf("a conflicting wake: %q", stderr)
		}
		_, stderr = does(t, dir, 3, "wake", "s1", "--input", `"fail"`, "--wait")
		if !strings.Contains(stderr, "broken") {
			t.Errorf("a wake that fails: %q", stderr)
		}
		if stdout, _ = does(t, dir, 0, "wake", "s1", "--wait"); stdout != "hello\ndone\n" {
			t.Errorf("a bare wake said %q", stdout)
		}
	})
	t.Run("admit", func(t *testing.T) {
		stdout, _ := does(t, dir, 0, "admit", "s2", "--input", `"hi"`)
		if stdout, stderr := does(t, dir, 0, "wake", "s2", "--wait"); stdout != "hello\ndone\n" {
			t.Errorf("a bare wake of an admitted input said %q; %s", stdout, stderr)
		}
		events, _ := follows(t, dir, "s2", "execution.ended")
		if !strings.Contains(events, strings.TrimSpace(stdout)) {
			t.Errorf("the printed id %q is in no event:\n%s", stdout, events)
		}
	})
	t.Run("interrupt", func(t *testing.T) {
		wake := start(t, dir, "wake", "s3", "--input", `{"hold":1}`, "--wait")
		wake.await(&wake.stdout, "hello\n", 1)
		if stdout, _ := does(t, dir, 0, "sessions", "--state", "running"); !strings.Contains(stdout, "s3") {
			t.Errorf("running sessions are\n%s", stdout)
		}
		if stdout, _ := does(t, dir, 0, "show", "s3"); !strings.Contains(stdout, "is open") {
			t.Errorf("the session is\n%s", stdout)
		}
		_, stderr := does(t, dir, 4, "interrupt", "s3", "--reason", "enough", "--wait")
		if !strings.Contains(stderr, "session s3: interrupted") {
			t.Errorf("progress was %q", stderr)
		}
		if code := wake.exit(); code != 4 || !strings.Contains(wake.stderr.String(), "interrupted: enough") {
			t.Errorf("the wake ended with %d: %s", code, wake.stderr.String())
		}
		if _, stderr = does(t, dir, 0, "interrupt", "s3", "--wait"); !strings.Contains(stderr, "nothing runs") {
			t.Errorf("an interrupt of nothing: %q", stderr)
		}
	})
	t.Run("workers", func(t *testing.T) {
		stdout, _ := does(t, dir, 0, "workers", "--json")
		kinds := map[string]int{}
		for line := range strings.Lines(stdout) {
			var l crdb.LeaseDetail
			if err := json.Unmarshal([]byte(line), &l); err != nil {
				t.Fatal(err)
			}
			if l.Live {
				kinds[l.Kind]++
			}
		}
		if kinds["worker"] != 2 || kinds["scanner"] != 1 {
			t.Errorf("leases are\n%s", stdout)
		}
	})
	t.Run("stop waiting", func(t *testing.T) {
		wake := start(t, dir, "wake", "s4", "--input", `{"hold":1}`, "--wait")
		wake.await(&wake.stdout, "hello\n", 1)
		wake.signal(syscall.SIGINT)
		if code := wake.exit(); code != 130 {
			t.Errorf("exit %d, want 130", code)
		}
		release(t, dir, "s4")
		if events, _ := follows(t, dir, "s4", "execution.ended"); !strings.Contains(events, `"completed"`) {
			t.Errorf("the session did not go on:\n%s", events)
		}
	})
	t.Run("worker killed", func(t *testing.T) { workerKilled(t, dir, dev) })
	t.Run("twice", func(t *testing.T) {
		if _, stderr := does(t, dir, 1, "dev", "--nats-port", "0"); !strings.Contains(stderr, "another reveille dev (pid "+strconv.Itoa(dev.cmd.Process.Pid)+")") || strings.Count(stderr, "\n") != 1 {
			t.Errorf("a second dev said %q", stderr)
		}
		port := natsPort(t, dir)
		if _, stderr := does(t, dir, 1, "dev", "--state", "other", "--nats-port", port); !strings.Contains(stderr, "port "+port+" on 127.0.0.1 is in use") || strings.Count(stderr, "\n") != 1 {
			t.Errorf("a dev on a used port said %q", stderr)
		}
	})

	// Ctrl-C in mid-step: the step is handed over to the next start.
	wake := start(t, dir, "wake", "s6", "--input", `{"hold":1}`, "--id", "in_6", "--wait")
	wake.await(&wake.stdout, "hello\n", 1)
	all := append(descendants(t, dev.cmd.Process.Pid), pids["database"], pids["scanner"], pids["worker-2"])
	dev.signal(syscall.SIGINT)
	if code := dev.exit(); code != 0 {
		t.Fatalf("dev: exit %d after Ctrl-C:\n%s", code, dev.stderr.String())
	}
	for _, pid := range all {
		if alive(pid) {
			t.Errorf("process %d is left after Ctrl-C; dev said:\n%s", pid, dev.stderr.String())
		}
	}
	if _, err := os.Stat(filepath.Join(dir, ".reveille", "dev.json")); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("dev.json is left: %v", err)
	}
	wake.signal(syscall.SIGINT)
	wake.exit()

	dev, _ = startDev(t, dir)
	t.Run("second start", func(t *testing.T) {
		if stdout, _ := does(t, dir, 0, "sessions"); !strings.Contains(stdout, "s1 ") || !strings.Contains(stdout, "s6 ") {
			t.Errorf("sessions are\n%s", stdout)
		}
		release(t, dir, "s6")
		stdout, stderr := does(t, dir, 0, "wake", "s6", "--input", `{"hold":1}`, "--id", "in_6", "--wait")
		if stdout != "hello\nagain\ndone\n" || !strings.Contains(stderr, "handover") {
			t.Errorf("the step that was handed over said %q; %s", stdout, stderr)
		}
		checkLog(t, dir, "s1")
	})

	// kill -9 in mid-step leaves nothing running.
	wake = start(t, dir, "wake", "s7", "--input", `{"hold":1}`, "--wait")
	wake.await(&wake.stdout, "hello\n", 1)
	all = append(descendants(t, dev.cmd.Process.Pid), steps(t, dir)...)
	dev.signal(syscall.SIGKILL)
	dev.exit()
	gone(t, all)
	wake.signal(syscall.SIGINT)
	if code := wake.exit(); code != 130 {
		t.Errorf("the wake ended with %d, want 130: %s", code, wake.stderr.String())
	}
}

// workerKilled kills the worker of a step and sees the step go on.
func workerKilled(t *testing.T, dir string, dev *program) {
	wake := start(t, dir, "wake", "s5", "--input", `{"hold":1}`, "--wait")
	wake.await(&wake.stdout, "hello\n", 1)
	stdout, _ := does(t, dir, 0, "show", "s5", "--json")
	var d crdb.SessionDetail
	if err := json.Unmarshal([]byte(stdout), &d); err != nil || d.Claim == nil {
		t.Fatalf("%v: %s", err, stdout)
	}
	commands := steps(t, dir)
	before := strings.Count(dev.stderr.String(), d.Worker+" started: pid ")
	pids := regexp.MustCompile(regexp.QuoteMeta(d.Worker)+` started: pid (\d+)`).FindAllStringSubmatch(dev.stderr.String(), -1)
	pid, err := strconv.Atoi(pids[len(pids)-1][1])
	if err != nil {
		t.Fatal(err)
	}
	if err := syscall.Kill(pid, syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	gone(t, append(commands, pid)) // its command too
	dev.await(&dev.stderr, d.Worker+" (pid "+strconv.Itoa(pid)+") ended: signal: killed", 1)
	dev.await(&dev.stderr, d.Worker+" started: pid ", before+1)
	wake.await(&wake.stdout, "again\n", 1)
	release(t, dir, "s5")
	if code := wake.exit(); code != 0 || wake.stdout.String() != "hello\nagain\ndone\n" {
		t.Errorf("the wake ended with %d and said %q: %s", code, wake.stdout.String(), wake.stderr.String())
	}
	if got := wake.stderr.String(); !strings.Contains(got, "worker_lost") || !strings.Contains(got, "recovery of") {
		t.Errorf("progress was %q", got)
	}
	events, _ := follows(t, dir, "s5", `"completed"`)
	for _, want := range []string{`"worker_lost"`, `"recovered"`, `"kind":"recovery"`} {
		if !strings.Contains(events, want) {
			t.Errorf("no event tells of %s:\n%s", want, events)
		}
	}
	checkLog(t, dir, "s5")
}

// follows watches a session from its beginning until something comes, ends the
// watch as a user does, and returns what it printed.
func follows(t *testing.T, dir, session, until string) (stdout, stderr string) {
	t.Helper()
	watch := start(t, dir, "watch", session, "--json")
	watch.await(&watch.stdout, until, 1)
	watch.signal(syscall.SIGINT)
	if code := watch.exit(); code != 0 {
		t.Errorf("watch: exit %d: %s", code, watch.stderr.String())
	}
	return watch.stdout.String(), watch.stderr.String()
}

// checkLog checks that the events of a session have no gap.
func checkLog(t *testing.T, dir, session string) {
	t.Helper()
	events, _ := follows(t, dir, session, `"execution.ended"`)
	seq := int64(0)
	for line := range strings.Lines(events) {
		r, err := claims.ParseRecord([]byte(strings.TrimSuffix(line, "\n")))
		if err != nil {
			t.Fatal(err)
		}
		if seq++; r.Seq != seq {
			t.Fatalf("event %d of session %s has sequence %d:\n%s", seq, session, r.Seq, events)
		}
	}
}

// release lets the steps of a session go on.
func release(t *testing.T, dir, session string) {
	t.Helper()
	if err := os.WriteFile(filepath.Join(dir, "go-"+session), nil, 0o644); err != nil {
		t.Fatal(err)
	}
}

// steps are the commands of steps that run.
func steps(t *testing.T, dir string) []int {
	t.Helper()
	raw, err := os.ReadFile(filepath.Join(dir, "steps"))
	if err != nil {
		t.Fatal(err)
	}
	var running []int
	for line := range strings.Lines(string(raw)) {
		pid, err := strconv.Atoi(strings.TrimSpace(line))
		if err != nil {
			t.Fatal(err)
		}
		if alive(pid) {
			running = append(running, pid)
		}
	}
	if len(running) == 0 {
		t.Fatal("no step runs")
	}
	return running
}

func natsPort(t *testing.T, dir string) string {
	t.Helper()
	raw, err := os.ReadFile(filepath.Join(dir, ".reveille", "dev.json"))
	if err != nil {
		t.Fatal(err)
	}
	if info, err := os.Stat(filepath.Join(dir, ".reveille", "dev.json")); err != nil || info.Mode().Perm() != 0o600 {
		t.Errorf("dev.json has mode %v: %v", info.Mode(), err)
	}
	var servers struct {
		NATSURL string `json:"nats_url"`
	}
	if err := json.Unmarshal(raw, &servers); err != nil {
		t.Fatal(err)
	}
	return servers.NATSURL[strings.LastIndexByte(servers.NATSURL, ':')+1:]
}

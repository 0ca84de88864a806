package exec

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	osexec "os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"reveille/claims"
	"reveille/runner"
	"reveille/runner/exec/members"
)

// The test binary as a worker that will be killed: workerVariable says which,
// the file in pidsVariable gets the number of the guard, then of all others.
const (
	workerVariable = "RV_EXEC_TEST_WORKER"
	pidsVariable   = "PIDS"
)

// victims start: a child in the group that ignores SIGTERM, one out of it, a
// daemon, and the leader.
const (
	victims = `trap '' TERM
sh -c 'echo $$ > $PIDS; exec sleep 1000' &
setsid sh -c 'echo $$ > $PIDS; exec sleep 1000' &
(setsid sh -c 'echo $$ > $PIDS; exec sleep 1000' &)
echo $$ > $PIDS; wait`
	victimCount = 4
	// unmarked is found by its group only, hidden by its cgroup.
	unmarked = `P=$PIDS; env -i sh -c 'echo $$ > '$P'; exec sleep 1000' &
`
	hidden = `P=$PIDS; (env -i setsid sh -c 'echo $$ > '$P'; exec sleep 1000' &)
`
)

func runTestWorker(mode string) {
	check := func(err error) {
		if err != nil {
			fmt.Fprintln(os.Stderr, "test worker:", err)
			os.Exit(1)
		}
	}
	pids, err := os.OpenFile(os.Getenv(pidsVariable), os.O_WRONLY, 0)
	check(err)
	started := make(chan int, 1)
	guard, err := startGuard(context.Background(), func(pid int) { started <- pid })
	check(err)
	pid := <-started
	if mode == "unregistered" { // between a command's start and its registration
		fmt.Fprintln(pids, pid)
		_, err = guard.start("/bin/sh", []string{"sh", "-c", "echo $$ > $PIDS; exec sleep 1000"}, &os.ProcAttr{Sys: &syscall.SysProcAttr{}})
		check(err)
		select {}
	}
	if mode == "announced" { // the shell's children then, which its death does not take along
		step := string(newStep()) // its own: guards of other test runs must not find it
		guard.add(step, nil)
		_, err = os.StartProcess("/bin/sh", []string{"sh", "-c", victims},
			&os.ProcAttr{Env: append(os.Environ(), members.Variable+"="+step), Sys: &syscall.SysProcAttr{Setpgid: true}})
		check(err)
		fmt.Fprintln(pids, pid)
		select {}
	}
	command := unmarked + victims
	if mode == "hidden" {
		command = hidden + victims
	}
	h, err := New(Options{Command: command, KillAfter: never, Guard: guard})
	check(err)
	req, lease := request(), &heldLease{until: time.Now().Add(time.Hour)}
	if mode == "stopped" {
		req.Deadline = lease
	}
	go func() {
		_, err := h.Step(context.Background(), req, (&recorder{}).output())
		check(fmt.Errorf("the step has ended: %w", err))
	}()
	if mode == "guard-dies" {
		fmt.Fprintln(pids, pid)
		pid = <-started // the next one, which knows the steps
	}
	fmt.Fprintln(pids, pid)
	if mode == "stopped" { // when the test has seen all; what is moved is told before it stops
		_, err = os.Stdin.Read(make([]byte, 1))
		check(err)
		lease.move(time.Now().Add(50 * time.Millisecond))
		guard.tellDeadlines()
		check(unix.Kill(os.Getpid(), unix.SIGSTOP))
	}
	select {}
}

// heldLease is a lease whose deadline a test moves.
type heldLease struct {
	mu        sync.Mutex
	until     time.Time
	followers []func(time.Time)
}

func (*heldLease) Holder() claims.HolderID { return "h" }

func (l *heldLease) Follow(f func(time.Time)) (stop func()) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.followers = append(l.followers, f)
	f(l.until)
	return func() {}
}

func (l *heldLease) move(until time.Time) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.until = until
	for _, f := range l.followers {
		f(until)
	}
}

// startWorker starts one; its processes become children of the test when it dies.
func startWorker(t *testing.T, mode string) (worker *osexec.Cmd, pids *fifo) {
	t.Helper()
	worker, pids, _ = startWorkerWithInput(t, mode)
	return worker, pids
}

func startWorkerWithInput(t *testing.T, mode string) (worker *osexec.Cmd, pids *fifo, stdin io.Writer) {
	t.Helper()
	if err := members.BecomeSubreaper(); err != nil {
		t.Fatal(err)
	}
	pids = newFifo(t)
	worker = osexec.Command(os.Args[0])
	worker.Env = append(os.Environ(), workerVariable+"="+mode, pidsVariable+"="+pids.path)
	worker.Stderr = os.Stderr
	stdin, err := worker.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := worker.Start(); err != nil {
		t.Fatal(err)
	}
	return worker, pids, stdin
}

func kill(t *testing.T, worker *osexec.Cmd) {
	t.Helper()
	if err := worker.Process.Kill(); err != nil {
		t.Error(err)
	}
	_ = worker.Wait()
}

func TestI7GuardKillsTheStepsOfAKilledWorker(t *testing.T) {
	modes := map[string]int{"registered": victimCount + 1, "announced": victimCount}
	if newHandler(t, Options{Command: "true"}).cgroups != nil {
		modes["hidden"] = victimCount + 1
	}
	for mode, count := range modes {
		t.Run(mode, func(t *testing.T) { testKilledWorker(t, mode, count) })
	}
}

func testKilledWorker(t *testing.T, mode string, victimCount int) {
	worker, pids := startWorker(t, mode)
	var all []life // in any order: the guard and the victims
	for range 1 + victimCount {
		all = append(all, pids.process(t))
	}
	for _, l := range all {
		for _, s := range []unix.Signal{unix.SIGTERM, unix.SIGINT, unix.SIGHUP} {
			if p, err := members.Read(l.PID); err == nil && isGuardProcess(l.PID) {
				if p.Group != p.PID {
					t.Errorf("the guard is in group %d", p.Group)
				}
				if err := unix.Kill(l.PID, s); err != nil {
					t.Error(err)
				}
			}
		}
	}
	kill(t, worker)
	for _, l := range all {
		l.endAndReap(t)
	}
	if cgroups, err := members.FindCgroups(); err == nil { // the guard is over too: it removed them
		if left, err := filepath.Glob(fmt.Sprintf("%v/rv-%08x-*", cgroups, worker.Process.Pid)); err != nil || len(left) > 0 {
			t.Errorf("cgroups are left: %v, %v", left, err)
		}
	}
}

func isGuardProcess(pid int) bool {
	line, err := os.ReadFile("/proc/" + strconv.Itoa(pid) + "/cmdline")
	return err == nil && strings.HasSuffix(string(line), "\x00"+GuardArg+"\x00")
}

// A worker that stands still can't end its steps when its lease is over; the guard does, and goes on guarding.
func TestI7GuardKillsTheStepsOfAStoppedWorker(t *testing.T) {
	worker, pids, stdin := startWorkerWithInput(t, "stopped")
	var guard life
	var victims []life
	for range 1 + victimCount + 1 {
		if l := pids.process(t); isGuardProcess(l.PID) {
			guard = l
		} else {
			victims = append(victims, l)
		}
	}
	if _, err := stdin.Write([]byte("x")); err != nil {
		t.Fatal(err)
	}
	for _, l := range victims {
		l.awaitEnd(t)
	}
	if !guard.lives() {
		t.Error("the guard has ended with the steps")
	}
	kill(t, worker)
	for _, l := range append(victims, guard) {
		l.endAndReap(t)
	}
}

// What the guard ended is no fault of the command's: the step may be tried again, if its lease turns out to be held. So it
// was if this process stood still after a heartbeat had been answered and before the guard was told.
func TestStepThatTheGuardEndedMayBeTriedAgain(t *testing.T) {
	g, err := StartGuard(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	defer g.Close()
	for name, tc := range map[string]struct {
		late func(*heldLease, *fifo)
		want bool
	}{
		"killed": {func(l *heldLease, _ *fifo) { l.move(time.Now()) }, true},
		"told late": {func(l *heldLease, gate *fifo) {
			g.mu.Lock()
			g.told["h"] = time.Now()
			g.mu.Unlock()
			l.move(time.Now().Add(2 * time.Hour))
			g.tellDeadlines()
			gate.open(t)
		}, true},
		"in time": {func(l *heldLease, gate *fifo) {
			l.move(time.Now().Add(2 * time.Hour))
			g.tellDeadlines()
			gate.open(t)
		}, false},
	} {
		pids, gate := newFifo(t), newFifo(t)
		h := newHandler(t, Options{Command: "echo $$ > " + pids.path + "; read x < " + gate.path + "; exit 3", Guard: g})
		lease, req := &heldLease{until: time.Now().Add(time.Hour)}, request()
		req.Deadline = lease
		done := inBackground(t.Context(), h, req, &recorder{})
		leader := pids.process(t)
		tc.late(lease, gate)
		var f *runner.Failure
		a := await(t, done, "the end")
		if !errors.As(a.err, &f) || f.Code != claims.CodeExit || f.Retryable != tc.want || strings.Contains(f.Message, "guard") != tc.want {
			t.Errorf("%s: %v, want retryable %v", name, a.err, tc.want)
		}
		assertGone(t, leader)
		if len(g.steps)+len(g.told)+len(g.until) > 0 {
			t.Errorf("%s: there is still %v, %v, %v", name, g.steps, g.told, g.until)
		}
	}
}

func TestI7CommandIsGuardedBeforeItIsRegistered(t *testing.T) {
	worker, pids := startWorker(t, "unregistered")
	all := []life{pids.process(t), pids.process(t)}
	kill(t, worker)
	for _, l := range all {
		l.endAndReap(t)
	}
}

func TestI7GuardThatDiedIsReplaced(t *testing.T) {
	worker, pids := startWorker(t, "guard-dies")
	var all []life
	for range 1 + victimCount + 1 {
		all = append(all, pids.process(t))
	}
	for i, l := range all {
		if isGuardProcess(l.PID) {
			if err := unix.Kill(l.PID, unix.SIGKILL); err != nil {
				t.Fatal(err)
			}
			l.awaitEnd(t)
			all = append(all[:i], all[i+1:]...)
			break
		}
	}
	all = append(all, pids.process(t)) // the next guard
	for _, l := range all {
		if !l.lives() {
			t.Errorf("process %d died with the guard", l.PID)
		}
	}
	kill(t, worker)
	for _, l := range all {
		l.endAndReap(t)
	}
}

// A guard that takes nothing is killed, without harm to what it guards.
func TestGuardThatHangsIsReplaced(t *testing.T) {
	started := make(chan int, 2)
	g, err := startGuard(t.Context(), func(pid int) { started <- pid })
	if err != nil {
		t.Fatal(err)
	}
	defer g.Close()
	guard, pids, gate := lifeOf(t, strconv.Itoa(<-started)), newFifo(t), newFifo(t)
	h := newHandler(t, Options{Command: "echo $$ > " + pids.path + "; read x < " + gate.path, Guard: g})
	done := inBackground(t.Context(), h, request(), &recorder{})
	leader := pids.process(t)
	if err := unix.Kill(guard.PID, unix.SIGSTOP); err != nil {
		t.Fatal(err)
	}
	for step := 0; guard.lives(); step++ { // until its pipe is full, and a second more
		g.add(strconv.Itoa(step), nil)
		g.remove(strconv.Itoa(step))
	}
	await(t, started, "another guard")
	if !leader.lives() {
		t.Error("the step died with the guard")
	}
	gate.open(t)
	if a := await(t, done, "the end"); a.err != nil {
		t.Error(a.err)
	}
}

func TestGuardCloseKillsNothing(t *testing.T) {
	started := make(chan int, 1)
	g, err := startGuard(t.Context(), func(pid int) { started <- pid })
	if err != nil {
		t.Fatal(err)
	}
	guard, pids, gate := lifeOf(t, strconv.Itoa(<-started)), newFifo(t), newFifo(t)
	h := newHandler(t, Options{Command: "echo $$ > " + pids.path + "; read x < " + gate.path, Guard: g})
	done := inBackground(t.Context(), h, request(), &recorder{})
	leader := pids.process(t)
	g.Close()
	g.Close() // harmless
	assertGone(t, guard)
	if !leader.lives() {
		t.Error("Close killed the step")
	}
	_, err = h.Step(t.Context(), request(), (&recorder{}).output())
	var f *runner.Failure
	if !errors.As(err, &f) || f.Code != claims.CodeExit || !strings.Contains(f.Message, errGuardClosed.Error()) {
		t.Errorf("a step after Close: %v", err)
	}
	gate.open(t)
	if a := await(t, done, "the end"); a.err != nil {
		t.Error(a.err)
	}
}

func TestGuardPipeIsNotInherited(t *testing.T) {
	g, err := StartGuard(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	defer g.Close()
	info, err := g.current.pipe.Stat()
	if err != nil {
		t.Fatal(err)
	}
	pipe := fmt.Sprintf("pipe:[%d]", info.Sys().(*syscall.Stat_t).Ino)
	rec := &recorder{}
	h := newHandler(t, Options{Command: "ls -l /proc/$$/fd; echo; ls -l /proc/$PPID/fd", Guard: g})
	if _, err := h.Step(t.Context(), request(), rec.output()); err != nil {
		t.Fatal(err)
	}
	own, workers, ok := strings.Cut(rec.text(), "\n\n")
	if !ok || strings.Contains(own, pipe) || !strings.Contains(workers, pipe) {
		t.Errorf("%s: want it with the worker only\n%s", pipe, rec.text())
	}
}

func TestGuardOfAGuard(t *testing.T) {
	t.Setenv(guardVariable, "1")
	if _, err := StartGuard(t.Context()); !errors.Is(err, errGuardUnknown) {
		t.Errorf("StartGuard = %v, want %v", err, errGuardUnknown)
	}
}

func TestGuardStartIsCancelled(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := StartGuard(ctx); !errors.Is(err, context.Canceled) {
		t.Errorf("StartGuard = %v", err)
	}
}

func TestIsGuard(t *testing.T) {
	if !IsGuard([]string{"worker", GuardArg}) || IsGuard([]string{"worker"}) || IsGuard([]string{"worker", "--slots", GuardArg}) {
		t.Error("IsGuard is wrong")
	}
	var none *Guard
	none.add("s", nil)
	none.started("s", 1)
	none.remove("s")
	none.Close()
}

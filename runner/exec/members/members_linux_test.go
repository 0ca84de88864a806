package members

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"go.uber.org/goleak"
	"golang.org/x/sys/unix"
)

// patience ends a test that hangs; no test waits for it otherwise.
const patience = 60 * time.Second

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// shell is a command of a test, which says numbers of processes on its output
// and goes on when it is told to on its input.
type shell struct {
	cmd  *exec.Cmd
	say  io.WriteCloser
	out  *os.File
	read *bufio.Reader
}

// start starts a command in a group of its own. It is killed at the end, and
// its processes are ours from the start.
func start(t *testing.T, script string, attr *syscall.SysProcAttr) *shell {
	t.Helper()
	if err := BecomeSubreaper(); err != nil {
		t.Fatal(err)
	}
	attr.Setpgid = true
	r, w, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	s := &shell{cmd: exec.Command("/bin/sh", "-c", script), out: r, read: bufio.NewReader(r)}
	s.cmd.SysProcAttr, s.cmd.Stdout = attr, w
	if s.say, err = s.cmd.StdinPipe(); err != nil {
		t.Fatal(err)
	}
	if err := s.cmd.Start(); err != nil {
		t.Fatal(err)
	}
	w.Close()
	t.Cleanup(func() {
		r.Close()
		_ = unix.Kill(-s.cmd.Process.Pid, unix.SIGKILL)
		_ = s.cmd.Wait()
	})
	return s
}

func (s *shell) line(t *testing.T) string {
	t.Helper()
	if err := s.out.SetReadDeadline(time.Now().Add(patience)); err != nil {
		t.Fatal(err)
	}
	line, err := s.read.ReadString('\n')
	if err != nil {
		t.Fatalf("a line of the command: %v (have %q)", err, line)
	}
	return strings.TrimSpace(line)
}

func (s *shell) process(t *testing.T) Process {
	t.Helper()
	pid, err := strconv.Atoi(s.line(t))
	if err != nil {
		t.Fatal(err)
	}
	p, err := Read(pid)
	if err != nil {
		t.Fatalf("process %d: %v", pid, err)
	}
	return p
}

// until repeats a look at something that nobody tells us about.
func until(t *testing.T, what string, f func() bool) {
	t.Helper()
	for end := time.Now().Add(patience); !f(); time.Sleep(time.Millisecond) {
		if time.Now().After(end) {
			t.Fatalf("%s did not happen", what)
		}
	}
}

// The cgroup of a step holds all that it started, wherever that went.
func TestCgroup(t *testing.T) {
	cgroups, err := FindCgroups()
	if err != nil { // then the machine must be one that has none
		if !errors.Is(err, os.ErrPermission) && !errors.Is(err, os.ErrNotExist) && !errors.Is(err, unix.EROFS) && !errors.Is(err, errNoCgroup) {
			t.Errorf("FindCgroups: %v", err)
		}
		return
	}
	step := fmt.Sprintf("%08x-1", os.Getpid())
	attr := &syscall.SysProcAttr{}
	c := cgroups.Make(step, attr)
	if c == nil {
		t.Fatal("the cgroup can't be made")
	}
	if again := cgroups.Make(step, &syscall.SysProcAttr{}); again != nil {
		t.Error("another step got the same cgroup")
	}
	s := start(t, `d='`+c.dir+`'; mkdir "$d/below" "$d/below/it" "$d/empty"
		(env -i setsid sh -c 'echo $$; exec sleep 1000' &)
		(env -i setsid sh -c 'echo $$ > "'"$d/below/it/cgroup.procs"'"; echo $$; exec sleep 1000' &)
		read go`, attr)
	c.Started(attr, true)
	daemons := []Process{s.process(t), s.process(t)}
	in := c.processes()
	for _, p := range append(daemons, Process{ID: ID{PID: s.cmd.Process.Pid}}) {
		if !in[p.PID] {
			t.Errorf("process %d is not in %v", p.PID, in)
		}
	}
	if in[os.Getpid()] || c.had(os.Getpid()) {
		t.Error("the test is in the cgroup")
	}
	if c.remove() {
		t.Error("removed with living processes in it")
	}
	c.kill()
	until(t, "the removal", c.remove)
	if _, err := os.Stat(c.dir); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("the cgroup is there: %v", err)
	}
	for _, p := range daemons { // zombies; they know where they lived
		if !c.had(p.PID) {
			t.Errorf("process %d was not in the cgroup", p.PID)
		}
		if got, err := unix.Wait4(p.PID, nil, 0, nil); got != p.PID {
			t.Errorf("wait for %d: %v", p.PID, err)
		}
	}
	if c.kill(); len(c.processes()) > 0 || !c.remove() {
		t.Error("a removed cgroup has processes")
	}
}

// A start that failed leaves no cgroup behind; one that can't be is nil.
func TestCgroupOfNothing(t *testing.T) {
	dir := t.TempDir()
	attr := &syscall.SysProcAttr{}
	c := CgroupsAt(dir).Make("0a-1", attr)
	if c == nil || !attr.UseCgroupFD {
		t.Fatalf("Make = %v, %+v", c, attr)
	}
	c.Started(attr, false)
	if left, err := os.ReadDir(dir); attr.UseCgroupFD || err != nil || len(left) > 0 {
		t.Errorf("left behind: %v, %v, %+v", left, err, attr)
	}
	for _, step := range []string{"", "..", "a/b", "a.b", "A"} {
		if CgroupsAt(dir).Make(step, attr) != nil {
			t.Errorf("step %q got a cgroup", step)
		}
	}
	var none *Cgroups
	if c := none.Make("0a-1", attr); c != nil || attr.UseCgroupFD {
		t.Error("a cgroup of none")
	} else if c.Started(attr, true); c.processes() != nil || !c.remove() || c.had(1) {
		t.Error("no cgroup has processes")
	}
}

func TestCgroupDir(t *testing.T) {
	const v2 = "29 23 0:26 / /sys/fs/cgroup rw,nosuid - cgroup2 cgroup2 rw\n"
	for _, c := range []struct{ own, mounts, want string }{
		{"0::/\n", v2, "/sys/fs/cgroup"},
		{"0::/system.slice/worker.service\n", v2, "/sys/fs/cgroup/system.slice/worker.service"},
		{"1:cpu:/a\n0::/b\n", "30 23 0:25 / /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu\n31 23 0:26 / /sys/fs/cgroup/unified rw shared:4 - cgroup2 none rw\n", "/sys/fs/cgroup/unified/b"},
		{"0::/a/b\n", "29 23 0:26 /a /mnt rw - cgroup2 cgroup2 rw\n", "/mnt/b"},
		{"0::/b\n", "29 23 0:26 /a /mnt rw - cgroup2 cgroup2 rw\n" + v2, "/sys/fs/cgroup/b"},
		{"0::/b\n", "29 23 0:26 / /with\\040space rw - cgroup2 cgroup2 rw\n", ""},
		{"0::/b\n", "29 23 0:26 /a /mnt rw - cgroup2 cgroup2 rw\n", ""},
		{"1:cpu:/\n", v2, ""},
		{"0::/\n", "22 1 0:5 / / rw - tmpfs tmpfs rw\n", ""},
		{"", "", ""},
	} {
		got, err := cgroupDir(c.own, c.mounts)
		if got != c.want || (err != nil) != (c.want == "") || err != nil && !errors.Is(err, errNoCgroup) {
			t.Errorf("%q in %q: %q, %v, want %q", c.own, c.mounts, got, err, c.want)
		}
	}
}

// An orphan that ended before it was ever looked at is reaped by its age.
func TestUnknownOrphansAreReaped(t *testing.T) {
	s := start(t, `(setsid sh -c 'echo $$; exit 0' &) ; read go`, &syscall.SysProcAttr{})
	pid, err := strconv.Atoi(s.line(t))
	if err != nil {
		t.Fatal(err)
	}
	until(t, "the end of the orphan", func() bool {
		p, err := Read(pid)
		return err == nil && p.Dead() && p.Parent == os.Getpid()
	})
	for _, now := range []time.Time{time.Now(), time.Now().Add(orphanAge)} { // seen, and then too old
		processes, _, err := readAll()
		if err != nil {
			t.Fatal(err)
		}
		reapOrphans(processes, now)
	}
	if p, err := Read(pid); err == nil && p.Parent == os.Getpid() {
		t.Errorf("process %d is there: %+v", pid, p)
	}
}

func TestProcessWithAnOddName(t *testing.T) {
	script := filepath.Join(t.TempDir(), "a) Z 1 (b")
	if err := os.WriteFile(script, []byte("#!/bin/sh\necho $$\nread go\n"), 0o700); err != nil {
		t.Fatal(err)
	}
	p := start(t, `exec "`+script+`"`, &syscall.SysProcAttr{}).process(t)
	if p.Dead() || p.Parent != os.Getpid() || p.Group != p.PID || p.threads != 1 {
		t.Errorf("process = %+v", p)
	}
}

func BenchmarkLook(b *testing.B) {
	m := Of(os.Getpid(), "none", nil)
	defer m.Release()
	for b.Loop() {
		m.Look()
	}
}

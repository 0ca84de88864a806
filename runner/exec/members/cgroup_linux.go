package members

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"

	"golang.org/x/sys/unix"
)

// cgroupPrefix begins the names of the cgroups of steps.
const cgroupPrefix = "rv-"

var errNoCgroup = errors.New("there is no cgroup v2")

// Cgroups makes the cgroups of steps below the one of this process. A nil
// *Cgroups makes none.
type Cgroups struct{ dir string }

// FindCgroups finds the cgroup v2 of this process, and tries whether others can
// be made below it. The error says why they can't: there is no such hierarchy,
// it may not be written (in most containers), or the kernel is older than 5.14
// and has no cgroup.kill.
func FindCgroups() (*Cgroups, error) {
	dir, err := ownCgroup()
	if err != nil {
		return nil, err
	}
	trial, err := os.MkdirTemp(dir, cgroupPrefix+"trial-")
	if err != nil {
		return nil, err
	}
	defer os.Remove(trial)
	if err := unix.Access(filepath.Join(trial, "cgroup.kill"), unix.W_OK); err != nil {
		return nil, fmt.Errorf("cgroup.kill: %w", err)
	}
	return CgroupsAt(dir), nil
}

// CgroupsAt makes them in a directory.
func CgroupsAt(dir string) *Cgroups { return &Cgroups{dir: dir} }

// String is the directory that they are made in.
func (cs *Cgroups) String() string { return cs.dir }

// ownCgroup is the directory of the cgroup v2 that this process is in.
func ownCgroup() (string, error) {
	own, err := os.ReadFile("/proc/self/cgroup")
	if err != nil {
		return "", err
	}
	mounts, err := os.ReadFile("/proc/self/mountinfo")
	if err != nil {
		return "", err
	}
	dir, err := cgroupDir(string(own), string(mounts))
	if err != nil {
		return "", err
	}
	pids, err := os.ReadFile(filepath.Join(dir, "cgroup.procs"))
	if err != nil {
		return "", err
	}
	if !pidsOf(pids)[os.Getpid()] { // the paths were of another namespace
		return "", fmt.Errorf("%w: %s is not the one of this process", errNoCgroup, dir)
	}
	return dir, nil
}

// cgroupDir is where the cgroup of /proc/self/cgroup is found by
// /proc/self/mountinfo: see cgroup_namespaces(7) and proc_pid_mountinfo(5).
func cgroupDir(own, mounts string) (string, error) {
	_, path, ok := strings.Cut("\n"+own, "\n0::")
	if !ok {
		return "", errNoCgroup
	}
	path, _, _ = strings.Cut(path, "\n")
	for line := range strings.Lines(mounts) {
		before, after, _ := strings.Cut(line, " - ")
		fields := strings.Fields(before)
		if len(fields) < 5 || !strings.HasPrefix(after, "cgroup2 ") || strings.Contains(fields[4], `\`) {
			continue
		}
		if below, err := filepath.Rel(fields[3], path); err == nil && filepath.IsLocal(below) {
			return filepath.Join(fields[4], below), nil
		}
	}
	return "", fmt.Errorf("%w that is mounted and shows %q", errNoCgroup, path)
}

// Cgroup is the cgroup of one step. A nil *Cgroup has no processes, and is
// always gone.
type Cgroup struct {
	dir    string
	handle int // of the directory, for the start
}

// of is the cgroup of a step, there or not; nil for a step whose name can't be one's.
func (cs *Cgroups) of(step string) *Cgroup {
	if cs == nil || step == "" || strings.ContainsFunc(step, func(r rune) bool {
		return r != '-' && (r < '0' || r > '9') && (r < 'a' || r > 'f')
	}) {
		return nil
	}
	return &Cgroup{dir: filepath.Join(cs.dir, cgroupPrefix+step), handle: -1}
}

// Make makes the cgroup of a step, for a process that is then started with
// attr. It is nil, and attr unchanged, where that can't be.
func (cs *Cgroups) Make(step string, attr *syscall.SysProcAttr) *Cgroup {
	c := cs.of(step)
	if c == nil || os.Mkdir(c.dir, 0o755) != nil {
		return nil
	}
	handle, err := unix.Open(c.dir, unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		c.remove()
		return nil
	}
	c.handle = handle
	attr.UseCgroupFD, attr.CgroupFD = true, handle
	return c
}

// Started is called once the process was started, or was not: then the cgroup
// is removed.
func (c *Cgroup) Started(attr *syscall.SysProcAttr, ok bool) {
	if c == nil {
		return
	}
	attr.UseCgroupFD, attr.CgroupFD = false, 0
	_ = unix.Close(c.handle)
	if !ok {
		c.remove()
	}
}

// processes are the numbers of those that live in the cgroup and below it.
func (c *Cgroup) processes() map[int]bool {
	if c == nil {
		return nil
	}
	in := map[int]bool{}
	for _, dir := range c.tree() {
		pids, _ := os.ReadFile(filepath.Join(dir, "cgroup.procs")) // a threaded one is read with its parent
		for pid := range pidsOf(pids) {
			in[pid] = true
		}
	}
	return in
}

// had reports whether a zombie died in the cgroup or below it: it keeps the
// path, also when that was removed since.
func (c *Cgroup) had(pid int) bool {
	if c == nil {
		return false
	}
	own, _ := os.ReadFile("/proc/" + strconv.Itoa(pid) + "/cgroup")
	_, path, _ := strings.Cut("\n"+string(own), "\n0::")
	_, below, found := strings.Cut(path, "/"+filepath.Base(c.dir))
	return found && strings.IndexAny(below, "/ \n") == 0
}

// kill sends SIGKILL to all that is in the cgroup and below it, at one instant.
func (c *Cgroup) kill() {
	if c == nil {
		return
	}
	f, err := os.OpenFile(filepath.Join(c.dir, "cgroup.kill"), os.O_WRONLY, 0)
	if err != nil {
		return // removed: nothing lives in it
	}
	defer f.Close()
	_, _ = f.WriteString("1")
}

// remove reports whether the cgroup is gone: the kernel removes it exactly if
// no process lives in it or below it (zombies do not count). Where it refuses
// for another reason, which it should not, the rest of what is known of the
// members counts.
func (c *Cgroup) remove() (gone bool) {
	if c == nil || !errors.Is(unix.Rmdir(c.dir), unix.EBUSY) {
		return true
	}
	below := c.tree()[1:]
	for i := len(below) - 1; i >= 0; i-- { // the lowest first
		_ = unix.Rmdir(below[i])
	}
	return !errors.Is(unix.Rmdir(c.dir), unix.EBUSY)
}

// tree is the cgroup and those that the command made below it, from the top.
func (c *Cgroup) tree() []string {
	dirs := []string{c.dir}
	for i := 0; i < len(dirs); i++ {
		entries, _ := os.ReadDir(dirs[i]) // removed meanwhile
		for _, entry := range entries {
			if entry.IsDir() {
				dirs = append(dirs, filepath.Join(dirs[i], entry.Name()))
			}
		}
	}
	return dirs
}

// pidsOf reads a list of numbers, one a line.
func pidsOf(list []byte) map[int]bool {
	pids := map[int]bool{}
	for line := range bytes.Lines(list) {
		if pid, err := strconv.Atoi(string(bytes.TrimSpace(line))); err == nil {
			pids[pid] = true
		}
	}
	return pids
}

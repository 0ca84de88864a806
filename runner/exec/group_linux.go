package exec

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"os"
	"strconv"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

const (
	// orphanAge is how long an unknown zombie child is left to whoever waits for it.
	orphanAge = 5 * time.Second
	// maxDoubts bounds how often /proc is read again, 1 to 16 ms later, because it
	// could have missed a process: it is not read at one instant.
	maxDoubts = 5
	// maxEnvironment bounds what is read of an environment; the kernel allows three
	// quarters of 8 MiB for it and the arguments.
	maxEnvironment = 6 << 20

	kernelThread = 0x00200000 // PF_KTHREAD
)

// processID names one life of a process: numbers are used again, a number with
// a start time (clock ticks since boot) is not.
type processID struct {
	pid   int
	start uint64
}

// process is what /proc/<pid>/stat says.
type process struct {
	processID
	state        byte
	parent, pgrp int
	flags        uint64
	threads      int
}

// dead reports whether only the status is left. A process whose first thread
// has ended looks like a zombie while its other threads run.
func (p process) dead() bool {
	return (p.state == 'Z' || p.state == 'X' || p.state == 'x') && p.threads <= 1
}

// children is what this package knows of the children of this process. It is
// process-wide, as being a subreaper and waiting for children are.
var children = struct {
	sync.Mutex
	leaders map[int]bool            // not to be reaped before their groups are gone
	orphans map[processID]time.Time // zombies nobody knew, with when they were first seen
}{leaders: map[int]bool{}, orphans: map[processID]time.Time{}}

// becomeSubreaper makes orphans of a step children of this process.
func becomeSubreaper() error {
	if _, _, err := readProcesses(); err != nil {
		return fmt.Errorf("can't look for processes: %w: mount /proc", err)
	}
	if err := unix.Prctl(unix.PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0); err != nil {
		return fmt.Errorf("can't become a child subreaper: %w", err)
	}
	return nil
}

// dieWithThread has the process killed when the thread that started it ends.
func dieWithThread(attr *syscall.SysProcAttr) { attr.Pdeathsig = unix.SIGKILL }

// selfExecutable is this program, also where its file was replaced since.
func selfExecutable() (string, error) { return "/proc/self/exe", nil }

// awaitExit returns when the child has ended, and leaves its status to be taken.
func awaitExit(pid int) {
	for {
		err := unix.Waitid(unix.P_PID, pid, nil, unix.WEXITED|unix.WNOWAIT, nil)
		if !errors.Is(err, unix.EINTR) {
			return
		}
	}
}

// group is the members of one step but its leader. It is used by one goroutine.
type group struct {
	leader  processID
	step    string
	level   syscall.Signal                // the last signal that all members are to have: 0, SIGTERM or SIGKILL
	members map[processID]*syscall.Signal // found and not known to be gone, with what each got
	failed  bool                          // the last look found nothing out
	doubt   bool                          // it may have missed a process
	doubts  int                           // that came in a row, with no member
}

// newGroup is called before the leader's status can be taken.
func newGroup(leader int, step string) *group {
	children.Lock()
	children.leaders[leader] = true
	children.Unlock()
	g := &group{leader: processID{pid: leader}, step: step, members: map[processID]*syscall.Signal{}}
	if p, err := readProcess(leader); err == nil { // else every process is young enough
		g.leader = p.processID
	}
	return g
}

// release is called before the leader's status is taken.
func (g *group) release() {
	children.Lock()
	delete(children.leaders, g.leader.pid)
	children.Unlock()
}

// raise signals all members: SIGTERM, then SIGKILL. One that is found later
// gets the last.
func (g *group) raise(signal syscall.Signal) {
	if g.level == signal || g.level == unix.SIGKILL {
		return
	}
	g.level = signal
	pgrp := g.look() // before the signal: the group's members that are found here get it with the group
	_ = unix.Kill(-g.leader.pid, signal)
	for _, id := range pgrp {
		*g.members[id] = signal
	}
	g.press()
}

// leaderEnded gives what the leader left SIGTERM, also where it had it before:
// a child of a shell with a trap loses a signal that comes before its execve.
// It reports whether nothing is left, or how many processes it knows to be.
func (g *group) leaderEnded() (gone bool, left int) {
	if g.level != unix.SIGKILL {
		g.level = unix.SIGTERM
		for _, had := range g.members {
			*had = 0
		}
	}
	gone = g.lookAndPress()
	return gone, len(g.members)
}

// gone reports whether no member lives, after leaderEnded. Those it knows are
// looked at first: reading all of /proc is for when they are gone.
func (g *group) gone() bool {
	g.press()
	for id := range g.members {
		if p, err := readProcess(id.pid); err == nil && p.processID == id && !p.dead() || err != nil && !isGone(err) {
			return false
		}
	}
	return g.lookAndPress()
}

// lookAndPress reports whether no member lives, to the best of its knowledge.
func (g *group) lookAndPress() (gone bool) {
	g.look()
	g.press()
	if g.failed || len(g.members) > 0 {
		g.doubts = 0
		return false
	}
	g.doubts++
	return !g.doubt || g.doubts > maxDoubts
}

// press gives members the signal that they have not had.
func (g *group) press() {
	if g.level == unix.SIGKILL { // the group as a whole: none of it can fork meanwhile
		_ = unix.Kill(-g.leader.pid, unix.SIGKILL)
		_ = unix.Kill(g.leader.pid, unix.SIGKILL) // also if it has gone to another group
	}
	for id, had := range g.members {
		if *had != g.level && id.signal(g.level) {
			*had = g.level
		}
	}
}

// signal reaches this process or none: the number is looked at while the
// handle is open (a pidfd, where the kernel has them). It reports false where
// that can't be found out now.
func (id processID) signal(s syscall.Signal) bool {
	handle, err := os.FindProcess(id.pid)
	if err != nil {
		return false
	}
	defer handle.Release()
	p, err := readProcess(id.pid)
	if err == nil && p.processID == id {
		_ = handle.Signal(s)
	}
	return err == nil || isGone(err)
}

// look brings the members up to date, reaps those that have ended and are our
// children, and answers the ones that are in the leader's process group.
//
// /proc is not read at one instant. A process that forks and ends meanwhile is
// missed with its child, and one in its execve has no environment for a
// moment. Both leave traces, which make a look doubtful: a number without a
// process, a new zombie, a child without an environment.
func (g *group) look() (inGroup []processID) {
	c := looks.take()
	if g.failed = c.err != nil; g.failed { // short of something: all stays as it was
		return nil
	}
	g.doubt = c.doubt
	self, living := os.Getpid(), map[processID]*syscall.Signal{}
	for _, p := range g.pick(c) {
		if p.dead() {
			g.doubt = true
			if p.parent == self { // else its parent reaps it, or it is ours at the next look
				_, _ = unix.Wait4(p.pid, nil, unix.WNOHANG, nil)
			}
			continue
		}
		living[p.processID] = new(syscall.Signal)
		if had := g.members[p.processID]; had != nil {
			living[p.processID] = had
		}
		if p.pgrp == g.leader.pid {
			inGroup = append(inGroup, p.processID)
		}
	}
	g.members = living
	return inGroup
}

// pick finds the step's processes, but for the leader: those known, the
// leader's group, those with the step's mark, and the descendants of all.
func (g *group) pick(c *census) (members []process) {
	in := map[int]bool{g.leader.pid: true}
	var others []process
	for _, p := range c.processes {
		if p.start < g.leader.start || p.pid == g.leader.pid {
			continue
		}
		if _, known := g.members[p.processID]; known || p.pgrp == g.leader.pid || g.isMarked(c, p) {
			in[p.pid] = true
			members = append(members, p)
		} else {
			others = append(others, p)
		}
	}
	for more := true; more; { // children have higher numbers than their parents, until numbers begin anew
		more = false
		for _, p := range others {
			if in[p.parent] && !in[p.pid] {
				in[p.pid], more = true, true
				members = append(members, p)
			}
		}
	}
	return members
}

// isMarked reports whether a process was started with the step's mark in its environment.
func (g *group) isMarked(c *census, p process) bool {
	if p.dead() || p.flags&kernelThread != 0 {
		return false
	}
	step, empty := c.mark(p.pid)
	g.doubt = g.doubt || empty && p.parent == os.Getpid()
	return step == g.step
}

// reapOrphans reaps zombies that came to this process when their parents
// ended, after they had ended themselves: nobody knows of them or waits for
// them. The program's own children are in its process group, or waited for. It
// reports whether there was one that it had not seen before.
func reapOrphans(processes []process, now time.Time) (found bool) {
	children.Lock()
	defer children.Unlock()
	self, ours := os.Getpid(), unix.Getpgrp()
	still := map[processID]time.Time{}
	for _, p := range processes {
		if !p.dead() || p.parent != self || p.pgrp == ours || children.leaders[p.pid] {
			continue
		}
		first, known := children.orphans[p.processID]
		if !known {
			first, found = now, true
		}
		if now.Sub(first) >= orphanAge {
			_, _ = unix.Wait4(p.pid, nil, unix.WNOHANG, nil)
			continue
		}
		still[p.processID] = first
	}
	children.orphans = still
	return found
}

// killSteps kills the groups and the marked processes of steps whose worker is
// dead, and reports whether it found one that lives.
func killSteps(steps map[string]int) bool {
	groups := map[int]bool{}
	for _, pgrp := range steps {
		if pgrp > 0 {
			groups[pgrp] = true
			_ = unix.Kill(-pgrp, unix.SIGKILL)
		}
	}
	processes, _, err := readProcesses()
	found := err != nil
	for _, p := range processes {
		if p.dead() {
			continue
		}
		if step, _ := readMark(p.pid); !groups[p.pgrp] {
			if _, marked := steps[step]; !marked {
				continue
			}
		}
		p.signal(unix.SIGKILL)
		found = true
	}
	return found
}

// readMark is the step that a process was started for, or "", and whether it
// has no environment at all. One that may not be read is not ours.
func readMark(pid int) (step string, empty bool) {
	f, err := os.Open("/proc/" + strconv.Itoa(pid) + "/environ")
	if err != nil {
		return "", false
	}
	defer f.Close()
	environment, err := io.ReadAll(io.LimitReader(f, maxEnvironment))
	if err != nil {
		return "", false
	}
	for entry := range bytes.SplitSeq(environment, []byte{0}) {
		if value, ok := bytes.CutPrefix(entry, []byte(stepVariable+"=")); ok {
			return string(value), false
		}
	}
	return "", len(environment) == 0
}

func isGone(err error) bool { return errors.Is(err, unix.ENOENT) || errors.Is(err, unix.ESRCH) }

// readProcesses reads all processes that can be seen, and reports whether one
// ended meanwhile.
func readProcesses() (processes []process, vanished bool, err error) {
	proc, err := os.Open("/proc")
	if err != nil {
		return nil, false, err
	}
	defer proc.Close()
	names, err := proc.Readdirnames(-1)
	if err != nil {
		return nil, false, err
	}
	processes = make([]process, 0, len(names))
	for _, name := range names {
		pid, err := strconv.Atoi(name)
		if err != nil {
			continue
		}
		p, err := readProcess(pid)
		switch {
		case err == nil:
			processes = append(processes, p)
		case isGone(err):
			vanished = true
		default:
			return nil, false, err
		}
	}
	return processes, vanished, nil
}

// readProcess reads /proc/<pid>/stat, see proc_pid_stat(5). It is called for
// every process at the end of every step, so without an os.File.
func readProcess(pid int) (process, error) {
	fd, err := unix.Open("/proc/"+strconv.Itoa(pid)+"/stat", unix.O_RDONLY|unix.O_CLOEXEC, 0)
	if err != nil {
		return process{}, err
	}
	defer unix.Close(fd)
	var buffer [1024]byte
	n, err := unix.Read(fd, buffer[:])
	if err != nil {
		return process{}, err
	}
	// The name is in parentheses and may hold any byte, these too.
	fields := bytes.Fields(buffer[bytes.LastIndexByte(buffer[:n], ')')+1 : n])
	if len(fields) < 20 {
		return process{}, fmt.Errorf("/proc/%d/stat has %d fields: %w", pid, len(fields), unix.ESRCH)
	}
	number := func(i int) uint64 {
		v, _ := strconv.ParseUint(string(fields[i]), 10, 64)
		return v
	}
	return process{
		processID: processID{pid: pid, start: number(19)},
		state:     fields[0][0],
		parent:    int(number(1)),
		pgrp:      int(number(2)),
		flags:     number(6),
		threads:   int(number(17)),
	}, nil
}

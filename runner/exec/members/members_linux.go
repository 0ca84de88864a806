package members

import (
	"errors"
	"fmt"
	"os"
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
)

// children is what this package knows of the children of this process. It is
// process-wide, as being a subreaper and waiting for children are.
var children = struct {
	sync.Mutex
	leaders map[int]bool     // not to be reaped before their groups are gone
	orphans map[ID]time.Time // zombies nobody knew, with when they were first seen
}{leaders: map[int]bool{}, orphans: map[ID]time.Time{}}

// BecomeSubreaper makes orphans of a step children of this process.
func BecomeSubreaper() error {
	if _, _, err := readAll(); err != nil {
		return fmt.Errorf("can't look for processes: %w: mount /proc", err)
	}
	if err := unix.Prctl(unix.PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0); err != nil {
		return fmt.Errorf("can't become a child subreaper: %w", err)
	}
	return nil
}

// AwaitExit returns when the child has ended, and leaves its status to be taken.
func AwaitExit(pid int) {
	for {
		err := unix.Waitid(unix.P_PID, pid, nil, unix.WEXITED|unix.WNOWAIT, nil)
		if !errors.Is(err, unix.EINTR) {
			return
		}
	}
}

// Members are the processes of one step but its leader. They are used by one goroutine.
type Members struct {
	leader ID
	step   string
	cgroup *Cgroup                // nil where the step has none
	level  syscall.Signal         // the last signal that all are to have: 0, SIGTERM or SIGKILL
	known  map[ID]*syscall.Signal // found and not known to be gone, with what each got
	failed bool                   // the last look found nothing out
	doubt  bool                   // it may have missed a process
	doubts int                    // that came in a row, with no member
}

// Of is called before the leader's status can be taken. cgroup may be nil.
func Of(leader int, step string, cgroup *Cgroup) *Members {
	children.Lock()
	children.leaders[leader] = true
	children.Unlock()
	m := &Members{leader: ID{PID: leader}, step: step, cgroup: cgroup, known: map[ID]*syscall.Signal{}}
	if p, err := Read(leader); err == nil { // else every process is young enough
		m.leader = p.ID
	}
	return m
}

// Release is called before the leader's status is taken.
func (m *Members) Release() {
	children.Lock()
	delete(children.leaders, m.leader.PID)
	children.Unlock()
}

// Raise signals all members: SIGTERM, then SIGKILL. One that is found later
// gets the last.
func (m *Members) Raise(signal syscall.Signal) {
	if m.level == signal || m.level == unix.SIGKILL {
		return
	}
	m.level = signal
	inGroup := m.look() // before the signal: the group's members that are found here get it with the group
	_ = unix.Kill(-m.leader.PID, signal)
	for _, id := range inGroup {
		*m.known[id] = signal
	}
	m.press()
}

// LeaderEnded gives what the leader left SIGTERM, also where it had it before:
// a child of a shell with a trap loses a signal that comes before its execve.
// It reports whether nothing is left, or how many processes it knows to be.
func (m *Members) LeaderEnded() (gone bool, left int) {
	if m.level != unix.SIGKILL {
		m.level = unix.SIGTERM
		for _, had := range m.known {
			*had = 0
		}
	}
	gone = m.lookAndPress()
	return gone, len(m.known)
}

// Gone reports whether no member lives, after LeaderEnded. Those it knows are
// looked at first: reading all of /proc is for when they are gone.
func (m *Members) Gone() bool {
	m.press()
	for id := range m.known {
		if p, err := Read(id.PID); err == nil && p.ID == id && !p.Dead() || err != nil && !isGone(err) {
			return false
		}
	}
	return m.lookAndPress()
}

// lookAndPress reports whether no member lives, to the best of its knowledge.
func (m *Members) lookAndPress() (gone bool) {
	m.look()
	m.press()
	if m.failed || len(m.known) > 0 || !m.cgroup.remove() {
		m.doubts = 0
		return false
	}
	m.doubts++
	return !m.doubt || m.doubts > maxDoubts
}

// press gives members the signal that they have not had.
func (m *Members) press() {
	if m.level == unix.SIGKILL { // as a whole: none of it can fork meanwhile
		m.cgroup.kill()
		_ = unix.Kill(-m.leader.PID, unix.SIGKILL)
		_ = unix.Kill(m.leader.PID, unix.SIGKILL) // also if it has gone to another group
	}
	for id, had := range m.known {
		if *had != m.level && id.signal(m.level) {
			*had = m.level
		}
	}
}

// signal reaches this process or none: the number is looked at while the
// handle is open (a pidfd, where the kernel has them). It reports false where
// that can't be found out now.
func (id ID) signal(s syscall.Signal) bool {
	handle, err := os.FindProcess(id.PID)
	if err != nil {
		return false
	}
	defer handle.Release()
	p, err := Read(id.PID)
	if err == nil && p.ID == id {
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
func (m *Members) look() (inGroup []ID) {
	c := looks.take()
	if m.failed = c.err != nil; m.failed { // short of something: all stays as it was
		return nil
	}
	m.doubt = c.doubt
	self, living := os.Getpid(), map[ID]*syscall.Signal{}
	for _, p := range m.pick(c, m.cgroup.processes()) { // these after the census: its numbers can't be older
		if p.Dead() {
			m.doubt = true
			if p.Parent == self { // else its parent reaps it, or it is ours at the next look
				_, _ = unix.Wait4(p.PID, nil, unix.WNOHANG, nil)
			}
			continue
		}
		living[p.ID] = new(syscall.Signal)
		if had := m.known[p.ID]; had != nil {
			living[p.ID] = had
		}
		if p.Group == m.leader.PID {
			inGroup = append(inGroup, p.ID)
		}
	}
	m.known = living
	return inGroup
}

// pick finds the step's processes, but for the leader: those known, its
// cgroup, the leader's group, those with the step's mark, and the descendants
// of all.
func (m *Members) pick(c *census, inCgroup map[int]bool) (members []Process) {
	in := map[int]bool{m.leader.PID: true}
	var others []Process
	for _, p := range c.processes {
		if p.start < m.leader.start || p.PID == m.leader.PID {
			continue
		}
		if _, known := m.known[p.ID]; known || inCgroup[p.PID] || p.Group == m.leader.PID || m.isMarked(c, p) {
			in[p.PID] = true
			members = append(members, p)
		} else {
			others = append(others, p)
		}
	}
	for more := true; more; { // children have higher numbers than their parents, until numbers begin anew
		more = false
		for _, p := range others {
			if in[p.Parent] && !in[p.PID] {
				in[p.PID], more = true, true
				members = append(members, p)
			}
		}
	}
	return members
}

// isMarked reports whether a process was started with the step's mark in its
// environment. A zombie has none; one that came to us has its cgroup.
func (m *Members) isMarked(c *census, p Process) bool {
	switch {
	case p.flags&kernelThread != 0:
		return false
	case p.Dead():
		return p.Parent == os.Getpid() && m.cgroup.had(p.PID)
	}
	step, empty := c.mark(p.PID)
	m.doubt = m.doubt || empty && p.Parent == os.Getpid()
	return step == m.step
}

// reapOrphans reaps zombies that came to this process when their parents
// ended, after they had ended themselves: nobody knows of them or waits for
// them. The program's own children are in its process group, or waited for. It
// reports whether there was one that it had not seen before.
func reapOrphans(processes []Process, now time.Time) (found bool) {
	children.Lock()
	defer children.Unlock()
	self, ours := os.Getpid(), unix.Getpgrp()
	still := map[ID]time.Time{}
	for _, p := range processes {
		if !p.Dead() || p.Parent != self || p.Group == ours || children.leaders[p.PID] {
			continue
		}
		first, known := children.orphans[p.ID]
		if !known {
			first, found = now, true
		}
		if now.Sub(first) >= orphanAge {
			_, _ = unix.Wait4(p.PID, nil, unix.WNOHANG, nil)
			continue
		}
		still[p.ID] = first
	}
	children.orphans = still
	return found
}

// Look brings the members up to date, and reaps orphans that ended unseen.
func (m *Members) Look() { m.look() }

// KillSteps kills the cgroups, the groups and the marked processes of steps
// whose worker is dead, and reports whether it found one that lives.
func KillSteps(steps map[string]int, cgroups *Cgroups) (found bool) {
	groups := map[int]bool{}
	for step, pgrp := range steps {
		cgroup := cgroups.of(step)
		cgroup.kill()
		found = !cgroup.remove() || found
		if pgrp > 0 {
			groups[pgrp] = true
			_ = unix.Kill(-pgrp, unix.SIGKILL)
		}
	}
	processes, _, err := readAll()
	found = found || err != nil
	for _, p := range processes {
		if p.Dead() {
			continue
		}
		if step, _ := readMark(p.PID); !groups[p.Group] {
			if _, marked := steps[step]; !marked {
				continue
			}
		}
		p.signal(unix.SIGKILL)
		found = true
	}
	return found
}

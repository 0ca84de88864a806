package members

import (
	"errors"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// shortage is the pause before the kernel is asked again that was short of descriptors.
const shortage = 50 * time.Millisecond

// BecomeSubreaper does nothing: macOS has none.
func BecomeSubreaper() error { return nil }

// Cgroups are none here.
type Cgroups struct{}

// FindCgroups answers an error.
func FindCgroups() (*Cgroups, error) { return nil, errors.New("macOS has no cgroups") }

// String is never asked for.
func (*Cgroups) String() string { return "" }

// Cgroup is none here.
type Cgroup struct{}

// Make answers nil.
func (*Cgroups) Make(string, *syscall.SysProcAttr) *Cgroup { return nil }

// Started does nothing.
func (*Cgroup) Started(*syscall.SysProcAttr, bool) {}

// AwaitExit returns when the child has ended, and leaves its status to be taken.
func AwaitExit(pid int) {
	queue, err := unix.Kqueue()
	for err != nil { // short of descriptors
		time.Sleep(shortage)
		queue, err = unix.Kqueue()
	}
	defer unix.Close(queue)
	var event unix.Kevent_t
	unix.SetKevent(&event, pid, unix.EVFILT_PROC, unix.EV_ADD|unix.EV_ONESHOT)
	event.Fflags = unix.NOTE_EXIT
	events := make([]unix.Kevent_t, 1)
	for {
		if _, err := unix.Kevent(queue, []unix.Kevent_t{event}, events, nil); !errors.Is(err, unix.EINTR) {
			return // also ESRCH: a zombie already
		}
	}
}

// Members are the leader's process group: nothing finds a process that left
// it. They are used by one goroutine.
type Members struct {
	leader int
	level  syscall.Signal
}

// Of is called before the leader's status can be taken.
func Of(leader int, _ string, _ *Cgroup) *Members { return &Members{leader: leader} }

// Release is called before the leader's status is taken.
func (m *Members) Release() {}

// Look does nothing.
func (m *Members) Look() {}

// Raise signals all members: SIGTERM, then SIGKILL.
func (m *Members) Raise(signal syscall.Signal) {
	if m.level == signal || m.level == unix.SIGKILL {
		return
	}
	m.level = signal
	_ = unix.Kill(-m.leader, signal)
}

// LeaderEnded gives what the leader left SIGTERM, also where it had it before,
// and reports whether nothing is left, or how many processes it knows to be:
// one, since nobody counts here.
func (m *Members) LeaderEnded() (gone bool, left int) {
	if m.level != unix.SIGKILL {
		m.level = unix.SIGTERM
	}
	if unix.Kill(-m.leader, m.level) != nil {
		return true, 0
	}
	return false, 1
}

// Gone reports whether no member lives, after LeaderEnded: zombies can't be
// signalled here (ESRCH or EPERM).
func (m *Members) Gone() bool {
	if m.level == unix.SIGKILL {
		return unix.Kill(-m.leader, unix.SIGKILL) != nil // who joined since
	}
	return unix.Kill(-m.leader, 0) != nil
}

// KillSteps kills the groups of steps whose worker is dead, and reports
// whether it found one that lives.
func KillSteps(steps map[string]int, _ *Cgroups) bool {
	found := false
	for _, pgrp := range steps {
		found = pgrp > 0 && unix.Kill(-pgrp, unix.SIGKILL) == nil || found
	}
	return found
}

package exec

import (
	"errors"
	"os"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// On macOS a step is its process group: nothing finds a process that left it.

func becomeSubreaper() error { return nil }

func dieWithThread(*syscall.SysProcAttr) {} // there is no such signal

func selfExecutable() (string, error) { return os.Executable() }

// awaitExit returns when the child has ended, and leaves its status to be taken.
func awaitExit(pid int) {
	queue, err := unix.Kqueue()
	for err != nil { // short of descriptors
		time.Sleep(lastPoll)
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

// group is the leader's process group. It is used by one goroutine.
type group struct {
	leader int
	level  syscall.Signal
}

func newGroup(leader int, _ string) *group { return &group{leader: leader} }

func (g *group) release() {}

func (g *group) look() {}

func (g *group) raise(signal syscall.Signal) {
	if g.level == signal || g.level == unix.SIGKILL {
		return
	}
	g.level = signal
	_ = unix.Kill(-g.leader, signal)
}

// leaderEnded gives what the leader left SIGTERM, also where it had it before,
// and reports whether nothing is left, or how many processes it knows to be:
// one, since nobody counts here.
func (g *group) leaderEnded() (gone bool, left int) {
	if g.level != unix.SIGKILL {
		g.level = unix.SIGTERM
	}
	if unix.Kill(-g.leader, g.level) != nil {
		return true, 0
	}
	return false, 1
}

// gone reports whether no member lives, after leaderEnded: zombies can't be
// signalled here (ESRCH or EPERM).
func (g *group) gone() bool {
	if g.level == unix.SIGKILL {
		return unix.Kill(-g.leader, unix.SIGKILL) != nil // who joined since
	}
	return unix.Kill(-g.leader, 0) != nil
}

// killSteps kills the groups of steps whose worker is dead, and reports
// whether it found one that lives.
func killSteps(steps map[string]int) bool {
	found := false
	for _, pgrp := range steps {
		found = pgrp > 0 && unix.Kill(-pgrp, unix.SIGKILL) == nil || found
	}
	return found
}

package exec

import (
	"bytes"
	"errors"
	"io"
	"maps"
	"os"
	"os/signal"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"reveille/runner/exec/members"
)

const (
	// A guard looks until nothing was there three times in a row (a process is
	// hard to tell for an instant while it starts), and gives up after a while:
	// what it could not kill by then it can't.
	guardPoll   = 5 * time.Millisecond
	guardClear  = 3
	guardGiveUp = 30 * time.Second
	// guardLook is how long a guard may not look at the clocks while there is a
	// deadline; else there is nothing to look for but lines.
	guardLook, guardIdle = 500 * time.Millisecond, time.Hour
)

// IsGuard reports whether a program with these arguments (os.Args) was started
// as a guard. main asks first thing: if so, it calls RunGuard and nothing else.
func IsGuard(args []string) bool { return len(args) == 2 && args[1] == GuardArg }

// RunGuard is the guard process: it reads registrations and deadlines until in
// (standard input) ends, kills the steps whose deadline is over meanwhile, and
// then what is left. It returns the exit code: 0, or 1 where something lives
// that it couldn't kill within 30 s.
func RunGuard(in *os.File) int {
	// Whoever wants the worker to end must not end the guard with it.
	signal.Ignore(unix.SIGINT, unix.SIGTERM, unix.SIGHUP, unix.SIGQUIT, unix.SIGPIPE)
	_, _ = io.WriteString(os.Stdout, guardHello)
	_ = os.Stdout.Close()

	cgroups, _ := members.FindCgroups() // the worker's: this process is in the same
	kill := func(steps map[string]int) bool { return members.KillSteps(steps, cgroups) }
	input, w := &guardInput{fd: int(in.Fd())}, newWatched()
	for {
		lines, end := input.next(w.next(time.Now()))
		for _, line := range lines {
			if line == guardQuit {
				return 0
			}
			w.hear(line, time.Now())
		}
		if end {
			return killAll(w.all(), kill)
		}
		// The time first: no deadline is over by then that was moved before and has not been heard of.
		if now := time.Now(); !input.more() {
			w.killDue(now, kill)
		}
	}
}

// guardInput reads lines without blocking where there are none.
type guardInput struct {
	fd   int
	rest []byte // of a line that is not whole yet
}

// more reports whether there is something to be read.
func (in *guardInput) more() bool {
	n, _ := unix.Poll([]unix.PollFd{{Fd: int32(in.fd), Events: unix.POLLIN}}, 0)
	return n > 0
}

// next waits for lines, at most so long.
func (in *guardInput) next(wait time.Duration) (lines []string, end bool) {
	ready := []unix.PollFd{{Fd: int32(in.fd), Events: unix.POLLIN}}
	for {
		n, err := unix.Poll(ready, int((wait+time.Millisecond-1)/time.Millisecond))
		switch {
		case errors.Is(err, unix.EINTR):
			continue
		case err != nil: // short of memory
			time.Sleep(guardPoll)
			return nil, false
		case n == 0:
			return nil, false
		}
		chunk := make([]byte, 64<<10)
		n, err = unix.Read(in.fd, chunk)
		if errors.Is(err, unix.EINTR) || errors.Is(err, unix.EAGAIN) {
			continue
		}
		if n <= 0 || err != nil {
			return nil, true
		}
		whole := bytes.Split(append(in.rest, chunk[:n]...), []byte("\n"))
		in.rest = whole[len(whole)-1]
		for _, line := range whole[:len(whole)-1] {
			lines = append(lines, string(line))
		}
		return lines, false
	}
}

// killAll kills until nothing is found any more.
func killAll(steps map[string]int, kill func(map[string]int) bool) int {
	giveUp := time.Now().Add(guardGiveUp)
	for clear := 0; clear < guardClear; clear++ {
		if kill(steps) {
			clear = -1
		}
		if time.Now().After(giveUp) {
			return 1
		}
		time.Sleep(guardPoll)
	}
	return 0
}

// watched is what a guard process knows.
type watched struct {
	steps     map[string]*watchedStep
	deadlines map[string]deadline // by holder
}

func newWatched() *watched {
	return &watched{steps: map[string]*watchedStep{}, deadlines: map[string]deadline{}}
}

type watchedStep struct {
	pgrp   int
	holder string
	clear  int       // how often in a row nothing of it was found after its deadline
	first  time.Time // when it was looked for first
}

// deadline is one by two clocks.
type deadline struct{ monotonic, wall time.Time }

// left is how long until it is over by one of them.
func (d deadline) left(now time.Time) time.Duration {
	return min(d.monotonic.Sub(now), d.wall.Sub(now.Round(0)))
}

// hear takes a line. What it can't read it leaves: the worker is of the same program.
func (w *watched) hear(line string, now time.Time) {
	fields := strings.Fields(line)
	if len(fields) == 0 || len(fields[0]) < 2 {
		return
	}
	name := fields[0][1:]
	switch {
	case line[0] == '-':
		delete(w.steps, name)
	case line[0] == '+' && len(fields) > 1:
		pgrp, err := strconv.Atoi(fields[1])
		if err != nil {
			return
		}
		w.steps[name] = &watchedStep{pgrp: pgrp} // to be looked for, also where it was looked for in vain
		if len(fields) > 2 {
			w.steps[name].holder = fields[2]
		}
	case line[0] == '=' && len(fields) > 2:
		left, err := strconv.ParseInt(fields[1], 10, 64)
		wall, err2 := strconv.ParseInt(fields[2], 10, 64)
		if err == nil && err2 == nil {
			w.deadlines[name] = deadline{now.Add(time.Duration(left)), time.Unix(0, wall)}
		}
	}
}

func (w *watched) all() map[string]int {
	all := map[string]int{}
	for name, s := range w.steps {
		all[name] = s.pgrp
	}
	return all
}

// due is how long until a step is to be killed; 0 or less: it is now.
func (w *watched) due(s *watchedStep, now time.Time) (left time.Duration, ok bool) {
	d, ok := w.deadlines[s.holder]
	return d.left(now), ok && s.clear < guardClear
}

// next is how long until there may be something to do. The wall clock may jump,
// so it is not long where there are deadlines.
func (w *watched) next(now time.Time) time.Duration {
	next := guardIdle
	for _, s := range w.steps {
		left, ok := w.due(s, now)
		switch {
		case !ok:
		case !s.first.IsZero() && now.Sub(s.first) > guardGiveUp: // what can't be killed is not worth a core
			next = min(next, guardLook)
		default:
			next = min(next, guardLook, max(left, guardPoll))
		}
	}
	return next
}

// killDue kills the steps whose deadline is over, each time that it is called
// until nothing of them was found a few times in a row, and forgets deadlines
// that no step has.
func (w *watched) killDue(now time.Time, kill func(map[string]int) bool) {
	due, used := map[string]int{}, map[string]bool{}
	for name, s := range w.steps {
		used[s.holder] = true
		if left, ok := w.due(s, now); ok && left <= 0 {
			due[name] = s.pgrp
		}
	}
	maps.DeleteFunc(w.deadlines, func(holder string, _ deadline) bool { return !used[holder] })
	if len(due) == 0 {
		return
	}
	found := kill(due)
	for name := range due {
		s := w.steps[name]
		if s.first.IsZero() {
			s.first = now
		}
		if found {
			s.clear = 0
		} else {
			s.clear++
		}
	}
}

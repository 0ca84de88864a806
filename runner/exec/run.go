package exec

import (
	"context"
	"log/slog"
	"os"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"reveille/runner"
	"reveille/runner/exec/members"
)

const (
	// The members that are left are looked at after 1 ms, then ever later: most
	// are gone at once, and the others must not cost a core.
	firstPoll, lastPoll = time.Millisecond, 50 * time.Millisecond
	// lookEvery is how often orphans of a long step are reaped that ended unseen.
	lookEvery = time.Minute
)

// run is one command on its way.
type run struct {
	h       *Handler
	log     *slog.Logger
	step    string
	leader  *os.Process
	members *members.Members

	stdin          *os.File
	stdout, stderr *stream
}

// start starts the command, registered with the guard before and after: before
// by its step, since its first children could be there before its number is known.
func (h *Handler) start(req runner.Request, log *slog.Logger) (*run, error) {
	var ours, theirs [3]*os.File
	for fd := range ours {
		r, w, err := os.Pipe() // close-on-exec: no other command gets an end of it
		if err != nil {
			closeAll(ours[:], theirs[:])
			return nil, err
		}
		if ours[fd], theirs[fd] = r, w; fd == 0 {
			ours[fd], theirs[fd] = w, r
		}
	}
	step := string(req.Step)
	h.opts.Guard.add(step, req.Deadline)
	attr := &os.ProcAttr{
		Env:   environment(os.Environ(), req),
		Files: theirs[:],
		Sys:   &syscall.SysProcAttr{Setpgid: true},
	}
	leader, cgroup, err := h.startLeader(step, attr)
	closeAll(theirs[:])
	if err != nil {
		_ = h.opts.Guard.remove(step)
		closeAll(ours[:])
		return nil, err
	}
	h.opts.Guard.started(step, leader.Pid)
	return &run{
		h: h, log: log, step: step, leader: leader, members: members.Of(leader.Pid, step, cgroup),
		stdin: ours[0], stdout: &stream{f: ours[1]}, stderr: &stream{f: ours[2]},
	}, nil
}

// startLeader starts the shell, in a cgroup of the step's own where there can
// be one. A kernel or a filter of system calls that refuses that one start gets
// another, as for any other failure, which it then answers.
func (h *Handler) startLeader(step string, attr *os.ProcAttr) (*os.Process, *members.Cgroup, error) {
	argv := []string{"sh", "-c", h.opts.Command}
	if cgroup := h.cgroups.Make(step, attr.Sys); cgroup != nil {
		leader, err := h.opts.Guard.start(h.shell, argv, attr)
		if cgroup.Started(attr.Sys, err == nil); err == nil {
			return leader, cgroup, nil
		}
	}
	leader, err := h.opts.Guard.start(h.shell, argv, attr)
	return leader, nil, err
}

// feed writes the request. A command that does not read it loses nothing but
// the request: an error (EPIPE) is its own choice.
func (r *run) feed(line []byte) {
	_, _ = r.stdin.Write(line)
	_ = r.stdin.Close()
}

// supervise returns when the whole step is gone but its leader, which is a
// zombie then, and reports whether it was interrupted while the leader ran.
// It never waits for the command's output.
func (r *run) supervise(ctx context.Context, killed, declined <-chan struct{}) (interrupted bool) {
	var (
		exited  = make(chan struct{})
		running = true
		done    = ctx.Done()
		pause   = firstPoll
		killAt  <-chan time.Time // set from SIGTERM on
		poll    <-chan time.Time // set from the leader's exit on
	)
	go func() {
		defer close(exited)
		members.AwaitExit(r.leader.Pid)
	}()
	look := time.NewTicker(lookEvery)
	defer look.Stop()
	terminate := func() {
		if killAt == nil {
			r.members.Raise(unix.SIGTERM)
			killAt = time.After(r.h.opts.KillAfter)
		}
	}
	for {
		select {
		case <-exited:
			exited, running = nil, false
			gone, left := r.members.LeaderEnded()
			if gone {
				return interrupted
			}
			if left > 0 {
				r.log.Info("command ended before processes that it started: stopping them", "processes", left)
			}
			terminate()
			poll = time.After(pause)
		case <-poll:
			if r.members.Gone() {
				return interrupted
			}
			pause = min(2*pause, lastPoll)
			poll = time.After(pause)
		case <-done:
			done = nil
			if running && !isClosed(exited) { // else it came too late: the outcome is the leader's
				interrupted = true
				terminate()
			}
		case <-declined:
			declined = nil
			terminate()
		case <-killAt:
			if !running && r.members.Gone() {
				return interrupted
			}
			r.log.Warn("processes of the step are left after SIGTERM: killing them", "after", r.h.opts.KillAfter)
			r.members.Raise(unix.SIGKILL)
		case <-killed:
			killed = nil
			interrupted = interrupted || running && !isClosed(exited)
			r.members.Raise(unix.SIGKILL)
		case <-look.C:
			r.members.Look()
		}
	}
}

// reap takes the leader's status, and with it its number. The guard forgets
// the group before: from here the number may be anybody's. late is whether the
// guard may have killed the step.
func (r *run) reap() (state *os.ProcessState, late bool, err error) {
	late = r.h.opts.Guard.remove(r.step)
	r.members.Release()
	state, err = r.leader.Wait()
	return state, late, err
}

// closeStreams ends the goroutines on the step's pipes: whoever holds the other
// ends now is not of the step. What is in the pipes is still read.
func (r *run) closeStreams() {
	_ = r.stdin.Close()
	r.stdout.finish()
	r.stderr.finish()
}

func isClosed(c <-chan struct{}) bool {
	select {
	case <-c:
		return true
	default:
		return false
	}
}

func closeAll(lists ...[]*os.File) {
	for _, files := range lists {
		for _, f := range files {
			if f != nil {
				_ = f.Close()
			}
		}
	}
}

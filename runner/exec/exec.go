// Package exec is the handler of `worker --handler exec --exec CMD`: it runs
// one command for each step and turns its lines into the step's output.
//
// Words:
//
//   - The leader is the shell that runs CMD. It leads a process group of its own.
//   - The members of a step are the leader and all that it started, as package
//     members finds them: setsid, nohup and a double fork leave the group, not
//     the step.
//   - A step is stopped by SIGTERM to its members, and SIGKILL after KillAfter
//     or when Request.Killed closes, whichever is first (I7).
//
// Invariants:
//
//   - Step returns only when no member is left but zombies (I10): everything
//     that could outlive it is a finalizer, and this handler joins them itself.
//   - The leader stays an unreaped zombie until the rest of the step is gone.
//     So long the kernel does not give its number to another process, and no
//     signal to its group can hit a stranger.
//   - The context and Request.Killed are obeyed while the step's output is
//     blocked.
//   - Memory is bounded: MaxLineBytes of output, and 4 KiB each of a line and of
//     the tail of standard error, with a small factor for growing. A command
//     that says more than the log takes waits in its write.
//
// A leader that exits while other members live ends the step's outcome, not
// the step: the others get SIGTERM at once and SIGKILL after KillAfter. What
// is to outlive a step must be run by something that is not of the step. A
// command that closes its standard output goes on until it exits.
//
// A command gets the worker's environment without its credentials:
// RV_DATABASE_URL, RV_NATS_CREDS, RV_HTTP_URL, RV_NATS_URL where it has a user in it, and
// the variables of PostgreSQL that hold or name a secret (PGPASSWORD,
// PGPASSFILE, PGSERVICEFILE, PGSSLKEY, PGSSLPASSWORD), which the worker's own
// connections use. A command that is to have one is given it under another name.
// Not promised: that a command of the same user can't read them elsewhere, in
// the worker's own environment in /proc or in those files. Nor is what package
// members does not promise.
//
// On Linux New makes the process a child subreaper (PR_SET_CHILD_SUBREAPER,
// process-wide), so that orphans of a step become its children and are reaped:
// members of a step at its end, by their number. An orphan that ended before
// anybody saw it is told from the program's own children by its process group,
// which is not the program's, and by its age: a zombie child that is in
// another group than its parent, and that nobody waited for within 5 s, is
// reaped. A program that starts children in groups of their own must
// therefore wait for them as os/exec.Cmd.Wait does, not late.
package exec

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"reveille/claims"
	"reveille/runner"
	"reveille/runner/exec/members"
	"reveille/runner/lines"
)

const (
	// DefaultKillAfter is how long a command that was told to stop has for it.
	DefaultKillAfter = 10 * time.Second

	exitRetryable = 75      // EX_TEMPFAIL of sysexits.h
	messageBytes  = 2 << 10 // of standard error in a failure's message
)

// Options of a Handler.
type Options struct {
	// Command is run by `/bin/sh -c`. It must not be empty.
	Command string
	// KillAfter is the time from SIGTERM to SIGKILL. 0 is DefaultKillAfter; a
	// worker that wants none sets a nanosecond.
	KillAfter time.Duration
	// MaxLineBytes bounds a line of standard output without its newline. A longer
	// one is passed on as text, in pieces. 0 is lines.DefaultMax, lines.MinMax the least.
	MaxLineBytes int
	// Log gets the command's standard error, line by line, at most 100 lines a
	// second of each step (the rest is counted), and who had to be killed. nil
	// discards both.
	Log *slog.Logger
	// Guard ends the commands of a worker that was killed (I7). It may be nil, and
	// must be closed after the last step.
	Guard *Guard
}

// Handler runs commands. It implements runner.Handler and is safe for
// concurrent use.
type Handler struct {
	opts    Options
	shell   string
	cgroups *members.Cgroups // nil where none can be made
}

var _ runner.Handler = (*Handler)(nil)

// errKilled is why a step ended whose Request.Killed closed before its context was done.
var errKilled = errors.New("killed by the runner")

// New makes a handler. It fails where the options make no sense and, on Linux,
// where /proc can't be read: without it nobody knows when a step is over.
func New(o Options) (*Handler, error) {
	if o.KillAfter == 0 {
		o.KillAfter = DefaultKillAfter
	}
	if o.MaxLineBytes == 0 {
		o.MaxLineBytes = lines.DefaultMax
	}
	if o.Log == nil {
		o.Log = slog.New(slog.DiscardHandler)
	}
	switch {
	case strings.TrimSpace(o.Command) == "":
		return nil, errors.New("exec handler: no command: say with --exec what to run for each step")
	case strings.ContainsRune(o.Command, 0):
		return nil, errors.New("exec handler: the command has a zero byte: remove it")
	case o.KillAfter < 0:
		return nil, fmt.Errorf("exec handler: kill after %v: want a duration above 0", o.KillAfter)
	case o.MaxLineBytes < lines.MinMax:
		return nil, fmt.Errorf("exec handler: lines of %d bytes: want %d or more", o.MaxLineBytes, lines.MinMax)
	}
	if err := members.BecomeSubreaper(); err != nil {
		return nil, fmt.Errorf("exec handler: %w", err)
	}
	if o.Guard != nil {
		o.Guard.log.Store(o.Log)
	}
	cgroups, err := members.FindCgroups()
	if err == nil {
		o.Log.Info("each step gets a cgroup of its own", "below", cgroups.String())
	} else {
		o.Log.Info("steps get no cgroup: their processes are found by process group, environment and parents", "why", err)
	}
	return &Handler{opts: o, shell: "/bin/sh", cgroups: cgroups}, nil
}

// Step runs the command once. It starts nothing where the context is done
// already; that the claim is still owned the runner checks, immediately before
// (I16).
//
// Exit 0 is the Result that the command's last `ended` line gave, or the zero
// Result. 75 is a retryable *runner.Failure, anything else one that is not,
// both with code exit; so is a command that can't be started, retryable where
// the machine is short of something. A declined step answers no error.
//
// An interrupted one answers context.Cause, wrapped, unless the command took
// its SIGTERM, still said `ended` and exited 0: that is a success as any other
// (exit 0 alone isn't, many programs do that on SIGTERM with half of the work
// done). An Output method's error ends recording, not the command; it is
// answered, wrapped, unless it says that the step may say no more.
func (h *Handler) Step(ctx context.Context, req runner.Request, out *runner.Output) (runner.Result, error) {
	if ctx.Err() != nil {
		return runner.Result{}, fmt.Errorf("command not started: %w", context.Cause(ctx))
	}
	in, err := req.Document()
	if err != nil {
		return runner.Result{}, fmt.Errorf("request of step %s: %w", req.Step, err)
	}
	log := h.opts.Log.With("session", req.Session, "execution", req.Execution, "epoch", req.Epoch, "step", req.Step)
	r, err := h.start(req, log)
	if err != nil {
		return runner.Result{}, &runner.Failure{
			Code: claims.CodeExit, Message: "can't start the command: " + err.Error(), Retryable: isShortage(err),
		}
	}

	output := lines.New(out, h.opts.MaxLineBytes)
	logged := &stderrLog{log: log}
	var streams sync.WaitGroup
	streams.Go(func() { r.feed(append(in, '\n')) })
	streams.Go(func() { drain(r.stdout, output) })
	streams.Go(func() { drain(r.stderr, logged) })
	interrupted := r.supervise(ctx, req.Killed, output.Declined())
	state, late, err := r.reap()
	r.closeStreams()
	streams.Wait()
	said := output.Close()
	logged.end(time.Now())

	switch {
	case said.Declined:
		return runner.Result{}, nil
	case said.Err != nil && ctx.Err() == nil && !isCancellation(said.Err):
		return runner.Result{}, fmt.Errorf("output of the command: %w", said.Err)
	case err != nil: // somebody else took the leader's status
		return runner.Result{}, fmt.Errorf("exit status of the command: %w", err)
	case interrupted && !(state.Success() && said.Ended):
		cause := context.Cause(ctx)
		if cause == nil {
			cause = errKilled
		}
		return runner.Result{}, fmt.Errorf("command stopped (%s): %w", describe(state), cause)
	case state.Success():
		return said.Result, nil
	}
	message := describe(state)
	if tail := logged.message(messageBytes); tail != "" {
		message += ": " + tail
	}
	if late { // if the lease is lost the step is handed over, whatever it answers; else it is no fault of the command's
		message = "ended by its guard, as this worker stood still past the deadline of its lease: " + message
	}
	retryable := late || state.ExitCode() == exitRetryable
	return runner.Result{}, &runner.Failure{Code: claims.CodeExit, Message: message, Retryable: retryable}
}

// environment is the worker's, with the step's variables and without its
// credentials: a command is not to reach the worker's database.
func environment(worker []string, req runner.Request) []string {
	env := []string{
		members.Variable + "=" + string(req.Step),
		"RV_SESSION=" + string(req.Session),
		"RV_EXECUTION=" + string(req.Execution),
		"RV_EPOCH=" + strconv.FormatInt(req.Epoch, 10),
	}
	if req.Trace != "" {
		env = append(env, "TRACEPARENT="+req.Trace)
	}
	for _, entry := range worker {
		switch name, value, _ := strings.Cut(entry, "="); name {
		case members.Variable, "RV_SESSION", "RV_EXECUTION", "RV_EPOCH", "TRACEPARENT":
		case "RV_DATABASE_URL", "RV_NATS_CREDS", "RV_HTTP_URL", "PGPASSWORD", "PGPASSFILE", "PGSERVICEFILE", "PGSSLKEY", "PGSSLPASSWORD":
		case "RV_NATS_URL":
			if !strings.Contains(value, "@") { // no user and password in it
				env = append(env, entry)
			}
		default:
			env = append(env, entry)
		}
	}
	return env
}

// describe says how a process ended.
func describe(state *os.ProcessState) string {
	status, ok := state.Sys().(syscall.WaitStatus)
	if !ok || !status.Signaled() {
		return state.String()
	}
	if name := unix.SignalName(status.Signal()); name != "" {
		return "killed by " + name
	}
	return fmt.Sprintf("killed by signal %d", status.Signal())
}

// isShortage reports whether a start failed for want of something that may be there later.
func isShortage(err error) bool {
	for _, e := range []error{unix.EAGAIN, unix.ENOMEM, unix.EMFILE, unix.ENFILE} {
		if errors.Is(err, e) {
			return true
		}
	}
	return false
}

// isCancellation reports whether an error of an Output says that the step may
// say no more, rather than that something broke. Its context is cancelled then
// or about to be, and the durable phase decides (I13).
func isCancellation(err error) bool {
	for _, e := range []error{
		runner.ErrStepOver, context.Canceled, context.DeadlineExceeded,
		claims.ErrCancelled, claims.ErrFenced, claims.ErrQuarantined,
		claims.ErrInterrupted, claims.ErrLeaseLost, claims.ErrShutdown, claims.ErrStepTimeout,
	} {
		if errors.Is(err, e) {
			return true
		}
	}
	return false
}

// Package claims is the domain of Reveille: what a session, a claim, a step,
// an input, a continuation and an event are, and the one pure function that
// decides every transition of a claim. It performs no I/O and imports only the
// standard library; the adapters stand around it (claims/crdb executes the
// SQL, bus speaks NATS, runner runs handlers, recovery repairs).
//
// The words are those of the field and are used everywhere with one meaning:
//
//   - A session is the unit of serial execution. At most one claim exists for
//     it (I1), held by the holder of a worker lease.
//   - An execution is the life of a claim, from acquisition to settlement; its
//     id is random and never reused. A takeover gives the claim a new id, and
//     by that fences the old owner (I6).
//   - An epoch is the fencing token: per session, one more at every
//     acquisition and takeover, never at a heartbeat.
//   - A step is one call of the handler. It starts with step.started and ends
//     with exactly one of step.ended, step.failed, step.interrupted.
//   - A continuation is the durable promise of a next step.
//
// Not promised: that a handler is never run twice. A step whose worker died
// runs again as a continuation of that step, and says so to the handler.
package claims

import (
	"errors"
	"fmt"
)

// The ids of the domain. All but SessionID are UUIDs in their canonical
// lower-case text; SessionID is the caller's.
type (
	// SessionID matches [A-Za-z0-9][A-Za-z0-9_:-]{0,127}; see ParseSession.
	SessionID string
	// ExecutionID names one life of a claim.
	ExecutionID string
	// StepID names one call of the handler.
	StepID string
	// HolderID names one worker lease: one process, between two losses of it.
	HolderID string
)

// maxSessionBytes is the longest session id. It is one token of a NATS
// subject and a key of every table.
const maxSessionBytes = 128

// ParseSession checks a session id that came from outside. NATS accepts "*",
// ">" and control bytes as literal tokens of a published subject, so whatever
// arrives on a subject is checked here before it is used as a key.
func ParseSession(s string) (SessionID, error) {
	if s == "" || len(s) > maxSessionBytes {
		return "", fmt.Errorf("session id of %d bytes: want 1 to %d of A-Z a-z 0-9 _ : -", len(s), maxSessionBytes)
	}
	for i := range len(s) {
		c := s[i]
		alnum := c >= 'A' && c <= 'Z' || c >= 'a' && c <= 'z' || c >= '0' && c <= '9'
		if !alnum && (i == 0 || c != '_' && c != ':' && c != '-') {
			return "", fmt.Errorf("session id has byte %q at %d: want A-Z a-z 0-9, and after the first also _ : -", c, i)
		}
	}
	return SessionID(s), nil
}

// Phase is what a claim's owner may still do.
type Phase string

// The phases of docs/design.md section 2.
const (
	Running    Phase = "running"    // steps start, record and end
	Cancelling Phase = "cancelling" // a step is open and must end as interrupted (I9)
	Cancelled  Phase = "cancelled"  // declined; its step is closed, its finalizers may still run (I12)
)

// Cause is why a claim was revoked, and after a takeover the verdict that
// decides its conversion. Causes are only raised: None < Unknown <
// Interrupted < NeverJoined.
type Cause string

// The causes, lowest first.
const (
	None        Cause = ""
	Unknown     Cause = "unknown"      // held by a process that does not know it (I3)
	Interrupted Cause = "interrupted"  // an interrupt met an expired claim
	NeverJoined Cause = "never_joined" // a finalizer did not end in time (I10)
)

func (c Cause) rank() int {
	switch c {
	case Unknown:
		return 1
	case Interrupted:
		return 2
	case NeverJoined:
		return 3
	default:
		return 0
	}
}

// Raise returns the higher of two causes.
func (c Cause) Raise(to Cause) Cause {
	if to.rank() > c.rank() {
		return to
	}
	return c
}

// What an operation on a claim answers when it does nothing. Each leaves
// everything as it was. Callers branch on them with errors.Is.
var (
	// ErrBusy: the session has a claim, live or expired (I2).
	ErrBusy = errors.New("session has a claim")
	// ErrNotReady: nothing of the session is due.
	ErrNotReady = errors.New("session has nothing due")
	// ErrFenced: the claim is no longer the asker's (I5, I6).
	ErrFenced = errors.New("claim is not ours any more")
	// ErrCancelled: the claim is cancelling or cancelled; the step ends as interrupted (I9).
	ErrCancelled = errors.New("claim is being cancelled")
	// ErrIllegal: a bug of the caller.
	ErrIllegal = errors.New("operation is illegal in this phase")
	// ErrQuarantined: the session is out of circulation until an operator releases it (I30).
	ErrQuarantined = errors.New("session is quarantined")
	// ErrNotQuarantined: there is nothing to release; it was released, or is
	// quarantined anew since it was looked at (I30).
	ErrNotQuarantined = errors.New("session is not in that quarantine")
	// ErrNothingToRetry: the quarantined promise does not decode and the log does
	// not tell what it promised.
	ErrNothingToRetry = errors.New("nothing tells what a retry would continue")
	// ErrInputConflict: the input id was used before with another body or delivery (I20).
	ErrInputConflict = errors.New("input id was used before with another body or delivery")
	// ErrUnconfirmed: only the sequence of the command is newer, so the stream's
	// leader must be asked whether it still holds exactly that message (I18).
	ErrUnconfirmed = errors.New("command must be confirmed by the leader of its stream")
	// ErrOutcomeUnknown: the transaction may or may not have committed. An
	// acquisition that answers it is none (I3).
	ErrOutcomeUnknown = errors.New("outcome of the transaction is unknown")
	// ErrTooLarge: an event above the server's maximum payload (I24).
	ErrTooLarge = errors.New("event is too large")
)

// Why a step's context is cancelled: the cause that context.Cause returns in a
// handler.
var (
	// ErrInterrupted: somebody interrupted the session.
	ErrInterrupted = errors.New("interrupted")
	// ErrLeaseLost: this process may no longer be the owner (I7).
	ErrLeaseLost = errors.New("worker lease lost")
	// ErrShutdown: the worker is shutting down; another one goes on.
	ErrShutdown = errors.New("worker is shutting down")
	// ErrStepTimeout: the step ran longer than --step-timeout.
	ErrStepTimeout = errors.New("step timed out")
)

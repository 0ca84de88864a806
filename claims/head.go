package claims

import (
	"encoding/json"
	"fmt"
	"time"
)

// Continuation is the durable promise of a next step. It says of itself whose
// it is, so that a row that was damaged or belongs elsewhere is found by
// validation and never run (I27).
//
// A session has one, unless a retry waits in its backoff: what is not due
// blocks nothing, so another step may run meanwhile and leave a promise of its
// own. Number tells them apart and orders them.
type Continuation struct {
	Session   SessionID        `json:"session"`
	Number    int64            `json:"number"` // per session, from 1
	Kind      ContinuationKind `json:"kind"`
	Lineage   ExecutionID      `json:"lineage"`
	Execution ExecutionID      `json:"execution"` // whose step it continues
	Step      StepID           `json:"step"`      // the step it continues
	Epoch     int64            `json:"epoch"`     // of that step
	Attempt   int              `json:"attempt"`   // retryable failures so far
	// Recoveries so far in this chain, without a step that ended (I27).
	Recoveries int           `json:"recoveries"`
	NotBefore  time.Time     `json:"not_before"`
	Inputs     []string      `json:"inputs"` // what its step covered, to be given again; empty after a step that ended
	Executions []ExecutionID `json:"executions"`
	Trace      string        `json:"traceparent,omitempty"`
}

// maxLineage bounds how many executions a continuation remembers, newest last;
// the lineage itself is always known.
const maxLineage = 64

// Extend appends an execution to a lineage's memory, bounded.
func Extend(executions []ExecutionID, e ExecutionID) []ExecutionID {
	if n := len(executions); n > 0 && executions[n-1] == e {
		return executions
	}
	out := append(append([]ExecutionID(nil), executions...), e)
	if len(out) > maxLineage {
		out = out[len(out)-maxLineage:]
	}
	return out
}

// InLineage reports whether an execution belongs to the chain of these.
func InLineage(e, lineage ExecutionID, executions []ExecutionID) bool {
	if e == lineage {
		return true
	}
	for _, x := range executions {
		if x == e {
			return true
		}
	}
	return false
}

// ContinuesAs is what a step that starts from it says it continues. The
// attempt is of the kind: recoveries of a recovery, failures of the others.
func (c *Continuation) ContinuesAs() *Continues {
	n := c.Attempt
	if c.Kind == KindRecovery {
		n = c.Recoveries
	}
	return &Continues{Kind: c.Kind, Step: c.Step, Attempt: n}
}

// OpenStep is the body of a step on its claim, as the database holds it.
type OpenStep struct {
	Session    SessionID     `json:"session"`
	Execution  ExecutionID   `json:"execution"`
	Step       StepID        `json:"step"`
	Epoch      int64         `json:"epoch"`
	Index      int           `json:"index"`
	Inputs     []string      `json:"inputs"`
	Continues  *Continues    `json:"continues"`
	Attempt    int           `json:"attempt"`
	Recoveries int           `json:"recoveries"`
	Lineage    ExecutionID   `json:"lineage"`
	Executions []ExecutionID `json:"executions"`
	Trace      string        `json:"traceparent,omitempty"`
	Seq        int64         `json:"seq"` // of its step.started
}

// Promise is the continuation that closing this step leaves.
func (o *OpenStep) Promise(kind ContinuationKind, notBefore time.Time) *Continuation {
	c := &Continuation{
		Session: o.Session, Kind: kind, Lineage: o.Lineage, Execution: o.Execution, Step: o.Step, Epoch: o.Epoch,
		Attempt: o.Attempt, Recoveries: o.Recoveries, NotBefore: notBefore, Inputs: o.Inputs,
		Executions: Extend(o.Executions, o.Execution), Trace: o.Trace,
	}
	switch kind {
	case KindContinue: // its step ended: the chain made progress, and its inputs were served
		c.Attempt, c.Recoveries, c.Inputs = 0, 0, nil
	case KindRetry:
		c.Attempt++
	case KindRecovery:
		c.Recoveries++
	case KindHandover, KindRelease: // cost nothing
	}
	return c
}

// Reason is why something was quarantined.
type Reason string

// The reasons of docs/contract.md section 2.
const (
	ReasonOutcomeUnknown      Reason = "cancellation_outcome_unknown"
	ReasonInvalidStep         Reason = "invalid_step"
	ReasonInvalidContinuation Reason = "invalid_continuation"
	ReasonForeignContinuation Reason = "foreign_continuation"
	ReasonIdentityConflict    Reason = "identity_conflict"
	ReasonSuperseded          Reason = "superseded"
	ReasonConversionFailed    Reason = "conversion_failed"
	ReasonAttemptsExhausted   Reason = "attempts_exhausted"
	ReasonNoProgress          Reason = "no_progress"
	ReasonNeverJoined         Reason = "never_joined"
)

// Reasons are all of them, in the contract's order.
func Reasons() []Reason {
	return []Reason{
		ReasonOutcomeUnknown, ReasonInvalidStep, ReasonInvalidContinuation, ReasonForeignContinuation, ReasonIdentityConflict,
		ReasonSuperseded, ReasonConversionFailed, ReasonAttemptsExhausted, ReasonNoProgress, ReasonNeverJoined,
	}
}

// Poison says why something is never run (I27). It is an error so that it can
// be carried out of a transaction that wrote nothing.
type Poison struct {
	Reason Reason
	Detail string
}

func (p *Poison) Error() string { return fmt.Sprintf("%s: %s", p.Reason, p.Detail) }

func poison(r Reason, format string, args ...any) *Poison {
	return &Poison{Reason: r, Detail: fmt.Sprintf(format, args...)}
}

// SupersededContinuation is the poison of a continuation whose chain has a newer promise.
func SupersededContinuation(number int64) *Poison {
	return poison(ReasonSuperseded, "its chain has a newer promise than number %d", number)
}

// DecodeContinuation reads a continuation's row and checks that it is what it
// says: of this session, under this number, of a known kind (I27).
func DecodeContinuation(session SessionID, number, epoch int64, body []byte) (*Continuation, *Poison) {
	var c Continuation
	if err := json.Unmarshal(body, &c); err != nil {
		return nil, poison(ReasonInvalidContinuation, "does not decode: %v", err)
	}
	switch c.Kind {
	case KindContinue, KindRetry, KindRecovery, KindHandover, KindRelease:
	default:
		return nil, poison(ReasonInvalidContinuation, "has kind %q", c.Kind)
	}
	switch {
	case c.Session != session:
		return nil, poison(ReasonForeignContinuation, "belongs to session %q", c.Session)
	case c.Lineage == "" || c.Execution == "":
		return nil, poison(ReasonInvalidContinuation, "names no execution")
	case c.Attempt < 0 || c.Recoveries < 0:
		return nil, poison(ReasonInvalidContinuation, "has attempt %d and %d recoveries", c.Attempt, c.Recoveries)
	case c.Number != number:
		return nil, poison(ReasonIdentityConflict, "says it is number %d, stands as number %d", c.Number, number)
	case c.Epoch > epoch:
		return nil, poison(ReasonIdentityConflict, "has epoch %d, its session %d", c.Epoch, epoch)
	}
	return &c, nil
}

// Stands is where an open step stands: what its claim says of it.
type Stands struct {
	Session SessionID
	Step    StepID
	RanAs   ExecutionID // the execution that started it
	Started int         // steps of that execution so far
	Epoch   int64       // of the session
}

// DecodeStep reads the open step of a claim and checks that it is that claim's
// and its newest (I27).
func DecodeStep(at Stands, body []byte) (*OpenStep, *Poison) {
	var o OpenStep
	if err := json.Unmarshal(body, &o); err != nil {
		return nil, poison(ReasonInvalidStep, "does not decode: %v", err)
	}
	switch {
	case o.Session != at.Session:
		return nil, poison(ReasonIdentityConflict, "step belongs to session %q", o.Session)
	case o.Step != at.Step:
		return nil, poison(ReasonIdentityConflict, "step says it is %q, stands as %q", o.Step, at.Step)
	case o.Execution != at.RanAs:
		return nil, poison(ReasonIdentityConflict, "step is of execution %q, its claim of %q", o.Execution, at.RanAs)
	case o.Epoch > at.Epoch:
		return nil, poison(ReasonIdentityConflict, "step has epoch %d, its session %d", o.Epoch, at.Epoch)
	case o.Index > 0 && o.Index < at.Started:
		return nil, poison(ReasonSuperseded, "step is number %d of its execution, which has started %d", o.Index, at.Started)
	case o.Index < 1 || o.Attempt < 0 || o.Recoveries < 0 || o.Lineage == "" || o.Execution == "":
		return nil, poison(ReasonInvalidStep, "index %d, attempt %d, %d recoveries, lineage %q, execution %q",
			o.Index, o.Attempt, o.Recoveries, o.Lineage, o.Execution)
	}
	return &o, nil
}

// ReleaseHow is how an operator releases a quarantined session (I30).
type ReleaseHow string

// The ways of docs/contract.md section 2.
const (
	ReleaseRetry       ReleaseHow = "retry"       // what was quarantined runs again
	ReleaseInterrupted ReleaseHow = "interrupted" // it is cancelled, the session goes on with what is pending
	ReleaseDiscard     ReleaseHow = "discard"     // it is cancelled, and so is what is pending
)

// Release is an operator's decision about one quarantine.
type Release struct {
	Session    SessionID
	Quarantine string // the id of the quarantine that was looked at
	How        ReleaseHow
	By, Why    string // for the event
}

// Limits are the numbers past which a session is quarantined instead of
// recovered (I27).
type Limits struct {
	Recoveries int // in a chain, without a step that ended
	Takeovers  int // of a session, without a step that ended
}

// Exceeded reports whether a session is past its limits; recoveries and
// takeovers count the one at hand.
func (l Limits) Exceeded(recoveries, takeovers int) *Poison {
	switch {
	case recoveries > l.Recoveries:
		return poison(ReasonAttemptsExhausted, "%d recoveries without a step that ended, %d are allowed", recoveries, l.Recoveries)
	case takeovers > l.Takeovers:
		return poison(ReasonNoProgress, "%d takeovers without a step that ended, %d are allowed", takeovers, l.Takeovers)
	default:
		return nil
	}
}

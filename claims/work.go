package claims

import (
	"encoding/json"
	"time"
)

// CommandKind is the kind of a command.
type CommandKind string

// The commands of docs/design.md section 3.
const (
	Admit     CommandKind = "admit"
	Wake      CommandKind = "wake"
	Interrupt CommandKind = "interrupt"
)

// Delivery is how an input joins a session.
type Delivery string

// The deliveries.
const (
	Queue Delivery = "queue" // one at a time, when the session is idle
	Steer Delivery = "steer" // joins at the next step boundary
)

// Input is a JSON body for a session under the caller's idempotency key (I20).
type Input struct {
	ID       string          `json:"id"`
	Delivery Delivery        `json:"delivery"`
	Body     json.RawMessage `json:"body"`
}

// Command is a decoded message of the command stream. Sequence and Time
// (nanoseconds since 1970 UTC, the stream's own stamp) place it in its
// session's order (I18).
type Command struct {
	Kind     CommandKind
	Session  SessionID
	Sequence int64
	Time     int64
	Trace    string // W3C traceparent, or empty

	Input     *Input    // admit: always; wake: perhaps
	NotBefore time.Time // wake: zero is now

	Reason    string      // interrupt
	Discard   bool        // interrupt: pending inputs and continuations go too
	Execution ExecutionID // interrupt: only this execution's lineage; empty is any

	// Confirmed: the stream's leader was asked and holds exactly this message.
	Confirmed bool
}

// Acquisition asks a transaction to take the claim of a session, under ids
// that its caller made and registered before (I15).
type Acquisition struct {
	Holder    HolderID
	Worker    string // its name, for execution.started
	Execution ExecutionID
	Step      StepID
}

// ApplyResult is how a command ended.
type ApplyResult string

// The results; they are the label of commands_total.
const (
	Applied   ApplyResult = "applied"
	Duplicate ApplyResult = "duplicate"
	Rejected  ApplyResult = "rejected"
	Retried   ApplyResult = "retried"
)

// Outcome of an applied command: what its transaction made true and who must be told.
type Outcome struct {
	Result ApplyResult
	// Started is set where the command acquired the claim.
	Started *Started
	// Ready: the session has due work and no claim; announce it.
	Ready bool
	// Notice is set where an owner must look at its claim now.
	Notice *Notice
}

// Started is a claim with its first open step.
type Started struct {
	Claim Claim
	Step  Step
}

// Claim is what its owner passes to every operation: whole, never loose ids.
type Claim struct {
	Session   SessionID
	Execution ExecutionID
	Holder    HolderID
	Epoch     int64
	// Verdict is, of a claim that a scanner took over, how it converts it; an
	// interrupt may raise it since.
	Verdict Cause
}

// Notice says of a claim that is not plainly running what its owner must know.
type Notice struct {
	Holder    HolderID
	Session   SessionID
	Execution ExecutionID
	Phase     Phase
	Revoked   Cause
	Since     time.Time // of the phase, by the database's clock
}

// Step is one call of the handler, as it was started.
type Step struct {
	ID        StepID
	Index     int // in its execution, from 1
	Inputs    []Input
	Continues *Continues // nil: it continues nothing
	Attempt   int        // retryable failures before this step in its chain
	StartedAt time.Time  // by the database's clock
	AskedAt   time.Time  // when the earliest thing it serves was recorded; zero: unknown
	Trace     string
}

// Continues tells a step, and step.started, what it goes on with.
type Continues struct {
	Kind    ContinuationKind `json:"kind"`
	Step    StepID           `json:"step"`
	Attempt int              `json:"attempt"`
}

// ContinuationKind is why there is a next step.
type ContinuationKind string

// The kinds of docs/design.md section 1.
const (
	KindContinue ContinuationKind = "continue" // the handler asked for it
	KindRetry    ContinuationKind = "retry"    // the step failed and may be tried again
	KindRecovery ContinuationKind = "recovery" // its worker was lost
	KindHandover ContinuationKind = "handover" // its worker shut down
	KindRelease  ContinuationKind = "release"  // an operator released it
)

// Content is what a handler puts out during a step: text, tool calls, snapshots.
type Content struct {
	Type EventType
	Data any // marshals to the event's data
}

// StepStatus is how a step ended.
type StepStatus string

// The statuses; they are the label of steps_total.
const (
	StepEnded       StepStatus = "ended"
	StepFailed      StepStatus = "failed"
	StepInterrupted StepStatus = "interrupted"
)

// FailureCode is why a step failed.
type FailureCode string

// The codes of docs/contract.md section 2.
const (
	CodeHandler    FailureCode = "handler"
	CodeExit       FailureCode = "exit"
	CodeTimeout    FailureCode = "timeout"
	CodeWorkerLost FailureCode = "worker_lost"
	CodeShutdown   FailureCode = "shutdown"
	CodePanic      FailureCode = "panic"
)

// Failure is the data of step.failed.
type Failure struct {
	Code      FailureCode `json:"code"`
	Message   string      `json:"message"`
	Retryable bool        `json:"retryable"`
}

// Token makes an operation of an owner repeatable: its id is written with the
// operation's events. The caller makes one for each operation and keeps it over
// its retries; the store sets Doubt when a COMMIT's outcome is unknown, and
// looks for the id before it does anything again.
type Token struct {
	ID    string // a UUID
	Doubt bool
}

// Ending is how an owner closes its open step, after the join.
type Ending struct {
	Step Step
	Tail []Content // what was put out since the last record

	Result   json.RawMessage // nil: null
	Continue bool
	Failure  *Failure // nil: the step ended
	// Retry is the delay before the failed step is tried again; nil: never.
	Retry *time.Duration
	// Yield settles the execution even where more work is due.
	Yield bool
}

// Settlement is what closing or settling made true.
type Settlement struct {
	// Again: the claim stays, more work is due.
	Again   bool
	Outcome ExecutionOutcome // where the claim went
	Reason  Reason           // of a quarantine
	// Ready: the session has due work and no claim; announce it.
	Ready bool
}

// ExecutionOutcome is the outcome of execution.ended.
type ExecutionOutcome string

// The outcomes of docs/contract.md section 2.
const (
	OutcomeCompleted   ExecutionOutcome = "completed"
	OutcomeFailed      ExecutionOutcome = "failed"
	OutcomeRetrying    ExecutionOutcome = "retrying"
	OutcomeInterrupted ExecutionOutcome = "interrupted"
	OutcomeDeclined    ExecutionOutcome = "declined"
	OutcomeYielded     ExecutionOutcome = "yielded"
	OutcomeHandedOver  ExecutionOutcome = "handed_over"
	OutcomeRecovered   ExecutionOutcome = "recovered"
	OutcomeQuarantined ExecutionOutcome = "quarantined"
	OutcomeDiscarded   ExecutionOutcome = "discarded"
)

// ClosedStep is one entry of a handler's history.
type ClosedStep struct {
	Step   StepID          `json:"step"`
	Inputs []Input         `json:"inputs"`
	Text   string          `json:"text"`
	Result json.RawMessage `json:"result"`
	Status StepStatus      `json:"status"`
	// Failure is why it failed; left out where it did not.
	Failure *Failure `json:"failure,omitempty"`
}

// Mark says how far a session's log is on the stream.
type Mark struct {
	Session SessionID
	Seq     int64
}

// Lease is the row of a worker or a scanner.
type Lease struct {
	Holder  HolderID
	Kind    string // worker or scanner
	Name    string
	Version string
	Slots   int
}

// Outcome is what the ending alone says of its execution: more work may let it
// go on, or make it yield.
func (e Ending) Outcome() ExecutionOutcome {
	switch {
	case e.Failure == nil:
		return OutcomeCompleted
	case e.Retry != nil:
		return OutcomeRetrying
	default:
		return OutcomeFailed
	}
}

// Candidate is a claim that a scanner found expired; it is acted on only under
// its fence.
type Candidate struct {
	Session   SessionID
	Execution ExecutionID
	Phase     Phase
	Revoked   Cause
	DueAt     time.Time // its place in the lane
	// Overdue is since the lease of its holder expired; 0: unknown.
	Overdue time.Duration
}

// DueSession is a session that a scanner found due for one of its lanes.
type DueSession struct {
	Session SessionID
	Overdue time.Duration // since it is due; 0: unknown
}

// DueContinuation is a continuation that a scanner found due.
type DueContinuation struct {
	Session   SessionID
	Number    int64
	Body      string // as it stands, decodable or not
	Epoch     int64  // of its session
	Unstarted bool   // the session has neither claim nor quarantine
	// Superseded: its chain has a newer promise.
	Superseded bool
	Overdue    time.Duration // since it is due
}

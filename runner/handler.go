package runner

import (
	"context"
	"encoding/json"
	"time"

	"reveille/claims"
)

// Handler is the user's code: it runs one step of a session.
//
// The context is cancelled when the step must stop; context.Cause says why
// (claims.ErrInterrupted, ErrLeaseLost, ErrShutdown, ErrStepTimeout). A
// handler that ignores its context keeps its session from everyone else until
// it returns, and past the loss of its lease it may overlap with the next
// owner (I7): pass Request.Epoch to whatever it writes to, and let that refuse
// an older one.
//
// A nil error ends the step with the Result. Any other error fails it; see
// Failure for a code, a retry and its delay. The durable phase decides, not
// the error (I13): an interrupted step ends as interrupted whatever is
// returned. Handlers are called from many goroutines at once.
type Handler interface {
	Step(ctx context.Context, req Request, out *Output) (Result, error)
}

// HandlerFunc makes a Handler of a function.
type HandlerFunc func(ctx context.Context, req Request, out *Output) (Result, error)

// Step calls f.
func (f HandlerFunc) Step(ctx context.Context, req Request, out *Output) (Result, error) {
	return f(ctx, req, out)
}

// Snapshotter is implemented by a Handler that keeps state of its sessions
// outside, such as a working tree. Snapshot is called before and after each
// step, while its execution owns the session (I16), and returns what names the
// state in the snapshot event. An error fails the step: before it, in a way that
// may be retried. It is not called after a step that failed or was interrupted.
type Snapshotter interface {
	Snapshot(ctx context.Context, req Request, at SnapshotAt) (tree string, err error)
}

// SnapshotAt says when a snapshot is taken.
type SnapshotAt string

// The times of a snapshot; they are the field at of its event.
const (
	Before SnapshotAt = "before"
	After  SnapshotAt = "after"
)

// Request is what a handler gets. Its JSON is the line of docs/contract.md section 3.
type Request struct {
	Session   claims.SessionID    `json:"session"`
	Execution claims.ExecutionID  `json:"execution"`
	Epoch     int64               `json:"epoch"` // the fencing token
	Step      claims.StepID       `json:"step"`
	Index     int                 `json:"index"`
	Inputs    []claims.Input      `json:"inputs"`
	Continues *claims.Continues   `json:"continues"`
	History   []claims.ClosedStep `json:"history"`

	Trace string `json:"-"` // W3C traceparent, or empty
	// Killed is closed when the handler must be gone: past --kill-after of the
	// cancellation, or at the lease's end (I7), whichever is first. A handler that
	// runs something it can kill kills it then.
	Killed <-chan struct{} `json:"-"`
	// Deadline is that of the worker's lease, for handlers that have something
	// besides this process that can hold to it. It is nil where there is none.
	Deadline Deadline `json:"-"`
}

// Deadline says when everything that runs under a worker lease must be gone
// (I7): Killed closes then, if this process can run then. It is safe for
// concurrent use.
type Deadline interface {
	// Holder names the lease; all steps under it have the same deadline.
	Holder() claims.HolderID
	// Follow calls f with the instant of the deadline, and again whenever a
	// heartbeat has moved it, until stop is called. It is over by the monotonic or
	// by the wall clock, whichever is first. f must not block: a heartbeat waits
	// for it. stop may be called more than once, and not by f; f is not called any
	// more when it has returned.
	Follow(f func(until time.Time)) (stop func())
}

// Document is the request as one line of JSON, without a newline. Lists are
// never null in it.
func (r Request) Document() ([]byte, error) {
	if r.Inputs == nil {
		r.Inputs = []claims.Input{}
	}
	if r.History == nil {
		r.History = []claims.ClosedStep{}
	}
	return claims.Marshal(r)
}

// Result is how a step ended well.
type Result struct {
	Value    json.RawMessage // any JSON; nil is null
	Continue bool            // promise another step
}

// Failure is an error that says how its step failed. A handler may return any
// other error: it fails the step with code "handler", not retryable.
type Failure struct {
	Code      claims.FailureCode
	Message   string
	Retryable bool
	// After is the least delay before the retry; 0 leaves it to the backoff.
	After time.Duration
}

func (f *Failure) Error() string { return string(f.Code) + ": " + f.Message }

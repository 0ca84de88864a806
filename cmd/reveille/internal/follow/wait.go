// Package follow reads a session's events for people: it decides, from the
// events alone, when what somebody waits for is over and how it ended (Wait,
// Stop), puts live and durable text together (Text), and shows events as lines
// (Printer). It performs no I/O but the Printer's writes.
//
// The events of one session come in order and once; what a Wait or a Stop is
// given may begin anywhere in that order, and does not skip.
package follow

import (
	"cmp"
	"encoding/json"
	"fmt"
	"slices"

	"reveille/claims"
)

// Exit codes of docs/contract.md section 4.
const (
	CodeCompleted   = 0
	CodeFailed      = 3
	CodeInterrupted = 4 // or declined, or cancelled before it ran
	CodeQuarantined = 5
)

// Outcome is how what was waited for ended.
type Outcome struct {
	Code int
	Text string // one line for people
}

// stepState is what is known of the newest step of a chain.
type stepState int

const (
	none     stepState = iota // it has not started
	open                      // step.started
	failed                    // step.failed; the next event tells whether it goes on
	promised                  // it goes on with another step
	closed                    // for good; its execution may still be winding up
)

// Wait follows one input, or one bare wake, from its wake to the end of the
// execution that ran the last step of its chain.
//
// The chain is the step that covers the input and its continuations, across
// executions. A step that failed goes on where the event right after it, of
// the same transaction therefore, ends its execution as retrying, handed over,
// recovered or yielded.
type Wait struct {
	input string // empty: a bare wake
	since int64  // the session's last sequence when the wake was published

	seen      bool
	seq       int64
	state     stepState
	step      claims.StepID // the newest of the chain
	execution claims.ExecutionID
	over      bool // that execution ended
	failure   claims.Failure
	failedSeq int64
	outcome   Outcome // where closed
	blocked   string  // why the session was quarantined before the wake; empty: it is not
}

// NewWait follows the input (or, where it is empty, a bare wake) that was
// published when since was the session's last sequence. Events up to since are
// history: they tell what became of an input that was sent before. For a bare
// wake they say nothing, the first step after them serves it.
// quarantined is why the session was quarantined then, or empty.
func NewWait(input string, since int64, quarantined string) *Wait {
	return &Wait{input: input, since: since, blocked: quarantined}
}

// Seen reports whether any event told of the input.
func (w *Wait) Seen() bool { return w.seen }

// Ours reports whether a step is the newest of the chain: what it says is the
// answer to the input.
func (w *Wait) Ours(step claims.StepID) bool { return step != "" && step == w.step }

// Event takes the session's next event; done says that the wait is over.
func (w *Wait) Event(r claims.Record) (o Outcome, done bool) {
	w.seq = r.Seq
	if w.state == failed {
		w.afterFailure(r)
	}
	switch r.Type {
	case claims.InputAdmitted, claims.InputPromoted:
		if d := data[claims.InputData](r); w.input != "" && d.Input == w.input {
			w.seen = true
		}
	case claims.InputCancelled:
		if d := data[claims.InputCancelledData](r); w.input != "" && d.Input == w.input {
			w.seen = true
			return Outcome{CodeInterrupted, "cancelled before it ran" + because(d.Reason)}, true
		}
	case claims.WakeCancelled:
		if w.input == "" && w.state == none && r.Seq > w.since {
			return Outcome{CodeInterrupted, "cancelled before it ran" + because(data[claims.ReasonData](r).Reason)}, true
		}
	case claims.StepStartedEvent:
		w.started(r)
	case claims.StepEndedEvent, claims.StepFailedEvent, claims.StepInterruptedEvent:
		if w.Ours(r.Step) && w.state == open {
			w.closing(r)
		}
	case claims.ContinuationCancelled:
		if d := data[claims.ContinuationCancelledData](r); w.Ours(d.Step) && w.state == promised {
			w.close(CodeInterrupted, "interrupted before it went on"+because(d.Reason))
		}
	case claims.ExecutionEnded:
		if r.Execution == w.execution && w.state != none {
			w.over = true
		}
	case claims.SessionQuarantined:
		return w.quarantined(r)
	case claims.SessionReleased:
		w.released(r)
	}
	return w.outcome, w.state == closed && w.over
}

// Past says that there is no event after since yet, or none of history left:
// a session that is quarantined then runs nothing.
func (w *Wait) Past() (o Outcome, done bool) {
	if w.blocked == "" || w.state == closed || w.seq > w.since {
		return Outcome{}, false
	}
	what := "it waits for its release"
	if w.state == none {
		what = "the input is recorded and waits for its release"
	}
	return Outcome{CodeQuarantined, "the session is quarantined (" + w.blocked + "): " + what}, true
}

func (w *Wait) started(r claims.Record) {
	d := data[claims.StepStartedData](r)
	switch {
	case w.state == none && w.input != "" && slices.Contains(d.Inputs, w.input),
		w.state == none && w.input == "" && r.Seq > w.since:
		w.seen = true
	case d.Continues != nil && w.Ours(d.Continues.Step) && w.state == promised:
	default:
		return
	}
	w.state, w.step, w.execution, w.over = open, r.Step, r.Execution, false
}

func (w *Wait) closing(r claims.Record) {
	switch r.Type {
	case claims.StepEndedEvent:
		if d := data[claims.StepEndedData](r); d.Continue {
			w.state = promised
		} else {
			w.close(CodeCompleted, "completed"+result(d.Result))
		}
	case claims.StepFailedEvent:
		w.state, w.failure, w.failedSeq = failed, data[claims.Failure](r), r.Seq
	case claims.StepInterruptedEvent:
		w.close(CodeInterrupted, "interrupted"+because(data[claims.StepInterruptedData](r).Reason))
	}
}

// afterFailure decides, by the event after step.failed, whether the chain goes on.
func (w *Wait) afterFailure(r claims.Record) {
	if r.Seq == w.failedSeq+1 && r.Type == claims.ExecutionEnded && r.Execution == w.execution {
		switch data[claims.ExecutionEndedData](r).Outcome {
		case claims.OutcomeRetrying, claims.OutcomeHandedOver, claims.OutcomeRecovered, claims.OutcomeYielded:
			w.state = promised
			return
		}
	}
	w.close(CodeFailed, "failed: "+describe(w.failure))
}

func (w *Wait) close(code int, text string) {
	w.state, w.outcome = closed, Outcome{code, text}
}

func (w *Wait) quarantined(r claims.Record) (Outcome, bool) {
	d := data[claims.QuarantinedData](r)
	if r.Seq <= w.since || w.state == closed {
		return Outcome{}, false // its execution's end follows, or, in history, its release
	}
	return Outcome{CodeQuarantined, fmt.Sprintf("the session was quarantined: %s: %s", d.Reason, d.Detail)}, true
}

// released ends a chain that the quarantine had cut, unless it is tried again.
func (w *Wait) released(r claims.Record) {
	w.blocked = ""
	d := data[claims.ReleasedData](r)
	switch {
	case w.state == none || w.state == closed:
	case d.How == "retry":
		w.state = promised
	default:
		w.over = true
		w.close(CodeInterrupted, "interrupted: the session was quarantined and released as "+d.How)
	}
}

// data reads an event's data. What does not decode is as if it were empty: the
// log's writer is this program, and a reader for people goes on.
func data[T any](r claims.Record) T {
	var d T
	_ = json.Unmarshal(r.Data, &d)
	return d
}

func because(reason string) string {
	if reason == "" {
		return ""
	}
	return ": " + printable(reason)
}

func result(raw json.RawMessage) string {
	if len(raw) == 0 || string(raw) == "null" {
		return ""
	}
	return ", result " + Short(string(raw))
}

func describe(f claims.Failure) string {
	return printable(cmp.Or(f.Message, string(f.Code))) + " (" + string(f.Code) + ")"
}

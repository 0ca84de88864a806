package follow

import (
	"fmt"

	"reveille/claims"
)

// Stop follows an interrupt until the execution that it found running ended,
// or until it is clear that it found none.
type Stop struct {
	execution claims.ExecutionID // the one that was named; empty: any
	since     int64
	blocked   string

	running claims.ExecutionID
	hit     string // what the interrupt did; empty: nothing yet
}

// NewStop follows an interrupt that was published when since was the session's
// last sequence; execution is the one it names, or empty, and quarantined is
// why the session was quarantined then, or empty. It must be given the
// session's history too.
func NewStop(execution claims.ExecutionID, since int64, quarantined string) *Stop {
	return &Stop{execution: execution, since: since, blocked: quarantined}
}

// Running is the execution that runs, as far as the events tell.
func (s *Stop) Running() claims.ExecutionID { return s.running }

// Event takes the session's next event; done says that the wait is over.
func (s *Stop) Event(r claims.Record) (o Outcome, done bool) {
	fresh := r.Seq > s.since
	switch r.Type {
	case claims.ExecutionStarted:
		s.running = r.Execution
	case claims.ExecutionCancelling:
		if fresh {
			s.hit = "interrupted"
		}
	case claims.InputCancelled, claims.WakeCancelled, claims.ContinuationCancelled:
		if !fresh {
			break
		}
		s.hit = "what would have run next was cancelled"
		if s.running == "" {
			return Outcome{CodeInterrupted, s.hit}, true
		}
	case claims.ExecutionEnded:
		if r.Execution == s.running {
			s.running = ""
		}
		if fresh {
			return s.ended(data[claims.ExecutionEndedData](r).Outcome)
		}
	case claims.SessionQuarantined:
		if fresh {
			d := data[claims.QuarantinedData](r)
			return Outcome{CodeQuarantined, fmt.Sprintf("the session was quarantined: %s: %s", d.Reason, d.Detail)}, true
		}
	case claims.SessionReleased:
		s.blocked = ""
	}
	return Outcome{}, false
}

// ended is about the execution that ran when the interrupt came, or that
// started before it was applied.
func (s *Stop) ended(outcome claims.ExecutionOutcome) (Outcome, bool) {
	switch outcome {
	case claims.OutcomeInterrupted, claims.OutcomeDeclined:
		return Outcome{CodeInterrupted, string(outcome)}, true
	case claims.OutcomeRetrying, claims.OutcomeHandedOver, claims.OutcomeRecovered, claims.OutcomeYielded:
		// The interrupt may hit what it promised; that has an event of its own.
		if s.hit == "" {
			return Outcome{}, false
		}
	}
	switch {
	case s.hit != "":
		return Outcome{CodeInterrupted, s.hit}, true
	case outcome == claims.OutcomeFailed:
		return Outcome{CodeFailed, "it had failed before the interrupt came"}, true
	case outcome == claims.OutcomeQuarantined:
		return Outcome{CodeQuarantined, "the session was quarantined"}, true
	default:
		return Outcome{CodeCompleted, "it had " + string(outcome) + " before the interrupt came"}, true
	}
}

// Idle says that the interrupt was applied and that no event has come since
// then for a while: done where it found nothing.
func (s *Stop) Idle() (o Outcome, done bool) {
	switch {
	case s.hit != "" || s.running != "" && s.execution == "":
		return Outcome{}, false
	case s.running != "":
		return Outcome{CodeCompleted, fmt.Sprintf("execution %s does not run: nothing was interrupted", s.execution)}, true
	case s.blocked != "":
		return Outcome{CodeQuarantined, "the session is quarantined (" + s.blocked + "): nothing runs, nothing was interrupted"}, true
	default:
		return Outcome{CodeCompleted, "nothing runs: nothing was interrupted"}, true
	}
}

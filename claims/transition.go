package claims

import "fmt"

// Op is what somebody asks of a claim.
type Op int

// The operations of docs/design.md section 2, one a row of its table.
const (
	OpAcquire         Op = iota // insert a claim for the session
	OpInterrupt                 // somebody's interrupt
	OpRevoke                    // its owner gives it up without knowing its state
	OpStart                     // its owner starts a step
	OpRecord                    // its owner appends content of the open step
	OpDecline                   // its owner's handler says that a person refused
	OpClose                     // its owner ends or fails the step, joined
	OpSettle                    // its owner settles as completed or failed, joined
	OpSettleInterrupt           // its owner settles as interrupted, joined
	OpHandOver                  // its owner is shutting down, joined
	OpScan                      // a scanner looks at it
	opEnd
)

// Effect is what the operation does.
type Effect int

// The effects. Busy, Fenced, IsCancelled and Illegal change nothing and stand
// for the sentinel of the same meaning.
const (
	Busy           Effect = iota // ErrBusy
	Fenced                       // ErrFenced
	IsCancelled                  // ErrCancelled
	Illegal                      // ErrIllegal
	NoChange                     // nothing to do, and that is a success
	Allow                        // the operation as asked; the phase stays
	ToCancelling                 // phase cancelling, execution.cancelling
	CancelHead                   // what would start next is cancelled
	MarkRevoked                  // the claim is revoked with the asked cause
	RaiseVerdict                 // the scanner that holds it converts with this verdict
	ToCancelled                  // phase cancelled and step.interrupted
	Remove                       // the claim goes (or, settling, stays when work came in)
	CloseAndRemove               // step.interrupted and the claim goes
	Continue                     // a continuation is written and the claim goes
	TakeOver                     // new execution id, new holder, epoch + 1; then convert
	ToQuarantine                 // the session is taken out of circulation
	effectEnd
)

// Err returns the sentinel of a refusing effect, nil for the others.
func (e Effect) Err() error {
	switch e {
	case Busy:
		return ErrBusy
	case Fenced:
		return ErrFenced
	case IsCancelled:
		return ErrCancelled
	case Illegal:
		return ErrIllegal
	default:
		return nil
	}
}

// State is all of a claim that decides a transition.
type State struct {
	Phase Phase
	// LeaseLive is by the database's clock at the statement, never the worker's (I4).
	LeaseLive bool
	Revoked   Cause
	StepOpen  bool
	// Own: the asker names the claim's present execution id. Only owners' operations look at it.
	Own bool
	// Scanner: a scanner took the claim over and is converting it.
	Scanner bool
}

// Live reports whether the claim's holder may still start and record: its
// lease is live and the claim is not revoked.
func (s State) Live() bool { return s.LeaseLive && s.Revoked == None }

// Next decides every transition of a claim. It is pure and total: every state
// and operation has an answer, and an unknown phase or operation panics since
// it can only be a bug (the columns are CHECKed).
func Next(s State, op Op) Effect {
	switch op {
	case OpAcquire:
		return Busy // I2: never overwrite, live or expired
	case OpInterrupt:
		return interrupt(s)
	case OpScan:
		return scan(s)
	case OpRevoke, OpStart, OpRecord, OpDecline, OpClose, OpSettle, OpSettleInterrupt, OpHandOver:
	default:
		panic(fmt.Sprintf("claims: unknown operation %d", op))
	}
	if !s.Own {
		return Fenced
	}
	switch s.Phase {
	case Running:
		return ownerRunning(s, op)
	case Cancelling:
		return ownerCancelling(s, op)
	case Cancelled:
		return ownerCancelled(s, op)
	default:
		panic(fmt.Sprintf("claims: unknown phase %q", s.Phase))
	}
}

func ownerRunning(s State, op Op) Effect {
	switch op {
	case OpRevoke:
		return MarkRevoked
	case OpStart, OpRecord:
		return ifTrue(s.Live(), Allow)
	case OpDecline:
		return ifTrue(s.Live(), ToCancelled)
	case OpClose:
		return ifTrue(s.Revoked == None, Allow)
	case OpSettle:
		return ifTrue(s.Revoked == None, Remove)
	case OpHandOver:
		return ifTrue(s.Revoked == None, Continue)
	default: // OpSettleInterrupt: nobody interrupted it
		return Illegal
	}
}

func ownerCancelling(s State, op Op) Effect {
	switch op {
	case OpRevoke:
		return MarkRevoked
	case OpRecord:
		return ifTrue(s.Live(), Allow)
	case OpStart, OpDecline:
		return ifTrue(s.Live(), IsCancelled)
	case OpClose, OpSettle:
		return IsCancelled // I9, whatever the handler returned
	default: // OpSettleInterrupt, OpHandOver
		return ifTrue(s.Revoked == None, CloseAndRemove)
	}
}

func ownerCancelled(s State, op Op) Effect {
	switch op {
	case OpRevoke:
		return MarkRevoked
	case OpStart, OpRecord:
		return ifTrue(s.Live(), IsCancelled)
	case OpDecline:
		return ifTrue(s.Live(), NoChange)
	case OpClose:
		return IsCancelled
	default: // OpSettle, OpSettleInterrupt, OpHandOver: its outcome is known already
		return ifTrue(s.Revoked == None, Remove)
	}
}

// ifTrue is effect where the condition of "live" or "still its own" holds.
func ifTrue(ok bool, effect Effect) Effect {
	if ok {
		return effect
	}
	return Fenced
}

func interrupt(s State) Effect {
	switch s.Phase {
	case Running:
	case Cancelling, Cancelled:
		return NoChange // it is on its way out already
	default:
		panic(fmt.Sprintf("claims: unknown phase %q", s.Phase))
	}
	switch {
	case !s.StepOpen:
		return CancelHead
	case !s.Live():
		return MarkRevoked
	case s.Scanner:
		return RaiseVerdict // no handler is there to be told; its conversion closes the step as interrupted
	default:
		return ToCancelling
	}
}

func scan(s State) Effect {
	switch {
	case s.Live():
		return NoChange
	case s.Phase == Running:
		return TakeOver
	case s.Phase == Cancelling:
		return ToQuarantine // I26: its outcome is unknown
	case s.Phase == Cancelled && s.Revoked == NeverJoined:
		return ToQuarantine
	case s.Phase == Cancelled:
		return Remove // I26: its outcome is known
	default:
		panic(fmt.Sprintf("claims: unknown phase %q", s.Phase))
	}
}

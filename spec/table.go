package spec

import "reveille/claims"

// Rules breaks the protocol, one rule a field: each is a mutant for which the
// checker must find a counterexample. The zero value is the protocol.
type Rules struct {
	AcquireOverwrites       bool // I2: an expired claim is overwritten
	UnknownIsAcquired       bool // I3: a commit whose outcome is unknown counts as an acquisition
	NoMinuteCheck           bool // I3: nobody compares the claims of a process with its registry
	LooksUpFirst            bool // I3: the registry is looked at before the claims are read
	HeartbeatRevives        bool // I4: a heartbeat extends an expired lease
	NoExecutionFence        bool // I5: an owner's statement names the session only
	TakeoverKeepsExecution  bool // I6: the old owner's fence still matches
	TakeoverKeepsEpoch      bool // I6: two owners carry the same token
	NoDeadline              bool // I7: a worker whose lease is over goes on
	NoOwnershipCheck        bool // I16: a handler is called without asking the local deadline
	CloseOverCancelling     bool // I9: closing looks at no phase
	TrustTheHandler         bool // I13: a handler that answers an error when it is interrupted has failed
	SettleBeforeJoin        bool // I10: a step is closed when its handler has returned
	NeverJoinedIsRecovered  bool // I10: the verdict is left out of the conversion
	DeclineKeepsPhase       bool // I12: step.interrupted, and the claim stays running
	RegisterLate            bool // I15: the claim is registered when its transaction has answered
	InterruptionDropsWakes  bool // I21: settling an interruption serves the wakes
	RemovalForgetsReady     bool // I22: one removal of a claim does not rearm
	PromiseNotConsumed      bool // I23: a promoted continuation stays
	RecoveryArmsInputs      bool // I23: what a lost step covered is armed again as well
	HandOverPromisesNothing bool // I5, section 4: a removal with an open step leaves no continuation
	DeclinedIsQuarantined   bool // I26: an expired cancelled claim counts as uncertain
	CancellingIsRecovered   bool // I26: an expired cancelling claim is taken over and converted
	InterruptSkipsExpired   bool // section 3: an interrupt does not revoke an expired claim
	InterruptSkipsScanner   bool // section 3: an interrupt does not raise the scanner's verdict
	VerdictIsLowered        bool // section 1: a later takeover forgets the verdict
	ScannerIgnoresExpiry    bool // I28: a claim is quarantined by an earlier read of its lease
	QuarantineRuns          bool // I30: acquisition does not look for a quarantine
	ReleaseForgetsStep      bool // I30: a release does not close the quarantined step
	NoTakeover              bool // I32: nobody recovers

	// Two rules cost only time where they are broken: see TestSpared.
	NoResolution        bool // I3: an acquisition in doubt is left to the minute's check
	AcquireWithoutLease bool // I2: the holder's own lease is not asked in the statement
}

// view is all of a claim that decides a transition; the model's own form of
// claims.State.
type view struct {
	phase    phase
	lease    bool // live
	revoked  cause
	stepOpen bool
	own      bool
	scanner  bool
}

// The columns of the table: live, its lease expired, revoked.
const (
	live = iota
	leaseOver
	marked
)

type row [3][3]claims.Effect // by phase, from running, and column

func columns(live, leaseOver, marked claims.Effect) [3]claims.Effect {
	return [3]claims.Effect{live, leaseOver, marked}
}

func always(e claims.Effect) [3]claims.Effect { return columns(e, e, e) }

// decisions is the table of docs/design.md section 2, an interrupt with a step open.
var decisions = map[claims.Op]row{
	claims.OpAcquire:         {always(claims.Busy), always(claims.Busy), always(claims.Busy)},
	claims.OpInterrupt:       {columns(claims.ToCancelling, claims.MarkRevoked, claims.MarkRevoked), always(claims.NoChange), always(claims.NoChange)},
	claims.OpRevoke:          {always(claims.MarkRevoked), always(claims.MarkRevoked), always(claims.MarkRevoked)},
	claims.OpStart:           {whileLive(claims.Allow), whileLive(claims.IsCancelled), whileLive(claims.IsCancelled)},
	claims.OpRecord:          {whileLive(claims.Allow), whileLive(claims.Allow), whileLive(claims.IsCancelled)},
	claims.OpDecline:         {whileLive(claims.ToCancelled), whileLive(claims.IsCancelled), whileLive(claims.NoChange)},
	claims.OpClose:           {whileOwn(claims.Allow), always(claims.IsCancelled), always(claims.IsCancelled)},
	claims.OpSettle:          {whileOwn(claims.Remove), always(claims.IsCancelled), whileOwn(claims.Remove)},
	claims.OpSettleInterrupt: {always(claims.Illegal), whileOwn(claims.CloseAndRemove), whileOwn(claims.Remove)},
	claims.OpHandOver:        {whileOwn(claims.Continue), whileOwn(claims.CloseAndRemove), whileOwn(claims.Remove)},
	claims.OpScan:            {scanned(claims.TakeOver), scanned(claims.ToQuarantine), scanned(claims.Remove)},
}

func whileLive(e claims.Effect) [3]claims.Effect { return columns(e, claims.Fenced, claims.Fenced) }
func whileOwn(e claims.Effect) [3]claims.Effect  { return columns(e, e, claims.Fenced) }
func scanned(e claims.Effect) [3]claims.Effect   { return columns(claims.NoChange, e, e) }

// decide answers an operation. TestTheTableIsThatOfClaims holds it against the
// function that the code asks.
func (r Rules) decide(v view, op claims.Op) claims.Effect {
	anybodys := op == claims.OpAcquire || op == claims.OpInterrupt || op == claims.OpScan
	if !anybodys && !v.own {
		return claims.Fenced
	}
	column := live
	switch {
	case v.revoked != noCause:
		column = marked
	case !v.lease:
		column = leaseOver
	}
	effect := decisions[op][v.phase-running][column]
	switch {
	case op == claims.OpInterrupt && v.phase == running && !v.stepOpen:
		return claims.CancelHead
	case effect == claims.ToCancelling && v.scanner:
		effect = claims.RaiseVerdict
	case op == claims.OpScan && effect == claims.Remove && v.revoked == neverJoined:
		effect = claims.ToQuarantine
	}
	return r.broken(v, op, effect)
}

// broken is the effect under a mutant of the table.
func (r Rules) broken(v view, op claims.Op, effect claims.Effect) claims.Effect {
	switch {
	case r.CloseOverCancelling && op == claims.OpClose && v.phase == cancelling && v.revoked == noCause:
		return claims.Allow
	case r.TrustTheHandler && op == claims.OpHandOver && effect == claims.CloseAndRemove:
		return claims.Continue
	case r.CancellingIsRecovered && op == claims.OpScan && effect == claims.ToQuarantine && v.phase == cancelling:
		return claims.TakeOver
	case r.DeclinedIsQuarantined && op == claims.OpScan && effect == claims.Remove:
		return claims.ToQuarantine
	case r.InterruptSkipsExpired && op == claims.OpInterrupt && effect == claims.MarkRevoked:
		return claims.NoChange
	case r.InterruptSkipsScanner && effect == claims.RaiseVerdict:
		return claims.NoChange
	case r.ScannerIgnoresExpiry && op == claims.OpScan && v.phase == cancelling:
		return claims.ToQuarantine
	case r.NoTakeover && effect == claims.TakeOver:
		return claims.NoChange
	}
	return effect
}

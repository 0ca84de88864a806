package spec

import "reveille/claims"

func eachScanner(c *Config, s state, f func(n *state, i int, sc *scanner)) {
	for i := range c.Scanners {
		n := s
		f(&n, i, &n.Scanners[i])
	}
}

// "A takeover changes the execution id and raises the epoch" (I6), only where
// the claim has expired and the taker's own lease is live, in the statement.
// "The takeover turns the mark into the claim's verdict."
func takeOver(c *Config, s state, to emit) {
	if s.Claim.Phase == noClaim || c.Rules.decide(c.view(&s, -1), claims.OpScan) != claims.TakeOver {
		return
	}
	eachScanner(c, s, func(n *state, i int, sc *scanner) {
		if sc.Lease != trusted || sc.Own {
			return
		}
		k := &n.Claim
		if !k.Scanner { // a scanner that died is not the session's doing
			n.Takeovers = min(n.Takeovers+1, takeovers+1)
		}
		verdict := max(k.Verdict, k.Revoked)
		if c.Rules.VerdictIsLowered {
			verdict = k.Revoked
		}
		k.Phase, k.Scanner, k.Verdict, k.Revoked = running, true, verdict, noCause
		k.Holder, k.Present, k.OldLive = uint8(workers+i), true, false
		if !c.Rules.TakeoverKeepsExecution {
			n.disown()
		}
		n.begins(workers+i, !c.Rules.TakeoverKeepsEpoch)
		sc.Own = true
		to(*n, workers+i)
	})
}

// "Convert, under the recovery fence, in one transaction: close the open step as
// step.failed (worker_lost), write the continuation iff a step was open or a
// next was promised, remove the claim. With the verdict interrupted: close it as
// step.interrupted and promise nothing; never_joined: quarantine; unknown: as
// for a dead holder."
func convert(c *Config, s state, to emit) {
	eachScanner(c, s, func(n *state, i int, sc *scanner) {
		if !sc.Own {
			return
		}
		if fenced := !n.holds(workers+i) || sc.Lease == expired || n.Claim.Revoked != noCause; fenced {
			sc.Own, sc.Behind = false, false
			to(*n, workers+i)
			return
		}
		if sc.Behind {
			n.violate(onlyOwners)
		}
		c.converted(n)
		for j := range n.Scanners {
			n.Scanners[j].Behind = n.Scanners[j].Behind && n.Scanners[j].Own
		}
		to(*n, workers+i)
	})
}

func (c *Config) converted(n *state) {
	k := n.Claim
	lost := k.Step.Recoveries
	if k.StepOpen {
		lost++
	}
	switch {
	case k.Verdict == neverJoined && !c.Rules.NeverJoinedIsRecovered:
		n.quarantine(joinedNever)
	case k.StepOpen && k.Verdict == interrupted:
		n.endStep(asInterrupted, -1)
		n.set(k.Step.Covers, over)
		n.remove()
	case lost > recoveries || n.Takeovers > takeovers:
		n.quarantine(exhausted)
	case k.StepOpen:
		n.endStep(asFailed, -1)
		n.promise(recovery, k.Step)
		if c.Rules.RecoveryArmsInputs {
			n.set(k.Step.Covers, armed)
		}
		n.remove()
	default:
		n.remove()
		if c.Rules.RemovalForgetsReady {
			n.Ready = false
		}
	}
}

// "An expired cancelled claim, unless never_joined, has a known outcome: it is
// removed under its fence. An expired cancelling claim has an unknown one:
// quarantined, never recovered" (I26).
func endExpired(c *Config, s state, to emit) {
	if s.Claim.Phase == noClaim {
		return
	}
	effect := c.Rules.decide(c.view(&s, -1), claims.OpScan)
	if effect != claims.Remove && effect != claims.ToQuarantine {
		return
	}
	if s.leaseLive() && s.Claim.Revoked == noCause {
		s.violate(fencedQuarantine)
	}
	never := s.Claim.Revoked == neverJoined
	switch step := s.Claim.Step; {
	case effect == claims.Remove:
		s.remove()
	case never:
		s.quarantine(joinedNever)
	case c.UncertainInterrupts:
		s.endStep(asInterrupted, -1)
		s.set(step.Covers, over)
		s.remove()
	default:
		if s.Claim.Phase == cancelled {
			s.violate(knownOutcome)
		}
		s.quarantine(outcomeUnknown)
	}
	to(s, workers)
}

// quarantine "moves claim, continuation and, where no step was open, the head,
// into one row" (I30).
func (s *state) quarantine(why reason) {
	s.Quarantine = quarantine{Reason: why, StepOpen: s.Claim.StepOpen, Step: s.Claim.Step}
	if !s.Claim.StepOpen {
		h := s.head()
		if h.promise >= 0 {
			s.Quarantine.Promise = s.consume(h.promise)
		}
		s.set(h.inputs, held)
		s.Quarantine.Wake, s.Wake = s.Wake, false
	}
	s.remove()
}

// forget: a takeover whose answer was lost, and which is not tried again.
func forget(c *Config, s state, to emit) {
	eachScanner(c, s, func(n *state, i int, sc *scanner) {
		if sc.Own && n.holds(workers+i) && n.fault() {
			sc.Own = false
			to(*n, workers+i)
		}
	})
}

// "Once a minute a process reads all claims it holds and then looks each up in
// its registry: one that is not there is revoked (unknown)" (I3).
func minuteCheck(c *Config, s state, to emit) {
	if c.Rules.LooksUpFirst {
		lookUp(s, to)
	}
	if c.Rules.NoMinuteCheck || s.Claim.Phase == noClaim || s.Claim.Revoked != noCause {
		return
	}
	each(s, func(n *state, i int, w *worker) {
		if !n.holds(i) || w.Lease != trusted || c.inRegistry(w) && !w.Looked {
			return
		}
		if w.Own {
			n.violate(registered)
		}
		n.Claim.Revoked = unknown
		to(*n, i)
	})
	eachScanner(c, s, func(n *state, i int, sc *scanner) {
		if n.holds(workers+i) && sc.Lease == trusted && !sc.Own {
			n.Claim.Revoked = unknown
			to(*n, workers+i)
		}
	})
}

// lookUp is the first half of a minute check in the wrong order. In the right one
// the two halves are as good as one: an id is registered before its claim can be
// read, and a revocation is fenced by that id.
func lookUp(s state, to emit) {
	each(s, func(n *state, i int, w *worker) {
		if w.PC == idle && !w.Looked {
			w.Looked = true
			to(*n, i)
		}
	})
}

func (c *Config) inRegistry(w *worker) bool {
	if c.Rules.RegisterLate && w.PC == started {
		return false
	}
	return w.Own && w.PC != idle && w.PC != leaked
}

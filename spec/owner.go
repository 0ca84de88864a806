package spec

import "reveille/claims"

// each gives every worker that can act its turn.
func each(s state, f func(n *state, i int, w *worker)) {
	for i := range s.Workers {
		if n := s; !n.Workers[i].Stalled {
			f(&n, i, &n.Workers[i])
		}
	}
}

// mayAcquire: the session is ready; a mutant looks away from some of it.
func (c *Config) mayAcquire(s *state) bool {
	if s.Quarantine.Reason != inCirculation && !c.Rules.QuarantineRuns {
		return false
	}
	if s.Claim.Phase != noClaim && (!c.Rules.AcquireOverwrites || s.leaseLive()) {
		return false
	}
	return !s.head().empty()
}

// inserted writes the claim of a worker with its first step.
func (c *Config) inserted(s *state, i int) {
	if s.Executing {
		s.violate(noOverwrite)
	}
	if s.Quarantine.Reason != inCirculation {
		s.violate(noQuarantinedRun)
	}
	s.disown()
	s.begins(i, true)
	s.Claim = claim{Phase: running, Holder: uint8(i), Present: true}
	s.Executing, s.Ready = true, false
	c.promote(s, s.head())
}

// "The claim is registered in the worker under its execution id before the
// acquiring transaction begins" (I15). A worker begins where the session was
// announced, by its mark or, as the recovery lane does, for a due continuation.
func begin(c *Config, s state, to emit) {
	each(s, func(n *state, i int, w *worker) {
		announced := n.Ready || n.Promises[0].Kind != noPromise || c.Rules.AcquireOverwrites || c.Rules.QuarantineRuns
		if w.PC == idle && w.Lease == trusted && w.Late == landed && !w.Draining && announced && c.mayAcquire(n) {
			w.PC = acquiring
			to(*n, i)
		}
	})
}

// "It inserts when the session is ready and the holder's own lease is live, in
// the same statement, or does nothing" (I2).
func acquire(c *Config, s state, to emit) {
	each(s, func(n *state, i int, w *worker) {
		switch {
		case w.PC != acquiring:
			return
		case c.mayAcquire(n) && (w.Lease != expired || c.Rules.AcquireWithoutLease):
			c.inserted(n, i)
			w.PC, w.Own = started, true
		default:
			n.leave(i)
		}
		to(*n, i)
	})
}

// "A commit whose outcome it doesn't know is not an acquisition" (I3).
func acquireUnknown(c *Config, s state, to emit) {
	each(s, func(n *state, i int, w *worker) {
		if w.PC == acquiring && c.mayAcquire(n) && w.Lease != expired && n.fault() {
			c.inserted(n, i)
			w.PC, w.Own = unsure, true
			to(*n, i)
		}
	})
}

func acquireLate(_ *Config, s state, to emit) {
	each(s, func(n *state, i int, w *worker) {
		if w.PC == acquiring && n.fault() {
			w.PC, w.Late = unsure, ofHolder
			to(*n, i)
		}
	})
}

// fault spends one from the budget.
func (s *state) fault() bool {
	if s.Left.Faults == 0 {
		return false
	}
	s.Left.Faults--
	return true
}

// land: a statement that its process gave up commits after all.
func land(c *Config, s state, to emit) {
	for i := range s.Workers {
		n := s
		w := &n.Workers[i]
		late := w.Late
		if late == landed || !c.mayAcquire(&n) || late == ofHolder && w.Lease == expired && !c.Rules.AcquireWithoutLease {
			continue
		}
		c.inserted(&n, i)
		w.Late, w.Own = landed, w.PC == unsure && late == ofHolder
		if late == ofOldHolder {
			n.Claim.Present, n.Claim.OldLive = false, true
		}
		to(n, i)
	}
}

func landRefused(_ *Config, s state, to emit) {
	for i := range s.Workers {
		if n := s; n.Workers[i].Late != landed {
			n.Workers[i].Late = landed
			to(n, i)
		}
	}
}

// "It resolves that by a fenced delete of that execution id, which also rearms;
// where that transaction had started a step, the delete is a hand-over; where an
// interrupt came between, it settles interrupted" (I3).
func resolve(c *Config, s state, to emit) {
	each(s, func(n *state, i int, w *worker) {
		if w.PC != unsure {
			return
		}
		switch {
		case c.Rules.UnknownIsAcquired:
			w.PC = started
		case c.Rules.NoResolution:
			w.Own = false
			n.leave(i)
		default:
			c.settle(n, i, claims.OpHandOver)
			n.leave(i)
		}
		to(*n, i)
	})
}

// "Ownership (the local deadline and the phase last heard) is checked
// immediately before each external call" (I16).
func call(c *Config, s state, to emit) {
	each(s, func(n *state, i int, w *worker) {
		if w.PC != started || !w.mayCall() && !c.Rules.NoOwnershipCheck {
			return
		}
		if w.Lease == expired {
			n.violate(checkedCall)
		}
		w.PC = calling
		to(*n, i)
	})
}

func (w *worker) mayCall() bool { return w.Lease == trusted && w.Heard == 0 }

func skipCall(_ *Config, s state, to emit) {
	each(s, func(n *state, i int, w *worker) {
		if w.PC == started && !w.mayCall() {
			w.PC, w.Result = joined, notCalled
			to(*n, i)
		}
	})
}

// "The owner is told over core NATS with the execution id; the heartbeat's read
// is the fall-back"; and a run loop whose claim is missing is cancelled (I3).
func hear(_ *Config, s state, to emit) {
	each(s, func(n *state, i int, w *worker) {
		if w.PC < started || w.PC == leaked {
			return
		}
		heard := w.Heard
		switch {
		case !w.Own || n.Claim.Revoked != noCause:
			w.Heard |= heardStop
		case n.Claim.Phase == cancelling:
			w.Heard |= heardInterrupt
		}
		if w.Heard != heard {
			to(*n, i)
		}
	})
}

// handlerReturns: any answer at any time, whatever the handler was told (I13).
func handlerReturns(s state, as result, to emit) {
	each(s, func(n *state, i int, w *worker) {
		if w.PC != calling || w.Stuck {
			return
		}
		switch as {
		case goesOn, retried:
			// Bounds: a retry that waits is one at most, and its attempts are few.
			if n.Left.Turns == 0 || as == retried && (n.Claim.Step.Attempt+1 >= attempts || n.Promises[0].Kind != noPromise) {
				return
			}
			n.Left.Turns--
		}
		w.PC, w.Result = returned, as
		to(*n, i)
	})
}

// "A decline is the one settlement inside a step: phase cancelled and
// step.interrupted in one transaction" (I12).
func decline(c *Config, s state, to emit) {
	each(s, func(n *state, i int, w *worker) {
		if w.PC != calling || w.Stuck || w.Heard&heardDecline != 0 || n.Left.Turns == 0 {
			return
		}
		n.Left.Turns--
		switch effect := c.ask(n, i, claims.OpDecline); effect {
		case claims.ToCancelled:
			n.set(n.Claim.Step.Covers, over)
			n.endStep(asInterrupted, -1)
			w.Heard |= heardDecline
			if c.Rules.DeclineKeepsPhase {
				w.Heard &^= heardDecline
			} else {
				n.Claim.Phase = cancelled
			}
		default:
			w.learn(effect)
		}
		to(*n, i)
	})
}

// learn takes a refusal: what the durable phase is, or that the claim is gone.
func (w *worker) learn(effect claims.Effect) {
	switch effect {
	case claims.IsCancelled:
		w.Heard |= heardInterrupt
	case claims.Fenced:
		w.Heard |= heardStop
	}
}

// "Joined: the handler has returned and every finalizer has joined."
func join(_ *Config, s state, to emit) {
	each(s, func(n *state, i int, w *worker) {
		if w.PC == returned {
			w.PC, w.Freed = joined, false
			to(*n, i)
		}
	})
}

func closeStep(c *Config, s state, to emit) { c.closing(s, false, to) }

func closeStepUnknown(c *Config, s state, to emit) { c.closing(s, true, to) }

// closing closes the step and settles, by the durable phase (I13).
func (c *Config) closing(s state, lost bool, to emit) {
	each(s, func(n *state, i int, w *worker) {
		if w.PC != joined && (w.PC != returned || !c.Rules.SettleBeforeJoin) || lost && !n.fault() {
			return
		}
		again, done := c.close(n, i)
		switch {
		case !done: // it learned why not, and closes otherwise
			if lost {
				return
			}
		case lost:
			w.PC, w.Heard = doubt, w.Heard&heardStop
		case again:
			w.PC, w.Result = between, notCalled
		default:
			n.leave(i)
		}
		to(*n, i)
	})
}

// close is the one transaction of a close. again: the claim stays.
func (c *Config) close(n *state, i int) (again, done bool) {
	w := &n.Workers[i]
	switch {
	case w.Heard&(heardInterrupt|heardDecline) != 0 && c.Rules.TrustTheHandler && w.Result == failed:
		c.settle(n, i, claims.OpHandOver)
		return false, true
	case w.Heard&(heardInterrupt|heardDecline) != 0:
		c.settle(n, i, claims.OpSettleInterrupt)
		return false, true
	case w.Heard&heardStop != 0 && w.Result != ended && w.Result != goesOn:
		c.settle(n, i, claims.OpHandOver)
		return false, true
	}
	switch effect := c.ask(n, i, claims.OpClose); effect {
	case claims.IsCancelled:
		w.learn(effect)
		return false, false
	case claims.Fenced:
		return false, true
	}
	return c.finish(n, i), true
}

// finish: "the transaction that closes a step writes what comes next durably".
func (c *Config) finish(n *state, i int) (again bool) {
	w, step := &n.Workers[i], n.Claim.Step
	how := asEnded
	if w.Result == failed || w.Result == retried {
		how = asFailed
	} else {
		n.Takeovers = 0
	}
	n.endStep(how, i)
	switch w.Result {
	case goesOn:
		n.promise(continues, step)
	case retried:
		n.promise(retry, step)
	default: // "A final failure consumes only what its step covered."
		n.set(step.Covers, over)
	}
	if w.Result != retried && !n.head().empty() && !w.yields() {
		return true
	}
	n.remove()
	return false
}

// yields: "when shutting down it yields the session", and past its deadline it
// starts no step.
func (w *worker) yields() bool { return w.Draining || w.Lease != trusted }

// settle ends an execution as its owner: interrupted, declined or handed over.
func (c *Config) settle(n *state, i int, op claims.Op) {
	step := n.Claim.Step
	switch c.ask(n, i, op) {
	case claims.Remove: // declined: its step is closed already
		n.remove()
	case claims.CloseAndRemove:
		n.endStep(asInterrupted, i)
		n.set(step.Covers, over)
		if c.Rules.InterruptionDropsWakes {
			n.Wake = false
		}
		n.remove()
	case claims.Continue:
		if n.Claim.StepOpen {
			n.endStep(asFailed, i)
			if !c.Rules.HandOverPromisesNothing {
				n.promise(handover, step)
			}
		}
		n.remove()
	}
}

// askAgain: an operation in doubt looks for its token before it does anything.
func askAgain(_ *Config, s state, to emit) {
	each(s, func(n *state, i int, w *worker) {
		switch {
		case w.PC != doubt:
			return
		case !w.Own:
			n.leave(i)
		case n.Claim.StepOpen:
			w.PC = started
		default:
			w.PC = between
		}
		if w.PC != idle {
			w.Result = notCalled
		}
		to(*n, i)
	})
}

func startNext(c *Config, s state, to emit) { c.starting(s, false, to) }

func startNextUnknown(c *Config, s state, to emit) { c.starting(s, true, to) }

// starting: "promote the head and append step.started (one transaction)". With
// nothing due any more the claim is settled in it (I22).
func (c *Config) starting(s state, lost bool, to emit) {
	each(s, func(n *state, i int, w *worker) {
		if w.PC != between || lost && (w.yields() || !n.fault()) {
			return
		}
		if w.yields() {
			c.settle(n, i, claims.OpHandOver)
			n.leave(i)
			to(*n, i)
			return
		}
		effect, h := c.ask(n, i, claims.OpStart), n.head()
		switch {
		case effect != claims.Allow:
			n.leave(i)
		case h.empty():
			n.remove()
			n.leave(i)
		default:
			c.promote(n, h)
			w.PC = started
		}
		if lost {
			if w.PC == idle {
				return // the same as learning it
			}
			w.PC = doubt
		}
		to(*n, i)
	})
}

// "If they don't join within join timeout, after the kill, the worker gives the
// slot up as leaked and revokes the claim (never_joined)" (I10).
func leak(c *Config, s state, to emit) {
	each(s, func(n *state, i int, w *worker) {
		if w.PC != calling || !w.Stuck {
			return
		}
		if c.ask(n, i, claims.OpRevoke) == claims.MarkRevoked {
			n.Claim.Revoked = max(n.Claim.Revoked, neverJoined)
		}
		w.PC, w.Own, w.Heard = leaked, false, 0
		to(*n, i)
	})
}

func joinLate(_ *Config, s state, to emit) {
	each(s, func(n *state, i int, w *worker) {
		if w.PC == leaked {
			n.leave(i)
			to(*n, i)
		}
	})
}

package spec

// concerned: something of this process can still matter to the session. A fault
// of one that is not is the same as none.
func (s *state) concerned(process int) bool {
	return s.holds(process) || process < workers && (s.Workers[process].PC != idle || s.Workers[process].Late == ofHolder)
}

// crash: the process is gone with all that it ran (a parent-death guard kills
// its children), and comes back as a new holder. What it had sent may land.
func crash(_ *Config, s state, to emit) {
	for i := range s.Workers {
		n := s
		if !n.concerned(i) || !n.fault() {
			continue
		}
		flying := n.Workers[i].PC == acquiring
		n.newHolder(i)
		late := n.Workers[i].Late
		n.Workers[i] = worker{Late: late}
		to(n, i)
		if flying && late == landed {
			n.Workers[i].Late = ofOldHolder
			to(n, i)
		}
	}
	for i := range s.Scanners {
		n := s
		if n.concerned(workers+i) && n.fault() {
			n.newHolder(workers + i)
			to(n, workers+i)
		}
	}
}

// "At sent + lease − skew − stop margin it cancels its steps with cause
// ErrLeaseLost" (I7).
func passDeadline(_ *Config, s state, to emit) {
	each(s, func(n *state, i int, w *worker) {
		if w.Lease == trusted && n.concerned(i) && n.fault() {
			w.Lease = distrust
			if w.PC >= started && w.PC != leaked {
				w.Heard |= heardStop
			}
			to(*n, i)
		}
	})
}

// stall: the whole process stands still until after its lease has expired.
func stall(_ *Config, s state, to emit) {
	each(s, func(n *state, i int, w *worker) {
		if w.Lease != expired && n.concerned(i) && n.fault() {
			w.Stalled, w.Lease, w.Lapsed, w.Freed = true, expired, true, w.Freed || w.alive()
			to(*n, i)
		}
	})
	for i := range s.Scanners {
		n := s
		if c := &n.Scanners[i]; c.Own && c.Lease != expired && n.fault() {
			c.Lease, c.Lapsed = expired, true
			to(n, workers+i)
		}
	}
}

// resume: the deadline is asked before anything else, and kills the step. It may
// have ended just before.
func resume(_ *Config, s state, to emit) {
	for i := range s.Workers {
		n := s
		w := &n.Workers[i]
		if !w.Stalled {
			continue
		}
		w.Stalled = false
		if w.PC >= started && w.PC != leaked {
			w.Heard |= heardStop
		}
		switch {
		case w.PC == returned:
			w.PC, w.Freed = joined, false
		case w.PC == calling && !w.Stuck:
			w.PC, w.Freed, w.Result = joined, false, ended
			to(n, i)
			w.Result = failed
		}
		to(n, i)
	}
}

// expire: "at sent + lease − skew it kills them", so that nothing which heeds
// its context is alive when the lease ends. What does not heed it may overlap:
// the documentation says so.
func expire(c *Config, s state, to emit) {
	each(s, func(n *state, i int, w *worker) {
		heeded := !w.alive() || w.Stuck
		if w.Lease != distrust || !heeded && !c.Rules.NoDeadline {
			return
		}
		w.Lease, w.Lapsed, w.Freed = expired, true, w.Freed || w.alive() && w.Stuck
		to(*n, i)
	})
}

func expireOld(_ *Config, s state, to emit) {
	if s.Claim.Phase != noClaim && !s.Claim.Present && s.Claim.OldLive {
		s.Claim.OldLive = false
		to(s, -1)
	}
}

// "A process past its deadline or refused by a heartbeat never uses that holder
// id again", and goes on as a new holder (I4).
func reopen(_ *Config, s state, to emit) {
	each(s, func(n *state, i int, w *worker) {
		if w.Lease != trusted && (w.PC == idle || w.PC == leaked) {
			n.newHolder(i)
			to(*n, i)
		}
	})
	for i := range s.Scanners {
		if n := s; n.Scanners[i].Lease != trusted && !n.Scanners[i].Own {
			n.newHolder(workers + i)
			to(n, workers+i)
		}
	}
}

// lateHeartbeat: "a heartbeat never revives an expired lease".
func lateHeartbeat(c *Config, s state, to emit) {
	if !c.Rules.HeartbeatRevives {
		return
	}
	each(s, func(n *state, i int, w *worker) {
		if w.Lease == expired {
			w.Lease = trusted
			to(*n, i)
		}
	})
}

// hang: the handler ignores its context, or a finalizer never ends. One at a
// time: a system without a free slot runs nothing.
func hang(_ *Config, s state, to emit) {
	if s.Workers[0].Stuck || s.Workers[1].Stuck {
		return
	}
	each(s, func(n *state, i int, w *worker) {
		if w.PC == calling && n.fault() {
			w.Stuck = true
			to(*n, i)
		}
	})
}

// "SIGTERM: stop intake; let steps finish for grace; then cancel the rest with
// cause ErrShutdown and hand over."
func drain(_ *Config, s state, to emit) {
	each(s, func(n *state, i int, w *worker) {
		if w.PC != idle && !w.Draining && n.fault() {
			w.Draining = true
			if w.PC >= started && w.PC != leaked {
				w.Heard |= heardStop
				to(*n, i)
				w.Heard &^= heardStop
			}
			to(*n, i)
		}
	})
}

// exit: the lease row stays where a claim names it, and expires.
func exit(_ *Config, s state, to emit) {
	each(s, func(n *state, i int, w *worker) {
		if w.Draining && (w.PC == idle || w.PC == leaked) {
			n.newHolder(i)
			late := n.Workers[i].Late
			n.Workers[i] = worker{Late: late}
			to(*n, i)
		}
	})
}

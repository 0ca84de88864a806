package spec

// property names what a state breaks; 0 is nothing.
type property uint8

const (
	holdsAll property = iota
	oneHandler
	noOverwrite
	registered
	noRevival
	onlyOwners
	oneEpoch
	deadline
	cancellationStays
	joinedFirst
	oneEnd
	legal
	checkedCall
	wakesSurvive
	readyMark
	coveredOnce
	knownOutcome
	fencedQuarantine
	noQuarantinedRun
	reachesRest
)

// statements say each property in a sentence, under its invariants' numbers.
var statements = [...]string{
	oneHandler:        "I1: two handlers of the session are alive, and none of them is one whose lease ended over it or that an operator released",
	noOverwrite:       "I2: an execution began while another had neither ended nor been taken over",
	registered:        "I3, I15: a claim whose run loop goes on was revoked as unknown",
	noRevival:         "I4: a lease that was expired is live again under the same holder",
	onlyOwners:        "I5: a statement took effect for a process whose claim it is not",
	oneEpoch:          "I6: two executions carry the session's epoch",
	deadline:          "I7: a handler that heeds its context is alive after its process's lease ended",
	cancellationStays: "I9, I13, I26: a step that an interrupt hit ended otherwise than as interrupted",
	joinedFirst:       "I10: a step was closed as joined while its handler or a finalizer was alive",
	oneEnd:            "I11, I12: a step has not exactly one terminal event",
	legal:             "an owner's operation was illegal (ErrIllegal is a bug of the caller)",
	checkedCall:       "I16: a handler was called after its lease had ended",
	wakesSurvive:      "I21: a bare wake is neither pending, nor served by a later step, nor cancelled",
	readyMark:         "I22: the session's mark does not say whether something is pending",
	coveredOnce:       "I23: an input that a step covered is not in exactly one step, continuation or quarantine",
	knownOutcome:      "I26: a declined claim was quarantined, or an interrupted step recovered",
	fencedQuarantine:  "I28: a scanner ended a claim whose owner's lease was live",
	noQuarantinedRun:  "I30: an execution began in a quarantined session",
	reachesRest:       "I32: by steps of the system alone the session is never run on, cancelled or quarantined",
}

func (p property) String() string { return statements[p] }

// violate notes the first property that an action itself breaks.
func (s *state) violate(p property) {
	if s.Bad == holdsAll {
		s.Bad = p
	}
}

// check answers what a state breaks.
func (s *state) check() property {
	switch {
	case s.Bad != holdsAll:
		return s.Bad
	case s.overlap():
		return oneHandler
	case s.revived():
		return noRevival
	case s.sameEpoch():
		return oneEpoch
	case s.overdue():
		return deadline
	case s.Owed && !s.Wake && !s.Quarantine.Wake:
		return wakesSurvive
	case s.Ready != (s.Claim.Phase == noClaim && s.Quarantine.Reason == inCirculation && s.pending()):
		return readyMark
	case !s.eachOnce():
		return coveredOnce
	}
	return holdsAll
}

// overlap: of handlers that are alive all but one must be free to overlap.
func (s *state) overlap() bool {
	n := 0
	for _, w := range s.Workers {
		if w.alive() && !w.Freed {
			n++
		}
	}
	return n > 1
}

func (s *state) revived() bool {
	for _, w := range s.Workers {
		if w.Lapsed && w.Lease != expired {
			return true
		}
	}
	for _, c := range s.Scanners {
		if c.Lapsed && c.Lease != expired {
			return true
		}
	}
	return false
}

func (s *state) sameEpoch() bool {
	n := 0
	for _, w := range s.Workers {
		if w.Own || w.alive() {
			n += count(!w.Behind)
		}
	}
	for _, c := range s.Scanners {
		if c.Own {
			n += count(!c.Behind)
		}
	}
	return n > 1
}

func count(b bool) int {
	if b {
		return 1
	}
	return 0
}

func (s *state) overdue() bool {
	for _, w := range s.Workers {
		if w.alive() && w.Lapsed && !w.Stalled && !w.Stuck {
			return true
		}
	}
	return false
}

// eachOnce: nothing is lost, and nothing runs in two chains.
func (s *state) eachOnce() bool {
	var once, twice uint8
	add := func(mask uint8) { twice |= once & mask; once |= mask }
	if s.Claim.StepOpen {
		add(s.Claim.Step.Covers)
	}
	for _, p := range s.Promises {
		add(p.Chain.Covers)
	}
	if s.Quarantine.StepOpen {
		add(s.Quarantine.Step.Covers)
	}
	add(s.Quarantine.Promise.Chain.Covers)
	for i, in := range s.Inputs {
		if (in == covered) != (once>>i&1 == 1) {
			return false
		}
		if in == held && s.Quarantine.Reason == inCirculation {
			return false
		}
	}
	return twice == 0
}

// atRest is where I32 wants every session to get: run on, cancelled, or quarantined.
func (s *state) atRest() bool {
	return s.Quarantine.Reason != inCirculation || s.Claim.Phase == noClaim && !s.pending()
}

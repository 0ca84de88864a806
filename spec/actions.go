package spec

import "reveille/claims"

// Config is a model: its bounds, its budget, and the rules it breaks.
type Config struct {
	Inputs, Scanners int // at most 2 each
	Budget           Budget
	// UncertainInterrupts is --uncertain-cancel=interrupt (I26).
	UncertainInterrupts bool
	Rules               Rules
}

// emit takes a successor and the process that acts; -1: none of ours.
type emit func(s state, process int)

// who may cause an action: I32 promises what the system does by itself.
type who uint8

const (
	outside who = iota // callers, operators, and what breaks
	system
)

type action struct {
	name string
	who  who
	next func(c *Config, s state, to emit)
}

// actions are all there is. Each is one transaction, or one thing that a
// process does between two: what happens to it in between is another action.
var actions = []action{
	{"admit", outside, admit},
	{"wake with an input", outside, wake},
	{"wake without an input", outside, bareWake},
	{"interrupt", outside, interrupt},
	{"interrupt with discard", outside, interruptDiscard},
	{"interrupt of an execution", outside, interruptLineage},
	{"release as retry", outside, releaseRetry},
	{"release as interrupted", outside, releaseInterrupted},
	{"release as discard", outside, releaseDiscard},

	{"registers and begins to acquire", system, begin},
	{"acquires", system, acquire},
	{"acquires, and does not learn it", outside, acquireUnknown},
	{"does not learn whether it acquires", outside, acquireLate},
	{"its late acquisition lands", system, land},
	{"its late acquisition is refused", system, landRefused},
	{"resolves an acquisition in doubt", system, resolve},
	{"calls the handler", system, call},
	{"does not call the handler", system, skipCall},
	{"hears of its claim", system, hear},
	{"handler returns: ended", system, func(c *Config, s state, to emit) { handlerReturns(s, ended, to) }},
	{"handler returns: failed", system, func(c *Config, s state, to emit) { handlerReturns(s, failed, to) }},
	{"handler returns: goes on", outside, func(c *Config, s state, to emit) { handlerReturns(s, goesOn, to) }},
	{"handler returns: to be retried", outside, func(c *Config, s state, to emit) { handlerReturns(s, retried, to) }},
	{"declines", outside, decline},
	{"joins", system, join},
	{"closes its step", system, closeStep},
	{"closes its step, and the answer is lost", outside, closeStepUnknown},
	{"asks again and finds its token", system, askAgain},
	{"starts the next step", system, startNext},
	{"starts the next step, and the answer is lost", outside, startNextUnknown},
	{"gives up what never joins", system, leak},
	{"what never joined does join", system, joinLate},
	{"continuation becomes due", system, due},

	{"crashes and comes back", outside, crash},
	{"is past its deadline", outside, passDeadline},
	{"stalls past its lease", outside, stall},
	{"goes on after a stall", system, resume},
	{"lease expires", system, expire},
	{"lease of an old holder expires", system, expireOld},
	{"goes on as a new holder", system, reopen},
	{"handler will never join", outside, hang},
	{"is told to shut down", outside, drain},
	{"exits", system, exit},
	{"heartbeat after its lease expired", system, lateHeartbeat},

	{"takes over", system, takeOver},
	{"converts", system, convert},
	{"ends an expired claim", system, endExpired},
	{"forgets a claim it took over", outside, forget},
	{"compares its claims with its registry", system, minuteCheck},
}

// view is the claim as a process sees it; process -1 owns nothing.
func (c *Config) view(s *state, process int) view {
	v := view{
		phase: s.Claim.Phase, lease: s.leaseLive(), revoked: s.Claim.Revoked,
		stepOpen: s.Claim.StepOpen, scanner: s.Claim.Scanner,
	}
	if process >= 0 && process < workers {
		v.own = s.Workers[process].Own || c.Rules.NoExecutionFence
	}
	return v
}

// ask answers an owner's operation, and notes one that takes effect for a
// process whose claim it is not.
func (c *Config) ask(s *state, w int, op claims.Op) claims.Effect {
	if s.Claim.Phase == noClaim {
		return claims.Fenced
	}
	effect := c.Rules.decide(c.view(s, w), op)
	switch {
	case effect == claims.Illegal:
		s.violate(legal)
	case effect.Err() == nil && s.Workers[w].Behind:
		s.violate(onlyOwners)
	}
	return effect
}

// begins gives the session a new execution with one epoch more: whoever had one
// before is behind (I6).
func (s *state) begins(process int, raise bool) {
	for i := range s.Workers {
		w := &s.Workers[i]
		switch {
		case i == process:
			w.Behind = false
		case raise && w.PC != idle:
			w.Behind = true
		}
	}
	for i := range s.Scanners {
		c := &s.Scanners[i]
		switch {
		case workers+i == process:
			c.Behind = false
		case raise && c.Own:
			c.Behind = true
		}
	}
}

// disown: nobody's execution id matches any more.
func (s *state) disown() {
	for i := range s.Workers {
		s.Workers[i].Own = false
	}
	for i := range s.Scanners {
		s.Scanners[i].Own = false
	}
}

// promote makes the head into the open step.
func (c *Config) promote(s *state, h head) {
	step := chain{Covers: h.inputs}
	if h.promise >= 0 {
		step = s.Promises[h.promise].Chain
		if !c.Rules.PromiseNotConsumed {
			s.consume(h.promise)
		}
	}
	s.set(h.inputs, covered)
	s.Wake, s.Owed = false, false
	s.Claim.StepOpen, s.Claim.Step = true, step
	if s.Open {
		s.violate(oneEnd)
	}
	s.Open = true
}

// How a step ends.
type ending uint8

const (
	asEnded ending = iota
	asFailed
	asInterrupted
)

// endStep appends the one terminal event of the open step. owner is the worker
// that says "joined"; -1: it is closed without one.
func (s *state) endStep(how ending, owner int) {
	switch {
	case !s.Open:
		s.violate(oneEnd)
	case s.Stop && how != asInterrupted:
		s.violate(cancellationStays)
	case owner >= 0 && s.Workers[owner].alive():
		s.violate(joinedFirst)
	}
	s.Open, s.Stop = false, false
	s.Claim.StepOpen, s.Claim.Step = false, chain{}
}

// remove is the one removal of a claim (I22): the claim goes and what is
// pending is rearmed, together.
func (s *state) remove() {
	if s.Open && !s.Quarantine.StepOpen {
		s.violate(oneEnd)
	}
	s.Claim, s.Executing = claim{}, false
	s.disown()
	s.rearm()
}

// rearm computes readiness from what is pending.
func (s *state) rearm() {
	s.Ready = s.Claim.Phase == noClaim && s.Quarantine.Reason == inCirculation && s.pending()
}

// cancelHead cancels what would start next with all that its promotion would
// have covered or served. Where nothing is due that is what waits in its
// backoff: it would run after its caller had stopped it.
func (s *state) cancelHead() {
	h := s.head()
	if h.empty() && s.Promises[0].Kind != noPromise {
		h.promise = 0
	}
	if h.promise >= 0 {
		s.set(s.consume(h.promise).Chain.Covers, over)
	}
	s.set(h.inputs, over)
	s.Wake, s.Owed = false, false
}

// arm is what every wake does to what was admitted.
func (s *state) arm() {
	for i := range s.Inputs {
		if s.Inputs[i] == unarmed {
			s.Inputs[i] = armed
		}
	}
}

// "admit records the input, unarmed."
func admit(c *Config, s state, to emit) {
	for i := range c.Inputs {
		if s.Inputs[i] == absent {
			n := s
			n.Inputs[i] = unarmed
			to(n, -1)
		}
	}
}

// "wake records its input if it has one, arms every admitted input of the session."
func wake(c *Config, s state, to emit) {
	for i := range c.Inputs {
		if s.Inputs[i] == absent {
			n := s
			n.Inputs[i] = armed
			n.arm()
			n.rearm()
			to(n, -1)
		}
	}
}

// "raises wake_seq if it has no input. A wake without an input buys at least one
// step that starts after it."
func bareWake(_ *Config, s state, to emit) {
	if s.Left.Wakes == 0 {
		return
	}
	s.Left.Wakes--
	s.arm()
	s.Wake, s.Owed = true, true
	s.rearm()
	to(s, -1)
}

// "interrupt hits exactly one thing: the open step; else the head."
func interrupt(c *Config, s state, to emit) {
	if s.Left.Interrupts == 0 {
		return
	}
	s.Left.Interrupts--
	c.interruptOne(&s)
	s.rearm()
	to(s, -1)
}

func (c *Config) interruptOne(s *state) {
	if s.Quarantine.Reason != inCirculation {
		return // I30: it changes nothing
	}
	if s.Claim.Phase == noClaim {
		s.cancelHead()
		return
	}
	if s.Claim.Phase == running && s.Claim.StepOpen {
		s.Stop = true
	}
	switch c.Rules.decide(c.view(s, -1), claims.OpInterrupt) {
	case claims.CancelHead:
		s.cancelHead()
	case claims.ToCancelling:
		s.Claim.Phase = cancelling
	case claims.MarkRevoked:
		s.Claim.Revoked = max(s.Claim.Revoked, interrupted)
	case claims.RaiseVerdict:
		s.Claim.Verdict = max(s.Claim.Verdict, interrupted)
	}
}

// "With pending: discard all pending inputs and the continuation go too"; of a
// quarantined session only the inputs (I30).
func interruptDiscard(c *Config, s state, to emit) {
	if s.Left.Interrupts == 0 {
		return
	}
	s.Left.Interrupts--
	c.interruptOne(&s)
	s.discard(s.Quarantine.Reason == inCirculation)
	s.rearm()
	to(s, -1)
}

func (s *state) discard(promised bool) {
	for i := range s.Inputs {
		if s.Inputs[i] == unarmed || s.Inputs[i] == armed {
			s.Inputs[i] = over
		}
	}
	for promised && s.Promises[0].Kind != noPromise {
		s.set(s.consume(0).Chain.Covers, over)
	}
}

// "With execution it hits only that execution's lineage, never an armed input":
// here the lineage of a continuation while no step of it is open.
func interruptLineage(_ *Config, s state, to emit) {
	if s.Left.Interrupts == 0 || s.Quarantine.Reason != inCirculation {
		return
	}
	s.Left.Interrupts--
	for i, p := range s.Promises {
		if p.Kind != noPromise {
			n := s
			n.set(n.consume(i).Chain.Covers, over)
			n.rearm()
			to(n, -1)
		}
	}
}

// due: a retry's backoff is over.
func due(_ *Config, s state, to emit) {
	for i, p := range s.Promises {
		if p.Waiting {
			n := s
			n.Promises[i].Waiting = false
			to(n, -1)
		}
	}
}

// lift takes a session out of quarantine, by an operator (I30). Whatever never
// joined is his from now on: he decided without a join.
func (s *state) lift() (q quarantine, ok bool) {
	if s.Left.Releases == 0 || s.Quarantine.Reason == inCirculation {
		return quarantine{}, false
	}
	s.Left.Releases--
	q, s.Quarantine, s.Takeovers = s.Quarantine, quarantine{}, 0
	for i := range s.Workers {
		if w := &s.Workers[i]; w.alive() {
			w.Freed = true
		}
	}
	return q, true
}

// "retry restores them": the open step as a continuation, the head as what it was.
func releaseRetry(c *Config, s state, to emit) {
	q, ok := s.lift()
	if !ok {
		return
	}
	if q.StepOpen {
		if !c.Rules.ReleaseForgetsStep {
			s.Stop = false // an operator's decision is over the interrupt's
			s.endStep(asFailed, -1)
		}
		s.promise(release, q.Step)
	}
	if q.Promise.Kind != noPromise {
		s.promise(release, q.Promise.Chain)
	}
	for i := range s.Inputs {
		if s.Inputs[i] == held {
			s.Inputs[i] = armed
		}
	}
	s.Wake = s.Wake || q.Wake
	s.rearm()
	to(s, -1)
}

// "interrupted and discard cancel them."
func (s *state) abandon(q quarantine) {
	if q.StepOpen {
		s.endStep(asInterrupted, -1)
		s.set(q.Step.Covers, over)
	}
	s.set(q.Promise.Chain.Covers, over)
	for i := range s.Inputs {
		if s.Inputs[i] == held {
			s.Inputs[i] = over
		}
	}
	s.Owed = s.Wake
}

// "interrupted (go on with pending work)"
func releaseInterrupted(_ *Config, s state, to emit) {
	if q, ok := s.lift(); ok {
		s.abandon(q)
		s.rearm()
		to(s, -1)
	}
}

// "discard (cancel pending work)"
func releaseDiscard(_ *Config, s state, to emit) {
	if q, ok := s.lift(); ok {
		s.abandon(q)
		s.discard(true)
		s.Wake, s.Owed = false, false
		s.rearm()
		to(s, -1)
	}
}

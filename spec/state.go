package spec

// The bounds of the model. They are constants of the state's shape; how much
// may happen within it is a Budget.
const (
	workers    = 2
	scanners   = 2
	processes  = workers + scanners
	inputs     = 2
	promises   = 2 // continuations at once: one that waits in its backoff, one besides
	recoveries = 1 // --max-recoveries
	takeovers  = 2 // --max-takeovers
	attempts   = 2 // --max-attempts
)

// steers are the inputs with delivery steer; the others are queued.
const steers = 1 << 1

// phase of a claim; noClaim is that there is none.
type phase uint8

const (
	noClaim phase = iota
	running
	cancelling
	cancelled
)

// cause is a mark or a verdict, lowest first.
type cause uint8

const (
	noCause cause = iota
	unknown
	interrupted
	neverJoined
)

// pc is where a worker's run loop is.
type pc uint8

const (
	idle      pc = iota
	acquiring    // registered, the acquiring transaction is under way
	unsure       // its outcome is unknown (I3)
	started      // a step is durable, the handler not called
	calling      // the handler is alive
	returned     // it returned, its finalizers are alive
	joined       // all of the step is over
	between      // the step is closed, more is due
	doubt        // a COMMIT of the owner landed, and the answer was lost
	leaked       // given up; whatever never joined is alive
)

// result is what a handler came back with.
type result uint8

const (
	notCalled result = iota
	ended
	goesOn // ended, and asks for a continuation
	failed
	retried // failed, and may be tried again
)

// lease is a lease by both clocks.
type lease uint8

const (
	trusted  lease = iota // live, and its process believes it
	distrust              // live, past the process's own deadline (I7)
	expired               // by the database's clock
)

// What a run loop has heard.
const (
	heardInterrupt = 1 << iota
	heardDecline
	heardStop // the lease is lost, the claim is lost, or the worker shuts down
)

// flight is an acquisition whose process has given it up, and that may land yet.
type flight uint8

const (
	landed flight = iota // none is under way
	ofHolder
	ofOldHolder
)

// worker is a process with one slot. One that goes on as a new holder while old
// run loops are left is two workers here.
type worker struct {
	PC       pc
	Result   result
	Heard    uint8
	Lease    lease
	Late     flight
	Own      bool // its execution id is the claim's
	Behind   bool // ghost: its epoch is not the session's any more
	Lapsed   bool // ghost: the lease of this holder was expired once
	Stalled  bool // the process does nothing until it is resumed
	Stuck    bool // something of the step never joins
	Freed    bool // ghost: its handler may overlap: the lease ended over it, or an operator released
	Draining bool
	Looked   bool // of a mutant's minute check: nothing was registered
}

// alive: the handler, or a finalizer of it.
func (w worker) alive() bool { return w.PC == calling || w.PC == returned || w.PC == leaked }

// scanner is a process that takes claims over.
type scanner struct {
	Lease          lease
	Own            bool // its recovery execution id is the claim's
	Behind, Lapsed bool // ghosts
}

// chain is what a step and its continuations carry along.
type chain struct {
	Covers     uint8 // inputs
	Recoveries uint8
	Attempt    uint8
}

// kind of a continuation; noPromise is that there is none.
type kind uint8

const (
	noPromise kind = iota
	continues
	retry
	recovery
	handover
	release
)

// promise is a continuation.
type promise struct {
	Kind    kind
	Waiting bool // for its not-before
	Chain   chain
}

// claim is the session's claim.
type claim struct {
	Phase    phase
	Scanner  bool
	Holder   uint8 // a process
	Present  bool  // the holder id is the one that process has now
	OldLive  bool  // where it is not: whether that lease is live
	Revoked  cause
	Verdict  cause
	StepOpen bool
	Step     chain // of the open step
}

// input states. An input that is covered is in the chain of one step, promise or quarantine.
type input uint8

const (
	absent  input = iota
	unarmed       // admitted
	armed
	covered
	held // in a quarantined head
	over // served, failed for good, or cancelled
)

// reason of a quarantine; inCirculation is that there is none.
type reason uint8

const (
	inCirculation reason = iota
	outcomeUnknown
	joinedNever
	exhausted // attempts_exhausted or no_progress
)

// quarantine is the row into which claim, continuation and head are moved.
type quarantine struct {
	Reason   reason
	StepOpen bool
	Step     chain
	Promise  promise
	Wake     bool
}

// Budget is how much may still happen from outside. The faults are crashes,
// leases lost, stalls, unknown commits, hung handlers and shutdowns together.
type Budget struct {
	Faults, Interrupts, Wakes, Turns, Releases uint8
}

// state is one session, all processes, and the ghosts: what the properties
// need to know and no process reads.
type state struct {
	Workers    [workers]worker
	Scanners   [scanners]scanner
	Claim      claim
	Promises   [promises]promise // oldest first
	Inputs     [inputs]input
	Wake       bool // unserved bare wakes
	Ready      bool // the session's mark, by which it is announced
	Takeovers  uint8
	Quarantine quarantine
	Left       Budget

	Open      bool // ghost: step.started without its end
	Stop      bool // ghost: an interrupt hit that step
	Owed      bool // ghost: a bare wake bought a step that has not started
	Executing bool // ghost: execution.started without execution.ended
	Bad       property
}

// live: the lease of the claim's holder, by the database's clock.
func (s *state) leaseLive() bool {
	switch h := s.Claim.Holder; {
	case !s.Claim.Present:
		return s.Claim.OldLive
	case h < workers:
		return s.Workers[h].Lease != expired
	default:
		return s.Scanners[h-workers].Lease != expired
	}
}

// holds: the claim names this process's present holder id.
func (s *state) holds(process int) bool {
	return s.Claim.Phase != noClaim && s.Claim.Present && int(s.Claim.Holder) == process
}

// newHolder: the process goes on under a new holder id; what the old one holds
// lives until its lease expires.
func (s *state) newHolder(process int) {
	if s.holds(process) {
		live := s.leaseLive()
		s.Claim.Present, s.Claim.OldLive = false, live
	}
	if process >= workers {
		s.Scanners[process-workers] = scanner{}
		return
	}
	w := &s.Workers[process]
	if w.Late == ofHolder {
		w.Late = ofOldHolder
	}
	w.Lease, w.Lapsed = trusted, false
}

// leave: the run loop is over and unregistered.
func (s *state) leave(w int) {
	old := s.Workers[w]
	s.Workers[w] = worker{Lease: old.Lease, Late: old.Late, Lapsed: old.Lapsed, Draining: old.Draining}
}

// head is what would start next.
type head struct {
	promise int // -1: none
	inputs  uint8
	wake    bool
}

func (h head) empty() bool { return h.promise < 0 && h.inputs == 0 && !h.wake }

func (s *state) head() head {
	h := head{promise: -1, wake: s.Wake}
	for i, p := range s.Promises {
		if p.Kind != noPromise && !p.Waiting {
			h.promise = i
			return h
		}
	}
	queued := false
	for i, in := range s.Inputs {
		steer := steers>>i&1 == 1
		if in == armed && (steer || !queued) {
			h.inputs |= 1 << i
			queued = queued || !steer
		}
	}
	return h
}

// set puts the inputs of a mask into a state.
func (s *state) set(mask uint8, to input) {
	for i := range s.Inputs {
		if mask>>i&1 == 1 {
			s.Inputs[i] = to
		}
	}
}

// consume takes a continuation out.
func (s *state) consume(i int) promise {
	p := s.Promises[i]
	copy(s.Promises[i:], s.Promises[i+1:])
	s.Promises[promises-1] = promise{}
	return p
}

// promise writes the continuation that closing a step leaves.
func (s *state) promise(k kind, c chain) {
	switch k {
	case continues: // its step ended: its inputs were served
		s.set(c.Covers, over)
		c = chain{}
	case retry:
		c.Attempt++
	case recovery:
		c.Recoveries++
	case release:
		c.Attempt, c.Recoveries = 0, 0
	}
	for i := range s.Promises {
		if s.Promises[i].Kind == noPromise {
			s.Promises[i] = promise{Kind: k, Waiting: k == retry, Chain: c}
			return
		}
	}
	panic("spec: more continuations than the bounds have room for")
}

// pending: there is something to run, now or later.
func (s *state) pending() bool { return !s.head().empty() || s.Promises[0].Kind != noPromise }

// canonical is the one of the states that differ only in which worker and which
// scanner is which.
func (s state) canonical() state {
	if s.Workers[1].before(s.Workers[0]) || s.Workers[0] == s.Workers[1] && s.Claim.Holder == 1 {
		s.Workers[0], s.Workers[1] = s.Workers[1], s.Workers[0]
		if s.Claim.Phase != noClaim && s.Claim.Holder < workers {
			s.Claim.Holder = 1 - s.Claim.Holder
		}
	}
	if s.Scanners[0].before(s.Scanners[1]) || s.Scanners[0] == s.Scanners[1] && s.Claim.Holder == workers+1 {
		s.Scanners[0], s.Scanners[1] = s.Scanners[1], s.Scanners[0]
		if s.Claim.Phase != noClaim && s.Claim.Holder >= workers {
			s.Claim.Holder = 2*workers + 1 - s.Claim.Holder
		}
	}
	return s
}

func (w worker) key() uint64 {
	k := uint64(w.PC)<<4 | uint64(w.Result)
	k = k<<4 | uint64(w.Heard)
	k = k<<4 | uint64(w.Lease)
	k = k<<4 | uint64(w.Late)
	for _, b := range [...]bool{w.Own, w.Behind, w.Lapsed, w.Stalled, w.Stuck, w.Freed, w.Draining, w.Looked} {
		k <<= 1
		if b {
			k |= 1
		}
	}
	return k
}

func (w worker) before(o worker) bool { return w.key() < o.key() }

func (c scanner) key() uint64 {
	k := uint64(c.Lease)
	for _, b := range [...]bool{c.Own, c.Behind, c.Lapsed} {
		k <<= 1
		if b {
			k |= 1
		}
	}
	return k
}

func (c scanner) before(o scanner) bool { return c.key() < o.key() }

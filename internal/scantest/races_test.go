package scantest

import (
	"errors"
	"testing"
	"time"

	"reveille/claims"
	"reveille/internal/faultproxy"
	"reveille/recovery"
)

// S6: the three gates between a takeover and the end of what was taken over, and
// what may come to a scanner there. Validation and conversion are one transaction:
// the gate between them is behind what it has read and before what it writes, and
// the transaction is held there on its way to the server.
const (
	gateValidation = "between takeover and validation"
	gateConversion = "between validation and conversion"
	gateQuarantine = "between the conversion's failure and the quarantine"
)

// firstWrite is the first statement of a conversion that writes, after those that
// tell the time and read the session with its claim.
const firstWrite = 3

// race is a scanner at a gate, with a claim that it took over.
type race struct {
	*env
	own     claims.HolderID // the scanner's lease
	claimed claims.ExecutionID
	results chan recovery.Result
	open    func() // lets the scanner go on
}

// raceAt brings a scanner to a gate. ttl is how long its lease lives from just
// before the conversion whose transaction is held.
func raceAt(t *testing.T, gate string, ttl time.Duration) *race {
	t.Helper()
	e := newEnv(t)
	worker := e.lease("worker")
	e.wake("s", worker)
	e.expire(worker)
	if gate == gateQuarantine {
		e.exec("ALTER TABLE continuations ADD CONSTRAINT refuse CHECK (session_id <> 's')")
	}
	proxy, err := faultproxy.New(e.url, 0)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(proxy.Close)
	store := open(t, proxy.URL())
	reached, opened := make(chan struct{}), make(chan struct{})
	var held *faultproxy.Gate
	r := &race{env: e, results: make(chan recovery.Result, 1)}
	at := map[string]operation{gateValidation: converting, gateConversion: converting, gateQuarantine: quarantining}[gate]
	parts := e.gated(store, once(at, func() {
		if gate == gateConversion {
			e.exec("UPDATE leases SET expires_at = clock_timestamp() + $2 * INTERVAL '1 microsecond' WHERE holder = $1::UUID", string(r.own), ttl.Microseconds())
			held = proxy.Hold(firstWrite)
			close(opened)
		}
		close(reached)
		<-opened
	}))
	r.own, _ = parts.Holder()
	r.open = func() { close(opened) }
	s := e.scanner(parts, recovery.Options{})
	go func() { r.results <- s.Pass(t.Context()).Lanes[recovery.LaneClaims] }()
	wait(e, "the scanner reaches the gate", reached)
	if gate == gateConversion {
		wait(e, "its transaction reaches the gate", held.Reached())
		r.open = held.Release
	}
	t.Cleanup(func() { // also where the test has failed before
		r.open()
		<-r.results
	})
	r.claimed = claims.ExecutionID(e.row("SELECT execution_id::TEXT FROM claims").(string))
	return r
}

// goOn lets the scanner go on and waits for the end of its pass.
func (r *race) goOn() recovery.Result {
	r.Helper()
	r.open()
	r.open = func() {}
	result := wait(r.env, "the pass ends", r.results)
	r.results <- result
	return result
}

// runsOut waits until the scanner's lease is over by the database's clock.
func (r *race) runsOut(gate string) {
	r.Helper()
	if gate != gateConversion {
		r.expire(r.own)
		return
	}
	r.row("SELECT pg_sleep_until(expires_at)::TEXT FROM leases WHERE holder = $1::UUID", string(r.own))
}

// lost checks that a pass did nothing and counts nothing.
func (r *race) lost(got recovery.Result) {
	r.Helper()
	if got.Seen != 1 || got.Left != 1 || got.Done+got.Quarantined+got.Failed != 0 {
		r.Errorf("the loser: %+v", got)
	}
}

// shortly is a lease that outlives the beginning of a transaction, and is soon over.
const shortly = 6 * time.Second

// S6: the recovery lease expires at the gate, and nobody has come by yet. The
// claim is as it was, and the next scanner recovers it.
func TestS6I28LeaseExpiresAtTheGate(t *testing.T) {
	for _, gate := range []string{gateValidation, gateConversion, gateQuarantine} {
		t.Run(gate, func(t *testing.T) {
			r := raceAt(t, gate, shortly)
			before := r.rows()
			r.runsOut(gate)
			r.lost(r.goOn())
			r.unchanged(before)
			if gate == gateQuarantine {
				r.exec("ALTER TABLE continuations DROP CONSTRAINT refuse")
			}
			if next := r.pass(recovery.Options{}); next.Done != 1 {
				t.Errorf("the next scanner: %+v", next)
			}
			r.tail("s", `step.failed {"code":"worker_lost","message":"the worker was lost","retryable":true}`, `execution.ended {"outcome":"recovered"}`)
			if n := r.count("s", claims.ExecutionEnded, ""); n != 1 {
				t.Errorf("it ended %d times", n)
			}
		})
	}
}

// S6: another scanner takes over at the gate. Its row is untouched, and its
// conversion is the only one.
func TestS6I28OvertakenAtTheGate(t *testing.T) {
	for _, gate := range []string{gateValidation, gateConversion, gateQuarantine} {
		t.Run(gate, func(t *testing.T) {
			r := raceAt(t, gate, shortly)
			r.runsOut(gate)
			type takeover struct {
				claim claims.Claim
				err   error
			}
			winner := r.lease("scanner")
			took := make(chan takeover, 1)
			go func() {
				found, err := r.store.ExpiredClaims(t.Context(), 1)
				if err != nil || len(found) != 1 {
					took <- takeover{err: errors.Join(err, errors.New("the claim is not found expired"))}
					return
				}
				claim, err := r.store.TakeOver(t.Context(), found[0], winner, acquisition(winner).Execution)
				took <- takeover{claim, err}
			}()
			var lost recovery.Result
			if gate == gateConversion { // the loser has the session's row: the winner waits for it
				r.blocked("the winner waits for the row")
				lost = r.goOn()
			}
			won := wait(r.env, "the winner takes over", took)
			if won.err != nil {
				t.Fatal(won.err)
			}
			before := r.rows()
			if gate != gateConversion {
				lost = r.goOn()
			}
			r.lost(lost)
			r.unchanged(before)
			if gate == gateQuarantine {
				r.exec("ALTER TABLE continuations DROP CONSTRAINT refuse")
			}
			settled, err := r.store.Convert(t.Context(), won.claim, claims.Limits{Recoveries: 3, Takeovers: 10}, token())
			if err != nil || settled.Outcome != claims.OutcomeRecovered || won.claim.Epoch != 3 {
				t.Errorf("the winner: %+v, %v, epoch %d", settled, err, won.claim.Epoch)
			}
			if n := r.count("s", claims.ExecutionEnded, ""); n != 1 || r.reason("s") != nil {
				t.Errorf("it ended %d times, quarantined as %v", n, r.reason("s"))
			}
		})
	}
}

// S6: an interrupt arrives at the gate. Where the scanner has not converted yet,
// it closes the step as interrupted and promises nothing, also where a conversion
// that promised was refused. Where it is in the middle of that, the interrupt
// waits for it and cancels the promise. Nothing runs either way.
func TestS6I28InterruptAtTheGate(t *testing.T) {
	for _, gate := range []string{gateValidation, gateConversion, gateQuarantine} {
		t.Run(gate, func(t *testing.T) {
			r := raceAt(t, gate, time.Hour)
			interrupted := make(chan error, 1)
			cmd := r.command(claims.Interrupt, "s")
			go func() {
				_, err := r.store.Apply(t.Context(), cmd, nil)
				interrupted <- err
			}()
			var got recovery.Result
			if gate == gateConversion {
				r.blocked("the interrupt waits for the row")
				got = r.goOn()
			}
			if err := wait(r.env, "the interrupt is applied", interrupted); err != nil {
				t.Fatal(err)
			}
			if gate != gateConversion {
				got = r.goOn()
			}
			if got.Done != 1 || got.Quarantined+got.Left+got.Failed != 0 || r.reason("s") != nil {
				t.Errorf("%+v, quarantined as %v", got, r.reason("s"))
			}
			if gate == gateConversion {
				r.tail("s", `execution.ended {"outcome":"recovered"}`,
					`continuation.cancelled {"reason":"stop","step":"`+r.steps("s")+`","kind":"recovery"}`)
			} else {
				r.tail("s", `step.interrupted {"reason":"stop","joined":false}`, `execution.ended {"outcome":"interrupted"}`)
			}
			if r.number("continuations", "s") != int64(0) || r.number("claims", "s") != int64(0) {
				t.Error("something is left to run")
			}
			if _, err := r.store.Acquire(t.Context(), "s", acquisition(r.lease("worker"))); !errors.Is(err, claims.ErrNotReady) {
				t.Errorf("acquiring it: %v", err)
			}
		})
	}
}

// steps is the id of the last step that was started.
func (e *env) steps(session claims.SessionID) (id string) {
	e.Helper()
	for _, r := range e.events(session) {
		if r.Type == claims.StepStartedEvent {
			id = string(r.Step)
		}
	}
	return id
}

// S6: a claim that is not running is not taken over: its end is one transaction
// that judges it, under its expiry. What comes to it before that, or in its
// middle, wins.
func TestS6I28EndOfAClaimThatWasNotTakenOver(t *testing.T) {
	t.Run("another scanner", func(t *testing.T) {
		e := newEnv(t)
		worker := e.lease("worker")
		e.wake("s", worker)
		e.interrupt("s")
		e.expire(worker)
		var before string
		parts := e.gated(e.store, once(ending, func() {
			if r := e.pass(recovery.Options{}); r.Quarantined != 1 {
				t.Errorf("the other scanner: %+v", r)
			}
			before = e.rows()
		}))
		if r := e.scanner(parts, recovery.Options{}).Pass(t.Context()).Lanes[recovery.LaneClaims]; r.Left != 1 || r.Done+r.Quarantined+r.Failed != 0 {
			t.Errorf("the loser: %+v", r)
		}
		e.unchanged(before)
	})
	t.Run("another scanner, in the middle", func(t *testing.T) {
		e := newEnv(t)
		worker := e.lease("worker")
		e.wake("s", worker)
		e.interrupt("s")
		e.expire(worker)
		proxy, err := faultproxy.New(e.url, 0)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(proxy.Close)
		// The second has found and touched the claim before the first does.
		reached, opened := make(chan struct{}), make(chan struct{})
		second := make(chan recovery.Result, 1)
		other := e.scanner(e.gated(e.store, once(ending, func() {
			close(reached)
			<-opened
		})), recovery.Options{})
		go func() { second <- other.Pass(t.Context()).Lanes[recovery.LaneClaims] }()
		wait(e, "the second scanner reaches the gate", reached)
		var held *faultproxy.Gate
		armed := make(chan struct{})
		first := make(chan recovery.Result, 1)
		s := e.scanner(e.gated(open(t, proxy.URL()), once(ending, func() {
			held = proxy.Hold(faultproxy.Commit)
			close(armed)
		})), recovery.Options{})
		go func() { first <- s.Pass(t.Context()).Lanes[recovery.LaneClaims] }()
		wait(e, "the first scanner begins", armed)
		wait(e, "it is about to commit", held.Reached())
		close(opened)
		e.blocked("the second scanner waits for the row")
		held.Release()
		a, b := wait(e, "the first ends", first), wait(e, "the second ends", second)
		if a.Quarantined != 1 || b.Left != 1 || b.Quarantined+b.Done+b.Failed != 0 {
			t.Errorf("first %+v, second %+v", a, b)
		}
		e.checkQuarantined("s", "claims", claims.ReasonOutcomeUnknown)
	})
	t.Run("an interrupt", func(t *testing.T) { // it is on its way out already: no change
		e := newEnv(t)
		worker := e.lease("worker")
		e.wake("s", worker)
		e.interrupt("s")
		e.expire(worker)
		parts := e.gated(e.store, once(ending, func() { e.interrupt("s") }))
		if r := e.scanner(parts, recovery.Options{}).Pass(t.Context()).Lanes[recovery.LaneClaims]; r.Quarantined != 1 {
			t.Errorf("%+v", r)
		}
		e.checkQuarantined("s", "claims", claims.ReasonOutcomeUnknown)
	})
}

// takeOver takes the only expired claim over, and nothing more.
func (e *env) takeOver() (scanner claims.HolderID) {
	e.Helper()
	found, err := e.store.ExpiredClaims(e.Context(), 1)
	if err != nil || len(found) != 1 {
		e.Fatal(found, err)
	}
	scanner = e.lease("scanner")
	if _, err := e.store.TakeOver(e.Context(), found[0], scanner, acquisition(scanner).Execution); err != nil {
		e.Fatal(err)
	}
	return scanner
}

// S6: a claim moves between the time it was found and its takeover.
func TestS6I28BeforeTheTakeover(t *testing.T) {
	for _, tc := range []struct {
		name string
		do   func(e *env, started claims.Started, own claims.HolderID)
	}{
		{"another scanner takes over", func(e *env, _ claims.Started, _ claims.HolderID) { e.takeOver() }},
		{"another scanner takes over and dies", func(e *env, _ claims.Started, _ claims.HolderID) { e.expire(e.takeOver()) }},
		{"the recovery lease expires", func(e *env, _ claims.Started, own claims.HolderID) { e.expire(own) }},
		{"the owner hands over", func(e *env, started claims.Started, _ claims.HolderID) { e.handOver(started) }},
	} {
		t.Run(tc.name, func(t *testing.T) {
			e := newEnv(t)
			worker := e.lease("worker")
			started := e.wake("s", worker)
			e.expire(worker)
			var before string
			var own claims.HolderID
			parts := e.gated(e.store, once(taking, func() {
				tc.do(e, started, own)
				before = e.rows()
			}))
			own, _ = parts.Holder()
			if r := e.scanner(parts, recovery.Options{}).Pass(t.Context()).Lanes[recovery.LaneClaims]; r.Left != 1 || r.Done+r.Quarantined+r.Failed != 0 {
				t.Errorf("%+v", r)
			}
			e.unchanged(before)
		})
	}
}

// S6: a continuation moves between the time it was judged and its quarantine.
func TestS6I28ContinuationMovesBeforeTheQuarantine(t *testing.T) {
	for _, tc := range []struct {
		name string
		do   func(e *env, healthy string)
	}{
		{"started", func(e *env, healthy string) { // repaired, and taken by a worker
			e.exec("UPDATE continuations SET body = $1", healthy)
			e.acquire("s", e.lease("worker"))
		}},
		{"waiting, with something else started", func(e *env, _ string) { // as to a database whose clock is behind
			e.exec("UPDATE continuations SET not_before = not_before + INTERVAL '1 hour'")
			if e.wakeWith("s", e.lease("worker"), "in2", claims.Queue).Claim.Execution == "" {
				e.Error("nothing was started")
			}
		}},
		{"changed", func(e *env, _ string) { e.exec("UPDATE continuations SET body = 'bad in another way'") }},
		{"quarantined by another scanner", func(e *env, _ string) {
			e.exec("UPDATE continuations SET due_at = statement_timestamp()")
			if r := e.scanner(e.parts(), recovery.Options{}).Pass(e.Context()).Lanes[recovery.LaneRecovery]; r.Quarantined != 1 {
				e.Errorf("the other scanner: %+v", r)
			}
		}},
		{"quarantined by a worker that met it", func(e *env, _ string) {
			if _, err := e.store.Acquire(e.Context(), "s", acquisition(e.lease("worker"))); !errors.Is(err, claims.ErrQuarantined) {
				e.Errorf("the worker: %v", err)
			}
		}},
		{"interrupted", func(e *env, healthy string) { // repaired, and cancelled by somebody
			e.exec("UPDATE continuations SET body = $1", healthy)
			e.interrupt("s")
		}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			e := newEnv(t)
			e.handOver(e.wake("s", e.lease("worker")))
			healthy := e.row("SELECT body FROM continuations").(string)
			e.exec("UPDATE continuations SET body = 'bad'")
			var before string
			parts := e.gated(e.store, once(removing, func() {
				tc.do(e, healthy)
				before = e.rows()
			}))
			if r := e.scanner(parts, recovery.Options{}).Pass(t.Context()).Lanes[recovery.LaneRecovery]; r.Left != 1 || r.Done+r.Quarantined+r.Failed != 0 {
				t.Errorf("%+v", r)
			}
			e.unchanged(before)
		})
	}
}

// S6: an interrupt meets a continuation that does not decode: it is quarantined,
// not cancelled, and the interrupt changes nothing of it.
func TestS6I28InterruptOfABadContinuation(t *testing.T) {
	e := newEnv(t)
	e.handOver(e.wake("s", e.lease("worker")))
	e.exec("UPDATE continuations SET body = 'bad'")
	parts := e.gated(e.store, once(removing, func() { e.interrupt("s") }))
	if r := e.scanner(parts, recovery.Options{}).Pass(t.Context()).Lanes[recovery.LaneRecovery]; r.Quarantined != 1 || r.Left != 0 {
		t.Errorf("%+v", r)
	}
	e.checkQuarantined("s", "recovery", claims.ReasonInvalidContinuation)
	if n := e.count("s", claims.ContinuationCancelled, ""); n != 0 {
		t.Errorf("%d continuations were cancelled", n)
	}
}

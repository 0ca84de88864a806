package pooltest

import (
	"context"
	"errors"
	"fmt"
	"runtime"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"reveille/claims"
	"reveille/runner"
)

func TestASessionRunsAndSettles(t *testing.T) {
	w := newWorld(t)
	m := w.worker(options())
	m.wake("s", "a")
	c := m.call()
	if err := c.out.Text("hello"); err != nil {
		t.Fatal(err)
	}
	c.end()
	w.settled("s")
	w.wantTypes("s", "input.admitted", "execution.started", "input.promoted", "step.started", "text(hello)", "step.ended", "execution.ended(completed)")
}

func TestTwoInputsRunInOrderInOneExecution(t *testing.T) {
	w := newWorld(t)
	m := w.worker(options())
	m.wake("s", "a")
	c := m.call()
	m.wake("s", "b")
	c.end()
	c = m.call()
	if len(c.req.Inputs) != 1 || c.req.Inputs[0].ID != "b" || c.req.Index != 2 || len(c.req.History) != 1 {
		t.Errorf("second step got %+v", c.req)
	}
	c.end()
	w.settled("s")
	if got := count(w.types("s"), "execution.started"); got != 1 {
		t.Errorf("%d executions, want 1", got)
	}
}

// Regression 1: while a finalizer blocks after an interrupt the claim stays
// cancelling, there is no step.interrupted, and nobody else acquires (I10).
func TestI10InterruptWaitsForTheFinalizer(t *testing.T) {
	w := newWorld(t)
	m, other := w.worker(options()), w.worker(options())
	m.wake("s", "a")
	c := m.call()
	release := make(chan struct{})
	if err := c.out.Go(func() { <-release }); err != nil {
		t.Fatal(err)
	}
	m.interrupt("s")
	wait(w, "cancellation", c.ctx.Done())
	if !errors.Is(context.Cause(c.ctx), claims.ErrInterrupted) {
		t.Errorf("cause %v", context.Cause(c.ctx))
	}
	c.fail(c.ctx.Err())
	other.interrupt("s") // the same interrupt again, asked of another worker
	if ok, err := m.store.Store.Heartbeat(t.Context(), holderOf(t, m), time.Minute); err != nil || !ok {
		t.Errorf("heartbeat in between: %v, %v", ok, err)
	}
	out := other.wake("s", "b")
	if out.Started != nil {
		t.Error("a replacement acquired while the finalizer ran")
	}
	w.wantPhase("s", "cancelling")
	if n := count(w.types("s"), "step.interrupted"); n != 0 {
		t.Errorf("%d step.interrupted before the join", n)
	}
	close(release)
	w.until("b is announced", func() bool { return w.phase("s") == "none" })
	if n := count(w.types("s"), "step.interrupted(true)"); n != 1 {
		t.Errorf("%d step.interrupted after the join: %s", n, w.types("s"))
	}
	if got := wait(w, "announcement", m.told.signal); got != "s" {
		t.Errorf("announced %s", got)
	}
	// I21: the wake that came while cancelling survives into one successor.
	if !other.pool.Start(t.Context(), "s") {
		t.Fatal("no slot")
	}
	c = other.call()
	if c.req.Inputs[0].ID != "b" {
		t.Errorf("successor got %+v", c.req.Inputs)
	}
	c.end()
	w.settled("s")
}

func holderOf(t *testing.T, m *member) claims.HolderID {
	t.Helper()
	h, ok := m.pool.Keeper().Holder()
	if !ok {
		t.Fatal("no lease")
	}
	return h
}

// Regression 2: an interrupt, or a shutdown, between the COMMIT of the
// acquisition and its return hits that execution; nothing is orphaned (I15).
func TestI15InterruptAtTheAcquisitionBoundary(t *testing.T) {
	w := newWorld(t)
	m := w.worker(options())
	g := m.store.gate("after:apply_wake")
	woken := make(chan claims.Outcome, 1)
	go func() { woken <- m.wake("s", "a") }()
	wait(w, "gate", g.reached)
	m.interrupt("s")
	close(g.open)
	wait(w, "wake", woken)
	w.settled("s")
	w.wantTypes("s", "input.admitted", "execution.started", "input.promoted", "step.started", "execution.cancelling", "step.interrupted(true)", "execution.ended(interrupted)")
	select {
	case c := <-m.calls:
		t.Errorf("handler was called: %+v", c.req)
	default:
	}
}

func TestI15ShutdownAtTheAcquisitionBoundary(t *testing.T) {
	w := newWorld(t)
	m := w.worker(options())
	g := m.store.gate("after:apply_wake")
	woken := make(chan claims.Outcome, 1)
	go func() { woken <- m.wake("s", "a") }()
	wait(w, "gate", g.reached)
	drained := make(chan struct{})
	go func() { defer close(drained); m.pool.Drain() }()
	w.until("draining", func() bool { return m.pool.Free() == 0 })
	close(g.open)
	wait(w, "wake", woken)
	select {
	case c := <-m.calls: // within the grace it may still be called; then it ends normally
		c.end()
	case <-drained:
	}
	wait(w, "drain", drained)
	w.wantPhase("s", "none")
}

// The same with the answer of COMMIT lost: the acquisition is none, nothing of
// it runs, and it is handed over without costing an attempt (I3).
func TestI3UnknownAcquisitionIsHandedOver(t *testing.T) {
	for _, interrupt := range []bool{false, true} {
		t.Run(fmt.Sprintf("interrupt=%v", interrupt), func(t *testing.T) {
			w := newWorld(t)
			m := w.worker(options())
			m.store.failOnce("apply_wake", fmt.Errorf("commit: %w", claims.ErrOutcomeUnknown))
			g := m.store.gate("before:hand_over")
			cmd := w.command(claims.Command{Kind: claims.Wake, Session: "s", Input: &claims.Input{ID: "a", Delivery: claims.Queue, Body: []byte(`1`)}})
			if _, err := m.pool.Apply(t.Context(), cmd, true); !errors.Is(err, claims.ErrOutcomeUnknown) {
				t.Fatalf("Apply: %v", err)
			}
			wait(w, "hand-over", g.reached)
			if interrupt {
				m.interrupt("s")
			}
			close(g.open)
			w.settled("s")
			started := []string{"input.admitted", "execution.started", "input.promoted", "step.started"}
			if interrupt {
				w.wantTypes("s", append(started, "execution.cancelling", "step.interrupted(true)", "execution.ended(interrupted)")...)
				return
			}
			w.wantTypes("s", append(started, "step.failed(shutdown)", "execution.ended(handed_over)")...)
			// The redelivery is recognised and says that the session is ready.
			out, err := m.pool.Apply(t.Context(), cmd, true)
			if err != nil || out.Result != claims.Duplicate || !out.Ready {
				t.Fatalf("redelivery: %+v, %v", out, err)
			}
			if !m.pool.Start(t.Context(), "s") {
				t.Fatal("no slot")
			}
			c := m.call()
			if c.req.Continues == nil || c.req.Continues.Kind != claims.KindHandover || c.req.Continues.Attempt != 0 || len(c.req.Inputs) != 1 {
				t.Errorf("goes on with %+v, inputs %+v", c.req.Continues, c.req.Inputs)
			}
			c.end()
			w.settled("s")
		})
	}
}

// Regression 4: whatever the handler answers an interrupt with, the durable
// phase decides (I13).
func TestI13TheDurablePhaseDecides(t *testing.T) {
	answers := map[string]func(*call){
		"nil":             func(c *call) { c.end() },
		"unrelated error": func(c *call) { c.fail(errors.New("disk full")) },
		"panic": func(c *call) {
			c.answer <- func() (runner.Result, error) { panic("boom") }
		},
		"output": func(c *call) {
			_ = c.out.Text("late")
			c.end()
		},
		"declined": func(c *call) {
			if err := c.out.Decline("no"); !errors.Is(err, claims.ErrCancelled) {
				c.fail(fmt.Errorf("decline after the interrupt: %v", err))
				return
			}
			c.end()
		},
		"output too large": func(c *call) {
			c.returns(runner.Result{Value: make([]byte, 2<<20)}, nil)
		},
	}
	for name, answer := range answers {
		t.Run(name, func(t *testing.T) {
			w := newWorld(t)
			m := w.worker(options())
			m.wake("s", "a")
			c := m.call()
			m.interrupt("s")
			wait(w, "cancellation", c.ctx.Done())
			answer(c)
			w.settled("s")
			types := w.types("s")
			if count(types, "step.interrupted(true)") != 1 || count(types, "execution.ended(interrupted)") != 1 || count(types, "step.ended")+count(types, "step.failed") != 0 {
				t.Errorf("events: %s", types)
			}
		})
	}
}

// Regression 5: a step that ended durably before the interrupt stays ended; an
// interrupt that is durable first interrupts the handler's success (I9).
func TestI9SuccessAndInterrupt(t *testing.T) {
	t.Run("ended first", func(t *testing.T) {
		w := newWorld(t)
		m := w.worker(options())
		m.wake("s", "a")
		g := m.store.gate("after:finish")
		m.call().end()
		wait(w, "gate", g.reached)
		if out := m.interrupt("s"); out.Notice != nil {
			t.Errorf("notice %+v", out.Notice)
		}
		close(g.open)
		w.settled("s")
		w.wantTypes("s", "input.admitted", "execution.started", "input.promoted", "step.started", "step.ended", "execution.ended(completed)")
	})
	t.Run("interrupted first", func(t *testing.T) {
		w := newWorld(t)
		m := w.worker(options())
		m.wake("s", "a")
		g := m.store.gate("before:finish")
		m.call().end()
		wait(w, "gate", g.reached)
		m.interrupt("s")
		close(g.open)
		w.settled("s")
		w.wantTypes("s", "input.admitted", "execution.started", "input.promoted", "step.started", "execution.cancelling", "step.interrupted(true)", "execution.ended(interrupted)")
	})
}

// Regression 6: a decline is durable at once; the claim goes after the
// finalizers; an interrupt in between changes nothing (I12).
func TestI12Decline(t *testing.T) {
	w := newWorld(t)
	m := w.worker(options())
	m.wake("s", "a")
	c := m.call()
	release := make(chan struct{})
	if err := c.out.Go(func() { <-release }); err != nil {
		t.Fatal(err)
	}
	if err := c.out.Text("asking"); err != nil {
		t.Fatal(err)
	}
	if err := c.out.Decline("not this"); err != nil {
		t.Fatal(err)
	}
	w.wantPhase("s", "cancelled")
	started := []string{"input.admitted", "execution.started", "input.promoted", "step.started"}
	w.wantTypes("s", append(started, "text(asking)", "step.interrupted(false)")...)
	c.end()
	m.interrupt("s")
	w.wantPhase("s", "cancelled")
	close(release)
	w.settled("s")
	w.wantTypes("s", append(started, "text(asking)", "step.interrupted(false)", "execution.ended(declined)")...)
}

// Regression 8: many wakes of one session at two workers are never two live
// claims; a worker that starts again under its name never re-enters.
func TestI1ThousandWakesOneClaim(t *testing.T) {
	w := newWorld(t)
	a, b := w.worker(options()), w.worker(options())
	var wg sync.WaitGroup
	var running, most int
	var mu sync.Mutex
	handle := func(m *member) {
		for c := range m.calls { // the handler runs from before this until c.end
			mu.Lock()
			running++
			most = max(most, running)
			mu.Unlock()
			runtime.Gosched()
			mu.Lock()
			running--
			mu.Unlock()
			c.end()
		}
	}
	for _, m := range []*member{a, b} {
		wg.Go(func() { handle(m) })
	}
	const wakes = 1000
	var appliers sync.WaitGroup
	// Nothing here keeps the order of the stream, as the intake does: a command
	// that a newer one has overtaken is a duplicate to the store (I18).
	var applied atomic.Int64
	cmds := make(chan claims.Command)
	for _, m := range []*member{a, b} {
		for range 4 {
			appliers.Go(func() {
				for cmd := range cmds {
					for {
						out, err := m.pool.Apply(context.Background(), cmd, true)
						if err == nil {
							if out.Result == claims.Applied {
								applied.Add(1)
							}
							break
						}
					}
				}
			})
		}
	}
	for i := range wakes {
		cmds <- w.command(claims.Command{Kind: claims.Wake, Session: "s", Input: &claims.Input{ID: fmt.Sprint("in", i), Delivery: claims.Queue, Body: []byte("0")}})
	}
	close(cmds)
	appliers.Wait()
	w.until("all is served", func() bool {
		var open int
		if err := w.db.QueryRow(context.Background(), "SELECT armed + unarmed FROM sessions WHERE session_id = 's'").Scan(&open); err != nil {
			t.Fatal(err)
		}
		if open > 0 && w.phase("s") == "none" {
			a.pool.Start(context.Background(), "s")
		}
		return open == 0 && w.phase("s") == "none"
	})
	a.end()
	b.end()
	close(a.calls)
	close(b.calls)
	wg.Wait()
	if most != 1 {
		t.Errorf("%d handlers of one session at once", most)
	}
	promoted := map[string]int{}
	for _, r := range w.events("s") {
		if r.Type == claims.InputPromoted {
			promoted[string(r.Data)]++
		}
	}
	if n := applied.Load(); int64(len(promoted)) != n || n < wakes/2 {
		t.Errorf("%d inputs were promoted, %d of %d wakes applied", len(promoted), n, wakes)
	}
	for in, n := range promoted {
		if n != 1 {
			t.Errorf("%s promoted %d times (I23)", in, n)
		}
	}
}

func TestI3ARestartedWorkerNeverReenters(t *testing.T) {
	w := newWorld(t)
	m := w.worker(options())
	m.wake("s", "a")
	c := m.call()
	again := w.worker(options()) // the same name, another holder
	if out := again.wake("s", "b"); out.Started != nil {
		t.Error("re-entered its own live claim")
	}
	if holderOf(t, m) == holderOf(t, again) {
		t.Error("same holder id")
	}
	c.end()
	m.call().end()
	w.settled("s")
}

// Regression 9: a finalizer that never joins costs its slot and its claim, not
// the worker (I10).
func TestI10NeverJoined(t *testing.T) {
	w := newWorld(t)
	o := options()
	o.KillAfter, o.JoinTimeout = time.Millisecond, time.Millisecond
	m := w.worker(o)
	m.wake("s", "a")
	c := m.call()
	release := make(chan struct{})
	if err := c.out.Go(func() { <-release }); err != nil {
		t.Fatal(err)
	}
	m.interrupt("s")
	wait(w, "cancellation", c.ctx.Done())
	c.end()
	w.until("revoked", func() bool { return w.phase("s") == "cancelling never_joined" })
	if free := m.pool.Free(); free != o.Slots-1 {
		t.Errorf("%d slots free, want %d: the leaked one is not", free, o.Slots-1)
	}
	m.wake("other", "a")
	m.call().end()
	w.settled("other")
	close(release)
	w.until("the slot is back", func() bool { return m.pool.Free() == o.Slots })
	w.wantPhase("s", "cancelling never_joined") // for the scanner to quarantine
}

// Regression 10: a cancellation that nobody asked for is a failure.
func TestCanceledErrorWithoutCancellationIsAFailure(t *testing.T) {
	w := newWorld(t)
	m := w.worker(options())
	m.wake("s", "a")
	m.call().fail(fmt.Errorf("calling a service: %w", context.Canceled))
	w.settled("s")
	w.wantTypes("s", "input.admitted", "execution.started", "input.promoted", "step.started", "step.failed(handler)", "execution.ended(failed)")
}

func TestAPanicFailsTheStepAndTheWorkerLivesOn(t *testing.T) {
	w := newWorld(t)
	m := w.worker(options())
	m.wake("s", "a")
	m.call().answer <- func() (runner.Result, error) { panic("boom") }
	w.settled("s")
	w.wantTypes("s", "input.admitted", "execution.started", "input.promoted", "step.started", "step.failed(panic)", "execution.ended(failed)")
	m.wake("t", "a")
	c := m.call()
	if err := c.out.Go(func() { panic("later") }); err != nil {
		t.Fatal(err)
	}
	c.end()
	w.settled("t")
	if types := w.types("t"); count(types, "step.failed(panic)") != 1 {
		t.Errorf("events: %s", types)
	}
}

// A retry is durable, keeps its count, and ends at --max-attempts.
func TestRetry(t *testing.T) {
	w := newWorld(t)
	o := options()
	o.MaxAttempts = 3
	m := w.worker(o)
	m.wake("s", "a")
	for attempt := range o.MaxAttempts {
		if attempt > 0 {
			w.settled("s")
			w.until("due", func() bool { m.pool.Start(t.Context(), "s"); return len(m.calls) > 0 })
		}
		c := m.call()
		if got := c.req.Continues; attempt > 0 && (got == nil || got.Kind != claims.KindRetry || got.Attempt != attempt) {
			t.Errorf("attempt %d continues %+v", attempt, got)
		}
		c.fail(&runner.Failure{Code: claims.CodeHandler, Message: "busy", Retryable: true})
	}
	w.settled("s")
	types := w.types("s")
	if count(types, "execution.ended(retrying)") != 2 || count(types, "execution.ended(failed)") != 1 {
		t.Errorf("events: %s", types)
	}
}

// SIGTERM: what does not finish in the grace is handed over at once.
func TestHandOverAtShutdown(t *testing.T) {
	w := newWorld(t)
	o := options()
	m, other := w.worker(o), w.worker(options())
	m.wake("s", "a")
	c := m.call()
	drained := make(chan struct{})
	go func() { defer close(drained); m.pool.Drain() }()
	wait(w, "cancellation", c.ctx.Done())
	if !errors.Is(context.Cause(c.ctx), claims.ErrShutdown) {
		t.Errorf("cause %v", context.Cause(c.ctx))
	}
	c.fail(c.ctx.Err())
	wait(w, "drain", drained)
	if got := wait(w, "announcement", m.told.signal); got != "s" {
		t.Errorf("announced %s", got)
	}
	other.pool.Start(t.Context(), "s")
	c = other.call()
	if c.req.Continues == nil || c.req.Continues.Kind != claims.KindHandover || c.req.Inputs[0].ID != "a" {
		t.Errorf("goes on with %+v", c.req)
	}
	c.end()
	w.settled("s")
	w.wantTypes("s", "input.admitted", "execution.started", "input.promoted", "step.started", "step.failed(shutdown)", "execution.ended(handed_over)",
		"execution.started", "step.started(handover 0)", "step.ended", "execution.ended(completed)")
}

// A step that failed before anybody stopped it has failed, also where a shutdown comes while its finalizers join.
func TestFailureBeforeTheShutdownCounts(t *testing.T) {
	w := newWorld(t)
	m := w.worker(options())
	m.wake("s", "a")
	c := m.call()
	release := make(chan struct{})
	if err := c.out.Go(func() { <-release }); err != nil {
		t.Fatal(err)
	}
	c.fail(errors.New("no such model"))
	m.awaitLog("handler returned")
	drained := make(chan struct{})
	go func() { defer close(drained); m.pool.Drain() }()
	wait(w, "cancellation", c.ctx.Done())
	close(release)
	wait(w, "drain", drained)
	w.settled("s")
	w.wantTypes("s", "input.admitted", "execution.started", "input.promoted", "step.started", "step.failed(handler)", "execution.ended(failed)")
}

// A worker whose lease the database calls expired stops, and goes on as a new
// holder; what it still owns it may hand over (I4, I7).
func TestI4ExpiredLeaseIsNotRevived(t *testing.T) {
	w := newWorld(t)
	o := options()
	o.Heartbeat = 50 * time.Millisecond
	m := w.worker(o)
	before := holderOf(t, m)
	m.wake("s", "a")
	c := m.call()
	w.expire(before)
	wait(w, "cancellation", c.ctx.Done())
	if !errors.Is(context.Cause(c.ctx), claims.ErrLeaseLost) {
		t.Errorf("cause %v", context.Cause(c.ctx))
	}
	select {
	case <-c.req.Killed:
	case <-time.After(patience):
		t.Error("not killed")
	}
	c.fail(c.ctx.Err())
	w.settled("s")
	w.until("a new holder", func() bool { h, ok := m.pool.Keeper().Holder(); return ok && h != before })
	m.wake("t", "a")
	m.call().end()
	w.settled("t")
	if types := w.types("s"); count(types, "execution.ended(handed_over)") != 1 {
		t.Errorf("events: %s", types)
	}
}

// A claim that the process holds and does not know is revoked: nothing stays
// live because its process happens to live (I3).
func TestI3AClaimThatNobodyRunsIsRevoked(t *testing.T) {
	w := newWorld(t)
	o := options()
	o.Reconcile = 20 * time.Millisecond
	m := w.worker(o)
	// As an acquisition leaves it whose COMMIT was in flight when it was resolved.
	_, err := m.store.Store.Apply(t.Context(), w.command(claims.Command{Kind: claims.Wake, Session: "s"}), &claims.Acquisition{
		Holder: holderOf(t, m), Worker: "w", Execution: claims.ExecutionID(newID()), Step: claims.StepID(newID()),
	})
	if err != nil {
		t.Fatal(err)
	}
	w.until("revoked", func() bool { return w.phase("s") == "running unknown" })
	m.wake("t", "a") // what is registered stays
	c := m.call()
	w.until("compared again", func() bool { return m.store.count("held") > 3 })
	w.wantPhase("t", "running")
	c.end()
	w.settled("t")
}

// A run loop whose claim was known to be committed and is missing was lost (I3).
func TestI3AMissingClaimIsLost(t *testing.T) {
	w := newWorld(t)
	o := options()
	o.Reconcile = 20 * time.Millisecond
	m := w.worker(o)
	m.wake("s", "a")
	c := m.call()
	for _, statement := range []string{
		"DELETE FROM claims WHERE session_id = 's'", "UPDATE sessions SET execution_id = NULL WHERE session_id = 's'",
	} {
		if _, err := w.db.Exec(t.Context(), statement); err != nil {
			t.Fatal(err)
		}
	}
	wait(w, "cancellation", c.ctx.Done())
	if !errors.Is(context.Cause(c.ctx), claims.ErrLeaseLost) {
		t.Errorf("cause %v", context.Cause(c.ctx))
	}
	before := w.types("s")
	c.fail(c.ctx.Err())
	w.until("the slot is back", func() bool { return m.pool.Free() == o.Slots })
	if after := w.types("s"); after != before {
		t.Errorf("a lost owner wrote: %s", after)
	}
}

// Regression 3: an interrupt while step.started is being made durable. The step
// is settled as interrupted with one terminal event, and what was buffered for
// it, by something of the step before that goes on, is never written (I14).
func TestI14InterruptWhileTheStepStarts(t *testing.T) {
	for _, where := range []string{"before:start_step", "after:start_step"} {
		t.Run(where, func(t *testing.T) {
			w := newWorld(t)
			m := w.worker(options())
			m.wake("s", "a")
			m.wake("s", "b")
			c := m.call()
			g := m.store.gate(where)
			c.end()
			wait(w, "gate", g.reached)
			if err := c.out.Text("too late"); !errors.Is(err, runner.ErrStepOver) {
				t.Errorf("text of a step that is over: %v", err)
			}
			m.interrupt("s")
			close(g.open)
			w.settled("s")
			select {
			case c := <-m.calls:
				t.Errorf("handler was called for %+v", c.req.Inputs)
			default:
			}
			types := w.types("s")
			if count(types, "text") != 0 {
				t.Errorf("events: %s", types)
			}
			if where == "before:start_step" { // it hit the head: there was no step to interrupt
				if count(types, "input.cancelled") != 1 || count(types, "step.started") != 1 || count(types, "execution.ended(completed)") != 1 {
					t.Errorf("events: %s", types)
				}
				return
			}
			if count(types, "step.interrupted(true)") != 1 || count(types, "step.ended") != 1 || count(types, "execution.ended(interrupted)") != 1 {
				t.Errorf("events: %s", types)
			}
		})
	}
}

// Regression 7: a heartbeat that was sent before the expiry and reaches the
// database after it does not revive the lease (I4).
func TestI4HeartbeatHeldPastTheExpiry(t *testing.T) {
	w := newWorld(t)
	o := options()
	o.Heartbeat = 50 * time.Millisecond
	m := w.worker(o)
	first := holderOf(t, m)
	m.wake("s", "a")
	c := m.call()
	g := m.store.gate("before:heartbeat")
	wait(w, "heartbeat", g.reached)
	w.expire(first)
	close(g.open)
	wait(w, "cancellation", c.ctx.Done())
	if !errors.Is(context.Cause(c.ctx), claims.ErrLeaseLost) {
		t.Errorf("cause %v", context.Cause(c.ctx))
	}
	var live bool
	if err := w.db.QueryRow(t.Context(), "SELECT expires_at > statement_timestamp() FROM leases WHERE holder = $1::UUID", string(first)).Scan(&live); err != nil || live {
		t.Errorf("lease live %v, %v", live, err)
	}
	c.fail(c.ctx.Err())
	w.settled("s")
}

// snapshotter takes snapshots of a handler's steps, and lets a test in before
// each of them returns.
type snapshotter struct {
	runner.Handler
	taken   chan runner.SnapshotAt
	answers chan error // what the snapshot answers
}

func (s snapshotter) Snapshot(_ context.Context, _ runner.Request, at runner.SnapshotAt) (string, error) {
	s.taken <- at
	return "tree-" + string(at), <-s.answers
}

func withSnapshots() (snapshotter, func(runner.Handler) runner.Handler) {
	s := snapshotter{taken: make(chan runner.SnapshotAt, 10), answers: make(chan error, 10)}
	return s, func(h runner.Handler) runner.Handler { s.Handler = h; return s }
}

// Ownership is checked before each external call: the snapshot before, the
// handler, the snapshot after (I16).
func TestI16SnapshotsAreTheOwners(t *testing.T) {
	started := []string{"input.admitted", "execution.started", "input.promoted", "step.started"}
	t.Run("taken", func(t *testing.T) {
		w := newWorld(t)
		s, with := withSnapshots()
		m := w.workerWith(options(), with)
		s.answers <- nil
		s.answers <- nil
		m.wake("s", "a")
		m.call().end()
		w.settled("s")
		w.wantTypes("s", append(started, "snapshot", "snapshot", "step.ended", "execution.ended(completed)")...)
	})
	t.Run("interrupted before the handler", func(t *testing.T) {
		w := newWorld(t)
		s, with := withSnapshots()
		m := w.workerWith(options(), with)
		m.wake("s", "a")
		wait(w, "snapshot", s.taken)
		m.interrupt("s")
		s.answers <- nil
		w.settled("s")
		if n := len(m.calls); n != 0 {
			t.Errorf("handler was called %d times", n)
		}
		if types := w.types("s"); count(types, "step.interrupted(true)") != 1 {
			t.Errorf("events: %s", types)
		}
	})
	t.Run("lease lost before the snapshot after", func(t *testing.T) {
		w := newWorld(t)
		s, with := withSnapshots()
		o := options()
		o.Heartbeat = 50 * time.Millisecond
		m := w.workerWith(o, with)
		s.answers <- nil
		m.wake("s", "a")
		c := m.call()
		if at := wait(w, "snapshot", s.taken); at != runner.Before {
			t.Errorf("snapshot %s", at)
		}
		w.expire(holderOf(t, m))
		wait(w, "cancellation", c.ctx.Done())
		c.end() // it succeeded all the same
		w.settled("s")
		if n := len(s.taken); n != 0 {
			t.Errorf("%d snapshots after the lease was lost", n)
		}
	})
	t.Run("failed before", func(t *testing.T) {
		w := newWorld(t)
		s, with := withSnapshots()
		o := options()
		o.MaxAttempts = 1
		m := w.workerWith(o, with)
		s.answers <- errors.New("no space")
		m.wake("s", "a")
		w.settled("s")
		w.wantTypes("s", append(started, "step.failed(handler)", "execution.ended(failed)")...)
	})
}

// A handler whose output waits for the log is let go when its step must stop.
func TestOutputThatWaitsForTheLogEndsWithTheStep(t *testing.T) {
	w := newWorld(t)
	m := w.worker(options())
	m.wake("s", "a")
	c := m.call()
	g := m.store.gate("before:record")
	said := make(chan error, 1)
	go func() {
		for {
			if err := c.out.Text(strings.Repeat("x", 256<<10)); err != nil {
				said <- err
				return
			}
		}
	}()
	wait(w, "an append", g.reached) // held: what comes now fills the buffer, and waits
	m.interrupt("s")
	if err := wait(w, "end of the output", said); !errors.Is(err, claims.ErrInterrupted) {
		t.Errorf("Text: %v", err)
	}
	close(g.open)
	c.fail(c.ctx.Err())
	w.settled("s")
	if types := w.types("s"); count(types, "step.interrupted(true)") != 1 {
		t.Errorf("events: %s", types)
	}
}

// Of the sessions that are announced, a few are acquired at once, and the others when those are; all are.
func TestAcquisitionsAtOnceAreBounded(t *testing.T) {
	const sessions, most = 20, 4
	w := newWorld(t)
	o := options()
	o.Slots = sessions
	m := w.worker(o)
	for i := range sessions {
		cmd := w.command(claims.Command{Kind: claims.Wake, Session: claims.SessionID(fmt.Sprint("s", i))})
		if _, err := m.pool.Apply(t.Context(), cmd, false); err != nil {
			t.Fatal(err)
		}
	}
	gate := m.store.standing("before:acquire")
	release := sync.OnceFunc(func() { close(gate.open) })
	defer release() // also where the test fails: the worker ends when its acquisitions do
	for i := range sessions {
		if !m.pool.Start(t.Context(), claims.SessionID(fmt.Sprint("s", i))) {
			t.Fatalf("no slot for session %d", i)
		}
	}
	for range most {
		wait(w, "acquisition", gate.reached)
	}
	for range sessions - most {
		if n := len(gate.reached); n > 0 {
			t.Fatalf("%d more are acquired while %d are", n, most)
		}
		gate.open <- struct{}{}
		wait(w, "acquisition in its place", gate.reached)
	}
	release()
	for range sessions {
		m.call().end()
	}
}

package runner

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"runtime/debug"
	"sync"
	"time"

	"github.com/google/uuid"

	"reveille/claims"
)

// execution is one registered run loop.
type execution struct {
	pool    *Pool
	tenure  *tenure
	id      claims.ExecutionID
	first   claims.StepID
	session claims.SessionID

	// ctx is the handlers'; its cause says why it ended.
	ctx    context.Context
	cancel context.CancelCauseFunc
	// killed is closed when the step must be gone.
	killed chan struct{}

	// Set before the first step, by the run loop.
	claim claims.Claim
	epoch int64

	mu         sync.Mutex
	phase      claims.Phase // last heard
	gone       bool         // the claim is not ours any more
	known      bool         // the claim is known to be committed
	cancelling time.Time    // when it was heard
	killer     *time.Timer
	release    []func() bool
}

func newExecution(p *Pool, t *tenure, session claims.SessionID) *execution {
	e := &execution{
		pool: p, tenure: t, session: session, phase: claims.Running, killed: make(chan struct{}),
		id: claims.ExecutionID(uuid.NewString()), first: claims.StepID(uuid.NewString()),
	}
	// Not by AfterFunc, which would be later: who is told that it does not own the claim finds the cause here (I16).
	e.ctx, e.cancel = context.WithCancelCause(t.lost)
	e.release = append(e.release, context.AfterFunc(t.lost, func() {
		select {
		case <-t.killed: // --kill-after does not apply: the deadline does (I7)
			e.kill()
		case <-e.killed:
		}
	}))
	return e
}

func (e *execution) acquisition() *claims.Acquisition {
	return &claims.Acquisition{Holder: e.tenure.holder, Worker: e.pool.opts.Worker, Execution: e.id, Step: e.first}
}

func (e *execution) lost() context.Context { return e.pool.hard }

func (e *execution) is(phase claims.Phase) bool {
	e.mu.Lock()
	defer e.mu.Unlock()
	return e.known && e.phase == phase
}

func (e *execution) committed() bool {
	e.mu.Lock()
	defer e.mu.Unlock()
	return e.known
}

func (e *execution) declined() bool { return e.is(claims.Cancelled) }

// stop cancels the handler and has it killed after --kill-after. A nil cause
// only lets go of what the execution holds.
func (e *execution) stop(cause error) {
	if cause == nil {
		for _, release := range e.release {
			release()
		}
		e.cancel(context.Canceled)
		e.kill()
		return
	}
	e.cancel(cause)
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.killer == nil {
		e.killer = time.AfterFunc(e.pool.opts.KillAfter, e.kill)
	}
}

func (e *execution) kill() {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.killer != nil {
		e.killer.Stop()
	}
	select {
	case <-e.killed:
	default:
		close(e.killed)
	}
}

// interrupted hears that the claim is cancelling, since a time of the database.
func (e *execution) interrupted(since time.Time) {
	if e.hearPhase(claims.Cancelling) && !since.IsZero() {
		e.pool.metrics.cancelSeconds.WithLabelValues("noticed").Observe(max(0, time.Since(since).Seconds()))
	}
}

// hearPhase notes a phase that is durable, and reports whether it is news.
func (e *execution) hearPhase(phase claims.Phase) bool {
	e.mu.Lock()
	if e.phase != claims.Running {
		e.mu.Unlock()
		return false
	}
	e.phase = phase
	e.cancelling = time.Now()
	e.mu.Unlock()
	e.pool.log.Info("claim phase", "session", e.session, "execution", e.id, "from", claims.Running, "to", phase)
	if phase == claims.Cancelling {
		e.stop(claims.ErrInterrupted)
	}
	return true
}

// lose hears that the claim is not ours any more.
func (e *execution) lose(cause error) {
	e.mu.Lock()
	news := !e.gone
	e.gone = true
	e.mu.Unlock()
	if news {
		e.pool.log.Warn("claim lost", "session", e.session, "execution", e.id, "cause", cause)
		e.stop(cause)
	}
}

// heard takes what a durable operation answered about the claim.
func (e *execution) heard(err error) {
	switch {
	case errors.Is(err, claims.ErrFenced):
		e.lose(claims.ErrLeaseLost)
	case errors.Is(err, claims.ErrCancelled):
		e.interrupted(time.Time{})
	}
}

// mayCall checks ownership immediately before an external call (I16): the
// local deadline and the phase last heard. Where it reports false, ctx has its
// cause or the phase is not running, so the step can't be taken for one that ended.
func (e *execution) mayCall() bool {
	return e.tenure.trusted() && e.ctx.Err() == nil && e.is(claims.Running)
}

// run is the loop of one execution: step after step until it is settled.
func (p *Pool) run(e *execution, s claims.Started) {
	leaked := false
	defer func() {
		if !leaked {
			p.unregister(e)
		}
	}()
	e.claim, e.epoch = s.Claim, s.Claim.Epoch
	e.mu.Lock()
	e.known = true
	e.mu.Unlock()
	for step := &s.Step; step != nil; {
		if !step.AskedAt.IsZero() {
			p.metrics.wakeToStart.Observe(max(0, step.StartedAt.Sub(step.AskedAt).Seconds()))
		}
		log := p.log.With("session", e.session, "execution", e.id, "epoch", e.epoch, "step", step.ID)
		log.Debug("step started", "index", step.Index)
		end := p.step(e, *step, log)
		if leaked = end.leaked; leaked {
			p.leak(e, end, log)
			return
		}
		if !p.close(e, *step, end, log) {
			return
		}
		step = p.next(e)
	}
}

// next starts the next step; nil where the execution is over.
func (p *Pool) next(e *execution) *claims.Step {
	if p.isDraining() || !e.tenure.trusted() {
		_ = p.leave(e, "hand_over", nil, p.settle.HandOver) // logged there; recovery does it otherwise
		return nil
	}
	id, token := claims.StepID(uuid.NewString()), claims.Token{ID: uuid.NewString()}
	var step *claims.Step
	var settled claims.Settlement
	err := p.persist(e.lost(), "start_step", e, func(ctx context.Context) (err error) {
		step, settled, err = p.steps.StartStep(ctx, e.claim, id, &token)
		return err
	})
	if err != nil {
		e.heard(err)
		return nil
	}
	p.events.Poke(e.session)
	if step == nil {
		p.settled(e, settled)
	}
	return step
}

// ending is how a step came back.
type ending struct {
	result Result
	err    error // of the handler; nil: it ended well
	called bool
	// unasked: the handler failed before anybody stopped it. That counts, also where
	// its finalizers join after a stop.
	unasked bool
	// timedOut: the kill of --step-timeout may be under way, so no step of this
	// execution follows.
	timedOut bool
	tail     []claims.Content
	leaked   bool
	out      *Output
}

// step calls the handler and waits for all of it to join.
func (p *Pool) step(e *execution, step claims.Step, log *slog.Logger) ending {
	began := time.Now()
	history, err := p.history(e)
	end := ending{err: err}
	ctx, cancel := e.ctx, context.CancelFunc(func() {})
	if p.opts.StepTimeout > 0 {
		ctx, cancel = context.WithTimeoutCause(e.ctx, p.opts.StepTimeout, claims.ErrStepTimeout)
	}
	defer cancel()
	rec := newRecorder(ctx, e, step)
	out := NewOutput(rec.put, rec.decline)
	end.out = out
	if err == nil && e.mayCall() {
		end.called = true
		req := Request{
			Session: e.session, Execution: e.id, Epoch: e.epoch, Step: step.ID, Index: step.Index,
			Inputs: step.Inputs, Continues: step.Continues, History: history, Trace: step.Trace, Killed: e.killedBy(ctx), Deadline: e.tenure,
		}
		var result Result
		unasked := false
		failed := errors.New("the handler ended its goroutine and answered nothing") // runtime.Goexit
		returned := make(chan struct{})
		go func() {
			defer close(returned)
			defer out.leave()
			result, failed = p.call(ctx, e, req, out, log)
			unasked = failed != nil && e.mayCall() && ctx.Err() == nil
			log.Debug("handler returned", "error", failed)
		}()
		if !p.join(e, ctx, out, log) {
			end.leaked = true
			return end
		}
		<-returned
		end.result, end.err, end.unasked = result, failed, unasked
		if panicked := out.panicked(); panicked != nil && end.err == nil {
			end.err = panicked
		}
		if end.err != nil && !end.unasked && errors.Is(context.Cause(ctx), claims.ErrStepTimeout) {
			end.err = &Failure{Code: claims.CodeTimeout, Message: fmt.Sprintf("step ran longer than %v: %v", p.opts.StepTimeout, end.err), Retryable: true}
		}
	}
	e.joined()
	end.tail = rec.close()
	cancel()
	end.timedOut = errors.Is(context.Cause(ctx), claims.ErrStepTimeout)
	log.Debug("step joined", "after", time.Since(began), "error", end.err)
	p.metrics.stepSeconds.WithLabelValues(string(end.status(e))).Observe(time.Since(began).Seconds())
	return end
}

// killedBy is the channel that kills what a step runs: the execution's, or,
// for a step that timed out, --kill-after of that.
func (e *execution) killedBy(ctx context.Context) <-chan struct{} {
	context.AfterFunc(ctx, func() {
		if errors.Is(context.Cause(ctx), claims.ErrStepTimeout) {
			e.mu.Lock()
			defer e.mu.Unlock()
			if e.killer == nil {
				e.killer = time.AfterFunc(e.pool.opts.KillAfter, e.kill)
			}
		}
	})
	return e.killed
}

func (end ending) status(e *execution) claims.StepStatus {
	switch {
	case e.is(claims.Cancelling) || e.is(claims.Cancelled):
		return claims.StepInterrupted
	case end.err != nil || !end.called:
		return claims.StepFailed
	default:
		return claims.StepEnded
	}
}

func (p *Pool) history(e *execution) ([]claims.ClosedStep, error) {
	history := []claims.ClosedStep{}
	if p.opts.History == 0 {
		return history, nil
	}
	err := p.persist(e.ctx, "history", e, func(ctx context.Context) (err error) {
		history, err = p.steps.History(ctx, e.session, p.opts.History, p.opts.HistoryBytes)
		return err
	})
	return history, err
}

// call calls the handler, between its snapshots where it takes some; a panic
// in it fails its step, the worker lives on.
func (p *Pool) call(ctx context.Context, e *execution, req Request, out *Output, log *slog.Logger) (result Result, err error) {
	defer func() {
		if v := recover(); v != nil {
			log.Error("handler panicked", "panic", v, "stack", string(debug.Stack()))
			err = &Failure{Code: claims.CodePanic, Message: fmt.Sprint(v)}
		}
	}()
	if err := p.snapshot(ctx, e, req, out, Before); err != nil {
		return Result{}, &Failure{Code: claims.CodeHandler, Message: err.Error(), Retryable: true}
	}
	if !e.mayCall() {
		return Result{}, cmp.Or(context.Cause(e.ctx), claims.ErrInterrupted)
	}
	result, err = p.handler.Step(ctx, req, out)
	if err == nil {
		err = p.snapshot(ctx, e, req, out, After)
	}
	return result, err
}

// snapshot takes a snapshot and puts it out, as the owner only (I7, I16): what
// is lost by not taking one is known, what another owner's would be mixed with
// is not.
func (p *Pool) snapshot(ctx context.Context, e *execution, req Request, out *Output, at SnapshotAt) error {
	s, ok := p.handler.(Snapshotter)
	if !ok || !e.mayCall() {
		return nil
	}
	tree, err := s.Snapshot(ctx, req, at)
	if err != nil {
		return fmt.Errorf("snapshot %s the step: %w", at, err)
	}
	return out.put(claims.SnapshotEvent, claims.SnapshotData{At: string(at), Tree: tree})
}

// join waits for the handler and its finalizers. Past --join-timeout after the
// kill it reports false: the slot is leaked (I10).
func (p *Pool) join(e *execution, ctx context.Context, out *Output, log *slog.Logger) bool {
	select {
	case <-out.joined:
		return true
	case <-e.killed:
	}
	timer := time.NewTimer(p.opts.JoinTimeout)
	defer timer.Stop()
	log.Info("step killed; waiting for it to join", "cause", context.Cause(ctx), "at most", p.opts.JoinTimeout)
	select {
	case <-out.joined:
		return true
	case <-timer.C:
		return false
	}
}

// leak gives up a slot whose step never joined: the claim is revoked and the
// scanner quarantines the session (I10). The slot comes back if it does join.
func (p *Pool) leak(e *execution, end ending, log *slog.Logger) {
	log.Error("step never joined: slot leaked, claim revoked", "join timeout", p.opts.JoinTimeout)
	p.metrics.revoked.WithLabelValues(string(claims.NeverJoined)).Inc()
	p.mu.Lock()
	p.leaked++
	p.mu.Unlock()
	err := p.persist(e.lost(), "revoke", e, func(ctx context.Context) error {
		return p.settle.Revoke(ctx, e.claim, claims.NeverJoined)
	})
	if err != nil && !errors.Is(err, claims.ErrFenced) {
		log.Warn("claim not revoked; it expires with the lease of this process", "error", err)
	}
	p.mu.Lock()
	delete(p.registry, e.id)
	p.idle.Broadcast()
	p.mu.Unlock()
	go func() {
		select {
		case <-end.out.joined:
		case <-p.hard.Done():
			return
		}
		log.Warn("step joined after all; its slot is back")
		p.mu.Lock()
		p.leaked--
		p.mu.Unlock()
		p.unregister(e)
	}()
}

// joined notes how long a cancelled step took to join.
func (e *execution) joined() {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.phase != claims.Running {
		e.pool.metrics.cancelSeconds.WithLabelValues("joined").Observe(time.Since(e.cancelling).Seconds())
		e.cancelling = time.Now()
	}
}

// close closes the step and settles, by the durable phase (I13). It reports
// whether the execution goes on.
func (p *Pool) close(e *execution, step claims.Step, end ending, log *slog.Logger) (again bool) {
	if e.is(claims.Cancelling) || e.is(claims.Cancelled) {
		p.closed(claims.StepInterrupted, p.leave(e, "settle", end.tail, p.settle.Settle))
		return false
	}
	// A process that could not run finds out here, where its step was ended for it, that this was because of its lease.
	e.tenure.trusted()
	if e.ctx.Err() != nil && !end.unasked && (end.err != nil || !end.called) {
		// Shutting down, or the lease is lost: another worker goes on, if the claim is still ours to give.
		p.closed(claims.StepFailed, p.leave(e, "hand_over", end.tail, p.settle.HandOver))
		return false
	}
	finish := p.ending(step, end)
	finish.Yield = step.Index >= p.opts.MaxSteps || end.timedOut || p.isDraining() || !e.tenure.trusted()
	token := claims.Token{ID: uuid.NewString()}
	var settled claims.Settlement
	err := p.persist(e.lost(), "finish", e, func(ctx context.Context) (err error) {
		settled, err = p.steps.Finish(ctx, e.claim, finish, &token)
		return err
	})
	if errors.Is(err, claims.ErrTooLarge) {
		finish.Tail, finish.Continue, finish.Result = nil, false, nil
		finish.Failure = &claims.Failure{Code: claims.CodeHandler, Message: err.Error()}
		token = claims.Token{ID: uuid.NewString()}
		err = p.persist(e.lost(), "finish", e, func(ctx context.Context) (err error) {
			settled, err = p.steps.Finish(ctx, e.claim, finish, &token)
			return err
		})
	}
	if err != nil {
		e.heard(err)
		if errors.Is(err, claims.ErrCancelled) { // the interrupt was first (I9)
			p.closed(claims.StepInterrupted, p.leave(e, "settle", end.tail, p.settle.Settle))
		}
		return false
	}
	p.events.Poke(e.session)
	status := claims.StepEnded
	if finish.Failure != nil {
		status = claims.StepFailed
		log := log.With("code", finish.Failure.Code, "message", finish.Failure.Message)
		if finish.Retry != nil {
			log = log.With("retry in", *finish.Retry)
		}
		log.Info("step failed")
	}
	p.closed(status, nil)
	if !settled.Again {
		p.settled(e, settled)
	}
	return settled.Again
}

// closed counts a step that this worker closed.
func (p *Pool) closed(status claims.StepStatus, err error) {
	if err == nil {
		p.metrics.steps.WithLabelValues(string(status)).Inc()
	}
}

// ending decides what a handler's answer means for its step.
func (p *Pool) ending(step claims.Step, end ending) claims.Ending {
	out := claims.Ending{Step: step, Tail: end.tail}
	if end.err == nil {
		result, err := claims.CleanJSON(orNull(end.result.Value))
		if err == nil {
			out.Result, out.Continue = result, end.result.Continue
			return out
		}
		end.err = fmt.Errorf("result is no JSON: %w", err)
	}
	f := &Failure{Code: claims.CodeHandler, Message: end.err.Error()}
	if typed := (*Failure)(nil); errors.As(end.err, &typed) {
		f = typed
	}
	out.Failure = &claims.Failure{Code: f.Code, Message: shorten(f.Message), Retryable: f.Retryable}
	if f.Retryable && step.Attempt+1 < p.opts.MaxAttempts {
		delay := max(f.After, backoff(p.opts.RetryBase, p.opts.RetryMax, step.Attempt))
		out.Retry = &delay
	}
	return out
}

// maxMessage bounds the message of a failure.
const maxMessage = 8 << 10

func shorten(s string) string {
	if len(s) <= maxMessage {
		return s
	}
	return s[:cut(s, maxMessage)] + "…"
}

// backoff is the delay before a retry: exponential in the attempts so far, with
// jitter over its upper half so that failures together do not come back together.
func backoff(base, longest time.Duration, attempt int) time.Duration {
	d := base
	for range attempt {
		if d >= longest/2 {
			d = longest
			break
		}
		d *= 2
	}
	d = min(d, longest)
	if d <= 1 {
		return d
	}
	return d/2 + rand.N(d/2+1)
}

// leave ends the execution by Settle or HandOver.
func (p *Pool) leave(e *execution, op string, tail []claims.Content,
	f func(context.Context, claims.Claim, []claims.Content, *claims.Token) (claims.Settlement, error),
) error {
	token := claims.Token{ID: uuid.NewString()}
	var settled claims.Settlement
	err := p.persist(e.lost(), op, e, func(ctx context.Context) (err error) {
		settled, err = f(ctx, e.claim, tail, &token)
		return err
	})
	if errors.Is(err, claims.ErrTooLarge) && tail != nil {
		return p.leave(e, op, nil, f) // output that can't be kept does not change the outcome (I13)
	}
	if err != nil {
		e.heard(err)
		p.log.Warn("execution not settled by its owner", "session", e.session, "execution", e.id, "operation", op, "error", err)
		return err
	}
	p.settled(e, settled)
	return nil
}

// settled tells others of a settlement.
func (p *Pool) settled(e *execution, s claims.Settlement) {
	e.mu.Lock()
	if e.phase != claims.Running {
		p.metrics.cancelSeconds.WithLabelValues("settled").Observe(time.Since(e.cancelling).Seconds())
	}
	e.mu.Unlock()
	p.metrics.executions.WithLabelValues(string(s.Outcome)).Inc()
	p.log.Info("execution ended", "session", e.session, "execution", e.id, "epoch", e.epoch, "outcome", s.Outcome)
	p.events.Poke(e.session)
	if !s.Ready {
		return
	}
	ctx, cancel := context.WithTimeout(p.hard, p.opts.DBTimeout)
	defer cancel()
	if err := p.events.Announce(ctx, e.session); err != nil {
		p.log.Warn("ready session not announced; the scanner does", "session", e.session, "error", err)
	}
}

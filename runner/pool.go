// Package runner runs sessions: it holds the slots of a worker, registers
// every execution before its claim is taken, keeps the worker lease, calls the
// handler step by step and settles. It performs no SQL and speaks no NATS;
// what it needs of them are the small interfaces beside it.
//
// What holds it together: an execution is registered before the acquiring
// transaction begins and until its settlement is over, so that an interrupt, a
// lost lease or a shutdown finds it at any moment between (I15). Ownership is
// checked immediately before each call of the handler (I16). A step is closed
// only after the handler and all its finalizers have joined (I10), and what
// closes it is decided by the durable phase, not by the error that came back
// (I13).
package runner

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"time"

	"github.com/google/uuid"

	"reveille/claims"
)

// Acquirer takes claims. Both answer claims.ErrOutcomeUnknown where the claim
// may have been taken: it is then resolved by HandOver, and never run (I3).
type Acquirer interface {
	Apply(ctx context.Context, cmd claims.Command, acq *claims.Acquisition) (claims.Outcome, error)
	Acquire(ctx context.Context, session claims.SessionID, acq claims.Acquisition) (claims.Started, error)
}

// Steps are the durable operations of an owner on its steps. Each is one
// transaction, repeatable under its token; after an error that is no sentinel
// the caller tries again with the same token, or has lost nothing by stopping:
// recovery goes on from the last one that committed. Errors: claims.ErrFenced,
// claims.ErrCancelled. Safe for concurrent use.
type Steps interface {
	StartStep(ctx context.Context, c claims.Claim, id claims.StepID, token *claims.Token) (*claims.Step, claims.Settlement, error)
	Record(ctx context.Context, c claims.Claim, s claims.Step, content []claims.Content, token *claims.Token) error
	Decline(ctx context.Context, c claims.Claim, s claims.Step, tail []claims.Content, reason string, token *claims.Token) error
	Finish(ctx context.Context, c claims.Claim, e claims.Ending, token *claims.Token) (claims.Settlement, error)
	History(ctx context.Context, session claims.SessionID, n, maxBytes int) ([]claims.ClosedStep, error)
}

// Settler ends claims; durability and errors are those of Steps.
type Settler interface {
	Settle(ctx context.Context, c claims.Claim, tail []claims.Content, token *claims.Token) (claims.Settlement, error)
	HandOver(ctx context.Context, c claims.Claim, tail []claims.Content, token *claims.Token) (claims.Settlement, error)
	Revoke(ctx context.Context, c claims.Claim, cause claims.Cause) error
}

// Store is all of the above; *crdb.Store is one.
type Store interface {
	Acquirer
	Steps
	Settler
	Leases
}

// Events is where a pool tells others what it made durable. None of it is
// needed for correctness: the scanner does it where a process died before. Poke
// and PublishLive do not block.
type Events interface {
	Announce(ctx context.Context, session claims.SessionID) error
	Poke(session claims.SessionID)
	PublishLive(session claims.SessionID, epoch int64, step claims.StepID, text string)
}

// Options of a Pool.
type Options struct {
	LeaseOptions
	Worker        string        // its name (--worker-id)
	Version       string        // of the program
	Slots         int           // sessions at once (--slots)
	Grace         time.Duration // for steps to finish at shutdown (--grace)
	JoinTimeout   time.Duration // for a killed step to join before its slot is given up (--join-timeout)
	KillAfter     time.Duration // from a cancellation to the kill (--kill-after)
	StepTimeout   time.Duration // of one step; 0: none (--step-timeout)
	MaxSteps      int           // of one execution (--max-steps)
	MaxAttempts   int           // of one step (--max-attempts)
	RetryBase     time.Duration // delay of the first retry (--retry-base)
	RetryMax      time.Duration // longest delay (--retry-max)
	History       int           // closed steps that a handler gets (--history)
	HistoryBytes  int           // at most (default 1 MiB)
	MaxEventBytes int           // of one event (default 1 MiB less an envelope)
	// Reconcile is how often the process compares its claims with its registry
	// (default 1 min; I3).
	Reconcile time.Duration
}

// Validate checks the options, naming the flag that is wrong.
func (o Options) Validate() error {
	if err := o.LeaseOptions.Validate(); err != nil {
		return err
	}
	for _, n := range []struct {
		name string
		v    int
	}{{"slots", o.Slots}, {"max-steps", o.MaxSteps}, {"max-attempts", o.MaxAttempts}} {
		if n.v < 1 {
			return fmt.Errorf("--%s is %d: want 1 or more", n.name, n.v)
		}
	}
	for _, d := range []struct {
		name string
		v    time.Duration
	}{
		{"grace", o.Grace}, {"kill-after", o.KillAfter}, {"step-timeout", o.StepTimeout}, {"retry-base", o.RetryBase},
	} {
		if d.v < 0 {
			return fmt.Errorf("--%s is %v: want 0 or more", d.name, d.v)
		}
	}
	switch {
	case o.JoinTimeout <= 0:
		return fmt.Errorf("--join-timeout is %v: want more than 0", o.JoinTimeout)
	case o.RetryMax < o.RetryBase:
		return fmt.Errorf("--retry-max %v is below --retry-base %v", o.RetryMax, o.RetryBase)
	case o.History < 0:
		return fmt.Errorf("--history is %d: want 0 or more", o.History)
	}
	return nil
}

// Pool is the slots of one worker process. Its methods are safe for concurrent use.
type Pool struct {
	opts    Options
	handler Handler
	acquire Acquirer
	steps   Steps
	settle  Settler
	leases  Leases
	events  Events
	keeper  *Keeper
	log     *slog.Logger
	metrics *poolMetrics

	// acquiring holds one for each announced session that is being acquired.
	acquiring chan struct{}

	// hard ends when settling is given up: recovery does what is left.
	hard   context.Context
	giveUp context.CancelFunc

	mu       sync.Mutex
	registry map[claims.ExecutionID]*execution
	free     int
	leaked   int
	draining bool
	idle     sync.Cond     // an execution left, or a slot came back
	changed  chan struct{} // buffered: Free may have grown
}

// acquisitions bounds the announced sessions that are acquired at once. Where
// many become due in one moment, their transactions read and write the same
// pages of small tables, and PostgreSQL has them break each other off: of forty
// the last one started after 1.0 to 1.2 s without a bound, after 0.6 s with this
// one (BenchmarkDelayedWakes).
const acquisitions = 4

// NewPool makes a pool; nothing happens before Run. onTenure is called with
// each holder id before anything is acquired under it.
func NewPool(store Store, events Events, handler Handler, o Options, onTenure func(claims.HolderID), log *slog.Logger) (*Pool, error) {
	if o.HistoryBytes == 0 {
		o.HistoryBytes = 1 << 20
	}
	if o.MaxEventBytes == 0 {
		o.MaxEventBytes = 1<<20 - 4096
	}
	if o.Reconcile == 0 {
		o.Reconcile = time.Minute
	}
	if err := o.Validate(); err != nil {
		return nil, err
	}
	p := &Pool{
		opts: o, handler: handler, acquire: store, steps: store, settle: store, leases: store, events: events, log: log,
		registry: map[claims.ExecutionID]*execution{}, free: o.Slots, changed: make(chan struct{}, 1),
		acquiring: make(chan struct{}, acquisitions),
	}
	p.idle.L = &p.mu
	p.hard, p.giveUp = context.WithCancel(context.Background())
	p.metrics = newPoolMetrics(p)
	lease := claims.Lease{Kind: "worker", Name: o.Worker, Version: o.Version, Slots: o.Slots}
	var err error
	if p.keeper, err = NewKeeper(store, o.LeaseOptions, lease, onTenure, log); err != nil {
		return nil, err
	}
	p.keeper.onNotices = func(ns []claims.Notice) {
		for _, n := range ns {
			p.Notice(n)
		}
	}
	return p, nil
}

// Keeper is the pool's worker lease.
func (p *Pool) Keeper() *Keeper { return p.keeper }

// Free is the number of sessions that could start now; 0 without a lease that
// may be trusted, and from Drain on.
func (p *Pool) Free() int {
	if p.keeper.tenure() == nil {
		return 0
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.draining {
		return 0
	}
	return p.free
}

// Changed is signalled when Free may have grown.
func (p *Pool) Changed() <-chan struct{} { return p.changed }

func (p *Pool) signal() {
	select {
	case p.changed <- struct{}{}:
	default:
	}
}

func (p *Pool) busy() int {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.opts.Slots - p.free
}

func (p *Pool) leakedSlots() int {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.leaked
}

func (p *Pool) active(phase claims.Phase) int {
	p.mu.Lock()
	all := make([]*execution, 0, len(p.registry))
	for _, e := range p.registry {
		all = append(all, e)
	}
	p.mu.Unlock()
	n := 0
	for _, e := range all {
		if e.is(phase) {
			n++
		}
	}
	return n
}

// register takes a slot and registers an execution under a fresh id, before its
// claim is taken (I15). It answers nil where there is no slot, no lease that
// may be trusted, or the pool is draining.
func (p *Pool) register(session claims.SessionID) *execution {
	t := p.keeper.tenure()
	if t == nil {
		return nil
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.draining || p.free == 0 {
		return nil
	}
	p.free--
	e := newExecution(p, t, session)
	p.registry[e.id] = e
	return e
}

// unregister ends an execution and gives its slot back.
func (p *Pool) unregister(e *execution) {
	e.stop(nil)
	p.mu.Lock()
	delete(p.registry, e.id)
	p.free++
	p.idle.Broadcast()
	p.mu.Unlock()
	p.signal()
}

// Apply applies a command; with mayAcquire a wake takes a free slot and starts
// its session at once.
func (p *Pool) Apply(ctx context.Context, cmd claims.Command, mayAcquire bool) (claims.Outcome, error) {
	var e *execution
	if mayAcquire && cmd.Kind == claims.Wake {
		e = p.register(cmd.Session)
	}
	if e == nil {
		out, err := p.acquire.Apply(ctx, cmd, nil)
		if err == nil && out.Result == claims.Applied {
			p.events.Poke(cmd.Session)
		}
		return out, err
	}
	out, err := p.acquire.Apply(ctx, cmd, e.acquisition())
	switch {
	case errors.Is(err, claims.ErrOutcomeUnknown):
		p.metrics.acquires.WithLabelValues("unknown").Inc()
		go p.resolve(e)
		return out, err
	case err != nil || out.Started == nil:
		p.unregister(e)
		if err == nil && out.Result == claims.Applied {
			p.events.Poke(cmd.Session)
		}
		return out, err
	}
	p.metrics.acquires.WithLabelValues("acquired").Inc()
	p.events.Poke(cmd.Session)
	go p.run(e, *out.Started)
	return out, nil
}

// Start takes a slot and starts a ready session in the background. It reports
// false where it took no slot.
func (p *Pool) Start(_ context.Context, session claims.SessionID) bool {
	e := p.register(session)
	if e == nil {
		return false
	}
	go func() {
		select {
		case p.acquiring <- struct{}{}:
		case <-p.hard.Done(): // nothing is acquired yet, and the scanner announces it again
			p.unregister(e)
			return
		}
		// Not the caller's context: between COMMIT and the run loop nothing may
		// be cut off (I15).
		started, err := p.acquire.Acquire(p.hard, session, *e.acquisition())
		<-p.acquiring
		switch {
		case err == nil:
			p.metrics.acquires.WithLabelValues("acquired").Inc()
			p.events.Poke(session)
			p.run(e, started)
		case errors.Is(err, claims.ErrOutcomeUnknown):
			p.metrics.acquires.WithLabelValues("unknown").Inc()
			p.resolve(e)
		default:
			p.metrics.acquires.WithLabelValues("busy").Inc()
			p.unregister(e)
			p.refused(session, err)
		}
	}()
	return true
}

// refused logs an acquisition that did not happen, where that is news.
func (p *Pool) refused(session claims.SessionID, err error) {
	for _, expected := range []error{claims.ErrBusy, claims.ErrNotReady, claims.ErrLeaseLost} {
		if errors.Is(err, expected) {
			return
		}
	}
	p.log.Warn("ready session not started; the scanner announces it again", "session", session, "error", err)
	if errors.Is(err, claims.ErrQuarantined) {
		p.events.Poke(session)
	}
}

// resolve answers for an acquisition whose outcome is unknown: a fenced delete
// of its execution id, which nothing of has run (I3).
func (p *Pool) resolve(e *execution) {
	defer p.unregister(e)
	token := claims.Token{ID: uuid.NewString()}
	var settled claims.Settlement
	err := p.persist(p.hard, "resolve", e, func(ctx context.Context) (err error) {
		settled, err = p.settle.HandOver(ctx, claims.Claim{Session: e.session, Execution: e.id}, nil, &token)
		return err
	})
	if err == nil {
		p.settled(e, settled)
	}
}

// Notice takes news of a claim, from an interrupt's notice or a heartbeat's read.
func (p *Pool) Notice(n claims.Notice) {
	p.mu.Lock()
	e := p.registry[n.Execution]
	p.mu.Unlock()
	if e == nil {
		return
	}
	if n.Revoked != claims.None {
		e.lose(fmt.Errorf("%w: claim revoked (%s)", claims.ErrLeaseLost, n.Revoked))
		return
	}
	if n.Phase == claims.Cancelling {
		e.interrupted(n.Since)
	}
}

// Run keeps the lease and reconciles, until ctx ends; call Drain first.
func (p *Pool) Run(ctx context.Context) error {
	var wg sync.WaitGroup
	defer wg.Wait()
	wg.Go(func() { _ = p.keeper.Run(ctx) }) // ends with ctx only
	for sleep(ctx, p.opts.Reconcile) {
		p.reconcile(ctx)
	}
	p.giveUp()
	return nil
}

// reconcile reads all claims that this process holds and then looks each up
// (I3): one that is not registered is revoked; a registered one, known
// committed before that read, that is missing was lost.
func (p *Pool) reconcile(ctx context.Context) {
	holder, ok := p.keeper.Holder()
	if !ok {
		return
	}
	var known []*execution
	p.mu.Lock()
	for _, e := range p.registry {
		if e.committed() && e.tenure.holder == holder {
			known = append(known, e)
		}
	}
	p.mu.Unlock()
	held, err := p.leases.Held(ctx, holder)
	if err != nil {
		p.log.Warn("claims of this worker not compared; done again in a minute", "error", err)
		return
	}
	there := map[claims.ExecutionID]bool{}
	for _, n := range held {
		there[n.Execution] = true
		p.mu.Lock()
		_, registered := p.registry[n.Execution]
		p.mu.Unlock()
		if registered || n.Revoked != claims.None {
			continue
		}
		p.log.Error("claim held by this process, but not run by it: revoked", "session", n.Session, "execution", n.Execution)
		p.metrics.revoked.WithLabelValues(string(claims.Unknown)).Inc()
		if err := p.settle.Revoke(ctx, claims.Claim{Session: n.Session, Execution: n.Execution, Holder: holder}, claims.Unknown); err != nil {
			p.log.Warn("claim not revoked; tried again in a minute", "session", n.Session, "execution", n.Execution, "error", err)
		}
	}
	for _, e := range known {
		if !there[e.id] {
			e.lose(fmt.Errorf("%w: claim is gone", claims.ErrLeaseLost))
		}
	}
}

// Drain ends the pool: nothing is acquired any more; steps have the grace to
// finish, then the rest is cancelled with claims.ErrShutdown and handed over.
// It returns when all run loops are over, or, where settling does not get
// through, when another worker's recovery is as fast: after a lease.
func (p *Pool) Drain() {
	p.mu.Lock()
	p.draining = true
	n := len(p.registry)
	p.mu.Unlock()
	if n > 0 {
		p.log.Info("draining", "executions", n, "grace", p.opts.Grace)
	}
	grace := time.AfterFunc(p.opts.Grace, func() { p.stopAll(claims.ErrShutdown) })
	defer grace.Stop()
	limit := time.AfterFunc(p.opts.Grace+p.opts.KillAfter+p.opts.Lease, p.giveUp)
	defer limit.Stop()
	p.mu.Lock()
	defer p.mu.Unlock()
	for len(p.registry) > 0 {
		p.idle.Wait()
	}
}

func (p *Pool) stopAll(cause error) {
	p.mu.Lock()
	all := make([]*execution, 0, len(p.registry))
	for _, e := range p.registry {
		all = append(all, e)
	}
	p.mu.Unlock()
	if len(all) > 0 {
		p.log.Info("cancelling the steps that still run", "executions", len(all), "cause", cause)
	}
	for _, e := range all {
		e.stop(cause)
	}
}

func (p *Pool) isDraining() bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.draining
}

// persist runs a durable operation until it has an answer: nil, a sentinel, or
// the end of ctx. What it waits for is logged once.
func (p *Pool) persist(ctx context.Context, op string, e *execution, f func(context.Context) error) error {
	waiting := false
	for pause := 20 * time.Millisecond; ; pause = min(2*pause, time.Second) {
		err := f(ctx)
		if err == nil {
			if waiting {
				p.log.Info("durable again", "operation", op, "session", e.session, "execution", e.id)
			}
			return nil
		}
		for _, final := range []error{claims.ErrFenced, claims.ErrCancelled, claims.ErrIllegal, claims.ErrTooLarge, claims.ErrQuarantined} {
			if errors.Is(err, final) {
				return err
			}
		}
		if !waiting {
			waiting = true
			p.log.Warn("waiting for the database", "operation", op, "session", e.session, "execution", e.id, "error", err)
		}
		if !sleep(ctx, pause) {
			return fmt.Errorf("%s: given up: %w", op, err)
		}
	}
}

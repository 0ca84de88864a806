package process

import (
	"context"
	"io"
	"log/slog"
	"os"
	"sync"

	"reveille/bus"
	"reveille/claims"
	"reveille/claims/crdb"
	"reveille/cmd/internal/flags"
	"reveille/cmd/internal/tracing"
	"reveille/runner"
	"reveille/runner/exec"
	"reveille/runner/http"
)

// Worker runs a worker around the handler that the flags say; see runWorker.
func Worker(ctx context.Context, f flags.Worker, stderr io.Writer) error {
	log, opts, err := prepare(f, stderr)
	if err != nil {
		return err
	}
	handler, closeHandler, err := newHandler(ctx, f, log)
	if err != nil {
		return err
	}
	defer closeHandler()
	return runWorker(ctx, f, opts, handler, log)
}

// Custom runs a worker around a handler that the program brings, as Worker does
// around the one of the flags.
func Custom(ctx context.Context, f flags.Worker, handler runner.Handler, stderr io.Writer) error {
	if f.Exec != "" || f.HTTPURL != "" {
		return flags.Usage("--exec and --http-url are of the worker program: this one has a handler of its own")
	}
	log, opts, err := prepare(f, stderr)
	if err != nil {
		return err
	}
	return runWorker(ctx, f, opts, handler, log)
}

// prepare makes the log of a worker, and checks its options.
func prepare(f flags.Worker, stderr io.Writer) (*slog.Logger, runner.Options, error) {
	worker := name(f.WorkerID)
	opts := runner.Options{
		LeaseOptions: leaseOptions(f.Lease), Worker: worker, Version: flags.Version(),
		Slots: f.Slots, Grace: f.Grace, JoinTimeout: f.JoinTimeout, KillAfter: f.KillAfter, StepTimeout: f.StepTimeout,
		MaxSteps: f.MaxSteps, MaxAttempts: f.MaxAttempts, RetryBase: f.RetryBase, RetryMax: f.RetryMax, History: f.History,
	}
	if err := opts.Validate(); err != nil {
		return nil, runner.Options{}, flags.Usage("%v", err)
	}
	return f.Logger(stderr).With("worker", worker), opts, nil
}

// runWorker runs a worker until ctx ends: then it stops the intake, lets steps
// finish for the grace, hands the rest over, relays what is left and closes
// its lease.
func runWorker(ctx context.Context, f flags.Worker, opts runner.Options, handler runner.Handler, log *slog.Logger) error {
	// A slot's loop and its appends, the lanes of the intake, the relay.
	conns := min(8+f.Slots/8, 24)
	p, err := connect(ctx, f.Database, f.NATS, f.DBTimeout, conns, f.HTTP, "reveille-worker "+opts.Worker, log)
	if err != nil {
		return err
	}
	defer p.close()
	spans, err := tracing.Start(ctx, "reveille-worker", opts.Worker, opts.Version, log)
	if err != nil {
		return err
	}
	defer spans.Close(log)

	w := &workerProcess{parts: p}
	live := bus.NewLive(p.conn)
	handler = spans.Handler(handler)
	w.pool, err = runner.NewPool(spans.Store(p.store), events{bus.NewAnnouncer(p.conn), p.relay, live}, handler, opts, w.subscribe, log)
	if err != nil {
		return err
	}
	streams := bus.StreamOptions{Replicas: f.Replicas, MaxClockSkew: f.MaxClockSkew}
	ready := bus.NewReady(p.conn, w.pool, bus.ReadyOptions{Streams: streams, Logger: log})
	intake := bus.NewIntake(p.conn, newApplier(w.pool, p.store, ready, spans), bus.IntakeOptions{
		Streams: streams, MaxInputBytes: f.MaxInputBytes, Logger: log,
	})
	p.registry.MustRegister(w.pool.Collectors()...)
	p.registry.MustRegister(w.pool.Keeper().Collectors()...)
	p.registry.MustRegister(intake.Collectors()...)
	p.web.check(p.healthy(w.pool.Keeper()))

	base := context.WithoutCancel(ctx)
	background := start(base, w.pool.Run, p.relay.Run, live.Run)
	taking := start(ctx, intake.Run, ready.Run)
	log.Info("worker up", "version", flags.Version(), "slots", f.Slots, "http", f.HTTP)
	<-ctx.Done()
	log.Info("stopping: no new work is taken")
	taking.wait()
	w.pool.Drain()
	flush, cancel := context.WithTimeout(base, flushTimeout)
	defer cancel()
	if err := p.relay.Flush(flush); err != nil {
		log.Warn("not all events are relayed; the scanner does", "error", err)
	}
	background.stop()
	w.unsubscribe()
	log.Info("worker down")
	return nil
}

// newHandler makes what runs the steps; it is to be closed after the last one.
func newHandler(ctx context.Context, f flags.Worker, log *slog.Logger) (_ runner.Handler, closeHandler func(), err error) {
	if f.Handler == "http" {
		if f.HTTPURL == "" {
			return nil, nil, flags.Usage("--handler http needs --http-url URL, where a step is posted")
		}
		h, err := http.New(http.Options{URL: f.HTTPURL})
		if err != nil {
			return nil, nil, flags.Usage("--http-url: %v", err)
		}
		return h, h.Close, nil
	}
	if f.Exec == "" {
		return nil, nil, flags.Usage("--handler exec needs --exec CMD, the command that runs a step (--handler http needs --http-url URL)")
	}
	guard, err := exec.StartGuard(context.WithoutCancel(ctx))
	if err != nil {
		return nil, nil, err
	}
	h, err := exec.New(exec.Options{Command: f.Exec, KillAfter: f.KillAfter, Log: log, Guard: guard})
	if err != nil {
		guard.Close()
		return nil, nil, flags.Usage("%v", err)
	}
	return h, guard.Close, nil
}

func leaseOptions(l flags.Lease) runner.LeaseOptions {
	return runner.LeaseOptions{
		Lease: l.Lease, Heartbeat: l.Heartbeat, MaxClockSkew: l.MaxClockSkew, StopMargin: l.StopMargin, DBTimeout: l.DBTimeout,
	}
}

// workerProcess keeps the subscription to the notices of the present holder.
type workerProcess struct {
	*parts
	pool *runner.Pool

	mu   sync.Mutex
	stop func()
}

// subscribe follows a new tenure. Where it fails, the heartbeat's read is the
// fall-back.
func (w *workerProcess) subscribe(holder claims.HolderID) {
	w.unsubscribe()
	stop, err := bus.SubscribeNotices(w.conn, holder, func(n claims.Notice) { w.pool.Notice(n) })
	if err != nil {
		w.log.Warn("no notices; interrupts are seen at the next heartbeat", "error", err)
		return
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	w.stop = stop
}

func (w *workerProcess) unsubscribe() {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.stop != nil {
		w.stop()
		w.stop = nil
	}
}

// applier applies commands through the pool, which may take the claim where no
// older ready session waits.
type applier struct {
	apply tracing.Apply
	store *crdb.Store
	ready *bus.Ready
}

func newApplier(pool *runner.Pool, store *crdb.Store, ready *bus.Ready, spans *tracing.Spans) applier {
	return applier{spans.Apply(pool.Apply), store, ready}
}

func (a applier) Apply(ctx context.Context, cmd claims.Command, mayAcquire bool) (claims.Outcome, error) {
	return a.apply(ctx, cmd, mayAcquire && a.ready.Empty())
}

func (a applier) PassOver(ctx context.Context, cmd claims.Command) error {
	return a.store.PassOver(ctx, cmd)
}

// group is a set of parts that run until they are told to stop.
type group struct {
	cancel context.CancelFunc
	wg     sync.WaitGroup
}

func start(ctx context.Context, runs ...func(context.Context) error) *group {
	g := &group{}
	ctx, g.cancel = context.WithCancel(ctx)
	for _, run := range runs {
		g.wg.Go(func() { _ = run(ctx) }) // each ends with its context only
	}
	return g
}

// wait waits for a group whose context has ended.
func (g *group) wait() {
	g.wg.Wait()
	g.cancel()
}

func (g *group) stop() {
	g.cancel()
	g.wg.Wait()
}

// IsGuard reports whether this process was started to guard a worker's
// commands; RunGuard then is all it does.
func IsGuard(args []string) bool { return exec.IsGuard(args) }

// RunGuard guards until the worker is gone, and returns the exit code.
func RunGuard() int { return exec.RunGuard(os.Stdin) }

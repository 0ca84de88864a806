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
	pool  *runner.Pool
	store *crdb.Store
	ready *bus.Ready
}

func (a applier) Apply(ctx context.Context, cmd claims.Command, mayAcquire bool) (claims.Outcome, error) {
	return a.pool.Apply(ctx, cmd, mayAcquire && a.ready.Empty())
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

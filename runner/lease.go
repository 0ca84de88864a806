package runner

import (
	"context"
	"fmt"
	"log/slog"
	"sync"
	"time"

	"github.com/google/uuid"

	"reveille/claims"
)

// Leases is where the worker lease of a process lives. Its times are the
// database's (I4). Heartbeat reports false where the lease has expired or is
// gone; after an error the lease is as it was or extended, and neither may be
// trusted. Implementations are safe for concurrent use.
type Leases interface {
	OpenLease(ctx context.Context, l claims.Lease, ttl time.Duration) error
	Heartbeat(ctx context.Context, holder claims.HolderID, ttl time.Duration) (bool, error)
	CloseLease(ctx context.Context, holder claims.HolderID) error
	Notices(ctx context.Context, holder claims.HolderID) ([]claims.Notice, error)
	Held(ctx context.Context, holder claims.HolderID) ([]claims.Notice, error)
}

// LeaseOptions are the times of a worker lease.
type LeaseOptions struct {
	Lease        time.Duration // --lease
	Heartbeat    time.Duration // --heartbeat
	MaxClockSkew time.Duration // --max-clock-skew
	StopMargin   time.Duration // --stop-margin: from cancelling the steps to killing them
	DBTimeout    time.Duration // --db-timeout
}

// Validate refuses times under which a process could not know that it lost its
// lease before somebody else takes over (I8).
func (o LeaseOptions) Validate() error {
	for _, d := range []struct {
		name string
		v    time.Duration
	}{{"lease", o.Lease}, {"heartbeat", o.Heartbeat}, {"db-timeout", o.DBTimeout}} {
		if d.v <= 0 {
			return fmt.Errorf("--%s is %v: want more than 0", d.name, d.v)
		}
	}
	if o.MaxClockSkew < 0 || o.StopMargin < 0 {
		return fmt.Errorf("--max-clock-skew is %v, --stop-margin %v: want 0 or more", o.MaxClockSkew, o.StopMargin)
	}
	least := o.MaxClockSkew + o.StopMargin + 2*o.Heartbeat + o.DBTimeout
	if o.Lease < least {
		return fmt.Errorf("--lease %v is too short: want at least %v, which is --max-clock-skew %v + --stop-margin %v + 2 × --heartbeat %v + --db-timeout %v",
			o.Lease, least, o.MaxClockSkew, o.StopMargin, o.Heartbeat, o.DBTimeout)
	}
	return nil
}

// tenure is the time of one holder id. Once it is over it stays over, even
// where a late heartbeat commits (I4).
type tenure struct {
	holder claims.HolderID
	opts   *LeaseOptions

	// lost is cancelled with ErrLeaseLost when the tenure is over; killed is
	// closed when what still runs of it must be gone (I7).
	lost   context.Context
	lose   context.CancelCauseFunc
	killed chan struct{}

	mu        sync.Mutex
	sent      time.Time // when the last heartbeat that committed was sent
	over      bool
	dead      bool // killed is closed
	followers map[*func(time.Time)]struct{}
}

func newTenure(holder claims.HolderID, opts *LeaseOptions, sent time.Time) *tenure {
	t := &tenure{holder: holder, opts: opts, sent: sent, killed: make(chan struct{}), followers: map[*func(time.Time)]struct{}{}}
	t.lost, t.lose = context.WithCancelCause(context.Background())
	return t
}

// elapsed is the time since an instant by the monotonic and the wall clock,
// whichever says more (I7): the first stands still while a machine sleeps, the
// second can be set back.
func elapsed(since time.Time) time.Duration {
	now := time.Now()
	return max(now.Sub(since), now.Round(0).Sub(since.Round(0)))
}

// check ends the tenure where its time is up, and returns how long until the
// next thing happens to it. It is asked before every use, so that a process
// that was stopped past its lease finds out before it does anything.
func (t *tenure) check() (trusted bool, next time.Duration) {
	t.mu.Lock()
	defer t.mu.Unlock()
	age := elapsed(t.sent)
	kill := t.opts.Lease - t.opts.MaxClockSkew
	stop := kill - t.opts.StopMargin
	if age >= stop && !t.over {
		t.end()
	}
	if age >= kill && !t.dead {
		t.dead = true
		close(t.killed)
	}
	switch {
	case !t.over:
		return true, stop - age
	case !t.dead:
		return false, kill - age
	default:
		return false, t.opts.Lease
	}
}

// end makes the tenure over. Callers hold mu.
func (t *tenure) end() {
	t.over = true
	t.lose(claims.ErrLeaseLost)
}

// refuse ends the tenure because the database said that it has expired: there
// is no time left to be killed in.
func (t *tenure) refuse() {
	t.mu.Lock()
	defer t.mu.Unlock()
	if !t.over {
		t.end()
	}
	if !t.dead {
		t.dead = true
		close(t.killed)
	}
	for f := range t.followers {
		(*f)(time.Now())
	}
}

// renew trusts the tenure from when the heartbeat was sent, not from when it
// was answered. An answer past the deadline is too late, also where no timer has
// had a turn since (I4).
func (t *tenure) renew(sent time.Time) {
	if !t.trusted() {
		return
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	if !t.over && sent.After(t.sent) {
		t.sent = sent
		for f := range t.followers {
			(*f)(t.until())
		}
	}
}

// until is when what runs of the tenure must be gone. Callers hold mu.
func (t *tenure) until() time.Time { return t.sent.Add(t.opts.Lease - t.opts.MaxClockSkew) }

// Holder implements Deadline.
func (t *tenure) Holder() claims.HolderID { return t.holder }

// Follow implements Deadline.
func (t *tenure) Follow(f func(until time.Time)) (stop func()) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.followers[&f] = struct{}{}
	f(t.until())
	return func() {
		t.mu.Lock()
		defer t.mu.Unlock()
		delete(t.followers, &f)
	}
}

func (t *tenure) trusted() bool {
	ok, _ := t.check()
	return ok
}

// Keeper keeps the worker lease of this process: it opens one, sends one
// heartbeat for all that the process runs (I17), distrusts it by the process's
// own clocks (I7), and where it was lost goes on as a new holder (I4). A
// process has one Keeper; its methods are safe for concurrent use.
type Keeper struct {
	store   Leases
	opts    LeaseOptions
	lease   claims.Lease // without a holder
	log     *slog.Logger
	metrics *leaseMetrics

	// onNotices takes what a heartbeat read of the holder's claims.
	onNotices func([]claims.Notice)
	// onTenure takes each new holder before it is used.
	onTenure func(claims.HolderID)

	mu      sync.Mutex
	current *tenure // nil: none yet, or the last one is over
	opened  chan struct{}
}

// NewKeeper makes a Keeper for a lease of this kind, name, version and number
// of slots; its holder id is made anew at every tenure. onTenure is called
// with each new holder before anything is acquired under it; it may be nil.
func NewKeeper(store Leases, opts LeaseOptions, lease claims.Lease, onTenure func(claims.HolderID), log *slog.Logger) (*Keeper, error) {
	if err := opts.Validate(); err != nil {
		return nil, err
	}
	if onTenure == nil {
		onTenure = func(claims.HolderID) {}
	}
	return &Keeper{
		store: store, opts: opts, lease: lease, log: log, metrics: newLeaseMetrics(),
		onNotices: func([]claims.Notice) {}, onTenure: onTenure, opened: make(chan struct{}),
	}, nil
}

// Holder returns the holder id of the present tenure, and false where there is
// none that may be trusted at this instant.
func (k *Keeper) Holder() (claims.HolderID, bool) {
	t := k.tenure()
	if t == nil {
		return "", false
	}
	return t.holder, true
}

// Opened is closed once the first lease is open.
func (k *Keeper) Opened() <-chan struct{} { return k.opened }

// tenure returns the present tenure, nil where none may be trusted.
func (k *Keeper) tenure() *tenure {
	k.mu.Lock()
	t := k.current
	k.mu.Unlock()
	if t == nil || !t.trusted() {
		return nil
	}
	return t
}

// Run keeps the lease until ctx ends, and then closes the row where no claim
// names it; else it expires.
func (k *Keeper) Run(ctx context.Context) error {
	var watch sync.WaitGroup
	defer watch.Wait()
	for ctx.Err() == nil {
		t := k.open(ctx)
		if t == nil {
			break
		}
		watch.Go(t.watch) // also after its loss, until what runs of it must be gone
		k.beat(ctx, t)
		if ctx.Err() == nil { // the tenure is over, the process is not
			k.metrics.lost.Inc()
			k.log.Warn("worker lease lost; going on as a new holder", "holder", t.holder)
			continue
		}
		closing, cancel := context.WithTimeout(context.WithoutCancel(ctx), k.opts.DBTimeout)
		if err := k.store.CloseLease(closing, t.holder); err != nil {
			k.log.Warn("worker lease not closed; it expires", "holder", t.holder, "error", err)
		}
		cancel()
		t.refuse()
	}
	return nil
}

// watch runs the deadlines of a tenure until it is dead. The wall clock may
// jump, so it looks at least every half second.
func (t *tenure) watch() {
	const longest = 500 * time.Millisecond
	for {
		_, next := t.check()
		timer := time.NewTimer(min(max(next, 0), longest))
		select {
		case <-t.killed:
			timer.Stop()
			return
		case <-timer.C:
		}
	}
}

// open opens a lease under a new holder id, waiting for the database.
func (k *Keeper) open(ctx context.Context) *tenure {
	lease := k.lease
	waiting := false
	for pause := 100 * time.Millisecond; ; pause = min(2*pause, 2*time.Second) {
		lease.Holder = claims.HolderID(uuid.NewString())
		sent := time.Now()
		err := k.store.OpenLease(ctx, lease, k.opts.Lease)
		if err == nil {
			t := newTenure(lease.Holder, &k.opts, sent)
			if t.trusted() {
				k.onTenure(t.holder)
				k.mu.Lock()
				if k.current == nil {
					close(k.opened)
				}
				k.current = t
				k.mu.Unlock()
				k.log.Info("worker lease open", "holder", t.holder, "name", lease.Name)
				return t
			}
			continue // it took longer than the lease lasts
		}
		if ctx.Err() != nil {
			return nil
		}
		if !waiting {
			waiting = true
			k.log.Warn("waiting for the database to open a worker lease", "error", err)
		}
		if !sleep(ctx, pause) {
			return nil
		}
	}
}

// beat sends heartbeats until the tenure is over or ctx ends.
func (k *Keeper) beat(ctx context.Context, t *tenure) {
	failing := false
	for {
		wait := k.opts.Heartbeat
		if failing {
			wait = max(k.opts.Heartbeat/5, 10*time.Millisecond)
		}
		timer := time.NewTimer(wait)
		select {
		case <-ctx.Done():
			timer.Stop()
			return
		case <-t.lost.Done():
			timer.Stop()
			return
		case <-timer.C:
		}
		sent := time.Now()
		renewed, err := k.store.Heartbeat(ctx, t.holder, k.opts.Lease)
		result := "renewed"
		switch {
		case err != nil:
			result = "error"
		case !renewed:
			result = "expired"
		}
		k.metrics.observe(result, time.Since(sent))
		switch {
		case ctx.Err() != nil:
			return
		case err != nil:
			if !failing {
				k.log.Warn("heartbeat failed; waiting for the database", "holder", t.holder, "error", err)
			}
			failing = true
			continue
		case !renewed:
			t.refuse()
			return
		}
		if failing {
			k.log.Info("heartbeats go on", "holder", t.holder)
		}
		failing = false
		t.renew(sent)
		if !t.trusted() { // it was answered past the deadline
			return
		}
		k.readNotices(ctx, t)
	}
}

// readNotices is the fall-back for notices that were lost: one read by index
// of the claims that are not plainly running (I17).
func (k *Keeper) readNotices(ctx context.Context, t *tenure) {
	notices, err := k.store.Notices(ctx, t.holder)
	if err != nil {
		if ctx.Err() == nil {
			k.log.Warn("claims of this worker not read; the next heartbeat reads them", "holder", t.holder, "error", err)
		}
		return
	}
	k.onNotices(notices)
}

// sleep waits, and reports false where ctx ended first.
func sleep(ctx context.Context, d time.Duration) bool {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-ctx.Done():
		return false
	case <-timer.C:
		return true
	}
}

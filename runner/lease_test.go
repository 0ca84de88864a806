package runner

import (
	"context"
	"errors"
	"log/slog"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"reveille/claims"
)

// leases is a lease table in memory. Its heartbeats answer what beat says.
type leases struct {
	mu      sync.Mutex
	opened  []claims.HolderID
	closed  []claims.HolderID
	beats   int
	reads   int
	open    func() error
	beat    func(n int) (bool, error) // n counts from 1
	notices []claims.Notice
}

func (l *leases) OpenLease(_ context.Context, lease claims.Lease, _ time.Duration) error {
	if l.open != nil {
		if err := l.open(); err != nil {
			return err
		}
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	l.opened = append(l.opened, lease.Holder)
	return nil
}

func (l *leases) Heartbeat(context.Context, claims.HolderID, time.Duration) (bool, error) {
	l.mu.Lock()
	l.beats++
	n := l.beats
	l.mu.Unlock()
	if l.beat == nil {
		return true, nil
	}
	return l.beat(n)
}

func (l *leases) CloseLease(_ context.Context, h claims.HolderID) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.closed = append(l.closed, h)
	return nil
}

func (l *leases) Notices(context.Context, claims.HolderID) ([]claims.Notice, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.reads++
	return l.notices, nil
}

func (l *leases) Held(context.Context, claims.HolderID) ([]claims.Notice, error) { return nil, nil }

func testLease() LeaseOptions {
	return LeaseOptions{Lease: 15 * time.Second, Heartbeat: 5 * time.Second, MaxClockSkew: time.Second, StopMargin: time.Second, DBTimeout: 2 * time.Second}
}

// keep runs a keeper until the test's bubble is told to stop.
func keep(t *testing.T, l *leases) (*Keeper, func()) {
	t.Helper()
	k, err := NewKeeper(l, testLease(), claims.Lease{Kind: "worker", Name: "w"}, nil, slog.New(slog.DiscardHandler))
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan struct{})
	go func() {
		defer close(done)
		_ = k.Run(ctx)
	}()
	<-k.Opened()
	return k, func() {
		cancel()
		<-done
	}
}

func isClosed(c <-chan struct{}) bool {
	select {
	case <-c:
		return true
	default:
		return false
	}
}

// The steps are cancelled at sent + lease − skew − margin and killed at
// sent + lease − skew, with sent before the last heartbeat that committed,
// database reachable or not.
func TestI7Deadlines(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l := &leases{beat: func(n int) (bool, error) {
			if n == 1 {
				time.Sleep(time.Second) // the answer takes its time: trust counts from before it
				return true, nil
			}
			return false, errors.New("no route to the database")
		}}
		k, stop := keep(t, l)
		defer stop()
		tenure := k.tenure()
		began := time.Now() // the first heartbeat is sent 5 s from here
		at := func(d time.Duration) {
			time.Sleep(time.Until(began.Add(d)))
			synctest.Wait()
		}
		at(17*time.Second + 999*time.Millisecond)
		if _, ok := k.Holder(); !ok || tenure.lost.Err() != nil {
			t.Error("distrusted before sent + lease − skew − margin")
		}
		at(18 * time.Second)
		if h, ok := k.Holder(); ok && h == tenure.holder {
			t.Error("trusted at sent + lease − skew − margin")
		}
		if !errors.Is(context.Cause(tenure.lost), claims.ErrLeaseLost) || isClosed(tenure.killed) {
			t.Errorf("cause %v, killed %v; want ErrLeaseLost and not killed yet", context.Cause(tenure.lost), isClosed(tenure.killed))
		}
		at(18*time.Second + 999*time.Millisecond)
		if isClosed(tenure.killed) {
			t.Error("killed before sent + lease − skew")
		}
		at(19 * time.Second)
		if !isClosed(tenure.killed) {
			t.Error("not killed at sent + lease − skew")
		}
	})
}

// A heartbeat that was refused ends the tenure at once; the process goes on as
// a new holder, and never again as the old one.
func TestI4RefusedHeartbeat(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l := &leases{beat: func(n int) (bool, error) { return n != 1, nil }}
		k, stop := keep(t, l)
		first := k.tenure()
		time.Sleep(5 * time.Second)
		synctest.Wait()
		if !isClosed(first.killed) || first.trusted() {
			t.Error("the old tenure goes on")
		}
		second, ok := k.Holder()
		if !ok || second == first.holder {
			t.Errorf("holder %s, %v; the old one is %s", second, ok, first.holder)
		}
		stop()
		if !slices.Equal(l.closed, []claims.HolderID{second}) {
			t.Errorf("closed %v, want the last lease only", l.closed)
		}
	})
}

// A heartbeat that commits and is answered past the deadline does not bring
// the tenure back (I4, I7).
func TestI4LateHeartbeat(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l := &leases{beat: func(n int) (bool, error) {
			if n == 1 {
				time.Sleep(20 * time.Second)
			}
			return true, nil
		}}
		k, stop := keep(t, l)
		defer stop()
		first := k.tenure()
		time.Sleep(26 * time.Second)
		synctest.Wait()
		if first.trusted() || !isClosed(first.killed) {
			t.Error("a late heartbeat revived the tenure")
		}
		if h, ok := k.Holder(); !ok || h == first.holder {
			t.Errorf("goes on as %s, %v", h, ok)
		}
	})
}

// A deadline is followed from where it is, and wherever a heartbeat moves it.
func TestI7DeadlineIsFollowed(t *testing.T) {
	o, sent := testLease(), time.Now()
	tenure := newTenure("h", &o, sent)
	var heard []time.Duration
	stop := tenure.Follow(func(until time.Time) { heard = append(heard, until.Sub(sent)) })
	tenure.renew(sent.Add(time.Second))
	tenure.renew(sent) // an older one
	tenure.renew(sent.Add(3 * time.Second))
	stop()
	stop()
	tenure.renew(sent.Add(4 * time.Second))
	if lasts := o.Lease - o.MaxClockSkew; !slices.Equal(heard, []time.Duration{lasts, lasts + time.Second, lasts + 3*time.Second}) {
		t.Errorf("heard %v", heard)
	}
}

// An answer that comes past the deadline does not bring the tenure back, also where the process could not run and no timer
// has had a turn since (I4).
func TestI4LateAnswerOfAStoppedProcess(t *testing.T) {
	o := testLease()
	late := newTenure("h", &o, time.Now().Add(o.MaxClockSkew+o.StopMargin-o.Lease))
	late.renew(time.Now().Add(-o.Heartbeat / 2))
	if late.trusted() {
		t.Error("revived")
	}
}

// A refused heartbeat leaves no time: who follows the deadline hears so.
func TestI4RefusalMovesTheDeadline(t *testing.T) {
	o := testLease()
	tenure := newTenure("h", &o, time.Now())
	var until time.Time
	tenure.Follow(func(u time.Time) { until = u })
	tenure.refuse()
	if until.After(time.Now()) {
		t.Errorf("the deadline is in %v", time.Until(until))
	}
}

// A lease whose opening took longer than it may be trusted is not used.
func TestI7SlowOpen(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		opens := 0
		l := &leases{}
		l.open = func() error {
			if opens++; opens == 1 {
				time.Sleep(14 * time.Second)
			}
			return nil
		}
		k, stop := keep(t, l)
		defer stop()
		if h, ok := k.Holder(); !ok || h != l.opened[1] {
			t.Errorf("holder %s, %v of %v", h, ok, l.opened)
		}
	})
}

// The clocks are the monotonic and the wall one, and the earlier deadline
// wins: a wall clock that was set forward counts, one that was set back does not.
func TestI7Elapsed(t *testing.T) {
	now := time.Now()
	if got := elapsed(now.Add(-time.Hour)); got < time.Hour {
		t.Errorf("an hour ago is %v ago", got)
	}
	wallOnly := now.Add(-time.Hour).Round(0)
	if got := elapsed(wallOnly); got < time.Hour {
		t.Errorf("an hour ago by the wall clock is %v ago", got)
	}
}

// One heartbeat and one read, whatever is held (I17).
func TestI17OneHeartbeatOneRead(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l := &leases{}
		_, stop := keep(t, l)
		time.Sleep(50*time.Second + time.Millisecond)
		synctest.Wait()
		stop()
		if l.beats != 10 || l.reads != 10 {
			t.Errorf("%d heartbeats and %d reads in ten intervals", l.beats, l.reads)
		}
	})
}

func TestI8Validate(t *testing.T) {
	for name, c := range map[string]struct {
		change func(*LeaseOptions)
		says   string // empty: accepted
	}{
		"defaults":           {func(*LeaseOptions) {}, ""},
		"exactly enough":     {func(o *LeaseOptions) { o.Lease = 14 * time.Second }, ""},
		"a lease too short":  {func(o *LeaseOptions) { o.Lease = 14*time.Second - 1 }, "--max-clock-skew 1s + --stop-margin 1s + 2 × --heartbeat 5s + --db-timeout 2s"},
		"more skew":          {func(o *LeaseOptions) { o.MaxClockSkew = 3 * time.Second }, "want at least 16s"},
		"no lease":           {func(o *LeaseOptions) { o.Lease = 0 }, "--lease is 0s"},
		"no heartbeat":       {func(o *LeaseOptions) { o.Heartbeat = 0 }, "--heartbeat is 0s"},
		"negative skew":      {func(o *LeaseOptions) { o.MaxClockSkew = -1 }, "--max-clock-skew"},
		"no database timout": {func(o *LeaseOptions) { o.DBTimeout = 0 }, "--db-timeout is 0s"},
	} {
		o := testLease()
		c.change(&o)
		err := o.Validate()
		if (err == nil) != (c.says == "") || err != nil && !strings.Contains(err.Error(), c.says) {
			t.Errorf("%s: %v, want %q", name, err, c.says)
		}
	}
}

func TestBackoff(t *testing.T) {
	for attempt, want := range []time.Duration{time.Second, 2 * time.Second, 4 * time.Second, 8 * time.Second, 10 * time.Second, 10 * time.Second} {
		for range 100 {
			if got := backoff(time.Second, 10*time.Second, attempt); got < want/2 || got > want {
				t.Fatalf("attempt %d: %v, want %v to %v", attempt, got, want/2, want)
			}
		}
	}
	if got := backoff(0, 0, 3); got != 0 {
		t.Errorf("no delay is %v", got)
	}
}

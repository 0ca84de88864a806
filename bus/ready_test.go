package bus

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"reveille/claims"
)

// fakeSlots are a worker's slots; a started session keeps its slot until done.
type fakeSlots struct {
	mu      sync.Mutex
	free    int
	changed chan struct{}
	started chan claims.SessionID
	before  func(claims.SessionID) bool // of Start; false: refuse
}

func newSlots(n int) *fakeSlots {
	return &fakeSlots{free: n, changed: make(chan struct{}, 1), started: make(chan claims.SessionID, 10000)}
}

func (s *fakeSlots) Free() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.free
}

func (s *fakeSlots) Changed() <-chan struct{} { return s.changed }

func (s *fakeSlots) Start(_ context.Context, id claims.SessionID) bool {
	if s.before != nil && !s.before(id) {
		return false
	}
	s.mu.Lock()
	if s.free <= 0 {
		s.mu.Unlock()
		return false
	}
	s.free--
	s.mu.Unlock()
	s.started <- id
	return true
}

// add frees slots, or takes them past the queue as a wake does.
func (s *fakeSlots) add(n int) {
	s.mu.Lock()
	s.free += n
	s.mu.Unlock()
	if n > 0 {
		signal(s.changed)
	}
}

func announceAll(t testing.TB, c *Conn, ids ...claims.SessionID) {
	t.Helper()
	a := NewAnnouncer(c)
	for _, id := range ids {
		if err := a.Announce(testContext(t), id); err != nil {
			t.Fatal(err)
		}
	}
}

// pendingReady is what the ready durable has delivered and not got back.
func pendingReady(t testing.TB, c *Conn, st *Streams) (ackPending, waiting, redelivered int) {
	t.Helper()
	info, err := consumerInfo(testContext(t), c.js, "RV_READY", st.Ready())
	if err != nil {
		t.Fatal(err)
	}
	return info.NumAckPending, info.NumWaiting, info.NumRedelivered
}

func TestAnnounce(t *testing.T) {
	c, _ := startServer(t).connectWith(StreamOptions{})
	announceAll(t, c, "a", "a", "b", "a")
	equal(t, "announced", messages(t, c, "RV_READY"), 2)
	if err := c.js.DeleteStream(testContext(t), "RV_READY"); err != nil {
		t.Fatal(err)
	}
	if err := NewAnnouncer(c).Announce(testContext(t), "a"); err == nil {
		t.Error("announced without a stream")
	}
}

// TestReadyTakesTheNext: as slots free, the oldest announcement is taken, and
// its message is gone before the session is started.
func TestReadyTakesTheNext(t *testing.T) {
	c, st := startServer(t).connectWith(StreamOptions{})
	slots := newSlots(1)
	slots.before = func(id claims.SessionID) bool {
		_, err := c.directGet(testContext(t), "RV_READY", getRequest{LastBy: "rv.ready." + string(id)})
		if err == nil {
			t.Errorf("%s is started while its announcement is there", id)
		}
		return true
	}
	announceAll(t, c, session(1), session(2), session(3))
	r := NewReady(c, slots, ReadyOptions{Logger: testLog(t)})
	run(t, r.Run)
	for i := 1; i <= 3; i++ {
		equal(t, "started", receive(t, "a session", slots.started), session(i))
		ackPending, waiting, _ := pendingReady(t, c, st)
		if ackPending != 0 || waiting != 0 {
			t.Errorf("with no slot free: %d parked, %d pulls", ackPending, waiting)
		}
		if r.Empty() {
			t.Error("a worker without a slot says that the queue is empty")
		}
		slots.add(1)
	}
	eventually(t, "the queue is known to be empty", r.Empty)
	announceAll(t, c, session(4))
	equal(t, "started", receive(t, "a session", slots.started), session(4))
}

// TestReadyParksNone: of two workers one is busy; the other gets all, at once.
func TestReadyParksNone(t *testing.T) {
	srv := startServer(t)
	c, st := srv.connectWith(StreamOptions{})
	busy, idle := newSlots(8), newSlots(100)
	r := NewReady(c, busy, ReadyOptions{Logger: testLog(t)})
	run(t, r.Run)
	eventually(t, "the first worker's pull stands", func() bool { _, n, _ := pendingReady(t, c, st); return n == 1 && r.Empty() })
	busy.add(-8) // wakes took all its slots past the queue
	announceAll(t, c, session(0))
	eventually(t, "the pull is withdrawn", func() bool { _, n, _ := pendingReady(t, c, st); return n == 0 })
	info, err := consumerInfo(testContext(t), c.js, "RV_READY", st.Ready())
	if err != nil || info.Delivered.Consumer > 1 {
		t.Errorf("one announcement was delivered %d times to a worker without a slot, %v", info.Delivered.Consumer, err)
	}
	run(t, NewReady(srv.connect(), idle, ReadyOptions{Logger: testLog(t)}).Run)
	began := time.Now()
	for i := range 50 {
		announceAll(t, c, session(i))
	}
	for range 50 {
		receive(t, "a session", idle.started)
	}
	if d := time.Since(began); d > ackWait/2 {
		t.Errorf("it took %v", d)
	}
	equal(t, "started by the busy one", len(busy.started), 0)
}

// TestReadyNothingInLimbo: many workers that stop and start; every session is
// started once, none waits for the ack wait.
func TestReadyNothingInLimbo(t *testing.T) {
	srv := startServer(t)
	c, _ := srv.connectWith(StreamOptions{})
	var mu sync.Mutex
	starts := map[claims.SessionID]int{}
	const n = 300
	var wg sync.WaitGroup
	for w := range 4 {
		wc := srv.connect()
		wg.Go(func() {
			for round := range 5 {
				slots := newSlots(3 + w)
				slots.before = func(id claims.SessionID) bool {
					mu.Lock()
					defer mu.Unlock()
					starts[id]++
					return true
				}
				stop := run(t, NewReady(wc, slots, ReadyOptions{Logger: testLog(t)}).Run)
				for range 5 + round {
					select {
					case <-slots.started:
						slots.add(1)
					case <-time.After(time.Second):
					}
				}
				stop()
			}
		})
	}
	for i := range n {
		announceAll(t, c, session(i))
	}
	wg.Wait()
	// Who comes now gets all that is left, at once.
	slots := newSlots(n)
	slots.before = func(id claims.SessionID) bool {
		mu.Lock()
		defer mu.Unlock()
		starts[id]++
		return true
	}
	stopped := time.Now()
	run(t, NewReady(c, slots, ReadyOptions{Logger: testLog(t)}).Run)
	eventually(t, "all are started", func() bool { mu.Lock(); defer mu.Unlock(); return len(starts) == n })
	if d := time.Since(stopped); d > ackWait/2 {
		t.Errorf("something waited for the ack wait: %v", d)
	}
	equal(t, "announcements left", messages(t, c, "RV_READY"), 0)
	mu.Lock()
	defer mu.Unlock()
	for id, k := range starts {
		if k != 1 {
			t.Errorf("%s was started %d times", id, k)
		}
	}
}

// TestReadyRefusedStart: the slot went elsewhere between confirmation and
// start; the session is announced again.
func TestReadyRefusedStart(t *testing.T) {
	c, _ := startServer(t).connectWith(StreamOptions{})
	slots := newSlots(1)
	var refused atomic.Bool
	slots.before = func(claims.SessionID) bool { return refused.Swap(true) }
	run(t, NewReady(c, slots, ReadyOptions{Logger: testLog(t)}).Run)
	announceAll(t, c, session(1))
	equal(t, "started", receive(t, "a session", slots.started), session(1))
}

// TestReadyRestart: a restart of the server, the deletion of the durable and
// of the stream, and an announcement that is none.
func TestReadyRestart(t *testing.T) {
	srv := startServer(t)
	c, st := srv.connectWith(StreamOptions{})
	slots := newSlots(10)
	r := NewReady(c, slots, ReadyOptions{Logger: testLog(t)})
	run(t, r.Run)
	next := 0
	takes := func(what string) {
		t.Helper()
		next++
		eventually(t, what, func() bool { return NewAnnouncer(c).Announce(testContext(t), session(next)) == nil })
		equal(t, what, receive(t, what, slots.started), session(next))
	}
	takes("first")
	srv.restart()
	takes("after a restart")
	if _, err := c.publish(testContext(t), &nats.Msg{Subject: "rv.ready.*", Header: nats.Header{"Status": {"408"}}}); err != nil {
		t.Fatal(err)
	}
	takes("after an announcement that is none")
	if err := c.js.DeleteConsumer(testContext(t), "RV_READY", st.Ready()); err != nil {
		t.Fatal(err)
	}
	takes("after the durable was deleted")
	if err := c.js.DeleteStream(testContext(t), "RV_READY"); err != nil {
		t.Fatal(err)
	}
	takes("after the stream was deleted")
	eventually(t, "the queue is known to be empty", r.Empty)
	srv.stop()
	eventually(t, "a lost server is no empty queue", func() bool { return !r.Empty() })
	srv.start()
	takes("after a longer outage")
}

// TestReadyFewPulls: slots that free one by one do not leave a pull each.
func TestReadyFewPulls(t *testing.T) {
	c, st := startServer(t).connectWith(StreamOptions{})
	slots := newSlots(64)
	run(t, NewReady(c, slots, ReadyOptions{Logger: testLog(t)}).Run)
	most := 0
	for i := range 300 {
		announceAll(t, c, claims.SessionID(fmt.Sprint("s", i)))
		receive(t, "a session", slots.started)
		slots.add(1)
		if i%20 == 0 {
			_, waiting, _ := pendingReady(t, c, st)
			most = max(most, waiting)
		}
	}
	if most > 8 {
		t.Errorf("%d pulls stand at the server", most)
	}
}

// An announcement that was acknowledged, and whose removal its server lost, is in nobody's way: a scanner that is refused
// because of it removes it. One that waits for a free slot stays.
func TestI22TakenAnnouncementsAreSwept(t *testing.T) {
	s := startServer(t)
	c, st := s.connectWith(StreamOptions{MaxClockSkew: time.Millisecond})
	announceAll(t, c, "taken")
	// The messages as they were, with the durable as it is: what a disk that is full or a crash at the wrong moment leaves.
	messages, copied := filepath.Join(s.store, "jetstream", "$G", "streams", "RV_READY", "msgs"), filepath.Join(t.TempDir(), "msgs")
	s.stop()
	if err := os.CopyFS(copied, os.DirFS(messages)); err != nil {
		t.Fatal(err)
	}
	s.start()
	if got := fetchReady(t, c, st, 1); !slices.Equal(got, []string{"rv.ready.taken"}) {
		t.Fatalf("announced are %q", got)
	}
	s.stop()
	if err := errors.Join(os.RemoveAll(messages), os.CopyFS(messages, os.DirFS(copied))); err != nil {
		t.Fatal(err)
	}
	s.start()
	eventually(t, "the connection", func() bool { return c.Health(testContext(t)) == nil })
	announceAll(t, c, "waits", "taken") // refused, as long as nobody sweeps
	if info, err := streamInfo(testContext(t), c.js, "RV_READY"); err != nil || info.State.Msgs != 2 {
		t.Fatalf("%+v, %v, want two announcements", info, err)
	}
	a := NewSweepingAnnouncer(c)
	for range 2 { // the second is one of a moment later
		if err := a.Announce(testContext(t), "taken"); err != nil {
			t.Fatal(err)
		}
	}
	if got, want := fetchReady(t, c, st, 2), []string{"rv.ready.waits", "rv.ready.taken"}; !slices.Equal(got, want) {
		t.Errorf("announced are %q, want %q", got, want)
	}
}

// fetchReady takes n announcements, as a worker does.
func fetchReady(t *testing.T, c *Conn, st *Streams, n int) (subjects []string) {
	t.Helper()
	eventually(t, "the durable", func() bool {
		_, err := consumerInfo(testContext(t), c.js, "RV_READY", st.Ready())
		return err == nil
	})
	consumer, err := c.js.Consumer(testContext(t), "RV_READY", st.Ready())
	if err != nil {
		t.Fatal(err)
	}
	for range n {
		m, err := consumer.Next(jetstream.FetchMaxWait(20 * time.Second))
		if err != nil {
			t.Fatal(err)
		}
		if err := m.DoubleAck(testContext(t)); err != nil {
			t.Fatal(err)
		}
		subjects = append(subjects, m.Subject())
	}
	return subjects
}

// Where all announcements are to be had, nothing is removed.
func TestSweepingLeavesWhatWaits(t *testing.T) {
	c, _ := startServer(t).connectWith(StreamOptions{MaxClockSkew: time.Millisecond})
	a := NewSweepingAnnouncer(c)
	for range 2 {
		for _, s := range []claims.SessionID{"a", "b", "c"} {
			if err := a.Announce(testContext(t), s); err != nil {
				t.Fatal(err)
			}
		}
	}
	if n, err := c.sweepReady(testContext(t)); n != 0 || err != nil {
		t.Errorf("%d were removed, %v", n, err)
	}
	info, err := streamInfo(testContext(t), c.js, "RV_READY")
	if err != nil || info.State.Msgs != 3 {
		t.Errorf("%v, %v, want three announcements", info, err)
	}
}

package bus

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"reveille/claims"
)

// memLog is the log of events in the database.
type memLog struct {
	mu      sync.Mutex
	events  map[claims.SessionID][]claims.Record
	relayed map[claims.SessionID]int64
	fail    func(op string) error
	reads   int
	notes   int
}

func newMemLog() *memLog {
	return &memLog{events: map[claims.SessionID][]claims.Record{}, relayed: map[claims.SessionID]int64{}}
}

// add appends n events to a session.
func (l *memLog) add(s claims.SessionID, n int, types ...claims.EventType) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for i := range n {
		e := claims.Event{Session: s, Seq: int64(len(l.events[s]) + 1), Type: claims.TextEvent, Time: claims.Stamp(time.Now()), Epoch: 3, Trace: trace, Data: []byte(`{}`)}
		if i < len(types) {
			e.Type = types[i]
		}
		line, err := claims.Marshal(e)
		if err != nil {
			panic(err)
		}
		l.events[s] = append(l.events[s], claims.Record{Event: e, Line: line})
	}
}

func (l *memLog) failing(op string) error {
	if l.fail == nil {
		return nil
	}
	return l.fail(op)
}

func (l *memLog) Unrelayed(_ context.Context, s claims.SessionID, limit int) (int64, []claims.Record, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.reads++
	if err := l.failing("read"); err != nil {
		return 0, nil, err
	}
	mark := l.relayed[s]
	rest := l.events[s][mark:]
	return mark, rest[:min(len(rest), limit)], nil
}

func (l *memLog) NoteRelayed(_ context.Context, marks []claims.Mark) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	if err := l.failing("note"); err != nil {
		return err
	}
	l.notes++
	for _, m := range marks {
		if m.Seq > l.relayed[m.Session] && m.Seq <= int64(len(l.events[m.Session])) {
			l.relayed[m.Session] = m.Seq
		}
	}
	return nil
}

func (l *memLog) unrelayed() (n int) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for s, es := range l.events {
		n += len(es) - int(l.relayed[s])
	}
	return n
}

// replayLog can read again what is relayed.
type replayLog struct{ *memLog }

func (l replayLog) Replay(_ context.Context, s claims.SessionID, after int64, limit int) ([]claims.Record, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	rest := l.events[s][after:]
	return rest[:min(len(rest), limit)], nil
}

// checkCopy: the stream has each session's events once, in order, byte for byte.
func checkCopy(t testing.TB, c *Conn, l *memLog) {
	t.Helper()
	got := map[claims.SessionID][]Raw{}
	for _, m := range stored(t, c, "RV_EVENTS") {
		s := claims.SessionID(strings.TrimPrefix(m.Subject, "rv.event."))
		got[s] = append(got[s], m)
	}
	for s, want := range l.events {
		if len(got[s]) != len(want) {
			t.Errorf("session %s: %d of %d events", s, len(got[s]), len(want))
			continue
		}
		for i, m := range got[s] {
			if string(m.Data) != string(want[i].Line) || m.Header.Get(HeaderSeq) != fmt.Sprint(i+1) {
				t.Fatalf("session %s: event %d is %s (%v)", s, i+1, m.Data, m.Header)
			}
		}
	}
}

func startRelay(t testing.TB, c *Conn, l Log) *Relay {
	r := NewRelay(c, l, RelayOptions{Logger: testLog(t)})
	run(t, r.Run)
	return r
}

func flush(t testing.TB, r *Relay) {
	t.Helper()
	if err := r.Flush(testContext(t)); err != nil {
		t.Fatal(err)
	}
}

func TestI25_EventsAreCopied(t *testing.T) {
	c, _ := startServer(t).connectWith(StreamOptions{})
	l := newMemLog()
	r := startRelay(t, c, l)
	l.add("s", 3, claims.StepStartedEvent, claims.SessionQuarantined, claims.SessionReleased)
	l.add("long", 2*relayPage+7)
	r.Poke("s")
	r.Poke("long")
	flush(t, r)
	checkCopy(t, c, l)
	equal(t, "marks", l.unrelayed(), 0)
	l.add("s", 2)
	if err := r.RelayNow(testContext(t), "s"); err != nil {
		t.Fatal(err)
	}
	checkCopy(t, c, l)
	h := stored(t, c, "RV_EVENTS")[0].Header
	equal(t, "headers", []string{h.Get("Rv-Seq"), h.Get("Rv-Epoch"), h.Get("traceparent")}, []string{"1", "3", trace})
	copies := stored(t, c, "RV_QUARANTINE")
	equal(t, "copies", len(copies), 2)
	equal(t, "copy", string(copies[0].Data), string(l.events["s"][1].Line))
	equal(t, "copy's headers", copies[0].Header.Get("Nats-Msg-Id")+" "+copies[0].Header.Get("Rv-Type"), "s:2 session.quarantined")
	equal(t, "relayed", value(t, r.Collectors(), "reveille_events_relayed_total"), float64(2*relayPage+7+5))
	equal(t, "lag", value(t, r.Collectors(), "reveille_relay_lag_seconds"), 0)
}

// faulty loses requests and answers at random, and cuts some short.
func faulty(rng *rand.Rand, mu *sync.Mutex, publish func(context.Context, *nats.Msg) (*jetstream.PubAck, error)) func(context.Context, *nats.Msg) (*jetstream.PubAck, error) {
	return func(ctx context.Context, m *nats.Msg) (*jetstream.PubAck, error) {
		mu.Lock()
		roll := rng.IntN(12)
		cutoff := time.Duration(rng.IntN(400)) * time.Microsecond
		mu.Unlock()
		switch roll {
		case 0:
			return nil, nats.ErrTimeout // it never left
		case 1:
			_, _ = publish(ctx, m)
			return nil, nats.ErrTimeout // it is stored, or not
		case 2: // its answer is not awaited; it may arrive whenever
			short, cancel := context.WithTimeout(ctx, cutoff)
			defer cancel()
			return publish(short, m)
		}
		return publish(ctx, m)
	}
}

// TestI25_RacingRelays: three relays on one log, each losing requests and
// answers, cancelled and started anew, while events are appended and the
// server restarts.
func TestI25_RacingRelays(t *testing.T) {
	seed := uint64(time.Now().UnixNano())
	t.Logf("seed %d", seed)
	rng, mu := rand.New(rand.NewPCG(seed, 2)), &sync.Mutex{}
	srv := startServer(t)
	c, _ := srv.connectWith(StreamOptions{})
	l := newMemLog()
	l.fail = func(string) error {
		mu.Lock()
		defer mu.Unlock()
		if rng.IntN(20) == 0 {
			return errors.New("injected")
		}
		return nil
	}
	const sessions, rounds = 6, 12
	relays := make([]*Relay, 3)
	stops := make([]func(), 3)
	conns := make([]*Conn, 3)
	begin := func(i int) {
		relays[i] = NewRelay(conns[i], l, RelayOptions{Sessions: 3})
		relays[i].publish = faulty(rng, mu, relays[i].publish)
		stops[i] = run(t, relays[i].Run)
	}
	for i := range relays {
		conns[i] = srv.connect()
		begin(i)
	}
	for round := range rounds {
		for n := range sessions {
			l.add(session(n), 1+round%5, claims.SessionQuarantined)
			for _, r := range relays {
				r.Poke(session(n))
			}
		}
		switch round % 4 {
		case 1: // one crashes and comes back
			stops[round%3]()
			begin(round % 3)
			for n := range sessions {
				relays[round%3].Poke(session(n))
			}
		case 3:
			if round == 7 {
				srv.restart()
			}
		}
	}
	for _, r := range relays {
		flush(t, r)
	}
	checkCopy(t, c, l)
}

// TestI25_LateStore: an attempt that timed out is stored after the next one
// was made; the expected sequence lets only one of them in.
func TestI25_LateStore(t *testing.T) {
	c, _ := startServer(t).connectWith(StreamOptions{})
	l := newMemLog()
	r := NewRelay(c, l, RelayOptions{Logger: testLog(t)})
	publish := r.publish
	var late *nats.Msg
	r.publish = func(ctx context.Context, m *nats.Msg) (*jetstream.PubAck, error) {
		if m.Header.Get(HeaderSeq) != "2" {
			return publish(ctx, m)
		}
		if late == nil { // it is on its way
			late = m
			late.Header.Del(nats.MsgIdHdr) // the window of message ids is over
			return nil, nats.ErrTimeout
		}
		ack, err := publish(ctx, m)
		var api *jetstream.APIError
		if _, lateErr := publish(ctx, late); !errors.As(lateErr, &api) || api.ErrorCode != jetstream.JSErrCodeStreamWrongLastSequence {
			t.Errorf("the late one: %v", lateErr)
		}
		return ack, err
	}
	run(t, r.Run)
	l.add("s", 4)
	if err := r.RelayNow(testContext(t), "s"); err != nil {
		t.Fatal(err)
	}
	checkCopy(t, c, l)
}

// TestI25_GuessedMessageID: somebody used an event's message id on the stream;
// the server takes the event for a duplicate. It goes in when the window is over.
func TestI25_GuessedMessageID(t *testing.T) {
	c, _ := startServer(t).connectWith(StreamOptions{})
	l := newMemLog()
	r := startRelay(t, c, l)
	m := &nats.Msg{Subject: "rv.event.other", Header: nats.Header{nats.MsgIdHdr: {"s:1"}, HeaderSeq: {"1"}}}
	if _, err := c.publish(testContext(t), m); err != nil {
		t.Fatal(err)
	}
	l.add("s", 1)
	r.Poke("s")
	flush(t, r)
	checkCopy(t, c, l)
}

// TestI25_StuckSessionHoldsNobodyUp: one session's publishes never succeed.
func TestI25_StuckSessionHoldsNobodyUp(t *testing.T) {
	c, _ := startServer(t).connectWith(StreamOptions{})
	l := newMemLog()
	r := NewRelay(c, l, RelayOptions{Sessions: 4, Logger: testLog(t)})
	publish := r.publish
	r.publish = func(ctx context.Context, m *nats.Msg) (*jetstream.PubAck, error) {
		if m.Subject == "rv.event.stuck" {
			return nil, nats.ErrTimeout
		}
		return publish(ctx, m)
	}
	run(t, r.Run)
	l.add("stuck", 1)
	r.Poke("stuck")
	if err := r.RelayNow(testContext(t), "stuck"); err == nil {
		t.Error("no error of a stuck session")
	}
	for i := range 20 {
		l.add(session(i), 2)
		if err := r.RelayNow(testContext(t), session(i)); err != nil {
			t.Error(err)
		}
	}
	if lag := value(t, r.Collectors(), "reveille_relay_lag_seconds"); lag <= 0 {
		t.Errorf("lag is %v", lag)
	}
	ctx, cancel := context.WithTimeout(testContext(t), 10*time.Millisecond)
	defer cancel()
	if err := r.Flush(ctx); !errors.Is(err, context.DeadlineExceeded) || !strings.Contains(err.Error(), "1 sessions") {
		t.Errorf("flush: %v", err)
	}
}

// TestI25_EmptySubject: the stream has nothing of a session that has relayed events. What it must have by its age was
// lost, with the stream, and is published again; the rest has left it, and the copy goes on after it.
func TestI25_EmptySubject(t *testing.T) {
	for name, c := range map[string]struct {
		replay bool
		aged   int    // events older than the stream keeps
		first  string // in the stream afterwards
		repair bool   // by an operator, who wants all of it
	}{
		"lost":                  {true, 0, "1", false},
		"aged":                  {true, 5, "6", false},
		"aged and lost":         {true, 3, "4", false},
		"no log to read again":  {false, 0, "6", false},
		"aged, and asked for":   {true, 5, "1", true},
		"lost, and then repair": {true, 0, "1", true},
	} {
		t.Run(name, func(t *testing.T) {
			conn, _ := startServer(t).connectWith(StreamOptions{})
			l := newMemLog()
			var log Log = l
			if c.replay {
				log = replayLog{l}
			}
			r := startRelay(t, conn, log)
			l.add("s", 5)
			for i := range c.aged {
				l.events["s"][i].Time = claims.Stamp(time.Now().Add(-DefaultRetention))
			}
			r.Poke("s")
			flush(t, r)
			rewind(t, conn, l, "s", 0)
			l.add("s", 2)
			if c.repair {
				n, err := r.Repair(testContext(t), "s", true)
				if err != nil || n != 5 {
					t.Fatalf("repaired %d events: %v", n, err)
				}
				n, err = r.Repair(testContext(t), "s", true) // resumed: there is nothing left to do
				if err != nil || n != 0 {
					t.Fatalf("repaired %d events again: %v", n, err)
				}
			}
			r.Poke("s")
			flush(t, r)
			got := stored(t, conn, "RV_EVENTS")
			equal(t, "first", got[0].Header.Get(HeaderSeq), c.first)
			equal(t, "last", got[len(got)-1].Header.Get(HeaderSeq), "7")
			for i, m := range got[1:] {
				before, _ := strconv.Atoi(got[i].Header.Get(HeaderSeq))
				equal(t, "next", m.Header.Get(HeaderSeq), strconv.Itoa(before+1))
			}
		})
	}
}

// TestI25_Repair: quiet sessions of which a server lost the tail, or all, are found by one request and made whole, while
// relays publish what is new.
func TestI25_Repair(t *testing.T) {
	c, _ := startServer(t).connectWith(StreamOptions{})
	l := newMemLog()
	r := startRelay(t, c, replayLog{l})
	var marks []Mark
	for i := range 20 {
		s := claims.SessionID(fmt.Sprintf("s%d", i))
		l.add(s, 5+i)
		r.Poke(s)
		marks = append(marks, Mark{Session: s, Seq: int64(5 + i)})
	}
	flush(t, r)
	short, err := r.Verify(testContext(t), marks)
	if err != nil || len(short) != 0 {
		t.Fatalf("a whole stream is short of %v: %v", short, err)
	}
	rewind(t, c, l, "s3", 4) // of the others it has nothing
	if short, err = r.Verify(testContext(t), append(marks, Mark{Session: "new", Seq: 0})); err != nil || len(short) != 20 {
		t.Fatalf("short of %v: %v", short, err)
	}
	for _, s := range short {
		l.add(s, 1)
		r.Poke(s)
		if _, err := r.Repair(testContext(t), s, false); err != nil {
			t.Fatal(err)
		}
	}
	flush(t, r)
	checkCopy(t, c, l)
	if short, err = r.Verify(testContext(t), marks); err != nil || len(short) != 0 {
		t.Fatalf("after the repair it is short of %v: %v", short, err)
	}
	if short, err = r.Verify(testContext(t), nil); err != nil || len(short) != 0 {
		t.Fatalf("of no session it is short of %v: %v", short, err)
	}
	if _, err = r.Verify(testContext(t), make([]Mark, VerifyMost+1)); err == nil {
		t.Fatal("verified more than the server answers for")
	}
}

// rewind makes the stream end with an earlier event than it did.
func rewind(t testing.TB, c *Conn, l *memLog, s claims.SessionID, keep int) {
	t.Helper()
	if err := c.js.DeleteStream(testContext(t), "RV_EVENTS"); err != nil {
		t.Fatal(err)
	}
	if _, err := c.Ensure(testContext(t), StreamOptions{}); err != nil {
		t.Fatal(err)
	}
	for _, rec := range l.events[s][:keep] {
		if _, err := c.publish(testContext(t), eventMessage("rv.event."+string(s), rec)); err != nil {
			t.Fatal(err)
		}
	}
}

// TestI25_LostTail: the server lost acknowledged events. With a log that can
// read them again they are mended; with another it is said, and goes on.
func TestI25_LostTail(t *testing.T) {
	for _, replay := range []bool{true, false} {
		t.Run(fmt.Sprint("replay ", replay), func(t *testing.T) {
			c, _ := startServer(t).connectWith(StreamOptions{})
			l := newMemLog()
			var log Log = l
			if replay {
				log = replayLog{l}
			}
			r := startRelay(t, c, log)
			l.add("s", 2*relayPage)
			r.Poke("s")
			flush(t, r)
			rewind(t, c, l, "s", 3)
			l.add("s", 2)
			r.Poke("s")
			flush(t, r)
			if replay {
				checkCopy(t, c, l)
				return
			}
			got := stored(t, c, "RV_EVENTS")
			equal(t, "events", len(got), 5)
			equal(t, "after the gap", got[3].Header.Get(HeaderSeq), fmt.Sprint(2*relayPage+1))
		})
	}
}

// TestI25_StreamAhead: the database was restored from a backup.
func TestI25_StreamAhead(t *testing.T) {
	c, _ := startServer(t).connectWith(StreamOptions{})
	l := newMemLog()
	l.add("s", 5)
	rewind(t, c, l, "s", 5)
	l.events["s"] = l.events["s"][:2]
	r := startRelay(t, c, l)
	for range 2 {
		if err := r.RelayNow(testContext(t), "s"); !errors.Is(err, ErrAhead) {
			t.Errorf("got %v", err)
		}
	}
	l.mu.Lock()
	reads := l.reads
	l.mu.Unlock()
	r.Poke("s")
	flush(t, r)
	equal(t, "reads of a session that is stopped", l.reads, reads)
	l.add("s", 4) // it has caught up, 3 to 6
	if err := r.RelayNow(testContext(t), "s"); err != nil {
		t.Error(err)
	}
	equal(t, "events", messages(t, c, "RV_EVENTS"), 6)
	r.Poke("s")
	flush(t, r)
}

// TestRelayBatchesMarks: many sessions are noted with few statements, and a
// mark that fails is noted later.
func TestRelayBatchesMarks(t *testing.T) {
	c, _ := startServer(t).connectWith(StreamOptions{})
	l := newMemLog()
	failures := 2
	l.fail = func(op string) error {
		if op == "note" && failures > 0 {
			failures--
			return errors.New("injected")
		}
		return nil
	}
	r := startRelay(t, c, l)
	const n = 500
	for i := range n {
		l.add(session(i), 1)
		r.Poke(session(i))
	}
	eventually(t, "all is noted, without a flush", func() bool { return l.unrelayed() == 0 })
	if l.notes > 50 {
		t.Errorf("%d statements for %d sessions", l.notes, n)
	}
	checkCopy(t, c, l)
}

func TestRecent(t *testing.T) {
	c := recent[int, int]{most: 10}
	for i := range 100 {
		c.put(i, i)
		c.get(0) // used, so kept
	}
	if n := len(c.young) + len(c.old); n > 10 {
		t.Errorf("%d are kept", n)
	}
	if _, ok := c.get(0); !ok {
		t.Error("what is used is forgotten")
	}
	if _, ok := c.get(50); ok {
		t.Error("what is not used is kept")
	}
	c.delete(0)
	if _, ok := c.get(0); ok {
		t.Error("what is deleted is there")
	}
}

func BenchmarkRelay(b *testing.B) {
	for _, sessions := range []int{1, 256} {
		b.Run(fmt.Sprint(sessions, " sessions"), func(b *testing.B) {
			c, _ := startServer(b).connectWith(StreamOptions{})
			l := newMemLog()
			for i := range b.N {
				l.add(session(i%sessions), 1)
			}
			r := NewRelay(c, l, RelayOptions{})
			run(b, r.Run)
			b.ResetTimer()
			for i := range sessions {
				r.Poke(session(i))
			}
			flush(b, r)
			b.ReportMetric(float64(b.N)/b.Elapsed().Seconds(), "events/s")
		})
	}
}

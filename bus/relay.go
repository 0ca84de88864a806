package bus

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"sync"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
	"github.com/prometheus/client_golang/prometheus"

	"reveille/claims"
)

// Mark says that a session's events up to Seq are in the stream.
type Mark = claims.Mark

// Log is the log of events in the database, as the relay reads it. Its methods
// are called from many goroutines and bound themselves in time.
type Log interface {
	// Unrelayed returns the database's mark of a session and the events after it,
	// in order and without a gap, at most limit.
	Unrelayed(ctx context.Context, session claims.SessionID, limit int) (relayed int64, records []claims.Record, err error)
	// NoteRelayed raises marks, each session's once in a call; a lower or
	// unknown one changes nothing. The relay tries again where it fails.
	NoteRelayed(ctx context.Context, marks []Mark) error
}

// Replayer is a Log that can also read events before its mark. With it the
// relay mends a stream that lost events which were noted as relayed; without
// it, it says so and goes on behind the gap.
type Replayer interface {
	// Replay returns a session's events after a sequence, in order, at most limit.
	Replay(ctx context.Context, session claims.SessionID, after int64, limit int) ([]claims.Record, error)
}

// ErrAhead: the stream has events of a session that the database does not
// have. It was restored from a backup, or two databases share a namespace;
// that session is not relayed any more.
var ErrAhead = errors.New("the stream is ahead of the database")

// RelayOptions of a relay. The zero value has the defaults.
type RelayOptions struct {
	Sessions int // relayed at once: 256
	Logger   *slog.Logger
}

const (
	defaultRelaySessions = 256
	// relayPage is how many events one read of the database takes.
	relayPage = 256
	// relayCache bounds for how many sessions the end of the stream is remembered.
	relayCache = 1 << 16
	// relayMost bounds the sessions that wait; the scanner finds the others.
	relayMost = 1 << 17

	noteEvery = 200 * time.Millisecond
	noteBatch = 200
	// A session that is quiet for noteQuiet is noted, one that is not after
	// noteLatest: a mark is a write to the row that its owner writes too, and a
	// short execution is over by then. The scanner looks after 5 s.
	noteQuiet  = 500 * time.Millisecond
	noteLatest = 3 * time.Second
	// noteMost bounds the marks that wait.
	noteMost    = 1 << 14
	noteTimeout = 5 * time.Second
)

// Relay copies committed events to the stream, each once and in its session's
// order, with any number of other relays doing the same (I25).
type Relay struct {
	conn *Conn
	log  Log
	opts RelayOptions
	slog *slog.Logger
	// publish is the one way to the stream; tests lose its answers.
	publish func(context.Context, *nats.Msg) (*jetstream.PubAck, error)

	pubState, noteState stateLog
	relayed             prometheus.Counter
	lag                 prometheus.GaugeFunc

	noting   sync.Mutex // held while marks are noted
	settings settings   // of the event stream

	mu       sync.Mutex
	sessions map[claims.SessionID]*relaying // with something to relay
	queue    []claims.SessionID             // of these, due and not in work
	work     chan struct{}                  // buffered 1: the queue has grown
	ended    chan struct{}                  // closed and replaced when a pass ends while somebody waits
	waiting  int                            // for ended
	ahead    map[claims.SessionID]bool      // stopped, and logged
	marks    map[claims.SessionID]mark      // to be noted
	noteNow  chan struct{}                  // buffered 1: there are too many
	ends     recent[claims.SessionID, end]
}

// relaying is one session with something to relay.
type relaying struct {
	since   time.Time // when the oldest event came that may not be in the stream
	again   time.Time // when it was poked while running; zero: it was not
	running bool
	tries   int
	timer   *time.Timer // backing off
	passes  int         // that ended
	err     error       // of the last of them
}

// NewRelay makes a relay; Run it.
func NewRelay(c *Conn, l Log, o RelayOptions) *Relay {
	if o.Sessions <= 0 {
		o.Sessions = defaultRelaySessions
	}
	log := orDiscard(o.Logger)
	r := &Relay{
		conn: c, log: l, opts: o, slog: log, publish: c.publish,
		pubState:  stateLog{log: log, quiet: applyQuiet},
		noteState: stateLog{log: log},
		relayed: prometheus.NewCounter(prometheus.CounterOpts{
			Name: "reveille_events_relayed_total", Help: "Events this process put into the stream.",
		}),
		sessions: map[claims.SessionID]*relaying{}, work: make(chan struct{}, 1), ended: make(chan struct{}),
		ahead: map[claims.SessionID]bool{}, marks: map[claims.SessionID]mark{}, noteNow: make(chan struct{}, 1),
		ends: recent[claims.SessionID, end]{most: relayCache},
	}
	r.lag = prometheus.NewGaugeFunc(prometheus.GaugeOpts{
		Name: "reveille_relay_lag_seconds", Help: "Age of the oldest event this process knows of that is not in the stream; 0 where there is none.",
	}, r.lagSeconds)
	return r
}

// Collectors are the relay's metrics.
func (r *Relay) Collectors() []prometheus.Collector { return []prometheus.Collector{r.relayed, r.lag} }

func (r *Relay) lagSeconds() float64 {
	r.mu.Lock()
	defer r.mu.Unlock()
	var oldest time.Time
	for _, s := range r.sessions {
		if oldest.IsZero() || s.since.Before(oldest) {
			oldest = s.since
		}
	}
	if oldest.IsZero() {
		return 0
	}
	return max(time.Since(oldest).Seconds(), 0)
}

// Poke says that a session may have events to relay. It never blocks, and many
// for one session are as good as one. While a session backs off, a poke does
// not hurry it.
func (r *Relay) Poke(session claims.SessionID) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if !r.ahead[session] {
		r.poke(session, false)
	}
}

// poke queues a session; hurry ends its backoff. The caller holds mu.
func (r *Relay) poke(session claims.SessionID, hurry bool) *relaying {
	s := r.sessions[session]
	switch {
	case s == nil:
		if len(r.sessions) >= relayMost {
			return nil
		}
		s = &relaying{since: time.Now()}
		r.sessions[session] = s
		r.enqueue(session)
	case s.running:
		if s.again.IsZero() {
			s.again = time.Now()
		}
	case hurry:
		r.hurry(session, s)
	}
	return s
}

// hurry ends a session's backoff. The caller holds mu.
func (r *Relay) hurry(session claims.SessionID, s *relaying) {
	if s.timer != nil && s.timer.Stop() { // else it fires right now
		s.timer = nil
		r.enqueue(session)
	}
}

func (r *Relay) enqueue(session claims.SessionID) {
	r.queue = append(r.queue, session)
	signal(r.work)
}

// signal is a wake-up that may be one already.
func signal(c chan struct{}) {
	select {
	case c <- struct{}{}:
	default:
	}
}

// Run relays until ctx ends, which also ends what is in flight: call Flush
// before, to leave nothing behind. What is left behind, the scanner relays.
func (r *Relay) Run(ctx context.Context) error {
	var wg sync.WaitGroup
	wg.Go(func() { r.noteLoop(ctx) })
	places := make(chan struct{}, r.opts.Sessions)
	for ctx.Err() == nil {
		session, ok := r.dequeue()
		if !ok {
			select {
			case <-r.work:
			case <-ctx.Done():
			}
			continue
		}
		select {
		case places <- struct{}{}:
		case <-ctx.Done():
			r.finish(session, ctx.Err())
			continue
		}
		wg.Go(func() {
			r.finish(session, r.relay(ctx, session))
			<-places
		})
	}
	wg.Wait()
	r.mu.Lock()
	for _, s := range r.sessions {
		if s.timer != nil {
			s.timer.Stop()
		}
	}
	r.mu.Unlock()
	// The marks of what was published spare somebody the finding out.
	last, cancel := context.WithTimeout(context.WithoutCancel(ctx), flushTimeout)
	defer cancel()
	if err := r.note(last, always); err != nil {
		r.slog.Warn("marks of relayed events are not noted, the next relay finds out", "error", err)
	}
	return ctx.Err()
}

// dequeue takes the next session into work.
func (r *Relay) dequeue() (claims.SessionID, bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if len(r.queue) == 0 {
		return "", false
	}
	session := r.queue[0]
	r.queue = r.queue[1:]
	s := r.sessions[session]
	s.running, s.again = true, time.Time{}
	return session, true
}

// finish ends a pass: done, again, or later.
func (r *Relay) finish(session claims.SessionID, err error) {
	r.mu.Lock()
	s := r.sessions[session]
	s.running, s.err = false, err
	s.passes++
	news := false
	switch {
	case errors.Is(err, ErrAhead):
		news = !r.ahead[session]
		if len(r.ahead) >= relayCache {
			clear(r.ahead) // they are found, and logged, again
		}
		r.ahead[session] = true
		delete(r.sessions, session)
	case err != nil:
		s.timer = time.AfterFunc(backoff(s.tries, relayBackoff), func() { r.resume(session) })
		s.tries++
	case !s.again.IsZero():
		s.tries, s.since = 0, s.again
		r.enqueue(session)
	default:
		delete(r.ahead, session)
		delete(r.sessions, session)
	}
	if r.waiting > 0 {
		close(r.ended)
		r.ended = make(chan struct{})
	}
	r.mu.Unlock()
	switch {
	case news:
		r.slog.Error("this session is not relayed any more", "session", session, "error", err)
	case err == nil:
		r.pubState.ok("events are relayed again")
	case !errors.Is(err, ErrAhead) && !errors.Is(err, context.Canceled):
		r.pubState.fail("events can't be relayed, trying on", "session", session, "error", err)
	}
}

// resume is what the timer of a session's backoff does.
func (r *Relay) resume(session claims.SessionID) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if s := r.sessions[session]; s != nil && s.timer != nil {
		s.timer = nil
		r.enqueue(session)
	}
}

// await waits for the end of any pass. The caller holds mu, before and after.
func (r *Relay) await(ctx context.Context) error {
	ended := r.ended
	r.waiting++
	r.mu.Unlock()
	defer func() {
		r.mu.Lock()
		r.waiting--
	}()
	select {
	case <-ended:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

// RelayNow relays a session and returns when all that the database had of it
// when it was called is in the stream, or with the error of the attempt, which
// is tried on in the background. Run must be running. Marks are noted soon
// after; Flush waits for them. Errors: ErrAhead, or "try later".
func (r *Relay) RelayNow(ctx context.Context, session claims.SessionID) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	s := r.poke(session, true)
	if s == nil {
		return fmt.Errorf("relaying session %s: %d sessions wait already", session, relayMost)
	}
	began := s.passes
	want := began + 1
	if s.running {
		want++ // the one that runs may have read before
	}
	for s.passes < want {
		if err := r.await(ctx); err != nil {
			return fmt.Errorf("relaying session %s: %w", session, err)
		}
		if s.passes > began && s.err != nil {
			return s.err
		}
	}
	return s.err
}

// Flush relays all that was poked and notes the marks. Run must be running.
// Where ctx ends first, it says how many sessions are left to the scanner.
func (r *Relay) Flush(ctx context.Context) error {
	r.mu.Lock()
	for session, s := range r.sessions {
		r.hurry(session, s)
	}
	for len(r.sessions) > 0 {
		if err := r.await(ctx); err != nil {
			left := len(r.sessions)
			r.mu.Unlock()
			return fmt.Errorf("flushing the relay, %d sessions are left: %w", left, err)
		}
	}
	r.mu.Unlock()
	for try := 0; ; try++ {
		err := r.note(ctx, always)
		if err == nil || sleep(ctx, backoff(try, relayBackoff)) != nil {
			return err
		}
	}
}

// marked keeps a mark to be noted with the next batch.
func (r *Relay) marked(session claims.SessionID, seq int64) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.mark(session, seq, time.Now())
	if len(r.marks) >= noteMost {
		signal(r.noteNow)
	}
}

// mark is how far a session was relayed, and between which times it moved.
type mark struct {
	seq         int64
	first, last time.Time
}

// mark raises a mark. Callers hold mu.
func (r *Relay) mark(session claims.SessionID, seq int64, now time.Time) {
	m, ok := r.marks[session]
	if !ok {
		m.first = now
	}
	m.seq, m.last = max(m.seq, seq), now
	r.marks[session] = m
}

// noteLoop notes marks in batches: they only save reading, so they may lag.
func (r *Relay) noteLoop(ctx context.Context) {
	tick := time.NewTicker(noteEvery)
	defer tick.Stop()
	for tries := 0; ; {
		var due func(mark) bool
		select {
		case <-ctx.Done():
			return
		case now := <-tick.C:
			due = func(m mark) bool { return now.Sub(m.last) >= noteQuiet || now.Sub(m.first) >= noteLatest }
		case <-r.noteNow:
			due = always
		}
		if err := r.note(ctx, due); err == nil {
			tries = 0
			r.noteState.ok("relayed events are noted again")
		} else if ctx.Err() == nil {
			r.noteState.fail("relayed events can't be noted, trying on", "error", err)
			if sleep(ctx, backoff(tries, noteBackoff)) != nil {
				return
			}
			tries++
		}
	}
}

func always(mark) bool { return true }

// note notes the marks that are due, one call at a time. What fails is kept.
func (r *Relay) note(ctx context.Context, due func(mark) bool) error {
	r.noting.Lock()
	defer r.noting.Unlock()
	r.mu.Lock()
	marks := make([]Mark, 0, len(r.marks))
	for session, m := range r.marks {
		if due(m) {
			marks = append(marks, Mark{Session: session, Seq: m.seq})
			delete(r.marks, session)
		}
	}
	r.mu.Unlock()
	slices.SortFunc(marks, func(a, b Mark) int { return cmp.Compare(a.Session, b.Session) }) // rows are locked in one order
	for batch := range slices.Chunk(marks, noteBatch) {
		callCtx, cancel := context.WithTimeout(ctx, noteTimeout)
		err := r.log.NoteRelayed(callCtx, batch)
		cancel()
		if err != nil {
			r.mu.Lock()
			for _, m := range marks { // noting one twice changes nothing
				r.mark(m.Session, m.Seq, time.Now())
			}
			r.mu.Unlock()
			return fmt.Errorf("noting %d relayed sessions: %w", len(marks), err)
		}
	}
	return nil
}

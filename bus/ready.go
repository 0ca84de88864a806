package bus

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"reveille/claims"
)

// Announcer announces ready sessions.
type Announcer struct {
	conn  *Conn
	sweep *sweeper // nil: the queue is not swept
}

// NewAnnouncer makes an announcer.
func NewAnnouncer(c *Conn) *Announcer { return &Announcer{conn: c} }

// NewSweepingAnnouncer makes the announcer of a scanner: it also sees to it
// that what the queue holds will be taken. Of an announcement that was
// acknowledged a server may have lost the removal (its disk was full, it was
// killed): the message is there, its durable is past it, and because a subject
// holds one message, no announcement of that session is accepted any more. The
// session would never be started again (I22, I32).
func NewSweepingAnnouncer(c *Conn) *Announcer {
	return &Announcer{conn: c, sweep: &sweeper{conn: c, state: stateLog{log: c.log}}}
}

// errDiscarded is the server's refusal of a second message on a subject that
// may hold one.
const errDiscarded jetstream.ErrorCode = 10077

// Announce says that a session has work and no claim; nil means that the queue
// holds an announcement of it, this one or an older one. It has no message id:
// within the dedupe window a used one would swallow the announcement.
func (a *Announcer) Announce(ctx context.Context, session claims.SessionID) error {
	there, err := a.publish(ctx, session)
	if there && a.sweep != nil && a.sweep.run(ctx) {
		_, err = a.publish(ctx, session)
	}
	if err != nil {
		return fmt.Errorf("announcing session %s: %w", session, err)
	}
	return nil
}

// publish reports whether one was there already.
func (a *Announcer) publish(ctx context.Context, session claims.SessionID) (there bool, err error) {
	_, err = a.conn.publish(ctx, &nats.Msg{Subject: a.conn.ns.ReadySubject(session)})
	var api *jetstream.APIError
	if errors.As(err, &api) && api.ErrorCode == errDiscarded {
		return true, nil
	}
	return false, err
}

const (
	// sweepEvery is the least time between two sweeps of one process.
	sweepEvery = 5 * time.Second
	// sweepPause is what one that failed waits longer.
	sweepPause = time.Minute
)

// sweeper removes announcements that were taken and are in the queue all the
// same: those up to which the durable has acknowledged everything.
type sweeper struct {
	conn  *Conn
	state stateLog

	mu   sync.Mutex
	last time.Time
}

// run sweeps, unless that was done a moment ago, and reports whether it removed
// anything.
func (s *sweeper) run(ctx context.Context) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if time.Since(s.last) < sweepEvery {
		return false
	}
	s.last = time.Now()
	n, err := s.conn.sweepReady(ctx)
	if err != nil { // it may be for want of a permission, which takes its time to be refused
		s.last = time.Now().Add(sweepPause)
		s.state.fail("announcements that were taken can't be removed from the queue, trying on", "error", err)
		return false
	}
	s.state.ok("the queue of announcements can be looked at again")
	if n > 0 {
		s.conn.log.Warn("announcements were in the queue that had been taken; they are removed", "announcements", n)
	}
	return n > 0
}

// sweepReady removes them and returns how many they were. The stream is asked
// after its durable: on a busy queue an earlier answer is always behind.
func (c *Conn) sweepReady(ctx context.Context) (removed uint64, err error) {
	ctx, cancel := context.WithTimeout(ctx, apiTimeout)
	defer cancel()
	name := c.ns.ReadyStream()
	stream, err := streamInfo(ctx, c.js, name)
	if err != nil {
		return 0, fmt.Errorf("stream %s: %w", name, err)
	}
	id, _ := streamID(stream)
	durable := (&Streams{ReadyID: id}).Ready()
	consumer, err := consumerInfo(ctx, c.js, name, durable)
	if err != nil {
		return 0, fmt.Errorf("durable %s: %w", durable, err)
	}
	if stream, err = streamInfo(ctx, c.js, name); err != nil {
		return 0, fmt.Errorf("stream %s: %w", name, err)
	}
	now, _ := streamID(stream)
	if now != id || stream.State.Msgs == 0 || stream.State.FirstSeq > consumer.AckFloor.Stream {
		return 0, nil
	}
	// jetstream's Purge tells no number.
	m, err := c.request(ctx, apiPrefix+"STREAM.PURGE."+name, map[string]uint64{"seq": consumer.AckFloor.Stream + 1})
	if err != nil {
		return 0, fmt.Errorf("purging %s up to %d: %w", name, consumer.AckFloor.Stream, err)
	}
	var answer struct {
		Error  *jetstream.APIError `json:"error"`
		Purged uint64              `json:"purged"`
	}
	if err := json.Unmarshal(m.Data, &answer); err != nil {
		return 0, fmt.Errorf("purging %s: %w", name, err)
	}
	if answer.Error != nil {
		return 0, fmt.Errorf("purging %s: %w", name, answer.Error)
	}
	return answer.Purged, nil
}

// Slots are a worker's places for sessions. All methods are called from many
// goroutines and must not block.
type Slots interface {
	// Free is how many sessions could be started now; 0 when shutting down.
	Free() int
	// Changed is signalled (buffered, 1) when Free may have grown.
	Changed() <-chan struct{}
	// Start takes a slot and starts the session in the background; false: there
	// was none, and nothing was started. What it starts must not end with ctx.
	Start(ctx context.Context, session claims.SessionID) bool
}

// ReadyOptions of the consumer of announcements.
type ReadyOptions struct {
	Streams StreamOptions
	Logger  *slog.Logger
}

const (
	pullExpires   = 5 * time.Second
	pullHeartbeat = time.Second
	// pullSilence is how long nothing, not even a heartbeat, may come from a
	// standing pull: two missed, and half of one for the way.
	pullSilence = 2*pullHeartbeat + pullHeartbeat/2
	// maxPullBatch bounds what one worker asks for at once.
	maxPullBatch = 512
)

// Ready takes ready sessions into free slots. A message is pulled only for a
// free slot, acknowledged and confirmed before its session is started, and
// given back at once where the slot went elsewhere meanwhile: no worker parks
// a session that another could run.
type Ready struct {
	conn     *Conn
	slots    Slots
	opts     ReadyOptions
	announce *Announcer
	log      *slog.Logger
	state    stateLog

	empty   atomic.Bool
	in      chan arrival   // from the subscriptions to the loop
	stopped chan struct{}  // the loop reads no more
	acks    sync.WaitGroup // confirmations in flight
	acking  atomic.Int64   // of these, how many will take a slot
	acked   chan struct{}  // buffered 1: acking fell

	// Below is the loop's own.
	streams *Streams
	pulls   map[*nats.Subscription]*pull
	heard   time.Time // when something came last
	tries   int
	retryAt time.Time // no pull before
}

// pull is one request for messages. Each has its own inbox, so that what
// arrives tells which pull it belongs to.
type pull struct {
	sub     *nats.Subscription
	left    int  // messages it may still bring
	probe   bool // answers at once, and by that tells whether anything waits
	expires time.Time
	closed  chan struct{} // closed when nothing of it can come any more
}

type arrival struct {
	sub *nats.Subscription
	msg *nats.Msg
}

// NewReady makes a consumer of announcements; Run it.
func NewReady(c *Conn, slots Slots, o ReadyOptions) *Ready {
	log := orDiscard(o.Logger)
	return &Ready{
		conn: c, slots: slots, opts: o, announce: NewAnnouncer(c), log: log, state: stateLog{log: log},
		in: make(chan arrival), stopped: make(chan struct{}), acked: make(chan struct{}, 1),
		pulls: map[*nats.Subscription]*pull{},
	}
}

// Empty reports whether this worker knows that no older ready session waits:
// its pull stands, and the last answer to it was that nothing does. Only then
// may a wake acquire past the queue.
func (r *Ready) Empty() bool { return r.empty.Load() }

// Run takes sessions until ctx ends. What was confirmed by then is still
// started (or announced again); nothing else stays with this worker.
func (r *Ready) Run(ctx context.Context) error {
	status := r.conn.nc.StatusChanged(nats.CONNECTED, nats.RECONNECTING)
	defer r.conn.nc.RemoveStatusListener(status)
	tick := time.NewTicker(pullHeartbeat / 2)
	defer tick.Stop()
	r.heard = time.Now()
	for ctx.Err() == nil {
		if r.ensure(ctx) {
			r.topUp()
		}
		select {
		case <-ctx.Done():
		case a := <-r.in:
			r.arrived(ctx, a)
		case s := <-status:
			r.connection(s)
		case <-r.slots.Changed():
		case <-r.acked:
		case <-tick.C:
			r.overdue()
		}
	}
	r.stop()
	return ctx.Err()
}

// ensure makes sure of the durable, and reports whether pulls may be sent now.
func (r *Ready) ensure(ctx context.Context) bool {
	if time.Now().Before(r.retryAt) || !r.conn.nc.IsConnected() {
		return false
	}
	if r.streams != nil {
		return true
	}
	s, err := r.conn.Ensure(ctx, r.opts.Streams)
	if err != nil {
		if ctx.Err() == nil {
			r.trouble("the ready queue is not there", err)
		}
		return false
	}
	r.streams = s
	return true
}

// topUp keeps as many messages asked for as there are free slots. It asks
// again only when less than half is outstanding: else each freed slot would
// leave a pull of its own standing at the server.
func (r *Ready) topUp() {
	free := min(r.free(), maxPullBatch)
	asked := 0
	for _, p := range r.pulls {
		asked += p.left
	}
	switch {
	case free <= 0:
		r.drop()             // what would come could only go back
		r.empty.Store(false) // nobody looks at the queue now
	case asked == 0 || asked < (free+1)/2:
		r.pull(free-asked, !r.empty.Load())
	}
}

// free is how many slots no message that is being confirmed will take.
func (r *Ready) free() int { return r.slots.Free() - int(r.acking.Load()) }

// pullRequest is the body of CONSUMER.MSG.NEXT (NATS ADR-13).
type pullRequest struct {
	Batch     int           `json:"batch"`
	Expires   time.Duration `json:"expires,omitempty"`
	Heartbeat time.Duration `json:"idle_heartbeat,omitempty"`
	NoWait    bool          `json:"no_wait,omitempty"`
}

// pull sends one request. A probe answers at once; the standing pull follows it.
func (r *Ready) pull(batch int, probe bool) {
	inbox := r.conn.nc.NewInbox()
	sub, err := r.conn.nc.Subscribe(inbox, func(m *nats.Msg) {
		select {
		case r.in <- arrival{m.Sub, m}:
		case <-r.stopped:
			r.giveBack(m)
		}
	})
	if err != nil {
		r.trouble("can't ask for ready sessions", err)
		return
	}
	req := pullRequest{Batch: batch, NoWait: probe}
	p := &pull{sub: sub, left: batch, probe: probe, expires: time.Now().Add(attemptTimeout), closed: make(chan struct{})}
	sub.SetClosedHandler(func(string) { close(p.closed) })
	if !probe {
		req.Expires, req.Heartbeat = pullExpires, pullHeartbeat
		p.expires = time.Now().Add(pullExpires + pullHeartbeat)
	}
	body, err := json.Marshal(req)
	if err == nil {
		subject := apiPrefix + "CONSUMER.MSG.NEXT." + r.conn.ns.ReadyStream() + "." + r.streams.Ready()
		err = r.conn.nc.PublishRequest(subject, inbox, body)
	}
	if err != nil {
		r.end(p)
		r.trouble("can't ask for ready sessions", err)
		return
	}
	if len(r.pulls) == 0 {
		r.heard = time.Now()
	}
	r.pulls[sub] = p
}

// arrived handles a message or a status of a pull.
func (r *Ready) arrived(ctx context.Context, a arrival) {
	r.heard = time.Now()
	p := r.pulls[a.sub]    // nil: of a pull that was dropped while this was on its way
	if a.msg.Reply == "" { // a status; whatever was published has the reply to acknowledge it
		if p != nil {
			r.status(p, a.msg.Header.Get("Status"), a.msg.Header.Get("Description"))
		}
		return
	}
	if p != nil {
		if p.left--; p.left <= 0 {
			r.end(p)
		}
	}
	r.message(ctx, a.msg)
}

func (r *Ready) status(p *pull, code, description string) {
	switch code {
	case "100": // heartbeat
	case "404": // a probe: nothing (more) waits
		r.end(p)
		r.answered()
		r.empty.Store(true)
	case "408": // a probe: what waits goes to pulls that stand; else it has expired
		r.end(p)
		r.answered()
		if p.probe {
			r.empty.Store(true)
		}
	default: // 409: consumer deleted, leader changed, server shutting down; 503: nobody there
		lower := strings.ToLower(description)
		r.drop()
		if !strings.Contains(lower, "leadership change") && !strings.Contains(lower, "server shutdown") {
			r.streams = nil // look whether they are still there
		}
		r.trouble("the ready queue refuses pulls", fmt.Errorf("status %s %s", code, description))
	}
}

// answered notes that the queue works.
func (r *Ready) answered() {
	r.tries = 0
	r.state.ok("the ready queue answers again")
}

// trouble waits before the next attempt.
func (r *Ready) trouble(msg string, err error) {
	r.empty.Store(false)
	r.retryAt = time.Now().Add(backoff(r.tries, pullBackoff))
	r.tries++
	r.state.fail(msg+", trying on", "stream", r.conn.ns.ReadyStream(), "error", err)
}

// message takes a session into a slot, or gives it back.
func (r *Ready) message(ctx context.Context, m *nats.Msg) {
	meta, err := m.Metadata()
	if err != nil {
		r.log.Error("ready queue delivered something else than a message", "subject", m.Subject, "error", err)
		return
	}
	r.answered()
	r.empty.Store(meta.NumPending == 0)
	session, err := claims.ParseSession(strings.TrimPrefix(m.Subject, r.conn.ns.ReadySubject("")))
	if err != nil {
		r.log.Error("announcement of no session, dropping it", "subject", m.Subject, "error", err)
		if err := m.Respond(ackTerm); err != nil {
			r.log.Warn("dropping an announcement", "subject", m.Subject, "error", err)
		}
		return
	}
	if r.free() <= 0 {
		r.drop() // first, or it would come back to here
		r.giveBack(m)
		return
	}
	r.acking.Add(1)
	r.acks.Go(func() {
		r.confirm(context.WithoutCancel(ctx), m, session)
		r.acking.Add(-1)
		select {
		case r.acked <- struct{}{}:
		default:
		}
	})
}

var (
	ackAck  = []byte("+ACK")
	ackNak  = []byte("-NAK")
	ackTerm = []byte("+TERM")
)

// confirm acknowledges, waits for the server to say so, and starts. Where it
// can't know, or the slot went elsewhere, the session is announced again: if
// its message is still there that is refused, and nothing is lost either way.
func (r *Ready) confirm(ctx context.Context, m *nats.Msg, session claims.SessionID) {
	ctx, cancel := context.WithTimeout(ctx, 2*attemptTimeout)
	defer cancel()
	ackCtx, ackCancel := context.WithTimeout(ctx, attemptTimeout)
	_, err := r.conn.nc.RequestWithContext(ackCtx, m.Reply, ackAck)
	ackCancel()
	if err == nil && r.slots.Start(ctx, session) {
		return
	}
	if announceErr := r.announce.Announce(ctx, session); announceErr != nil {
		r.log.Warn("announcement is lost, the scanner makes it again", "session", session, "ack_error", err, "error", announceErr)
	}
}

// giveBack returns a message to the queue, for whoever has a slot.
func (r *Ready) giveBack(m *nats.Msg) {
	if m.Reply == "" { // a status
		return
	}
	if err := m.Respond(ackNak); err != nil {
		r.log.Warn("giving a ready session back, it comes again after the ack wait", "subject", m.Subject, "error", err)
	}
}

func (r *Ready) connection(s nats.Status) {
	r.drop()
	r.empty.Store(false)
	if s == nats.CONNECTED { // the streams may be others by now
		r.streams, r.retryAt = nil, time.Time{}
	}
}

// overdue drops pulls whose end nobody told, and all of them where not even a
// heartbeat comes: the server that held them is gone, or they overflowed.
func (r *Ready) overdue() {
	now := time.Now()
	silent := now.Sub(r.heard) > pullSilence
	for _, p := range r.pulls {
		if !silent && now.Before(p.expires) {
			continue
		}
		r.drop()
		r.streams = nil
		r.trouble("the ready queue is silent", nats.ErrTimeout)
		return
	}
}

// end removes a pull that can bring nothing more.
func (r *Ready) end(p *pull) {
	delete(r.pulls, p.sub)
	if err := p.sub.Unsubscribe(); err != nil && !errors.Is(err, nats.ErrConnectionClosed) && !errors.Is(err, nats.ErrBadSubscription) {
		r.log.Warn("unsubscribing from a pull", "error", err)
	}
}

// drop withdraws all pulls. Draining keeps each subscription here until the
// server has confirmed that it sends no more, so what is on its way is still
// seen, and given back.
func (r *Ready) drop() {
	for sub := range r.pulls {
		if err := sub.Drain(); err != nil && !errors.Is(err, nats.ErrConnectionClosed) && !errors.Is(err, nats.ErrBadSubscription) {
			r.log.Warn("withdrawing a pull", "error", err)
		}
	}
	clear(r.pulls)
}

// stop gives back what is on its way and waits for the confirmations.
func (r *Ready) stop() {
	r.empty.Store(false)
	pulls := slices.Collect(maps.Values(r.pulls))
	close(r.stopped)
	r.drop()
	late := time.NewTimer(flushTimeout)
	defer late.Stop()
	for _, p := range pulls {
		select {
		case <-p.closed:
			continue
		case <-late.C:
			r.log.Warn("stopping while a pull is not withdrawn; what it brings comes again after the ack wait")
		}
		break
	}
	r.acks.Wait() // bounded by their own time-outs
	if r.conn.nc.IsConnected() {
		if err := r.conn.nc.FlushTimeout(flushTimeout); err != nil {
			r.log.Warn("stopping without a flush", "error", err)
		}
	}
}

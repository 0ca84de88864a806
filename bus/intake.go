package bus

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"hash/maphash"
	"log/slog"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
	"github.com/prometheus/client_golang/prometheus"

	"reveille/claims"
)

// Applier applies commands to the database. Its methods are called from many
// goroutines, for one session from at most two at once (its wakes and its
// interrupts), and bound themselves in time.
type Applier interface {
	// Apply applies one command in one serializable transaction; nil means it is
	// committed (or was, before: a Duplicate). Only where mayAcquire is true may
	// it acquire the session's claim. Errors: claims.ErrInputConflict (nothing
	// was written), claims.ErrUnconfirmed (the leader must be asked; then it is
	// called again with Confirmed set); any other is "try later".
	Apply(ctx context.Context, cmd claims.Command, mayAcquire bool) (claims.Outcome, error)
	// PassOver moves the session's mark past a conflicting command, and does
	// nothing where it is past it already. It is called after the command was
	// published as rejected.
	PassOver(ctx context.Context, cmd claims.Command) error
}

// IntakeOptions of a command intake. The zero value has the defaults.
type IntakeOptions struct {
	Streams        StreamOptions
	Lanes          int           // sessions applied at once: 64
	InterruptLanes int           // the same for interrupts: 16
	MaxInputBytes  int           // of a command's body: 256 KiB
	DrainTimeout   time.Duration // for what is being applied when Run's context ends: 10 s
	Logger         *slog.Logger
}

const (
	defaultLanes          = 64
	defaultInterruptLanes = 16
	defaultDrain          = 10 * time.Second
	// laneQueue bounds what waits for one session's lane; more goes back to the
	// server, so that a stuck session fills its lane and not the worker.
	laneQueue = 16
	// queuedPerLane times the lanes, and what one lane holds, bounds what waits in
	// all together, and what is pulled: one stuck lane leaves room for the others.
	queuedPerLane = 4
	// lastApplied bounds what a lane remembers.
	lastApplied = 1024
	// heldFor is how long what the stream said of a message is good enough to
	// acknowledge it: far less than it takes to restore a stream and use it.
	heldFor = 500 * time.Millisecond
	// applyQuiet is how long no command must have failed before that is over.
	applyQuiet = 10 * time.Second

	intakeExpires   = 30 * time.Second
	intakeHeartbeat = 2 * time.Second
)

// Intake takes commands from the stream and applies them (I18, I19).
type Intake struct {
	conn     *Conn
	applier  Applier
	src      source
	announce *Announcer
	opts     IntakeOptions
	log      *slog.Logger
	seed     maphash.Seed

	wakes, interrupts *lanes
	stopping          chan struct{} // closed when Run's context ends

	streamState, applyState, tellState stateLog
	commands                           *prometheus.CounterVec
	applySeconds                       *prometheus.HistogramVec
}

// NewIntake makes a command intake; Run it once.
func NewIntake(c *Conn, a Applier, o IntakeOptions) *Intake {
	if o.Lanes <= 0 {
		o.Lanes = defaultLanes
	}
	if o.InterruptLanes <= 0 {
		o.InterruptLanes = defaultInterruptLanes
	}
	if o.DrainTimeout <= 0 {
		o.DrainTimeout = defaultDrain
	}
	o.Streams = o.Streams.withDefaults()
	log := orDiscard(o.Logger)
	in := &Intake{
		conn: c, applier: a, src: commandStream{c}, announce: NewAnnouncer(c), opts: o, log: log,
		seed: maphash.MakeSeed(), stopping: make(chan struct{}),
		streamState: stateLog{log: log}, applyState: stateLog{log: log, quiet: applyQuiet},
		tellState: stateLog{log: log, quiet: applyQuiet},
		commands: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "reveille_commands_total", Help: "Commands taken from the stream, by how they ended.",
		}, []string{"kind", "result"}),
		applySeconds: prometheus.NewHistogramVec(prometheus.HistogramOpts{
			Name: "reveille_command_apply_seconds", Help: "Time to apply a command in the database.",
			Buckets: prometheus.ExponentialBuckets(0.001, 2, 14),
		}, []string{"kind"}),
	}
	in.wakes, in.interrupts = newLanes(in, o.Lanes), newLanes(in, o.InterruptLanes)
	for _, kind := range []claims.CommandKind{claims.Admit, claims.Wake, claims.Interrupt} {
		for _, result := range []claims.ApplyResult{claims.Applied, claims.Duplicate, claims.Rejected, claims.Retried} {
			in.commands.WithLabelValues(string(kind), string(result))
		}
		in.applySeconds.WithLabelValues(string(kind))
	}
	return in
}

// Collectors are the intake's metrics.
func (in *Intake) Collectors() []prometheus.Collector {
	return []prometheus.Collector{in.commands, in.applySeconds}
}

// Run takes commands until ctx ends; then it gives back what it has not begun,
// lets what it is applying finish within DrainTimeout, and returns ctx's error.
func (in *Intake) Run(ctx context.Context) error {
	work, cancel := context.WithCancel(context.WithoutCancel(ctx))
	defer cancel()
	release := context.AfterFunc(ctx, func() { close(in.stopping) })
	defer release()
	in.wakes.start(work)
	in.interrupts.start(work)
	for try := 0; ctx.Err() == nil; try++ {
		began := time.Now()
		if err := in.consume(ctx); ctx.Err() == nil {
			in.streamState.fail("commands can't be taken, trying on", "stream", in.conn.ns.CommandStream(), "error", err)
			if time.Since(began) > ackWait {
				try = 0
			}
			if sleep(ctx, backoff(try, streamBackoff)) != nil {
				break
			}
		}
	}
	in.drain(cancel)
	return ctx.Err()
}

// drain waits for what is being applied, at most DrainTimeout; then it cancels it.
func (in *Intake) drain(cancel context.CancelFunc) {
	done := make(chan struct{})
	go func() {
		in.wakes.stop()
		in.interrupts.stop()
		close(done)
	}()
	timeout := time.NewTimer(in.opts.DrainTimeout)
	defer timeout.Stop()
	said := time.NewTicker(time.Second)
	defer said.Stop()
	for {
		select {
		case <-done:
			return
		case <-said.C:
			in.log.Info("waiting for commands that are being applied", "commands", in.wakes.busy.Load()+in.interrupts.busy.Load())
		case <-timeout.C:
			in.log.Warn("cancelling commands that are being applied", "commands", in.wakes.busy.Load()+in.interrupts.busy.Load())
			cancel()
		}
	}
}

// errConsumerGone: a durable or its stream was deleted.
var errConsumerGone = errors.New("consumer is gone")

// consume takes commands from one incarnation of the stream, until ctx ends or
// that is gone.
func (in *Intake) consume(ctx context.Context) error {
	s, err := in.conn.Ensure(ctx, in.opts.Streams)
	if err != nil {
		return err
	}
	for _, f := range s.Findings {
		in.log.Warn("stream is not as Reveille makes it", "finding", f)
	}
	trouble := make(chan error, 1)
	wakes, err := in.pull(ctx, s, s.Intake(), in.wakes, trouble)
	if err != nil {
		return err
	}
	defer in.halt(wakes)
	interrupts, err := in.pull(ctx, s, s.Interrupts(), in.interrupts, trouble)
	if err != nil {
		return err
	}
	defer in.halt(interrupts)
	in.streamState.ok("commands are taken again", "stream_id", s.CommandsID)
	for {
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-wakes.Closed():
			return errConsumerGone
		case <-interrupts.Closed():
			return errConsumerGone
		case err := <-trouble:
			in.streamState.fail("taking commands is disturbed", "error", err)
			if err := in.stillThere(ctx, s); err != nil {
				return err
			}
			in.streamState.ok("commands are taken again", "stream_id", s.CommandsID)
		}
	}
}

// stillThere asks until it is known whether the durables exist.
func (in *Intake) stillThere(ctx context.Context, s *Streams) error {
	for try := 0; ; try++ {
		var err error
		for _, durable := range []string{s.Intake(), s.Interrupts()} {
			if _, e := consumerInfo(ctx, in.conn.js, in.conn.ns.CommandStream(), durable); e != nil {
				err = e
			}
		}
		switch {
		case err == nil:
			return nil
		case errors.Is(err, jetstream.ErrConsumerNotFound), errors.Is(err, jetstream.ErrStreamNotFound):
			return errConsumerGone
		}
		if err := sleep(ctx, backoff(try, streamBackoff)); err != nil {
			return err
		}
	}
}

func (in *Intake) pull(ctx context.Context, s *Streams, durable string, l *lanes, trouble chan<- error) (jetstream.ConsumeContext, error) {
	infoCtx, cancel := context.WithTimeout(ctx, apiTimeout)
	defer cancel()
	c, err := in.conn.js.Consumer(infoCtx, in.conn.ns.CommandStream(), durable)
	if err != nil {
		return nil, err
	}
	return c.Consume(
		func(m jetstream.Msg) { l.take(m, s.CommandsID) },
		jetstream.PullMaxMessages(cap(l.room)), jetstream.PullExpiry(intakeExpires), jetstream.PullHeartbeat(intakeHeartbeat),
		jetstream.ConsumeErrHandler(func(_ jetstream.ConsumeContext, err error) {
			select {
			case trouble <- err:
			default:
			}
		}),
	)
}

// halt ends one consumption. Draining hands over what is buffered, and lanes
// that are stopping give it back: nothing waits for the ack wait.
func (in *Intake) halt(c jetstream.ConsumeContext) {
	c.Drain()
	timeout := time.NewTimer(flushTimeout)
	defer timeout.Stop()
	select {
	case <-c.Closed():
	case <-timeout.C: // the connection is down
		c.Stop()
	}
}

// hand is a message in hand.
type hand struct {
	Raw
	msg      jetstream.Msg
	streamID string
	tries    int // deliveries before this one
	received time.Time
	cmd      claims.Command
	rej      *Rejection
	touched  time.Time // when the server last heard that it is worked on

	held time.Time // when the stream was asked and held exactly this message, or zero
	link uint64    // the connection's number then
}

func newHand(ns Namespace, m jetstream.Msg, streamID string, maxBytes int) (*hand, error) {
	meta, err := m.Metadata()
	if err != nil {
		return nil, err
	}
	h := &hand{
		Raw: Raw{
			Subject: m.Subject(), Header: m.Headers(), Data: m.Data(), Sequence: meta.Sequence.Stream, Time: meta.Timestamp,
		},
		msg: m, streamID: streamID, tries: max(int(meta.NumDelivered)-1, 0), received: time.Now(), touched: time.Now(),
	}
	h.cmd, h.rej = Decode(ns, h.Raw, maxBytes)
	return h, nil
}

// lanes apply messages, a session's in one lane.
type lanes struct {
	in    *Intake
	lanes []*lane
	room  chan struct{} // bounds what is queued and in work
	busy  atomic.Int64
	wg    sync.WaitGroup

	mu     sync.RWMutex // held for reading while a queue is sent to
	closed bool
}

type lane struct {
	queue chan *hand
	// last is what this lane has applied and the server may still hold: its own
	// acknowledgement can be behind the next question. Only exactly these are
	// passed over without asking the database.
	last map[claims.SessionID]place
}

func newLanes(in *Intake, n int) *lanes {
	l := &lanes{in: in, room: make(chan struct{}, n*queuedPerLane+laneQueue)}
	for range n {
		l.lanes = append(l.lanes, &lane{queue: make(chan *hand, laneQueue), last: map[claims.SessionID]place{}})
	}
	return l
}

func (l *lanes) start(ctx context.Context) {
	for _, ln := range l.lanes {
		l.wg.Go(func() {
			for h := range ln.queue {
				l.busy.Add(1)
				l.in.handle(ctx, ln, h)
				l.busy.Add(-1)
				<-l.room
			}
		})
	}
}

func (l *lanes) stop() {
	l.mu.Lock()
	l.closed = true
	l.mu.Unlock()
	for _, ln := range l.lanes {
		close(ln.queue)
	}
	l.wg.Wait()
}

// take queues a message in its session's lane. It blocks while all lanes
// together are full, which stops the pulling.
func (l *lanes) take(m jetstream.Msg, streamID string) {
	h, err := newHand(l.in.conn.ns, m, streamID, l.in.opts.MaxInputBytes)
	if err != nil {
		l.in.log.Error("command stream delivered something else than a message", "subject", m.Subject(), "error", err)
		return
	}
	select {
	case l.room <- struct{}{}:
	case <-l.in.stopping:
		l.in.giveBack(h, 0)
		return
	}
	if !l.queue(h) {
		<-l.room
		l.in.settle(context.Background(), h, claims.Retried, errLaneFull)
	}
}

// queue puts a message in its session's lane, if it has room.
func (l *lanes) queue(h *hand) bool {
	l.mu.RLock()
	defer l.mu.RUnlock()
	if l.closed {
		return false
	}
	ln := l.lanes[maphash.String(l.in.seed, string(h.cmd.Session))%uint64(len(l.lanes))]
	select {
	case ln.queue <- h:
		return true
	default:
		return false
	}
}

var errLaneFull = errors.New("too many commands of this session wait")

// handle brings one message in hand to its end.
func (in *Intake) handle(ctx context.Context, ln *lane, h *hand) {
	select {
	case <-in.stopping:
		in.giveBack(h, 0)
		return
	default:
	}
	if time.Since(h.received) > in.opts.Streams.ackWait { // it was delivered again, to somebody with more time
		in.count(h.cmd.Kind, claims.Retried)
		return
	}
	if h.rej != nil { // it moves nothing, so its order does not matter
		in.settle(ctx, h, claims.Rejected, in.reject(ctx, h.Raw, h.streamID, h.cmd.Kind, h.rej))
		return
	}
	result, err := in.bring(ctx, ln, h)
	in.settle(ctx, h, result, err)
}

// settle acknowledges what is done and gives back what is not.
func (in *Intake) settle(ctx context.Context, h *hand, result claims.ApplyResult, err error) {
	if err != nil {
		in.count(h.cmd.Kind, claims.Retried)
		if !errors.Is(err, errLetGo) && !errors.Is(err, errLaneFull) && !errors.Is(err, context.Canceled) {
			in.applyState.fail("command can't be applied, trying on",
				"session", h.cmd.Session, "kind", h.cmd.Kind, "stream_seq", h.Sequence, "error", err)
		}
		in.giveBack(h, backoff(h.tries, applyBackoff))
		return
	}
	in.count(h.cmd.Kind, result)
	in.applyState.ok("commands are applied again")
	if err := in.ack(ctx, h); err != nil && !errors.Is(err, errLetGo) { // it comes again, as a duplicate
		in.tellState.fail("acknowledging fails", "session", h.cmd.Session, "stream_seq", h.Sequence, "error", err)
	}
}

// ack acknowledges a message that the stream holds. Of an acknowledgement the
// server looks at the sequence alone, and a stream that was restored from an
// older copy uses its sequences again, under the same id: where time has passed
// or the connection is another one since the stream was asked, it is asked once
// more, or a late acknowledgement would remove a message that nobody has applied
// (I18). Nothing is sent without a connection: it would be kept, and come late.
func (in *Intake) ack(ctx context.Context, h *hand) error {
	if time.Since(h.held) > heldFor || h.link != in.link() || !in.conn.nc.IsConnected() {
		if err := confirm(ctx, in.src, h.Raw); err != nil {
			return err
		}
	}
	return h.msg.Ack()
}

// link numbers the connections to the server.
func (in *Intake) link() uint64 { return in.conn.nc.Stats().Reconnects }

// giveBack returns a message to the server, for delivery after a delay.
func (in *Intake) giveBack(h *hand, delay time.Duration) {
	var err error
	if delay > 0 {
		err = h.msg.NakWithDelay(delay)
	} else {
		err = h.msg.Nak()
	}
	if err != nil { // it comes again after the ack wait
		in.tellState.fail("giving a command back fails", "session", h.cmd.Session, "stream_seq", h.Sequence, "error", err)
	}
}

func (in *Intake) count(kind claims.CommandKind, result claims.ApplyResult) {
	in.commands.WithLabelValues(string(kind), string(result)).Inc()
}

// bring applies the commands of a session up to and with the one in hand, in
// stream order (I18). Those before it are applied without acquiring: what they
// ask for is done by the one in hand, or by whoever is told that the session
// is ready.
func (in *Intake) bring(ctx context.Context, ln *lane, h *hand) (claims.ApplyResult, error) {
	from := uint64(1)
	for {
		select {
		case <-in.stopping:
			return "", errLetGo
		default:
		}
		asked, link := time.Now(), in.link()
		m, err := next(ctx, in.src, h.cmd.Session, h.place(), from)
		if err != nil {
			return "", err
		}
		if m.place() == h.place() {
			h.held, h.link = asked, link
			return in.apply(ctx, ln, h.Raw, h.cmd, h.streamID, true)
		}
		from = m.Sequence + 1
		if ln.last[h.cmd.Session] == m.place() {
			continue
		}
		// An undecodable one is passed over: its own delivery rejects it.
		if cmd, rej := Decode(in.conn.ns, m, in.opts.MaxInputBytes); rej == nil {
			result, err := in.apply(ctx, ln, m, cmd, h.streamID, false)
			if err != nil {
				return "", err
			}
			if result != claims.Duplicate {
				in.count(cmd.Kind, result)
			}
		}
		in.touch(h)
	}
}

// touch keeps the server from delivering the message again while those before
// it are applied.
func (in *Intake) touch(h *hand) {
	if time.Since(h.touched) < in.opts.Streams.ackWait/3 {
		return
	}
	h.touched = time.Now()
	if err := h.msg.InProgress(); err != nil {
		in.tellState.fail("telling the server of work in progress fails", "error", err)
	}
}

// apply applies one command, which is the session's next, and tells whom its
// outcome concerns. It returns nil only when all of that is done.
func (in *Intake) apply(ctx context.Context, ln *lane, m Raw, cmd claims.Command, streamID string, mayAcquire bool) (claims.ApplyResult, error) {
	out, err := in.timed(ctx, cmd, mayAcquire)
	if errors.Is(err, claims.ErrUnconfirmed) {
		if err := confirm(ctx, in.src, m); err != nil {
			return "", err
		}
		cmd.Confirmed = true
		out, err = in.timed(ctx, cmd, mayAcquire)
	}
	switch {
	case errors.Is(err, claims.ErrInputConflict):
		// Published first: a crash between the two rejects it once more (the
		// message id keeps that single), never silently.
		rej := &Rejection{InputConflict, fmt.Sprintf("%v: %s", claims.ErrInputConflict, cmd.Input.ID)}
		if err := in.reject(ctx, m, streamID, cmd.Kind, rej); err != nil {
			return "", err
		}
		if err := in.applier.PassOver(ctx, cmd); err != nil {
			return "", fmt.Errorf("passing over a conflicting command of session %s: %w", cmd.Session, err)
		}
		out = claims.Outcome{Result: claims.Rejected}
	case err != nil:
		return "", fmt.Errorf("applying %s of session %s: %w", cmd.Kind, cmd.Session, err)
	}
	if err := in.tell(ctx, cmd.Session, out); err != nil {
		return "", err
	}
	if len(ln.last) >= lastApplied {
		clear(ln.last)
	}
	ln.last[cmd.Session] = m.place()
	return out.Result, nil
}

func (in *Intake) timed(ctx context.Context, cmd claims.Command, mayAcquire bool) (claims.Outcome, error) {
	start := time.Now()
	out, err := in.applier.Apply(ctx, cmd, mayAcquire)
	in.applySeconds.WithLabelValues(string(cmd.Kind)).Observe(time.Since(start).Seconds())
	return out, err
}

// tell announces and notifies. It is before the acknowledgement, so after a
// crash between, the redelivery's Duplicate says Ready again.
func (in *Intake) tell(ctx context.Context, session claims.SessionID, out claims.Outcome) error {
	if out.Notice != nil { // a hint; the heartbeat's read is the fall-back
		if err := PublishNotice(in.conn, *out.Notice); err != nil {
			in.tellState.fail("a notice is not sent", "session", session, "error", err)
		}
	}
	if out.Ready {
		return in.announce.Announce(ctx, session)
	}
	return nil
}

const (
	// rejectedSlack is what a rejected message has beyond its body and the
	// command's own headers.
	rejectedSlack = 2 << 10
	// maxOwnHeaders is above what is kept of a command's own headers: past it,
	// they are left out.
	maxOwnHeaders = 64 << 10
	maxDetail     = 512
)

// reject publishes a command that can't be applied, and waits until that is stored.
func (in *Intake) reject(ctx context.Context, m Raw, streamID string, kind claims.CommandKind, rej *Rejection) error {
	msg := rejected(in.conn.ns, m, streamID, cmp.Or(kind, "unknown"), rej, int(in.conn.nc.MaxPayload()))
	if _, err := in.conn.publish(ctx, msg); err != nil {
		return fmt.Errorf("publishing a rejected command on %s: %w", msg.Subject, err)
	}
	return nil
}

// rejected is the message that tells of a rejected command. It can always be
// published, whatever the command was: the server acts on Nats-* headers, so
// they are left out, and what would not fit is cut.
func rejected(ns Namespace, m Raw, streamID string, kind claims.CommandKind, rej *Rejection, maxPayload int) *nats.Msg {
	at := streamID + ":" + strconv.FormatUint(m.Sequence, 10)
	h := nats.Header{}
	size := 0
	for k, vs := range m.Header {
		if strings.HasPrefix(strings.ToLower(k), "nats-") || strings.HasPrefix(strings.ToLower(k), "rv-") {
			continue
		}
		h[k] = vs
		for _, v := range vs {
			size += len(k) + len(v) + 4
		}
	}
	if size > maxOwnHeaders {
		h, size = nats.Header{}, 0
	}
	h.Set(nats.MsgIdHdr, at+":"+strconv.FormatInt(m.Time.UnixNano(), 10))
	h.Set(HeaderReason, string(rej.Reason))
	h.Set(HeaderDetail, cut(rej.Detail, maxDetail))
	h.Set(HeaderSubject, cut(m.Subject, maxDetail))
	h.Set(HeaderStreamSeq, at)
	if id := m.Header.Get(nats.MsgIdHdr); id != "" {
		h.Set(HeaderMsgID, cut(id, maxDetail))
	}
	body := m.Data
	if room := maxPayload - size - rejectedSlack; len(body) > room {
		h.Set(HeaderTruncated, strconv.Itoa(len(body)))
		body = body[:max(room, 0)]
	}
	return &nats.Msg{Subject: ns.Rejected(kind), Header: h, Data: body}
}

// cut bounds a header's value and keeps it on one line.
func cut(s string, most int) string {
	s = strings.Map(func(r rune) rune {
		if r < ' ' || r == 0x7f {
			return '?'
		}
		return r
	}, strings.ToValidUTF8(s, "?"))
	if len(s) > most {
		s = strings.ToValidUTF8(s[:most], "")
	}
	return s
}

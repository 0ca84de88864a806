package bus

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/url"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/google/uuid"
	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"reveille/claims"
)

// Options of a connection.
type Options struct {
	URL         string // one or more, separated by commas; empty is nats://127.0.0.1:4222
	Creds       string // a .creds file, or empty
	CA          string // a PEM file, or empty
	Name        string // what the server's monitoring shows
	InboxPrefix string // of the subjects on which answers come; empty is _INBOX and the user's name, where it has one
	Namespace   Namespace
	// InProcess connects to an embedded server instead of URL.
	InProcess nats.InProcessConnProvider
	Logger    *slog.Logger

	writeTimeout time.Duration // 0: pingInterval
}

// Conn is a connection to NATS in one namespace. It reconnects for ever; what
// is asked of it meanwhile fails with a time-out and is tried again by whoever
// asked. It is safe for concurrent use.
type Conn struct {
	nc     *nats.Conn
	js     jetstream.JetStream
	ns     Namespace
	log    *slog.Logger
	closed chan struct{} // closed when the connection is

	mu     sync.Mutex
	denied map[string]bool // permission violations that were logged

	remaker remaker
}

const (
	// A half-open connection is noticed after pingInterval × (pingsOut + 1); a server
	// that reads nothing when a write has waited for it for a pingInterval. The
	// client holds its lock so long: nothing else gets through either.
	pingInterval = 10 * time.Second
	pingsOut     = 2
	// flushTimeout bounds the good-bye of Close.
	flushTimeout = 2 * time.Second
)

// CheckURL refuses a list of servers that names another protocol than NATS:
// the client would speak NATS to whatever is there.
func CheckURL(servers string) error {
	for server := range strings.SplitSeq(servers, ",") {
		scheme, _, ok := strings.Cut(strings.TrimSpace(server), "://")
		if ok && !slices.Contains([]string{"nats", "tls", "ws", "wss"}, scheme) {
			return fmt.Errorf("%s: scheme %q: want nats, tls, ws or wss", redact(server), scheme)
		}
	}
	return nil
}

// Connect connects and waits until the server answers or ctx ends; the log
// says what it waits for. A bad URL, credentials file or CA fails at once.
func Connect(ctx context.Context, o Options) (*Conn, error) {
	ns, err := ParseNamespace(string(cmp.Or(o.Namespace, DefaultNamespace)))
	if err != nil {
		return nil, err
	}
	c := &Conn{ns: ns, log: orDiscard(o.Logger), closed: make(chan struct{}), denied: map[string]bool{}}
	c.remaker.state.log = c.log
	servers := cmp.Or(o.URL, nats.DefaultURL)
	if err := CheckURL(servers); err != nil {
		return nil, fmt.Errorf("connecting to NATS at %w", err)
	}
	connected, refused := make(chan struct{}, 1), &refusal{first: make(chan struct{})}
	if c.nc, err = nats.Connect(servers, c.natsOptions(o, connected, refused)...); err != nil {
		return nil, fmt.Errorf("connecting to NATS at %s: %w", redact(servers), err)
	}
	if c.js, err = jetstream.New(c.nc); err != nil {
		c.nc.Close()
		<-c.closed
		return nil, err
	}
	if c.nc.IsConnected() {
		return c, nil
	}
	c.log.Info("waiting for NATS", "url", redact(servers), "error", errText(c.nc.LastError()))
	for !c.nc.IsConnected() {
		select {
		case <-connected:
		case <-ctx.Done():
			refused.note(c.nc.LastError())
			last := refused.last()
			c.Close()
			return nil, fmt.Errorf("connecting to NATS at %s: %w (last: %w)", redact(servers), ctx.Err(), last)
		}
	}
	return c, nil
}

// refusal is the last reason why a connection could not be made.
type refusal struct {
	mu    sync.Mutex
	err   error
	first chan struct{} // closed when there is one
}

// errNoAnswer: nothing is known of any server.
var errNoAnswer = errors.New("no server answered yet")

// note keeps a reason. That all servers of the list were tried is none beside
// what one of them said.
func (r *refusal) note(err error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	switch {
	case err == nil, r.err != nil && errors.Is(err, nats.ErrNoServers):
		return
	case r.err == nil:
		close(r.first)
	}
	r.err = err
}

// last answers the last reason. The first attempt is over when it is asked, and
// the client tells of it at once, but in another goroutine.
func (r *refusal) last() error {
	patience := time.NewTimer(flushTimeout)
	defer patience.Stop()
	select {
	case <-r.first:
	case <-patience.C:
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	return cmp.Or(r.err, errNoAnswer)
}

func (c *Conn) natsOptions(o Options, connected chan<- struct{}, refused *refusal) []nats.Option {
	up := func(nc *nats.Conn) {
		c.log.Info("connected to NATS", "server", nc.ConnectedServerName(), "version", nc.ConnectedServerVersion())
		select {
		case connected <- struct{}{}:
		default:
		}
	}
	opts := []nats.Option{
		nats.Name(o.Name),
		nats.RetryOnFailedConnect(true), nats.MaxReconnects(-1), nats.IgnoreAuthErrorAbort(),
		nats.ReconnectWait(250 * time.Millisecond), nats.ReconnectJitter(250*time.Millisecond, time.Second),
		nats.PingInterval(pingInterval), nats.MaxPingsOutstanding(pingsOut),
		nats.FlusherTimeout(cmp.Or(o.writeTimeout, pingInterval)), nats.ReconnectOnFlusherError(),
		nats.ConnectHandler(up), nats.ReconnectHandler(up),
		nats.DisconnectErrHandler(func(nc *nats.Conn, err error) {
			if !nc.IsClosed() {
				c.log.Warn("lost NATS, reconnecting", "error", errText(err))
			}
		}),
		nats.ReconnectErrHandler(c.reconnectFailed(refused)),
		nats.ErrorHandler(c.asyncError),
		nats.ClosedHandler(func(*nats.Conn) { close(c.closed) }),
	}
	if o.Creds != "" {
		opts = append(opts, nats.UserCredentials(o.Creds))
	}
	if o.CA != "" {
		opts = append(opts, nats.RootCAs(o.CA))
	}
	if prefix := inboxPrefix(o); prefix != "" {
		opts = append(opts, nats.CustomInboxPrefix(prefix))
	}
	if o.InProcess != nil {
		opts = append(opts, nats.InProcessServer(o.InProcess))
	}
	return opts
}

// reconnectFailed logs why no server can be reached, once per reason.
func (c *Conn) reconnectFailed(refused *refusal) nats.ConnErrHandler {
	var mu sync.Mutex
	var last string
	return func(_ *nats.Conn, err error) {
		refused.note(err)
		mu.Lock()
		defer mu.Unlock()
		if text := errText(err); text != last {
			last = text
			c.log.Warn("NATS can't be reached, trying on", "error", text)
		}
	}
}

// asyncError logs what the server reports outside of an answer. A denied
// publish or subscription shows to its caller only as a time-out, so each
// subject is named here, once.
func (c *Conn) asyncError(_ *nats.Conn, sub *nats.Subscription, err error) {
	if errors.Is(err, nats.ErrPermissionViolation) {
		c.mu.Lock()
		seen := c.denied[err.Error()] || len(c.denied) > 1000
		c.denied[err.Error()] = true
		c.mu.Unlock()
		if seen {
			return
		}
	}
	subject := ""
	if sub != nil {
		subject = sub.Subject
	}
	c.log.Warn("NATS reports an error", "error", err, "subject", subject)
}

// NATS is the connection below.
func (c *Conn) NATS() *nats.Conn { return c.nc }

// JetStream is the JetStream client of the connection.
func (c *Conn) JetStream() jetstream.JetStream { return c.js }

// Namespace is the namespace that everything on this connection uses.
func (c *Conn) Namespace() Namespace { return c.ns }

// Ensure is Ensure on this connection, in its namespace. Once it has succeeded,
// the connection does the same by itself, in the background and at most once a
// second, when what it publishes finds no stream: one that was deleted under a
// running process is made again.
func (c *Conn) Ensure(ctx context.Context, o StreamOptions) (*Streams, error) {
	again := c.remaker.knows() // before: two that start at once make each a part
	s, err := Ensure(ctx, c.js, c.ns, o)
	if err != nil {
		return s, err
	}
	if c.remaker.keep(o); again && len(s.Made) > 0 {
		c.log.Warn("streams were missing, and are made again", "streams", strings.Join(s.Made, " "))
	}
	return s, nil
}

// Close flushes what was published, within two seconds, and closes.
func (c *Conn) Close() {
	c.remaker.close()
	if c.nc.IsConnected() {
		if err := c.nc.FlushTimeout(flushTimeout); err != nil {
			c.log.Warn("closing NATS without a flush", "error", err)
		}
	}
	c.nc.Close()
	<-c.closed
}

// Health is nil where the server answers and has the command stream. It is
// for readiness: cheap enough for every few seconds, bounded by ctx.
func (c *Conn) Health(ctx context.Context) error {
	if !c.nc.IsConnected() {
		return fmt.Errorf("NATS: %s", strings.ToLower(c.nc.Status().String()))
	}
	if _, err := streamInfo(ctx, c.js, c.ns.CommandStream()); err != nil {
		return fmt.Errorf("NATS: stream %s: %w", c.ns.CommandStream(), err)
	}
	return nil
}

// publishPatience bounds the retries of one publish whose caller set no
// deadline. It stays below commandDedupe, so that no retry counts twice.
const publishPatience = 20 * time.Second

// attemptTimeout bounds one publish or one read.
const attemptTimeout = 2 * time.Second

// Receipt says where a command was stored.
type Receipt struct {
	Sequence  uint64
	Duplicate bool // its message id was used before, within the dedupe window
}

// Publishing are the options of one command.
type Publishing struct {
	// MsgID is the Nats-Msg-Id; empty is a fresh one, which covers the retries
	// of this call only.
	MsgID string
	Trace string // W3C traceparent, or empty
}

// Publisher publishes commands. A nil error means that the stream has stored
// the command; any other that it may have, unless the error is a *Rejection.
type Publisher struct {
	conn *Conn
	// MaxInputBytes is the workers' --max-input-bytes; 0 is 256 KiB.
	MaxInputBytes int
}

// NewPublisher makes a publisher.
func NewPublisher(c *Conn) *Publisher { return &Publisher{conn: c} }

// Admit records an input without waking the session.
func (p *Publisher) Admit(ctx context.Context, session claims.SessionID, in claims.Input, o Publishing) (Receipt, error) {
	return p.Publish(ctx, claims.Command{Kind: claims.Admit, Session: session, Input: &in}, o)
}

// Wake runs the session, with an input or (nil) without one, not before a time
// or (zero) now.
func (p *Publisher) Wake(ctx context.Context, session claims.SessionID, in *claims.Input, notBefore time.Time, o Publishing) (Receipt, error) {
	return p.Publish(ctx, claims.Command{Kind: claims.Wake, Session: session, Input: in, NotBefore: notBefore}, o)
}

// InterruptOptions narrow or widen an interrupt.
type InterruptOptions struct {
	Reason    string
	Discard   bool               // pending inputs and continuations go too
	Execution claims.ExecutionID // only this execution's lineage; empty is any
}

// Interrupt cancels what the session runs, or what it would run next.
func (p *Publisher) Interrupt(ctx context.Context, session claims.SessionID, i InterruptOptions, o Publishing) (Receipt, error) {
	return p.Publish(ctx, claims.Command{
		Kind: claims.Interrupt, Session: session, Reason: i.Reason, Discard: i.Discard, Execution: i.Execution,
	}, o)
}

// Publish publishes a command with retries, until ctx ends or, where it has no
// deadline, for 20 s. Retries are single within the dedupe window of 30 s: with
// a later deadline, give inputs ids and name the execution that an interrupt is
// for. Errors: a *Rejection where no worker would apply it.
func (p *Publisher) Publish(ctx context.Context, cmd claims.Command, o Publishing) (Receipt, error) {
	if o.Trace != "" {
		cmd.Trace = o.Trace
	}
	m, err := Encode(p.conn.ns, cmd, p.MaxInputBytes)
	if err != nil {
		return Receipt{}, err
	}
	m.Header.Set(nats.MsgIdHdr, cmp.Or(o.MsgID, uuid.NewString()))
	if _, ok := ctx.Deadline(); !ok {
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeout(ctx, publishPatience)
		defer cancel()
	}
	for try := 0; ; try++ {
		ack, err := p.conn.publish(ctx, m)
		if err == nil {
			return Receipt{Sequence: ack.Sequence, Duplicate: ack.Duplicate}, nil
		}
		if fatalPublish(err) {
			return Receipt{}, fmt.Errorf("publishing %s: %w", m.Subject, err)
		}
		if sleep(ctx, backoff(try, publishBackoff)) != nil {
			return Receipt{}, fmt.Errorf("publishing %s: %w (the stream %s is missing, unreachable, or publishing there is denied)",
				m.Subject, err, p.conn.ns.CommandStream())
		}
	}
}

// fatalPublish reports whether trying again can't help.
func fatalPublish(err error) bool {
	var api *jetstream.APIError
	return errors.Is(err, nats.ErrMaxPayload) || errors.Is(err, nats.ErrConnectionClosed) || errors.Is(err, nats.ErrBadSubject) ||
		errors.As(err, &api) && api.Code == 400
}

// publish makes one attempt and waits for the acknowledgement.
func (c *Conn) publish(ctx context.Context, m *nats.Msg) (*jetstream.PubAck, error) {
	ctx, cancel := context.WithTimeout(ctx, attemptTimeout)
	defer cancel()
	ack, err := c.js.PublishMsg(ctx, m, jetstream.WithRetryAttempts(0))
	if errors.Is(err, jetstream.ErrNoStreamResponse) {
		c.missed()
	}
	return ack, err
}

// FromNew makes Watch start with what is published next.
const FromNew int64 = -1

// Watch calls fn with each event of a session in order, or of all sessions
// where it is empty, each session's in its order. It starts with the first
// whose Rv-Seq is at least from that the stream still has (FromNew: with the
// next one), and goes on until ctx ends or fn returns an error, which it
// returns. It survives reconnects; where the stream was rebuilt, a session's
// events are not repeated, those of all sessions may be.
func Watch(ctx context.Context, c *Conn, session claims.SessionID, from int64, fn func(claims.Record) error) error {
	w := &watch{conn: c, session: session, from: from, fn: fn, state: stateLog{log: c.log}}
	for {
		err := w.follow(ctx)
		switch {
		case ctx.Err() != nil:
			return ctx.Err()
		case errors.Is(err, errWatcher):
			return w.err
		}
		w.state.fail("events can't be followed, trying on", "stream", c.ns.EventStream(), "error", err)
		if sleep(ctx, backoff(w.tries, watchBackoff)) != nil {
			return ctx.Err()
		}
		w.tries++
	}
}

// errWatcher: the watcher's own function returned an error.
var errWatcher = errors.New("watcher is done")

type watch struct {
	conn    *Conn
	session claims.SessionID
	from    int64
	fn      func(claims.Record) error
	state   stateLog
	tries   int
	err     error

	created time.Time     // of the stream that was followed
	next    atomic.Uint64 // the stream sequence to go on with
}

// isAnother reports whether the stream is another one than was followed, or
// was rewound behind what was followed.
func (w *watch) isAnother(info *jetstream.StreamInfo) bool {
	return w.isAnotherThan(info, w.next.Load())
}

func (w *watch) isAnotherThan(info *jetstream.StreamInfo, next uint64) bool {
	return !info.Created.Equal(w.created) || info.State.LastSeq+1 < next
}

// guard cancels when the stream is another one. The ordered consumer attaches
// itself to that silently, and would wait for the sequence it was at.
func (w *watch) guard(ctx context.Context, cancel context.CancelCauseFunc) {
	for sleep(ctx, watchGuard) == nil {
		next := w.next.Load() // before the question: what comes meanwhile is not in its answer
		info, err := streamInfo(ctx, w.conn.js, w.conn.ns.EventStream())
		if err == nil && w.isAnotherThan(info, next) {
			cancel(errAnotherStream)
			return
		}
	}
}

var errAnotherStream = errors.New("the stream was made anew or rewound")

// follow follows the stream with one ordered consumer.
func (w *watch) follow(ctx context.Context) error {
	info, err := streamInfo(ctx, w.conn.js, w.conn.ns.EventStream())
	if err != nil {
		return err
	}
	if w.isAnother(info) {
		w.created = info.Created
		w.next.Store(0)
	}
	if w.next.Load() == 0 && w.from < 0 {
		w.next.Store(info.State.LastSeq + 1)
	}
	cfg := jetstream.OrderedConsumerConfig{
		FilterSubjects: []string{w.conn.ns.Event(cmp.Or(w.session, "*"))}, MaxResetAttempts: maxWatchResets,
		InactiveThreshold: watchThreshold,
	}
	if seq := w.next.Load(); seq > 0 {
		cfg.DeliverPolicy, cfg.OptStartSeq = jetstream.DeliverByStartSequencePolicy, seq
	}
	var wg sync.WaitGroup
	defer wg.Wait()
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	wg.Go(func() { w.guard(ctx, cancel) })
	cons, err := w.conn.js.OrderedConsumer(ctx, w.conn.ns.EventStream(), cfg)
	if err != nil {
		return err
	}
	it, err := cons.Messages(jetstream.PullExpiry(watchExpiry), jetstream.PullHeartbeat(watchHeartbeat))
	if err != nil {
		return err
	}
	defer it.Stop()
	for {
		m, err := it.Next(jetstream.NextContext(ctx))
		if err != nil {
			return cmp.Or(context.Cause(ctx), err)
		}
		if err := w.message(m); err != nil {
			return err
		}
	}
}

const (
	maxWatchResets = 3 // then the stream is looked at anew
	watchGuard     = 2 * time.Second
	watchThreshold = time.Minute // how long the server keeps a consumer nobody reads
	watchExpiry    = 10 * time.Second
	watchHeartbeat = 2 * time.Second
)

func (w *watch) message(m jetstream.Msg) error {
	meta, err := m.Metadata()
	if err != nil {
		return err
	}
	w.tries = 0
	w.state.ok("following events again")
	w.next.Store(meta.Sequence.Stream + 1)
	seq, err := strconv.ParseInt(m.Headers().Get(HeaderSeq), 10, 64)
	if err == nil && w.session != "" && w.from > 0 && seq < w.from {
		return nil
	}
	r, err := claims.ParseRecord(m.Data())
	if err != nil {
		w.conn.log.Error("message of the event stream is no event, passing over it", "subject", m.Subject(), "stream_seq", meta.Sequence.Stream, "error", err)
		return nil
	}
	if w.session != "" && w.from > 0 && r.Seq < w.from {
		return nil
	}
	if err := w.fn(r); err != nil {
		w.err = err
		return errWatcher
	}
	if w.session != "" {
		w.from = r.Seq + 1
	}
	return nil
}

// redact takes the passwords out of a list of URLs.
func redact(servers string) string {
	parts := strings.Split(servers, ",")
	for i, p := range parts {
		if u, err := url.Parse(strings.TrimSpace(p)); err == nil && u.User != nil {
			parts[i] = u.Redacted()
			if _, pw := u.User.Password(); !pw { // a bare token stands where the user does
				u.User = url.User("xxxxx")
				parts[i] = u.String()
			}
		}
	}
	return strings.Join(parts, ",")
}

func errText(err error) string {
	if err == nil {
		return errNoAnswer.Error()
	}
	return err.Error()
}

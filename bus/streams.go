package bus

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/google/uuid"
	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"reveille/claims"
)

const (
	// DefaultRetention is how long events, quarantine copies and rejected
	// commands are kept.
	DefaultRetention = 168 * time.Hour
	// metadataID is the key of a stream's id in its metadata.
	metadataID = "reveille-id"
	// commandDedupe covers the retries of one publish (see publishPatience). It
	// is small: an id is stream-wide and can swallow another's message.
	commandDedupe = 30 * time.Second
	// eventDedupe is as small as is useful: order and exactly-once come from the
	// expected last sequence, and an id that somebody guessed must not hold an
	// event up for long.
	eventDedupe = time.Second
	// copyDedupe keeps copies of quarantine events and rejected commands single
	// through the redeliveries of a few minutes.
	copyDedupe = 10 * time.Minute

	ackWait           = 15 * time.Second // above the 9 s of the worst election
	maxWaiting        = 16384            // can't be changed later, overflows silently
	defaultAckPending = 4096

	// minServer is 2.12: atomic batches and the fixes named in docs/jetstream.md.
	minServerMajor, minServerMinor = 2, 12

	apiPrefix = "$JS.API."
	// apiTimeout bounds one request to the JetStream API.
	apiTimeout = 5 * time.Second
)

// ErrServerTooOld: the server is older than 2.12.
var ErrServerTooOld = errors.New("NATS server is too old")

// StreamOptions says how streams and consumers are made where they are missing.
type StreamOptions struct {
	Replicas  int           // 0 is 1
	Retention time.Duration // of events, quarantine copies and rejected commands; 0 is DefaultRetention
	// MaxClockSkew is waited before the command stream is created, so that
	// whatever it stamps is newer than whatever an earlier one stamped (I18).
	MaxClockSkew time.Duration
	// MaxAckPending of the three durables: at least 4 × the slots of all
	// workers. 0 is 4096.
	MaxAckPending int

	ackWait time.Duration // of the three durables; tests shorten it
}

func (o StreamOptions) withDefaults() StreamOptions {
	if o.Replicas <= 0 {
		o.Replicas = 1
	}
	if o.Retention <= 0 {
		o.Retention = DefaultRetention
	}
	if o.MaxAckPending <= 0 {
		o.MaxAckPending = defaultAckPending
	}
	if o.ackWait <= 0 {
		o.ackWait = ackWait
	}
	return o
}

// Streams is what Ensure found or made.
type Streams struct {
	// CommandsID and ReadyID were made with their streams; durable names carry
	// them, so that a late acknowledgement for a stream that was deleted can't
	// remove a message of its successor (I18).
	CommandsID, ReadyID string
	// Made are the names of the streams that this call made.
	Made []string
	// Findings are the differences to what this package would have made, one
	// line each. Nothing of them was changed.
	Findings []string
}

// Intake is the durable of admit and wake.
func (s *Streams) Intake() string { return "intake-" + s.CommandsID }

// Interrupts is the durable of interrupt: interrupts don't queue behind wakes.
func (s *Streams) Interrupts() string { return "interrupts-" + s.CommandsID }

// Ready is the durable of the announcements.
func (s *Streams) Ready() string { return "ready-" + s.ReadyID }

// Configs are the streams of a namespace as Ensure makes them, without their ids.
func Configs(ns Namespace, o StreamOptions) []jetstream.StreamConfig {
	o = o.withDefaults()
	keep := func(name, subject string, dedupe time.Duration) jetstream.StreamConfig {
		return jetstream.StreamConfig{
			Name: name, Subjects: []string{subject}, Retention: jetstream.LimitsPolicy, MaxAge: o.Retention,
			AllowDirect: true, Duplicates: min(dedupe, o.Retention), Replicas: o.Replicas,
		}
	}
	events := keep(ns.EventStream(), ns.Event("*"), eventDedupe)
	events.AllowAtomicPublish, events.DenyPurge, events.DenyDelete = true, true, true
	return []jetstream.StreamConfig{
		// Neither MaxBytes nor MaxMsgs on the work queues: they would drop
		// unacknowledged work. No rollup and no schedules where tenants write:
		// the one wipes a stream, the other enables the one.
		{
			Name: ns.CommandStream(), Retention: jetstream.WorkQueuePolicy,
			Subjects: []string{
				ns.Command(claims.Admit, "*"), ns.Command(claims.Wake, "*"), ns.Command(claims.Interrupt, "*"),
			},
			AllowDirect: true, DenyPurge: true, Duplicates: commandDedupe, Replicas: o.Replicas,
		},
		{
			Name: ns.ReadyStream(), Subjects: []string{ns.ReadySubject("*")}, Retention: jetstream.WorkQueuePolicy,
			MaxMsgsPerSubject: 1, Discard: jetstream.DiscardNew, DiscardNewPerSubject: true,
			AllowDirect: true, Duplicates: eventDedupe, Replicas: o.Replicas,
		},
		events,
		keep(ns.QuarantineStream(), ns.Quarantine("*"), copyDedupe),
		keep(ns.RejectedStream(), ns.Rejected("*"), copyDedupe),
	}
}

// Ensure creates the streams and durables that are missing and changes none
// that exist. Any number of processes may do it at once; all end with the same
// streams and ids. It makes one attempt: where the server does not answer, the
// caller tries again. Errors: ErrServerTooOld, or what the server said.
func Ensure(ctx context.Context, js jetstream.JetStream, ns Namespace, o StreamOptions) (*Streams, error) {
	o = o.withDefaults()
	if err := checkVersion(js.Conn().ConnectedServerVersion()); err != nil {
		return nil, err
	}
	s := &Streams{}
	for _, cfg := range Configs(ns, o) {
		id, err := s.ensureStream(ctx, js, ns, cfg, o)
		if err != nil {
			return nil, fmt.Errorf("stream %s: %w", cfg.Name, err)
		}
		switch cfg.Name {
		case ns.CommandStream():
			s.CommandsID = id
		case ns.ReadyStream():
			s.ReadyID = id
		}
	}
	for _, c := range s.consumers(ns, o) {
		if err := s.ensureConsumer(ctx, js, c.stream, c.ConsumerConfig); err != nil {
			return nil, fmt.Errorf("consumer %s of %s: %w", c.Durable, c.stream, err)
		}
	}
	return s, nil
}

// checkVersion refuses servers before 2.12.
func checkVersion(version string) error {
	if version == "" {
		return fmt.Errorf("version of the NATS server: %w", nats.ErrConnectionReconnecting)
	}
	major, rest, _ := strings.Cut(version, ".")
	minor, _, _ := strings.Cut(rest, ".")
	x, errX := strconv.Atoi(major)
	y, errY := strconv.Atoi(minor)
	if errX != nil || errY != nil || x < minServerMajor || x == minServerMajor && y < minServerMinor {
		return fmt.Errorf("%w: it says %q, %d.%d is the oldest that keeps the per-subject checks and fixes Reveille relies on: upgrade it",
			ErrServerTooOld, version, minServerMajor, minServerMinor)
	}
	return nil
}

// ensureStream returns the stream's id.
func (s *Streams) ensureStream(ctx context.Context, js jetstream.JetStream, ns Namespace, cfg jetstream.StreamConfig, o StreamOptions) (string, error) {
	info, err := streamInfo(ctx, js, cfg.Name)
	if errors.Is(err, jetstream.ErrStreamNotFound) {
		cfg.Metadata = map[string]string{metadataID: strings.ReplaceAll(uuid.NewString(), "-", "")}
		info, err = createStream(ctx, js, cfg, cfg.Name == ns.CommandStream(), o.MaxClockSkew)
		if err == nil && info.Config.Metadata[metadataID] == cfg.Metadata[metadataID] {
			s.Made = append(s.Made, cfg.Name)
		}
	}
	if err != nil {
		return "", err
	}
	for _, d := range differences(info.Config, cfg) {
		s.Findings = append(s.Findings, "stream "+cfg.Name+": "+d.Text)
	}
	id, own := streamID(info)
	if !own {
		s.Findings = append(s.Findings, fmt.Sprintf("stream %s: metadata has no %s, its creation time stands in", cfg.Name, metadataID))
	}
	return id, nil
}

// streamID is the id that was made with a stream. One that was made by hand has
// none of its own: its creation time does as well, it changes with a re-creation.
func streamID(info *jetstream.StreamInfo) (id string, own bool) {
	if id := info.Config.Metadata[metadataID]; validID(id) {
		return id, true
	}
	return "t" + strconv.FormatInt(info.Created.UnixNano(), 36), false
}

// validID reports whether an id can be part of a durable's name.
func validID(id string) bool {
	return id != "" && len(id) <= 64 && !strings.ContainsFunc(id, func(r rune) bool {
		return (r < 'a' || r > 'z') && (r < 'A' || r > 'Z') && (r < '0' || r > '9') && r != '-' && r != '_'
	})
}

func streamInfo(ctx context.Context, js jetstream.JetStream, name string) (*jetstream.StreamInfo, error) {
	ctx, cancel := context.WithTimeout(ctx, apiTimeout)
	defer cancel()
	st, err := js.Stream(ctx, name)
	if err != nil {
		return nil, err
	}
	return st.CachedInfo(), nil
}

// createStream creates a stream, whose id is fresh, or finds the one that
// somebody else created meanwhile. For the command stream it waits the largest
// clock skew first: whoever publishes into it then, through whichever server,
// is stamped later than any message of a stream that was here before (I18).
func createStream(ctx context.Context, js jetstream.JetStream, cfg jetstream.StreamConfig, wait bool, skew time.Duration) (*jetstream.StreamInfo, error) {
	if wait && skew > 0 {
		if err := sleep(ctx, skew); err != nil {
			return nil, err
		}
	}
	apiCtx, cancel := context.WithTimeout(ctx, apiTimeout)
	defer cancel()
	_, err := js.CreateStream(apiCtx, cfg)
	// The answer is not believed: with another id in it the name is "in use",
	// after a time-out it may exist. What the server has is what counts.
	info, infoErr := streamInfo(ctx, js, cfg.Name)
	switch {
	case infoErr == nil:
		return info, nil
	case err != nil && !errors.Is(err, jetstream.ErrStreamNameAlreadyInUse):
		return nil, fmt.Errorf("creating it: %w", err)
	default:
		return nil, infoErr
	}
}

// Difference is one setting of a stream or a durable that is not as this
// package would have made it.
type Difference struct {
	Setting string // as the server's JSON names it; "limits" is max_bytes and max_msgs
	Text    string // what it is, and what was wanted
}

// differ appends a difference where there is one.
func differ(to []Difference, setting string, got, want any) []Difference {
	if got == want {
		return to
	}
	return append(to, Difference{setting, fmt.Sprintf("%s is %v, want %v", setting, got, want)})
}

// differences lists what matters of a stream and is not as it would be made.
func differences(got, want jetstream.StreamConfig) []Difference {
	var out []Difference
	diff := func(setting string, got, want any) { out = differ(out, setting, got, want) }
	slices.Sort(got.Subjects)
	slices.Sort(want.Subjects)
	diff("subjects", strings.Join(got.Subjects, " "), strings.Join(want.Subjects, " "))
	diff("retention", got.Retention, want.Retention)
	diff("replicas", got.Replicas, max(got.Replicas, want.Replicas)) // more are fine
	diff("max_age", got.MaxAge, want.MaxAge)
	diff("max_msgs_per_subject", max(got.MaxMsgsPerSubject, 0), want.MaxMsgsPerSubject)
	diff("discard", got.Discard, want.Discard)
	diff("discard_new_per_subject", got.DiscardNewPerSubject, want.DiscardNewPerSubject)
	diff("duplicate_window", got.Duplicates, want.Duplicates)
	diff("allow_direct", got.AllowDirect, want.AllowDirect)
	diff("allow_atomic", got.AllowAtomicPublish, want.AllowAtomicPublish)
	diff("allow_rollup_hdrs", got.AllowRollup, false)
	diff("allow_msg_schedules", got.AllowMsgSchedules, false)
	diff("deny_purge", got.DenyPurge, want.DenyPurge)
	diff("deny_delete", got.DenyDelete, want.DenyDelete)
	diff("storage", got.Storage, want.Storage)
	diff("no_ack", got.NoAck, false)
	diff("sealed", got.Sealed, false)
	if got.MaxBytes > 0 || got.MaxMsgs > 0 {
		out = append(out, Difference{
			"limits", fmt.Sprintf("max_bytes %d and max_msgs %d limit it: a full stream drops or refuses messages", got.MaxBytes, got.MaxMsgs),
		})
	}
	return out
}

type consumerOf struct {
	stream string
	jetstream.ConsumerConfig
}

// consumers are the durables, once the ids are known.
func (s *Streams) consumers(ns Namespace, o StreamOptions) []consumerOf {
	durable := func(stream, name string, filters ...string) consumerOf {
		// No BackOff: it overrides AckWait and corrupts NakWithDelay. No
		// MaxDeliver: a message past it stays in the queue, undelivered.
		return consumerOf{stream, jetstream.ConsumerConfig{
			Durable: name, FilterSubjects: filters, AckPolicy: jetstream.AckExplicitPolicy, AckWait: o.ackWait,
			MaxDeliver: -1, MaxAckPending: o.MaxAckPending, MaxWaiting: maxWaiting,
		}}
	}
	return []consumerOf{
		durable(ns.CommandStream(), s.Intake(), ns.Command(claims.Admit, "*"), ns.Command(claims.Wake, "*")),
		durable(ns.CommandStream(), s.Interrupts(), ns.Command(claims.Interrupt, "*")),
		durable(ns.ReadyStream(), s.Ready(), ns.ReadySubject("*")),
	}
}

func (s *Streams) ensureConsumer(ctx context.Context, js jetstream.JetStream, stream string, cfg jetstream.ConsumerConfig) error {
	info, err := consumerInfo(ctx, js, stream, cfg.Durable)
	if errors.Is(err, jetstream.ErrConsumerNotFound) {
		apiCtx, cancel := context.WithTimeout(ctx, apiTimeout)
		_, createErr := js.CreateConsumer(apiCtx, stream, cfg)
		cancel()
		// As for streams: what the server has counts, not this answer.
		if info, err = consumerInfo(ctx, js, stream, cfg.Durable); err != nil && createErr != nil {
			err = fmt.Errorf("creating it (another consumer on the same subjects must be deleted first): %w", createErr)
		}
	}
	if err != nil {
		return err
	}
	for _, d := range durableDifferences(info.Config, cfg) {
		s.Findings = append(s.Findings, "consumer "+cfg.Durable+": "+d.Text)
	}
	return nil
}

// durableDifferences lists what matters of a durable and is not as it would be made.
func durableDifferences(got, want jetstream.ConsumerConfig) []Difference {
	filters := got.FilterSubjects
	if got.FilterSubject != "" {
		filters = []string{got.FilterSubject}
	}
	slices.Sort(filters)
	slices.Sort(want.FilterSubjects)
	var out []Difference
	diff := func(setting string, got, want any) { out = differ(out, setting, got, want) }
	diff("filter", strings.Join(filters, " "), strings.Join(want.FilterSubjects, " "))
	diff("ack_policy", got.AckPolicy, want.AckPolicy)
	diff("ack_wait", got.AckWait, want.AckWait)
	diff("max_deliver", got.MaxDeliver, want.MaxDeliver)
	diff("backoff steps", len(got.BackOff), 0)
	diff("max_ack_pending", got.MaxAckPending, want.MaxAckPending)
	diff("max_waiting", got.MaxWaiting, want.MaxWaiting)
	return out
}

func consumerInfo(ctx context.Context, js jetstream.JetStream, stream, name string) (*jetstream.ConsumerInfo, error) {
	ctx, cancel := context.WithTimeout(ctx, apiTimeout)
	defer cancel()
	c, err := js.Consumer(ctx, stream, name)
	if err != nil {
		return nil, err
	}
	return c.CachedInfo(), nil
}

const (
	// remakeEvery bounds how often a process looks for the streams because it
	// missed one. In a cluster that elects a leader it does so in vain.
	remakeEvery = time.Second
	// remakeTimeout bounds one look, beyond the clock skew.
	remakeTimeout = 30 * time.Second
)

// remaker makes streams again that were deleted under a running process.
// Whoever missed one tries its own thing again later, and does not wait for it.
type remaker struct {
	state stateLog

	mu      sync.Mutex
	opts    *StreamOptions // of the last Ensure that succeeded; nil: none did
	running context.CancelFunc
	last    time.Time
	closed  bool
	wg      sync.WaitGroup
}

// keep remembers options.
func (r *remaker) keep(o StreamOptions) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.opts = &o
}

// knows reports whether there are some.
func (r *remaker) knows() bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.opts != nil
}

func (r *remaker) close() {
	r.mu.Lock()
	r.closed = true
	if r.running != nil {
		r.running()
	}
	r.mu.Unlock()
	r.wg.Wait()
}

// missed says that a stream did not answer, or is not there.
func (c *Conn) missed() {
	r := &c.remaker
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.opts == nil || r.closed || r.running != nil || time.Since(r.last) < remakeEvery {
		return
	}
	o := *r.opts
	ctx, cancel := context.WithTimeout(context.Background(), o.MaxClockSkew+remakeTimeout)
	r.running = cancel
	r.wg.Go(func() {
		c.remake(ctx, o)
		cancel()
		r.mu.Lock()
		defer r.mu.Unlock()
		r.running, r.last = nil, time.Now()
	})
}

func (c *Conn) remake(ctx context.Context, o StreamOptions) {
	switch _, err := c.Ensure(ctx, o); {
	case errors.Is(err, context.Canceled): // closed
	case err != nil:
		c.remaker.state.fail("a stream does not answer, and can't be made where it is missing, trying on", "error", err)
	default:
		c.remaker.state.ok("the streams are there again")
	}
}

// sleep waits, or returns the context's error.
func sleep(ctx context.Context, d time.Duration) error {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-t.C:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

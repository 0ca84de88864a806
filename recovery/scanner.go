// Package recovery is the scanner: it repairs what crashed workers left
// (docs/design.md section 6). It executes no SQL and speaks no NATS; a store, an
// announcer and a relayer are given to it.
//
// A pass visits the lanes one after the other, each at most Batch rows and
// within its time box, starting with another lane each time. A lane reads its
// rows, touches them (they go to the back, in a transaction of their own) and
// only then looks at each: a row that can't be worked on costs its place in
// one pass and blocks nobody (I29), and those that failed before come behind
// those that did not. Between two passes is a pause, which ends early when
// something is due that waited for its time.
//
// What to do with a row is decided by pure functions (policy.go); whether it may
// still be done is decided by the store, under the row's fence. A row that moved
// is left to who moved it, and is not counted as done (I28).
//
// Any number of scanners run at once (I31); nothing here relies on being the
// only one. What a scanner takes over it holds under a worker lease of its own,
// and acts on only while that lease is trusted by its own clocks (I7).
//
// Not promised: that an announcement is made once. It is a hint. And a scanner
// of an old version does nothing with a phase that it does not know.
package recovery

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"reveille/claims"
)

// Options of a scanner. The zero value of each means its default.
type Options struct {
	// Batch is the most rows a pass takes in each lane (--batch, 100).
	Batch int
	// Every is the time between two passes, ±25 % (--every, 1 s). A pass that
	// filled a batch and did something is followed by the next at once, and a
	// pause ends when something becomes due.
	Every time.Duration
	// TimeBox is how long a lane goes on to take rows (5 s). The row in hand is
	// given as long again; what it then has not answered is found out later.
	TimeBox time.Duration
	// Limits past which a session is quarantined instead of recovered
	// (--max-recoveries 3, --max-takeovers 10; I27).
	Limits claims.Limits
	// UncertainInterrupted closes an expired cancelling claim as interrupted
	// instead of quarantining it (--uncertain-cancel=interrupt; I26).
	UncertainInterrupted bool
	// Retention is how long relayed events, closed steps and served inputs are
	// kept (--retention, 168 h).
	Retention time.Duration
	// Reannounce is how long a touched continuation, session or relay stays
	// away from its lane before it is looked at again (5 s).
	Reannounce time.Duration
	// CallTimeout bounds one announcement and the relaying of one session (2 s).
	CallTimeout time.Duration
	// Relays is how many sessions are relayed at once (8).
	Relays int
	// Logger; slog.Default() where nil.
	Logger *slog.Logger
}

// Defaults of the options.
const (
	defaultBatch       = 100
	defaultEvery       = time.Second
	defaultTimeBox     = 5 * time.Second
	defaultReannounce  = 5 * time.Second
	defaultRetention   = 7 * 24 * time.Hour
	defaultCallTimeout = 2 * time.Second
	defaultRelays      = 8
	defaultRecoveries  = 3
	defaultTakeovers   = 10
)

func (o Options) withDefaults() Options {
	number := func(n *int, v int) {
		if *n == 0 {
			*n = v
		}
	}
	duration := func(d *time.Duration, v time.Duration) {
		if *d == 0 {
			*d = v
		}
	}
	number(&o.Batch, defaultBatch)
	number(&o.Relays, defaultRelays)
	number(&o.Limits.Recoveries, defaultRecoveries)
	number(&o.Limits.Takeovers, defaultTakeovers)
	duration(&o.Every, defaultEvery)
	duration(&o.TimeBox, defaultTimeBox)
	duration(&o.Reannounce, defaultReannounce)
	duration(&o.Retention, defaultRetention)
	duration(&o.CallTimeout, defaultCallTimeout)
	if o.Logger == nil {
		o.Logger = slog.Default()
	}
	return o
}

// Parts are what a scanner works with; all are needed. One store satisfies
// those of the database. Test doubles that stand around them hold a pass at its
// gates: TakeOver's return is before validation and conversion, which are one
// transaction of Convert's; Convert's return is before the quarantine.
type Parts struct {
	Claims        ClaimStore
	Conversions   Converter
	Held          HeldStore
	Continuations ContinuationStore
	Sessions      SessionStore
	Relays        RelayStore
	Retentions    RetentionStore
	Database      Pinger
	Announcer     Announcer
	Relayer       Relayer
	Copies        Mender
	// Holder is the scanner's own worker lease, and whether it is trusted now by
	// the process's clocks (I7). It is asked immediately before each takeover,
	// each conversion and each quarantine of a claim. While it answers false the
	// claims lane does nothing; the other lanes need no lease. No other part of
	// the process may hold claims under it: what it holds and the scanner does
	// not know, the scanner revokes (I3).
	Holder func() (holder claims.HolderID, trusted bool)
}

func (p Parts) check() error {
	for _, part := range []struct {
		name    string
		missing bool
	}{
		{"Claims", p.Claims == nil},
		{"Conversions", p.Conversions == nil},
		{"Held", p.Held == nil},
		{"Continuations", p.Continuations == nil},
		{"Sessions", p.Sessions == nil},
		{"Relays", p.Relays == nil},
		{"Retentions", p.Retentions == nil},
		{"Database", p.Database == nil},
		{"Announcer", p.Announcer == nil},
		{"Relayer", p.Relayer == nil},
		{"Copies", p.Copies == nil},
		{"Holder", p.Holder == nil},
	} {
		if part.missing {
			return fmt.Errorf("recovery: a scanner without %s: give it in Parts", part.name)
		}
	}
	return nil
}

// Scanner makes passes. Its methods are safe for concurrent use; passes are
// made one at a time.
type Scanner struct {
	parts   Parts
	opts    Options
	log     *slog.Logger
	metrics *metrics

	mu       sync.Mutex // one pass at a time; guards the rest
	passes   uint64
	taken    []*taking // taken over and not ended yet, in the order to try them
	swept    time.Time // when the claims of the lease were last compared with taken
	pruned   time.Time // when the retention lane last found nothing
	ages     map[Lane]*ages
	database outage
	stream   outage
	audit    audit // of the stream, by the relay lane
	relays   outage
	copies   outage
	lease    outage
}

// New makes a scanner. It does no work before Run or Pass.
func New(parts Parts, opts Options) (*Scanner, error) {
	if err := parts.check(); err != nil {
		return nil, err
	}
	opts = opts.withDefaults()
	if opts.Batch < 0 || opts.Relays < 0 || opts.Limits.Recoveries < 0 || opts.Limits.Takeovers < 0 ||
		opts.Every < 0 || opts.TimeBox < 0 || opts.Reannounce < 0 || opts.CallTimeout < 0 || opts.Retention < 0 {
		return nil, errors.New("recovery: a negative option: give numbers above 0, or 0 for the default")
	}
	s := &Scanner{
		parts: parts, opts: opts, log: opts.Logger, metrics: newMetrics(), ages: map[Lane]*ages{},
		database: outage{what: "the database"},
		stream:   outage{what: "the stream"},
		relays:   outage{what: "the relay"},
		copies:   outage{what: "the event stream, to compare it with the database"},
		audit:    audit{idle: map[claims.SessionID]rest{}},
		lease:    outage{what: "a worker lease of its own"},
	}
	for _, l := range allLanes() {
		s.ages[l] = newAges(seenAgainWithin * (opts.Reannounce + opts.Every))
	}
	return s, nil
}

// Collectors are the scanner's metrics; the caller registers them.
func (s *Scanner) Collectors() []prometheus.Collector { return s.metrics.collectors() }

// Run makes passes until ctx ends, and returns nil after the row in hand. It
// survives the loss of the database and of NATS: it says so once and goes on.
func (s *Scanner) Run(ctx context.Context) error {
	inARow, failures := 0, 0
	for {
		p := s.Pass(ctx)
		if failures++; !p.DatabaseLost {
			failures = 0
		}
		pause := pauseAfter(s.opts.Every, p.More(), inARow, failures, rand.Float64())
		if inARow++; pause > 0 {
			inARow = 0
		}
		if s.rest(ctx, pause, p.dueRead()); ctx.Err() != nil {
			return nil
		}
	}
}

// rest waits out the pause between two passes, and, where it is to ask, ends it
// early when something becomes due.
func (s *Scanner) rest(ctx context.Context, pause time.Duration, ask bool) {
	start := time.Now()
	for pass := false; !pass && ctx.Err() == nil; {
		gone := time.Since(start)
		var due time.Duration
		ok := false
		if ask && gone < pause {
			due, ok = s.nextDue(ctx, pause-gone)
		}
		var wait time.Duration
		wait, pass = restFor(pause, gone, due, ok)
		timer := time.NewTimer(wait)
		select {
		case <-ctx.Done():
		case <-timer.C:
		}
		timer.Stop()
	}
}

// nextDue asks when something is due next. Where that is not answered, the pass
// after the pause finds out why.
func (s *Scanner) nextDue(ctx context.Context, within time.Duration) (time.Duration, bool) {
	ctx, cancel := context.WithTimeout(ctx, min(s.opts.CallTimeout, within))
	defer cancel()
	due, ok, err := s.parts.Sessions.NextDue(ctx, within)
	if err != nil && ctx.Err() == nil {
		s.log.Debug("what is due next is not known", "error", err)
	}
	return due, ok && err == nil
}

// Result is what a pass did in one lane.
type Result struct {
	Seen        int // rows read; at most the batch
	Done        int // claims ended, sessions announced, relayed or rid of what is old
	Quarantined int // sessions taken out of circulation (not among Done)
	Left        int // rows that somebody else has by now, or that need nothing
	Failed      int // rows that could not be worked on; they come again
	Skipped     int // rows not looked at: the time box, the shutdown or an outage ended the lane
	Full        bool
	// Err: the lane could not be read, touched or audited, or the database was lost in it.
	Err error
}

// PassResult is what a pass did, by lane.
type PassResult struct {
	Lanes map[Lane]Result
	// DatabaseLost: the database did not answer; the lanes after that were not visited.
	DatabaseLost bool
}

// More reports whether a batch was full and something of it was done, so that
// the next pass need not wait. What is only to be deleted can.
func (p PassResult) More() bool {
	for name, r := range p.Lanes {
		if r.Full && r.Done+r.Quarantined > 0 && name != LaneRetention {
			return true
		}
	}
	return false
}

// dueRead reports whether the lanes of what waits for its time were read and
// touched: where they can't be, what is due does not go away, and would make one
// pass after the other.
func (p PassResult) dueRead() bool {
	for _, name := range []Lane{LaneOrdinary, LaneRecovery} {
		if r, visited := p.Lanes[name]; !visited || r.Err != nil {
			return false
		}
	}
	return !p.DatabaseLost
}

// Pass visits each lane once, that of retention only where it may find
// something. It ends early, after the row in hand, when ctx ends or the database
// is lost.
func (s *Scanner) Pass(ctx context.Context) PassResult {
	s.mu.Lock()
	defer s.mu.Unlock()
	number := s.passes
	s.passes++
	out := PassResult{Lanes: map[Lane]Result{}}
	announced := map[claims.SessionID]struct{}{}
	for _, name := range rotation(allLanes(), number) {
		if ctx.Err() != nil || out.DatabaseLost {
			break
		}
		if name == LaneRetention && !s.prunes() {
			continue
		}
		l := &lane{Scanner: s, name: name, number: number, outer: ctx, announced: announced}
		out.Lanes[name] = l.visit()
		out.DatabaseLost = l.lost
	}
	return out
}

// prunes reports whether the retention lane is to be visited.
func (s *Scanner) prunes() bool {
	return s.pruned.IsZero() || time.Since(s.pruned) >= quiet(s.opts.Retention)
}

// outage logs the loss of something once, and its return once.
type outage struct {
	what string
	down bool
}

func (o *outage) is(log *slog.Logger, err error) {
	switch {
	case err != nil && !o.down:
		o.down = true
		log.Warn("the scanner waits for "+o.what+": "+err.Error(), "waits_for", o.what)
	case err == nil && o.down:
		o.down = false
		log.Info("the scanner has "+o.what+" again", "waits_for", o.what)
	}
}

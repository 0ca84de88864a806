package recovery

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"time"

	"github.com/google/uuid"
	"golang.org/x/sync/errgroup"

	"reveille/claims"
)

// lane is one visit to one lane.
type lane struct {
	*Scanner
	name      Lane
	number    uint64          // of the pass, from 0
	outer     context.Context // the pass's
	box       context.Context // outer within the time box
	res       Result
	lost      bool                          // the database does not answer
	announced map[claims.SessionID]struct{} // in this pass, by all lanes
	mute      int                           // announcements in a row that failed in this lane
}

// outcome is what became of one row; the words are the label of scan_rows_total.
type outcome string

const (
	done        outcome = "done"
	quarantined outcome = "quarantined"
	left        outcome = "left"
	failed      outcome = "failed"
	skipped     outcome = "skipped"
)

// mostMute is after how many failed announcements in a row a lane makes no
// more: each may have waited CallTimeout for a stream that is not there.
const mostMute = 3

// errMute: the lane makes no more announcements.
var errMute = errors.New("announcements fail")

func (l *lane) visit() Result {
	start := time.Now()
	box, cancel := context.WithTimeout(l.outer, l.opts.TimeBox)
	defer cancel()
	l.box = box
	switch l.name {
	case LaneClaims:
		l.claims()
	case LaneRecovery:
		l.recovery()
	case LaneOrdinary:
		l.ordinary()
	case LaneRelay:
		l.relay()
	}
	l.metrics.passSeconds.WithLabelValues(string(l.name)).Observe(time.Since(start).Seconds())
	return l.res
}

// read takes the answer of a lane's query, or of its touch. It reports whether
// the lane goes on.
func (l *lane) read(what string, err error) bool {
	if err == nil {
		l.database.is(l.log, nil)
		return true
	}
	l.res.Err = err
	if l.outer.Err() == nil && !l.isLost() {
		l.log.Warn("a lane could not be "+what, "lane", l.name, "error", err)
	}
	return false
}

// isLost asks whether the database answers at all, after an error that may
// have been of one row.
func (l *lane) isLost() bool {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(l.outer), l.opts.CallTimeout)
	defer cancel()
	err := l.parts.Database.Ping(ctx)
	l.database.is(l.log, err)
	if err != nil {
		l.lost, l.res.Err = true, err
	}
	return l.lost
}

// saw notes the rows that the lane has read and touched, by keys that tell one
// row from another.
func (l *lane) saw(keys []string) {
	l.res.Seen += len(keys)
	oldest := l.ages[l.name].see(time.Now(), keys)
	l.metrics.oldest.WithLabelValues(string(l.name)).Set(oldest.Seconds())
}

// each works on the rows one at a time. The time box and a shutdown end it
// before a row, never in one.
func (l *lane) each(keys []string, work func(ctx context.Context, i int) (outcome, error)) {
	for i, key := range keys {
		if l.box.Err() != nil || l.lost {
			l.count(key, skipped, nil)
			continue
		}
		ctx, cancel := context.WithTimeout(context.WithoutCancel(l.outer), l.opts.TimeBox)
		what, err := work(ctx, i)
		cancel()
		l.count(key, what, err)
		if what == failed && !errors.Is(err, errStream) {
			l.isLost()
		}
	}
}

// count counts a row. An error of a row is logged once in as long as the row is seen.
func (l *lane) count(key string, what outcome, err error) {
	switch what {
	case done:
		l.res.Done++
	case quarantined:
		l.res.Quarantined++
	case left:
		l.res.Left++
	case failed:
		l.res.Failed++
	case skipped:
		l.res.Skipped++
	}
	l.metrics.rows.WithLabelValues(string(l.name), string(what)).Inc()
	ages := l.ages[l.name]
	switch {
	case what == failed && !errors.Is(err, errStream):
		if ages.warn(key) {
			l.log.Warn("a row could not be worked on; it comes again", "lane", l.name, "row", key, "error", err)
		}
	case what == quarantined, what == done && (l.name == LaneClaims || l.name == LaneRelay):
		ages.gone(key) // what was only announced is still there
	}
}

// moved reports whether an error says that the row is somebody else's by now.
func moved(err error) bool {
	return errors.Is(err, claims.ErrFenced) || errors.Is(err, claims.ErrQuarantined)
}

// errStream marks an error that is told as an outage of the stream, not of the row.
var errStream = errors.New("not published")

// announce tells a session's readiness, at most once in a pass.
func (l *lane) announce(ctx context.Context, session claims.SessionID) error {
	if _, ok := l.announced[session]; ok {
		return nil
	}
	if l.mute >= mostMute {
		return errMute
	}
	ctx, cancel := context.WithTimeout(ctx, l.opts.CallTimeout)
	defer cancel()
	err := l.parts.Announcer.Announce(ctx, session)
	l.stream.is(l.log, err)
	if err != nil {
		l.mute++
		return fmt.Errorf("%w: %w", errStream, err)
	}
	l.mute = 0
	l.announced[session] = struct{}{}
	return nil
}

// announceRow is announce as what a row is there for.
func (l *lane) announceRow(ctx context.Context, session claims.SessionID) (outcome, error) {
	switch err := l.announce(ctx, session); {
	case err == nil:
		return done, nil
	case errors.Is(err, errMute):
		return skipped, nil
	default:
		return failed, err
	}
}

func (l *lane) recovery() {
	due, err := l.parts.Continuations.DueContinuations(l.box, l.opts.Batch)
	if !l.read("read", err) {
		return
	}
	l.res.Full = len(due) >= l.opts.Batch
	if len(due) > 0 {
		if due, err = l.parts.Continuations.TouchContinuations(l.box, due, l.opts.Reannounce); !l.read("touched", err) {
			return
		}
	}
	keys := make([]string, len(due))
	for i, d := range due {
		keys[i] = string(d.Session) + " " + strconv.FormatInt(d.Number, 10)
	}
	l.saw(keys)
	l.each(keys, func(ctx context.Context, i int) (outcome, error) {
		d := due[i]
		announce, bad := judge(d)
		switch {
		case bad != nil:
			return l.quarantineContinuation(ctx, d, bad)
		case announce:
			return l.announceRow(ctx, d.Session)
		default:
			return left, nil
		}
	})
}

func (l *lane) quarantineContinuation(ctx context.Context, d claims.DueContinuation, bad *claims.Poison) (outcome, error) {
	token := &claims.Token{ID: uuid.NewString()}
	err := l.parts.Continuations.QuarantineContinuation(ctx, d, token)
	switch {
	case moved(err):
		return left, nil
	case err != nil:
		return failed, err
	}
	l.metrics.quarantined(bad.Reason)
	l.log.Warn("session quarantined", "session", d.Session, "continuation", d.Number, "reason", bad.Reason, "detail", bad.Detail)
	l.parts.Relayer.Poke(d.Session)
	return quarantined, nil
}

func (l *lane) ordinary() {
	due, err := l.parts.Sessions.DueSessions(l.box, l.opts.Batch)
	if !l.read("read", err) {
		return
	}
	l.res.Full = len(due) >= l.opts.Batch
	if len(due) > 0 {
		if due, err = l.parts.Sessions.TouchSessions(l.box, due, l.opts.Reannounce); !l.read("touched", err) {
			return
		}
	}
	keys := sessionKeys(due)
	l.saw(keys)
	l.each(keys, func(ctx context.Context, i int) (outcome, error) { return l.announceRow(ctx, due[i]) })
}

// relay relays several at once: one that waits for the stream holds up only itself.
func (l *lane) relay() {
	due, err := l.parts.Relays.DueRelays(l.box, l.opts.Batch)
	if !l.read("read", err) {
		return
	}
	l.res.Full = len(due) >= l.opts.Batch
	if len(due) > 0 {
		if due, err = l.parts.Relays.TouchRelays(l.box, due, l.opts.Reannounce); !l.read("touched", err) {
			return
		}
	}
	keys := sessionKeys(due)
	l.saw(keys)
	what := make([]outcome, len(due))
	errs := make([]error, len(due))
	var g errgroup.Group
	g.SetLimit(l.opts.Relays)
	for i, session := range due {
		g.Go(func() error {
			if l.box.Err() != nil {
				what[i] = skipped
				return nil
			}
			ctx, cancel := context.WithTimeout(l.box, l.opts.CallTimeout)
			defer cancel()
			if errs[i] = l.parts.Relayer.RelayNow(ctx, session); errs[i] != nil {
				what[i] = failed
			} else {
				what[i] = done
			}
			return nil
		})
	}
	_ = g.Wait() // each error stands with its row
	l.relayed(what, errs)
	for i, key := range keys {
		l.count(key, what[i], errs[i])
	}
}

// relayed tells an outage from sessions that can't be relayed: where no row
// was, the database or the stream is to blame.
func (l *lane) relayed(what []outcome, errs []error) {
	first := slices.Index(what, failed)
	switch {
	case slices.Contains(what, done):
		l.relays.is(l.log, nil)
	case first >= 0 && l.outer.Err() == nil && !l.isLost():
		l.relays.is(l.log, errs[first])
		for i, err := range errs {
			if err != nil {
				errs[i] = fmt.Errorf("%w: %w", errStream, err)
			}
		}
	}
}

func sessionKeys(ids []claims.SessionID) []string {
	out := make([]string, len(ids))
	for i, id := range ids {
		out[i] = string(id)
	}
	return out
}

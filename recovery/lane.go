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
	waited    time.Duration                 // for announcements that failed
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

// errMute: the lane makes no more announcements.
var errMute = errors.New("announcements fail")

func (l *lane) visit() Result {
	start := time.Now()
	length := l.opts.TimeBox
	if l.name == LaneRetention {
		length /= retentionShare
	}
	box, cancel := context.WithTimeout(l.outer, length)
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
		l.auditCopies()
	case LaneRetention:
		l.retention()
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
// row from another, and how long each is overdue.
func (l *lane) saw(keys []string, overdue func(i int) time.Duration) {
	l.res.Seen += len(keys)
	oldest := l.ages[l.name].see(time.Now(), keys, overdue)
	if l.name != LaneRetention { // what is kept too long hurts nobody
		l.metrics.oldest.WithLabelValues(string(l.name)).Set(oldest.Seconds())
	}
}

// each works on the rows one at a time. The time box and a shutdown end it
// before a row, never in one.
func (l *lane) each(keys []string, failures func(i int) int, work func(ctx context.Context, i int) (outcome, error)) {
	for _, i := range workOrder(len(keys), failures, l.number) {
		key := keys[i]
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

// failures answers how often in a row the rows have failed here.
func (l *lane) failures(keys []string) func(i int) int {
	return func(i int) int { return l.ages[l.name].failures(keys[i]) }
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
	case what == failed:
		if first := ages.failed(key); first && !errors.Is(err, errStream) {
			l.log.Warn("a row could not be worked on; it comes again", "lane", l.name, "row", key, "error", err)
		}
	case what == quarantined, what == done && l.name != LaneRecovery && l.name != LaneOrdinary:
		ages.gone(key) // what was only announced is still there
	case what == done:
		ages.worked(key)
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
	if l.waited >= l.opts.CallTimeout { // for a stream that is not there: what needs none goes on
		return errMute
	}
	ctx, cancel := context.WithTimeout(ctx, l.opts.CallTimeout)
	defer cancel()
	start := time.Now()
	err := l.parts.Announcer.Announce(ctx, session)
	l.stream.is(l.log, err)
	if err != nil {
		l.waited += time.Since(start)
		return fmt.Errorf("%w: %w", errStream, err)
	}
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
	l.saw(keys, func(i int) time.Duration { return due[i].Overdue })
	l.each(keys, l.failures(keys), func(ctx context.Context, i int) (outcome, error) {
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
	l.log.Warn("session quarantined", "session", d.Session, "continuation", d.Number, "reason", bad.Reason, "detail", detail(bad.Detail))
	l.parts.Relayer.Poke(d.Session)
	return quarantined, nil
}

// touchSessions touches what a lane of sessions has read, and notes what of it
// is this scanner's to work on. It reports whether the lane goes on.
func (l *lane) touchSessions(found []claims.DueSession, err error,
	touch func(context.Context, []claims.SessionID, time.Duration) ([]claims.SessionID, error),
) (due []claims.SessionID, keys []string, ok bool) {
	if !l.read("read", err) {
		return nil, nil, false
	}
	l.res.Full = len(found) >= l.opts.Batch
	overdue := make(map[claims.SessionID]time.Duration, len(found))
	for _, d := range found {
		due = append(due, d.Session)
		overdue[d.Session] = d.Overdue
	}
	if len(due) > 0 {
		if due, err = touch(l.box, due, l.opts.Reannounce); !l.read("touched", err) {
			return nil, nil, false
		}
	}
	for _, session := range due {
		keys = append(keys, string(session))
	}
	l.saw(keys, func(i int) time.Duration { return overdue[due[i]] })
	return due, keys, true
}

func (l *lane) ordinary() {
	found, err := l.parts.Sessions.DueSessions(l.box, l.opts.Batch)
	due, keys, ok := l.touchSessions(found, err, l.parts.Sessions.TouchSessions)
	if !ok {
		return
	}
	l.each(keys, l.failures(keys), func(ctx context.Context, i int) (outcome, error) { return l.announceRow(ctx, due[i]) })
}

// relay relays several at once: one that waits for the stream holds up only itself.
func (l *lane) relay() {
	found, err := l.parts.Relays.DueRelays(l.box, l.opts.Batch)
	due, keys, ok := l.touchSessions(found, err, l.parts.Relays.TouchRelays)
	if !ok {
		return
	}
	what := make([]outcome, len(due))
	errs := make([]error, len(due))
	var g errgroup.Group
	g.SetLimit(l.opts.Relays)
	for _, i := range workOrder(len(keys), l.failures(keys), l.number) {
		g.Go(func() error {
			if l.box.Err() != nil {
				what[i] = skipped
				return nil
			}
			ctx, cancel := context.WithTimeout(l.box, l.opts.CallTimeout)
			defer cancel()
			if errs[i] = l.parts.Relayer.RelayNow(ctx, due[i]); errs[i] != nil {
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

// retention deletes what is past its retention, of each session at most
// retentionBatches batches of rows, one to a transaction. After a visit that
// found nothing the lane is left alone for a while.
func (l *lane) retention() {
	l.pruned = time.Now() // also where it could not be read: that can wait
	store, keep := l.parts.Retentions, l.opts.Retention
	ids, err := store.DueRetentions(l.box, keep, l.opts.Batch)
	found := make([]claims.DueSession, len(ids))
	for i, id := range ids {
		found[i].Session = id
	}
	due, keys, ok := l.touchSessions(found, err, func(ctx context.Context, ids []claims.SessionID, again time.Duration) ([]claims.SessionID, error) {
		return store.TouchRetentions(ctx, ids, keep, again)
	})
	if !ok || len(found) == 0 {
		return
	}
	l.pruned = time.Time{}
	rows := 0
	l.each(keys, l.failures(keys), func(ctx context.Context, i int) (outcome, error) {
		for range retentionBatches {
			deleted, more, err := store.DeleteExpired(ctx, due[i], keep, l.opts.Batch)
			rows += deleted
			switch {
			case moved(err):
				return left, nil
			case err != nil:
				return failed, err
			case !more || l.box.Err() != nil:
				return done, nil
			}
		}
		return done, nil
	})
	l.log.Debug("past retention", "sessions", len(due), "rows_deleted", rows)
}

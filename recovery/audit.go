package recovery

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"time"

	"golang.org/x/sync/errgroup"

	"reveille/claims"
)

// The audit is the other half of the relay lane: the stream's server may lose
// what it has acknowledged, and a session that is quiet never publishes again
// to notice. So each visit compares a page of the sessions, in the order of
// their ids and around, with what the stream ends with, and has published again
// what it lost (I25). It reads and writes no row of the lane.

const (
	// auditShare of a time box is the audit's.
	auditShare = 5
	// auditMost bounds a page, whatever the batch: the server answers for so many
	// sessions at once.
	auditMost = 500
	// auditMostIdle bounds the sessions that are remembered as idle.
	auditMostIdle = 10_000
	// idleFor is how long a session is left alone of which the stream had less than
	// the mark says, twice in a row, and nothing was to be published again: it left
	// the stream by its age. Each look reads its log. Once may be a replica that
	// lags, or another scanner that was first.
	idleFor = 10 * time.Minute
	// brokenFor is the same for one that could not be published again.
	brokenFor = time.Minute
)

// audit is where the comparison is.
type audit struct {
	after claims.SessionID          // the last one of the page before
	at    time.Time                 // when the page before was compared
	more  bool                      // it mended something
	idle  map[claims.SessionID]rest // those that are left alone, or were nearly
}

// rest is why and until when a session is left alone.
type rest struct {
	until time.Time
	aged  bool // nothing was to be published again, as far as one look says
}

// due reports whether the next page is to be compared. Passes that follow each
// other without a pause don't make it more often, unless it finds something.
func (a *audit) due(now time.Time, every time.Duration) bool {
	return a.more || now.Sub(a.at) >= every/2
}

// pick is the sessions that are to be mended, of those the stream has less of.
func (a *audit) pick(now time.Time, short []claims.SessionID) (out []claims.SessionID) {
	for _, s := range short {
		if !now.Before(a.idle[s].until) {
			out = append(out, s)
		}
	}
	return out
}

// aged notes that nothing of a session was to be published again.
func (a *audit) aged(now time.Time, session claims.SessionID) {
	r := rest{until: now, aged: true}
	if a.idle[session].aged {
		r.until = now.Add(idleFor)
	}
	a.leave(session, r)
}

// broken notes that a session could not be published again.
func (a *audit) broken(now time.Time, session claims.SessionID) {
	a.leave(session, rest{until: now.Add(brokenFor)})
}

// begin begins with a page.
func (a *audit) begin(now time.Time) {
	a.at, a.more = now, false
	if len(a.idle) >= auditMostIdle {
		maps.DeleteFunc(a.idle, func(_ claims.SessionID, r rest) bool { return !now.Before(r.until) })
	}
}

func (a *audit) leave(session claims.SessionID, r rest) {
	if _, known := a.idle[session]; known || len(a.idle) < auditMostIdle {
		a.idle[session] = r
	}
}

// nextAfter is where the next page begins: behind this one, and after the last
// session at the beginning. A page that the time box cut is compared again,
// for the rest of it, as long as that mends something: what hangs does not hold
// up the sessions behind it.
func nextAfter(after claims.SessionID, page []claims.Mark, limit int, cut, mended bool) claims.SessionID {
	switch {
	case cut && mended:
		return after
	case len(page) < limit:
		return ""
	default:
		return page[len(page)-1].Session
	}
}

// mending is what became of one session that the stream has less of.
type mending struct {
	outcome   outcome
	published int64
	err       error
}

// auditCopies compares a page, and mends what the stream lost.
func (l *lane) auditCopies() {
	a, now := &l.audit, time.Now()
	if l.lost || l.box.Err() != nil || !a.due(now, l.opts.Every) {
		return
	}
	a.begin(now)
	ctx, cancel := context.WithTimeout(l.box, l.opts.TimeBox/auditShare)
	defer cancel()
	limit := min(l.opts.Batch, auditMost)
	page, err := l.parts.Relays.Relayed(ctx, a.after, limit)
	if !l.read("audited", err) {
		return
	}
	if len(page) == 0 {
		a.after = ""
		return
	}
	short, err := l.parts.Copies.Verify(ctx, page)
	if l.outer.Err() != nil {
		return
	}
	if l.copies.is(l.log, err); err != nil {
		return // the same page comes again
	}
	short = a.pick(a.at, short)
	results := l.mend(ctx, short)
	cut := ctx.Err() != nil
	l.mended(short, results, cut)
	a.after = nextAfter(a.after, page, limit, cut, a.more)
	// The next page need not wait either: what lost these lost others.
	l.res.Full = l.res.Full || a.more
}

// mend publishes again what the stream lost of some sessions, several at once.
func (l *lane) mend(ctx context.Context, short []claims.SessionID) []mending {
	out := make([]mending, len(short))
	var g errgroup.Group
	g.SetLimit(l.opts.Relays)
	for i, session := range short {
		g.Go(func() error {
			if ctx.Err() != nil {
				out[i].outcome = skipped
				return nil
			}
			n, err := l.parts.Copies.Repair(ctx, session, false)
			out[i] = mending{done, n, err}
			switch {
			case err != nil:
				out[i].outcome = failed
			case n == 0:
				out[i].outcome = left
			}
			return nil
		})
	}
	_ = g.Wait() // each error stands with its session
	return out
}

// mended tells what became of the sessions, in at most a line of the log for
// those that were mended and one for those that can't be: a stream that is lost
// has lost all of them.
func (l *lane) mended(short []claims.SessionID, results []mending, cut bool) {
	a := &l.audit
	var sessions, broken int
	var events int64
	var example, brokenExample claims.SessionID
	var why error
	for i, m := range results {
		session := short[i]
		if m.published > 0 {
			a.more = true
			sessions, events, example = sessions+1, events+m.published, session
			delete(a.idle, session)
		}
		switch {
		case m.outcome == left:
			a.aged(a.at, session)
		case m.outcome == failed && cut && errors.Is(m.err, context.DeadlineExceeded):
			m.outcome = skipped // it goes on where it was, in a later pass
		case m.outcome == failed:
			a.broken(a.at, session)
			broken, brokenExample, why = broken+1, session, m.err
		}
		if m.err != nil {
			m.err = fmt.Errorf("%w: %w", errStream, m.err)
		}
		l.count("audit "+string(session), m.outcome, m.err)
	}
	if sessions > 0 {
		l.log.Warn("the stream had lost events; they are published again", "sessions", sessions, "events", events, "session", example)
	}
	if broken > 0 && l.outer.Err() == nil {
		l.log.Warn("what the stream lost could not be published again; it is tried later", "sessions", broken, "session", brokenExample, "error", why)
	}
}

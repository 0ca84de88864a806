package bus

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"sync"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
	"github.com/synadia-io/orbit.go/jetstreamext"

	"reveille/claims"
)

const (
	// VerifyMost is the most sessions of one Verify: the server answers for at
	// most 1,024 subjects at once.
	VerifyMost = 500
	// ageMargin keeps what is about to leave the stream by its age from being
	// taken for lost, and published again.
	ageMargin = time.Hour
	// ageEvery is how often the stream's own settings are asked for.
	ageEvery = time.Minute
)

// Verify compares what the stream ends with for some sessions with the marks of
// the database, by one request, and returns those of which the stream has less:
// its server lost its last seconds, or all of it. What Repair makes of them is
// its own judgement; a replica that lags may name sessions that are sound.
func (r *Relay) Verify(ctx context.Context, marks []Mark) (short []claims.SessionID, err error) {
	if len(marks) > VerifyMost {
		return nil, fmt.Errorf("verifying %d sessions, at most %d at once", len(marks), VerifyMost)
	}
	ctx, cancel := context.WithTimeout(ctx, apiTimeout)
	defer cancel()
	subjects := make([]string, len(marks))
	for i, m := range marks {
		subjects[i] = r.conn.ns.Event(m.Session)
	}
	ends := make(map[string]int64, len(marks))
	if len(marks) > 0 {
		msgs, err := jetstreamext.GetLastMsgsFor(ctx, r.conn.js, r.conn.ns.EventStream(), subjects)
		if err != nil {
			return nil, fmt.Errorf("verifying the event stream: %w", err)
		}
		for m, err := range msgs {
			if errors.Is(err, jetstreamext.ErrNoMessages) {
				break
			}
			if err != nil {
				return nil, fmt.Errorf("verifying the event stream: %w", r.whyNot(ctx, err))
			}
			seq, err := strconv.ParseInt(m.Header.Get(HeaderSeq), 10, 64)
			if err != nil {
				continue // somebody else's message: Repair says so
			}
			ends[m.Subject] = seq
		}
		// The answers end without an error when the time does: what did not come
		// would be taken for lost.
		if err := ctx.Err(); err != nil {
			return nil, fmt.Errorf("verifying the event stream: %w", err)
		}
	}
	for i, m := range marks {
		if ends[subjects[i]] < m.Seq {
			short = append(short, m.Session)
		}
	}
	return short, nil
}

// whyNot says why nobody answers direct gets, and has a missing stream made.
func (r *Relay) whyNot(ctx context.Context, err error) error {
	if !errors.Is(err, nats.ErrNoResponders) {
		return err
	}
	_, infoErr := streamInfo(ctx, r.conn.js, r.conn.ns.EventStream())
	switch {
	case errors.Is(infoErr, jetstream.ErrStreamNotFound):
		r.conn.missed()
		return infoErr
	case infoErr != nil:
		return infoErr
	default:
		return fmt.Errorf("%w: set allow_direct of %s, or wait for its leader", err, r.conn.ns.EventStream())
	}
}

// Repair publishes again what the stream lost of a session and the database
// keeps, in order, each once (I25). Where the stream has nothing of it, what is
// old enough to have left it by its age is not published, unless all says so.
// It is safe beside relays at work; resumed after a crash it goes on where the
// stream ends. It returns how many events it published.
func (r *Relay) Repair(ctx context.Context, session claims.SessionID, all bool) (published int64, err error) {
	for tries := 0; ; tries++ {
		mark, _, err := r.log.Unrelayed(ctx, session, 1)
		if err != nil {
			return published, fmt.Errorf("reading the mark of session %s: %w", session, err)
		}
		at, err := r.mend(ctx, session, mark, all, &published)
		r.forget(session)
		if errors.Is(err, errMoved) && tries < copyTries {
			continue
		}
		if err != nil {
			return published, err
		}
		if at.seq > mark {
			return published, nil
		}
		r.Poke(session) // what is not relayed yet
		return published, nil
	}
}

// mend publishes what the stream had, as the database noted, and has not any
// more: a server that lost its last seconds, or a stream that is a new one. It
// needs a Replayer, and returns where the stream then ends.
func (r *Relay) mend(ctx context.Context, session claims.SessionID, mark int64, all bool, published *int64) (end, error) {
	at, err := r.readEnd(ctx, session, 0, r.conn.leaderGet) // a replica that lags perhaps said less
	if err != nil || at.seq >= mark {
		return at, err
	}
	replayer, ok := r.log.(Replayer)
	if !ok {
		return r.giveUp(session, at, mark), nil
	}
	keeps := time.Time{}
	if at.stream == 0 && !all {
		if keeps, err = r.keepsFrom(ctx); err != nil {
			return at, err
		}
	}
	for at.seq < mark {
		records, err := replayer.Replay(ctx, session, at.seq, relayPage)
		if err != nil {
			return at, fmt.Errorf("reading events of session %s again: %w", session, err)
		}
		if at.stream == 0 {
			records, at = younger(records, at, keeps)
		}
		for len(records) > 0 && records[len(records)-1].Seq > mark {
			records = records[:len(records)-1] // the relay's own
		}
		if len(records) == 0 || records[0].Seq != at.seq+1 {
			return r.giveUp(session, at, mark), nil
		}
		before := at.seq
		if at, err = r.copy(ctx, at, records); err != nil {
			return at, err
		}
		*published += at.seq - before
	}
	return at, nil
}

// younger drops the records that left the stream by their age, or that the
// database keeps no more: where the stream has nothing of a session, its copy
// begins with the first that it should have.
func younger(records []claims.Record, at end, keeps time.Time) ([]claims.Record, end) {
	for len(records) > 0 {
		if t, err := time.Parse(time.RFC3339, records[0].Time); err == nil && !t.Before(keeps) {
			at.seq = records[0].Seq - 1
			break
		}
		at.seq = records[0].Seq
		records = records[1:]
	}
	return records, at
}

// giveUp goes on behind what can't be published again.
func (r *Relay) giveUp(session claims.SessionID, at end, mark int64) end {
	if at.stream != 0 {
		r.slog.Error("the stream lost events that can't be published again; going on after them",
			"session", session, "from", at.seq+1, "to", mark)
	}
	at.seq = mark
	return at
}

// settings is what a stream's own configuration says about what it keeps.
type settings struct {
	mu    sync.Mutex
	asked time.Time
	from  func(now time.Time) time.Time
}

// keepsFrom is since when the event stream must have what was published to it.
// A stream that drops events by their number or size tells nothing.
func (r *Relay) keepsFrom(ctx context.Context) (time.Time, error) {
	r.settings.mu.Lock()
	defer r.settings.mu.Unlock()
	now := time.Now()
	if now.Sub(r.settings.asked) >= ageEvery {
		ctx, cancel := context.WithTimeout(ctx, apiTimeout)
		defer cancel()
		s, err := r.conn.js.Stream(ctx, r.conn.ns.EventStream())
		if err != nil {
			return time.Time{}, fmt.Errorf("asking for the event stream's settings: %w", err)
		}
		r.settings.asked, r.settings.from = now, keeping(s.CachedInfo().Config)
	}
	return r.settings.from(now), nil
}

func keeping(c jetstream.StreamConfig) func(now time.Time) time.Time {
	switch {
	case c.MaxMsgs > 0 || c.MaxBytes > 0 || c.MaxMsgsPerSubject > 0:
		return func(now time.Time) time.Time { return now.Add(ageMargin) } // nothing is taken for lost
	case c.MaxAge <= 0:
		return func(time.Time) time.Time { return time.Time{} }
	default:
		return func(now time.Time) time.Time { return now.Add(min(ageMargin, c.MaxAge/2) - c.MaxAge) }
	}
}

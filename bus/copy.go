package bus

import (
	"context"
	"errors"
	"fmt"
	"strconv"

	"github.com/nats-io/nats.go"

	"reveille/claims"
)

// end is where a session's copy in the stream ends.
type end struct {
	stream uint64 // the subject's last stream sequence; 0: it is empty
	seq    int64  // the Rv-Seq there; where it is empty, what is not to be there
}

// getter is one of Conn's ways to read a message of a stream.
type getter func(ctx context.Context, stream string, req getRequest) (Raw, error)

// copyTries bounds the attempts for one event before its session backs off. R3
// refuses a lone writer's event spuriously about once in 850.
const copyTries = 4

// errMoved: the stream ends before where it did. It was rewound or recreated.
var errMoved = errors.New("the stream has moved back")

// relay is one pass over a session: what the database has and the stream has
// not, in order, one event in flight at a time (I25).
func (r *Relay) relay(ctx context.Context, session claims.SessionID) error {
	at, known := r.lastEnd(session)
	for moves := 0; ; {
		before := known // at was known before the database is read
		mark, records, err := r.log.Unrelayed(ctx, session, relayPage)
		if err != nil {
			return fmt.Errorf("reading events of session %s: %w", session, err)
		}
		if len(records) == 0 {
			return nil
		}
		if !known {
			if at, err = r.readEnd(ctx, session, 0, r.conn.directGet); err != nil {
				return err
			}
			known = true
		}
		head, full := records[len(records)-1].Seq, len(records) >= relayPage
		if at.seq > head && !full {
			if before {
				r.forget(session)
				return fmt.Errorf("session %s: event %d is in the stream, the database's last is %d: %w", session, at.seq, head, ErrAhead)
			}
			continue // others relayed what came after this read
		}
		if at.seq < mark {
			var published int64
			at, err = r.mend(ctx, session, mark, false, &published)
		}
		if err == nil {
			at, err = r.copy(ctx, at, records)
		}
		if errors.Is(err, errMoved) && moves < copyTries {
			moves++
			continue
		}
		if err != nil {
			r.forget(session)
			return err
		}
		r.remember(session, at)
		r.marked(session, min(at.seq, head))
		if !full {
			return nil
		}
		if err := r.note(ctx, always); err != nil { // else the next page would be this one
			return err
		}
	}
}

// copy publishes those of records that follow the stream's end, and returns
// the new end. Errors: errMoved, with the end to go on from; or "try later".
func (r *Relay) copy(ctx context.Context, at end, records []claims.Record) (end, error) {
	for _, rec := range records {
		if rec.Seq <= at.seq {
			continue // it is there: a relay before, or one beside this one
		}
		if rec.Seq != at.seq+1 {
			return at, fmt.Errorf("session %s: event %d follows %d in the database", rec.Session, rec.Seq, at.seq)
		}
		if err := r.copyForAlerts(ctx, rec); err != nil {
			return at, err
		}
		var err error
		if at, err = r.put(ctx, at, rec); err != nil {
			return at, err
		}
	}
	return at, nil
}

// put brings one event, which follows the stream's end, into the stream.
// Whatever the answer was, short of a plain success, is not believed: what the
// stream ends with then decides. A duplicate is none either, since anybody can
// use a message id.
func (r *Relay) put(ctx context.Context, at end, rec claims.Record) (end, error) {
	empty := int64(0) // the stream had something and has nothing: it has moved
	if at.stream == 0 {
		empty = at.seq
	}
	for try := 1; ; try++ {
		ack, err := r.publish(ctx, r.message(rec, at.stream))
		if err == nil && !ack.Duplicate {
			r.relayed.Inc()
			return end{ack.Sequence, rec.Seq}, nil
		}
		if ctx.Err() != nil {
			return at, ctx.Err()
		}
		now, readErr := r.readEnd(ctx, rec.Session, empty, r.conn.leaderGet)
		switch {
		case readErr != nil:
			return at, errors.Join(err, readErr)
		case now.seq >= rec.Seq:
			return now, nil
		case now.seq < rec.Seq-1:
			return now, fmt.Errorf("session %s: event %d is the stream's last, it was %d: %w", rec.Session, now.seq, at.seq, errMoved)
		case try >= copyTries:
			return at, fmt.Errorf("publishing event %d of session %s: %w", rec.Seq, rec.Session, orDuplicate(err))
		}
		at = now
	}
}

func orDuplicate(err error) error {
	if err == nil {
		return errors.New("its message id was used by somebody else")
	}
	return err
}

// readEnd reads where the session's copy ends. With directGet a replica that
// lags may say too early an end, which the expected sequence of the next
// publish finds; then the leader is asked. Where the stream has nothing of the
// session, empty is what the end says.
func (r *Relay) readEnd(ctx context.Context, session claims.SessionID, empty int64, get getter) (end, error) {
	last := getRequest{LastBy: r.conn.ns.Event(session)}
	m, err := get(ctx, r.conn.ns.EventStream(), last)
	if errors.Is(err, nats.ErrNoResponders) { // a stream made by hand, without direct gets
		m, err = r.conn.leaderGet(ctx, r.conn.ns.EventStream(), last)
	}
	switch {
	case errors.Is(err, errNoMessage):
		return end{0, empty}, nil
	case err != nil:
		return end{}, fmt.Errorf("reading the last event of session %s: %w", session, err)
	}
	seq, err := strconv.ParseInt(m.Header.Get(HeaderSeq), 10, 64)
	if err != nil {
		return end{}, fmt.Errorf("last event of session %s, stream sequence %d, has no %s: somebody else published it", session, m.Sequence, HeaderSeq)
	}
	return end{m.Sequence, seq}, nil
}

// eventMessage is an event as it is published, without a condition.
func eventMessage(subject string, rec claims.Record) *nats.Msg {
	seq := strconv.FormatInt(rec.Seq, 10)
	h := nats.Header{}
	h.Set(nats.MsgIdHdr, string(rec.Session)+":"+seq)
	h.Set(HeaderSeq, seq)
	h.Set(HeaderEpoch, strconv.FormatInt(rec.Epoch, 10))
	h.Set(HeaderType, string(rec.Type))
	if rec.Trace != "" {
		h.Set(HeaderTraceparent, rec.Trace)
	}
	return &nats.Msg{Subject: subject, Header: h, Data: rec.Line}
}

// message is an event that is stored only where the subject's last stream
// sequence is as expected.
func (r *Relay) message(rec claims.Record, last uint64) *nats.Msg {
	m := eventMessage(r.conn.ns.Event(rec.Session), rec)
	m.Header.Set(nats.ExpectedLastSubjSeqHdr, strconv.FormatUint(last, 10))
	return m
}

// copyForAlerts publishes the copy of a quarantine or release, before the
// event itself: a crash between may repeat the copy and never lacks it.
func (r *Relay) copyForAlerts(ctx context.Context, rec claims.Record) error {
	if rec.Type != claims.SessionQuarantined && rec.Type != claims.SessionReleased {
		return nil
	}
	if _, err := r.publish(ctx, eventMessage(r.conn.ns.Quarantine(rec.Session), rec)); err != nil {
		return fmt.Errorf("publishing the copy of event %d of session %s: %w", rec.Seq, rec.Session, err)
	}
	return nil
}

func (r *Relay) lastEnd(session claims.SessionID) (end, bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.ends.get(session)
}

func (r *Relay) remember(session claims.SessionID, at end) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.ends.put(session, at)
}

func (r *Relay) forget(session claims.SessionID) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.ends.delete(session)
}

// recent remembers about the last most keys that were used, in two
// generations: when the younger has half of them, the older is forgotten.
type recent[K comparable, V any] struct {
	most       int
	young, old map[K]V
}

func (c *recent[K, V]) get(k K) (V, bool) {
	if v, ok := c.young[k]; ok {
		return v, true
	}
	v, ok := c.old[k]
	if ok {
		c.put(k, v)
	}
	return v, ok
}

func (c *recent[K, V]) put(k K, v V) {
	if c.young == nil || len(c.young) >= max(c.most/2, 1) {
		c.old, c.young = c.young, make(map[K]V)
	}
	c.young[k] = v
}

func (c *recent[K, V]) delete(k K) {
	delete(c.young, k)
	delete(c.old, k)
}

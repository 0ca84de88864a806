package bus

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"sync/atomic"
	"time"
	"unicode/utf8"

	"github.com/nats-io/nats.go"

	"reveille/claims"
)

// notice is the wire form of a claims.Notice, field by field.
type notice struct {
	Holder    claims.HolderID    `json:"holder"`
	Session   claims.SessionID   `json:"session"`
	Execution claims.ExecutionID `json:"execution"`
	Phase     claims.Phase       `json:"phase"`
	Revoked   claims.Cause       `json:"revoked"`
	Since     time.Time          `json:"since"`
}

// PublishNotice tells a holder to look at one of its claims now. It is core
// NATS: nil means it was handed to the connection, not that anybody heard it.
// The heartbeat's read finds what a lost notice would have told.
func PublishNotice(c *Conn, n claims.Notice) error {
	body, err := claims.Marshal(notice(n))
	if err != nil {
		return err
	}
	return c.nc.Publish(c.ns.Notice(n.Holder), body)
}

// SubscribeNotices calls fn for each notice to this holder, one after the
// other, until stop is called. fn must not block for long. A notice is a hint:
// it may be lost, old, or come twice.
func SubscribeNotices(c *Conn, holder claims.HolderID, fn func(claims.Notice)) (stop func(), err error) {
	sub, err := c.nc.Subscribe(c.ns.Notice(holder), func(m *nats.Msg) {
		var n notice
		if err := json.Unmarshal(m.Data, &n); err != nil || n.Holder != holder {
			c.log.Warn("notice does not decode, passing over it", "subject", m.Subject, "error", err)
			return
		}
		fn(claims.Notice(n))
	})
	if err != nil {
		return nil, fmt.Errorf("subscribing to notices of %s: %w", holder, err)
	}
	return func() {
		if err := sub.Unsubscribe(); err != nil && !c.nc.IsClosed() {
			c.log.Warn("unsubscribing from notices", "holder", holder, "error", err)
		}
	}, nil
}

// LiveText is a piece of a step's text as it comes. It is ephemeral: the
// durable text is in the events.
type LiveText struct {
	Session claims.SessionID `json:"session"`
	Epoch   int64            `json:"epoch"`
	Step    claims.StepID    `json:"step"`
	Text    string           `json:"text"`
}

const (
	// liveQueue bounds the pieces that wait for the connection.
	liveQueue = 1024
	// liveBytes bounds their text.
	liveBytes = 8 << 20
	// liveOverhead is what a piece has around its text, generously.
	liveOverhead = 1024
	// maxEscape is what one byte of text may become in JSON: \u0000.
	maxEscape = 6
	// liveMost keeps one piece far below what a listener would want to wait for.
	liveMost = 64 << 10
	// listenMost bounds the text that waits for a listener, in bytes.
	listenMost = 8 << 20
)

// Live publishes live text. It never blocks its caller: what the connection
// does not take in time is dropped.
type Live struct {
	conn    *Conn
	queue   chan LiveText
	queued  atomic.Int64 // bytes of text in queue
	dropped atomic.Int64
	state   stateLog
}

// NewLive makes a publisher of live text; Run it.
func NewLive(c *Conn) *Live {
	return &Live{conn: c, queue: make(chan LiveText, liveQueue), state: stateLog{log: c.log, quiet: 10 * time.Second}}
}

// PublishLive publishes a piece of text, or drops it. It never blocks.
func (l *Live) PublishLive(session claims.SessionID, epoch int64, step claims.StepID, text string) {
	if l.queued.Add(int64(len(text))) > liveBytes {
		l.queued.Add(-int64(len(text)))
		l.drop(session)
		return
	}
	select {
	case l.queue <- LiveText{session, epoch, step, text}:
	default:
		l.queued.Add(-int64(len(text)))
		l.drop(session)
	}
}

// Dropped is how many pieces were dropped so far.
func (l *Live) Dropped() int64 { return l.dropped.Load() }

func (l *Live) drop(session claims.SessionID) {
	l.dropped.Add(1)
	l.state.fail("live text is dropped, NATS does not take it", "session", session)
}

// Run publishes until ctx ends; what is queued then is dropped.
func (l *Live) Run(ctx context.Context) error {
	for {
		select {
		case <-ctx.Done():
			return ctx.Err()
		case t := <-l.queue:
			l.queued.Add(-int64(len(t.Text)))
			l.publish(t)
		}
	}
}

func (l *Live) publish(t LiveText) {
	nc := l.conn.nc
	if !nc.IsConnected() { // it would be kept and come out late, out of any use
		l.drop(t.Session)
		return
	}
	most := min(liveMost, max(int(nc.MaxPayload())-liveOverhead, maxEscape*utf8.UTFMax)/maxEscape)
	subject := l.conn.ns.LiveSubject(t.Session)
	for _, piece := range split(t.Text, most) {
		t.Text = piece
		body, err := claims.Marshal(t)
		if err == nil {
			err = nc.Publish(subject, body)
		}
		if err != nil {
			l.drop(t.Session)
			return
		}
	}
	l.state.ok("live text is published again", "dropped", l.dropped.Load())
}

// split cuts text into pieces of at most most bytes, utf8.UTFMax or more, at
// runes' boundaries where it is UTF-8.
func split(text string, most int) []string {
	var out []string
	for len(text) > most {
		end := most
		for end > 0 && end > most-utf8.UTFMax && !utf8.RuneStart(text[end]) {
			end--
		}
		if end == 0 {
			end = most
		}
		out = append(out, text[:end])
		text = text[end:]
	}
	return append(out, text)
}

// SubscribeLive calls fn with the live text of a session, or of all where it is
// empty, until stop is called. A listener that is too slow loses text.
func SubscribeLive(c *Conn, session claims.SessionID, fn func(LiveText)) (stop func(), err error) {
	sub, err := subscribeLive(c, session, fn)
	if err != nil {
		return nil, fmt.Errorf("subscribing to live text: %w", err)
	}
	return func() {
		if err := sub.Unsubscribe(); err != nil && !c.nc.IsClosed() {
			c.log.Warn("unsubscribing from live text", "error", err)
		}
	}, nil
}

func subscribeLive(c *Conn, session claims.SessionID, fn func(LiveText)) (*nats.Subscription, error) {
	sub, err := c.nc.Subscribe(c.ns.LiveSubject(cmp.Or(session, "*")), func(m *nats.Msg) {
		var t LiveText
		if err := json.Unmarshal(m.Data, &t); err == nil {
			fn(t)
		}
	})
	if err != nil {
		return nil, err
	}
	if err := sub.SetPendingLimits(nats.DefaultSubPendingMsgsLimit, listenMost); err != nil {
		return nil, errors.Join(err, sub.Unsubscribe())
	}
	return sub, nil
}

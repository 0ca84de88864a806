package bus

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"strconv"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"reveille/claims"
)

// place is where a message stands in its stream.
type place struct {
	seq  uint64
	time int64 // ns, the stream's own stamp
}

func (m Raw) place() place { return place{m.Sequence, m.Time.UnixNano()} }

// before reports whether a message is earlier in both, which it is of any two
// messages of one stream whose clocks agree. Where they don't (a stream that
// was recreated or rewound, a follower that lags behind that), neither is
// before the other.
func (p place) before(q place) bool { return p.seq < q.seq && p.time < q.time }

// errLetGo: the message in hand is not the session's next as far as the
// stream's leader knows. It is neither applied nor acknowledged (I18).
var errLetGo = errors.New("the stream does not have this message next")

// errNoMessage: the stream has no such message.
var errNoMessage = errors.New("no message")

// source is the command stream, as the order of I18 needs it.
type source interface {
	// Oldest returns the session's oldest message from a sequence on, as any
	// replica knows it: it may be behind.
	Oldest(ctx context.Context, session claims.SessionID, from uint64) (Raw, error)
	// LeaderOldest asks the stream's leader.
	LeaderOldest(ctx context.Context, session claims.SessionID, from uint64) (Raw, error)
	// LeaderAt asks the stream's leader for the message at a sequence.
	LeaderAt(ctx context.Context, seq uint64) (Raw, error)
}

// next returns the message of hand's session that comes next from a sequence
// on: hand itself, or one before it. errLetGo: the stream has another one there.
func next(ctx context.Context, src source, session claims.SessionID, hand place, from uint64) (Raw, error) {
	m, err := src.Oldest(ctx, session, from)
	if err == nil && (m.place() == hand || m.place().before(hand)) {
		return m, nil
	}
	m, err = src.LeaderOldest(ctx, session, from)
	switch {
	case errors.Is(err, errNoMessage): // hand was acknowledged, or its stream is gone
		return Raw{}, errLetGo
	case err != nil:
		return Raw{}, fmt.Errorf("asking for the oldest command of session %s: %w", session, err)
	case m.place() == hand || m.place().before(hand):
		return m, nil
	default:
		return Raw{}, errLetGo
	}
}

// confirm asks the leader whether it still holds exactly this message.
func confirm(ctx context.Context, src source, m Raw) error {
	held, err := src.LeaderAt(ctx, m.Sequence)
	switch {
	case errors.Is(err, errNoMessage):
		return errLetGo
	case err != nil:
		return fmt.Errorf("confirming command %d: %w", m.Sequence, err)
	case held.place() != m.place() || held.Subject != m.Subject:
		return errLetGo
	default:
		return nil
	}
}

// commandStream reads the command stream. nats.go asks the leader only where
// the stream does not allow direct gets, so the requests are made here
// (NATS ADR-31 and the API's STREAM.MSG.GET).
type commandStream struct{ conn *Conn }

type getRequest struct {
	Seq    uint64 `json:"seq,omitempty"`
	NextBy string `json:"next_by_subj,omitempty"`
	LastBy string `json:"last_by_subj,omitempty"`
}

func (s commandStream) Oldest(ctx context.Context, session claims.SessionID, from uint64) (Raw, error) {
	return s.conn.directGet(ctx, s.conn.ns.CommandStream(), getRequest{Seq: from, NextBy: s.conn.ns.AnyCommand(session)})
}

func (s commandStream) LeaderOldest(ctx context.Context, session claims.SessionID, from uint64) (Raw, error) {
	return s.conn.leaderGet(ctx, s.conn.ns.CommandStream(), getRequest{Seq: from, NextBy: s.conn.ns.AnyCommand(session)})
}

func (s commandStream) LeaderAt(ctx context.Context, seq uint64) (Raw, error) {
	return s.conn.leaderGet(ctx, s.conn.ns.CommandStream(), getRequest{Seq: seq})
}

func (c *Conn) request(ctx context.Context, subject string, body any) (*nats.Msg, error) {
	data, err := json.Marshal(body)
	if err != nil {
		return nil, err
	}
	ctx, cancel := context.WithTimeout(ctx, attemptTimeout)
	defer cancel()
	return c.nc.RequestWithContext(ctx, subject, data)
}

// directGet reads a message from whichever replica answers; it may lag.
func (c *Conn) directGet(ctx context.Context, stream string, req getRequest) (Raw, error) {
	m, err := c.request(ctx, apiPrefix+"DIRECT.GET."+stream, req)
	if err != nil {
		return Raw{}, err
	}
	h := m.Header
	if code := h.Get("Status"); code != "" && h.Get(jetstream.SequenceHeader) == "" {
		if code == "404" {
			return Raw{}, errNoMessage
		}
		return Raw{}, fmt.Errorf("direct get: status %s %s", code, h.Get("Description"))
	}
	r := Raw{Subject: h.Get(jetstream.SubjectHeader), Header: h, Data: m.Data}
	if r.Sequence, err = strconv.ParseUint(h.Get(jetstream.SequenceHeader), 10, 64); err != nil {
		return Raw{}, fmt.Errorf("direct get: %w", err)
	}
	if r.Time, err = time.Parse(time.RFC3339Nano, h.Get(jetstream.TimeStampHeaer)); err != nil {
		return Raw{}, fmt.Errorf("direct get: %w", err)
	}
	return r, nil
}

// leaderGet reads a message from the stream's leader.
func (c *Conn) leaderGet(ctx context.Context, stream string, req getRequest) (Raw, error) {
	m, err := c.request(ctx, apiPrefix+"STREAM.MSG.GET."+stream, req)
	if err != nil {
		return Raw{}, err
	}
	var resp struct {
		Error   *jetstream.APIError `json:"error"`
		Message *struct {
			Subject  string    `json:"subject"`
			Sequence uint64    `json:"seq"`
			Header   []byte    `json:"hdrs"`
			Data     []byte    `json:"data"`
			Time     time.Time `json:"time"`
		} `json:"message"`
	}
	if err := json.Unmarshal(m.Data, &resp); err != nil {
		return Raw{}, fmt.Errorf("get: %w", err)
	}
	switch {
	case resp.Error != nil && resp.Error.ErrorCode == jetstream.JSErrCodeMessageNotFound:
		return Raw{}, errNoMessage
	case resp.Error != nil:
		if errors.Is(resp.Error, jetstream.ErrStreamNotFound) {
			c.missed()
		}
		return Raw{}, fmt.Errorf("get: %w", resp.Error)
	case resp.Message == nil:
		return Raw{}, errors.New("get: answer without a message")
	}
	r := Raw{Subject: resp.Message.Subject, Data: resp.Message.Data, Sequence: resp.Message.Sequence, Time: resp.Message.Time}
	if len(resp.Message.Header) > 0 {
		if r.Header, err = nats.DecodeHeadersMsg(resp.Message.Header); err != nil {
			return Raw{}, fmt.Errorf("get: %w", err)
		}
	}
	return r, nil
}

package permissionstest

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"reveille/claims"
)

// applier is a database that makes the intake use everything it may ask of NATS.
type applier struct {
	applied chan claims.Command
	notice  claims.Notice

	mu    sync.Mutex
	calls map[string]int
}

func newApplier(notice claims.Notice) *applier {
	return &applier{applied: make(chan claims.Command, 100), notice: notice, calls: map[string]int{}}
}

var errLater = errors.New("try later")

// Apply fails once in each of the ways that the intake knows an answer to.
func (a *applier) Apply(_ context.Context, cmd claims.Command, _ bool) (claims.Outcome, error) {
	a.mu.Lock()
	defer a.mu.Unlock()
	key := fmt.Sprint(cmd.Session, " ", cmd.Sequence)
	a.calls[key]++
	switch {
	case cmd.Session == "conflict":
		return claims.Outcome{}, claims.ErrInputConflict
	case cmd.Session == "later" && a.calls[key] == 1: // it is given back
		return claims.Outcome{}, errLater
	case cmd.Session == "unconfirmed" && !cmd.Confirmed: // the leader is asked
		return claims.Outcome{}, claims.ErrUnconfirmed
	}
	a.applied <- cmd
	out := claims.Outcome{Result: claims.Applied, Ready: cmd.Kind == claims.Wake}
	if cmd.Kind == claims.Interrupt {
		out.Notice = &a.notice
	}
	return out, nil
}

func (a *applier) PassOver(context.Context, claims.Command) error { return nil }

// slots are two places of a worker. It refuses the first session, which then is
// announced again.
type slots struct {
	changed chan struct{}
	started chan claims.SessionID

	mu      sync.Mutex
	free    int
	refused bool
}

func newSlots() *slots {
	return &slots{changed: make(chan struct{}, 1), started: make(chan claims.SessionID, 100), free: 100}
}

func (s *slots) Free() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.free
}

func (s *slots) Changed() <-chan struct{} { return s.changed }

func (s *slots) Start(_ context.Context, session claims.SessionID) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if !s.refused {
		s.refused = true
		return false
	}
	s.free--
	s.started <- session
	return true
}

// eventLog is the log of events of a database.
type eventLog struct {
	mu      sync.Mutex
	events  map[claims.SessionID][]claims.Record
	relayed map[claims.SessionID]int64
}

func newEventLog() *eventLog {
	return &eventLog{events: map[claims.SessionID][]claims.Record{}, relayed: map[claims.SessionID]int64{}}
}

// add appends an event of each type to a session.
func (l *eventLog) add(session claims.SessionID, types ...claims.EventType) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, typ := range types {
		e := claims.Event{
			Session: session, Seq: int64(len(l.events[session]) + 1), Type: typ, Time: claims.Stamp(time.Now()), Epoch: 1, Data: []byte(`{}`),
		}
		line, err := claims.Marshal(e)
		if err != nil {
			panic(err) // an event of this test's own
		}
		l.events[session] = append(l.events[session], claims.Record{Event: e, Line: line})
	}
}

// noted says that all events of a session are in the stream, whether they are or not.
func (l *eventLog) noted(session claims.SessionID) []claims.Mark {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.relayed[session] = int64(len(l.events[session]))
	return []claims.Mark{{Session: session, Seq: l.relayed[session]}}
}

// forget says that none is.
func (l *eventLog) forget(session claims.SessionID) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.relayed[session] = 0
}

func (l *eventLog) Unrelayed(_ context.Context, session claims.SessionID, limit int) (int64, []claims.Record, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	mark := l.relayed[session]
	rest := l.events[session][mark:]
	return mark, rest[:min(len(rest), limit)], nil
}

func (l *eventLog) NoteRelayed(_ context.Context, marks []claims.Mark) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, m := range marks {
		l.relayed[m.Session] = max(l.relayed[m.Session], m.Seq)
	}
	return nil
}

// Replay makes it a bus.Replayer.
func (l *eventLog) Replay(_ context.Context, session claims.SessionID, after int64, limit int) ([]claims.Record, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	rest := l.events[session][after:]
	return rest[:min(len(rest), limit)], nil
}

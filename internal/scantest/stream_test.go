package scantest

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"log/slog"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/nats-io/nats-server/v2/server"
	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	rvbus "reveille/bus"
	"reveille/claims"
	"reveille/recovery"
)

// The relay is all that a scanner needs of a stream.
var (
	_ recovery.Relayer   = (*rvbus.Relay)(nil)
	_ recovery.Mender    = (*rvbus.Relay)(nil)
	_ recovery.Announcer = (*rvbus.Announcer)(nil)
)

// connect connects to a NATS server of the test's own.
func (e *env) connect() *rvbus.Conn {
	e.Helper()
	s, err := server.NewServer(&server.Options{Host: "127.0.0.1", Port: server.RANDOM_PORT, JetStream: true, StoreDir: e.TempDir(), NoSigs: true, NoLog: true})
	if err != nil {
		e.Fatal(err)
	}
	s.Start()
	e.Cleanup(func() { s.Shutdown(); s.WaitForShutdown() })
	if !s.ReadyForConnections(patience) {
		e.Fatal("the NATS server does not take connections")
	}
	c, err := rvbus.Connect(e.Context(), rvbus.Options{URL: s.ClientURL(), Name: e.Name()})
	if err != nil {
		e.Fatal(err)
	}
	e.Cleanup(c.Close)
	if _, err := c.Ensure(e.Context(), rvbus.StreamOptions{}); err != nil {
		e.Fatal(err)
	}
	return c
}

// goes runs something until the end of the test, or stop.
func (e *env) goes(run func(context.Context) error) (stop func()) {
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan struct{})
	go func() {
		defer close(done)
		_ = run(ctx) // ends with ctx
	}()
	stop = func() { cancel(); <-done }
	e.Cleanup(stop)
	return stop
}

// log is a session's log in the database, an event a line.
func (e *env) log(session claims.SessionID) []string {
	e.Helper()
	records, err := e.store.Tail(e.Context(), session, 1000)
	if err != nil {
		e.Fatal(err)
	}
	var out []string
	for _, r := range records {
		out = append(out, string(r.Line))
	}
	return out
}

// streamed is all of the event stream, by session; nil where there is none.
func (e *env) streamed(c *rvbus.Conn) map[claims.SessionID][]string {
	e.Helper()
	stream, err := c.JetStream().Stream(e.Context(), "RV_EVENTS")
	if err != nil {
		return nil
	}
	state := stream.CachedInfo().State
	out := map[claims.SessionID][]string{}
	for seq := state.FirstSeq; seq <= state.LastSeq && state.Msgs > 0; seq++ {
		m, err := stream.GetMsg(e.Context(), seq)
		if err != nil {
			return nil
		}
		session := claims.SessionID(strings.TrimPrefix(m.Subject, "rv.event."))
		out[session] = append(out[session], string(m.Data))
	}
	return out
}

// remake makes the event stream anew, with the first events of some sessions:
// what a server has that lost the rest.
func (e *env) remake(c *rvbus.Conn, sessions []claims.SessionID, kept func(i int) int) {
	e.Helper()
	if err := c.JetStream().DeleteStream(e.Context(), "RV_EVENTS"); err != nil {
		e.Fatal(err)
	}
	if _, err := c.Ensure(e.Context(), rvbus.StreamOptions{}); err != nil {
		e.Fatal(err)
	}
	for i, session := range sessions {
		for seq, line := range e.log(session)[:kept(i)] {
			m := &nats.Msg{Subject: "rv.event." + string(session), Data: []byte(line), Header: nats.Header{"Rv-Seq": {fmt.Sprint(seq + 1)}}}
			if _, err := c.JetStream().PublishMsg(e.Context(), m, jetstream.WithRetryAttempts(0)); err != nil {
				e.Fatal(err)
			}
		}
	}
}

// TestI25_ScannerMendsTheStream: the stream's server lost the last events of some
// sessions and all of others. Nobody does anything with any of them; the scanner
// alone makes the stream the copy of the database again, beside another that does
// the same, and with a session that gets events meanwhile.
func TestI25_ScannerMendsTheStream(t *testing.T) {
	e := newEnv(t)
	const n, inputs = 25, 8
	var sessions []claims.SessionID
	for i := range n {
		session := claims.SessionID(fmt.Sprintf("s%02d", i))
		sessions = append(sessions, session)
		for k := range inputs {
			e.admit(session, fmt.Sprint("in", k))
		}
	}
	c := e.connect()
	relay := rvbus.NewRelay(c, e.store, rvbus.RelayOptions{})
	stop := e.goes(relay.Run)
	for _, session := range sessions {
		relay.Poke(session)
	}
	if err := relay.Flush(e.Context()); err != nil {
		t.Fatal(err)
	}
	stop() // the workers are gone
	e.same(c, sessions)

	e.remake(c, sessions, func(i int) int { return i % (inputs + 1) })
	var log logged
	for range 2 {
		relay := rvbus.NewRelay(c, e.store, rvbus.RelayOptions{})
		e.goes(relay.Run)
		p := e.parts()
		p.Relayer, p.Copies = relay, relay
		s, err := recovery.New(p, recovery.Options{
			Batch: 10, Every: 10 * time.Millisecond, Reannounce: 10 * time.Millisecond, Logger: slog.New(slog.NewTextHandler(&log, nil)),
		})
		if err != nil {
			t.Fatal(err)
		}
		e.goes(s.Run)
	}
	for k := range inputs { // one session is at work
		e.admit("busy", fmt.Sprint("in", k))
	}
	sessions = append(sessions, "busy")
	whole := func() bool {
		got := e.streamed(c)
		for _, session := range sessions {
			if len(got[session]) < inputs {
				return false
			}
		}
		return true
	}
	e.eventually("the stream is the copy of the database", whole)
	e.same(c, sessions)
	if err := c.JetStream().DeleteStream(t.Context(), "RV_EVENTS"); err != nil { // nobody makes it anew but a scanner
		t.Fatal(err)
	}
	e.eventually("the stream is there again, and the copy of the database", whole)
	e.same(c, sessions)
	if !strings.Contains(log.String(), "the stream had lost events") {
		t.Errorf("nothing is said of it:\n%s", log.String())
	}
}

// same compares the stream with the database, event for event.
func (e *env) same(c *rvbus.Conn, sessions []claims.SessionID) {
	e.Helper()
	got := e.streamed(c)
	if len(got) != len(sessions) {
		e.Errorf("%d sessions are on the stream, want %d", len(got), len(sessions))
	}
	for _, session := range sessions {
		if want := e.log(session); strings.Join(got[session], "\n") != strings.Join(want, "\n") {
			e.Errorf("session %s\nstream\n%s\ndatabase\n%s", session, strings.Join(got[session], "\n"), strings.Join(want, "\n"))
		}
	}
}

func (e *env) admit(session claims.SessionID, input string) {
	e.Helper()
	cmd := e.command(claims.Admit, session)
	cmd.Input = &claims.Input{ID: input, Delivery: claims.Queue, Body: json.RawMessage(`"x"`)}
	if _, err := e.store.Apply(e.Context(), cmd, nil); err != nil {
		e.Fatal(err)
	}
}

// logged is what some scanners say.
type logged struct {
	mu   sync.Mutex
	text bytes.Buffer
}

func (l *logged) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.text.Write(p)
}

func (l *logged) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.text.String()
}

// eventually polls what only asking shows.
func (e *env) eventually(what string, ok func() bool) {
	e.Helper()
	tick := time.NewTicker(20 * time.Millisecond)
	defer tick.Stop()
	for deadline := time.Now().Add(patience); !ok(); <-tick.C {
		if time.Now().After(deadline) {
			e.Fatalf("not within %v: %s", patience, what)
		}
	}
}

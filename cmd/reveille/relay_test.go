package main

import (
	"context"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/nats-io/nats-server/v2/server"
	"github.com/nats-io/nats.go/jetstream"

	"reveille/bus"
	"reveille/claims"
)

// natsServer is a NATS server of the test's own; it returns its URL.
func natsServer(t *testing.T, change ...func(*server.Options)) string {
	t.Helper()
	o := &server.Options{Host: "127.0.0.1", Port: server.RANDOM_PORT, JetStream: true, StoreDir: t.TempDir(), NoSigs: true, NoLog: true}
	for _, f := range change {
		f(o)
	}
	s, err := server.NewServer(o)
	if err != nil {
		t.Fatal(err)
	}
	go s.Start()
	t.Cleanup(func() { s.Shutdown(); s.WaitForShutdown() })
	if !s.ReadyForConnections(20 * time.Second) {
		t.Fatal("the NATS server does not take connections")
	}
	return s.ClientURL()
}

// TestI25Rebuild: the event stream is gone, and is whole again after one command; the command typed again does nothing.
func TestI25Rebuild(t *testing.T) {
	t.Parallel()
	w, url := newWard(t), natsServer(t)
	conn, err := bus.Connect(t.Context(), bus.Options{URL: url, Namespace: bus.DefaultNamespace})
	w.ok(err)
	defer conn.Close()
	const sessions = 30
	for i := range sessions {
		w.quarantine(claims.SessionID(fmt.Sprintf("s%02d", i)))
	}
	_, err = conn.Ensure(t.Context(), bus.StreamOptions{})
	w.ok(err)
	relay := bus.NewRelay(conn, w.store, bus.RelayOptions{})
	ctx, stop := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- relay.Run(ctx) }()
	for i := range sessions {
		relay.Poke(claims.SessionID(fmt.Sprintf("s%02d", i)))
	}
	w.ok(relay.Flush(t.Context()))
	stop()
	<-done
	stdout, _ := w.reveille(0, "relay --rebuild --nats-url "+url)
	if want := fmt.Sprintf("published 0 events of 0 sessions; %d sessions were whole\n", sessions); stdout != want {
		t.Errorf("beside a whole stream: %q, want %q", stdout, want)
	}

	w.ok(conn.JetStream().DeleteStream(t.Context(), "RV_EVENTS"))
	stdout, _ = w.reveille(0, "relay --rebuild --nats-url "+url)
	per, err := w.store.Tail(t.Context(), "s00", 100)
	w.ok(err)
	if want := fmt.Sprintf("published %d events of %d sessions; 0 sessions were whole\n", sessions*len(per), sessions); stdout != want {
		t.Errorf("beside an empty stream: %q, want %q", stdout, want)
	}
	got := map[string][]string{}
	stream, err := conn.JetStream().Stream(t.Context(), "RV_EVENTS")
	w.ok(err)
	consumer, err := stream.OrderedConsumer(t.Context(), jetstream.OrderedConsumerConfig{})
	w.ok(err)
	for range sessions * len(per) {
		m, err := consumer.Next(jetstream.FetchMaxWait(20 * time.Second))
		w.ok(err)
		session := strings.TrimPrefix(m.Subject(), "rv.event.")
		got[session] = append(got[session], string(m.Data()))
	}
	for i := range sessions {
		session := fmt.Sprintf("s%02d", i)
		want, err := w.store.Tail(t.Context(), claims.SessionID(session), 100)
		w.ok(err)
		for k, r := range want {
			if got[session][k] != string(r.Line) {
				t.Fatalf("event %d of %s is %s, want %s", k+1, session, got[session][k], r.Line)
			}
		}
	}
	stdout, _ = w.reveille(0, "relay --rebuild --nats-url "+url)
	if !strings.HasPrefix(stdout, "published 0 events of 0 sessions") {
		t.Errorf("typed again: %q", stdout)
	}
}

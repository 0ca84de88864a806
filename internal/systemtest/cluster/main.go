// Command cluster is what scripts/e2e-cluster.sh can't say in shell: free ports,
// who leads the event stream, a load of sessions, and whether the stream is the
// copy of the database, event for event.
//
//	cluster ports N
//	cluster leader                     its name and the stream's messages, once there is one
//	cluster load FILE                  publishes until the file is there; prints how many inputs
//	cluster compare INPUTS             waits until all is done, then compares
//
// RV_DATABASE_URL and RV_NATS_URL name the servers.
package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"os"
	"strconv"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/nats-io/nats.go/jetstream"

	"reveille/bus"
	"reveille/claims"
)

const (
	// patience bounds a whole command; elections take at most nine seconds.
	patience = 2 * time.Minute
	// sessions is how many the load goes around, an input each pace.
	sessions = 40
	pace     = 40 * time.Millisecond
	replicas = 3
	events   = "RV_EVENTS"
)

func main() {
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	if err := run(ctx, os.Args[1:]); err != nil {
		fmt.Fprintln(os.Stderr, "cluster:", err)
		os.Exit(1)
	}
}

func run(ctx context.Context, args []string) error {
	if len(args) == 0 {
		return errors.New("want ports, leader, load or compare")
	}
	arg := ""
	if len(args) > 1 {
		arg = args[1]
	}
	if args[0] == "ports" {
		return ports(arg)
	}
	conn, err := bus.Connect(ctx, bus.Options{URL: os.Getenv("RV_NATS_URL"), Name: "e2e " + args[0]})
	if err != nil {
		return err
	}
	defer conn.Close()
	switch args[0] {
	case "leader":
		return leader(ctx, conn)
	case "load":
		return load(ctx, conn, arg)
	case "compare":
		inputs, err := strconv.Atoi(arg)
		if err != nil {
			return err
		}
		return compare(ctx, conn, inputs)
	default:
		return fmt.Errorf("no %q: want ports, leader, load or compare", args[0])
	}
}

// ports prints ports that nobody listens on: routes are named before their
// servers start.
func ports(n string) error {
	most, err := strconv.Atoi(n)
	if err != nil {
		return err
	}
	for range most {
		l, err := net.Listen("tcp", "127.0.0.1:0")
		if err != nil {
			return err
		}
		defer l.Close() // all at the end, or one would come twice
		fmt.Println(l.Addr().(*net.TCPAddr).Port)
	}
	return nil
}

// every tries until it succeeds, with the last error where time ends first.
func every(ctx context.Context, try func() error) error {
	tick := time.NewTicker(100 * time.Millisecond)
	defer tick.Stop()
	for {
		err := try()
		if err == nil {
			return nil
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("%w (last: %w)", ctx.Err(), err)
		case <-tick.C:
		}
	}
}

func info(ctx context.Context, conn *bus.Conn) (*jetstream.StreamInfo, error) {
	ctx, cancel := context.WithTimeout(ctx, 2*time.Second)
	defer cancel()
	s, err := conn.JetStream().Stream(ctx, events)
	if err != nil {
		return nil, err
	}
	if s.CachedInfo().Cluster == nil || s.CachedInfo().Cluster.Leader == "" {
		return nil, errors.New("no leader")
	}
	return s.CachedInfo(), nil
}

func leader(ctx context.Context, conn *bus.Conn) error {
	return every(ctx, func() error {
		i, err := info(ctx, conn)
		if err != nil {
			return err
		}
		_, err = fmt.Println(i.Cluster.Leader, i.State.Msgs)
		return err
	})
}

func load(ctx context.Context, conn *bus.Conn, file string) error {
	publisher := bus.NewPublisher(conn)
	tick := time.NewTicker(pace)
	defer tick.Stop()
	for n := 0; ; n++ {
		switch _, err := os.Stat(file); {
		case err == nil:
			_, err = fmt.Println(n)
			return err
		case !errors.Is(err, os.ErrNotExist):
			return err
		}
		in := &claims.Input{ID: fmt.Sprint("in-", n), Delivery: claims.Queue, Body: json.RawMessage(`"x"`)}
		if _, err := publisher.Wake(ctx, claims.SessionID(fmt.Sprint("s", n%sessions)), in, time.Time{}, bus.Publishing{}); err != nil {
			return err
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-tick.C:
		}
	}
}

func compare(ctx context.Context, conn *bus.Conn, inputs int) error {
	db, err := pgx.Connect(ctx, os.Getenv("RV_DATABASE_URL"))
	if err != nil {
		return err
	}
	defer db.Close(context.Background())
	if err := every(ctx, func() error { return idle(ctx, db, inputs) }); err != nil {
		return err
	}
	var want map[string][]string
	if want, err = logged(ctx, db); err != nil {
		return err
	}
	var i *jetstream.StreamInfo
	if err := every(ctx, func() (err error) { i, err = whole(ctx, conn); return err }); err != nil {
		return err
	}
	got, err := streamed(ctx, conn, i.State.Msgs)
	if err != nil {
		return err
	}
	n := 0
	for session, lines := range want {
		n += len(lines)
		for k, line := range lines {
			if k >= len(got[session]) || got[session][k] != line {
				return fmt.Errorf("event %d of session %s is not the stream's: %s", k+1, session, line)
			}
		}
		if len(got[session]) != len(lines) {
			return fmt.Errorf("session %s has %d events in the database, %d on the stream", session, len(lines), len(got[session]))
		}
	}
	if uint64(n) != i.State.Msgs {
		return fmt.Errorf("%d events in the database, %d on the stream", n, i.State.Msgs)
	}
	_, err = fmt.Printf("%d events of %d sessions and %d inputs are the same in the database and on the stream\n", n, len(want), inputs)
	return err
}

// idle: each input was covered by a step, nothing runs or waits, and all events
// are noted as relayed.
func idle(ctx context.Context, db *pgx.Conn, inputs int) error {
	var busy, served int
	err := db.QueryRow(ctx, `SELECT
		(SELECT count(*) FROM sessions WHERE execution_id IS NOT NULL OR armed > 0 OR continuations > 0 OR relayed_seq < last_seq),
		(SELECT count(*) FROM inputs WHERE state = 'covered')`).Scan(&busy, &served)
	switch {
	case err != nil:
		return err
	case busy > 0 || served != inputs:
		return fmt.Errorf("%d of %d inputs are served, %d sessions are busy or not relayed", served, inputs, busy)
	}
	return nil
}

// whole: all replicas of the stream are there and have all of it.
func whole(ctx context.Context, conn *bus.Conn) (*jetstream.StreamInfo, error) {
	i, err := info(ctx, conn)
	if err != nil {
		return nil, err
	}
	current := 1
	for _, r := range i.Cluster.Replicas {
		if r.Current && !r.Offline {
			current++
		}
	}
	if current != replicas {
		return nil, fmt.Errorf("%d of %d replicas of %s are current", current, replicas, events)
	}
	return i, nil
}

func logged(ctx context.Context, db *pgx.Conn) (map[string][]string, error) {
	rows, err := db.Query(ctx, "SELECT session_id, lines FROM events ORDER BY session_id, last_seq")
	if err != nil {
		return nil, err
	}
	out := map[string][]string{}
	var session, lines string
	_, err = pgx.ForEachRow(rows, []any{&session, &lines}, func() error {
		out[session] = append(out[session], strings.Split(lines, "\n")...)
		return nil
	})
	return out, err
}

func streamed(ctx context.Context, conn *bus.Conn, n uint64) (map[string][]string, error) {
	c, err := conn.JetStream().OrderedConsumer(ctx, events, jetstream.OrderedConsumerConfig{})
	if err != nil {
		return nil, err
	}
	messages, err := c.Messages()
	if err != nil {
		return nil, err
	}
	defer messages.Stop()
	out := map[string][]string{}
	for range n {
		m, err := messages.Next(jetstream.NextContext(ctx))
		if err != nil {
			return nil, err
		}
		session := m.Subject()[strings.LastIndexByte(m.Subject(), '.')+1:]
		out[session] = append(out[session], string(m.Data()))
	}
	return out, nil
}

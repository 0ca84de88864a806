package main

import (
	"cmp"
	"context"
	"crypto/tls"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/url"
	"strconv"
	"strings"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"reveille/bus"
	"reveille/claims"
	"reveille/claims/crdb"
	"reveille/cmd/internal/flags"
)

// check says what is missing before anything is asked of a server.
func (d *databaseFlags) check() error {
	if d.DatabaseURL == "" {
		return flags.Usage("no database is named: start reveille dev in this folder, or give --database-url or RV_DATABASE_URL")
	}
	if err := crdb.CheckURL(d.DatabaseURL); err != nil {
		return flags.Usage("--database-url: %v", err)
	}
	return nil
}

// open connects to the database and checks its schema.
func (d *databaseFlags) open(ctx context.Context, s streams) (*crdb.Store, error) {
	if err := d.check(); err != nil {
		return nil, err
	}
	store, err := crdb.Open(ctx, d.DatabaseURL, crdb.Options{Timeout: d.Timeout, MaxConns: 2, AppName: "reveille"})
	if err != nil {
		return nil, d.unreachable(s, err)
	}
	if err := store.CheckSchema(ctx); err != nil {
		store.Close()
		return nil, err
	}
	return store, nil
}

// unreachable says what to do where the database does not answer.
func (d *databaseFlags) unreachable(s streams, err error) error {
	if !crdb.Unavailable(err) {
		return err
	}
	at := "the database"
	if u, parseErr := url.Parse(d.DatabaseURL); parseErr == nil {
		at = "the database at " + u.Host
	}
	var network *net.OpError
	if errors.As(err, &network) { // pgx tells it once for each address
		err = network
	}
	return fmt.Errorf("%s%s does not answer: start it (or reveille dev), or name another with --database-url (%w)", at, s.servers.Named("database-url"), err)
}

// connect connects to NATS, within the timeout.
func (n *natsFlags) connect(ctx context.Context, s streams) (*bus.Conn, error) {
	ns, err := bus.ParseNamespace(n.Namespace)
	if err != nil {
		return nil, flags.Usage("--namespace: %v", err)
	}
	if err := bus.CheckURL(n.NATSURL); err != nil {
		return nil, flags.Usage("--nats-url: %v", err)
	}
	// Until it is connected, what goes wrong is in the error and not in a log.
	level := &slog.LevelVar{}
	level.Set(slog.LevelError + 1)
	log := slog.New(&sayer{streams: s, level: level})
	bounded, cancel := context.WithTimeout(ctx, n.Timeout)
	defer cancel()
	conn, err := bus.Connect(bounded, bus.Options{URL: n.NATSURL, Creds: n.NATSCreds, CA: n.NATSCA, Name: "reveille", Namespace: ns, Logger: log})
	switch {
	case err == nil:
		level.Set(slog.LevelWarn)
		return conn, nil
	case ctx.Err() != nil:
		return nil, stopped()
	case errors.Is(err, nats.ErrAuthorization):
		return nil, fmt.Errorf("NATS at %s%s does not let this user in: give its name and password in --nats-url, or --nats-creds (%w)", redacted(n.NATSURL), s.servers.Named("nats-url"), err)
	case errors.As(err, new(*tls.CertificateVerificationError)):
		return nil, fmt.Errorf("the certificate of NATS at %s%s is not trusted: name its authority with --nats-ca (%w)", redacted(n.NATSURL), s.servers.Named("nats-url"), err)
	case errors.Is(err, context.DeadlineExceeded):
		return nil, fmt.Errorf("no NATS server at %s%s: start one with reveille dev, or name one with --nats-url (%w)", redacted(n.NATSURL), s.servers.Named("nats-url"), err)
	default:
		return nil, err
	}
}

// redacted are servers without their passwords.
func redacted(servers string) string {
	all := strings.Split(servers, ",")
	for i, server := range all {
		u, err := url.Parse(strings.TrimSpace(server))
		if err != nil {
			all[i] = "an address that is none"
			continue
		}
		all[i] = u.Redacted()
	}
	return strings.Join(all, ",")
}

// exitStopped is what shells show for a program that SIGINT ended.
const exitStopped = 130

// stopped is the error of a user who did not want to wait any longer.
func stopped() error { return &flags.Exit{Code: exitStopped} }

// history is what the streams say of a session before anything is asked of it.
type history struct {
	last        int64  // its last sequence
	quarantined string // why it is quarantined; empty: it is not
}

// lookUp reads it. Error: the streams are missing or don't answer.
func (n *natsFlags) lookUp(ctx context.Context, conn *bus.Conn, session claims.SessionID) (history, error) {
	ctx, cancel := context.WithTimeout(ctx, n.Timeout)
	defer cancel()
	ns := conn.Namespace()
	var h history
	m, err := lastMessage(ctx, conn, ns.EventStream(), ns.Event(session))
	if err != nil {
		return h, err
	}
	if m != nil {
		if h.last, err = strconv.ParseInt(m.Header.Get(bus.HeaderSeq), 10, 64); err != nil {
			return h, fmt.Errorf("the last event of session %s has the header %s %q: the stream %s was written to by something else",
				session, bus.HeaderSeq, m.Header.Get(bus.HeaderSeq), ns.EventStream())
		}
	}
	if m, err = lastMessage(ctx, conn, ns.QuarantineStream(), ns.Quarantine(session)); err != nil || m == nil {
		return h, err
	}
	if r, err := claims.ParseRecord(m.Data); err == nil && r.Type == claims.SessionQuarantined {
		h.quarantined = reasonOf(r)
	}
	return h, nil
}

// lastMessage is the last message of a subject, or nil.
func lastMessage(ctx context.Context, conn *bus.Conn, stream, subject string) (*jetstream.RawStreamMsg, error) {
	st, err := conn.JetStream().Stream(ctx, stream)
	if errors.Is(err, jetstream.ErrStreamNotFound) {
		return nil, fmt.Errorf("there is no stream %s: start a worker (or reveille dev), which makes it, or name another --namespace", stream)
	}
	if err != nil {
		return nil, fmt.Errorf("stream %s: %w", stream, err)
	}
	m, err := st.GetLastMsgForSubject(ctx, subject)
	if errors.Is(err, jetstream.ErrMsgNotFound) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("stream %s: %w", stream, err)
	}
	return m, nil
}

// applied reports whether a worker has applied a command: it is not in its stream any more.
func applied(ctx context.Context, conn *bus.Conn, sequence uint64) (bool, error) {
	st, err := conn.JetStream().Stream(ctx, conn.Namespace().CommandStream())
	if err != nil {
		return false, err
	}
	_, err = st.GetMsg(ctx, sequence)
	if errors.Is(err, jetstream.ErrMsgNotFound) {
		return true, nil
	}
	return false, err
}

func reasonOf(r claims.Record) string {
	var d claims.QuarantinedData
	_ = json.Unmarshal(r.Data, &d) // this program's own; what does not decode has no reason
	return cmp.Or(string(d.Reason), "for a reason that is not told")
}

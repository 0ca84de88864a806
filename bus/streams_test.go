package bus

import (
	"context"
	"crypto/tls"
	"errors"
	"net"
	"net/http/httptest"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/nats-io/nats-server/v2/server"
	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
)

func TestEnsureMakesWhatIsMissing(t *testing.T) {
	c, st := startServer(t).connectWith(StreamOptions{})
	if len(st.Findings) > 0 {
		t.Errorf("findings of streams that were just made: %q", st.Findings)
	}
	if !strings.HasPrefix(st.Intake(), "intake-") || len(st.CommandsID) != 32 {
		t.Errorf("durable is %s", st.Intake())
	}
	again, err := c.Ensure(testContext(t), StreamOptions{})
	if err != nil || again.CommandsID != st.CommandsID || again.ReadyID != st.ReadyID || len(again.Findings) > 0 {
		t.Errorf("the second time: %+v, %v", again, err)
	}
	other, err := c.Ensure(testContext(t), StreamOptions{Retention: time.Hour, MaxAckPending: 8})
	if err != nil || len(other.Findings) != 6 { // max_age of three streams, max_ack_pending of three durables
		t.Errorf("with other options: %q, %v", other.Findings, err)
	}
	info, err := streamInfo(testContext(t), c.js, "RV_EVENTS")
	if err != nil || info.Config.MaxAge != DefaultRetention {
		t.Errorf("max_age became %v, %v", info.Config.MaxAge, err)
	}
}

// TestEnsureRaces: many processes start against an empty server.
func TestEnsureRaces(t *testing.T) {
	srv := startServer(t)
	ids := make([]*Streams, 8)
	var wg sync.WaitGroup
	for i := range ids {
		c := srv.connect()
		wg.Go(func() {
			st, err := c.Ensure(testContext(t), StreamOptions{MaxClockSkew: 10 * time.Millisecond})
			if err != nil {
				t.Error(err)
			}
			ids[i] = st
		})
	}
	wg.Wait()
	for _, st := range ids {
		if st == nil || ids[0] == nil || st.CommandsID != ids[0].CommandsID || st.ReadyID != ids[0].ReadyID || len(st.Findings) > 0 {
			t.Fatalf("%+v and %+v", st, ids[0])
		}
	}
}

func TestEnsureLeavesStreamsMadeByHand(t *testing.T) {
	c := startServer(t).connect()
	_, err := c.js.CreateStream(testContext(t), jetstream.StreamConfig{
		Name: "RV_COMMANDS", Subjects: []string{"rv.admit.*", "rv.wake.*", "rv.interrupt.*"}, MaxBytes: 1 << 20, AllowRollup: true,
		Retention: jetstream.WorkQueuePolicy,
	})
	if err != nil {
		t.Fatal(err)
	}
	st, err := c.Ensure(testContext(t), StreamOptions{})
	if err != nil {
		t.Fatal(err)
	}
	found := strings.Join(st.Findings, "\n")
	for _, want := range []string{"allow_rollup_hdrs is true", "max_bytes 1048576", "deny_purge", "allow_direct is false", "duplicate_window", "no reveille-id"} {
		if !strings.Contains(found, want) {
			t.Errorf("no finding of %q in\n%s", want, found)
		}
	}
	again, err := c.Ensure(testContext(t), StreamOptions{})
	if err != nil || again.CommandsID != st.CommandsID || !strings.HasPrefix(st.CommandsID, "t") {
		t.Errorf("id %s, then %+v, %v", st.CommandsID, again, err)
	}
}

// TestI18_CreationWaits: the skew is over before anything can be published
// into a new command stream, by whomever.
func TestI18_CreationWaits(t *testing.T) {
	srv := startServer(t)
	c := srv.connect()
	const skew = 300 * time.Millisecond
	began := time.Now()
	if _, err := c.Ensure(testContext(t), StreamOptions{MaxClockSkew: skew}); err != nil {
		t.Fatal(err)
	}
	info, err := streamInfo(testContext(t), c.js, "RV_COMMANDS")
	if err != nil || info.Created.Sub(began) < skew {
		t.Errorf("created %v after it was missed, %v", info.Created.Sub(began), err)
	}
	began = time.Now()
	ctx, cancel := context.WithTimeout(testContext(t), skew)
	defer cancel()
	if _, err := c.Ensure(ctx, StreamOptions{MaxClockSkew: time.Hour}); err != nil { // it exists: nothing to wait for
		t.Errorf("after %v: %v", time.Since(began), err)
	}
}

func TestOldServerIsRefused(t *testing.T) {
	for version, ok := range map[string]bool{
		"2.12.0": true, "2.15.3": true, "3.0.0": true, "2.12.0-RC.1": true,
		"2.11.9": false, "1.4.1": false, "0.0.0": false, "x": false,
	} {
		if err := checkVersion(version); (err == nil) != ok || err != nil && !errors.Is(err, ErrServerTooOld) {
			t.Errorf("%s: %v", version, err)
		}
	}
	if err := checkVersion(""); err == nil || errors.Is(err, ErrServerTooOld) {
		t.Errorf("not connected: %v", err)
	}
}

// TestConnectWaits: the server comes up only after somebody waits for it.
func TestConnectWaits(t *testing.T) {
	srv := startServer(t)
	url := srv.srv.ClientURL()
	srv.stop()
	ctx, cancel := context.WithTimeout(testContext(t), 50*time.Millisecond)
	defer cancel()
	if _, err := Connect(ctx, Options{URL: url}); !errors.Is(err, context.DeadlineExceeded) {
		t.Fatalf("without a server: %v", err)
	}
	got := make(chan *Conn, 1)
	go func() {
		c, err := Connect(testContext(t), Options{URL: url, Logger: testLog(t)})
		if err != nil {
			t.Error(err)
		}
		got <- c
	}()
	srv.start()
	c := receive(t, "connection", got)
	if c == nil {
		t.FailNow()
	}
	defer c.Close()
	if err := c.Health(testContext(t)); err == nil || !strings.Contains(err.Error(), "RV_COMMANDS") {
		t.Errorf("health without streams: %v", err)
	}
	if _, err := c.Ensure(testContext(t), StreamOptions{}); err != nil {
		t.Fatal(err)
	}
	if err := c.Health(testContext(t)); err != nil {
		t.Error(err)
	}
	srv.stop()
	eventually(t, "the lost server is noticed", func() bool { return c.Health(testContext(t)) != nil })
	srv.start()
}

func TestConnectRefusesNonsense(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	for name, o := range map[string]Options{
		"url":       {URL: "nats://%zz"},
		"creds":     {Creds: "no-such-file", URL: "nats://" + l.Addr().String()},
		"ca":        {CA: "no-such-file", URL: "nats://" + l.Addr().String()},
		"namespace": {Namespace: "A.b"},
	} {
		ctx, cancel := context.WithTimeout(testContext(t), 5*time.Second)
		if _, err := Connect(ctx, o); err == nil || errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("%s: %v", name, err)
		}
		cancel()
	}
	if got := redact("nats://user:secret@a:1, nats://token@b:2,nats://c:3"); strings.Contains(got, "secret") || strings.Contains(got, "token") {
		t.Errorf("redacted to %s", got)
	}
}

// TestConnectSaysWhyNot: whoever gives up waiting is told what the server, or
// the network, answered last.
func TestConnectSaysWhyNot(t *testing.T) {
	web := httptest.NewTLSServer(nil) // for its certificate, which nobody has signed
	defer web.Close()
	closed, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	if err := closed.Close(); err != nil {
		t.Fatal(err)
	}
	for name, c := range map[string]struct {
		o      *server.Options // nil: no server
		scheme string
		is     func(error) bool
		says   string
	}{
		"password": {
			&server.Options{Username: "u", Password: "right"}, "nats://u:wrong@",
			func(err error) bool { return errors.Is(err, nats.ErrAuthorization) }, "uthorization",
		},
		"authority": {
			&server.Options{TLS: true, TLSConfig: &tls.Config{Certificates: web.TLS.Certificates, MinVersion: tls.VersionTLS12}}, "tls://",
			func(err error) bool { return errors.As(err, new(*tls.CertificateVerificationError)) }, "certificate",
		},
		"refused": {
			nil, "nats://",
			func(err error) bool { return errors.Is(err, syscall.ECONNREFUSED) }, "refused",
		},
	} {
		t.Run(name, func(t *testing.T) {
			addr := closed.Addr().String()
			if c.o != nil {
				c.o.Host, c.o.Port, c.o.NoSigs, c.o.NoLog = "127.0.0.1", server.RANDOM_PORT, true, true
				srv, err := server.NewServer(c.o)
				if err != nil {
					t.Fatal(err)
				}
				srv.Start()
				defer srv.WaitForShutdown()
				defer srv.Shutdown()
				if !srv.ReadyForConnections(10 * time.Second) {
					t.Fatal("embedded NATS server is not ready after 10 s")
				}
				addr = srv.Addr().String()
			}
			ctx, cancel := context.WithCancel(testContext(t))
			defer cancel()
			// Whoever waits gives up when the log has the reason.
			_, err := Connect(ctx, Options{URL: c.scheme + addr, Logger: textLog(writerFunc(func(line string) {
				if strings.Contains(line, c.says) {
					cancel()
				}
			}))})
			if !errors.Is(err, context.Canceled) || !c.is(err) {
				t.Errorf("given up: %v", err)
			}
			if err != nil && (!strings.Contains(err.Error(), c.says) || strings.Contains(err.Error(), "wrong@") || strings.Contains(err.Error(), "\n")) {
				t.Errorf("one line says %q", err)
			}
		})
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := Connect(ctx, Options{URL: "nats://" + closed.Addr().String()}); !errors.Is(err, context.Canceled) || !errors.Is(err, nats.ErrNoServers) {
		t.Errorf("given up at once: %v", err)
	}
}

// writerFunc is told what is written to it.
type writerFunc func(string)

func (f writerFunc) Write(p []byte) (int, error) {
	f(string(p))
	return len(p), nil
}

// TestStreamsMadeByHandWork: without direct gets the leader is asked.
func TestStreamsMadeByHandWork(t *testing.T) {
	c := startServer(t).connect()
	for _, cfg := range Configs(c.ns, StreamOptions{}) {
		cfg.AllowDirect = false
		if _, err := c.js.CreateStream(testContext(t), cfg); err != nil {
			t.Fatal(err)
		}
	}
	l, a := newMemLog(), newMemApplier()
	r := startRelay(t, c, l)
	l.add("s", 3)
	if err := r.RelayNow(testContext(t), "s"); err != nil {
		t.Error(err)
	}
	checkCopy(t, c, l)
	run(t, NewIntake(c, a, IntakeOptions{Logger: testLog(t)}).Run)
	publishAll(t, c, wake("s", "1"), wake("s", "2"))
	eventually(t, "both are applied", func() bool { return len(a.ids("s")) == 2 })
}

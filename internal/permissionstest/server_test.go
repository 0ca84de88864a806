// Package permissionstest holds deploy/nats to what it says: a server starts with
// those very files, and each role does its work with the real parts of Reveille,
// and nothing else. The same roles work as users with credentials files, with
// the built programs.
package permissionstest

import (
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"fmt"
	"log/slog"
	"math/big"
	"net"
	"net/url"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/nats-io/nats-server/v2/server"
	"go.uber.org/goleak"

	"reveille/bus"
	"reveille/claims/crdb"
	"reveille/internal/dbtest"
)

func TestMain(m *testing.M) {
	goleak.VerifyTestMain(dbtest.With(m, func(ctx context.Context, url string) error {
		_, err := crdb.Migrate(ctx, url, false)
		return err
	}), dbtest.IgnoreServer())
}

const (
	// patience bounds every wait; nothing takes near as long.
	patience = 2 * time.Minute
	poll     = 5 * time.Millisecond
	// logTail is how much of the server's log a failure shows.
	logTail = 60

	deployed = "../../deploy/nats"
)

// roles are the users of a namespace.
var roles = []string{"publisher", "observer", "worker", "scanner", "operator"}

// namespaces are those of the configuration: the second shows how tenants are
// kept apart.
var namespaces = []bus.Namespace{"rv", "acme"}

// stored is what the server is told of a password, where that is not the
// password itself: a bcrypt hash, as README.md says.
var stored = map[string]string{
	"rv-publisher": "$2a$04$EjLHjV7U1uPFr92KNg4cyeSnC1k.qVZUmk36MzPyvYfColuxncINi",
}

// password is that of a user.
func password(user string) string {
	if user == "rv-publisher" {
		return "publisher's own"
	}
	return "secret of " + user
}

// passwordVariable is where the server finds it.
func passwordVariable(user string) string {
	return strings.ToUpper(strings.ReplaceAll(user, "-", "_")) + "_PASSWORD"
}

// natsServer is a server in this process.
type natsServer struct {
	t   testing.TB
	srv *server.Server
	ca  string // the file with the certificate of its authority
	log *serverLog
}

// startDeployed starts a server with the files of deploy/nats. Only where it
// listens and stores is the test's, and what change says.
func startDeployed(t testing.TB, change ...func(*server.Options)) *natsServer {
	t.Helper()
	certs := newCertificates(t)
	o := deployedOptions(t, certs)
	for _, f := range change {
		f(o)
	}
	return startServer(t, o, certs.ca)
}

// deployedOptions reads the files of deploy/nats.
func deployedOptions(t testing.TB, certs certificates) *server.Options {
	t.Helper()
	t.Setenv("RV_NATS_CERT", certs.cert)
	t.Setenv("RV_NATS_KEY", certs.key)
	for _, ns := range namespaces {
		for _, role := range roles {
			user := string(ns) + "-" + role
			secret := strconv.Quote(password(user)) // the variable's text is read as configuration
			if hash := stored[user]; hash != "" {
				secret = hash
			}
			t.Setenv(passwordVariable(user), secret)
		}
	}
	o, err := server.ProcessConfigFile(filepath.Join(deployed, "nats-server.conf"))
	if err != nil {
		t.Fatal(err)
	}
	return o
}

// startServer starts a server on the loopback, with a store of its own.
func startServer(t testing.TB, o *server.Options, ca string) *natsServer {
	t.Helper()
	s := launch(t, o, ca)
	s.ready()
	return s
}

// launch starts a server that may need others to be ready.
func launch(t testing.TB, o *server.Options, ca string) *natsServer {
	t.Helper()
	o.Host, o.Port, o.HTTPPort, o.StoreDir, o.NoSigs = "127.0.0.1", server.RANDOM_PORT, 0, t.TempDir(), true
	srv, err := server.NewServer(o)
	if err != nil {
		t.Fatal(err)
	}
	s := &natsServer{t: t, srv: srv, ca: ca, log: &serverLog{}}
	srv.SetLogger(s.log, false, false)
	srv.Start()
	t.Cleanup(func() {
		srv.Shutdown()
		srv.WaitForShutdown()
		if t.Failed() {
			lines := s.log.lines("")
			t.Logf("log of the NATS server ends with:\n%s", strings.Join(lines[max(len(lines)-logTail, 0):], "\n"))
		}
	})
	return s
}

func (s *natsServer) ready() {
	s.t.Helper()
	if !s.srv.ReadyForConnections(patience) || !s.srv.JetStreamEnabled() {
		s.t.Fatalf("the NATS server is not ready after %v", patience)
	}
}

// url is where a user of the server connects.
func (s *natsServer) url(user, secret string) string {
	u := url.URL{Scheme: "tls", Host: s.srv.Addr().String()}
	if user != "" {
		u.User = url.UserPassword(user, secret)
	}
	return u.String()
}

// connect connects a role of a namespace as the programs do.
func (s *natsServer) connect(ns bus.Namespace, role string) *bus.Conn {
	s.t.Helper()
	user := string(ns) + "-" + role
	c, err := bus.Connect(testContext(s.t), bus.Options{
		URL: s.url(user, password(user)), CA: s.ca, Name: user, Namespace: ns, Logger: testLog(s.t).With("user", user),
	})
	if err != nil {
		s.t.Fatalf("%s: %v", user, err)
	}
	s.t.Cleanup(c.Close)
	return c
}

// makeStreams is the operator's first act in a namespace. It returns the
// operator's connection.
func (s *natsServer) makeStreams(ns bus.Namespace) (*bus.Conn, *bus.Streams) {
	s.t.Helper()
	operator := s.connect(ns, "operator")
	streams, err := operator.Ensure(testContext(s.t), bus.StreamOptions{})
	if err != nil {
		s.t.Fatalf("the operator makes the streams: %v", err)
	}
	if len(streams.Findings) > 0 {
		s.t.Errorf("streams that the operator made differ: %q", streams.Findings)
	}
	return operator, streams
}

// noViolations: the server has denied nobody anything so far.
func (s *natsServer) noViolations() {
	s.t.Helper()
	for _, line := range s.log.lines("Violation") {
		s.t.Errorf("the server denied: %s", line)
	}
}

// serverLog keeps what the server says.
type serverLog struct {
	mu   sync.Mutex
	said []string
}

func (l *serverLog) add(level, format string, v []any) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.said = append(l.said, level+" "+fmt.Sprintf(format, v...))
}

func (l *serverLog) Noticef(format string, v ...any) { l.add("info", format, v) }
func (l *serverLog) Warnf(format string, v ...any)   { l.add("warn", format, v) }
func (l *serverLog) Errorf(format string, v ...any)  { l.add("error", format, v) }
func (l *serverLog) Fatalf(format string, v ...any)  { l.add("fatal", format, v) }
func (l *serverLog) Debugf(string, ...any)           {}
func (l *serverLog) Tracef(string, ...any)           {}

// lines are what it said with a text in it.
func (l *serverLog) lines(with string) []string {
	l.mu.Lock()
	defer l.mu.Unlock()
	var out []string
	for _, line := range l.said {
		if strings.Contains(line, with) {
			out = append(out, line)
		}
	}
	return out
}

// certificates are files: an authority's, and a server's on the loopback.
type certificates struct{ ca, cert, key string }

func newCertificates(t testing.TB) certificates {
	t.Helper()
	dir := t.TempDir()
	file := func(name, kind string, der []byte) string {
		path := filepath.Join(dir, name)
		if err := os.WriteFile(path, pem.EncodeToMemory(&pem.Block{Type: kind, Bytes: der}), 0o600); err != nil {
			t.Fatal(err)
		}
		return path
	}
	template := func(serial int64, name string) *x509.Certificate {
		return &x509.Certificate{
			SerialNumber: big.NewInt(serial), Subject: pkix.Name{CommonName: name},
			NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(time.Hour),
		}
	}
	keys := [2]*ecdsa.PrivateKey{}
	for i := range keys {
		var err error
		if keys[i], err = ecdsa.GenerateKey(elliptic.P256(), rand.Reader); err != nil {
			t.Fatal(err)
		}
	}
	authority := template(1, "authority of a test")
	authority.IsCA, authority.BasicConstraintsValid, authority.KeyUsage = true, true, x509.KeyUsageCertSign
	ca, err := x509.CreateCertificate(rand.Reader, authority, authority, keys[0].Public(), keys[0])
	if err != nil {
		t.Fatal(err)
	}
	loopback := template(2, "server of a test")
	loopback.IPAddresses = []net.IP{net.IPv4(127, 0, 0, 1)}
	loopback.KeyUsage, loopback.ExtKeyUsage = x509.KeyUsageDigitalSignature, []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth}
	cert, err := x509.CreateCertificate(rand.Reader, loopback, authority, keys[1].Public(), keys[0])
	if err != nil {
		t.Fatal(err)
	}
	key, err := x509.MarshalPKCS8PrivateKey(keys[1])
	if err != nil {
		t.Fatal(err)
	}
	return certificates{
		ca: file("ca.pem", "CERTIFICATE", ca), cert: file("cert.pem", "CERTIFICATE", cert), key: file("key.pem", "PRIVATE KEY", key),
	}
}

// tlsConfig is what a server makes of its tls block.
func (c certificates) tlsConfig(t testing.TB) *tls.Config {
	t.Helper()
	config, err := server.GenTLSConfig(&server.TLSConfigOpts{CertFile: c.cert, KeyFile: c.key})
	if err != nil {
		t.Fatal(err)
	}
	return config
}

// testContext bounds what a test asks of a server.
func testContext(t testing.TB) context.Context {
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	t.Cleanup(cancel)
	return ctx
}

// testLog logs into the test while it runs.
func testLog(t testing.TB) *slog.Logger {
	w := &testWriter{t: t}
	t.Cleanup(w.close)
	return slog.New(slog.NewTextHandler(w, nil))
}

type testWriter struct {
	mu   sync.Mutex
	t    testing.TB
	done bool
}

func (w *testWriter) Write(p []byte) (int, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if !w.done {
		w.t.Log(strings.TrimSpace(string(p)))
	}
	return len(p), nil
}

func (w *testWriter) close() {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.done = true
}

// start runs a part of Reveille until the test ends.
func start(t testing.TB, what string, run func(context.Context) error) {
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan struct{})
	go func() {
		defer close(done)
		_ = run(ctx) // ends with its context only
	}()
	t.Cleanup(func() {
		cancel()
		select {
		case <-done:
		case <-time.After(patience):
			t.Errorf("%s does not end within %v", what, patience)
		}
	})
}

// receive takes what must come.
func receive[T any](t testing.TB, what string, c <-chan T) T {
	t.Helper()
	select {
	case v := <-c:
		return v
	case <-time.After(patience):
		t.Fatalf("not within %v: %s", patience, what)
		panic("unreachable")
	}
}

// eventually polls what the server will make true, as only polling shows.
func eventually(t testing.TB, what string, ok func() bool) {
	t.Helper()
	deadline := time.After(patience)
	tick := time.NewTicker(poll)
	defer tick.Stop()
	for !ok() {
		select {
		case <-tick.C:
		case <-deadline:
			t.Fatalf("not within %v: %s", patience, what)
		}
	}
}

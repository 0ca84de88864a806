package bus

import (
	"context"
	"fmt"
	"io"
	"log/slog"
	"net"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/nats-io/nats-server/v2/server"
	"github.com/nats-io/nats.go/jetstream"
	"github.com/prometheus/client_golang/prometheus"
	"go.uber.org/goleak"

	"reveille/claims"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// testServer is an embedded server that can be restarted on its port and store.
type testServer struct {
	t     testing.TB
	store string
	port  int
	most  int64 // bytes that wait for a client; 0: the server's default
	srv   *server.Server
}

func startServer(t testing.TB) *testServer {
	t.Helper()
	s := &testServer{t: t, store: t.TempDir(), port: server.RANDOM_PORT}
	s.start()
	t.Cleanup(func() { s.stop() })
	return s
}

func (s *testServer) start() {
	s.t.Helper()
	srv, err := server.NewServer(&server.Options{
		ServerName: "test", Host: "127.0.0.1", Port: s.port, NoSigs: true, NoLog: true, JetStream: true, StoreDir: s.store, MaxPending: s.most,
	})
	if err != nil {
		s.t.Fatal(err)
	}
	srv.Start()
	if !srv.ReadyForConnections(10 * time.Second) {
		s.t.Fatal("embedded NATS server is not ready after 10 s")
	}
	s.srv, s.port = srv, srv.Addr().(*net.TCPAddr).Port
}

func (s *testServer) stop() {
	s.srv.Shutdown()
	s.srv.WaitForShutdown()
}

func (s *testServer) restart() {
	s.t.Helper()
	s.stop()
	s.start()
}

// connect connects, and closes the connection before the server stops.
func (s *testServer) connect() *Conn {
	s.t.Helper()
	c, err := Connect(testContext(s.t), Options{URL: s.srv.ClientURL(), Name: s.t.Name(), Logger: testLog(s.t)})
	if err != nil {
		s.t.Fatal(err)
	}
	s.t.Cleanup(c.Close)
	return c
}

// connectWith makes the streams too.
func (s *testServer) connectWith(o StreamOptions) (*Conn, *Streams) {
	s.t.Helper()
	c := s.connect()
	st, err := c.Ensure(testContext(s.t), o)
	if err != nil {
		s.t.Fatal(err)
	}
	return c, st
}

// testContext bounds a test: what hangs fails, with a minute for a busy machine.
func testContext(t testing.TB) context.Context {
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
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

// run runs f until the test ends or stop is called; stop waits for it.
func run(t testing.TB, f func(context.Context) error) (stop func()) {
	t.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan struct{})
	go func() {
		defer close(done)
		_ = f(ctx)
	}()
	stop = func() {
		cancel()
		select {
		case <-done:
		case <-time.After(30 * time.Second):
			t.Error("Run does not return")
		}
	}
	t.Cleanup(stop)
	return stop
}

// eventually polls what the server or a fake will make true, as only polling shows.
func eventually(t testing.TB, what string, ok func() bool) {
	t.Helper()
	tick := time.NewTicker(2 * time.Millisecond)
	defer tick.Stop()
	deadline := time.Now().Add(30 * time.Second)
	for !ok() {
		if time.Now().After(deadline) {
			t.Fatalf("never: %s", what)
		}
		<-tick.C
	}
}

// receive takes a value that must come.
func receive[T any](t testing.TB, what string, c <-chan T) T {
	t.Helper()
	select {
	case v := <-c:
		return v
	case <-time.After(30 * time.Second):
		t.Fatalf("never: %s", what)
		panic("unreachable")
	}
}

// value sums a metric's series that have all these label values.
func value(t testing.TB, collectors []prometheus.Collector, name string, labels ...string) (sum float64) {
	t.Helper()
	reg := prometheus.NewPedanticRegistry()
	reg.MustRegister(collectors...)
	families, err := reg.Gather()
	if err != nil {
		t.Fatal(err)
	}
	for _, f := range families {
		if f.GetName() != name {
			continue
		}
		for _, m := range f.GetMetric() {
			var have []string
			for _, l := range m.GetLabel() {
				have = append(have, l.GetValue())
			}
			if slices.Equal(have, labels) { // labels are sorted by name
				sum += m.GetCounter().GetValue() + m.GetGauge().GetValue()
			}
		}
	}
	return sum
}

func counted(t testing.TB, in *Intake, kind, result string) float64 {
	t.Helper()
	return value(t, in.Collectors(), "reveille_commands_total", kind, result)
}

// messages is how many messages a stream has.
func messages(t testing.TB, c *Conn, stream string) uint64 {
	t.Helper()
	info, err := streamInfo(testContext(t), c.js, stream)
	if err != nil {
		t.Fatal(err)
	}
	return info.State.Msgs
}

// stored reads all messages of a stream of limits.
func stored(t testing.TB, c *Conn, stream string) []Raw {
	t.Helper()
	info, err := streamInfo(testContext(t), c.js, stream)
	if err != nil {
		t.Fatal(err)
	}
	var out []Raw
	for seq := info.State.FirstSeq; seq <= info.State.LastSeq && info.State.Msgs > 0; seq++ {
		m, err := c.leaderGet(testContext(t), stream, getRequest{Seq: seq})
		if err != nil {
			t.Fatalf("message %d of %s: %v", seq, stream, err)
		}
		out = append(out, m)
	}
	return out
}

// fetch takes n messages in hand that nobody else gets before the ack wait.
func fetch(t testing.TB, c *Conn, st *Streams, durable string, n int) []*hand {
	t.Helper()
	cons, err := c.js.Consumer(testContext(t), c.ns.CommandStream(), durable)
	if err != nil {
		t.Fatal(err)
	}
	batch, err := cons.Fetch(n, jetstream.FetchMaxWait(10*time.Second))
	if err != nil {
		t.Fatal(err)
	}
	var out []*hand
	for m := range batch.Messages() {
		h, err := newHand(c.ns, m, st.CommandsID, 0)
		if err != nil {
			t.Fatal(err)
		}
		out = append(out, h)
	}
	if len(out) != n || batch.Error() != nil {
		t.Fatalf("fetched %d of %d: %v", len(out), n, batch.Error())
	}
	return out
}

func publishAll(t testing.TB, c *Conn, cmds ...claims.Command) {
	t.Helper()
	p := NewPublisher(c)
	for _, cmd := range cmds {
		if _, err := p.Publish(testContext(t), cmd, Publishing{}); err != nil {
			t.Fatal(err)
		}
	}
}

func wake(session claims.SessionID, id string) claims.Command {
	return claims.Command{Kind: claims.Wake, Session: session, Input: input(id, `{"n":1}`)}
}

func input(id, body string) *claims.Input {
	return &claims.Input{ID: id, Delivery: claims.Queue, Body: []byte(body)}
}

func session(i int) claims.SessionID { return claims.SessionID(fmt.Sprintf("ses_%d", i)) }

// countingWriter counts the lines of a log.
type countingWriter struct{ lines int }

func (w *countingWriter) Write(p []byte) (int, error) {
	w.lines++
	return len(p), nil
}

func textLog(w io.Writer) *slog.Logger { return slog.New(slog.NewTextHandler(w, nil)) }

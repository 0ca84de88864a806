package bus

import (
	"bufio"
	"fmt"
	"net"
	"runtime"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/nats-io/nats-server/v2/server"
	"github.com/nats-io/nats.go/jetstream"
)

// TestI25_ConsumersThatNeverAcknowledge: some that follow the event stream take
// a message and say nothing, one is not there at all. The relay does not notice.
func TestI25_ConsumersThatNeverAcknowledge(t *testing.T) {
	c, _ := startServer(t).connectWith(StreamOptions{})
	taken := make(chan jetstream.Msg, 10)
	for name, most := range map[string]int{"silent": 1, "hoarding": 1000, "gone": 1} {
		cons, err := c.js.CreateConsumer(testContext(t), "RV_EVENTS", jetstream.ConsumerConfig{
			Durable: name, AckPolicy: jetstream.AckExplicitPolicy, MaxAckPending: most, AckWait: time.Hour,
		})
		if err != nil {
			t.Fatal(err)
		}
		if name == "gone" {
			continue
		}
		following, err := cons.Consume(func(m jetstream.Msg) {
			select {
			case taken <- m:
			default:
			}
		})
		if err != nil {
			t.Fatal(err)
		}
		defer following.Stop()
	}
	l := newMemLog()
	r := startRelay(t, c, l)
	const sessions, each = 20, 100
	for i := range sessions {
		l.add(session(i), each)
		r.Poke(session(i))
	}
	flush(t, r)
	receive(t, "a message that nobody acknowledges", taken)
	equal(t, "events", messages(t, c, "RV_EVENTS"), sessions*each)
	equal(t, "marks", l.unrelayed(), 0)
	checkCopy(t, c, l)
	for i := range sessions { // and on, with all of them full
		l.add(session(i), 1)
		if err := r.RelayNow(testContext(t), session(i)); err != nil {
			t.Error(err)
		}
	}
	checkCopy(t, c, l)
}

// deafClient subscribes to live text and then reads nothing any more.
func deafClient(t *testing.T, s *testServer) {
	t.Helper()
	conn, err := net.Dial("tcp", s.srv.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = conn.Close() })
	r := bufio.NewReader(conn)
	if _, err := r.ReadString('\n'); err != nil { // INFO
		t.Fatal(err)
	}
	if _, err := fmt.Fprint(conn, "CONNECT {\"verbose\":false}\r\nSUB rv.live.> 1\r\nPING\r\n"); err != nil {
		t.Fatal(err)
	}
	if line, err := r.ReadString('\n'); err != nil || !strings.HasPrefix(line, "PONG") {
		t.Fatalf("the server says %q: %v", line, err)
	}
}

// heap is what this process has in use.
func heap() int64 {
	runtime.GC()
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	return int64(m.HeapAlloc)
}

// TestLiveAndSlowClients: 50 MB of live text, faster than some clients read it:
// one has stopped reading its socket, one's function never returns. What is
// published is taken or dropped at once, memory stays, and the events go on.
func TestLiveAndSlowClients(t *testing.T) {
	srv := &testServer{t: t, store: t.TempDir(), port: server.RANDOM_PORT, most: 8 << 20} // it is in this process
	srv.start()
	t.Cleanup(srv.stop)
	c, _ := srv.connectWith(StreamOptions{})
	deafClient(t, srv)
	listener := srv.connect()
	stuck, release := make(chan struct{}, 1), make(chan struct{})
	defer close(release)
	sub, err := subscribeLive(listener, "", func(LiveText) {
		select {
		case stuck <- struct{}{}:
		default:
		}
		<-release
	})
	if err != nil {
		t.Fatal(err)
	}
	if err := listener.nc.Flush(); err != nil {
		t.Fatal(err)
	}
	l := newMemLog()
	r := startRelay(t, c, l)
	live := NewLive(c)
	run(t, live.Run)

	const piece, pieces, rounds = 50 << 10, 100, 10
	before := heap()
	text := strings.Repeat("x", piece)
	for round := range rounds {
		for range pieces {
			live.PublishLive("s", 1, "step", text)
		}
		l.add("s", 1)
		if err := r.RelayNow(testContext(t), "s"); err != nil {
			t.Error(err)
		}
		if grown := heap() - before; grown > 40<<20 {
			t.Errorf("%d MB more after %d MB of live text", grown>>20, (round+1)*pieces*piece>>20)
		}
	}
	receive(t, "the client that is stuck", stuck)
	eventually(t, "nothing waits to be published", func() bool { return live.queued.Load() == 0 })
	if b, err := c.nc.Buffered(); err != nil || b > 1<<20 {
		t.Errorf("%d bytes wait in the connection, %v", b, err)
	}
	checkCopy(t, c, l)
	if _, pending, err := sub.Pending(); err != nil || pending > listenMost {
		t.Errorf("%d bytes wait for the client that is stuck, %v", pending, err)
	}
	if err := sub.Unsubscribe(); err != nil {
		t.Error(err)
	}
}

// TestLiveOfAServerThatDoesNotRead: the server takes nothing any more, and does
// not say so. Whoever publishes live text is not held up.
func TestLiveOfAServerThatDoesNotRead(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	deaf := make(chan struct{})
	go func() {
		conn, err := l.Accept()
		if err != nil {
			return
		}
		defer conn.Close()
		r := bufio.NewReader(conn)
		_, _ = fmt.Fprint(conn, "INFO {\"server_id\":\"deaf\",\"version\":\"2.12.0\",\"max_payload\":1048576,\"headers\":true}\r\n")
		for {
			line, err := r.ReadString('\n')
			if err != nil {
				return
			}
			if strings.HasPrefix(line, "PING") {
				_, _ = fmt.Fprint(conn, "PONG\r\n")
				break
			}
		}
		<-deaf
	}()
	c, err := Connect(testContext(t), Options{URL: "nats://" + l.Addr().String(), Logger: testLog(t)})
	if err != nil {
		t.Fatal(err)
	}
	live := NewLive(c)
	stop := run(t, live.Run)
	before := heap()
	text := strings.Repeat("x", 50<<10)
	for range 1000 {
		live.PublishLive("s", 1, "step", text)
	}
	if grown := heap() - before; grown > 40<<20 {
		t.Errorf("%d MB more", grown>>20)
	}
	if live.Dropped() == 0 {
		t.Error("nothing was dropped")
	}
	_ = l.Close()
	close(deaf) // what was stuck in the connection fails
	c.Close()
	stop()
}

// A server that answers and then reads nothing any more, with its sockets open, is given up when a write has waited for
// it long enough: the client holds its lock meanwhile, so nothing else would get through, pings neither.
func TestServerThatReadsNothingIsGivenUp(t *testing.T) {
	var conns sync.WaitGroup
	defer conns.Wait()
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer listener.Close()
	served := make(chan struct{}, 10)
	over := make(chan struct{})
	defer close(over)
	conns.Go(func() {
		for {
			conn, err := listener.Accept()
			if err != nil {
				return // closed
			}
			conns.Go(func() {
				defer conn.Close()
				_, _ = fmt.Fprintf(conn, "INFO {\"server_id\":\"deaf\",\"version\":\"2.12.0\",\"proto\":1,\"headers\":true,\"max_payload\":%d}\r\n", 1<<20)
				for r := bufio.NewReader(conn); ; {
					line, err := r.ReadString('\n')
					if err != nil {
						return
					}
					if strings.HasPrefix(line, "PING") {
						break
					}
				}
				_, _ = fmt.Fprint(conn, "PONG\r\n")
				served <- struct{}{}
				<-over
			})
		}
	})
	c, err := Connect(testContext(t), Options{URL: "nats://" + listener.Addr().String(), writeTimeout: 50 * time.Millisecond})
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	receive(t, "a connection", served)
	full := make(chan struct{})
	go func() { // until it is connected anew
		defer close(full)
		for payload := make([]byte, 512<<10); c.nc.Stats().Reconnects == 0; {
			if err := c.nc.Publish("x", payload); err != nil {
				return // it waits for the connection with as much as it may keep
			}
		}
	}()
	receive(t, "another connection", served)
	<-full
}

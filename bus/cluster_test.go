package bus

import (
	"context"
	"fmt"
	"math/rand/v2"
	"net"
	"net/url"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/nats-io/nats-server/v2/server"
	"github.com/nats-io/nats.go/jetstream"

	"reveille/claims"
)

// cluster is three servers in this process.
type cluster struct {
	t     testing.TB
	opts  [3]server.Options
	nodes [3]*server.Server
}

func startCluster(t testing.TB) *cluster {
	t.Helper()
	c := &cluster{t: t}
	var routes []*url.URL
	for i := range c.opts {
		ports := [2]int{freePort(t), freePort(t)}
		c.opts[i] = server.Options{
			ServerName: fmt.Sprintf("node%d", i), Host: "127.0.0.1", Port: ports[0], NoSigs: true, NoLog: true,
			JetStream: true, StoreDir: t.TempDir(), Cluster: server.ClusterOpts{Name: "test", Host: "127.0.0.1", Port: ports[1]},
		}
		routes = append(routes, &url.URL{Scheme: "nats", Host: fmt.Sprintf("127.0.0.1:%d", ports[1])})
	}
	for i := range c.opts {
		c.opts[i].Routes = routes
		c.start(i)
	}
	t.Cleanup(func() {
		for i := range c.nodes {
			c.stop(i)
		}
	})
	eventually(t, "a leader of three servers", func() bool {
		for _, n := range c.nodes {
			if n.JetStreamIsLeader() && len(n.JetStreamClusterPeers()) == 3 {
				return true
			}
		}
		return false
	})
	return c
}

// freePort is a port that nobody listens on; routes are named before their servers start.
func freePort(t testing.TB) int {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	return l.Addr().(*net.TCPAddr).Port
}

func (c *cluster) start(i int) {
	c.t.Helper()
	o := c.opts[i]
	n, err := server.NewServer(&o)
	if err != nil {
		c.t.Fatal(err)
	}
	c.nodes[i] = n
	n.Start()
	if !n.ReadyForConnections(20 * time.Second) {
		c.t.Fatalf("node %d is not ready after 20 s", i)
	}
}

func (c *cluster) stop(i int) {
	if c.nodes[i] != nil {
		c.nodes[i].Shutdown()
		c.nodes[i].WaitForShutdown()
		c.nodes[i] = nil
	}
}

// connect connects to one node first, and to whichever is there.
func (c *cluster) connect(i int) *Conn {
	c.t.Helper()
	var urls []string
	for k := range c.opts {
		o := c.opts[(i+k)%len(c.opts)]
		urls = append(urls, fmt.Sprintf("nats://127.0.0.1:%d", o.Port))
	}
	conn, err := Connect(testContext(c.t), Options{URL: strings.Join(urls, ","), Name: c.t.Name()})
	if err != nil {
		c.t.Fatal(err)
	}
	c.t.Cleanup(conn.Close)
	return conn
}

// leader is the node that leads a stream, as some node says; -1 where none does.
func (c *cluster) leader(stream string) int {
	for i, n := range c.nodes {
		if n != nil && n.JetStreamIsStreamLeader("$G", stream) {
			return i
		}
	}
	return -1
}

// stepDown has the stream's leader give its place to another.
func stepDown(ctx context.Context, c *Conn, stream string) {
	_, _ = c.request(ctx, apiPrefix+"STREAM.LEADER.STEPDOWN."+stream, struct{}{}) // without a leader there is nothing to give
}

// TestI25_LeadersComeAndGo: two hundred sessions with twenty events each, three relays that race, lose requests and
// answers and are started anew, on a stream of three replicas whose leader is stopped and moved all the while. The stream
// has the same events, in the same order, none twice.
func TestI25_LeadersComeAndGo(t *testing.T) {
	seed := uint64(time.Now().UnixNano())
	t.Logf("seed %d", seed)
	faults, mu := rand.New(rand.NewPCG(seed, 3)), &sync.Mutex{} // the relays' own
	pokes := rand.New(rand.NewPCG(seed, 4))
	nodes := startCluster(t)
	conns := [3]*Conn{nodes.connect(0), nodes.connect(1), nodes.connect(2)}
	eventually(t, "the streams, of three replicas", func() bool {
		_, err := conns[0].Ensure(testContext(t), StreamOptions{Replicas: 3})
		return err == nil
	})
	l := newMemLog()
	const sessions, rounds, each = 200, 10, 2
	var relays [3]*Relay
	var stops [3]func()
	begin := func(i int) {
		relays[i] = NewRelay(conns[i], replayLog{l}, RelayOptions{})
		relays[i].publish = faulty(faults, mu, relays[i].publish)
		stops[i] = run(t, relays[i].Run)
	}
	for i := range relays {
		begin(i)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Minute)
	defer cancel()
	down := -1
	for round := range rounds {
		for n := range sessions {
			l.add(session(n), each)
			for _, r := range relays {
				if pokes.IntN(3) > 0 {
					r.Poke(session(n))
				}
			}
		}
		switch round % 3 {
		case 0: // its leader stops
			if down = nodes.leader("RV_EVENTS"); down >= 0 {
				nodes.stop(down)
			}
		case 1: // and comes back
			if down >= 0 {
				nodes.start(down)
			}
		case 2: // it moves; a relay crashes
			stepDown(ctx, conns[round%3], "RV_EVENTS")
			stops[round%3]()
			begin(round % 3)
		}
	}
	if nodes.nodes[max(down, 0)] == nil {
		nodes.start(down)
	}
	for n := range sessions {
		relays[n%3].Poke(session(n))
	}
	for _, r := range relays {
		if err := r.Flush(ctx); err != nil {
			t.Fatal(err)
		}
	}
	checkStream(ctx, t, conns[0], l)
}

// checkStream is checkCopy for many events.
func checkStream(ctx context.Context, t *testing.T, c *Conn, l *memLog) {
	t.Helper()
	want := 0
	for _, es := range l.events {
		want += len(es)
	}
	info, err := streamInfo(ctx, c.js, "RV_EVENTS")
	if err != nil {
		t.Fatal(err)
	}
	if got := int(info.State.Msgs); got != want {
		t.Errorf("the stream has %d events, the database %d", got, want)
	}
	consumer, err := c.js.OrderedConsumer(ctx, "RV_EVENTS", jetstream.OrderedConsumerConfig{})
	if err != nil {
		t.Fatal(err)
	}
	seen := map[claims.SessionID]int{}
	messages, err := consumer.Messages()
	if err != nil {
		t.Fatal(err)
	}
	defer messages.Stop()
	for range info.State.Msgs {
		m, err := messages.Next(jetstream.NextContext(ctx))
		if err != nil {
			t.Fatal(err)
		}
		s := claims.SessionID(strings.TrimPrefix(m.Subject(), "rv.event."))
		at := seen[s]
		if at >= len(l.events[s]) || string(m.Data()) != string(l.events[s][at].Line) {
			t.Fatalf("event %d of session %s is %s", at+1, s, m.Data())
		}
		seen[s]++
	}
}

package permissionstest

import (
	"fmt"
	"net"
	"net/url"
	"testing"

	"github.com/nats-io/nats-server/v2/server"

	"reveille/bus"
	"reveille/claims"
)

// TestRolesInACluster: three servers with the files of deploy/nats. Whichever a
// role is connected to, what goes between the accounts goes between the servers.
func TestRolesInACluster(t *testing.T) {
	nodes := startCluster(t)
	operator := nodes[0].connect("rv", "operator")
	if _, err := operator.Ensure(testContext(t), bus.StreamOptions{Replicas: 3}); err != nil {
		t.Fatal(err)
	}
	a := newApplier(claims.Notice{Holder: "somebody"})
	log := newEventLog()
	for i, node := range nodes {
		session := claims.SessionID(fmt.Sprint("s", i))
		worker := node.connect("rv", "worker")
		start(t, "the intake", bus.NewIntake(worker, a, bus.IntakeOptions{Streams: bus.StreamOptions{Replicas: 3}}).Run)
		log.add(session, claims.InputAdmitted)
		relay := bus.NewRelay(worker, log, bus.RelayOptions{})
		start(t, "the relay", relay.Run)
		relayed(t, relay, session)
	}
	for i, node := range nodes {
		session := claims.SessionID(fmt.Sprint("s", i))
		wake(t, bus.NewPublisher(node.connect("rv", "publisher")), session)
		if cmd := receive(t, "a command of "+string(session), a.applied); cmd.Session != session {
			t.Errorf("a command of session %s is applied, want %s", cmd.Session, session)
		}
		observer := node.connect("rv", "observer")
		events := watch(t, observer, "", 1)
		for range nodes {
			receive(t, "an event", events)
		}
		if _, err := stream1(t, observer, "RV_EVENTS").GetLastMsgForSubject(testContext(t), "rv.event."+string(session)); err != nil {
			t.Error(err)
		}
		heard := make(chan bus.LiveText, 1)
		stop, err := bus.SubscribeLive(observer, session, func(l bus.LiveText) {
			select {
			case heard <- l:
			default:
			}
		})
		if err != nil {
			t.Fatal(err)
		}
		flush(t, observer)
		live := bus.NewLive(nodes[(i+1)%len(nodes)].connect("rv", "worker"))
		start(t, "live text", live.Run)
		eventually(t, "live text goes from server to server", func() bool { // interest spreads in its own time
			live.PublishLive(session, 1, "step", "hello")
			select {
			case <-heard:
				return true
			default:
				return false
			}
		})
		stop()
	}
	for _, node := range nodes {
		node.noViolations()
	}
}

// startCluster starts three servers, and waits until they are one.
func startCluster(t testing.TB) []*natsServer {
	t.Helper()
	certs := newCertificates(t)
	var ports []int
	var routes []*url.URL
	for range 3 { // routes are named before their servers start
		port := freePort(t)
		ports = append(ports, port)
		routes = append(routes, &url.URL{Scheme: "nats", Host: fmt.Sprintf("127.0.0.1:%d", port)})
	}
	var nodes []*natsServer
	for i, port := range ports {
		o := deployedOptions(t, certs)
		o.ServerName, o.Routes = fmt.Sprint("reveille-", i+1), routes
		o.Cluster = server.ClusterOpts{Name: "reveille", Host: "127.0.0.1", Port: port}
		nodes = append(nodes, launch(t, o, certs.ca))
	}
	for _, node := range nodes {
		node.ready()
	}
	eventually(t, "a leader of three servers", func() bool {
		for _, node := range nodes {
			if node.srv.JetStreamIsLeader() && len(node.srv.JetStreamClusterPeers()) == len(nodes) {
				return true
			}
		}
		return false
	})
	return nodes
}

// freePort is a port that nobody listens on.
func freePort(t testing.TB) int {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	return l.Addr().(*net.TCPAddr).Port
}

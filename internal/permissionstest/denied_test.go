package permissionstest

import (
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"reveille/bus"
	"reveille/claims"
)

// attempt is something that somebody tries.
type attempt struct {
	subject   string
	subscribe bool
	body      string
}

func publish(subjects ...string) (out []attempt) {
	for _, s := range subjects {
		out = append(out, attempt{subject: s})
	}
	return out
}

func subscribe(subjects ...string) (out []attempt) {
	for _, s := range subjects {
		out = append(out, attempt{subject: s, subscribe: true})
	}
	return out
}

// denied makes an attempt, which the server must refuse.
func denied(t testing.TB, conn *bus.Conn, a attempt) {
	t.Helper()
	nc := conn.NATS()
	what := "publishing on"
	var err error
	if a.subscribe {
		what = "subscribing to"
		var sub *nats.Subscription
		if sub, err = nc.SubscribeSync(a.subject); err == nil {
			defer func() { _ = sub.Unsubscribe() }() // it was refused: nothing is there to end
		}
	} else {
		err = nc.PublishRequest(a.subject, nc.NewInbox(), []byte(a.body))
	}
	if err != nil {
		t.Fatalf("%s %s: %v", what, a.subject, err)
	}
	flush(t, conn) // the refusal comes before the answer to this
	if err := nc.LastError(); !errors.Is(err, nats.ErrPermissionViolation) || !strings.Contains(err.Error(), " to "+strconv.Quote(a.subject)) {
		t.Errorf("%s %s is not refused (last error: %v)", what, a.subject, err)
	}
}

// world has something of everything that somebody could harm.
type world struct {
	*natsServer
	operator *bus.Conn
	streams  *bus.Streams
	ack      string // acknowledges a command that a worker has in hand
}

func newWorld(t testing.TB) *world {
	t.Helper()
	w := &world{natsServer: startDeployed(t)}
	w.operator, w.streams = w.makeStreams("rv")
	worker := w.connect("rv", "worker")
	log := newEventLog()
	log.add("s1", claims.InputAdmitted, claims.SessionQuarantined)
	relay := bus.NewRelay(worker, log, bus.RelayOptions{})
	start(t, "the relay", relay.Run)
	relayed(t, relay, "s1")
	if err := bus.NewAnnouncer(worker).Announce(testContext(t), "s1"); err != nil {
		t.Fatal(err)
	}
	wake(t, bus.NewPublisher(w.operator), "s1")
	c, err := worker.JetStream().Consumer(testContext(t), "RV_COMMANDS", w.streams.Intake())
	if err != nil {
		t.Fatal(err)
	}
	m, err := c.Next(jetstream.FetchMaxWait(patience))
	if err != nil {
		t.Fatal(err)
	}
	w.ack = m.Reply()
	return w
}

// streamsOf are the names of a namespace's streams.
func streamsOf(ns bus.Namespace) []string {
	return []string{ns.CommandStream(), ns.ReadyStream(), ns.EventStream(), ns.QuarantineStream(), ns.RejectedStream()}
}

// api are the requests that change or read any of the streams.
func (w *world) api() (out []string) {
	for _, stream := range streamsOf("rv") {
		for _, request := range []string{
			"STREAM.CREATE", "STREAM.UPDATE", "STREAM.DELETE", "STREAM.PURGE", "STREAM.MSG.DELETE", "STREAM.SNAPSHOT", "STREAM.RESTORE",
			"STREAM.LEADER.STEPDOWN", "STREAM.PEER.REMOVE", "CONSUMER.NAMES", "CONSUMER.LIST", "CONSUMER.CREATE",
		} {
			out = append(out, "$JS.API."+request+"."+stream)
		}
		for _, request := range []string{"CREATE", "DURABLE.CREATE", "DELETE", "PAUSE", "RESET", "LEADER.STEPDOWN"} {
			out = append(out, "$JS.API.CONSUMER."+request+"."+stream+".mine")
		}
		out = append(out, "$JS.API.CONSUMER.CREATE."+stream+".mine.rv.>")
	}
	for _, durable := range []string{w.streams.Intake(), w.streams.Interrupts()} {
		out = append(out, "$JS.API.CONSUMER.DELETE.RV_COMMANDS."+durable, "$JS.API.CONSUMER.CREATE.RV_COMMANDS."+durable)
	}
	return append(out, "$JS.API.STREAM.NAMES", "$JS.API.STREAM.LIST", "$JS.API.STREAM.CREATE.MINE", "$JS.API.CONSUMER.DELETE.RV_READY."+w.streams.Ready())
}

// read are the requests that read a stream or look at it.
func (w *world) read(streams ...string) (out []string) {
	for _, stream := range streams {
		out = append(out, "$JS.API.STREAM.INFO."+stream, "$JS.API.STREAM.MSG.GET."+stream, "$JS.API.DIRECT.GET."+stream,
			"$JS.API.CONSUMER.INFO."+stream+".mine", "$JS.API.CONSUMER.MSG.NEXT."+stream+".mine")
	}
	return out
}

// take are the requests that take work, and the acknowledgements.
func (w *world) take() []string {
	return []string{
		"$JS.API.CONSUMER.MSG.NEXT.RV_COMMANDS." + w.streams.Intake(), "$JS.API.CONSUMER.MSG.NEXT.RV_COMMANDS." + w.streams.Interrupts(),
		"$JS.API.CONSUMER.MSG.NEXT.RV_READY." + w.streams.Ready(), w.ack, strings.Replace(w.ack, "RV_COMMANDS", "RV_READY", 1),
	}
}

var (
	commands = []string{"rv.admit.s1", "rv.wake.s1", "rv.interrupt.s1"}
	events   = []string{"rv.event.s1", "rv.quarantine.s1"}
	internal = []string{"rv.rejected.wake", "rv.ready.s1", "rv.live.s1", "rv.worker.holder.notice"}
	// elsewhere is nobody's business: other subjects, other tenants, the server.
	elsewhere = []string{
		"other", "rv", "rv.wake", "rv.wake.s1.more", "acme.wake.s1", "acme.event.s1", "$JS.API.STREAM.INFO.ACME_EVENTS", "$SYS.REQ.SERVER.PING",
		"$SYS.REQ.ACCOUNT.RV.JSZ", "$JS.FC.RV_EVENTS.c.x", "_INBOX.rv-worker.x", "_INBOX.rv-observer.x",
	}
	// heard is what only some may hear.
	heard = []string{
		">", "rv.>", "*.>", "acme.>", "acme.live.*", "$JS.>", "$JS.API.>", "$JS.ACK.>", "$JS.EVENT.ADVISORY.>", "$SYS.>", "_INBOX.>", "_INBOX.*",
	}
	spoken = []string{"rv.*.*", "rv.admit.*", "rv.wake.*", "rv.interrupt.*", "rv.event.*", "rv.event.s1", "rv.quarantine.*", "rv.rejected.*", "rv.ready.*"}
	live   = []string{"rv.live.*", "rv.live.s1"}
	notice = []string{"rv.worker.*.notice", "rv.worker.holder.notice"}
)

// inboxes are those of all roles but one.
func inboxes(of string) (out []string) {
	for _, ns := range namespaces {
		for _, role := range roles {
			if user := string(ns) + "-" + role; user != of {
				out = append(out, "_INBOX."+user+".>", "_INBOX."+user+".x")
			}
		}
	}
	return out
}

// TestRolesDoNothingElse: the server refuses what a role has no business with,
// and what is there stays as it was.
func TestRolesDoNothingElse(t *testing.T) {
	w := newWorld(t)
	all := streamsOf("rv")
	for role, attempts := range map[string][]attempt{
		"publisher": slices.Concat(
			publish(slices.Concat(w.api(), w.read(all...), w.take(), events, internal, elsewhere, []string{"$JS.API.INFO", "$JS.API.DIRECT.GET.RV_EVENTS.rv.event.s1"})...),
			subscribe(slices.Concat(heard, spoken, live, notice)...),
		),
		"observer": slices.Concat(
			publish(slices.Concat(without(w.api(), "CONSUMER.DELETE.RV_EVENTS.", "CONSUMER.DELETE.RV_QUARANTINE."), w.read("RV_COMMANDS", "RV_READY", "RV_REJECTED"), w.take(),
				commands, events, internal, elsewhere)...),
			publish("$JS.API.INFO", "$JS.API.STREAM.MSG.GET.RV_EVENTS", "$JS.API.STREAM.MSG.GET.RV_QUARANTINE", "$JS.API.DIRECT.GET.RV_COMMANDS.rv.wake.s1"),
			subscribe(slices.Concat(heard, spoken, notice)...),
		),
		"worker": slices.Concat(
			publish(slices.Concat(w.api(), without(w.read("RV_QUARANTINE", "RV_REJECTED"), "STREAM.INFO."), commands, elsewhere)...),
			publish("$JS.ACK.RV_EVENTS.c.1.1.1.1.0", "$JS.API.CONSUMER.MSG.NEXT.RV_EVENTS.c", "$JS.API.INFO"),
			subscribe(slices.Concat(heard, spoken, live)...),
		),
		"scanner": slices.Concat(
			publish(slices.Concat(without(w.api(), "STREAM.PURGE.RV_READY"), without(w.read("RV_QUARANTINE", "RV_REJECTED"), "STREAM.INFO."), w.take(), commands, elsewhere)...),
			publish("rv.rejected.wake", "rv.live.s1", "rv.worker.holder.notice", "$JS.API.DIRECT.GET.RV_COMMANDS", "$JS.API.STREAM.MSG.GET.RV_COMMANDS"),
			subscribe(slices.Concat(heard, spoken, live, notice)...),
		),
		"operator": slices.Concat(
			publish(w.ack, "$JS.ACK.RV_READY.c.1.1.1.1.0"), publish(internal...), publish(without(elsewhere, "$JS.API")...),
			subscribe(without(heard, "rv.>")...),
		),
	} {
		t.Run(role, func(t *testing.T) {
			conn := w.connect("rv", role)
			before := w.snapshot()
			for _, a := range append(attempts, subscribe(inboxes("rv-"+role)...)...) {
				denied(t, conn, a)
			}
			if after := w.snapshot(); after != before {
				t.Errorf("the streams were\n%s\nand are\n%s", before, after)
			}
		})
	}
}

// without leaves out what has any of the texts in it.
func without(subjects []string, texts ...string) (out []string) {
	for _, s := range subjects {
		if !slices.ContainsFunc(texts, func(text string) bool { return strings.Contains(s, text) }) {
			out = append(out, s)
		}
	}
	return out
}

// snapshot is all of the streams of the namespace rv.
func (w *world) snapshot() string {
	w.t.Helper()
	var out []string
	for _, stream := range streamsOf("rv") {
		out = append(out, info(w.t, w.operator, stream))
	}
	return strings.Join(out, "\n")
}

// TestAnswersCannotBeRedirected: a sender names the subject of the answer, and
// the server publishes there what the sender may not. In accounts of their own,
// publishers and observers name subjects of those accounts.
func TestAnswersCannotBeRedirected(t *testing.T) {
	w := newWorld(t)
	publisher, observer, worker := w.connect("rv", "publisher"), w.connect("rv", "observer"), w.connect("rv", "worker")
	before := map[string]uint64{}
	for _, stream := range streamsOf("rv") {
		before[stream] = state(t, w.operator, stream).LastSeq
	}
	redirect(t, publisher, observer)
	// What was sent by them has arrived when later requests of theirs are
	// answered, and what was published for it then is before what comes now.
	wake(t, bus.NewPublisher(publisher), "s3")
	ask(t, observer, "$JS.API.STREAM.INFO.RV_EVENTS", "")
	ask(t, observer, "$JS.API.CONSUMER.INFO.RV_EVENTS.pull", "")
	for stream, last := range map[string]struct {
		conn    *bus.Conn
		subject string
	}{
		"RV_COMMANDS": {w.operator, "rv.wake.s9"}, "RV_READY": {worker, "rv.ready.s9"}, "RV_EVENTS": {worker, "rv.event.s9"},
		"RV_QUARANTINE": {worker, "rv.quarantine.s9"}, "RV_REJECTED": {worker, "rv.rejected.admit"},
	} {
		ack, err := last.conn.JetStream().Publish(testContext(t), last.subject, nil)
		if err != nil {
			t.Fatal(err)
		}
		st := stream1(t, w.operator, stream)
		for seq := before[stream] + 1; seq <= ack.Sequence; seq++ {
			m, err := st.GetMsg(testContext(t), seq)
			if err != nil {
				t.Fatalf("message %d of %s: %v", seq, stream, err)
			}
			if m.Subject != last.subject && m.Subject != "rv.wake.s3" { // the publisher's own
				t.Errorf("an answer is in %s: on %s, %s", stream, m.Subject, m.Data)
			}
		}
	}
}

// redirect sends what a publisher and an observer may, and has its answers go
// where they may not publish.
func redirect(t testing.TB, publisher, observer *bus.Conn) {
	t.Helper()
	targets := slices.Concat(commands, events, internal)
	for _, subject := range targets {
		send(t, publisher, "rv.wake.s3", subject, "")
		send(t, observer, "$JS.API.STREAM.INFO.RV_EVENTS", subject, "")
		send(t, observer, "$JS.API.DIRECT.GET.RV_EVENTS.rv.event.s1", subject, "")
	}
	for _, subject := range slices.Concat(events, internal) { // a trace goes where a header says
		for conn, request := range map[*bus.Conn]string{publisher: "rv.wake.s3", observer: "$JS.API.STREAM.INFO.RV_EVENTS"} {
			m := &nats.Msg{Subject: request, Header: nats.Header{"Nats-Trace-Dest": {subject}}}
			if err := conn.NATS().PublishMsg(m); err != nil {
				t.Fatal(err)
			}
		}
	}
	// A pull, and a consumer that pushes, deliver where they are told to.
	const create, config = "$JS.API.CONSUMER.CREATE.RV_EVENTS.", `"filter_subject":"rv.event.*","ack_policy":"none"`
	ask(t, observer, create+"pull.rv.event.*", `{"stream_name":"RV_EVENTS","config":{"name":"pull",`+config+`}}`)
	for i, subject := range targets {
		send(t, observer, "$JS.API.CONSUMER.MSG.NEXT.RV_EVENTS.pull", subject, `{"batch":1,"no_wait":true}`)
		name := fmt.Sprint("push", i)
		send(t, observer, create+name+".rv.event.*", observer.NATS().NewInbox(),
			fmt.Sprintf(`{"stream_name":"RV_EVENTS","config":{"name":%q,"deliver_subject":%q,%s}}`, name, subject, config))
	}
}

func send(t testing.TB, conn *bus.Conn, subject, reply, body string) {
	t.Helper()
	if err := conn.NATS().PublishRequest(subject, reply, []byte(body)); err != nil {
		t.Fatal(err)
	}
}

func ask(t testing.TB, conn *bus.Conn, subject, body string) {
	t.Helper()
	m, err := conn.NATS().RequestWithContext(testContext(t), subject, []byte(body))
	if err != nil || strings.Contains(string(m.Data), `"error"`) {
		t.Fatalf("%s: %v %s", subject, err, m.Data)
	}
}

// TestTenantsAreApart: a tenant's operator, who may do everything in its own
// namespace, finds nothing of another's.
func TestTenantsAreApart(t *testing.T) {
	s := startDeployed(t)
	for i, ns := range namespaces {
		other := namespaces[1-i]
		operator, _ := s.makeStreams(ns)
		wake(t, bus.NewPublisher(s.connect(ns, "publisher")), "s1") // each has a command in its own stream
		for _, name := range streamNames(t, operator) {
			if !slices.Contains(streamsOf(ns), name) {
				t.Errorf("the operator of %s sees stream %s", ns, name)
			}
		}
		for _, stream := range streamsOf(other) {
			if _, err := operator.JetStream().Stream(testContext(t), stream); !errors.Is(err, jetstream.ErrStreamNotFound) {
				t.Errorf("the operator of %s asks for %s: %v", ns, stream, err)
			}
			if err := operator.JetStream().DeleteStream(testContext(t), stream); !errors.Is(err, jetstream.ErrStreamNotFound) {
				t.Errorf("the operator of %s deletes %s: %v", ns, stream, err)
			}
		}
		for _, role := range roles {
			conn := s.connect(ns, role)
			for _, a := range slices.Concat(
				publish(string(other)+".wake.s1", string(other)+".event.s1", string(other)+".ready.s1", string(other)+".live.s1"),
				subscribe(string(other)+".>", string(other)+".live.*", string(other)+".worker.*.notice"),
			) {
				denied(t, conn, a)
			}
		}
	}
	for _, ns := range namespaces {
		if n := state(t, s.connect(ns, "operator"), ns.CommandStream()).Msgs; n != 1 {
			t.Errorf("%s has %d commands, want its own", ns, n)
		}
	}
}

func TestStrangersAreRefused(t *testing.T) {
	s := startDeployed(t)
	for name, o := range map[string]nats.Option{
		"no user":             nats.UserInfo("", ""),
		"unknown user":        nats.UserInfo("somebody", "secret"),
		"wrong password":      nats.UserInfo("rv-operator", password("rv-worker")),
		"hash as password":    nats.UserInfo("rv-publisher", stored["rv-publisher"]),
		"a token":             nats.Token("secret"),
		"password of another": nats.UserInfo("rv-operator", password("acme-operator")),
	} {
		nc, err := nats.Connect("tls://"+s.srv.Addr().String(), nats.RootCAs(s.ca), nats.Timeout(patience), o)
		if !errors.Is(err, nats.ErrAuthorization) {
			t.Errorf("%s: %v, want %v", name, err, nats.ErrAuthorization)
		}
		if nc != nil {
			nc.Close()
		}
	}
	// A client that does not trust the authority does not send its password.
	if nc, err := nats.Connect(s.url("rv-worker", password("rv-worker")), nats.Timeout(patience)); err == nil {
		nc.Close()
		t.Error("a client connects that does not know the server's authority")
	}
}

package permissionstest

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/nats-io/nats-server/v2/server"
	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"reveille/bus"
	"reveille/claims"
)

// TestOnlyTheOperatorMakesStreams: a worker and a scanner wait for what is not
// there, and find it when the operator has made it.
func TestOnlyTheOperatorMakesStreams(t *testing.T) {
	s := startDeployed(t)
	operator := s.connect("rv", "operator")
	conns := map[string]*bus.Conn{"worker": s.connect("rv", "worker"), "scanner": s.connect("rv", "scanner")}
	for role, conn := range conns {
		before := len(s.log.lines("STREAM.CREATE"))
		ctx, cancel := context.WithCancel(testContext(t))
		failed := make(chan error, 1)
		go func() {
			_, err := conn.Ensure(ctx, bus.StreamOptions{})
			failed <- err
		}()
		eventually(t, "the "+role+" is denied to make a stream", func() bool { return len(s.log.lines("STREAM.CREATE")) > before })
		cancel()
		if err := receive(t, "the end of Ensure", failed); err == nil {
			t.Errorf("the %s made the streams", role)
		}
	}
	if names := streamNames(t, operator); len(names) > 0 {
		t.Fatalf("there are streams that the operator did not make: %q", names)
	}
	made, err := operator.Ensure(testContext(t), bus.StreamOptions{})
	if err != nil {
		t.Fatal(err)
	}
	denied := len(s.log.lines("Violation"))
	for role, conn := range conns {
		found, err := conn.Ensure(testContext(t), bus.StreamOptions{})
		if err != nil {
			t.Errorf("the %s looks for the streams: %v", role, err)
			continue
		}
		if found.CommandsID != made.CommandsID || found.ReadyID != made.ReadyID || len(found.Findings) > 0 {
			t.Errorf("the %s found %+v, the operator made %+v", role, found, made)
		}
		if err := conn.Health(testContext(t)); err != nil {
			t.Errorf("health of the %s: %v", role, err)
		}
	}
	if lines := s.log.lines("Violation"); len(lines) > denied {
		t.Errorf("looking for streams that are there was denied: %q", lines[denied:])
	}
}

func streamNames(t testing.TB, conn *bus.Conn) (names []string) {
	t.Helper()
	list := conn.JetStream().StreamNames(testContext(t))
	for name := range list.Name() {
		names = append(names, name)
	}
	if list.Err() != nil {
		t.Fatalf("listing streams: %v", list.Err())
	}
	return names
}

func TestPublisherPublishes(t *testing.T) {
	s := startDeployed(t)
	s.makeStreams("rv")
	p := bus.NewPublisher(s.connect("rv", "publisher"))
	in := claims.Input{ID: "in_1", Delivery: claims.Queue, Body: []byte(`1`)}
	var last uint64
	stored := func(what string, r bus.Receipt, err error) {
		t.Helper()
		if err != nil || r.Duplicate || r.Sequence <= last {
			t.Fatalf("%s after command %d: %+v, %v", what, last, r, err)
		}
		last = r.Sequence
	}
	r, err := p.Admit(testContext(t), "s1", in, bus.Publishing{})
	stored("admit", r, err)
	r, err = p.Wake(testContext(t), "s1", nil, time.Time{}, bus.Publishing{MsgID: "once"})
	stored("wake", r, err)
	r, err = p.Interrupt(testContext(t), "s1", bus.InterruptOptions{}, bus.Publishing{})
	stored("interrupt", r, err)
	if r, err = p.Wake(testContext(t), "s1", nil, time.Time{}, bus.Publishing{MsgID: "once"}); err != nil || !r.Duplicate {
		t.Errorf("the same wake again: %+v, %v, want a duplicate", r, err)
	}
	s.noViolations()
}

// TestObserverFollows: events from the first on and as they come, live text, the
// last of a session, and durables of its own.
func TestObserverFollows(t *testing.T) {
	s := startDeployed(t)
	s.makeStreams("rv")
	worker := s.connect("rv", "worker")
	observer := s.connect("rv", "observer")
	log := newEventLog()
	log.add("s1", claims.InputAdmitted, claims.SessionQuarantined)
	relay := bus.NewRelay(worker, log, bus.RelayOptions{})
	start(t, "the relay", relay.Run)
	relayed(t, relay, "s1")

	one, all := watch(t, observer, "s1", 1), watch(t, observer, "", 1)
	for seq := range int64(2) {
		for _, events := range []<-chan claims.Record{one, all} {
			if r := receive(t, "an event that was there", events); r.Seq != seq+1 {
				t.Fatalf("event %d comes, want %d", r.Seq, seq+1)
			}
		}
	}
	log.add("s1", claims.SessionReleased)
	relayed(t, relay, "s1")
	for _, events := range []<-chan claims.Record{one, all} {
		if r := receive(t, "an event as it comes", events); r.Seq != 3 {
			t.Fatalf("event %d comes, want 3", r.Seq)
		}
	}

	heard := make(chan bus.LiveText, 1)
	stop, err := bus.SubscribeLive(observer, "s1", func(l bus.LiveText) { heard <- l })
	if err != nil {
		t.Fatal(err)
	}
	defer stop()
	flush(t, observer)
	live := bus.NewLive(worker)
	start(t, "live text", live.Run)
	live.PublishLive("s1", 1, "step", "hello")
	if l := receive(t, "live text", heard); l.Text != "hello" {
		t.Errorf("live text is %+v", l)
	}

	for stream, subject := range map[string]string{"RV_EVENTS": "rv.event.s1", "RV_QUARANTINE": "rv.quarantine.s1"} {
		last, err := stream1(t, observer, stream).GetLastMsgForSubject(testContext(t), subject)
		if err != nil || last.Header.Get(bus.HeaderSeq) != "3" {
			t.Errorf("the last message on %s: %+v, %v", subject, last, err)
		}
		consumes(t, observer, stream, strings.TrimSuffix(subject, "s1")+"*")
	}
	s.noViolations()
}

func stream1(t testing.TB, conn *bus.Conn, name string) jetstream.Stream {
	t.Helper()
	st, err := conn.JetStream().Stream(testContext(t), name)
	if err != nil {
		t.Fatalf("stream %s: %v", name, err)
	}
	return st
}

// consumes takes the first message with a durable that keeps its place.
func consumes(t testing.TB, observer *bus.Conn, stream, filter string) {
	t.Helper()
	js := observer.JetStream()
	c, err := js.CreateConsumer(testContext(t), stream, jetstream.ConsumerConfig{
		Durable: "alerts", FilterSubject: filter, AckPolicy: jetstream.AckExplicitPolicy,
	})
	if err != nil {
		t.Fatalf("a durable on %s: %v", stream, err)
	}
	batch, err := c.Fetch(1, jetstream.FetchMaxWait(patience))
	if err != nil {
		t.Fatal(err)
	}
	m := receive(t, "a message of "+stream, batch.Messages())
	if m == nil {
		t.Fatalf("no message of %s: %v", stream, batch.Error())
	}
	if err := m.DoubleAck(testContext(t)); err != nil {
		t.Errorf("acknowledging on %s: %v", stream, err)
	}
	if c, err = js.Consumer(testContext(t), stream, "alerts"); err != nil { // as it does when it comes again
		t.Fatal(err)
	}
	if info := c.CachedInfo(); info.AckFloor.Consumer != 1 {
		t.Errorf("the durable on %s has acknowledged up to %d, want 1", stream, info.AckFloor.Consumer)
	}
	if err := js.DeleteConsumer(testContext(t), stream, "alerts"); err != nil {
		t.Errorf("deleting its durable on %s: %v", stream, err)
	}
}

// TestObserverOfOneSession: with a session's id in place of the "*", as README.md
// says, there is nothing of others to see.
func TestObserverOfOneSession(t *testing.T) {
	s := startDeployed(t, func(o *server.Options) {
		for _, u := range o.Users {
			if u.Username == "rv-observer" {
				for _, list := range [][]string{u.Permissions.Publish.Allow, u.Permissions.Subscribe.Allow} {
					for i := range list {
						list[i] = regexp.MustCompile(`\b(rv\.[a-z]+)\.\*$`).ReplaceAllString(list[i], "$1.s1")
					}
				}
			}
		}
	})
	s.makeStreams("rv")
	worker, observer := s.connect("rv", "worker"), s.connect("rv", "observer")
	log := newEventLog()
	log.add("s1", claims.InputAdmitted)
	log.add("s2", claims.InputAdmitted)
	relay := bus.NewRelay(worker, log, bus.RelayOptions{})
	start(t, "the relay", relay.Run)
	relayed(t, relay, "s2")
	relayed(t, relay, "s1")
	if r := receive(t, "an event of its session", watch(t, observer, "s1", 1)); r.Session != "s1" {
		t.Errorf("an event of session %s comes", r.Session)
	}
	if _, err := stream1(t, observer, "RV_EVENTS").GetLastMsgForSubject(testContext(t), "rv.event.s1"); err != nil {
		t.Error(err)
	}
	s.noViolations()
	const create = "$JS.API.CONSUMER.CREATE.RV_EVENTS.mine."
	for _, a := range append(publish(create+"rv.event.s2", create+"rv.event.*", "$JS.API.DIRECT.GET.RV_EVENTS.rv.event.s2"), subscribe("rv.live.s2", "rv.live.*")...) {
		denied(t, observer, a)
	}
	for _, filter := range []string{`"filter_subject":"rv.event.s2"`, `"filter_subject":"rv.event.*"`, `"filter_subjects":["rv.event.s1","rv.event.s2"]`, `"ack_policy":"none"`} {
		body := `{"stream_name":"RV_EVENTS","config":{"name":"mine",` + filter + `}}`
		m, err := observer.NATS().RequestWithContext(testContext(t), create+"rv.event.s1", []byte(body))
		if err != nil || !strings.Contains(string(m.Data), `"error"`) {
			t.Errorf("a consumer with %s: %v %s", filter, err, m.Data)
		}
	}
}

// watch follows events until the test ends.
func watch(t testing.TB, conn *bus.Conn, session claims.SessionID, from int64) <-chan claims.Record {
	events := make(chan claims.Record, 100)
	start(t, "the watch", func(ctx context.Context) error {
		return bus.Watch(ctx, conn, session, from, func(r claims.Record) error {
			events <- r
			return nil
		})
	})
	return events
}

// flush waits until the server knows of the subscriptions of a connection.
func flush(t testing.TB, conn *bus.Conn) {
	t.Helper()
	if err := conn.NATS().FlushTimeout(patience); err != nil {
		t.Fatal(err)
	}
}

func relayed(t testing.TB, relay *bus.Relay, session claims.SessionID) {
	t.Helper()
	if err := relay.RelayNow(testContext(t), session); err != nil {
		t.Fatal(err)
	}
}

// TestWorkerWorks: all of a worker that speaks NATS, on every way it has to ask
// or to answer the server.
func TestWorkerWorks(t *testing.T) {
	s := startDeployed(t)
	operator, streams := s.makeStreams("rv")
	publisher := s.connect("rv", "publisher")
	worker := s.connect("rv", "worker")

	holder := claims.HolderID("11111111-2222-3333-4444-555555555555")
	notices := make(chan claims.Notice, 1)
	stop, err := bus.SubscribeNotices(worker, holder, func(n claims.Notice) { notices <- n })
	if err != nil {
		t.Fatal(err)
	}
	defer stop()
	a, sl := newApplier(claims.Notice{Holder: holder, Session: "s1"}), newSlots()
	start(t, "the intake", bus.NewIntake(worker, a, bus.IntakeOptions{Logger: testLog(t)}).Run)
	start(t, "the ready queue", bus.NewReady(worker, sl, bus.ReadyOptions{Logger: testLog(t)}).Run)

	p := bus.NewPublisher(publisher)
	for _, session := range []claims.SessionID{"s1", "later", "unconfirmed"} {
		wake(t, p, session)
		if cmd := receive(t, "a command of session "+string(session), a.applied); cmd.Session != session || cmd.Kind != claims.Wake {
			t.Fatalf("%s of session %s is applied, want a wake of %s", cmd.Kind, cmd.Session, session)
		}
		if started := receive(t, "a start of session "+string(session), sl.started); started != session {
			t.Fatalf("session %s is started, want %s", started, session)
		}
	}
	if _, err := p.Interrupt(testContext(t), "s1", bus.InterruptOptions{}, bus.Publishing{}); err != nil {
		t.Fatal(err)
	}
	if n := receive(t, "the notice of an interrupt", notices); n.Session != "s1" {
		t.Errorf("the notice is of session %s", n.Session)
	}
	wake(t, p, "conflict")
	if _, err := publisher.JetStream().Publish(testContext(t), "rv.wake.s2", []byte(`no JSON`)); err != nil {
		t.Fatal(err)
	}
	eventually(t, "two commands are rejected, all are acknowledged", func() bool {
		return state(t, operator, "RV_REJECTED").Msgs == 2 && state(t, operator, "RV_COMMANDS").Msgs == 0 && state(t, operator, "RV_READY").Msgs == 0
	})
	relays(t, worker, operator)
	if !strings.HasPrefix(streams.Intake(), "intake-") { // what is denied in other tests is named after these
		t.Errorf("the durable of commands is %q", streams.Intake())
	}
	s.noViolations()
}

func wake(t testing.TB, p *bus.Publisher, session claims.SessionID) {
	t.Helper()
	in := claims.Input{ID: "in_1", Delivery: claims.Queue, Body: []byte(`1`)}
	if _, err := p.Wake(testContext(t), session, &in, time.Time{}, bus.Publishing{}); err != nil {
		t.Fatal(err)
	}
}

func state(t testing.TB, conn *bus.Conn, stream string) jetstream.StreamState {
	t.Helper()
	return stream1(t, conn, stream).CachedInfo().State
}

// relays relays, verifies and repairs, as a worker and a scanner both do.
func relays(t testing.TB, conn, operator *bus.Conn) {
	t.Helper()
	log := newEventLog()
	log.add("relayed", claims.InputAdmitted, claims.SessionQuarantined, claims.SessionReleased)
	relay := bus.NewRelay(conn, log, bus.RelayOptions{Logger: testLog(t)})
	start(t, "the relay", relay.Run)
	relayed(t, relay, "relayed")
	if n := state(t, operator, "RV_QUARANTINE").Msgs; n != 2 {
		t.Errorf("%d copies are in the stream of quarantines, want 2", n)
	}
	// Another relay, which knows nothing of this one, is refused and looks where the stream ends.
	log.forget("relayed")
	other := bus.NewRelay(conn, log, bus.RelayOptions{Logger: testLog(t)})
	start(t, "another relay", other.Run)
	relayed(t, other, "relayed")

	log.add("lost", claims.InputAdmitted, claims.TextEvent)
	marks := append(log.noted("lost"), log.noted("relayed")...)
	short, err := relay.Verify(testContext(t), marks)
	if err != nil || fmt.Sprint(short) != "[lost]" {
		t.Fatalf("verifying says %v, %v, want [lost]", short, err)
	}
	if n, err := relay.Repair(testContext(t), "lost", false); err != nil || n != 2 {
		t.Fatalf("repairing publishes %d events, %v, want 2", n, err)
	}
	if short, err = relay.Verify(testContext(t), marks); err != nil || len(short) > 0 {
		t.Errorf("after the repair, verifying says %v, %v", short, err)
	}
	if n := state(t, operator, "RV_EVENTS").Msgs; n != 5 {
		t.Errorf("%d events are in the stream, want 5", n)
	}
}

// TestScannerWorks: it announces, relays and mends.
func TestScannerWorks(t *testing.T) {
	s := startDeployed(t)
	operator, _ := s.makeStreams("rv")
	scanner := s.connect("rv", "scanner")
	announcer := bus.NewAnnouncer(scanner)
	for range 2 { // the second is refused, which is as good
		if err := announcer.Announce(testContext(t), "s1"); err != nil {
			t.Fatal(err)
		}
	}
	if n := state(t, operator, "RV_READY").Msgs; n != 1 {
		t.Errorf("%d announcements are in the queue, want 1", n)
	}
	relays(t, scanner, operator)
	s.noViolations()
}

// TestOperatorOperates: streams and durables are made, changed, read, purged and
// deleted; commands are sent and followed; what a stream lost is published again.
func TestOperatorOperates(t *testing.T) {
	s := startDeployed(t)
	operator, streams := s.makeStreams("rv")
	js := operator.JetStream()
	rejected := make(chan *nats.Msg, 1)
	if _, err := operator.NATS().ChanSubscribe("rv.rejected.*", rejected); err != nil {
		t.Fatal(err)
	}
	flush(t, operator)
	start(t, "the intake", bus.NewIntake(s.connect("rv", "worker"), newApplier(claims.Notice{Holder: "somebody"}), bus.IntakeOptions{}).Run)
	wake(t, bus.NewPublisher(operator), "conflict")
	receive(t, "a rejected command", rejected)
	in := claims.Input{ID: "in_1", Delivery: claims.Queue, Body: []byte(`1`)}
	if _, err := bus.NewPublisher(operator).Admit(testContext(t), "s1", in, bus.Publishing{}); err != nil {
		t.Error(err)
	}
	if _, err := bus.NewPublisher(operator).Interrupt(testContext(t), "s1", bus.InterruptOptions{}, bus.Publishing{}); err != nil {
		t.Error(err)
	}
	relays(t, operator, operator)
	events := watch(t, operator, "relayed", 1)
	if r := receive(t, "an event", events); r.Seq != 1 {
		t.Errorf("the first event is %d", r.Seq)
	}

	if err := stream1(t, operator, "RV_REJECTED").Purge(testContext(t)); err != nil {
		t.Errorf("purging: %v", err)
	}
	config := stream1(t, operator, "RV_EVENTS").CachedInfo().Config
	config.MaxAge *= 2
	if _, err := js.UpdateStream(testContext(t), config); err != nil {
		t.Errorf("changing the retention: %v", err)
	}
	if err := js.DeleteConsumer(testContext(t), "RV_READY", streams.Ready()); err != nil {
		t.Errorf("deleting a durable: %v", err)
	}
	if err := js.DeleteStream(testContext(t), "RV_READY"); err != nil {
		t.Errorf("deleting a stream: %v", err)
	}
	again, err := operator.Ensure(testContext(t), bus.StreamOptions{})
	if err != nil || again.ReadyID == streams.ReadyID {
		t.Errorf("making what is missing: %+v, %v", again, err)
	}
	// Five streams are all that Reveille has, and all that its account may have.
	if _, err := js.CreateStream(testContext(t), jetstream.StreamConfig{Name: "OTHER", Subjects: []string{"other"}}); !isLimit(err) {
		t.Errorf("a sixth stream: %v, want the account's limit", err)
	}
	s.noViolations()
}

func isLimit(err error) bool {
	var api *jetstream.APIError
	return errors.As(err, &api) && strings.Contains(api.Description, "maximum number of streams")
}

// TestAnswersComeToTheUsersOwnInbox: which is all that permissions let it hear.
func TestAnswersComeToTheUsersOwnInbox(t *testing.T) {
	s := startDeployed(t)
	for _, ns := range namespaces {
		for _, role := range roles {
			conn := s.connect(ns, role)
			if got, want := conn.NATS().NewInbox(), fmt.Sprintf("_INBOX.%s-%s.", ns, role); !strings.HasPrefix(got, want) {
				t.Errorf("answers to %s of %s come on %q, want them below %q", role, ns, got, want)
			}
		}
	}
	s.noViolations()
}

// TestDoctorAsksForNoMore: what reveille doctor tries as a role is what the role
// has, so that its advice, to do as deploy/nats does, helps.
func TestDoctorAsksForNoMore(t *testing.T) {
	s := startDeployed(t)
	operator, _ := s.makeStreams("rv")
	inspection, err := operator.Inspect(testContext(t), bus.StreamOptions{})
	if err != nil {
		t.Fatal(err)
	}
	if len(bus.Roles()) != len(roles) {
		t.Errorf("roles are %q, of deploy/nats %q", bus.Roles(), roles)
	}
	for _, role := range bus.Roles() {
		lacks, err := s.connect("rv", string(role)).Permissions(testContext(t), []bus.Role{role}, inspection)
		if err != nil {
			t.Errorf("%s: %v", role, err)
		}
		for _, lack := range lacks {
			t.Errorf("%s can't %s: %v", role, lack.Need, lack.Err)
		}
	}
	s.noViolations()
}

// info is what a stream and its consumers are like, as far as anybody could
// change it.
func info(t testing.TB, operator *bus.Conn, stream string) string {
	t.Helper()
	st := stream1(t, operator, stream)
	var consumers []jetstream.ConsumerConfig
	list := st.ListConsumers(testContext(t))
	for c := range list.Info() {
		consumers = append(consumers, c.Config)
	}
	if list.Err() != nil {
		t.Fatal(list.Err())
	}
	i := st.CachedInfo()
	text, err := json.Marshal([]any{i.Config, i.Created, i.State.Msgs, i.State.FirstSeq, i.State.LastSeq, consumers})
	if err != nil {
		t.Fatal(err)
	}
	return string(text)
}

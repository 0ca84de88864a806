package bus

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/nats-io/nats-server/v2/server"
	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"reveille/claims"
)

// configured starts a server with a configuration; %s in it is a folder for its store.
func configured(t *testing.T, conf string) *server.Server {
	t.Helper()
	file := filepath.Join(t.TempDir(), "nats.conf")
	if err := os.WriteFile(file, []byte(strings.ReplaceAll(conf, "%s", t.TempDir())), 0o600); err != nil {
		t.Fatal(err)
	}
	o, err := server.ProcessConfigFile(file)
	if err != nil {
		t.Fatal(err)
	}
	o.Host, o.Port, o.NoSigs, o.NoLog = "127.0.0.1", server.RANDOM_PORT, true, true
	s, err := server.NewServer(o)
	if err != nil {
		t.Fatal(err)
	}
	s.Start()
	t.Cleanup(func() { s.Shutdown(); s.WaitForShutdown() })
	if !s.ReadyForConnections(20 * time.Second) {
		t.Fatal("the NATS server is not ready after 20 s")
	}
	return s
}

// connectAs connects a user of a server; its password is its name.
func connectAs(t *testing.T, s *server.Server, user string) *Conn {
	t.Helper()
	c, err := Connect(testContext(t), Options{URL: "nats://" + user + ":" + user + "@" + s.Addr().String(), Name: user})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(c.Close)
	return c
}

func inspect(t *testing.T, c *Conn, o StreamOptions) *Inspection {
	t.Helper()
	in, err := c.Inspect(testContext(t), o)
	if err != nil {
		t.Fatal(err)
	}
	return in
}

// amiss are an inspection's findings, one a line.
func amiss(in *Inspection) string {
	var out []string
	for _, s := range in.Streams {
		for _, d := range s.Differences {
			out = append(out, s.Want.Name+" "+d.Setting)
		}
		if s.Err != nil {
			out = append(out, s.Want.Name+": "+s.Err.Error())
		} else if !s.OwnID {
			out = append(out, s.Want.Name+" by hand")
		}
	}
	for _, d := range in.Durables {
		name, _, _ := strings.Cut(d.Want.Durable, "-")
		for _, d := range d.Differences {
			out = append(out, name+" "+d.Setting)
		}
		if d.Err != nil {
			out = append(out, name+": "+d.Err.Error())
		}
	}
	return strings.Join(out, "\n")
}

// snapshot is all that a server keeps in JetStream, as far as anybody could have changed it.
func snapshot(t *testing.T, c *Conn) string {
	t.Helper()
	var out []string
	streams := c.js.ListStreams(testContext(t))
	for s := range streams.Info() {
		out = append(out, fmt.Sprint(s.Config, s.Created, s.State.Msgs, s.State.FirstSeq, s.State.LastSeq))
		st, err := c.js.Stream(testContext(t), s.Config.Name)
		if err != nil {
			t.Fatal(err)
		}
		consumers := st.ListConsumers(testContext(t))
		for i := range consumers.Info() {
			out = append(out, fmt.Sprint(i.Config, i.Created, i.Delivered.Consumer, i.Delivered.Stream, i.AckFloor.Consumer, i.AckFloor.Stream,
				i.NumAckPending, i.NumRedelivered, i.NumWaiting, i.NumPending))
		}
		if err := consumers.Err(); err != nil {
			t.Fatal(err)
		}
	}
	if err := streams.Err(); err != nil {
		t.Fatal(err)
	}
	slices.Sort(out)
	return strings.Join(out, "\n")
}

// TestInspectMakesNothing of what is missing.
func TestInspectMakesNothing(t *testing.T) {
	c := startServer(t).connect()
	in := inspect(t, c, StreamOptions{})
	if len(in.Streams) != 5 || len(in.Durables) != 0 {
		t.Errorf("%d streams and %d durables, want 5 and none", len(in.Streams), len(in.Durables))
	}
	for _, s := range in.Streams {
		if !s.Missing() || s.Info != nil {
			t.Errorf("stream %s: %v", s.Want.Name, s.Err)
		}
	}
	if got := snapshot(t, c); got != "" {
		t.Errorf("there is now:\n%s", got)
	}
}

func TestInspectAgreesWithEnsure(t *testing.T) {
	c, st := startServer(t).connectWith(StreamOptions{MaxAckPending: 16})
	in := inspect(t, c, StreamOptions{}) // what is enough for max_ack_pending is not judged here
	if got := amiss(in); got != "" {
		t.Errorf("of streams that were just made:\n%s", got)
	}
	var names []string
	for _, d := range in.Durables {
		names = append(names, d.Stream+" "+d.Want.Durable)
		if d.Info == nil || d.Info.Config.MaxAckPending != 16 {
			t.Errorf("durable %s: %+v", d.Want.Durable, d.Info)
		}
	}
	want := []string{"RV_COMMANDS " + st.Intake(), "RV_COMMANDS " + st.Interrupts(), "RV_READY " + st.Ready()}
	if !slices.Equal(names, want) {
		t.Errorf("durables are %q, want %q", names, want)
	}
}

func TestInspectTellsDifferences(t *testing.T) {
	c, st := startServer(t).connectWith(StreamOptions{})
	ctx := testContext(t)
	change := func(name string, f func(*jetstream.StreamConfig)) {
		t.Helper()
		info, err := streamInfo(ctx, c.js, name)
		if err != nil {
			t.Fatal(err)
		}
		f(&info.Config)
		if _, err := c.js.UpdateStream(ctx, info.Config); err != nil {
			t.Fatal(err)
		}
	}
	change("RV_EVENTS", func(c *jetstream.StreamConfig) { c.MaxAge, c.MaxBytes = time.Hour, 1<<30 })
	change("RV_READY", func(c *jetstream.StreamConfig) { c.Metadata = nil })
	if err := c.js.DeleteStream(ctx, "RV_REJECTED"); err != nil {
		t.Fatal(err)
	}
	if err := c.js.DeleteConsumer(ctx, "RV_COMMANDS", st.Intake()); err != nil {
		t.Fatal(err)
	}
	interrupts, err := consumerInfo(ctx, c.js, "RV_COMMANDS", st.Interrupts())
	if err != nil {
		t.Fatal(err)
	}
	interrupts.Config.AckWait = time.Minute
	if _, err := c.js.UpdateConsumer(ctx, "RV_COMMANDS", interrupts.Config); err != nil {
		t.Fatal(err)
	}
	in := inspect(t, c, StreamOptions{Replicas: 3})
	const want = `RV_COMMANDS replicas
RV_READY replicas
RV_READY by hand
RV_EVENTS replicas
RV_EVENTS max_age
RV_EVENTS limits
RV_QUARANTINE replicas
RV_REJECTED: nats: API error: code=404 err_code=10059 description=stream not found
intake: nats: API error: code=404 err_code=10014 description=consumer not found
interrupts ack_wait
ready: nats: API error: code=404 err_code=10014 description=consumer not found`
	if got := amiss(in); got != want {
		t.Errorf("got:\n%s\nwant:\n%s", got, want)
	}
	if d := in.Durables[0]; !errors.Is(d.Err, jetstream.ErrConsumerNotFound) {
		t.Errorf("a deleted durable: %v", d.Err)
	}
}

// TestPermissionsChangeNothing: who may do all lacks nothing, and trying it stores, takes and acknowledges nothing.
func TestPermissionsChangeNothing(t *testing.T) {
	c, st := startServer(t).connectWith(StreamOptions{})
	publishAll(t, c, wake("s1", "1"), wake("s2", "2"), claims.Command{Kind: claims.Interrupt, Session: "s1"})
	fetch(t, c, st, st.Intake(), 1)
	if err := NewAnnouncer(c).Announce(testContext(t), "s1"); err != nil {
		t.Fatal(err)
	}
	before := snapshot(t, c)
	in := inspect(t, c, StreamOptions{})
	if lacks, err := c.Permissions(testContext(t), Roles(), in); err != nil || len(lacks) > 0 {
		t.Errorf("a user who may do all lacks %v, %v", lacks, err)
	}
	if after := snapshot(t, c); after != before {
		t.Errorf("before:\n%s\nafter:\n%s", before, after)
	}
	empty := startServer(t).connect()
	if lacks, err := empty.Permissions(testContext(t), Roles(), inspect(t, empty, StreamOptions{})); err != nil || len(lacks) > 0 {
		t.Errorf("on a server without streams it lacks %v, %v", lacks, err)
	}
	if got := snapshot(t, empty); got != "" {
		t.Errorf("on a server without streams there is now:\n%s", got)
	}
}

// spy answers every request as a server without streams would, and shows what was asked.
func spy(t *testing.T, s *server.Server) (asked func() []*nats.Msg) {
	t.Helper()
	nc, err := nats.Connect(s.ClientURL())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(nc.Close)
	seen := make(chan *nats.Msg, 10_000)
	_, err = nc.Subscribe(">", func(m *nats.Msg) {
		if m.Reply != "" {
			_ = m.Respond([]byte(`{"error":{"code":404,"err_code":10059,"description":"stream not found"}}`))
		}
		if !strings.HasPrefix(m.Subject, "_INBOX.") {
			seen <- m
		}
	})
	if err != nil {
		t.Fatal(err)
	}
	if err := nc.Flush(); err != nil {
		t.Fatal(err)
	}
	return func() (out []*nats.Msg) {
		if err := nc.Flush(); err != nil {
			t.Fatal(err)
		}
		for {
			select {
			case m := <-seen:
				out = append(out, m)
			default:
				return out
			}
		}
	}
}

// TestDoctorAsksHarmlessly: nothing that it sends could take, store, acknowledge, make or delete something, whatever the
// server has.
func TestDoctorAsksHarmlessly(t *testing.T) {
	s := configured(t, `server_name: spied`)
	asked := spy(t, s)
	c, err := Connect(testContext(t), Options{URL: s.ClientURL()})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(c.Close)
	in := inspect(t, c, StreamOptions{})
	if _, err := c.Permissions(testContext(t), Roles(), in); err != nil {
		t.Fatal(err)
	}
	all := asked()
	if len(all) < 40 {
		t.Fatalf("%d messages were seen: the spy is blind", len(all))
	}
	kinds := map[string]bool{}
	for _, m := range all {
		verb, isAPI := strings.CutPrefix(m.Subject, "$JS.API.")
		body := string(m.Data)
		harmless := false
		switch {
		case strings.HasPrefix(m.Subject, "$JS.ACK."):
			harmless = strings.HasSuffix(m.Subject, ".0.0.0.0.0") && body == "reveille-doctor"
			verb = "ack"
		case !isAPI:
			verb = "publish"
			harmless = m.Header.Get("Nats-Expected-Stream") == "reveille-doctor" && m.Reply != "" ||
				strings.HasPrefix(m.Subject, "rv.live.") || strings.HasPrefix(m.Subject, "rv.worker.")
		case strings.HasPrefix(verb, "STREAM.CREATE.RV_"), strings.HasPrefix(verb, "STREAM.UPDATE.RV_"):
			harmless = body == `{"name":"reveille-doctor"}`
		case verb == "STREAM.PURGE.RV_READY": // of what nobody announces, up to before the first message
			harmless = body == `{"filter":"rv.ready.reveille-doctor","seq":1}`
		case strings.HasPrefix(verb, "CONSUMER.CREATE.RV_"):
			harmless = strings.Contains(body, `"stream_name":"reveille-doctor"`)
		case strings.HasPrefix(verb, "STREAM.INFO."), strings.HasPrefix(verb, "CONSUMER.INFO."),
			strings.HasPrefix(verb, "DIRECT.GET."), strings.HasPrefix(verb, "STREAM.MSG.GET."):
			harmless = true
		}
		if !harmless {
			t.Errorf("it sent %s with %v and %q", m.Subject, m.Header, body)
		}
		kinds[strings.Split(verb, ".RV_")[0]] = true
	}
	if len(kinds) != 10 {
		t.Errorf("it tried %v, want 10 kinds of things", kinds)
	}
}

// deployed is what deploy/nats has for the namespace rv, each user's password its name.
func deployed(t *testing.T) *server.Server {
	t.Helper()
	for _, role := range Roles() {
		t.Setenv("RV_"+strings.ToUpper(string(role))+"_PASSWORD", "rv-"+string(role))
	}
	file, err := filepath.Abs("../deploy/nats/rv.conf")
	if err != nil {
		t.Fatal(err)
	}
	// A file is included by its path from the folder of the one that includes it; all folders of a test are neighbours.
	back, err := filepath.Rel(t.TempDir(), file)
	if err != nil {
		t.Fatal(err)
	}
	return configured(t, "jetstream { store_dir: \"%s\", max_mem: 64MB, max_file: 20GB }\naccounts { include \"./"+back+"\" }")
}

// TestRolesOfDeployHaveWhatTheyNeed, and no other role's needs but where these are part of their own.
func TestRolesOfDeployHaveWhatTheyNeed(t *testing.T) {
	s := deployed(t)
	if _, err := connectAs(t, s, "rv-operator").Ensure(testContext(t), StreamOptions{}); err != nil {
		t.Fatal(err)
	}
	for _, user := range Roles() {
		c := connectAs(t, s, "rv-"+string(user))
		in := inspect(t, c, StreamOptions{})
		for _, role := range Roles() {
			lacks, err := c.Permissions(testContext(t), []Role{role}, in)
			if err != nil {
				t.Fatal(err)
			}
			within := role == user || user == RoleOperator && role != RoleWorker && role != RoleScanner
			switch {
			case within && len(lacks) > 0:
				t.Errorf("the user %s lacks as %s: %v", user, role, lacks)
			case !within && len(lacks) == 0:
				t.Errorf("the user %s lacks nothing as %s", user, role)
			}
			for _, l := range lacks {
				if !errors.Is(l.Err, ErrDenied) {
					t.Errorf("the user %s as %s: %s: %v, want denied", user, role, l.Need, l.Err)
				}
			}
		}
	}
}

const limited = `
jetstream { store_dir: "%s" }
accounts { A {
	jetstream: enabled
	users: [
		{ user: all, password: all }
		{ user: deaf, password: deaf, permissions: { subscribe: { deny: "_INBOX.>" } } }
		{ user: mute, password: mute, permissions: { publish: { deny: [
			"rv.rejected.*", "$JS.API.STREAM.MSG.GET.RV_COMMANDS", "$JS.ACK.RV_READY.>", "rv.worker.*.notice" ] }, subscribe: { deny: "rv.live.>" } } }
		{ user: blind, password: blind, permissions: { publish: { deny: [ "$JS.API.STREAM.INFO.RV_READY", "$JS.API.INFO" ] } } }
	]
}, B { users: [ { user: bare, password: bare } ] } }`

func TestPermissionsNameWhatIsDenied(t *testing.T) {
	s := configured(t, limited)
	_, err := connectAs(t, s, "all").Ensure(testContext(t), StreamOptions{})
	if err != nil {
		t.Fatal(err)
	}
	c := connectAs(t, s, "mute")
	in := inspect(t, c, StreamOptions{})
	ready := in.Durables[2].Want.Durable
	for role, want := range map[Role][]string{
		RolePublisher: nil,
		RoleScanner:   nil,
		RoleObserver:  {"subscribe to rv.live.*"},
		RoleOperator:  {"subscribe to rv.live.*"},
		RoleWorker: {
			"publish rv.rejected.*", "publish rv.worker.*.notice", "publish $JS.ACK.RV_READY." + ready + ".>",
			"publish $JS.API.STREAM.MSG.GET.RV_COMMANDS",
		},
	} {
		lacks, err := c.Permissions(testContext(t), []Role{role}, in)
		if err != nil {
			t.Fatal(err)
		}
		var got []string
		for _, l := range lacks {
			got = append(got, l.Need)
			if !errors.Is(l.Err, ErrDenied) {
				t.Errorf("%s: %v", l.Need, l.Err)
			}
		}
		if !slices.Equal(got, want) {
			t.Errorf("a %s lacks %q, want %q", role, got, want)
		}
	}

	if _, err := connectAs(t, s, "deaf").Inspect(testContext(t), StreamOptions{}); !errors.Is(err, ErrNoInbox) || !strings.Contains(err.Error(), "_INBOX.deaf.") {
		t.Errorf("without an inbox: %v", err)
	}
	blind := connectAs(t, s, "blind")
	in = inspect(t, blind, StreamOptions{})
	if got := amiss(in); got != "RV_READY: denied" || len(in.Durables) != 2 {
		t.Errorf("where a stream may not be looked at: %s, %d durables", got, len(in.Durables))
	}
	if err := blind.CheckJetStream(testContext(t)); !errors.Is(err, ErrDenied) {
		t.Errorf("where JetStream may not be asked for: %v", err)
	}
	if err := c.CheckJetStream(testContext(t)); err != nil {
		t.Errorf("JetStream: %v", err)
	}
	if err := connectAs(t, s, "bare").CheckJetStream(testContext(t)); err == nil || errors.Is(err, ErrDenied) {
		t.Errorf("an account without JetStream: %v", err)
	}
}

// TestPermissionsAreNotBlamed for what the inspection has found: a stream that does not take a subject, or takes it
// without a word.
func TestPermissionsAreNotBlamed(t *testing.T) {
	c, _ := startServer(t).connectWith(StreamOptions{})
	for name, change := range map[string]func(*jetstream.StreamConfig){
		"RV_COMMANDS": func(c *jetstream.StreamConfig) { c.Subjects, c.AllowDirect = []string{"rv.wake.*"}, false },
		"RV_READY":    func(c *jetstream.StreamConfig) { c.NoAck = true },
	} {
		info, err := streamInfo(testContext(t), c.js, name)
		if err != nil {
			t.Fatal(err)
		}
		change(&info.Config)
		if _, err := c.js.UpdateStream(testContext(t), info.Config); err != nil {
			t.Fatal(err)
		}
	}
	in := inspect(t, c, StreamOptions{})
	if got, want := amiss(in), "RV_COMMANDS subjects\nRV_COMMANDS allow_direct\nRV_READY no_ack"; got != want {
		t.Errorf("got:\n%s\nwant:\n%s", got, want)
	}
	if lacks, err := c.Permissions(testContext(t), Roles(), in); err != nil || len(lacks) > 0 {
		t.Errorf("it lacks %v, %v", lacks, err)
	}
	for _, name := range []string{"RV_COMMANDS", "RV_READY"} {
		if n := messages(t, c, name); n > 0 {
			t.Errorf("%s has %d messages", name, n)
		}
	}
}

// TestSilence: who does not answer costs the time that the caller gave, once, and is told from who is not there.
func TestSilence(t *testing.T) {
	s := configured(t, `server_name: silent`)
	c, err := Connect(testContext(t), Options{URL: s.ClientURL()})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(c.Close)
	if err := c.CheckJetStream(testContext(t)); !errors.Is(err, ErrNobody) {
		t.Errorf("a server without JetStream: %v", err)
	}
	for _, st := range inspect(t, c, StreamOptions{}).Streams {
		if !errors.Is(st.Err, ErrNobody) {
			t.Errorf("stream %s: %v", st.Want.Name, st.Err)
		}
	}
	if _, err := c.nc.Subscribe(">", func(*nats.Msg) {}); err != nil { // takes all and says nothing
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(testContext(t), 100*time.Millisecond)
	defer cancel()
	in, err := c.Inspect(ctx, StreamOptions{})
	if err != nil {
		t.Fatal(err)
	}
	for _, st := range in.Streams {
		if !errors.Is(st.Err, ErrNoAnswer) {
			t.Errorf("stream %s of a silent server: %v", st.Want.Name, st.Err)
		}
	}
	if err := ctx.Err(); err == nil {
		t.Error("it did not wait for the answers")
	}
}

func TestStreamTime(t *testing.T) {
	c, _ := startServer(t).connectWith(StreamOptions{})
	before := time.Now()
	at, err := c.StreamTime(testContext(t), "RV_EVENTS")
	if err != nil || at.Before(before.Add(-time.Second)) || at.After(time.Now().Add(time.Second)) {
		t.Errorf("the stream's time is %v, %v", at, err)
	}
	if err := c.CheckServer(); err != nil {
		t.Error(err)
	}
}

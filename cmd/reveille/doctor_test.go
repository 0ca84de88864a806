package main

import (
	"context"
	"encoding/json"
	"encoding/pem"
	"fmt"
	"net"
	"net/http/httptest"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/nats-io/nats-server/v2/server"
	"github.com/nats-io/nats.go/jetstream"

	"reveille/bus"
	"reveille/claims"
	"reveille/claims/crdb"
	"reveille/cmd/reveille/internal/doctor"
	"reveille/internal/dbtest"
	"reveille/internal/faultproxy"
)

// patient is a deployment without processes: a database, NATS, streams, and leases that look like a worker's and a scanner's.
type patient struct {
	*ward
	nats *server.Server
	user string // of NATS; its password is its name
	conn *bus.Conn
	args string // of every doctor
}

// startNATS starts a server of the test's own.
func startNATS(t *testing.T, o *server.Options) *server.Server {
	t.Helper()
	o.Host, o.NoSigs, o.NoLog, o.StoreDir = "127.0.0.1", true, true, t.TempDir()
	if o.Port == 0 {
		o.Port = server.RANDOM_PORT
	}
	s, err := server.NewServer(o)
	if err != nil {
		t.Fatal(err)
	}
	go s.Start()
	t.Cleanup(func() { s.Shutdown(); s.WaitForShutdown() })
	if !s.ReadyForConnections(30 * time.Second) {
		t.Fatal("the NATS server does not take connections")
	}
	return s
}

// newPatient is one that lacks nothing.
func newPatient(t *testing.T) *patient { return newPatientOn(t, &server.Options{JetStream: true}, "") }

// newPatientOn has its NATS server with these options; where that has users, user may do all.
func newPatientOn(t *testing.T, o *server.Options, user string) *patient {
	t.Helper()
	p := &patient{ward: newWard(t), nats: startNATS(t, o), user: user}
	p.lease("worker", "v1", 8)
	p.lease("scanner", "v1", 0)
	p.conn = p.connect()
	_, err := p.conn.Ensure(t.Context(), bus.StreamOptions{})
	p.ok(err)
	return p
}

var streamNames = []string{"RV_COMMANDS", "RV_READY", "RV_EVENTS", "RV_QUARANTINE", "RV_REJECTED"}

func (p *patient) natsURL() string {
	if p.user == "" {
		return "nats://" + p.nats.Addr().String()
	}
	return "nats://" + p.user + ":" + p.user + "@" + p.nats.Addr().String()
}

func (p *patient) connect() *bus.Conn {
	p.t.Helper()
	conn, err := bus.Connect(p.t.Context(), bus.Options{URL: p.natsURL()})
	p.ok(err)
	p.t.Cleanup(conn.Close)
	return conn
}

func (p *patient) lease(kind, version string, slots int) claims.HolderID {
	p.t.Helper()
	holder := claims.HolderID(uuid.NewString())
	p.ok(p.store.OpenLease(p.t.Context(), claims.Lease{Holder: holder, Kind: kind, Name: kind + "-1", Version: version, Slots: slots}, time.Hour))
	return holder
}

func (p *patient) sql(statement string, args ...any) {
	p.t.Helper()
	conn, err := pgx.Connect(p.t.Context(), p.url)
	p.ok(err)
	defer conn.Close(p.t.Context())
	tag, err := conn.Exec(p.t.Context(), statement, args...)
	p.ok(err)
	if tag.RowsAffected() == 0 {
		p.t.Fatalf("%s: no rows", statement)
	}
}

// edit changes a stream as nats stream edit does.
func (p *patient) edit(stream string, f func(*jetstream.StreamConfig)) {
	p.t.Helper()
	s, err := p.conn.JetStream().Stream(p.t.Context(), stream)
	p.ok(err)
	c := s.CachedInfo().Config
	f(&c)
	_, err = p.conn.JetStream().UpdateStream(p.t.Context(), c)
	p.ok(err)
}

// intake is the durable of commands.
func (p *patient) intake() string {
	p.t.Helper()
	s, err := p.conn.Ensure(p.t.Context(), bus.StreamOptions{})
	p.ok(err)
	return s.Intake()
}

// unhurried is longer than anything takes, so that a busy machine is no finding.
const unhurried = " --timeout 60s --max-clock-skew 60s "

// doctor runs the command and returns its findings and exit code.
func (p *patient) doctor(args string) (found []doctor.Finding, code int) {
	p.t.Helper()
	line := "doctor --json --nats-url " + p.natsURL() + " --database-url " + p.url + unhurried + p.args + " " + args
	stdout, stderr, code := call(p.t, strings.Fields(line)...)
	for l := range strings.Lines(stdout) {
		var f doctor.Finding
		if err := json.Unmarshal([]byte(l), &f); err != nil {
			p.t.Fatalf("%q: %v", l, err)
		}
		found = append(found, f)
	}
	if failed := slices.ContainsFunc(found, func(f doctor.Finding) bool { return f.Status == doctor.Fail }); failed != (code == 1) || code > 1 {
		p.t.Fatalf("exit %d of:\n%s%s", code, stdout, stderr)
	}
	return found, code
}

// amiss are the findings that are not ok, without what differs from run to run.
func amiss(found []doctor.Finding) (out []string) {
	for _, f := range found {
		if (f.Status == doctor.OK) != (f.Fix == "") {
			out = append(out, fmt.Sprintf("%+v: a finding that is not ok says what to do, and only that", f))
		}
		if f.Status != doctor.OK {
			out = append(out, plain(fmt.Sprintf("%s %s: %s; fix: %s", f.Status, f.Check, f.Found, f.Fix)))
		}
	}
	return out
}

// changing are things that differ from run to run, and what stands for them.
var changing = []struct {
	pattern *regexp.Regexp
	as      string
}{
	{regexp.MustCompile(`(intake|interrupts|ready)-[0-9a-z]{32}`), "$1-ID"},
	{regexp.MustCompile(`127\.0\.0\.1:\d+`), "127.0.0.1:PORT"},
	{regexp.MustCompile(`\b[A-Z2-7]{56}\b`), "SERVER"},
	{regexp.MustCompile(`(PostgreSQL|CockroachDB) [0-9.]+`), "$1 N"},
	{regexp.MustCompile(`SERVER \d+\.\d+\.\d+`), "SERVER N"},
	{regexp.MustCompile(`(is) \S+ (ahead of|behind) (the database|this machine), give or take \S+`), "$1 TIME off $3, give or take TIME"},
	{regexp.MustCompile(`_INBOX\.[A-Za-z0-9]{22}\.`), "_INBOX.NUID."},
	{regexp.MustCompile(`\.[A-Za-z0-9]{22}\.\*`), ".NUID.*"},
}

func plain(text string) string {
	for _, c := range changing {
		text = c.pattern.ReplaceAllString(text, c.as)
	}
	return text
}

func (p *patient) healthy(what, args string) {
	p.t.Helper()
	if found, _ := p.doctor(args); len(amiss(found)) > 0 {
		p.t.Errorf("%s:\n%s", what, strings.Join(amiss(found), "\n"))
	}
}

func TestDoctorFindsNothingAmiss(t *testing.T) {
	t.Parallel()
	p := newPatient(t)
	p.healthy("a healthy deployment", "")
	for _, role := range bus.Roles() {
		p.healthy("as "+string(role), "--role "+string(role))
	}
	line := "doctor --nats-url " + p.natsURL() + " --database-url " + p.url + unhurried
	stdout, stderr, code := call(t, strings.Fields(line)...)
	if code != 0 || stderr != "" {
		t.Errorf("exit %d with %q", code, stderr)
	}
	golden(t, "testdata/doctor.golden", []byte(plain(stdout)))
}

// fault is one thing that is wrong, the lines that tell, and what its fix does.
type fault struct {
	name  string
	args  string
	does  func(*patient)
	want  []string
	fixed func(*patient) // nil: shown elsewhere
}

func (f fault) test(t *testing.T) {
	t.Parallel()
	p := newPatient(t)
	f.does(p)
	found, _ := p.doctor(f.args)
	if got := amiss(found); !slices.Equal(got, f.want) {
		t.Errorf("got:\n%s\nwant:\n%s", strings.Join(got, "\n"), strings.Join(f.want, "\n"))
	}
	if f.fixed != nil {
		f.fixed(p)
		p.healthy("after the fix", f.args)
	}
}

// publishAgain is the fix of what is missing.
func publishAgain(p *patient) { p.reveille(0, "relay --rebuild --nats-url "+p.natsURL()) }

func TestDoctorDatabaseFaults(t *testing.T) {
	t.Parallel()
	migrate := func(p *patient) { p.reveille(0, "migrate") }
	for _, f := range []fault{
		{
			"old schema", "", func(p *patient) {
				p.sql("DELETE FROM goose_db_version WHERE version_id = (SELECT max(version_id) FROM goose_db_version)")
			},
			[]string{"FAIL schema: it is version 17, this program needs 18; fix: reveille migrate"},
			migrate,
		},
		{
			"new schema", "", func(p *patient) { p.sql("INSERT INTO goose_db_version (version_id, is_applied) VALUES (19, TRUE)") },
			[]string{"warn schema: it is version 19, newer than this program, which knows 18; fix: use the programs of the version that made it, here and where workers and scanners run"},
			nil,
		},
		{
			"no worker", "", func(p *patient) {
				p.sql("UPDATE leases SET expires_at = statement_timestamp() - INTERVAL '1 second' WHERE kind = 'worker'")
			},
			[]string{"FAIL workers: no worker has a live lease: commands wait; fix: start one: worker --exec CMD"},
			func(p *patient) { p.lease("worker", "v1", 8) },
		},
		{
			"no scanner", "", func(p *patient) { p.sql("DELETE FROM leases WHERE kind = 'scanner'") },
			[]string{"FAIL scanners: no scanner has a live lease: what crashed workers leave is not repaired; fix: start one: scanner"},
			func(p *patient) { p.lease("scanner", "v1", 0) },
		},
		{
			"two versions", "", func(p *patient) {
				p.lease("worker", "v2", 8)
				p.lease("worker", "v2", 8)
			},
			[]string{"warn versions: not all that live are of one version: 1 scanner of v1, 1 worker of v1, 2 workers of v2; fix: restart the older ones with the newer program"},
			func(p *patient) { p.sql("UPDATE leases SET version = 'v2'") },
		},
		{
			"quarantined sessions", "", func(p *patient) {
				p.quarantine("s1")
				p.quarantine("s2")
				p.sql("UPDATE sessions SET relay_due_at = NULL")
			},
			[]string{"warn quarantine: 2 sessions quarantined: 2 cancellation_outcome_unknown; fix: reveille quarantine list, then show and release"},
			func(p *patient) {
				p.reveille(0, "quarantine release s1 --as discard --why tested")
				p.reveille(0, "quarantine release s2 --as discard --why tested")
			},
		},
	} {
		t.Run(f.name, f.test)
	}
}

func TestDoctorStreamFaults(t *testing.T) {
	t.Parallel()
	js := func(p *patient) jetstream.JetStream { return p.conn.JetStream() }
	for _, f := range []fault{
		{
			"narrowed retention", "", func(p *patient) { p.edit("RV_EVENTS", func(c *jetstream.StreamConfig) { c.MaxAge = time.Hour }) },
			[]string{"warn streams: RV_EVENTS: max_age is 1h0m0s, want 168h0m0s; fix: nats stream edit RV_EVENTS --max-age=168h0m0s"},
			func(p *patient) { p.edit("RV_EVENTS", func(c *jetstream.StreamConfig) { c.MaxAge = 168 * time.Hour }) },
		},
		{
			"wanted retention", "--retention 1h", func(p *patient) {
				for _, name := range []string{"RV_EVENTS", "RV_QUARANTINE", "RV_REJECTED"} {
					p.edit(name, func(c *jetstream.StreamConfig) { c.MaxAge = time.Hour })
				}
			}, nil, nil,
		},
		{
			"limited commands", "", func(p *patient) { p.edit("RV_COMMANDS", func(c *jetstream.StreamConfig) { c.MaxBytes = 1 << 20 }) },
			[]string{"FAIL streams: RV_COMMANDS: max_bytes 1048576 and max_msgs -1 limit it: a full stream drops or refuses messages; fix: nats stream edit RV_COMMANDS --max-bytes=-1 --max-msgs=-1"},
			func(p *patient) { p.edit("RV_COMMANDS", func(c *jetstream.StreamConfig) { c.MaxBytes = -1 }) },
		},
		{
			"events in memory", "", func(p *patient) {
				p.ok(js(p).DeleteStream(p.t.Context(), "RV_EVENTS"))
				c := bus.Configs("rv", bus.StreamOptions{})[2]
				c.Storage, c.Metadata = jetstream.MemoryStorage, map[string]string{"reveille-id": "x"}
				_, err := js(p).CreateStream(p.t.Context(), c)
				p.ok(err)
			},
			[]string{"FAIL streams: RV_EVENTS: storage is Memory, want File; fix: nats stream rm RV_EVENTS, then reveille relay --rebuild, which publishes all events again"},
			func(p *patient) {
				p.ok(js(p).DeleteStream(p.t.Context(), "RV_EVENTS"))
				publishAgain(p)
			},
		},
		{
			"missing streams", "", func(p *patient) {
				p.ok(js(p).DeleteStream(p.t.Context(), "RV_COMMANDS"))
				p.ok(js(p).DeleteStream(p.t.Context(), "RV_REJECTED"))
			},
			[]string{
				"FAIL streams: RV_COMMANDS is missing; fix: a worker or a scanner that starts makes it, and so does reveille relay --rebuild, where the user may (deploy/nats: the operator)",
				"FAIL streams: RV_REJECTED is missing; fix: a worker or a scanner that starts makes it, and so does reveille relay --rebuild, where the user may (deploy/nats: the operator)",
			},
			publishAgain,
		},
		{
			"missing durable", "", func(p *patient) { p.ok(js(p).DeleteConsumer(p.t.Context(), "RV_COMMANDS", p.intake())) },
			[]string{"FAIL durables: RV_COMMANDS intake-ID is missing: what comes there is not taken; fix: a worker or a scanner that starts makes it, and so does reveille relay --rebuild, where the user may (deploy/nats: the operator)"},
			publishAgain,
		},
		{
			"too few pending acknowledgements", "", func(p *patient) { p.pending(31) },
			[]string{"warn durables: RV_COMMANDS intake-ID: max_ack_pending is 31, less than 4 for each of the 8 slots of live workers: it stalls under load; fix: nats consumer edit RV_COMMANDS intake-ID --max-pending=32"},
			func(p *patient) { p.pending(32) },
		},
		{
			"a durable with other settings", "", func(p *patient) {
				intake := p.intake()
				c, err := js(p).Consumer(p.t.Context(), "RV_COMMANDS", intake)
				p.ok(err)
				config := c.CachedInfo().Config
				p.ok(js(p).DeleteConsumer(p.t.Context(), "RV_COMMANDS", intake))
				config.MaxWaiting, config.AckWait = 512, time.Minute
				_, err = js(p).CreateConsumer(p.t.Context(), "RV_COMMANDS", config)
				p.ok(err)
			},
			[]string{
				"warn durables: RV_COMMANDS intake-ID: ack_wait is 1m0s, want 15s; fix: nats consumer edit RV_COMMANDS intake-ID --wait=15s",
				"warn durables: RV_COMMANDS intake-ID: max_waiting is 512, want 16384; fix: nats consumer rm RV_COMMANDS intake-ID: a running worker makes it again; what was delivered comes again",
			},
			func(p *patient) {
				p.ok(js(p).DeleteConsumer(p.t.Context(), "RV_COMMANDS", p.intake()))
				p.intake()
			},
		},
		{
			"wanted replicas", "--replicas 3", func(p *patient) {},
			[]string{
				"warn replicas: RV_COMMANDS has 1 replica, want 3; fix: nats stream edit RV_COMMANDS --replicas=3",
				"warn replicas: RV_READY has 1 replica, want 3; fix: nats stream edit RV_READY --replicas=3",
				"warn replicas: RV_EVENTS has 1 replica, want 3; fix: nats stream edit RV_EVENTS --replicas=3",
				"warn replicas: RV_QUARANTINE has 1 replica, want 3; fix: nats stream edit RV_QUARANTINE --replicas=3",
				"warn replicas: RV_REJECTED has 1 replica, want 3; fix: nats stream edit RV_REJECTED --replicas=3",
			},
			nil,
		},
	} {
		t.Run(f.name, f.test)
	}
}

// pending sets how many unacknowledged messages the durable of commands may have.
func (p *patient) pending(n int) {
	p.t.Helper()
	c, err := p.conn.JetStream().Consumer(p.t.Context(), "RV_COMMANDS", p.intake())
	p.ok(err)
	config := c.CachedInfo().Config
	config.MaxAckPending = n
	_, err = p.conn.JetStream().UpdateConsumer(p.t.Context(), "RV_COMMANDS", config)
	p.ok(err)
}

// users writes a configuration with a user that may do all, and others that may not.
func users(t *testing.T, file, mutePublishes string) *server.Options {
	t.Helper()
	conf := fmt.Sprintf(`accounts { A {
		jetstream: enabled
		users: [
			{ user: all, password: all }
			{ user: mute, password: mute, permissions: { publish: { deny: [ %s ] } } }
			{ user: deaf, password: deaf, permissions: { subscribe: { deny: ["_INBOX.>"] } } }
			{ user: blind, password: blind, permissions: { publish: { deny: ["$JS.API.STREAM.INFO.>", "$JS.API.INFO"] } } }
		]
	}, B { users: [ { user: bare, password: bare } ] } }
	jetstream {}`, mutePublishes)
	if err := os.WriteFile(file, []byte(conf), 0o600); err != nil {
		t.Fatal(err)
	}
	o, err := server.ProcessConfigFile(file)
	if err != nil {
		t.Fatal(err)
	}
	return o
}

func (p *patient) finds(what, args string, want ...string) {
	p.t.Helper()
	found, _ := p.doctor(args)
	if got := amiss(found); !slices.Equal(got, want) {
		p.t.Errorf("%s, got:\n%s\nwant:\n%s", what, strings.Join(got, "\n"), strings.Join(want, "\n"))
	}
}

func TestDoctorPermissions(t *testing.T) {
	t.Parallel()
	file := filepath.Join(t.TempDir(), "nats.conf")
	began := users(t, file, `"rv.rejected.*", "$JS.API.DIRECT.GET.RV_COMMANDS"`)
	p := newPatientOn(t, began, "all")
	p.healthy("a user who may do all", "")
	p.user = "mute"
	const lacks = "this user can't do what a worker does: publish rv.rejected.* (denied), publish $JS.API.DIRECT.GET.RV_COMMANDS (denied); fix: "
	p.finds("a user who may not do all", "", "warn permissions: "+lacks+"where this user is to be a worker, let it do that, as deploy/nats does; else nothing")
	p.finds("as a worker", "--role worker", "FAIL permissions: "+lacks+"let it do that, as deploy/nats does")
	p.healthy("as a scanner", "--role scanner")

	p.user = "blind"
	var asks []string
	for _, name := range streamNames {
		asks = append(asks, "publish $JS.API.STREAM.INFO."+name+" (denied)")
	}
	p.finds("a user who may look at no stream", "--role worker",
		"warn streams: "+strings.Join(streamNames, ", ")+": this user may not ask about them; fix: ask as the operator (deploy/nats)",
		"FAIL permissions: this user can't do what a worker does: "+strings.Join(asks, ", ")+"; fix: let it do that, as deploy/nats does")
	p.healthy("a publisher who may look at no stream", "--role publisher")

	const without = "; not checked without it: streams, durables, permissions; fix: "
	p.user = "deaf"
	p.finds("a user without an inbox", "", "FAIL jetstream: no inbox: subscribing to _INBOX.deaf.NUID.* is denied: this user hears no answers"+without+
		"let the user subscribe to _INBOX.<its name>.>, as deploy/nats does")
	p.user = "bare"
	found, _ := p.doctor("")
	if got := amiss(found); len(got) != 1 || !strings.HasPrefix(got[0], "FAIL jetstream: ") || !strings.HasSuffix(got[0], without+"enable it for this user's account: jetstream: enabled") {
		t.Errorf("an account without JetStream: %q", got)
	}

	// What the fix says: the user may do all.
	p.user = "mute"
	o := users(t, file, "nothing")
	o.Host, o.Port, o.NoSigs, o.NoLog, o.StoreDir = "127.0.0.1", p.nats.Addr().(*net.TCPAddr).Port, true, true, began.StoreDir
	p.ok(p.nats.ReloadOptions(o))
	p.healthy("after the fix", "--role worker")
}

// TestDoctorNeedsNeither: what is wrong with one server does not hide what is right with the other.
func TestDoctorNeedsNeither(t *testing.T) {
	t.Parallel()
	p := newPatient(t)
	// passed are the checks that found nothing.
	passed := func(found []doctor.Finding) string {
		var out []string
		for _, f := range found {
			if f.Status == doctor.OK {
				out = append(out, f.Check)
			}
		}
		return strings.Join(out, " ")
	}
	const database, nats = "database schema clock workers scanners quarantine overdue", "nats tls jetstream streams durables durability clock permissions"
	if found, _ := p.doctor(""); passed(found) != database+" "+nats {
		t.Errorf("with both servers these pass: %s", passed(found))
	}
	p.args = "--database-url postgres://u:secret@127.0.0.1:1/x"
	found, _ := p.doctor("")
	if got := amiss(found); len(got) != 1 || passed(found) != nats || !strings.HasPrefix(got[0], "FAIL database: 127.0.0.1:PORT does not answer (") || !strings.Contains(got[0], "connection refused") ||
		strings.Contains(got[0], "secret") || !strings.HasSuffix(got[0], "; not checked without it: schema, clock, processes, backlog; fix: start it, or name another with --database-url or RV_DATABASE_URL") {
		t.Errorf("without a database %s pass, and:\n%s", passed(found), strings.Join(got, "\n"))
	}
	p.args = "--nats-url nats://127.0.0.1:1 --timeout 10s"
	found, _ = p.doctor("")
	if got := amiss(found); len(got) != 1 || passed(found) != database || !strings.HasPrefix(got[0], "FAIL nats: connecting to NATS at nats://127.0.0.1:PORT: ") || !strings.Contains(got[0], "not checked without it: streams, durables, permissions; fix: start it") {
		t.Errorf("without NATS %s pass, and:\n%s", passed(found), strings.Join(got, "\n"))
	}

	p.args = ""
	none := filepath.Join(t.TempDir(), "none")
	for role, want := range map[string]string{
		"publisher": "ok database: none is named, and a publisher needs none",
		"observer":  "ok database: none is named, and an observer needs none",
		"worker":    "FAIL database: none is named; not checked without it: schema, clock, processes, backlog",
	} {
		stdout, _, code := call(t, strings.Fields("doctor --dev-state "+none+" --nats-url "+p.natsURL()+unhurried+"--role "+role)...)
		first, _, _ := strings.Cut(strings.Join(strings.Fields(stdout), " "), "; fix")
		first, _, _ = strings.Cut(first, " ok nats")
		if first != strings.Replace(want, ":", "", 1) && !strings.HasPrefix(first, strings.Replace(want, ":", "", 1)) || (code == 0) != (role != "worker") {
			t.Errorf("%s: exit %d, %q", role, code, first)
		}
	}
}

// hole takes connections and says nothing.
func hole(t *testing.T) string {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	var mu sync.Mutex
	var conns []net.Conn
	done := make(chan struct{})
	go func() {
		defer close(done)
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			mu.Lock()
			conns = append(conns, c)
			mu.Unlock()
		}
	}()
	t.Cleanup(func() {
		l.Close()
		<-done
		for _, c := range conns {
			c.Close()
		}
	})
	return l.Addr().String()
}

// TestDoctorIsNotHung by servers that are: each check ends, and says so.
func TestDoctorIsNotHung(t *testing.T) {
	t.Parallel()
	stdout, _, code := call(t, strings.Fields("doctor --timeout 200ms --database-url postgres://u@"+hole(t)+"/x?sslmode=disable --nats-url nats://"+hole(t))...)
	lines := strings.Split(strings.TrimSpace(stdout), "\n")
	if code != 1 || len(lines) != 2 || !strings.HasPrefix(lines[0], "FAIL  database     127.0.0.1:") || !strings.HasPrefix(lines[1], "FAIL  nats         connecting to NATS") {
		t.Errorf("exit %d with:\n%s", code, stdout)
	}

	// The database hangs in one question only: the others are answered.
	p := newPatient(t)
	proxy, err := faultproxy.New(p.url, 0)
	p.ok(err)
	t.Cleanup(proxy.Close)
	gate := proxy.Hold(1) // the first read: its version
	t.Cleanup(gate.Release)
	p.args = "--timeout 10s --database-url " + proxy.URL()
	found, _ := p.doctor("")
	got := amiss(found)
	if len(got) != 1 || !strings.HasPrefix(got[0], "FAIL database: version: ") {
		t.Errorf("a database that hangs in one question:\n%s", strings.Join(got, "\n"))
	}
}

// TestDoctorNamesAnotherClock: the database's, which differs from both others.
func TestDoctorNamesAnotherClock(t *testing.T) {
	t.Parallel()
	p := newPatient(t)
	proxy, err := faultproxy.New(p.url, 100*time.Second)
	p.ok(err)
	t.Cleanup(proxy.Close)
	p.args = "--database-url " + proxy.URL()
	const fix = " (--max-clock-skew is 1m0s); fix: let both follow one time server (NTP), or give all workers and scanners a larger --max-clock-skew, and --lease with it"
	p.finds("the database's clock is fast", "", "FAIL clock: the database is TIME off this machine, give or take TIME"+fix, "FAIL clock: NATS is TIME off the database, give or take TIME"+fix)
	p.healthy("with a larger skew", "--max-clock-skew 10m")
}

// TestDoctorCluster: three servers can have three replicas, and one of them can be away.
func TestDoctorCluster(t *testing.T) {
	t.Parallel()
	p := &patient{ward: newWard(t)}
	p.lease("worker", "v1", 8)
	p.lease("scanner", "v1", 0)
	nodes := cluster(t)
	p.nats = nodes[0]
	p.conn = p.connect()
	_, err := p.conn.Ensure(t.Context(), bus.StreamOptions{})
	p.ok(err)
	var want []string
	for _, name := range streamNames {
		want = append(want, "warn replicas: "+name+" has 1 replica, though there are 3 servers; fix: nats stream edit "+name+" --replicas=3")
	}
	p.finds("one replica on three servers", "", want...)
	for _, name := range streamNames {
		p.edit(name, func(c *jetstream.StreamConfig) { c.Replicas = 3 })
	}
	until(t, "three replicas are what is wanted", func() bool {
		found, _ := p.doctor("--replicas 3")
		return len(amiss(found)) == 0
	})
	nodes[2].Shutdown()
	nodes[2].WaitForShutdown()
	until(t, "a server that is away is named", func() bool {
		found, _ := p.doctor("--replicas 3")
		got := amiss(found)
		return slices.Contains(got, "warn replicas: RV_EVENTS: its replica on n3 is offline; fix: start server n3; without a majority nothing is stored") &&
			!slices.ContainsFunc(got, func(l string) bool { return !strings.Contains(l, "its replica on n3 is offline") })
	})
}

// until polls what servers bring about in their own time.
func until(t *testing.T, what string, is func() bool) {
	t.Helper()
	tick := time.NewTicker(50 * time.Millisecond)
	defer tick.Stop()
	deadline := time.Now().Add(2 * time.Minute)
	for !is() {
		if time.Now().After(deadline) {
			t.Fatalf("never: %s", what)
		}
		<-tick.C
	}
}

// cluster is three servers with JetStream, n1 to n3.
func cluster(t *testing.T) (nodes [3]*server.Server) {
	t.Helper()
	var ports [3]int
	for i := range ports {
		l, err := net.Listen("tcp", "127.0.0.1:0")
		if err != nil {
			t.Fatal(err)
		}
		ports[i] = l.Addr().(*net.TCPAddr).Port
		l.Close()
	}
	routes := ""
	for _, port := range ports {
		routes += fmt.Sprintf("nats://127.0.0.1:%d,", port)
	}
	for i := range nodes {
		nodes[i] = startNATS(t, &server.Options{
			ServerName: fmt.Sprintf("n%d", i+1), JetStream: true,
			Cluster: server.ClusterOpts{Name: "test", Host: "127.0.0.1", Port: ports[i]}, Routes: server.RoutesFromStr(strings.TrimSuffix(routes, ",")),
		})
	}
	until(t, "the cluster has a leader and three peers", func() bool {
		for _, n := range nodes {
			if n.JetStreamIsLeader() && len(n.JetStreamClusterPeers()) == 3 {
				return true
			}
		}
		return false
	})
	return nodes
}

func TestDoctorTLS(t *testing.T) {
	t.Parallel()
	web := httptest.NewTLSServer(nil) // for its certificate
	t.Cleanup(web.Close)
	ca := filepath.Join(t.TempDir(), "ca.pem")
	if err := os.WriteFile(ca, pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: web.Certificate().Raw}), 0o600); err != nil {
		t.Fatal(err)
	}
	s := startNATS(t, &server.Options{JetStream: true, TLS: true, TLSTimeout: 30, TLSConfig: web.TLS.Clone()})
	none := filepath.Join(t.TempDir(), "none")
	line := "doctor --role publisher --dev-state " + none + " --nats-url tls://" + s.Addr().String() + unhurried + "--nats-ca " + ca
	stdout, _, _ := call(t, strings.Fields(line)...)
	if !strings.Contains(stdout, "\nok    tls          TLS 1.3\n") {
		t.Errorf("over TLS:\n%s", stdout)
	}
}

// TestDoctorFixes: from nothing to a deployment that works, by what doctor says.
func TestDoctorFixes(t *testing.T) {
	t.Parallel()
	p := &patient{ward: &ward{t: t, url: dbtest.NewEmpty(t)}, nats: startNATS(t, &server.Options{JetStream: true})}
	has := func(what string, want ...string) {
		t.Helper()
		found, _ := p.doctor("")
		var got []string
		for _, l := range amiss(found) {
			head, _, _ := strings.Cut(l, ";")
			got = append(got, head)
		}
		if !slices.Equal(got, want) {
			t.Fatalf("%s, got:\n%s\nwant:\n%s", what, strings.Join(got, "\n"), strings.Join(want, "\n"))
		}
	}
	missing := []string{
		"FAIL streams: RV_COMMANDS is missing", "FAIL streams: RV_READY is missing", "FAIL streams: RV_EVENTS is missing",
		"FAIL streams: RV_QUARANTINE is missing", "FAIL streams: RV_REJECTED is missing",
	}
	has("nothing is there", append([]string{"FAIL schema: there is none"}, missing...)...)
	p.reveille(0, "migrate")
	processes := []string{"FAIL workers: no worker has a live lease: commands wait", "FAIL scanners: no scanner has a live lease: what crashed workers leave is not repaired"}
	has("after migrate", append(slices.Clone(processes), missing...)...)
	publishAgain(p)
	has("after relay --rebuild", processes...)

	var err error
	p.store, err = crdb.Open(t.Context(), p.url, crdb.Options{})
	p.ok(err)
	defer p.store.Close()
	acq := claims.Acquisition{Holder: p.lease("worker", "v1", 8), Worker: "w", Execution: claims.ExecutionID(uuid.NewString()), Step: claims.StepID(uuid.NewString())}
	in := &claims.Input{ID: "a", Delivery: claims.Queue, Body: json.RawMessage(`1`)}
	p.apply(claims.Command{Kind: claims.Wake, Session: "lost", Input: in}, &acq)
	p.apply(claims.Command{Kind: claims.Wake, Session: "waits", Input: in}, nil)
	p.sql("UPDATE leases SET expires_at = statement_timestamp() - INTERVAL '80 seconds'")
	p.sql("UPDATE sessions SET ready_at = statement_timestamp() - INTERVAL '80 seconds' WHERE session_id = 'waits'")
	p.sql("UPDATE events SET created_at = statement_timestamp() - INTERVAL '80 seconds'")
	found, _ := p.doctor("")
	got := amiss(found)
	if len(got) != 5 || !strings.HasPrefix(got[2], "warn overdue: the claims of a worker that is gone wait for a scanner for 1m2") ||
		!strings.HasPrefix(got[3], "warn overdue: a session is ready for 1m2") || !strings.HasPrefix(got[4], "warn overdue: events wait for 1m2") {
		t.Errorf("where nobody works:\n%s", strings.Join(got, "\n"))
	}

	ctx, stop := context.WithCancel(t.Context())
	var running sync.WaitGroup
	defer running.Wait()
	defer stop()
	for _, program := range []string{"scanner", "worker --exec true"} {
		args := append(strings.Fields(program), "--database-url", p.url, "--nats-url", p.natsURL(), "--http", "127.0.0.1:0", "--log-level", "error")
		running.Go(func() {
			if err := run(ctx, args, t.Output(), t.Output()); err != nil {
				t.Errorf("%s: %v", program, err)
			}
		})
	}
	until(t, "a worker and a scanner do all that was overdue", func() bool {
		found, code := p.doctor("")
		return code == 0 && len(amiss(found)) == 0
	})
}

package doctor

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/url"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgproto3"
	"github.com/nats-io/nats.go/jetstream"

	"reveille/bus"
	"reveille/claims/crdb"
	"reveille/internal/dbtest"
)

func TestMain(m *testing.M) {
	dbtest.Main(m, func(ctx context.Context, url string) error {
		_, err := crdb.Migrate(ctx, url, false)
		return err
	})
}

// brief is a finding without what to do.
func brief(f Finding) string { return string(f.Status) + " " + f.Check + ": " + f.Found }

func checkFindings(t *testing.T, what string, found []Finding, want ...string) {
	t.Helper()
	var got []string
	for _, f := range found {
		got = append(got, brief(f))
		if (f.Status == OK) != (f.Fix == "") {
			t.Errorf("%s: %+v: what is not ok says what to do, and only that", what, f)
		}
	}
	if !slices.Equal(got, want) {
		t.Errorf("%s, got:\n%s\nwant:\n%s", what, strings.Join(got, "\n"), strings.Join(want, "\n"))
	}
}

func TestEngine(t *testing.T) {
	t.Parallel()
	for version, want := range map[string]string{
		"PostgreSQL 15.18 (Debian 15.18-0+deb12u1) on x86_64-pc-linux-gnu": "ok database: PostgreSQL 15.18, transactions are serializable",
		"PostgreSQL 18beta1 on x86_64":                                     `warn database: it says it is "PostgreSQL 18beta1 on"`,
		"PostgreSQL 14.22 on x86_64":                                       "FAIL database: PostgreSQL 14.22 is too old",
		"CockroachDB CCL v23.1.11 (x86_64-pc-linux-gnu, built 2023)":       "ok database: CockroachDB 23.1.11, transactions are serializable",
		"CockroachDB CCL v22.2.19 (x86_64-pc-linux-gnu, built 2023)":       "FAIL database: CockroachDB 22.2.19 is too old",
		"CockroachDB OSS v24.3.0 (x86_64)":                                 "ok database: CockroachDB 24.3.0, transactions are serializable",
		"YugabyteDB 2.1":                                                   `warn database: it says it is "YugabyteDB 2.1"`,
		"":                                                                 `warn database: it says it is ""`,
	} {
		checkFindings(t, version, []Finding{engine(version)}, want)
	}
}

func TestClockJudgement(t *testing.T) {
	t.Parallel()
	const ms = time.Millisecond
	for _, tc := range []struct {
		ahead, unsure time.Duration
		want          Status
	}{
		{0, ms, OK},
		{-500 * ms, 10 * ms, OK},
		{500 * ms, 0, OK},
		{501 * ms, 0, Warn},
		{-600 * ms, 10 * ms, Warn},
		{600 * ms, 200 * ms, OK}, // at least 400
		{1000 * ms, 0, Warn},
		{1001 * ms, 0, Fail},
		{-1500 * ms, 400 * ms, Fail},
		{1500 * ms, 600 * ms, Warn},
		{0, 501 * ms, Warn}, // nobody can say
	} {
		f := interval{tc.ahead, tc.unsure}.judge("the database", "this machine", time.Second)
		if f.Status != tc.want || (f.Status == OK) != (f.Fix == "") {
			t.Errorf("%v give or take %v: %+v, want %s", tc.ahead, tc.unsure, f, tc.want)
		}
	}
	f := interval{-1234567 * time.Microsecond, ms}.judge("NATS", "the database", time.Second)
	if want := "FAIL clock: NATS is 1.2346s behind the database, give or take 1ms (--max-clock-skew is 1s)"; brief(f) != want {
		t.Errorf("got %s, want %s", brief(f), want)
	}
}

// TestShortestRoundTripCounts: one slow answer does not blur the clock.
func TestShortestRoundTripCounts(t *testing.T) {
	t.Parallel()
	start := time.Date(2026, 12, 1, 8, 0, 0, 0, time.UTC)
	now := start
	d := &doctor{now: func() time.Time { return now }}
	ways := []time.Duration{800 * time.Millisecond, 2 * time.Millisecond, time.Second, 4 * time.Millisecond, time.Second}
	asked := 0
	got, err := d.measure(t.Context(), func(context.Context) (time.Time, error) {
		way := ways[asked]
		asked++
		now = now.Add(way)
		return now.Add(-way / 2).Add(300 * time.Millisecond), nil
	})
	if want := (interval{300 * time.Millisecond, time.Millisecond}); err != nil || got != want || asked != len(ways) {
		t.Errorf("got %+v, %v after %d answers, want %+v after %d", got, err, asked, want, len(ways))
	}
	broken := errors.New("broken")
	if _, err := d.measure(t.Context(), func(context.Context) (time.Time, error) { return now, broken }); !errors.Is(err, broken) {
		t.Errorf("no answer at all: %v", err)
	}
	first := true
	if got, err := d.measure(t.Context(), func(context.Context) (time.Time, error) {
		defer func() { first = false }()
		if first {
			return now, nil
		}
		return now, broken
	}); err != nil || got != (interval{}) {
		t.Errorf("one answer: %+v, %v", got, err)
	}
}

func TestProcessesJudgement(t *testing.T) {
	t.Parallel()
	checkFindings(t, "nobody", judgeProcesses(nil),
		"FAIL workers: no worker has a live lease: commands wait",
		"FAIL scanners: no scanner has a live lease: what crashed workers leave is not repaired")
	checkFindings(t, "one of each", judgeProcesses([]process{{"worker", "v1", 1, 1}, {"scanner", "v1", 0, 7}}),
		"ok workers: 1 worker with 1 slot, 1 of them in use", "ok scanners: 1 scanner")
	checkFindings(t, "many", judgeProcesses([]process{{"worker", "v1", 64, 3}, {"scanner", "v2", 0, 0}, {"worker", "v1", 64, 4}, {"worker", "v2", 8, 0}}),
		"ok workers: 3 workers with 136 slots, 7 of them in use", "ok scanners: 1 scanner",
		"warn versions: not all that live are of one version: 2 workers of v1, 1 scanner of v2, 1 worker of v2")
}

func TestOverdueJudgement(t *testing.T) {
	t.Parallel()
	checkFindings(t, "as usual", judgeOverdue(crdb.Overdue{Claims: 30 * time.Second, Sessions: time.Minute, Continuations: time.Minute, Events: 30 * time.Second}),
		"ok overdue: no work waits for long")
	checkFindings(t, "all late", judgeOverdue(crdb.Overdue{Claims: 31 * time.Second, Sessions: time.Second, Continuations: 61 * time.Second, Events: 31 * time.Second}),
		"warn overdue: the claims of a worker that is gone wait for a scanner for 31s",
		"warn overdue: a session is ready for 1m1s and no worker takes it",
		"warn overdue: events wait for 31s to be published on the stream")
}

func TestEncryption(t *testing.T) {
	t.Parallel()
	for addr, want := range map[string]Status{
		"127.0.0.1:4222": OK, "[::1]:4222": OK, "pipe": OK, "10.1.2.3:4222": Warn, "[2001:db8::1]:4222": Warn, "nats.example:4222": Warn,
	} {
		if f := unencrypted(addr); f.Status != want {
			t.Errorf("%s: %+v, want %s", addr, f, want)
		}
	}
}

// TestStreamFixes: each setting that can differ has a fix, and how bad it is depends on whether work is lost.
func TestStreamFixes(t *testing.T) {
	t.Parallel()
	configs := map[string]jetstream.StreamConfig{}
	for _, c := range bus.Configs("rv", bus.StreamOptions{}) {
		configs[c.Name] = c
	}
	for _, tc := range []struct{ stream, setting, want string }{
		{"RV_REJECTED", "subjects", "FAIL nats stream edit RV_REJECTED --subjects='rv.rejected.*'"},
		{"RV_COMMANDS", "max_age", "FAIL nats stream edit RV_COMMANDS --max-age=0s"},
		{"RV_EVENTS", "max_age", "warn nats stream edit RV_EVENTS --max-age=168h0m0s"},
		{"RV_COMMANDS", "limits", "FAIL nats stream edit RV_COMMANDS --max-bytes=-1 --max-msgs=-1"},
		{"RV_EVENTS", "limits", "warn nats stream edit RV_EVENTS --max-bytes=-1 --max-msgs=-1"},
		{"RV_COMMANDS", "max_msgs_per_subject", "FAIL nats stream edit RV_COMMANDS --max-msgs-per-subject=-1"},
		{"RV_READY", "max_msgs_per_subject", "warn nats stream edit RV_READY --max-msgs-per-subject=1"},
		{"RV_READY", "discard", "warn nats stream edit RV_READY --discard=new"},
		{"RV_EVENTS", "discard", "warn nats stream edit RV_EVENTS --discard=old"},
		{"RV_READY", "discard_new_per_subject", "warn nats stream edit RV_READY --discard-per-subject"},
		{"RV_EVENTS", "discard_new_per_subject", "warn nats stream edit RV_EVENTS --no-discard-per-subject"},
		{"RV_EVENTS", "duplicate_window", "warn nats stream edit RV_EVENTS --dupe-window=1s"},
		{"RV_EVENTS", "allow_direct", "warn nats stream edit RV_EVENTS --allow-direct"},
		{"RV_EVENTS", "allow_atomic", "warn nats stream edit RV_EVENTS --allow-batch"},
		{"RV_READY", "allow_atomic", "warn nats stream edit RV_READY --no-allow-batch"},
		{"RV_COMMANDS", "allow_rollup_hdrs", "FAIL nats stream edit RV_COMMANDS --no-allow-rollup"},
		{"RV_READY", "no_ack", "FAIL nats stream edit RV_READY --ack"},
		{"RV_COMMANDS", "deny_purge", "warn nats stream edit RV_COMMANDS --deny-purge"},
		{"RV_EVENTS", "deny_delete", "warn nats stream edit RV_EVENTS --deny-delete"},
		{"RV_READY", "deny_purge", "warn nats stream rm RV_READY, then reveille relay --rebuild, which makes it; scanners announce again"},
		{"RV_EVENTS", "storage", "FAIL nats stream rm RV_EVENTS, then reveille relay --rebuild, which publishes all events again"},
		{"RV_COMMANDS", "retention", "FAIL stop publishing, wait until it is empty, nats stream rm RV_COMMANDS, then reveille relay --rebuild, which makes it"},
		{"RV_QUARANTINE", "sealed", "FAIL keep a copy of what is in it if that is needed, nats stream rm RV_QUARANTINE, then reveille relay --rebuild, which makes it"},
		{"RV_READY", "allow_msg_schedules", "FAIL nats stream rm RV_READY, then reveille relay --rebuild, which makes it; scanners announce again"},
	} {
		status, fix := streamFix(configs[tc.stream], tc.setting)
		if got := string(status) + " " + fix; got != tc.want {
			t.Errorf("%s of %s: %s, want %s", tc.setting, tc.stream, got, tc.want)
		}
	}
}

func TestDurableFixes(t *testing.T) {
	t.Parallel()
	f := bus.DurableFound{
		Stream: "RV_COMMANDS", Info: &jetstream.ConsumerInfo{Config: jetstream.ConsumerConfig{MaxAckPending: 255}},
		Want: jetstream.ConsumerConfig{Durable: "intake-x", FilterSubjects: []string{"rv.admit.*", "rv.wake.*"}, AckWait: 15 * time.Second},
	}
	var got []string
	for _, setting := range []string{"filter", "ack_policy", "ack_wait", "max_deliver", "backoff steps", "max_waiting"} {
		f.Differences = []bus.Difference{{Setting: setting, Text: setting + " differs"}}
		for _, f := range judgeDurable(f, 64, false) {
			got = append(got, string(f.Status)+" "+f.Fix)
		}
	}
	const edit, remove = "nats consumer edit RV_COMMANDS intake-x ", "nats consumer rm RV_COMMANDS intake-x: a running worker makes it again; what was delivered comes again"
	want := []string{
		"FAIL " + edit + "--filter='rv.admit.*' --filter='rv.wake.*'", "FAIL " + remove, "warn " + edit + "--wait=15s",
		"FAIL " + edit + "--max-deliver=-1", "warn " + edit + "--backoff=none", "warn " + remove,
	}
	if !slices.Equal(got, want) {
		t.Errorf("got:\n%s\nwant:\n%s", strings.Join(got, "\n"), strings.Join(want, "\n"))
	}
	f.Differences = nil
	for most, want := range map[int]int{255: 1, 256: 0, 4096: 0, -1: 0} {
		f.Info.Config.MaxAckPending = most
		if found := judgeDurable(f, 64, true); len(found) != want {
			t.Errorf("max_ack_pending %d for 64 slots: %+v", most, found)
		}
	}
}

func TestPermissionsJudgement(t *testing.T) {
	t.Parallel()
	many := []bus.Role{bus.RoleWorker, bus.RoleScanner}
	lacks := []bus.Lack{{Need: "publish a", Roles: many, Err: bus.ErrDenied}}
	for i := range 5 {
		lacks = append(lacks, bus.Lack{Need: fmt.Sprintf("publish b%d", i), Roles: []bus.Role{bus.RoleWorker}, Err: bus.ErrDenied})
	}
	lacks = append(lacks, bus.Lack{Need: "publish c", Roles: []bus.Role{bus.RoleScanner}, Err: bus.ErrNoAnswer})
	checkFindings(t, "no role is named", judgePermissions(bus.Roles(), lacks, false),
		"ok permissions: this user can do what these do: publisher, observer, operator (taking messages is not tried)",
		"warn permissions: this user can't do what a worker does: publish a (denied), publish b0 (denied), publish b1 (denied), publish b2 (denied), and 2 more (--role worker lists them)",
		"warn permissions: this user can't do what a scanner does: publish a (denied), publish c (no answer)")
	checkFindings(t, "a worker", judgePermissions([]bus.Role{bus.RoleWorker}, lacks, true),
		"FAIL permissions: this user can't do what a worker does: publish a (denied), publish b0 (denied), publish b1 (denied), publish b2 (denied), publish b3 (denied), publish b4 (denied)")
}

// TestReplicasJudgement: of a cluster one replica is not enough, whatever is wanted.
func TestReplicasJudgement(t *testing.T) {
	t.Parallel()
	stream := func(name string, has, want int, offline ...string) bus.StreamFound {
		info := &jetstream.StreamInfo{Config: jetstream.StreamConfig{Replicas: has}, Cluster: &jetstream.ClusterInfo{}}
		for _, name := range offline {
			info.Cluster.Replicas = append(info.Cluster.Replicas, &jetstream.PeerInfo{Name: name, Offline: true}, &jetstream.PeerInfo{Name: "other"})
		}
		return bus.StreamFound{Want: jetstream.StreamConfig{Name: name, Replicas: want}, Info: info}
	}
	const lost = ": " + syncInterval
	const safe = "ok durability: every stream has more than one replica: what is acknowledged survives the loss of one server"
	checkFindings(t, "one server", judgeReplicas([]bus.StreamFound{stream("A", 1, 1)}, 1), "ok durability: one replica of A"+lost)
	checkFindings(t, "two servers", judgeReplicas([]bus.StreamFound{stream("A", 1, 1)}, 2), "ok durability: one replica of A"+lost)
	checkFindings(t, "three servers", judgeReplicas([]bus.StreamFound{stream("A", 3, 1), stream("B", 1, 1)}, 3),
		"warn replicas: B has 1 replica, though there are 3 servers", "ok durability: one replica of B"+lost)
	checkFindings(t, "five are wanted", judgeReplicas([]bus.StreamFound{stream("A", 3, 5)}, 5), "warn replicas: A has 3 replicas, want 5", safe)
	checkFindings(t, "one is away", judgeReplicas([]bus.StreamFound{stream("A", 3, 3, "n2")}, 3), "warn replicas: A: its replica on n2 is offline", safe)
}

// diagnose runs all checks against these servers.
func diagnose(t *testing.T, d *doctor) (found []Finding) {
	t.Helper()
	d.NATS.Logger = slog.New(slog.DiscardHandler)
	if d.now == nil {
		d.now = time.Now
	}
	if err := d.run(t.Context(), func(f Finding) error {
		found = append(found, f)
		return nil
	}); err != nil {
		t.Fatal(err)
	}
	return found
}

// nowhere is where no NATS server is.
var nowhere = bus.Options{URL: "nats://127.0.0.1:1"}

// TestThisMachinesClock differs from the database's.
func TestThisMachinesClock(t *testing.T) {
	t.Parallel()
	for off, want := range map[time.Duration]Status{-90 * time.Second: Fail, 90 * time.Second: Fail, 45 * time.Second: Warn, 0: OK} {
		d := &doctor{
			Options: Options{DatabaseURL: dbtest.New(t), NATS: nowhere, MaxClockSkew: time.Minute, Timeout: 10 * time.Second},
			now:     func() time.Time { return time.Now().Add(off) },
		}
		defer d.close()
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		defer cancel()
		d.database(ctx)
		found := d.databaseClock(ctx)
		way := "ahead of"
		if off > 0 {
			way = "behind"
		}
		if len(found) != 1 || found[0].Status != want || off != 0 && !strings.Contains(found[0].Found, way+" this machine") {
			t.Errorf("a clock that is %v off: %+v, want %s", off, found, want)
		}
	}
}

// impostor speaks as much of NATS as a client needs to connect, in a version.
func impostor(t *testing.T, version string) (url string) {
	t.Helper()
	return listen(t, func(c net.Conn) {
		host, port, _ := net.SplitHostPort(c.LocalAddr().String())
		fmt.Fprintf(c, "INFO {\"server_id\":\"x\",\"server_name\":\"old\",\"version\":%q,\"proto\":1,\"host\":%q,\"port\":%s,\"headers\":true,\"max_payload\":1048576}\r\n", version, host, port)
		for lines := bufio.NewScanner(c); lines.Scan(); {
			if lines.Text() == "PING" {
				fmt.Fprint(c, "PONG\r\n")
			}
		}
	})
}

// listen serves connections until the test ends; it returns the address.
func listen(t *testing.T, serve func(net.Conn)) string {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	var mu sync.Mutex
	var conns []net.Conn
	var wg sync.WaitGroup
	wg.Go(func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			mu.Lock()
			conns = append(conns, c)
			mu.Unlock()
			wg.Go(func() {
				defer c.Close()
				serve(c)
			})
		}
	})
	t.Cleanup(func() {
		l.Close()
		mu.Lock()
		for _, c := range conns {
			c.Close()
		}
		mu.Unlock()
		wg.Wait()
	})
	return l.Addr().String()
}

func TestOldAndSilentServer(t *testing.T) {
	t.Parallel()
	addr := impostor(t, "2.11.9")
	found := diagnose(t, &doctor{Options: Options{NATS: bus.Options{URL: "nats://" + addr}, Role: bus.RolePublisher, Timeout: 500 * time.Millisecond, MaxClockSkew: time.Minute}})
	checkFindings(t, "an old server that says nothing", found,
		"ok database: none is named, and a publisher needs none",
		"FAIL nats: old at "+addr+" is 2.11.9, which is too old",
		"ok tls: not encrypted, and on this machine",
		"FAIL jetstream: no answer in 500ms; not checked without it: streams, durables, permissions")
}

// pooler is between a client and the database, and changes what connections are started with.
func pooler(t *testing.T, databaseURL string, change func(parameters map[string]string)) (through string) {
	t.Helper()
	u, err := url.Parse(databaseURL)
	if err != nil {
		t.Fatal(err)
	}
	server := u.Host
	u.Host = listen(t, func(client net.Conn) {
		backend := pgproto3.NewBackend(client, client)
		start, err := backend.ReceiveStartupMessage()
		if err != nil {
			return
		}
		if m, ok := start.(*pgproto3.StartupMessage); ok {
			change(m.Parameters)
		}
		raw, err := start.Encode(nil)
		if err != nil {
			return
		}
		db, err := net.Dial("tcp", server)
		if err != nil {
			return
		}
		defer db.Close()
		if _, err := db.Write(raw); err != nil {
			return
		}
		go func() {
			_, _ = io.Copy(db, client) // ends with either connection
			db.Close()
		}()
		_, _ = io.Copy(client, db)
	})
	return u.String()
}

// freezer forwards to the database until it is frozen: from then on it takes all and says nothing.
func freezer(t *testing.T, databaseURL string) (through string, freeze func()) {
	t.Helper()
	u, err := url.Parse(databaseURL)
	if err != nil {
		t.Fatal(err)
	}
	server := u.Host
	var frozen atomic.Bool
	forward := func(to io.Writer, from net.Conn) {
		buf := make([]byte, 4096)
		for {
			n, err := from.Read(buf)
			if err != nil {
				return
			}
			if frozen.Load() {
				continue
			}
			if _, err := to.Write(buf[:n]); err != nil {
				return
			}
		}
	}
	u.Host = listen(t, func(client net.Conn) {
		db, err := net.Dial("tcp", server)
		if err != nil {
			return
		}
		go func() {
			defer db.Close()
			forward(client, db)
		}()
		defer db.Close()
		forward(db, client)
	})
	return u.String(), func() { frozen.Store(true) }
}

// TestDatabaseThatFreezes while it is looked at: each check says so, and all end.
func TestDatabaseThatFreezes(t *testing.T) {
	t.Parallel()
	through, freeze := freezer(t, dbtest.New(t))
	o := Options{DatabaseURL: through, NATS: nowhere, Timeout: 5 * time.Second, MaxClockSkew: time.Minute}
	o.NATS.Logger = slog.New(slog.DiscardHandler)
	var got []string
	err := Run(t.Context(), o, func(f Finding) error {
		if f.Check == checkSchema {
			freeze()
		}
		got = append(got, string(f.Status)+" "+f.Check)
		return nil
	})
	want := []string{"ok database", "ok schema", "FAIL clock", "FAIL workers", "FAIL quarantine", "FAIL overdue", "FAIL nats"}
	if err != nil || !slices.Equal(got, want) {
		t.Errorf("got %q, %v, want %q", got, err, want)
	}
}

// TestIsolation: what a pooler on the way makes of it is found, and what the fix says is enough.
func TestIsolation(t *testing.T) {
	t.Parallel()
	direct := dbtest.New(t)
	if !strings.Contains(direct, "sslmode=disable") {
		t.Fatalf("the test database is at %s, and the pooler can't read what is encrypted", direct)
	}
	options := func(url string) Options {
		return Options{DatabaseURL: url, NATS: nowhere, Timeout: 10 * time.Second, MaxClockSkew: time.Minute}
	}
	through := pooler(t, direct, func(p map[string]string) { p["default_transaction_isolation"] = "read committed" })
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	d := &doctor{Options: options(through), now: time.Now}
	found := d.database(ctx)
	d.close()
	if len(found) != 1 || found[0].Status != Fail || !strings.Contains(found[0].Found, `database runs transactions at "read committed": want serializable`) ||
		!strings.Contains(found[0].Fix, "a pooler or proxy on the way") {
		t.Errorf("through a pooler: %+v", found)
	}
	d = &doctor{Options: options(pooler(t, direct, func(map[string]string) {})), now: time.Now}
	if found := d.database(ctx); len(found) != 1 || found[0].Status != OK {
		t.Errorf("through a pooler that changes nothing: %+v", found)
	}
	d.close()
}

// TestRunStops with its context, and with who is told.
func TestRunStops(t *testing.T) {
	t.Parallel()
	ctx, cancel := context.WithCancel(t.Context())
	o := Options{NATS: nowhere, Timeout: time.Minute, MaxClockSkew: time.Minute}
	o.NATS.Logger = slog.New(slog.DiscardHandler)
	err := Run(ctx, o, func(f Finding) error {
		cancel() // the next would wait for NATS
		return nil
	})
	if !errors.Is(err, context.Canceled) {
		t.Errorf("a cancelled run: %v", err)
	}
	full := errors.New("disk full")
	if err := Run(t.Context(), o, func(Finding) error { return full }); !errors.Is(err, full) {
		t.Errorf("a run whose findings can't be written: %v", err)
	}
}

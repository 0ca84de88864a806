package main

import (
	"bytes"
	"context"
	"errors"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/nats-io/nats-server/v2/server"

	"reveille/claims"
	"reveille/claims/crdb"
	"reveille/cmd/internal/flags"
	"reveille/cmd/internal/process"
	"reveille/internal/dbtest"
)

// asProgram makes the test binary the program that it tests: dev starts itself
// again as workers and scanner.
const asProgram = "RV_TEST_AS_REVEILLE"

func TestMain(m *testing.M) {
	if os.Getenv(asProgram) != "" || process.IsGuard(os.Args) { // a guard does not get the variable
		main()
		return
	}
	dbtest.Main(m, func(ctx context.Context, url string) error {
		_, err := crdb.Migrate(ctx, url, false)
		return err
	})
}

// call runs a command line in this process and returns what it printed and its exit code.
func call(t *testing.T, args ...string) (stdout, stderr string, code int) {
	t.Helper()
	var out, errs bytes.Buffer
	err := run(t.Context(), args, &out, &errs)
	var exit *flags.Exit
	switch {
	case err == nil, errors.Is(err, flags.ErrHelp):
	case errors.As(err, &exit):
		code = exit.Code
		errs.WriteString(exit.Message)
	default:
		code = 1
		errs.WriteString(err.Error())
	}
	return out.String(), errs.String(), code
}

func TestUsage(t *testing.T) {
	t.Parallel()
	none := filepath.Join(t.TempDir(), "none")
	for _, tc := range []struct {
		args string // by spaces
		want string
	}{
		{"nonsense", "unexpected argument nonsense"},
		{"wake", `expected "<session>"`},
		{"wake a.b", `byte '.' at 1`},
		{"wake s1 --id x", "--id and --steer are of an input"},
		{"wake s1 --steer", "--id and --steer are of an input"},
		{"wake s1 --not-before tomorrow", "--not-before \"tomorrow\""},
		{"wake s1 --input {", "not JSON: unexpected end of JSON input at line 1, column 2"},
		{"wake s1 --input hello", "quotes of its own"},
		{"wake s1 --inptu 1", "see reveille wake --help"},
		{"wake s1 --nats-url http://127.0.0.1:1", `scheme "http": want nats, tls, ws or wss`},
		{"wake s1 --namespace A", "--namespace: namespace has byte 'A'"},
		{"admit s1", "missing flags: --input=JSON"},
		{"interrupt *", `byte '*' at 0`},
		{"watch s1 --from=-1", "--from -1"},
		{"watch s1 --live", "--live is of --json"},
		{"sessions --state asleep", `"quarantined" but got "asleep"; see reveille sessions --help`},
		{"sessions --database-url x", "want postgres://user:password@host:port/name"},
		{"migrate --database-url x", "want postgres://user:password@host:port/name"},
		{"worker --dev-state " + none + " --exec true", "no reveille dev runs on " + none},
		{"sessions --limit=-1 --database-url postgres://x@127.0.0.1:1/x", "--limit -1"},
		{"sessions --dev-state " + none, "no database is named"},
		{"show s1 --dev-state " + none, "no database is named"},
		{"quarantine list --reason bored", "want one of cancellation_outcome_unknown, invalid_step"},
		{"quarantine list --limit=-1", "--limit -1"},
		{"quarantine show a.b", `byte '.' at 1`},
		{"quarantine release s1 --why x", "missing flags: --as="},
		{"quarantine release s1 --as retry", "missing flags: --why="},
		{"quarantine release s1 --as often --why x", "see reveille quarantine release --help"},
		{"quarantine release --as retry --why x", "one SESSION, or all of one --reason"},
		{"quarantine release s1 --reason superseded --as retry --why x", "one SESSION, or all of one --reason"},
		{"quarantine release s1 --yes --as retry --why x", "--yes is of --reason"},
		{"quarantine release s1 --as retry --why=", "--why is empty"},
		{"relay", "missing flags: --rebuild"},
		{"doctor --role king", "--role must be one of"},
		{"doctor --replicas 0", "--replicas 0"},
		{"doctor --timeout 0s", "--timeout 0s"},
		{"doctor --namespace A", "--namespace: namespace has byte 'A'"},
		{"relay --rebuild --dev-state " + none, "no database is named"},
		{"migrate --dev-state " + none, "no database is named"},
		{"dev --workers 65", "--workers 65"},
		{"dev --lease 1s", "--lease 1s is too short"},
		{"dev --nats-port 70000", "--nats-port 70000"},
		{"dev --handler smtp", "--handler must be one of"},
		{"dev --handler http", "--handler http needs --http-url URL"},
		{"dev --handler http --http-url host:8080", "--http-url: URL with scheme"},
		{"dev --http-url http://127.0.0.1:8080", "--http-url is of --handler http"},
		{"worker --database-url x", "--exec CMD"},
		{"worker --database-url x --handler http", "--handler http needs --http-url URL"},
		{"worker --database-url x --handler http --http-url http://u:secret@h:x", "--http-url: not a URL"},
		{"scanner --batch 0 --database-url x", "--batch 0"},
	} {
		stdout, stderr, code := call(t, strings.Fields(tc.args)...)
		if code != 2 || stdout != "" || !strings.Contains(stderr, tc.want) || strings.Count(stderr, "\n") > 1 {
			t.Errorf("reveille %s: exit %d, printed %q and %q, want exit 2 and one line with %q", tc.args, code, stdout, stderr, tc.want)
		}
	}
}

// TestUnreachable: a command does not wait for ever for a server.
func TestUnreachable(t *testing.T) {
	t.Parallel()
	for args, want := range map[string]string{
		"wake s1 --nats-url nats://127.0.0.1:1 --timeout 200ms":                        "no NATS server at nats://127.0.0.1:1: start one with reveille dev",
		"sessions --database-url postgres://u:secret@127.0.0.1:1/x --timeout 200ms":    "the database at 127.0.0.1:1 does not answer",
		"migrate --database-url postgres://u:secret@127.0.0.1:1/x":                     "the database at 127.0.0.1:1 does not answer",
		"wake s1 --nats-url nats://u:secret@127.0.0.1:1 --timeout 200ms":               "no NATS server at nats://u:xxxxx@127.0.0.1:1: start one with reveille dev",
		"watch --namespace other --nats-url nats://127.0.0.1:1 --timeout 200ms --json": "no NATS server at nats://127.0.0.1:1",
	} {
		_, stderr, code := call(t, strings.Fields(args)...)
		if code != 1 || !strings.Contains(stderr, want) || strings.Contains(stderr, "secret") {
			t.Errorf("reveille %s: exit %d with %q, want exit 1 with %q", args, code, stderr, want)
		}
	}
}

// TestNATSRefuses: a wrong password is not a server that is not there.
func TestNATSRefuses(t *testing.T) {
	t.Parallel()
	url := strings.Replace(natsServer(t, func(o *server.Options) { o.Username, o.Password = "u", "right" }), "nats://", "nats://u:wrong@", 1)
	_, stderr, code := call(t, "wake", "s1", "--nats-url", url, "--timeout", "1s")
	if code != 1 || !strings.Contains(stderr, "does not let this user in") || strings.Contains(stderr, "wrong") || strings.Contains(stderr, "\n") {
		t.Errorf("exit %d with %q", code, stderr)
	}
}

func TestHelp(t *testing.T) {
	t.Parallel()
	stdout, _, code := call(t, "--help")
	if code != 0 {
		t.Fatalf("exit %d", code)
	}
	for _, command := range []string{"dev", "migrate", "wake", "admit", "interrupt", "watch", "sessions", "show", "workers", "quarantine", "relay", "doctor"} {
		if !strings.Contains(stdout, "\n  "+command+" ") {
			t.Errorf("the help does not name %s", command)
		}
	}
	for _, missing := range []string{"bench", "\n  worker ", "\n  scanner "} {
		if strings.Contains(stdout, missing) {
			t.Errorf("the help names %q, which there is not, or not for people", missing)
		}
	}
}

func TestCheckJSON(t *testing.T) {
	t.Parallel()
	for _, tc := range []struct{ in, want string }{
		{`"hello"`, ""},
		{` {"a":[1,2,null]} ` + "\n", ""},
		{"", "it is empty"},
		{" \n", "it is empty"},
		{"hello", `invalid character 'h' looking for beginning of value at line 1, column 1; a text needs quotes of its own: --input '"hello"'`},
		{`{"a":1,}`, "invalid character '}' looking for beginning of object key string at line 1, column 8"},
		{"{\n  \"ä\": x\n}", "invalid character 'x' looking for beginning of value at line 2, column 8"},
		{`{"a":1} {`, "invalid character '{' after top-level value at line 1, column 9"},
		{`{"a":`, "unexpected end of JSON input at line 1, column 6"},
		{`"abc`, "unexpected end of JSON input at line 1, column 5"},
		{"[1,\n2", "unexpected end of JSON input at line 2, column 2"},
	} {
		got := ""
		if err := checkJSON([]byte(tc.in)); err != nil {
			got = err.Error()
		}
		if got != tc.want {
			t.Errorf("%q: %q, want %q", tc.in, got, tc.want)
		}
	}
}

func TestNewInput(t *testing.T) {
	t.Parallel()
	s := streams{in: strings.NewReader(" {\"a\":1}\n")}
	in, err := newInput(s, "-", "", true)
	if err != nil || string(in.Body) != `{"a":1}` || in.Delivery != claims.Steer || !strings.HasPrefix(in.ID, "in_") || len(in.ID) != 39 {
		t.Errorf("got %+v, %v", in, err)
	}
	if in, err = newInput(s, `"x"`, "mine", false); err != nil || in.ID != "mine" || in.Delivery != claims.Queue {
		t.Errorf("got %+v, %v", in, err)
	}
	s.in = strings.NewReader(`"` + strings.Repeat("x", 300<<10) + `"`)
	if _, err = newInput(s, "-", "", false); err == nil || !strings.Contains(err.Error(), "longer than the 262144 bytes") {
		t.Errorf("an input over the limit: %v", err)
	}
}

// TestDiscovery: what a command is told wins over the environment, that over a running dev, that over the default.
func TestDiscovery(t *testing.T) {
	dir := t.TempDir()
	dev := `{"pid":1,"nats_url":"nats://127.0.0.1:1","database_url":"postgres://dev@127.0.0.1:1/dev","namespace":"devspace"}`
	if err := os.WriteFile(filepath.Join(dir, "dev.json"), []byte(dev), 0o600); err != nil {
		t.Fatal(err)
	}
	elsewhere := t.TempDir()
	for _, tc := range []struct {
		name, args string
		env        map[string]string
		want       string // in the error
	}{
		{"dev", "wake s1 --dev-state " + dir, nil, "no NATS server at nats://127.0.0.1:1 (named by " + dir + "/dev.json)"},
		{"dev by variable", "wake s1", map[string]string{"RV_STATE": dir}, "no NATS server at nats://127.0.0.1:1 (named by " + dir},
		{"flag", "wake s1 --nats-url nats://127.0.0.1:2 --dev-state " + dir, nil, "no NATS server at nats://127.0.0.1:2:"},
		{"environment", "wake s1 --dev-state " + dir, map[string]string{"RV_NATS_URL": "nats://127.0.0.1:3"}, "no NATS server at nats://127.0.0.1:3:"},
		{"database", "sessions --dev-state " + dir, nil, "the database at 127.0.0.1:1 (named by " + dir},
		{"database flag", "sessions --database-url postgres://x@127.0.0.1:2/x --dev-state " + dir, nil, "the database at 127.0.0.1:2 does not answer"},
		{"database variable", "sessions --dev-state " + dir, map[string]string{"RV_DATABASE_URL": "postgres://x@127.0.0.1:3/x"}, "the database at 127.0.0.1:3 does"},
		{"namespace", "wake s1 --namespace NO --dev-state " + dir, nil, "namespace has byte 'N'"},
		{"none", "sessions --dev-state " + elsewhere, nil, "no database is named"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			for k, v := range tc.env {
				t.Setenv(k, v)
			}
			_, stderr, code := call(t, append(strings.Fields(tc.args), "--timeout=200ms")...)
			if code == 0 || !strings.Contains(stderr, tc.want) {
				t.Errorf("exit %d with %q, want %q", code, stderr, tc.want)
			}
		})
	}
	if err := os.WriteFile(filepath.Join(dir, "dev.json"), []byte("{"), 0o600); err != nil {
		t.Fatal(err)
	}
	if _, stderr, code := call(t, "sessions", "--dev-state", dir); code != 2 || !strings.Contains(stderr, "remove it") {
		t.Errorf("a damaged dev.json: exit %d with %q", code, stderr)
	}
}

func TestSpan(t *testing.T) {
	t.Parallel()
	for d, want := range map[time.Duration]string{
		-time.Second: "0.0s", 1500 * time.Millisecond: "1.5s", 42 * time.Second: "42s", 3 * time.Minute: "3m", 5 * time.Hour: "5h", 72 * time.Hour: "3d",
	} {
		if got := span(d); got != want {
			t.Errorf("%v is %q, want %q", d, got, want)
		}
	}
}

func TestShowSession(t *testing.T) {
	t.Parallel()
	now := time.Date(2026, 11, 29, 12, 0, 0, 0, time.UTC)
	live := false
	d := crdb.SessionDetail{
		SessionSummary: crdb.SessionSummary{
			Session: "s1", State: "running", Since: now.Add(-12 * time.Second), Worker: "worker-1", LeaseLive: &live,
			Epoch: 3, LastSeq: 17, Relayed: 16, BareWakes: 1, CreatedAt: now.Add(-time.Hour), Now: now,
		},
		Claim: &crdb.ClaimDetail{
			Execution: "0f4a90c1-1111-4111-8111-111111111111", Worker: "worker-1", Phase: claims.Running, PhaseAt: now.Add(-3 * time.Second),
			Steps: 2, Step: "7c1e22aa-2222-4222-8222-222222222222", Revoked: claims.Unknown, Scanner: true,
		},
		Quarantine: &crdb.QuarantineDetail{Reason: claims.ReasonNoProgress, Lane: "claims", Detail: "11 takeovers", Evidence: []byte(`{"claim":{}}`), Since: now},
		Inputs: []crdb.PendingInput{
			{ID: "in_1", State: "armed", Delivery: "queue", NotBefore: now.Add(time.Minute), AdmittedAt: now.Add(-time.Second), Body: []byte(`"\u001b[2J"`), Bytes: 12},
			{ID: "in_2", State: "unarmed", Delivery: "steer", AdmittedAt: now.Add(-time.Second), Bytes: 5000},
		},
		Wakes:    []time.Time{now.Add(time.Hour)},
		Promised: []crdb.PromisedStep{{Number: 1, Kind: claims.KindRetry, Step: "8d2e22bb-3", Attempt: 2, NotBefore: now}, {Number: 2}},
		Steps: []claims.ClosedStep{
			{Step: "aaaaaaaaaa", Status: claims.StepEnded, Result: []byte("3"), Text: "hi\x1b\n", Inputs: []claims.Input{{ID: "in_0"}}},
			{Step: "bbbbbbbbbb", Status: claims.StepFailed, Result: []byte("null")},
		},
	}
	var got bytes.Buffer
	if err := showSession(&got, d); err != nil {
		t.Fatal(err)
	}
	golden(t, "testdata/show.golden", got.Bytes())

	got.Reset()
	broken := d.SessionSummary
	broken.Session, broken.State, broken.Reason, broken.LeaseLive, broken.Worker = "a-longer-name", "quarantined", claims.ReasonNoProgress, nil, ""
	rows := [][]string{{"SESSION", "STATE", "FOR", "WORKER", "PENDING", "EVENTS"}, sessionRow(d.SessionSummary), sessionRow(broken)}
	if err := (streams{out: &got}).table(rows); err != nil {
		t.Fatal(err)
	}
	golden(t, "testdata/sessions.golden", got.Bytes())
}

func golden(t *testing.T, file string, got []byte) {
	t.Helper()
	if os.Getenv("UPDATE_GOLDEN") != "" {
		if err := os.WriteFile(file, got, 0o644); err != nil {
			t.Fatal(err)
		}
	}
	want, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	if !bytes.Equal(got, want) {
		t.Errorf("got:\n%s\nwant %s (UPDATE_GOLDEN=1 writes it):\n%s", got, file, want)
	}
}

// TestStopped: who stops waiting for a server hears no error, only the exit code.
func TestStopped(t *testing.T) {
	t.Parallel()
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	var out, errs bytes.Buffer
	err := run(ctx, []string{"wake", "s1", "--nats-url", "nats://127.0.0.1:1"}, &out, &errs)
	var exit *flags.Exit
	if !errors.As(err, &exit) || exit.Code != 130 || exit.Message != "" {
		t.Errorf("got %v, want exit 130 without a word", err)
	}
}

// What the client logs while a command waits is told in the command's own words: a line each, without time and level.
func TestSayer(t *testing.T) {
	var out bytes.Buffer
	log := slog.New(&sayer{streams: streams{err: &out}, level: slog.LevelWarn})
	log.Info("connected to NATS")
	log.Warn("lost NATS, reconnecting", "error", "EOF")
	if want := "reveille: lost NATS, reconnecting (error: EOF)\n"; out.String() != want {
		t.Errorf("said %q, want %q", out.String(), want)
	}
}

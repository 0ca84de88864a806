package main

import (
	"bytes"
	"encoding/json"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"

	"reveille/claims"
	"reveille/claims/crdb"
	"reveille/cmd/internal/devstate"
	"reveille/internal/dbtest"
)

// ward is a database with quarantined sessions.
type ward struct {
	t     *testing.T
	url   string
	store *crdb.Store
	seq   int64
}

func newWard(t *testing.T) *ward {
	t.Helper()
	w := &ward{t: t, url: dbtest.New(t)}
	store, err := crdb.Open(t.Context(), w.url, crdb.Options{})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(store.Close)
	w.store = store
	return w
}

func (w *ward) ok(err error) {
	w.t.Helper()
	if err != nil {
		w.t.Fatal(err)
	}
}

func (w *ward) apply(cmd claims.Command, acq *claims.Acquisition) {
	w.t.Helper()
	w.seq++
	cmd.Sequence, cmd.Time = w.seq, w.seq*1000
	_, err := w.store.Apply(w.t.Context(), cmd, acq)
	w.ok(err)
}

// quarantine makes a session one whose worker died while it cancelled the step of input a; input b waits.
func (w *ward) quarantine(session claims.SessionID) {
	w.t.Helper()
	acq := claims.Acquisition{Holder: claims.HolderID(uuid.NewString()), Worker: "w", Execution: claims.ExecutionID(uuid.NewString()), Step: claims.StepID(uuid.NewString())}
	w.ok(w.store.OpenLease(w.t.Context(), claims.Lease{Holder: acq.Holder, Kind: "worker", Name: "w", Version: "v", Slots: 1}, time.Hour))
	in := func(id string) *claims.Input {
		return &claims.Input{ID: id, Delivery: claims.Queue, Body: json.RawMessage(`{"say":"hello"}`)}
	}
	w.apply(claims.Command{Kind: claims.Wake, Session: session, Input: in("a")}, &acq)
	w.apply(claims.Command{Kind: claims.Wake, Session: session, Input: in("b")}, nil)
	w.apply(claims.Command{Kind: claims.Interrupt, Session: session, Reason: "user pressed stop"}, nil)
	conn, err := pgx.Connect(w.t.Context(), w.url)
	w.ok(err)
	defer conn.Close(w.t.Context())
	_, err = conn.Exec(w.t.Context(), "UPDATE leases SET expires_at = statement_timestamp() - INTERVAL '1 second' WHERE holder = $1", string(acq.Holder))
	w.ok(err)
	_, err = w.store.EndExpired(w.t.Context(), claims.Candidate{Session: session, Execution: acq.Execution}, false, &claims.Token{ID: uuid.NewString()})
	w.ok(err)
}

// reveille runs a command line on the database.
func (w *ward) reveille(code int, args string) (stdout, stderr string) {
	w.t.Helper()
	stdout, stderr, got := call(w.t, append(strings.Fields(args), "--database-url", w.url)...)
	if got != code {
		w.t.Fatalf("reveille %s: exit %d, want %d\n%s\n%s", args, got, code, stdout, stderr)
	}
	return stdout, stderr
}

func wants(t *testing.T, got string, want ...string) {
	t.Helper()
	for _, w := range want {
		if !strings.Contains(got, w) {
			t.Errorf("no %q in:\n%s", w, got)
		}
	}
}

func TestI30QuarantineCommands(t *testing.T) {
	t.Parallel()
	w := newWard(t)
	if _, stderr := w.reveille(0, "quarantine list"); stderr != "reveille: no session is quarantined\n" {
		t.Errorf("an empty list says %q", stderr)
	}
	for i := range 5 {
		w.quarantine(claims.SessionID(fmt.Sprintf("s%d", i)))
	}
	stdout, stderr := w.reveille(0, "quarantine list --limit 2")
	if lines := strings.Split(stdout, "\n"); len(lines) != 4 || !strings.HasPrefix(lines[1], "s0 ") || !strings.HasPrefix(lines[2], "s1 ") || !strings.Contains(stderr, "there are more") {
		t.Errorf("the two oldest are:\n%s%s", stdout, stderr)
	}
	if stdout, _ := w.reveille(0, "quarantine list --reason superseded"); stdout != "" {
		t.Errorf("of another reason: %s", stdout)
	}
	stdout, _ = w.reveille(0, "quarantine list --json --reason cancellation_outcome_unknown")
	var first crdb.Quarantine
	if err := json.Unmarshal([]byte(strings.Split(stdout, "\n")[0]), &first); err != nil || first.Session != "s0" || first.Reason != claims.ReasonOutcomeUnknown || first.ID == "" {
		t.Errorf("the first is %+v, %v", first, err)
	}

	stdout, _ = w.reveille(0, "quarantine show s0")
	wants(t, stdout, "quarantined", "cancellation_outcome_unknown", "cancelling, execution", "user pressed stop", `"inputs":["a"]`, "b (queue)",
		"retry", "fails the open step as worker_lost and continues it", "interrupted", "closes the open step as interrupted", "discard", "cancels 1 pending",
		"execution.cancelling", "session.quarantined")
	stdout, _ = w.reveille(0, "quarantine show s0 --json")
	var shown struct {
		Quarantine crdb.QuarantineDetail
		Events     []claims.Event
		Inputs     []crdb.PendingInput
	}
	if err := json.Unmarshal([]byte(stdout), &shown); err != nil || shown.Quarantine.ID != first.ID || len(shown.Events) == 0 || len(shown.Inputs) != 1 {
		t.Errorf("as JSON: %+v, %v", shown, err)
	}

	stdout, _ = w.reveille(0, "quarantine release s0 --as retry --why checked --by ann")
	if stdout != "released s0 as retry; it is ready\n" {
		t.Errorf("a release says %q", stdout)
	}
	events, err := w.store.Tail(t.Context(), "s0", 2)
	w.ok(err)
	if len(events) != 2 || string(events[0].Data) != `{"how":"retry","by":"ann","why":"checked"}` || events[1].Type != claims.StepFailedEvent {
		t.Errorf("the log ends with %+v", events)
	}
	for _, command := range []string{"show s0", "release s0 --as discard --why again"} {
		_, stderr = w.reveille(1, "quarantine "+command)
		wants(t, stderr, "session s0 is not quarantined but ready", "nothing was changed")
	}
	_, stderr = w.reveille(1, "quarantine release nobody --as discard --why x")
	wants(t, stderr, "no session nobody")
	if after, err := w.store.Tail(t.Context(), "s0", 2); err != nil || after[1].Seq != events[1].Seq {
		t.Errorf("a release of what is not quarantined appended something: %v %v", after, err)
	}

	_, stderr = w.reveille(0, "quarantine release --reason superseded --as discard --why none --yes")
	wants(t, stderr, "no session is quarantined as superseded")
	stdout, _ = w.reveille(0, "quarantine release --reason cancellation_outcome_unknown --as discard --why all --yes --json")
	if n := strings.Count(stdout, `"how":"discard","ready":false`); n != 4 {
		t.Errorf("all of one reason: %s", stdout)
	}
	if stdout, _ = w.reveille(0, "quarantine list"); stdout != "" {
		t.Errorf("left are: %s", stdout)
	}
}

// TestReleaseOfOneReasonAsks, and only yes is one; where nobody can be asked it says so.
func TestReleaseOfOneReasonAsks(t *testing.T) {
	t.Parallel()
	w := newWard(t)
	w.quarantine("s")
	release := quarantineReleaseCmd{As: "interrupted", Why: "x", By: "y", Reason: string(claims.ReasonOutcomeUnknown), databaseFlags: databaseFlags{DatabaseURL: w.url, devFlags: devFlags{Timeout: 5 * time.Second}}}
	for _, c := range []struct{ answer, says string }{
		{"n\n", "nothing was changed"}, {"\n", "nothing was changed"}, {"", "nothing was changed"}, {"yes\n", "released s as interrupted; it is ready"},
	} {
		var out, errs bytes.Buffer
		w.ok(release.run(t.Context(), streams{in: strings.NewReader(c.answer), out: &out, err: &errs, servers: &devstate.Discovery{}}))
		wants(t, errs.String()+out.String(), "release 1 sessions that are quarantined as cancellation_outcome_unknown as interrupted? [y/N]", c.says)
	}
	w.quarantine("t")
	_, stderr := w.reveille(2, "quarantine release --reason cancellation_outcome_unknown --as retry --why x")
	wants(t, stderr, "say --yes")
}

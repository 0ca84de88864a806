package crdb_test

import (
	"strings"
	"testing"
	"time"

	"github.com/google/uuid"

	"reveille/claims"
	"reveille/claims/crdb"
	"reveille/internal/dbtest"
)

func TestServerAndSchema(t *testing.T) {
	t.Parallel()
	url := dbtest.New(t)
	s := open(t, url)
	version, err := s.Version(t.Context())
	if err != nil || !strings.HasPrefix(version, "PostgreSQL ") && !strings.HasPrefix(version, "CockroachDB ") {
		t.Errorf("version %q, %v", version, err)
	}
	now, err := s.Now(t.Context())
	if err != nil || time.Since(now).Abs() > time.Hour {
		t.Errorf("the database's time is %v, %v", now, err)
	}
	there, needed, err := s.Schema(t.Context())
	if err != nil || there != needed || needed < 18 {
		t.Errorf("schema %d of %d, %v", there, needed, err)
	}
	c := connect(t, url)
	change := func(statement string) {
		t.Helper()
		if _, err := c.Exec(t.Context(), statement); err != nil {
			t.Fatal(err)
		}
	}
	change("INSERT INTO goose_db_version (version_id, is_applied) SELECT max(version_id) + 1, TRUE FROM goose_db_version")
	if newer, _, err := s.Schema(t.Context()); err != nil || newer != needed+1 {
		t.Errorf("a newer schema is %d, %v, want %d", newer, err, needed+1)
	}
	change("DELETE FROM goose_db_version WHERE version_id >= (SELECT max(version_id) - 1 FROM goose_db_version)")
	if older, _, err := s.Schema(t.Context()); err != nil || older != needed-1 {
		t.Errorf("an older schema is %d, %v, want %d", older, err, needed-1)
	}
	if none, again, err := open(t, dbtest.NewEmpty(t)).Schema(t.Context()); err != nil || none != 0 || again != needed {
		t.Errorf("without a schema it is %d of %d, %v", none, again, err)
	}
}

func open(t *testing.T, url string) *crdb.Store {
	t.Helper()
	s, err := crdb.Open(t.Context(), url, crdb.Options{})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(s.Close)
	return s
}

func TestOverdue(t *testing.T) {
	t.Parallel()
	url := dbtest.New(t)
	v := &shown{t: t, store: open(t, url), holder: claims.HolderID(uuid.NewString())}
	c := connect(t, url)
	change := func(statement string, args ...any) {
		t.Helper()
		if tag, err := c.Exec(t.Context(), statement, args...); err != nil || tag.RowsAffected() == 0 {
			t.Fatalf("%s: %d rows, %v", statement, tag.RowsAffected(), err)
		}
	}
	// is: each age, in minutes.
	is := func(what string, claims, sessions, continuations, events int) {
		t.Helper()
		o, err := v.store.Overdue(t.Context())
		if err != nil {
			t.Fatalf("%s: %v", what, err)
		}
		got, want := [4]int{}, [4]int{claims, sessions, continuations, events}
		for i, age := range []time.Duration{o.Claims, o.Sessions, o.Continuations, o.Events} {
			got[i] = int(age.Minutes())
		}
		if got != want {
			t.Errorf("%s: %v minutes, want %v", what, got, want)
		}
	}
	is("nothing", 0, 0, 0, 0)
	if err := v.store.OpenLease(t.Context(), claims.Lease{Holder: v.holder, Kind: "worker", Name: "w"}, time.Hour); err != nil {
		t.Fatal(err)
	}
	v.apply(wake("runs", "a"), v.holder)
	v.apply(wake("waits", "a"), "")
	v.apply(claims.Command{Kind: claims.Wake, Session: "later", NotBefore: time.Now().Add(24 * time.Hour)}, "")
	is("all is fresh", 0, 0, 0, 0)
	change("UPDATE sessions SET ready_at = statement_timestamp() - INTERVAL '90 minutes 5 seconds' WHERE session_id = 'waits'")
	is("a session is ready for long", 0, 90, 0, 0)
	change("UPDATE events SET created_at = statement_timestamp() - INTERVAL '80 minutes 5 seconds'")
	is("events are not relayed for long", 0, 90, 0, 80)
	for _, session := range []claims.SessionID{"runs", "waits", "later"} {
		_, records, err := v.store.Unrelayed(t.Context(), session, 100)
		if err != nil {
			t.Fatal(err)
		}
		if len(records) == 0 {
			continue
		}
		if err := v.store.NoteRelayed(t.Context(), []claims.Mark{{Session: session, Seq: records[len(records)-1].Seq}}); err != nil {
			t.Fatal(err)
		}
	}
	is("all events are relayed", 0, 90, 0, 0)
	change("UPDATE leases SET expires_at = statement_timestamp() - INTERVAL '70 minutes 5 seconds'")
	is("a worker is lost for long", 70, 90, 0, 0)
	change(`INSERT INTO continuations (session_id, number, shard, lineage, not_before, due_at, body)
		SELECT session_id, 1, shard, '11111111-1111-4111-8111-111111111111', statement_timestamp() - INTERVAL '60 minutes 5 seconds', statement_timestamp(), '{}'
		FROM sessions WHERE session_id IN ('runs', 'waits')`)
	is("a continuation is due for long", 70, 90, 60, 0)
	change("DELETE FROM continuations WHERE session_id = 'waits'")
	is("a continuation of a session with a claim", 70, 90, 0, 0)
	change("DELETE FROM claims")
	is("the expired lease has no claim", 0, 90, 0, 0)
}

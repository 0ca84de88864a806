package crdb_test

import (
	"testing"
	"time"

	"reveille/claims"
	"reveille/claims/crdb"
	"reveille/internal/dbtest"
	"reveille/internal/faultproxy"
)

// rowWrites counts the rows that f's store writes. A backend of PostgreSQL tells its counts at the latest when it ends,
// so the store is closed and its backends' end is waited for.
func rowWrites(t *testing.T, f func(r *rig)) (rows int64, seen faultproxy.Stats) {
	t.Helper()
	url := dbtest.New(t)
	watch := rigOn(t, url, url, crdb.Options{})
	p := newProxy(t, url, 0)
	count := func() int64 {
		watch.exec("SELECT pg_stat_force_next_flush()")
		watch.exec("SELECT pg_stat_clear_snapshot()")
		return scan[int64](watch, "SELECT COALESCE(sum(n_tup_ins + n_tup_upd + n_tup_del), 0)::INT8 FROM pg_stat_user_tables")
	}
	s, err := crdb.Open(t.Context(), p.URL(), crdb.Options{AppName: "counted"})
	if err != nil {
		t.Fatal(err)
	}
	r := *watch
	r.store = s
	before, was := count(), p.Stats()
	f(&r)
	now := p.Stats()
	s.Close()
	for scan[int64](watch, "SELECT count(*) FROM pg_stat_activity WHERE application_name = 'counted' AND datname = current_database()") > 0 {
		watch.exec("SELECT pg_stat_clear_snapshot()")
	}
	return count() - before, faultproxy.Stats{Commits: now.Commits - was.Commits, Statements: now.Statements - was.Statements}
}

// TestADrainedSessionCosts two transactions and the note of the relay, and eight rows.
func TestADrainedSessionCosts(t *testing.T) {
	if dbtest.Engine(t) != "postgres" {
		return // the counters are PostgreSQL's
	}
	for name, first := range map[string]func(*rig){
		"new session": nothing,
		"old session": func(r *rig) { r.run(input("before")); r.ok(r.finish(nil)) },
	} {
		t.Run(name, func(t *testing.T) {
			base, _ := rowWrites(t, first)
			rows, seen := rowWrites(t, func(r *rig) {
				first(r)
				r.run(input("a"))
				r.ok(r.finish(nil))
				r.ok(r.store.NoteRelayed(r.ctx(), []claims.Mark{{Session: r.session, Seq: int64(len(r.briefs()))}}))
			})
			if rows -= base; rows > 8 {
				t.Errorf("%d rows are written, want at most 8", rows)
			}
			commits := 3
			if name == "old session" {
				commits += 2
			}
			if seen.Commits != commits {
				t.Errorf("%d transactions, want %d", seen.Commits, commits)
			}
			t.Logf("%d rows, %+v", rows, seen)
		})
	}
}

// TestI17AHeartbeatCostsTheSame however many sessions the process runs.
func TestI17AHeartbeatCostsTheSame(t *testing.T) {
	if dbtest.Engine(t) != "postgres" {
		return // the counters are PostgreSQL's
	}
	beat := func(live int) (int64, faultproxy.Stats) {
		return rowWrites(t, func(r *rig) {
			// Counted with the rest, and taken off below.
			r.exec(`INSERT INTO claims SELECT 's' || i, gen_random_uuid(), gen_random_uuid(), $1::UUID, FALSE, 1, 'running', '', '', '', 1, NULL, NULL,
				statement_timestamp(), statement_timestamp(), statement_timestamp() FROM generate_series(1, $2::INT8) AS i`, string(r.holder), live)
			for range 3 {
				alive, err := r.store.Heartbeat(r.ctx(), r.holder, time.Hour)
				r.ok(err)
				notices, err := r.store.Notices(r.ctx(), r.holder)
				r.ok(err)
				if !alive || len(notices) != 0 {
					t.Fatalf("alive %v, notices %v", alive, notices)
				}
			}
		})
	}
	one, stmtsOne := beat(1)
	many, stmtsMany := beat(5000)
	if one-1 != 3 || many-5000 != 3 {
		t.Errorf("3 heartbeats write %d rows with one claim, %d with 5000; want 3", one-1, many-5000)
	}
	if stmtsOne != stmtsMany {
		t.Errorf("statements: %+v with one claim, %+v with 5000", stmtsOne, stmtsMany)
	}
}

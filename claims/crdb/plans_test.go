package crdb_test

import (
	"encoding/json"
	"fmt"
	"io/fs"
	"path"
	"slices"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5"

	"reveille/claims/crdb"
	"reveille/internal/dbtest"
	"reveille/sql"
)

// planNode is a node of EXPLAIN (FORMAT JSON).
type planNode struct {
	Type     string     `json:"Node Type"`
	Relation string     `json:"Relation Name"`
	Index    string     `json:"Index Name"`
	Cond     string     `json:"Index Cond"`
	Plans    []planNode `json:"Plans"`
}

func (n planNode) walk(f func(planNode)) {
	f(n)
	for _, p := range n.Plans {
		p.walk(f)
	}
}

// Statements that may read more than their keys say: what people ask for, and what is once in a while.
var offTheHotPath = []string{"quarantined", "delete_dead_leases", "schema_version"}

// laneIndexes are the indexes that statements are made for.
var laneIndexes = map[string]string{
	"due_sessions": "sessions_ready", "due_retentions": "sessions_kept", "due_relays": "sessions_relay", "due_continuations": "continuations_due", "next_due": "continuations_due", "revoked_claims": "claims_revoked",
	"dead_holders": "claims_holder", "holder_claims": "claims_holder", "next_holder": "claims_holder", "held": "claims_holder", "notices": "claims_notice",
	"due_inputs": "inputs_pending", "lock_session": "claims_pkey", "close_lease": "claims_holder",
}

// wholeIndex are statements that walk an index in its order from its end, at most to their LIMIT.
var wholeIndex = []string{"revoked_claims"}

// wholeTable are statements that read a table of one row a process.
var wholeTable = map[string]string{"dead_holders": "leases"}

// readCommitted are the statements that the store runs at READ COMMITTED, where a read locks nothing: to walk all of an
// index of nothing is no harm there. They must use theirs where there is much.
var readCommitted = []string{
	"dead_holders", "due_continuations", "due_relays", "due_retentions", "due_sessions", "held", "history", "holder_claims", "next_due", "next_holder", "note_relayed", "notices", "relayed_sessions", "replay", "revoked_claims",
	"touch_claims", "touch_continuations", "touch_relays", "touch_retentions", "touch_sessions", "unrelayed",
}

// TestPlans: no statement of the hot path scans a table, or walks all of one of its indexes, whatever the planner believes
// about its size: on PostgreSQL at SERIALIZABLE that would lock all of it against every other session. (enable_seqscan
// is no help against the walk: it is how a join reads a table that is believed to be empty.)
func TestPlans(t *testing.T) {
	if dbtest.Engine(t) != "postgres" {
		return // CockroachDB has no such lock
	}
	url := dbtest.New(t)
	c := connect(t, url+"&default_transaction_isolation=serializable")
	if err := crdb.PrepareConn(t.Context(), c); err != nil {
		t.Fatal(err)
	}
	for _, size := range []struct {
		name string
		fill []string
	}{
		{"empty", nil},
		{"small", fill(3, 2)},
		{"large", fill(20_000, 5_000)},
		{"drained", []string{"DELETE FROM claims", "DELETE FROM wakes", "DELETE FROM continuations"}}, // the tables keep their pages
	} {
		t.Run(size.name, func(t *testing.T) {
			for _, sql := range append(size.fill, "ANALYZE") {
				if _, err := c.Exec(t.Context(), sql); err != nil {
					t.Fatalf("%s: %v", sql, err)
				}
			}
			names, err := fs.Glob(sql.Statements, "statements/*.sql")
			if err != nil {
				t.Fatal(err)
			}
			for _, file := range names {
				name := strings.TrimSuffix(path.Base(file), ".sql")
				if slices.Contains(offTheHotPath, name) || strings.HasPrefix(name, "inspect_") {
					continue
				}
				text, err := sql.Statements.ReadFile(file)
				if err != nil {
					t.Fatal(err)
				}
				if size.name != "large" && slices.Contains(readCommitted, name) {
					continue
				}
				checkPlan(t, c, name, string(text))
			}
		})
	}
}

// fill makes rows in every table, in place of those that were there.
func fill(sessions, claims int) []string {
	return []string{
		"TRUNCATE leases, sessions, claims, inputs, wakes, continuations, events",
		`INSERT INTO leases SELECT gen_random_uuid(), 'worker', 'w', 'v', 1, statement_timestamp(), statement_timestamp() FROM generate_series(1, 20)`,
		fmt.Sprintf(`INSERT INTO sessions (session_id, shard, epoch, last_seq, relayed_seq, command_seq, command_time, position, unarmed, armed, delayed, wakes, wakes_served,
			promised, continuations, takeovers, ready_at, ready_due_at, relay_due_at, created_at, updated_at)
			SELECT 's' || i, i %% 8, 1, 1, 0, 1, 1, 1, 0, 1, 0, 0, 0, 0, 0, 0, statement_timestamp(), statement_timestamp(), statement_timestamp(),
			statement_timestamp(), statement_timestamp() FROM generate_series(1, %d) AS i`, sessions),
		fmt.Sprintf(`INSERT INTO claims SELECT 's' || i, gen_random_uuid(), gen_random_uuid(), (SELECT holder FROM leases OFFSET i %% 20 LIMIT 1), FALSE, 1, 'running', '',
			CASE WHEN i %% 50 = 0 THEN 'unknown' ELSE '' END, '', 1, NULL, NULL, statement_timestamp(), statement_timestamp(), statement_timestamp()
			FROM generate_series(1, %d) AS i`, claims),
		fmt.Sprintf(`INSERT INTO inputs SELECT 's' || i, 'in' || k, k, 'queue', CASE WHEN k = 3 THEN 'armed' ELSE 'covered' END, statement_timestamp(), '{}', '', NULL,
			statement_timestamp() FROM generate_series(1, %d) AS i, generate_series(1, 3) AS k`, sessions),
		fmt.Sprintf(`INSERT INTO wakes SELECT 's' || i, 9, statement_timestamp() FROM generate_series(1, %d) AS i`, sessions/10),
		fmt.Sprintf(`INSERT INTO continuations (session_id, number, shard, lineage, not_before, due_at, body) SELECT 's' || i, 1, i %% 8, gen_random_uuid(), statement_timestamp(), statement_timestamp(), '{}' FROM generate_series(1, %d) AS i`, sessions/4),
		fmt.Sprintf(`INSERT INTO events SELECT 's' || i, k, k, 1, gen_random_uuid(), '{}', statement_timestamp() FROM generate_series(1, %d) AS i, generate_series(1, 2) AS k`, sessions),
	}
}

func checkPlan(t *testing.T, c *pgx.Conn, name, text string) {
	t.Helper()
	ctx := t.Context()
	if _, err := c.Exec(ctx, "PREPARE p AS "+text); err != nil {
		t.Fatalf("%s: %v", name, err)
	}
	defer func() {
		if _, err := c.Exec(ctx, "DEALLOCATE p"); err != nil {
			t.Error(err)
		}
	}()
	var n int
	if err := c.QueryRow(ctx, "SELECT cardinality(parameter_types) FROM pg_prepared_statements WHERE name = 'p'").Scan(&n); err != nil {
		t.Fatal(err)
	}
	execute := "EXPLAIN (FORMAT JSON) EXECUTE p"
	if n > 0 {
		execute += "(" + strings.TrimSuffix(strings.Repeat("NULL, ", n), ", ") + ")"
	}
	var raw string
	if err := c.QueryRow(ctx, execute, pgx.QueryExecModeSimpleProtocol).Scan(&raw); err != nil {
		t.Fatalf("%s: %v", name, err)
	}
	var plans []struct{ Plan planNode }
	if err := json.Unmarshal([]byte(raw), &plans); err != nil {
		t.Fatal(err)
	}
	used := map[string]bool{}
	plans[0].Plan.walk(func(n planNode) {
		used[n.Index] = true
		switch {
		case n.Type == "Seq Scan" && wholeTable[name] == n.Relation:
		case n.Type == "Seq Scan":
			t.Errorf("%s scans %s", name, n.Relation)
		case strings.HasSuffix(n.Type, "Index Scan") || n.Type == "Index Only Scan":
			if n.Cond == "" && !slices.Contains(wholeIndex, name) {
				t.Errorf("%s walks all of index %s", name, n.Index)
			}
		case n.Type == "Hash Join" || n.Type == "Merge Join":
			t.Errorf("%s has a %s", name, n.Type)
		}
	})
	if want := laneIndexes[name]; want != "" && !used[want] {
		t.Errorf("%s does not use index %s: %s", name, want, raw)
	}
}

package crdb_test

import (
	"encoding/json"
	"fmt"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5"

	"reveille/claims/crdb"
	"reveille/internal/dbtest"
	"reveille/sql"
)

// scanNode is a node of EXPLAIN (ANALYZE, FORMAT JSON), with what it read.
type scanNode struct {
	Type     string     `json:"Node Type"`
	Relation string     `json:"Relation Name"`
	Rows     float64    `json:"Actual Rows"`
	Removed  float64    `json:"Rows Removed by Filter"`
	Recheck  float64    `json:"Rows Removed by Index Recheck"`
	Loops    float64    `json:"Actual Loops"`
	Plans    []scanNode `json:"Plans"`
}

// read is how many rows of tables the plan looked at.
func (n scanNode) read() (rows float64) {
	if n.Relation != "" && !strings.HasPrefix(n.Type, "Modify") {
		rows = (n.Rows + n.Removed + n.Recheck) * n.Loops
	}
	for _, p := range n.Plans {
		rows += p.read()
	}
	return rows
}

// TestI29LanesReadAFewRows: with 200,000 sessions, 50,000 claims and 20,000 continuations, most of them with nothing for a
// scanner to do, each statement of a lane reads a small multiple of its batch, whether much is due or nothing.
func TestI29LanesReadAFewRows(t *testing.T) {
	if dbtest.Engine(t) != "postgres" {
		return // its EXPLAIN is another one
	}
	c := connect(t, dbtest.New(t)+"&default_transaction_isolation=serializable")
	if err := crdb.PrepareConn(t.Context(), c); err != nil {
		t.Fatal(err)
	}
	const batch = 100
	shards := []int64{0, 1, 2, 3, 4, 5, 6, 7}
	// A mark of every session is in the future, and one in forty-one is due: 5,000 of each lane. One holder in four is dead.
	for _, statement := range append(fill(200_000, 50_000),
		"DELETE FROM continuations WHERE substr(session_id, 2)::INT8 > 20000",
		"UPDATE continuations SET due_at = CASE WHEN substr(session_id, 2)::INT8 % 5 = 0 THEN statement_timestamp() ELSE statement_timestamp() + INTERVAL '1 hour' END",
		`UPDATE sessions SET ready_due_at = CASE WHEN m THEN at ELSE at + INTERVAL '1 hour' END, relay_due_at = CASE WHEN m THEN at ELSE at + INTERVAL '1 hour' END,
			kept_since = CASE WHEN m THEN at - INTERVAL '10 days' ELSE at END
			FROM (SELECT session_id AS id, substr(session_id, 2)::INT8 % 41 = 0 AS m, statement_timestamp() AS at FROM sessions) AS u WHERE u.id = sessions.session_id`,
		"UPDATE leases SET expires_at = statement_timestamp() + CASE WHEN ascii(substr(holder::TEXT, 1, 1)) % 4 = 0 THEN INTERVAL '-1 second' ELSE INTERVAL '1 hour' END",
		"UPDATE claims SET due_at = due_at - substr(session_id, 2)::INT8 * INTERVAL '1 millisecond'",
		"UPDATE claims SET revoked = '' WHERE substr(session_id, 2)::INT8 % 1000 <> 0",
		"ANALYZE") {
		if strings.HasPrefix(statement, "INSERT INTO inputs") {
			continue // no lane reads them
		}
		if _, err := c.Exec(t.Context(), statement); err != nil {
			t.Fatalf("%s: %v", statement, err)
		}
	}
	var dead []string
	rows, err := c.Query(t.Context(), "SELECT holder::TEXT FROM leases WHERE expires_at < statement_timestamp()")
	if err == nil {
		dead, err = pgx.CollectRows(rows, pgx.RowTo[string])
	}
	if err != nil || len(dead) == 0 {
		t.Fatalf("%d dead holders, %v", len(dead), err)
	}
	ids := make([]string, batch)
	for i := range ids {
		ids[i] = fmt.Sprintf("s%d", 41*(i+1))
	}
	for _, lane := range []struct {
		name, statement string
		most            float64 // rows
		args            []any
	}{
		{"revoked_claims", sql.RevokedClaims, batch, []any{batch}},
		{"dead_holders", sql.DeadHolders, 2 * batch, []any{batch}},
		{"next_holder", sql.NextHolder, 2, []any{"00000000-0000-0000-0000-000000000000"}},
		{"holder_claims", sql.HolderClaims, 3 * batch, []any{dead[:1], []string{"2000-01-01"}, []string{""}, batch}},
		{"due_continuations", sql.DueContinuations, 17 * batch, []any{shards, batch}},
		{"due_sessions", sql.DueSessions, 9 * batch, []any{shards, batch}},
		{"due_relays", sql.DueRelays, 10 * batch, []any{shards, batch}},
		{"due_retentions", sql.DueRetentions, 9 * batch, []any{shards, 7 * 24 * 3_600_000_000, batch}},
		{"next_due", sql.NextDue, 2 * 8 * 64, []any{shards, 1_000_000, 64}},
		{"relayed_sessions", sql.RelayedSessions, 2 * batch, []any{"s5", batch}},
		{"touch_sessions", sql.TouchSessions, 3 * batch, []any{ids, 5_000_000}},
		{"touch_relays", sql.TouchRelays, 3 * batch, []any{ids, 5_000_000}},
		{"touch_retentions", sql.TouchRetentions, 3 * batch, []any{ids, 7 * 24 * 3_600_000_000, 5_000_000}},
		{"lock_session", sql.LockSession, 3, []any{"s41"}},
		{"notices", sql.Notices, batch, []any{dead[0]}},
	} {
		tx, err := c.BeginTx(t.Context(), pgx.TxOptions{IsoLevel: pgx.ReadCommitted})
		if err != nil {
			t.Fatal(err)
		}
		literal := lane.statement
		for i := len(lane.args); i > 0; i-- {
			literal = strings.ReplaceAll(literal, fmt.Sprintf("$%d::", i), quoted(lane.args[i-1])+"::")
		}
		var raw string
		if err := tx.QueryRow(t.Context(), "EXPLAIN (ANALYZE, FORMAT JSON) "+literal).Scan(&raw); err != nil {
			t.Fatalf("%s: %v\n%s", lane.name, err, literal)
		}
		if err := tx.Rollback(t.Context()); err != nil {
			t.Fatal(err)
		}
		var plans []struct{ Plan scanNode }
		if err := json.Unmarshal([]byte(raw), &plans); err != nil {
			t.Fatal(err)
		}
		read := plans[0].Plan.read()
		t.Logf("%s reads %.0f rows", lane.name, read)
		if read == 0 && lane.name != "notices" || read > lane.most {
			t.Errorf("%s reads %.0f rows, want 1 to %.0f: %s", lane.name, read, lane.most, raw)
		}
	}
}

// quoted is a value as a literal of SQL.
func quoted(v any) string {
	switch v := v.(type) {
	case string:
		return "'" + v + "'"
	case []string:
		return "ARRAY['" + strings.Join(v, "','") + "']"
	case []int64:
		return "ARRAY" + strings.ReplaceAll(fmt.Sprint(v), " ", ",")
	default:
		return fmt.Sprint(v)
	}
}

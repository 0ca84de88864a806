package sql_test

import (
	"cmp"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"reveille/sql"
)

var comment = regexp.MustCompile(`(?m)--.*$`)

// files reads all files of a folder, without their comments but those of goose.
func files(t *testing.T, fsys fs.FS, folder string) map[string]string {
	t.Helper()
	names, err := fs.Glob(fsys, folder+"/*.sql")
	if err != nil || len(names) == 0 {
		t.Fatalf("%s: %d files, %v", folder, len(names), err)
	}
	out := map[string]string{}
	for _, name := range names {
		raw, err := fs.ReadFile(fsys, name)
		if err != nil {
			t.Fatal(err)
		}
		out[path.Base(name)] = comment.ReplaceAllStringFunc(string(raw), func(c string) string {
			if strings.HasPrefix(c, "-- +goose") {
				return c
			}
			return ""
		})
	}
	return out
}

// refused is what one of the engines does not take, or docs/database.md does not want.
var refused = []struct {
	pattern *regexp.Regexp
	why     string
}{
	{regexp.MustCompile(`(?i)SELECT\s+(\w+\.)?\*|RETURNING\s+\*`), "columns are named"},
	{regexp.MustCompile(`(?i)\bnow\s*\(`), "the time of BEGIN decides no lease; statement_timestamp() does"},
	{regexp.MustCompile(`(?i)\b(clock_timestamp|current_timestamp|transaction_timestamp|localtimestamp|current_time|current_date)\b`), "volatile, or the time of BEGIN"},
	{regexp.MustCompile(`(?i)\b(small|big)?serial\b|\bIDENTITY\b|\bnextval\b|\bSEQUENCE\b`), "no sequences"},
	{regexp.MustCompile(`(?i)\b(gen_random_uuid|uuid_generate_v4|random)\s*\(`), "ids are the application's, over its retries"},
	{regexp.MustCompile(`[^/*]/[^/*]`), "CockroachDB divides integers to a DECIMAL"},
	{regexp.MustCompile(`(?i)\b(LISTEN|NOTIFY|pg_notify)\b`), "not on CockroachDB"},
	{regexp.MustCompile(`(?i)advisory`), "advisory locks do nothing on CockroachDB"},
	{regexp.MustCompile(`(?i)\bDEFERR`), "not on CockroachDB"},
	{regexp.MustCompile(`(?i)\bUPSERT\b|AS OF SYSTEM TIME`), "not on PostgreSQL"},
	{regexp.MustCompile(`(?i)\bTRIGGER\b|\bENUM\b|\bCREATE (TYPE|FUNCTION|EXTENSION)\b`), "TEXT with a CHECK, no code in the database"},
	{regexp.MustCompile(`(?i)\b(INTEGER|INT|INT4|INT2|SMALLINT|BIGINT|VARCHAR|CHAR|TIMESTAMP|JSON|FLOAT8?|REAL)\b(\s*\(|\s*,|\s+NOT|\s*\[|\s*$)`), "one name a type: INT8, TEXT, TIMESTAMPTZ"},
	{regexp.MustCompile(`(?i)::\s*(INTEGER|INT|INT4|BIGINT|VARCHAR|TIMESTAMP)\b`), "one name a type: INT8, TEXT, TIMESTAMPTZ"},
	{regexp.MustCompile(`(?i)SKIP LOCKED|FOR SHARE|\bLOCK TABLE\b`), "locks order, they don't exclude"},
	{regexp.MustCompile(`(?i)\bSAVEPOINT\b|\bSET (LOCAL|SESSION)\b|\bBEGIN\b|\bCOMMIT\b`), "transactions are the store's"},
	{regexp.MustCompile(`;\s*\S`), "one statement a file"},
	{regexp.MustCompile(`(?i)\bIS (NOT )?DISTINCT FROM\b.*\bANY\b`), "not on CockroachDB"},
	{regexp.MustCompile(`(?i)\bREFERENCES\b|\bFOREIGN KEY\b`), "a foreign key reads a row the fence does not"},
	{regexp.MustCompile(`(?i)\bTRUNCATE\b`), "not in a transaction on CockroachDB"},
}

func TestNothingThatAnEngineRefuses(t *testing.T) {
	all := files(t, sql.Statements, "statements")
	for name, text := range files(t, sql.Migrations, "migrations") {
		// goose runs the parts one by one.
		all["up of "+name], all["down of "+name], _ = strings.Cut(text, "-- +goose Down")
	}
	for name, text := range all {
		text = regexp.MustCompile(`--.*`).ReplaceAllString(text, "")
		for _, r := range refused {
			if found := r.pattern.FindString(strings.TrimSpace(text)); found != "" {
				t.Errorf("%s has %q: %s", name, found, r.why)
			}
		}
	}
}

// TestTheListFinds holds the list itself: each of these is refused.
func TestTheListFinds(t *testing.T) {
	for _, bad := range []string{
		"SELECT * FROM t", "SELECT t.* FROM t", "SELECT now()", "SELECT clock_timestamp()", "id SERIAL", "SELECT a / 2", "LISTEN x",
		"SELECT pg_advisory_lock(1)", "UPSERT INTO t", "CONSTRAINT c DEFERRABLE", "CREATE TYPE x AS ENUM", "a INT NOT NULL", "$1::INTEGER",
		"SELECT 1; SELECT 2", "FOR UPDATE SKIP LOCKED", "id INT8 REFERENCES t", "DELETE FROM t RETURNING *", "SELECT random()",
	} {
		if !slices.ContainsFunc(refused, func(r struct {
			pattern *regexp.Regexp
			why     string
		},
		) bool {
			return r.pattern.MatchString(bad)
		}) {
			t.Errorf("%q passes", bad)
		}
	}
}

func TestPlaceholdersAreCast(t *testing.T) {
	placeholder := regexp.MustCompile(`\$(\d+)(::[A-Z0-9]+(\[\])?)?`)
	types := []string{"::INT8", "::TEXT", "::UUID", "::TIMESTAMPTZ", "::BOOL", "::INT8[]", "::TEXT[]", "::UUID[]", "::TIMESTAMPTZ[]"}
	for name, text := range files(t, sql.Statements, "statements") {
		most, seen := 0, map[string]string{}
		for _, m := range placeholder.FindAllStringSubmatch(text, -1) {
			if !slices.Contains(types, m[2]) {
				t.Errorf("%s has %s: want a cast to one of %v", name, m[0], types)
			}
			if was, ok := seen[m[1]]; ok && was != m[2] {
				t.Errorf("%s casts $%s to %s and to %s", name, m[1], was, m[2])
			}
			seen[m[1]] = m[2]
			most = max(most, len(seen))
		}
		if most != len(seen) {
			t.Errorf("%s: %v", name, seen)
		}
		for i := range seen {
			if len(i) == 0 || i == "0" {
				t.Errorf("%s has $%s", name, i)
			}
		}
	}
}

// TestOneMutationAStatement: CockroachDB refuses two of one table, PostgreSQL silently applies one.
func TestOneMutationAStatement(t *testing.T) {
	mutation := regexp.MustCompile(`(?i)\bINSERT\s+INTO\b|\bDELETE\s+FROM\b|\bUPDATE\s+\w+\s+(AS\s+\w+\s+)?SET\b`)
	for name, text := range files(t, sql.Statements, "statements") {
		text = regexp.MustCompile(`(?i)\bDO\s+UPDATE\s+SET\b`).ReplaceAllString(text, "")
		if found := mutation.FindAllString(text, -1); len(found) > 1 {
			t.Errorf("%s has %v", name, found)
		}
	}
}

// nullable are the columns without NOT NULL, by name over all tables.
func nullable(t *testing.T) []string {
	t.Helper()
	column := regexp.MustCompile(`(?m)^\s+(\w+)\s+(INT8|TEXT|UUID|TIMESTAMPTZ|BOOL|JSONB|BYTEA)\b(.*)$`)
	var out []string
	for _, text := range files(t, sql.Migrations, "migrations") {
		for _, m := range column.FindAllStringSubmatch(text, -1) {
			if !strings.Contains(m[3], "NOT NULL") {
				out = append(out, m[1])
			}
		}
	}
	if len(out) == 0 {
		t.Fatal("no nullable columns: the pattern is wrong")
	}
	return out
}

// TestOrderOfNulls: PostgreSQL puts NULLs last, CockroachDB first; where one can be, the order says which.
func TestOrderOfNulls(t *testing.T) {
	order := regexp.MustCompile(`(?is)ORDER\s+BY\s+(.*?)(LIMIT|\)|FOR\s+UPDATE|$)`)
	columns := nullable(t)
	for name, text := range files(t, sql.Statements, "statements") {
		for _, m := range order.FindAllStringSubmatch(text, -1) {
			for term := range strings.SplitSeq(m[1], ",") {
				fields := strings.Fields(term)
				if len(fields) == 0 {
					continue
				}
				column := fields[0][strings.LastIndex(fields[0], ".")+1:]
				// A comparison is never true of a NULL.
				notNull := regexp.MustCompile(`(?i)\b` + regexp.QuoteMeta(column) + `\s*(IS\s+NOT\s+NULL|<=?|>=?)`)
				if slices.Contains(columns, column) && !strings.Contains(strings.ToUpper(term), "NULLS ") && !notNull.MatchString(text) {
					t.Errorf("%s orders by %s, which may be NULL, and does not say where those go", name, column)
				}
			}
		}
	}
}

func TestMigrations(t *testing.T) {
	name := regexp.MustCompile(`^\d{5}_[a-z_]+\.sql$`)
	ddl := regexp.MustCompile(`(?i)\b(CREATE|DROP|ALTER)\s+(UNIQUE\s+)?(TABLE|INDEX)\b`)
	version := 0
	all := files(t, sql.Migrations, "migrations")
	for _, file := range sortedKeys(all) {
		version++
		text := all[file]
		if !name.MatchString(file) || strings.TrimLeft(file[:5], "0") == "" {
			t.Errorf("%s is no name of a migration", file)
		}
		up, down, ok := strings.Cut(text, "-- +goose Down")
		if !ok || !strings.HasPrefix(text, "-- +goose NO TRANSACTION\n-- +goose Up\n") {
			t.Errorf("%s: want NO TRANSACTION, Up and Down", file)
		}
		for part, body := range map[string]string{"up": up, "down": down} {
			found := ddl.FindAllString(body, -1)
			if len(found) != 1 {
				t.Errorf("%s: %d DDL statements %s, want one", file, len(found), part)
			}
			if !regexp.MustCompile(`(?i)IF (NOT )?EXISTS`).MatchString(body) {
				t.Errorf("%s: %s is not idempotent", file, part)
			}
		}
	}
	if version == 0 {
		t.Error("no migrations")
	}
}

func sortedKeys(m map[string]string) []string {
	var out []string
	for k := range m {
		out = append(out, k)
	}
	slices.Sort(out)
	return out
}

// exported is a file's variable: claim_take_over.sql is ClaimTakeOver.
func exported(file string) string {
	var b strings.Builder
	for part := range strings.SplitSeq(strings.TrimSuffix(file, ".sql"), "_") {
		b.WriteString(strings.ToUpper(part[:1]) + part[1:])
	}
	return b.String()
}

// TestEveryStatementIsUsed by the store, and every one that it uses is a file.
func TestEveryStatementIsUsed(t *testing.T) {
	sources, err := filepath.Glob("../claims/crdb/*.go")
	if err != nil || len(sources) == 0 {
		t.Fatalf("%d sources of the store, %v", len(sources), err)
	}
	used := map[string]bool{}
	for _, file := range sources {
		if strings.HasSuffix(file, "_test.go") {
			continue
		}
		raw, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		imported := regexp.MustCompile(`(?m)^\t(\w+ )?"reveille/sql"$`).FindSubmatch(raw)
		if imported == nil {
			continue
		}
		as := cmp.Or(strings.TrimSpace(string(imported[1])), "sql")
		for _, m := range regexp.MustCompile(`\b`+as+`\.([A-Z]\w*)`).FindAllStringSubmatch(string(raw), -1) {
			used[m[1]] = true
		}
	}
	own, err := os.ReadFile("sql.go")
	if err != nil {
		t.Fatal(err)
	}
	there := map[string]bool{"Migrations": true, "Statements": true}
	for file := range files(t, sql.Statements, "statements") {
		v := exported(file)
		there[v] = true
		if !used[v] {
			t.Errorf("%s is not used by the store", file)
		}
		if embed := "//go:embed statements/" + file + "\n\t" + v + " string\n"; !strings.Contains(string(own), embed) {
			t.Errorf("%s is not embedded as %s", file, v)
		}
	}
	for v := range used {
		if !there[v] {
			t.Errorf("the store uses sql.%s, which is no file", v)
		}
	}
}

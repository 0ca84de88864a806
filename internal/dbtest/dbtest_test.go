package dbtest_test

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"strings"
	"sync"
	"testing"
	"time"

	"reveille/internal/dbtest"
	"reveille/internal/localdb"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"go.uber.org/goleak"
)

// noServerEnv makes this test binary one on a machine without a database server.
const noServerEnv = "DBTEST_TEST_NO_SERVER"

func TestMain(m *testing.M) { goleak.VerifyTestMain(dbtest.With(m, migrate)) }

// migrate leaves its connection open for a moment, as pools do, so that the template is in use when it returns.
func migrate(ctx context.Context, url string) error {
	conn, err := pgx.Connect(ctx, url)
	if err != nil {
		return err
	}
	if _, err := conn.Exec(ctx, "CREATE TABLE things (id INT8 PRIMARY KEY)"); err != nil {
		return errors.Join(err, conn.Close(ctx))
	}
	go func() { _ = conn.Close(context.WithoutCancel(ctx)) }()
	return nil
}

func connect(t *testing.T, url string) *pgx.Conn {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	conn, err := pgx.Connect(ctx, url)
	if err != nil {
		t.Fatal(err)
	}
	return conn
}

func count(t *testing.T, conn *pgx.Conn) (n int, err error) {
	t.Helper()
	err = conn.QueryRow(t.Context(), "SELECT count(*) FROM things").Scan(&n)
	return n, err
}

func TestEachTestHasItsOwnDatabase(t *testing.T) {
	var mu sync.Mutex
	urls := map[string]bool{}
	t.Run("group", func(t *testing.T) {
		for i := range 8 {
			t.Run(fmt.Sprint(i), func(t *testing.T) {
				t.Parallel()
				url := dbtest.New(t)
				mu.Lock()
				urls[url] = true
				mu.Unlock()
				conn := connect(t, url)
				defer conn.Close(context.Background())
				if n, err := count(t, conn); n != 0 || err != nil {
					t.Errorf("a new database has %d rows, %v", n, err)
				}
				if _, err := conn.Exec(t.Context(), "INSERT INTO things VALUES (1)"); err != nil {
					t.Error(err)
				}
			})
		}
	})
	if len(urls) != 8 {
		t.Errorf("%d different databases for 8 tests", len(urls))
	}
	for url := range urls {
		conn, err := pgx.Connect(t.Context(), url)
		if err == nil {
			conn.Close(t.Context())
			t.Errorf("a test's database is there after it")
		}
	}
}

func TestEmptyHasNoSchema(t *testing.T) {
	conn := connect(t, dbtest.NewEmpty(t))
	// Left open on purpose: the drop must not wait for it.
	t.Cleanup(func() { conn.Close(context.Background()) })
	_, err := count(t, conn)
	var pgErr *pgconn.PgError
	if !errors.As(err, &pgErr) || pgErr.Code != "42P01" {
		t.Errorf("reading a table: %v", err)
	}
}

func TestDropDoesNotWaitForConnections(t *testing.T) {
	var conn *pgx.Conn
	t.Run("leaks", func(t *testing.T) { conn = connect(t, dbtest.New(t)) })
	conn.Close(context.Background())
}

func TestEngine(t *testing.T) {
	if e := dbtest.Engine(t); e != localdb.EnginePostgres && e != localdb.EngineCockroach {
		t.Errorf("Engine = %q", e)
	}
}

func TestServerGoroutinesAreIgnored(t *testing.T) {
	dbtest.NewEmpty(t)
	goleak.VerifyNone(t, dbtest.IgnoreServer(), goleak.IgnoreCurrent())
}

// TestServerThatIsNotThere fails the test, with what is wrong, in a process of its own.
func TestServerThatIsNotThere(t *testing.T) {
	if os.Getenv(noServerEnv) != "" {
		dbtest.New(t)
		return
	}
	cmd := exec.Command(os.Args[0], "-test.run=^TestServerThatIsNotThere$")
	cmd.Env = append(os.Environ(), noServerEnv+"=1", dbtest.URLVariable+"=postgres://nobody@127.0.0.1:1/x")
	out, err := cmd.CombinedOutput()
	var exit *exec.ExitError
	if !errors.As(err, &exit) || !strings.Contains(string(out), dbtest.URLVariable) || strings.Contains(string(out), "SKIP") {
		t.Errorf("%v\n%s", err, out)
	}
}

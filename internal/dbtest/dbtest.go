// Package dbtest gives each test a database of its own.
//
//	func TestMain(m *testing.M) { dbtest.Main(m, crdb.Migrate) }
//
//	func TestX(t *testing.T) { url := dbtest.New(t) … }
//
// The server is the one of RV_TEST_DATABASE_URL, a URL whose user may create databases; `go run ./internal/testenv --
// go test ./...` starts one for all test binaries. Without it each test binary starts its own when a test first asks,
// and stops it at the end; a killed binary takes its server with it. There is no skipping: without a database server
// on the machine the test fails and says what to install.
//
// Tests that look for leaked goroutines give goleak IgnoreServer, and combine the two so:
//
//	func TestMain(m *testing.M) { goleak.VerifyTestMain(dbtest.With(m, crdb.Migrate)) }
package dbtest

import (
	"context"
	"crypto/rand"
	"encoding/hex"
	"errors"
	"fmt"
	"os"
	"strings"
	"sync"
	"testing"
	"time"

	"reveille/internal/localdb"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"go.uber.org/goleak"
)

// URLVariable names the environment variable with the server's URL.
const URLVariable = "RV_TEST_DATABASE_URL"

const (
	startTimeout = 2 * time.Minute // two cores, and other test binaries that start theirs
	stopTimeout  = 20 * time.Second
	// statementTimeout bounds creating and dropping one database; CockroachDB takes its time with many tables.
	statementTimeout = time.Minute

	// objectInUse: PostgreSQL copies no database that somebody is connected to.
	objectInUse = "55006"
	// busyPause between two tries to copy; what holds the template is a connection that is just closing.
	busyPause = 20 * time.Millisecond
)

// Migrate creates the schema in the database of a URL.
type Migrate func(ctx context.Context, url string) error

var errNoMain = errors.New("no database for tests: the package needs func TestMain(m *testing.M) { dbtest.Main(m, migrate) }")

// server is shared by all tests of the process: testing has no other place for it than a package variable.
var server shared

type shared struct {
	mu       sync.Mutex // guards the next two
	main     bool
	migrate  Migrate
	once     sync.Once
	template sync.Once

	// Written under once.
	local  *localdb.Server // nil where the server is somebody else's
	url    string
	engine string
	err    error

	// Written under template.
	templateName string
	templateErr  error
}

// Main runs the tests, stops the server if this process started it, and exits. migrate may be nil where no test calls New.
func Main(m *testing.M, migrate func(ctx context.Context, url string) error) {
	os.Exit(With(m, migrate).Run())
}

// With is Main without the exit, for goleak.VerifyTestMain. Its Run returns after the server has stopped.
func With(m *testing.M, migrate func(ctx context.Context, url string) error) interface{ Run() int } {
	server.mu.Lock()
	defer server.mu.Unlock()
	server.main, server.migrate = true, migrate
	return runner{m}
}

type runner struct{ m *testing.M }

func (r runner) Run() int {
	code := r.m.Run()
	if err := server.stop(); err != nil {
		fmt.Fprintln(os.Stderr, "dbtest:", err)
		code = max(code, 1)
	}
	return code
}

// IgnoreServer has goleak pass over the goroutines that wait for a server started by this process.
func IgnoreServer() goleak.Option {
	return localServer
}

var localServer = goleak.IgnoreAnyFunction("reveille/internal/localdb.(*process).run")

// New returns the URL of a new database with the schema and no rows. It is dropped at the end of the test, whoever is
// still connected.
func New(t testing.TB) string {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), startTimeout+statementTimeout)
	defer cancel()
	s := start(ctx, t)
	s.mu.Lock()
	migrate := s.migrate
	s.mu.Unlock()
	if migrate == nil {
		t.Fatal("dbtest.New: TestMain gave dbtest.Main no migrate function")
	}
	if s.engine != localdb.EnginePostgres {
		url := create(ctx, t, s, "")
		if err := migrate(ctx, url); err != nil {
			t.Fatalf("migrating a test database: %v", err)
		}
		return url
	}
	s.template.Do(func() { s.templateName, s.templateErr = s.makeTemplate(ctx, migrate) })
	if s.templateErr != nil {
		t.Fatalf("migrating the template of the test databases: %v", s.templateErr)
	}
	return create(ctx, t, s, s.templateName)
}

// NewEmpty returns the URL of a new database without the schema, dropped like New's.
func NewEmpty(t testing.TB) string {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), startTimeout+statementTimeout)
	defer cancel()
	return create(ctx, t, start(ctx, t), "")
}

// Engine is "postgres" or "cockroach".
func Engine(t testing.TB) string {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), startTimeout)
	defer cancel()
	return start(ctx, t).engine
}

func start(ctx context.Context, t testing.TB) *shared {
	t.Helper()
	server.mu.Lock()
	main := server.main
	server.mu.Unlock()
	if !main {
		t.Fatal(errNoMain)
	}
	server.once.Do(func() { server.err = server.start(ctx) })
	if server.err != nil {
		t.Fatalf("no database for tests: %v", server.err)
	}
	return &server
}

func (s *shared) start(ctx context.Context) error {
	s.url = os.Getenv(URLVariable)
	if s.url == "" {
		local, err := localdb.StartTemp(ctx, nil)
		if err != nil {
			return err
		}
		s.local, s.url = local, local.URL()
	} else if _, err := localdb.WithDatabase(s.url, "x"); err != nil {
		return fmt.Errorf("%s: %w", URLVariable, err)
	}
	version, err := s.version(ctx)
	if err != nil {
		return fmt.Errorf("the server of the tests does not answer (%s names one, if it is set): %w", URLVariable, err)
	}
	s.engine = localdb.EnginePostgres
	if strings.Contains(version, "CockroachDB") {
		s.engine = localdb.EngineCockroach
	}
	return nil
}

func (s *shared) version(ctx context.Context) (version string, err error) {
	err = s.admin(ctx, func(conn *pgx.Conn) error {
		return conn.QueryRow(ctx, "SELECT version()").Scan(&version)
	})
	return version, err
}

// stop drops the template and stops the server. It runs after all tests.
func (s *shared) stop() error {
	ctx, cancel := context.WithTimeout(context.Background(), stopTimeout)
	defer cancel()
	if s.local != nil {
		return s.local.Stop(ctx)
	}
	if s.templateName != "" {
		return s.drop(ctx, s.templateName)
	}
	return nil
}

// makeTemplate migrates once what each test then gets a copy of: that takes milliseconds where migrations take more.
func (s *shared) makeTemplate(ctx context.Context, migrate Migrate) (string, error) {
	name := newName("template")
	if err := s.exec(ctx, "CREATE DATABASE "+quote(name)); err != nil {
		return "", err
	}
	url, err := localdb.WithDatabase(s.url, name)
	if err == nil {
		err = migrate(ctx, url)
	}
	if err == nil {
		// Whoever is connected keeps it from being copied.
		err = s.exec(ctx, "ALTER DATABASE "+quote(name)+" WITH ALLOW_CONNECTIONS false")
	}
	if err != nil {
		return "", errors.Join(err, s.drop(context.WithoutCancel(ctx), name))
	}
	return name, nil
}

// create makes a database, a copy of template where there is one, and has it dropped at the end of the test.
func create(ctx context.Context, t testing.TB, s *shared, template string) string {
	t.Helper()
	name := newName("test")
	url, err := localdb.WithDatabase(s.url, name)
	if err != nil {
		t.Fatal(err)
	}
	statement := "CREATE DATABASE " + quote(name)
	if template != "" {
		statement += " TEMPLATE " + quote(template)
	}
	err = s.exec(ctx, statement)
	for inUse(err) && ctx.Err() == nil {
		select {
		case <-time.After(busyPause):
			err = s.exec(ctx, statement)
		case <-ctx.Done():
		}
	}
	if err != nil {
		t.Fatalf("creating a test database: %v", err)
	}
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), statementTimeout)
		defer cancel()
		if err := s.drop(ctx, name); err != nil {
			t.Errorf("dropping a test database: %v", err)
		}
	})
	return url
}

func inUse(err error) bool {
	var pgErr *pgconn.PgError
	return errors.As(err, &pgErr) && pgErr.Code == objectInUse
}

func (s *shared) drop(ctx context.Context, name string) error {
	how := " WITH (FORCE)" // ends connections that a test left
	if s.engine == localdb.EngineCockroach {
		how = " CASCADE"
	}
	return s.exec(ctx, "DROP DATABASE IF EXISTS "+quote(name)+how)
}

func (s *shared) exec(ctx context.Context, statement string) error {
	return s.admin(ctx, func(conn *pgx.Conn) error {
		_, err := conn.Exec(ctx, statement)
		return err
	})
}

// admin runs f on a connection of its own: tests are parallel, and a pool's goroutines would look like a test's leak.
func (s *shared) admin(ctx context.Context, f func(*pgx.Conn) error) error {
	ctx, cancel := context.WithTimeout(ctx, statementTimeout)
	defer cancel()
	conn, err := pgx.Connect(ctx, s.url)
	if err != nil {
		return err
	}
	return errors.Join(f(conn), conn.Close(context.WithoutCancel(ctx)))
}

// newName is unique on a server that many processes use at once.
func newName(kind string) string {
	b := make([]byte, 8)
	_, _ = rand.Read(b) // never fails: crypto/rand ends the program first
	return "rv_" + kind + "_" + hex.EncodeToString(b)
}

func quote(name string) string { return pgx.Identifier{name}.Sanitize() }

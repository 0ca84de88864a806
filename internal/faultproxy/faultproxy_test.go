package faultproxy_test

import (
	"context"
	"errors"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"go.uber.org/goleak"

	"reveille/internal/dbtest"
	"reveille/internal/faultproxy"
)

func TestMain(m *testing.M) {
	goleak.VerifyTestMain(dbtest.With(m, func(ctx context.Context, url string) error {
		c, err := pgx.Connect(ctx, url)
		if err != nil {
			return err
		}
		_, err = c.Exec(ctx, "CREATE TABLE things (id INT8 PRIMARY KEY)")
		return errors.Join(err, c.Close(ctx))
	}), dbtest.IgnoreServer())
}

// bench is a proxy with a client on each side of it.
type bench struct {
	t       *testing.T
	p       *faultproxy.Proxy
	through *pgx.Conn
	direct  *pgx.Conn
}

func newBench(t *testing.T, skew time.Duration) *bench {
	t.Helper()
	return startBench(t, skew, nil)
}

func newWatchedBench(t *testing.T, w faultproxy.Watcher) *bench {
	t.Helper()
	return startBench(t, 0, w)
}

func startBench(t *testing.T, skew time.Duration, w faultproxy.Watcher) *bench {
	t.Helper()
	url := dbtest.New(t)
	p, err := faultproxy.New(url, skew)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(p.Close)
	p.Watch(w)
	return &bench{t, p, dial(t, p.URL()), dial(t, url)}
}

func dial(t *testing.T, url string) *pgx.Conn {
	t.Helper()
	c, err := pgx.Connect(t.Context(), url)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = c.Close(context.Background()) })
	return c
}

// insert is a transaction of two statements and a batch of two, and what it answered.
func (b *bench) insert(c *pgx.Conn) error {
	ctx := b.t.Context()
	return pgx.BeginFunc(ctx, c, func(tx pgx.Tx) error {
		for id := range int64(2) {
			if _, err := tx.Exec(ctx, "INSERT INTO things VALUES ($1)", id+1); err != nil {
				return err
			}
		}
		batch := &pgx.Batch{}
		batch.Queue("INSERT INTO things VALUES ($1)", int64(3))
		batch.Queue("INSERT INTO things VALUES ($1)", int64(4))
		return tx.SendBatch(ctx, batch).Close()
	})
}

// rows counts what is there; a backend whose client was cut may still be ending, and holds its locks until then.
func (b *bench) rows() (n int) {
	b.t.Helper()
	err := pgx.BeginFunc(b.t.Context(), b.direct, func(tx pgx.Tx) error {
		if _, err := tx.Exec(b.t.Context(), "LOCK TABLE things"); err != nil {
			return err
		}
		return tx.QueryRow(b.t.Context(), "SELECT count(*) FROM things").Scan(&n)
	})
	if err != nil {
		b.t.Fatal(err)
	}
	return n
}

func code(err error) string {
	var pg *pgconn.PgError
	if errors.As(err, &pg) {
		return pg.Code
	}
	return ""
}

func TestWithoutFaults(t *testing.T) {
	b := newBench(t, 0)
	if err := b.insert(b.through); err != nil {
		t.Fatal(err)
	}
	if s := b.p.Stats(); s != (faultproxy.Stats{Commits: 1, Statements: 4, Last: 4}) {
		t.Errorf("saw %+v", s)
	}
	if fired := b.p.Disarm(); fired != 0 {
		t.Errorf("%d faults happened", fired)
	}
}

func TestFaults(t *testing.T) {
	for _, c := range []struct {
		fault   faultproxy.Fault
		code    string // "" with an error: the connection was lost
		ok      bool
		applied bool
	}{
		{faultproxy.Fault{Kind: faultproxy.Restart, At: 1}, "40001", false, false},
		{faultproxy.Fault{Kind: faultproxy.Restart, At: 2}, "40001", false, false},
		{faultproxy.Fault{Kind: faultproxy.Restart, At: 3}, "40001", false, false},
		{faultproxy.Fault{Kind: faultproxy.Restart, At: 4}, "40001", false, false},
		{faultproxy.Fault{Kind: faultproxy.Restart, At: faultproxy.Commit}, "40001", false, false},
		{faultproxy.Fault{Kind: faultproxy.UnknownApplied, At: faultproxy.Commit}, "40003", false, true},
		{faultproxy.Fault{Kind: faultproxy.UnknownDropped, At: faultproxy.Commit}, "40003", false, false},
		{faultproxy.Fault{Kind: faultproxy.CutBefore, At: 2}, "", false, false},
		{faultproxy.Fault{Kind: faultproxy.CutBefore, At: 4}, "", false, false},
		{faultproxy.Fault{Kind: faultproxy.CutDuring, At: 2}, "", false, false},
		{faultproxy.Fault{Kind: faultproxy.CutBefore, At: faultproxy.Commit}, "", false, false},
		{faultproxy.Fault{Kind: faultproxy.CutDuring, At: faultproxy.Commit}, "", false, true},
		{faultproxy.Fault{Kind: faultproxy.CutAfter, At: faultproxy.Commit}, "", true, true},
		{faultproxy.Fault{Kind: faultproxy.Delay, At: faultproxy.Commit, Delay: time.Millisecond}, "", true, true},
		{faultproxy.Fault{Kind: faultproxy.Delay, At: 3, Delay: time.Millisecond}, "", true, true},
	} {
		t.Run(c.fault.String(), func(t *testing.T) {
			b := newBench(t, 0)
			b.p.Arm(c.fault)
			err := b.insert(b.through)
			if (err == nil) != c.ok || code(err) != c.code {
				t.Errorf("answered %v, want code %q, ok %v", err, c.code, c.ok)
			}
			if fired := b.p.Disarm(); fired != 1 {
				t.Errorf("the fault happened %d times", fired)
			}
			if n := b.rows(); (n == 4) != c.applied || n != 0 && n != 4 {
				t.Errorf("%d rows, want all or none, applied %v", n, c.applied)
			}
			alive := b.through.Ping(t.Context()) == nil
			if want := c.code != "" || c.fault.Kind == faultproxy.Delay; alive != want {
				t.Errorf("the connection is alive %v, want %v", alive, want)
			}
			if alive { // and of use
				if _, err := b.through.Exec(t.Context(), "DELETE FROM things WHERE id > $1", int64(0)); err != nil {
					t.Error(err)
				}
				if err := b.insert(b.through); err != nil {
					t.Error(err)
				}
			}
		})
	}
}

func TestLateCommitLandsBehindTheNextTransaction(t *testing.T) {
	b := newBench(t, 0)
	b.p.Arm(faultproxy.Fault{Kind: faultproxy.Late, At: faultproxy.Commit})
	if err := b.insert(b.through); err == nil || code(err) != "" {
		t.Fatalf("answered %v", err)
	}
	// The same again waits for the old one, which is released by it, and finds its rows.
	if err := b.insert(dial(t, b.p.URL())); code(err) != "23505" {
		t.Fatalf("the second answered %v", err)
	}
	if n := b.rows(); n != 4 {
		t.Errorf("%d rows", n)
	}
}

func TestStalledCommitLandsWhenTheClientHasGivenUp(t *testing.T) {
	b := newBench(t, 0)
	b.p.Arm(faultproxy.Fault{Kind: faultproxy.Stall, At: faultproxy.Commit})
	ctx, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond)
	defer cancel()
	tx, err := b.through.Begin(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if _, err := tx.Exec(t.Context(), "INSERT INTO things VALUES ($1)", int64(1)); err != nil {
		t.Fatal(err)
	}
	if err := tx.Commit(ctx); !errors.Is(err, context.DeadlineExceeded) {
		t.Fatalf("answered %v", err)
	}
	// Whether it was cancelled or not, it has come to its end when the table can be locked.
	_ = b.rows()
}

func TestGates(t *testing.T) {
	b := newBench(t, 0)
	for _, c := range []struct {
		name string
		hold func() *faultproxy.Gate
		rows int // that others see while it waits
	}{
		{"second statement", func() *faultproxy.Gate { return b.p.Hold(2) }, 0},
		{"before COMMIT", func() *faultproxy.Gate { return b.p.Hold(faultproxy.Commit) }, 0},
		{"behind COMMIT", b.p.HoldCommitted, 4},
	} {
		if _, err := b.direct.Exec(t.Context(), "TRUNCATE things"); err != nil {
			t.Fatal(err)
		}
		gate := c.hold()
		done := make(chan error, 1)
		go func() { done <- b.insert(b.through) }()
		<-gate.Reached()
		var n int
		if err := b.direct.QueryRow(t.Context(), "SELECT count(*) FROM things").Scan(&n); err != nil || n != c.rows {
			t.Errorf("%s: others see %d rows, %v, want %d", c.name, n, err, c.rows)
		}
		gate.Release()
		if err := <-done; err != nil {
			t.Errorf("%s: %v", c.name, err)
		}
		if n := b.rows(); n != 4 {
			t.Errorf("%s: %d rows", c.name, n)
		}
	}
}

func TestSingleStatements(t *testing.T) {
	for kind, want := range map[faultproxy.Kind]struct {
		code string
		rows int
	}{faultproxy.Restart: {"40001", 0}, faultproxy.CutBefore: {"", 0}, faultproxy.CutDuring: {"", 1}} {
		b := newBench(t, 0)
		b.p.Arm(faultproxy.Fault{Kind: kind, At: faultproxy.Single})
		if _, err := b.through.Exec(t.Context(), "INSERT INTO things VALUES ($1)", int64(1)); err == nil || code(err) != want.code {
			t.Errorf("%v answered %v", kind, err)
		}
		if n := b.rows(); n != want.rows {
			t.Errorf("%v: %d rows, want %d", kind, n, want.rows)
		}
	}
}

func TestSkew(t *testing.T) {
	const skew = -30 * time.Minute
	b := newBench(t, skew)
	var there, here time.Time
	if err := b.through.QueryRow(t.Context(), "SELECT statement_timestamp() WHERE $1 = 1", int64(1)).Scan(&there); err != nil {
		t.Fatal(err)
	}
	if err := b.direct.QueryRow(t.Context(), "SELECT statement_timestamp()").Scan(&here); err != nil {
		t.Fatal(err)
	}
	if d := there.Sub(here); d > skew || d < skew-time.Minute {
		t.Errorf("the clock is off by %v, want %v", d, skew)
	}
}

// What a watcher sees of insert, by moment: the statements so far, and the last one's argument.
func TestWatcherSeesTransactions(t *testing.T) {
	const insert = "INSERT INTO things VALUES ($1)"
	type sight struct {
		at         faultproxy.Moment
		statements int
		sql        string
		arg        byte
	}
	var mu sync.Mutex
	var seen []sight
	b := newWatchedBench(t, func(at faultproxy.Moment, tx []faultproxy.Statement) bool {
		last := tx[len(tx)-1]
		if last.SQL != insert { // not ours: the prepared statement's description, a ping
			return true
		}
		mu.Lock()
		defer mu.Unlock()
		seen = append(seen, sight{at, len(tx), last.SQL, last.Args[0][7]})
		return true
	})
	if err := b.insert(b.through); err != nil {
		t.Fatal(err)
	}
	if _, err := b.through.Exec(t.Context(), insert, int64(5)); err != nil {
		t.Fatal(err)
	}
	want := []sight{
		{faultproxy.BeforeStatement, 1, insert, 1},
		{faultproxy.BeforeStatement, 2, insert, 2},
		{faultproxy.BeforeStatement, 3, insert, 3},
		{faultproxy.BeforeStatement, 4, insert, 4},
		{faultproxy.BeforeCommit, 4, insert, 4},
		{faultproxy.AfterCommit, 4, insert, 4},
		{faultproxy.BeforeStatement, 1, insert, 5}, // outside of any transaction
	}
	mu.Lock()
	defer mu.Unlock()
	if !slices.Equal(seen, want) {
		t.Errorf("saw %v, want %v", seen, want)
	}
}

func TestWatcherCutsOff(t *testing.T) {
	for _, c := range []struct {
		name    string
		at      faultproxy.Moment
		applied bool
	}{
		{"before a statement", faultproxy.BeforeStatement, false},
		{"before COMMIT", faultproxy.BeforeCommit, false},
		{"after COMMIT", faultproxy.AfterCommit, true},
	} {
		t.Run(c.name, func(t *testing.T) {
			b := newWatchedBench(t, func(at faultproxy.Moment, tx []faultproxy.Statement) bool {
				return at != c.at || len(tx) < 3
			})
			if err := b.insert(b.through); err == nil || code(err) != "" {
				t.Errorf("answered %v, want a lost connection", err)
			}
			if n := b.rows(); (n == 4) != c.applied || n != 0 && n != 4 {
				t.Errorf("%d rows, want all or none, applied %v", n, c.applied)
			}
		})
	}
}

func TestCloseWithAClientAtAGate(t *testing.T) {
	b := newBench(t, 0)
	gate := b.p.Hold(faultproxy.Commit)
	done := make(chan error, 1)
	go func() { done <- b.insert(b.through) }()
	<-gate.Reached()
	b.p.Close()
	if err := <-done; err == nil {
		t.Error("a client of a closed proxy heard of a commit")
	}
	if _, err := pgx.Connect(t.Context(), b.p.URL()); err == nil {
		t.Error("a closed proxy takes a connection")
	}
}

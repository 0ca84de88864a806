// Package crdb is the store: the only code of Reveille that executes SQL. It
// runs on CockroachDB v23.1 and later and, unchanged, on PostgreSQL 15 and
// later at SERIALIZABLE.
//
// Every operation is one serializable transaction on one session. It locks the
// session's row, reads the claim, asks claims.Next what may happen, and writes
// under the same fence that it read (I5): session, execution id, phase. The
// same function runs every transaction and retries it from BEGIN (see run);
// its body has no side effects.
//
// An operation whose COMMIT got no answer is run again under the token it wrote
// with its events: finding the token proves that it was done, and where it is
// not found the serializable transaction decides which of the two it was. An
// acquisition is the exception (I3).
//
// Methods are safe for concurrent use and take a context that bounds them; they
// answer the sentinels of package claims, wrapped with the operation and the
// session.
package crdb

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/prometheus/client_golang/prometheus"

	"reveille/claims"
)

// Bounds of a transaction.
const (
	// maxAttempts bounds the conflicts one operation sits out before it answers
	// an error; its caller decides whether to go on.
	maxAttempts = 30
	// maxReads bounds how often a read is begun that the database breaks off.
	maxReads    = 3
	firstPause  = 2 * time.Millisecond
	longestWait = 250 * time.Millisecond
	// beatConns: a heartbeat, and a read beside it.
	beatConns = 2
	// connectTimeout bounds a connection's start; it is longer than an attempt,
	// since starting anew is what a slow server can bear least.
	connectTimeout = 10 * time.Second
	// shards spreads the due indexes: a hot range on CockroachDB, a hot page on
	// PostgreSQL, is what one ordered head would be.
	shards = 8
)

// Options of a store. The zero value of each means its default.
type Options struct {
	// Timeout bounds one attempt of a transaction (--db-timeout, 2 s).
	Timeout time.Duration
	// MaxConns bounds the pool (default 16).
	MaxConns int32
	// MaxEventBytes is the largest event; the server's maximum payload less its headers (I24).
	MaxEventBytes int
	// AnnounceGrace is how long a scanner leaves a ready session to the process
	// that made it ready, which announces it itself (default 2 s).
	AnnounceGrace time.Duration
	// RelayGrace is how long a scanner leaves events to the process that appended them (default 5 s).
	RelayGrace time.Duration
	// AppName tells the database who connects.
	AppName string
}

func (o Options) withDefaults() Options {
	def := func(d *time.Duration, v time.Duration) {
		if *d == 0 {
			*d = v
		}
	}
	def(&o.Timeout, 2*time.Second)
	def(&o.AnnounceGrace, 2*time.Second)
	def(&o.RelayGrace, 5*time.Second)
	if o.MaxConns == 0 {
		o.MaxConns = 16
	}
	if o.MaxEventBytes == 0 {
		o.MaxEventBytes = 1<<20 - 4096
	}
	if o.AppName == "" {
		o.AppName = "reveille"
	}
	return o
}

// Store executes the operations of Reveille on one database.
type Store struct {
	pool *pgxpool.Pool
	// beat has connections of its own: a heartbeat, and what is read after it,
	// must not wait behind work for a connection of the pool (I17).
	beat *pgxpool.Pool
	opts Options
	// seen are sessions that are known to exist; it is a hint.
	seen seen
	// walk is where the walk over the holders of claims goes on; see orphanHolders.
	walk struct {
		mu    sync.Mutex
		after string
	}

	retries   *prometheus.CounterVec
	ambiguous *prometheus.CounterVec
	appended  *prometheus.CounterVec
}

// Open connects to the database at url and checks that its transactions are
// serializable. The schema must be there (see Migrate). It does not wait for a
// database that is not up: it answers what the connection answered.
func Open(ctx context.Context, url string, o Options) (*Store, error) {
	o = o.withDefaults()
	s := &Store{
		opts: o,
		retries: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "reveille_tx_retries_total", Help: "Transactions run again, by operation.",
		}, []string{"operation"}),
		ambiguous: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "reveille_tx_ambiguous_total", Help: "COMMITs whose outcome was unknown, by operation.",
		}, []string{"operation"}),
		appended: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "reveille_events_appended_total", Help: "Events appended to the log, by type.",
		}, []string{"type"}),
	}
	s.walk.after = uuid.Nil.String()
	var err error
	if s.pool, err = newPool(ctx, url, o, o.MaxConns); err != nil {
		return nil, err
	}
	if s.beat, err = newPool(ctx, url, o, beatConns); err != nil {
		s.pool.Close()
		return nil, err
	}
	return s, nil
}

// Close closes all connections, waiting for the operations that are under way.
func (s *Store) Close() {
	s.pool.Close()
	s.beat.Close()
}

// Collectors are the store's metrics.
func (s *Store) Collectors() []prometheus.Collector {
	return []prometheus.Collector{s.retries, s.ambiguous, s.appended}
}

// Ping answers whether the database can be reached.
func (s *Store) Ping(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, s.opts.Timeout)
	defer cancel()
	return s.beat.Ping(ctx)
}

func newPool(ctx context.Context, url string, o Options, conns int32) (*pgxpool.Pool, error) {
	cfg, err := parseURL(url)
	if err != nil {
		return nil, err
	}
	cfg.MaxConns = conns
	cfg.MaxConnLifetimeJitter = 5 * time.Minute
	cfg.ConnConfig.ConnectTimeout = connectTimeout
	cfg.ConnConfig.RuntimeParams["default_transaction_isolation"] = "serializable"
	cfg.ConnConfig.RuntimeParams["application_name"] = o.AppName
	// A process that stops, or whose machine is gone, in the middle of a
	// transaction would keep its session's row locked until TCP gives up.
	cfg.ConnConfig.RuntimeParams["idle_in_transaction_session_timeout"] = strconv.FormatInt((2 * o.Timeout).Milliseconds(), 10)
	cfg.AfterConnect = prepareConn
	pool, err := pgxpool.NewWithConfig(ctx, cfg)
	if err != nil {
		return nil, fmt.Errorf("database: %w", err)
	}
	ctx, cancel := context.WithTimeout(ctx, connectTimeout)
	defer cancel()
	if err := pool.Ping(ctx); err != nil {
		pool.Close()
		return nil, fmt.Errorf("database: %w", explained(url, err))
	}
	return pool, nil
}

// CheckURL refuses what is no URL of a database, without asking one.
func CheckURL(url string) error {
	_, err := parseURL(url)
	return err
}

func parseURL(url string) (*pgxpool.Config, error) {
	cfg, err := pgxpool.ParseConfig(url)
	if err != nil {
		return nil, fmt.Errorf("database URL: %w; want postgres://user:password@host:port/name", err)
	}
	return cfg, nil
}

// explained says what to do about a refusal of a server that a person has to do
// something about, by its SQLSTATE; another error it leaves.
func explained(url string, err error) error {
	cfg, parseErr := pgx.ParseConfig(url)
	var pg *pgconn.PgError
	if parseErr != nil || !errors.As(err, &pg) {
		return err
	}
	switch pg.Code {
	case "28P01", "28000": // invalid_password, invalid_authorization_specification
		return fmt.Errorf("%s does not let user %s in: check the name and the password in the URL (%w)", cfg.Host, cfg.User, pg)
	case "3D000": // invalid_catalog_name
		return fmt.Errorf("there is no database %s at %s: create it, or name another in the URL (%w)", cfg.Database, cfg.Host, pg)
	}
	return err
}

// prepareConn checks the isolation of a connection, and on PostgreSQL keeps
// its planner from plans that lock whole tables: a sequential scan, or a join
// that walks one, takes a predicate lock that makes any two sessions conflict.
func prepareConn(ctx context.Context, c *pgx.Conn) error {
	var isolation, version string
	if err := c.QueryRow(ctx, "SHOW default_transaction_isolation").Scan(&isolation); err != nil {
		return err
	}
	if isolation != "serializable" {
		return fmt.Errorf("database runs transactions at %q: want serializable; something between overrides default_transaction_isolation", isolation)
	}
	if err := c.QueryRow(ctx, "SELECT version()").Scan(&version); err != nil {
		return err
	}
	if strings.HasPrefix(version, "PostgreSQL") {
		_, err := c.Exec(ctx, "SET enable_seqscan = off; SET enable_hashjoin = off; SET enable_mergejoin = off; SET jit = off; SET plan_cache_mode = force_generic_plan")
		return err
	}
	return nil
}

// errAgain makes run try a transaction again: something moved between its read
// and its write that the database let through.
var errAgain = errors.New("claim moved under the transaction")

// run executes body in one transaction and retries it from BEGIN
// on a serialization failure, a deadlock, or a connection lost before COMMIT
// was sent. body may run many times and has no side effects. A COMMIT whose
// outcome is unknown sets token.Doubt and is run again, for the body to find
// its token; without a token it answers claims.ErrOutcomeUnknown at once.
func (s *Store) run(ctx context.Context, op string, level pgx.TxIsoLevel, token *claims.Token, body func(context.Context, pgx.Tx) error) error {
	pause := firstPause
	for attempt := 1; ; attempt++ {
		class, err := s.attempt(ctx, level, body)
		if err == nil {
			return nil
		}
		if errors.Is(err, errExists) { // it is seen now: no conflict to sit out
			continue
		}
		switch class {
		case retryable:
			s.retries.WithLabelValues(op).Inc()
		case ambiguous:
			s.ambiguous.WithLabelValues(op).Inc()
			if token == nil {
				return fmt.Errorf("%s: %w: %w", op, claims.ErrOutcomeUnknown, err)
			}
			token.Doubt = true
		default:
			return fmt.Errorf("%s: %w", op, err)
		}
		if attempt == maxAttempts {
			return fmt.Errorf("%s: given up after %d attempts: %w", op, attempt, err)
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("%s: %w (last: %w)", op, context.Cause(ctx), err)
		case <-time.After(pause/2 + rand.N(pause)):
		}
		pause = min(pause*2, longestWait)
	}
}

// attempt runs body once. The class says what a retry of its error would mean.
func (s *Store) attempt(ctx context.Context, level pgx.TxIsoLevel, body func(context.Context, pgx.Tx) error) (class, error) {
	// The time of an attempt begins when it has a connection, and the wait for one
	// is the caller's to bound. Otherwise, where many wait, each would get a
	// connection with no time left to use it, break it off and have the next wait
	// for a new one: a pool that is too busy for a moment would stay so.
	conn, err := s.pool.Acquire(ctx)
	if err != nil {
		return classify(err, beforeCommit), err
	}
	defer conn.Release()
	actx, cancel := context.WithTimeout(ctx, s.opts.Timeout)
	defer cancel()
	tx, err := conn.BeginTx(actx, pgx.TxOptions{IsoLevel: level})
	if err != nil {
		return classify(err, beforeCommit), err
	}
	if err := body(actx, tx); err != nil {
		rollback(ctx, tx, s.opts.Timeout)
		return classify(err, beforeCommit), err
	}
	// From here on an answer is wanted even where the caller has given up:
	// without it the outcome is unknown.
	cctx, ccancel := context.WithTimeout(context.WithoutCancel(ctx), s.opts.Timeout)
	defer ccancel()
	if err := tx.Commit(cctx); err != nil {
		return classify(err, atCommit), err
	}
	return fatal, nil
}

func rollback(ctx context.Context, tx pgx.Tx, timeout time.Duration) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), timeout)
	defer cancel()
	// Its error says only that the connection is gone, and with it the transaction.
	_ = tx.Rollback(ctx)
}

// query reads outside of any transaction that writes, by one statement at READ
// COMMITTED (which CockroachDB may raise). What is read so decides nothing by
// itself: whoever acts on it does so under a fence of its own. At SERIALIZABLE
// these reads would make PostgreSQL abort the owners that write beside them.
func query[T any](ctx context.Context, s *Store, op, statement string, scan pgx.RowToFunc[T], args ...any) ([]T, error) {
	return queryOn(ctx, s, s.pool, op, statement, scan, args...)
}

func queryOn[T any](ctx context.Context, s *Store, pool *pgxpool.Pool, op, statement string, scan pgx.RowToFunc[T], args ...any) ([]T, error) {
	for attempt := 1; ; attempt++ {
		out, err := readOn(ctx, s, pool, statement, scan, args...)
		if err == nil {
			return out, nil
		}
		var pg *pgconn.PgError // without one the server is gone, and the caller knows how long to wait for it
		if again := errors.As(err, &pg) && Unavailable(err); !again || attempt == maxReads || ctx.Err() != nil {
			return nil, fmt.Errorf("%s: %w", op, err)
		}
	}
}

func readOn[T any](ctx context.Context, s *Store, pool *pgxpool.Pool, statement string, scan pgx.RowToFunc[T], args ...any) (out []T, err error) {
	conn, err := pool.Acquire(ctx) // see attempt
	if err != nil {
		return nil, err
	}
	defer conn.Release()
	ctx, cancel := context.WithTimeout(ctx, s.opts.Timeout)
	defer cancel()
	err = pgx.BeginTxFunc(ctx, conn, pgx.TxOptions{IsoLevel: pgx.ReadCommitted, AccessMode: pgx.ReadOnly}, func(tx pgx.Tx) error {
		rows, err := tx.Query(ctx, statement, args...)
		if err != nil {
			return err
		}
		out, err = pgx.CollectRows(rows, scan)
		return err
	})
	return out, err
}

// exec runs one idempotent statement as its own transaction, with run's
// retries. At READ COMMITTED it is for statements whose condition is on the row
// that they write and on nothing else: relay marks and the scanner's touches.
func (s *Store) exec(ctx context.Context, op string, level pgx.TxIsoLevel, statement string, args ...any) (int64, error) {
	var tag pgconn.CommandTag
	err := s.run(ctx, op, level, &claims.Token{}, func(ctx context.Context, tx pgx.Tx) (err error) {
		tag, err = tx.Exec(ctx, statement, args...)
		return err
	})
	return tag.RowsAffected(), err
}

package crdb

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"io/fs"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	_ "github.com/jackc/pgx/v5/stdlib" // registers the driver that goose uses
	"github.com/pressly/goose/v3"
	"github.com/pressly/goose/v3/database"
	"github.com/pressly/goose/v3/lock"

	statements "reveille/sql"
)

// Bounds of the wait for another migrator: polled every second.
const (
	migrateLockTries = 120
	migratePoll      = time.Second
)

// Migration is one step of the schema.
type Migration struct {
	Version int64
	Name    string
	Applied bool
}

// Migrate creates or upgrades the schema of the database at url and returns
// what it did, or with dryRun what it would do. Any number of migrators may
// run at once: each step is applied once. A migration that was cut off is done
// again: every step is one idempotent statement.
func Migrate(ctx context.Context, url string, dryRun bool) ([]Migration, error) {
	if err := CheckURL(url); err != nil {
		return nil, err
	}
	db, err := sql.Open("pgx", url)
	if err != nil {
		return nil, fmt.Errorf("migrate: %w", err)
	}
	defer db.Close()
	db.SetConnMaxIdleTime(time.Minute)
	migrations, err := fs.Sub(statements.Migrations, "migrations")
	if err != nil {
		return nil, fmt.Errorf("migrate: %w", err)
	}
	locker, err := lock.NewPostgresTableLocker(lock.WithTableLockTimeout(migratePoll, migrateLockTries))
	if err != nil {
		return nil, fmt.Errorf("migrate: %w", err)
	}
	provider, err := goose.NewProvider(database.DialectPostgres, db, migrations, goose.WithLocker(locker))
	if err != nil {
		return nil, fmt.Errorf("migrate: %w", err)
	}
	if dryRun {
		all, err := pending(ctx, provider)
		if err != nil {
			return nil, fmt.Errorf("migrate: %w", explained(url, err))
		}
		return all, nil
	}
	results, err := provider.Up(ctx)
	if err != nil {
		return nil, fmt.Errorf("migrate: %w", explained(url, err))
	}
	var out []Migration
	for _, r := range results {
		out = append(out, Migration{Version: r.Source.Version, Name: r.Source.Path, Applied: true})
	}
	return out, nil
}

func pending(ctx context.Context, p *goose.Provider) ([]Migration, error) {
	all, err := p.Status(ctx)
	if err != nil {
		return nil, err
	}
	var out []Migration
	for _, st := range all {
		if st.State == goose.StatePending {
			out = append(out, Migration{Version: st.Source.Version, Name: st.Source.Path})
		}
	}
	return out, nil
}

// ErrNoSchema: the schema is missing or older than this program.
var ErrNoSchema = errors.New("database has no schema of this version: run reveille migrate")

// CheckSchema answers ErrNoSchema where the newest migration is not applied.
func (s *Store) CheckSchema(ctx context.Context) error {
	newest, err := newestMigration()
	if err != nil {
		return err
	}
	applied, err := query(ctx, s, "schema", statements.SchemaVersion, pgx.RowTo[int64])
	var pg *pgconn.PgError
	switch {
	case errors.As(err, &pg) && pg.Code == undefinedTable:
		return ErrNoSchema
	case err != nil:
		return err
	case len(applied) == 0 || applied[0] < newest:
		return ErrNoSchema
	}
	return nil
}

// undefinedTable is SQLSTATE 42P01.
const undefinedTable = "42P01"

func newestMigration() (int64, error) {
	files, err := fs.Glob(statements.Migrations, "migrations/*.sql")
	if err != nil {
		return 0, err
	}
	var newest int64
	for _, f := range files {
		v, err := goose.NumericComponent(f)
		if err != nil {
			return 0, err
		}
		newest = max(newest, v)
	}
	return newest, nil
}

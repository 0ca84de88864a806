package crdb

import (
	"context"
	"errors"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	"reveille/sql"
)

// overdueRows bounds what Overdue looks at, in each shard and of each kind.
const overdueRows = 2000

// Version is what the database says of its engine and version.
func (s *Store) Version(ctx context.Context) (string, error) {
	return one(query(ctx, s, "version", sql.InspectServer, pgx.RowTo[string]))
}

// Now is the database's clock, the one that judges leases (I4).
func (s *Store) Now(ctx context.Context) (time.Time, error) {
	return one(query(ctx, s, "now", sql.Now, pgx.RowTo[time.Time]))
}

// Schema is the version of the schema that is there, 0 where there is none, and
// the one that this program needs.
func (s *Store) Schema(ctx context.Context) (there, needed int64, err error) {
	if needed, err = newestMigration(); err != nil {
		return 0, 0, err
	}
	there, err = one(query(ctx, s, "schema", sql.SchemaVersion, pgx.RowTo[int64]))
	var pg *pgconn.PgError
	if errors.As(err, &pg) && pg.Code == undefinedTable {
		return 0, needed, nil
	}
	return there, needed, err
}

// Overdue is for how long the oldest of each kind of work has been due; 0 where
// nothing is.
type Overdue struct {
	Claims        time.Duration // since their holder's lease expired; revoked ones are not among them
	Sessions      time.Duration // ready, with no claim
	Continuations time.Duration // due, with no claim
	Events        time.Duration // appended, and not on the stream
}

// Overdue reads it, of what scanners would take first.
func (s *Store) Overdue(ctx context.Context) (Overdue, error) {
	return one(query(ctx, s, "overdue", sql.InspectOverdue, func(row pgx.CollectableRow) (Overdue, error) {
		var us [4]int64
		err := row.Scan(&us[0], &us[1], &us[2], &us[3])
		age := func(i int) time.Duration { return time.Duration(us[i]) * time.Microsecond }
		return Overdue{Claims: age(0), Sessions: age(1), Continuations: age(2), Events: age(3)}, err
	}, allShards, int64(overdueRows)))
}

// one is the row of a query that has exactly one.
func one[T any](rows []T, err error) (row T, _ error) {
	if err == nil && len(rows) != 1 {
		err = pgx.ErrTooManyRows
		if len(rows) == 0 {
			err = pgx.ErrNoRows
		}
	}
	if err != nil {
		return row, err
	}
	return rows[0], nil
}

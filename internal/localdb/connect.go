package localdb

import (
	"context"
	"errors"
	"fmt"
	"net/url"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
)

const (
	// connectTimeout bounds one connection: a firewall that drops packets must not use up the whole start.
	connectTimeout = 10 * time.Second

	invalidCatalogName = "3D000"
	duplicateDatabase  = "42P04"
	uniqueViolation    = "23505" // two CREATE DATABASE of one name at once, on PostgreSQL
)

// ensureDatabase connects to the database of a URL and creates it if it is not there.
func ensureDatabase(ctx context.Context, dbURL string) error {
	err := ping(ctx, dbURL)
	var pgErr *pgconn.PgError
	if !errors.As(err, &pgErr) || pgErr.Code != invalidCatalogName {
		return err
	}
	name, err := databaseOf(dbURL)
	if err != nil {
		return err
	}
	if err := createDatabase(ctx, dbURL, name); err != nil {
		return fmt.Errorf("creating the database %s: %w", name, err)
	}
	return ping(ctx, dbURL)
}

// createDatabase does so from the first database of the server that takes a connection.
func createDatabase(ctx context.Context, dbURL, name string) error {
	var first error
	for _, from := range []string{"postgres", "defaultdb"} {
		adminURL, err := WithDatabase(dbURL, from)
		if err != nil {
			return err
		}
		err = execute(ctx, adminURL, "CREATE DATABASE "+pgx.Identifier{name}.Sanitize())
		var pgErr *pgconn.PgError
		if err == nil || errors.As(err, &pgErr) && (pgErr.Code == duplicateDatabase || pgErr.Code == uniqueViolation) {
			return nil
		}
		if first == nil {
			first = err
		}
	}
	return first
}

func ping(ctx context.Context, dbURL string) error { return execute(ctx, dbURL, "SELECT 1") }

// execute runs one statement on a connection of its own.
func execute(ctx context.Context, dbURL, statement string) error {
	ctx, cancel := context.WithTimeout(ctx, connectTimeout)
	defer cancel()
	conn, err := pgx.Connect(ctx, dbURL)
	if err != nil {
		return oneLine{err}
	}
	_, err = conn.Exec(ctx, statement)
	return errors.Join(err, conn.Close(context.WithoutCancel(ctx)))
}

// oneLine puts an error's text on one line; pgx lists every address it tried on its own.
type oneLine struct{ error }

func (e oneLine) Error() string { return strings.Join(strings.Fields(e.error.Error()), " ") }
func (e oneLine) Unwrap() error { return e.error }

// WithDatabase returns the URL with another database in it.
func WithDatabase(dbURL, name string) (string, error) {
	u, err := parseURL(dbURL)
	if err != nil {
		return "", err
	}
	u.Path, u.RawPath = "/"+name, ""
	return u.String(), nil
}

func databaseOf(dbURL string) (string, error) {
	u, err := parseURL(dbURL)
	if err != nil {
		return "", err
	}
	return strings.TrimPrefix(u.Path, "/"), nil
}

// withDefaultDatabase adds the database to a URL that names none.
func withDefaultDatabase(dbURL string) (string, error) {
	name, err := databaseOf(dbURL)
	if err != nil || name != "" {
		return dbURL, err
	}
	return WithDatabase(dbURL, Database)
}

func parseURL(dbURL string) (*url.URL, error) {
	u, err := url.Parse(dbURL)
	if err != nil || (u.Scheme != "postgres" && u.Scheme != "postgresql") {
		// Not the text itself: it may hold a password.
		return nil, errors.New("the database's address is not a URL: write postgres://USER:PASSWORD@HOST:PORT/DATABASE")
	}
	return u, nil
}

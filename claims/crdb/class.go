package crdb

import (
	"context"
	"errors"
	"io"
	"net"
	"syscall"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
)

// class is what an error of the database means for the transaction it ended.
type class int

const (
	fatal     class = iota // also every error of our own: sentinels, bugs
	retryable              // nothing of it stays; run it again
	ambiguous              // it may have committed
	refused                // the database does not take these values (class 22, 23)
)

// where an error came from: at COMMIT the same error can mean something else.
type where bool

const (
	beforeCommit where = false
	atCommit     where = true
)

// classify maps an error to its class, once for all of the store.
func classify(err error, at where) class {
	if errors.Is(err, errAgain) || errors.Is(err, pgx.ErrTxCommitRollback) {
		return retryable
	}
	var pg *pgconn.PgError
	if !errors.As(err, &pg) {
		switch {
		case at == atCommit:
			return ambiguous // no server answered
		case isConnection(err):
			return retryable
		default:
			return fatal
		}
	}
	switch {
	case pg.Code == "40001" || pg.Code == "40P01":
		return retryable
	case pg.Code == "40003": // statement completion unknown
		return ambiguous
	case len(pg.Code) == 5 && (pg.Code[:2] == "08" || pg.Code[:3] == "57P"):
		// The connection or the server went away (57P01 to 57P03).
		if at == atCommit {
			return ambiguous
		}
		return retryable
	case pg.Code == "53300", // too many connections
		pg.Code == "25P03": // ended because this process was stopped in it: nothing of it was committed
		return retryable
	case len(pg.Code) == 5 && (pg.Code[:2] == "22" || pg.Code[:2] == "23"):
		return refused
	default:
		return fatal
	}
}

// isConnection reports whether an error before COMMIT is of the connection,
// not of what was asked: a refused, lost or timed-out connection.
func isConnection(err error) bool {
	var connect *pgconn.ConnectError
	var network interface{ Timeout() bool }
	return errors.As(err, &connect) || pgconn.SafeToRetry(err) || pgconn.Timeout(err) ||
		errors.As(err, &network) || errors.Is(err, context.DeadlineExceeded) || isClosed(err)
}

// Refused reports whether the database refused the values of a transaction
// (SQLSTATE class 22 or 23); it returns the code. A refused transaction may
// still be a serialization conflict on PostgreSQL, so one answer proves nothing.
func Refused(err error) (code string, ok bool) {
	var pg *pgconn.PgError
	if errors.As(err, &pg) && classify(err, beforeCommit) == refused {
		return pg.Code, true
	}
	return "", false
}

// isClosed reports whether the other end went away in the middle.
func isClosed(err error) bool {
	for _, e := range []error{io.EOF, io.ErrUnexpectedEOF, net.ErrClosed, syscall.ECONNRESET, syscall.EPIPE, syscall.ECONNREFUSED, pgconn.ErrConnClosed} {
		if errors.Is(err, e) {
			return true
		}
	}
	return false
}

// Unavailable reports whether an error says that the database, or its schema,
// is not there yet, or that it broke a read off: worth waiting for. A wrong
// password or a bad URL is not.
func Unavailable(err error) bool {
	var pg *pgconn.PgError
	if errors.As(err, &pg) {
		c := classify(err, beforeCommit)
		return c == retryable || c == ambiguous
	}
	return errors.Is(err, ErrNoSchema) || isConnection(err)
}

// Package doctor looks at a deployment of Reveille and says what is wrong with
// it and what to do: the database and its schema, the clocks, NATS, streams and
// durables, what a user may do, the processes that live, and the work that
// nobody does. It changes nothing.
//
// A finding is ok, warn (it works, with less than was promised, or not for
// long) or FAIL (something does not work). All checks run, whatever the others
// found; those that need a server that is not there are named by the finding
// that says so. Each check is bounded by the time-out, so a server that hangs is
// a FAIL.
package doctor

import (
	"context"
	"fmt"
	"strings"
	"time"

	"reveille/bus"
	"reveille/claims/crdb"
)

// Status is how bad a finding is.
type Status string

// The statuses.
const (
	OK   Status = "ok"
	Warn Status = "warn"
	Fail Status = "FAIL"
)

// Finding is what one check found.
type Finding struct {
	Status Status `json:"status"`
	Check  string `json:"check"`
	Found  string `json:"found"`
	Fix    string `json:"fix,omitempty"` // what to do; empty where it is ok
}

// Options of a run.
type Options struct {
	DatabaseURL  string // empty: none is named
	NATS         bus.Options
	Streams      bus.StreamOptions // as they are wanted
	MaxClockSkew time.Duration     // as workers have it
	Timeout      time.Duration     // of each check
	// Role is whose permissions the NATS user must have; empty: it is told what
	// the user can't do as any of them.
	Role bus.Role
}

// Run runs all checks and tells each finding as it comes. Errors: what tell
// returned, or of ctx where that ended.
func Run(ctx context.Context, o Options, tell func(Finding) error) error {
	d := &doctor{Options: o, now: time.Now}
	return d.run(ctx, tell)
}

// doctor is one run: what a check learned, later ones use.
type doctor struct {
	Options
	now func() time.Time // this machine's clock

	store      *crdb.Store       // nil: there is no database
	tables     bool              // it has a schema
	ahead      *interval         // the database's clock before this machine's; nil: not known
	live       []process         // workers and scanners
	conn       *bus.Conn         // nil: there is no NATS that could be asked
	inspection *bus.Inspection   // nil: the streams could not be looked at
	there      []bus.StreamFound // of these, the streams that are there
}

func (d *doctor) run(ctx context.Context, tell func(Finding) error) error {
	defer d.close()
	for _, check := range []func(context.Context) []Finding{
		d.database, d.schema, d.databaseClock, d.processes, d.quarantines, d.overdue,
		d.nats, d.jetStream, d.streams, d.durables, d.replicas, d.streamClock, d.permissions,
	} {
		bounded, cancel := context.WithTimeout(ctx, d.Timeout)
		findings := check(bounded)
		cancel()
		if ctx.Err() != nil {
			return ctx.Err()
		}
		for _, f := range findings {
			if err := tell(f); err != nil {
				return err
			}
		}
	}
	return nil
}

// close does not wait for a server that hangs.
func (d *doctor) close() {
	if d.conn != nil {
		d.conn.Close()
	}
	if d.store == nil {
		return
	}
	closed := make(chan struct{})
	go func() {
		defer close(closed)
		d.store.Close()
	}()
	late := time.NewTimer(d.Timeout)
	defer late.Stop()
	select {
	case <-closed:
	case <-late.C:
	}
}

func ok(check, format string, args ...any) Finding {
	return Finding{Status: OK, Check: check, Found: fmt.Sprintf(format, args...)}
}

// bad is a finding that is not ok; fix says what to do.
func bad(status Status, check, fix, format string, args ...any) Finding {
	return Finding{Status: status, Check: check, Found: fmt.Sprintf(format, args...), Fix: fix}
}

// oneLine is an error without its line breaks.
func oneLine(err error) string { return strings.Join(strings.Fields(err.Error()), " ") }

// counted is a number of things, in words.
func counted(n int, thing string) string {
	if n == 1 {
		return "1 " + thing
	}
	return fmt.Sprintf("%d %ss", n, thing)
}

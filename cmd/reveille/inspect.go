package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"
	"text/tabwriter"
	"time"

	"reveille/claims"
	"reveille/claims/crdb"
	"reveille/cmd/internal/flags"
	"reveille/cmd/reveille/internal/follow"
)

// pageSize is how many rows one read of a list takes.
const pageSize = 200

// line writes a line to standard output.
func (s streams) line(raw []byte) error {
	_, err := s.out.Write(append(raw, '\n'))
	return err
}

// json writes a value as one line of JSON.
func (s streams) json(v any) error {
	raw, err := claims.Marshal(v)
	if err != nil {
		return err
	}
	return s.line(raw)
}

// table writes rows of cells, aligned.
func (s streams) table(rows [][]string) error {
	w := tabwriter.NewWriter(s.out, 0, 0, 2, ' ', 0)
	for _, row := range rows {
		fmt.Fprintln(w, strings.Join(row, "\t"))
	}
	return w.Flush()
}

type sessionsCmd struct {
	// No variable: RV_STATE is the state folder of dev.
	State string `help:"Only those that are ready, running, cancelling or quarantined, those first that are so for longest." placeholder:"STATE" enum:"ready,running,cancelling,quarantined," default:"" env:"-"`
	Limit int    `help:"Most sessions to list; 0 lists all." default:"100"`
	JSON  bool   `name:"json" help:"One JSON object a line."`
	databaseFlags
}

func (c *sessionsCmd) run(ctx context.Context, s streams) error {
	if c.Limit < 0 {
		return flags.Usage("--limit %d: want 0 or more", c.Limit)
	}
	store, err := c.open(ctx, s)
	if err != nil {
		return err
	}
	defer store.Close()
	rows := [][]string{{"SESSION", "STATE", "FOR", "WORKER", "PENDING", "EVENTS"}}
	listed, more := 0, false
	for after := (crdb.Cursor{}); ; {
		page, next, err := store.Sessions(ctx, crdb.SessionState(c.State), after, pageSize)
		if err != nil {
			return err
		}
		if c.Limit > 0 && len(page) > c.Limit-listed {
			page, more = page[:c.Limit-listed], true
		}
		listed += len(page)
		for _, v := range page {
			if c.JSON {
				err = s.json(v)
			} else {
				rows = append(rows, sessionRow(v))
			}
			if err != nil {
				return err
			}
		}
		if more || next == nil {
			break
		}
		after = *next
	}
	switch {
	case c.JSON:
	case listed == 0:
		s.say("no session%s", map[bool]string{true: " is " + c.State}[c.State != ""])
	default:
		err = s.table(rows)
	}
	if more {
		s.say("there are more: --limit 0 lists all")
	}
	return err
}

func sessionRow(v crdb.SessionSummary) []string {
	state := string(v.State)
	switch {
	case v.Reason != "":
		state += " (" + string(v.Reason) + ")"
	case v.LeaseLive != nil && !*v.LeaseLive:
		state += " (expired)"
	}
	return []string{
		string(v.Session), state, span(v.Now.Sub(v.Since)), cmp.Or(v.Worker, "-"), fmt.Sprint(v.Pending()), fmt.Sprint(v.LastSeq),
	}
}

type showCmd struct {
	Session string `arg:"" help:"Its id."`
	JSON    bool   `name:"json" help:"As one JSON object."`
	databaseFlags
}

func (c *showCmd) run(ctx context.Context, s streams) error {
	session, err := parseSession(c.Session)
	if err != nil {
		return err
	}
	store, err := c.open(ctx, s)
	if err != nil {
		return err
	}
	defer store.Close()
	d, err := store.Session(ctx, session)
	if errors.Is(err, crdb.ErrNoSession) {
		return fmt.Errorf("no session %s: nothing was ever sent to it (reveille sessions lists those there are)", session)
	}
	if err != nil {
		return err
	}
	if c.JSON {
		return s.json(d)
	}
	return showSession(s.out, d)
}

// showSession writes a session for people.
func showSession(out io.Writer, d crdb.SessionDetail) error {
	w := tabwriter.NewWriter(out, 0, 0, 2, ' ', 0)
	ago := func(t time.Time) string { return span(d.Now.Sub(t)) + " ago" }
	due := func(t time.Time) string {
		if t.After(d.Now) {
			return "due in " + span(t.Sub(d.Now))
		}
		return "due"
	}
	row := func(name, format string, args ...any) { fmt.Fprintf(w, "%s\t%s\n", name, fmt.Sprintf(format, args...)) }
	row("session", "%s, made %s", d.Session, ago(d.CreatedAt))
	row("state", "%s for %s", d.State, span(d.Now.Sub(d.Since)))
	row("events", "%d, of which %d are on the stream; epoch %d", d.LastSeq, d.Relayed, d.Epoch)
	if c := d.Claim; c != nil {
		lease := "its lease has expired"
		if c.LeaseLive {
			lease = "its lease is live"
		}
		row("claim", "execution %s on %s, %s", c.Execution, cmp.Or(c.Worker, "a worker that is gone"), lease)
		row("", "%s for %s, %d steps started, revoked: %s", c.Phase, span(d.Now.Sub(c.PhaseAt)), c.Steps, cmp.Or(string(c.Revoked), "no"))
		if c.Step != "" {
			row("step", "%s is open", c.Step)
		}
		if c.Scanner {
			row("", "a scanner took it over and converts it")
		}
	}
	if q := d.Quarantine; q != nil {
		row("quarantine", "%s (%s), %s: %s", q.Reason, q.Lane, ago(q.Since), follow.Short(q.Detail))
		row("", "evidence: %s", follow.Short(string(q.Evidence)))
	}
	for _, p := range d.Promised {
		what := "a continuation that does not decode"
		if p.Kind != "" {
			what = fmt.Sprintf("%s of step %s, attempt %d", p.Kind, follow.ID(p.Step), p.Attempt)
		}
		row("next", "%s, %s", what, due(p.NotBefore))
	}
	if d.BareWakes > 0 {
		row("wakes", "%d without an input are not served yet", d.BareWakes)
	}
	for _, at := range d.Wakes {
		row("wake", "without an input, %s", due(at))
	}
	for _, in := range d.Inputs {
		what := "waits for a wake"
		if in.State == "armed" {
			what = due(in.NotBefore)
		}
		body := fmt.Sprintf("%d bytes", in.Bytes)
		if in.Body != nil {
			body = follow.Short(string(in.Body))
		}
		row("input", "%s (%s), %s, from %s: %s", follow.Short(in.ID), in.Delivery, what, ago(in.AdmittedAt), body)
	}
	for _, st := range d.Steps {
		var ids []string
		for _, in := range st.Inputs {
			ids = append(ids, in.ID)
		}
		row("past step", "%s %s, inputs %s, result %s", follow.ID(st.Step), st.Status, cmp.Or(follow.Short(strings.Join(ids, " ")), "none"), follow.Short(string(st.Result)))
		if st.Failure != nil {
			row("", "%s: %s", st.Failure.Code, follow.Short(st.Failure.Message))
		}
		if st.Text != "" {
			row("", "said %s", follow.Short(fmt.Sprintf("%q", st.Text)))
		}
	}
	return w.Flush()
}

type workersCmd struct {
	JSON bool `name:"json" help:"One JSON object a line."`
	databaseFlags
}

func (c *workersCmd) run(ctx context.Context, s streams) error {
	store, err := c.open(ctx, s)
	if err != nil {
		return err
	}
	defer store.Close()
	var all []crdb.LeaseDetail
	for {
		var after claims.HolderID
		if len(all) > 0 {
			after = all[len(all)-1].Holder
		}
		page, err := store.Leases(ctx, after, pageSize)
		if err != nil {
			return err
		}
		if all = append(all, page...); len(page) < pageSize {
			break
		}
	}
	slices.SortFunc(all, func(a, b crdb.LeaseDetail) int {
		return cmp.Or(-strings.Compare(a.Kind, b.Kind), strings.Compare(a.Name, b.Name), a.StartedAt.Compare(b.StartedAt))
	})
	if c.JSON {
		for _, l := range all {
			if err := s.json(l); err != nil {
				return err
			}
		}
		return nil
	}
	rows := [][]string{{"KIND", "NAME", "LEASE", "SESSIONS", "SLOTS", "UP", "VERSION", "HOLDER"}}
	for _, l := range all {
		lease, slots := "expired "+span(l.Now.Sub(l.ExpiresAt))+" ago", "-"
		if l.Live {
			lease = "live, " + span(l.ExpiresAt.Sub(l.Now)) + " left"
		}
		if l.Kind == "worker" {
			slots = fmt.Sprint(l.Slots)
		}
		rows = append(rows, []string{
			l.Kind, l.Name, lease, fmt.Sprint(l.Claims), slots, span(l.Now.Sub(l.StartedAt)), l.Version, follow.ID(l.Holder),
		})
	}
	if len(all) == 0 {
		s.say("no worker and no scanner has a lease: none is running")
		return nil
	}
	return s.table(rows)
}

// span is a duration for people.
func span(d time.Duration) string {
	switch d = max(d, 0); {
	case d < 10*time.Second:
		return fmt.Sprintf("%.1fs", d.Seconds())
	case d < 2*time.Minute:
		return fmt.Sprintf("%.0fs", d.Seconds())
	case d < 2*time.Hour:
		return fmt.Sprintf("%.0fm", d.Minutes())
	case d < 48*time.Hour:
		return fmt.Sprintf("%.0fh", d.Hours())
	default:
		return fmt.Sprintf("%.0fd", d.Hours()/24)
	}
}

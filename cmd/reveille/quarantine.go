package main

import (
	"bufio"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/user"
	"slices"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/google/uuid"
	"golang.org/x/term"

	"reveille/claims"
	"reveille/claims/crdb"
	"reveille/cmd/internal/flags"
	"reveille/cmd/reveille/internal/follow"
)

// lastEvents is how many events of a quarantined session are shown.
const lastEvents = 12

type quarantineCmd struct {
	List    quarantineListCmd    `cmd:"" help:"List quarantined sessions, those first that are so for longest."`
	Show    quarantineShowCmd    `cmd:"" help:"Show what was quarantined, what waits, and what each release would do."`
	Release quarantineReleaseCmd `cmd:"" help:"Release one session, or all of one reason."`
}

// reasonNames are the reasons that a flag takes.
func reasonNames() string {
	var names []string
	for _, r := range claims.Reasons() {
		names = append(names, string(r))
	}
	return strings.Join(names, ", ")
}

func checkReason(reason string) error {
	if reason == "" || slices.Contains(claims.Reasons(), claims.Reason(reason)) {
		return nil
	}
	return flags.Usage("--reason %q: want one of %s", reason, reasonNames())
}

type quarantineListCmd struct {
	Reason string `help:"Only those of this reason."`
	Limit  int    `help:"Most sessions to list; 0 lists all." default:"100"`
	JSON   bool   `name:"json" help:"One JSON object a line."`
	databaseFlags
}

func (c *quarantineListCmd) run(ctx context.Context, s streams) error {
	if c.Limit < 0 {
		return flags.Usage("--limit %d: want 0 or more", c.Limit)
	}
	if err := checkReason(c.Reason); err != nil {
		return err
	}
	store, err := c.open(ctx, s)
	if err != nil {
		return err
	}
	defer store.Close()
	rows := [][]string{{"SESSION", "REASON", "FOR", "LANE", "DETAIL"}}
	listed := 0
	more, err := eachQuarantine(ctx, store, claims.Reason(c.Reason), c.Limit, func(q crdb.Quarantine) error {
		listed++
		if c.JSON {
			return s.json(q)
		}
		rows = append(rows, []string{string(q.Session), string(q.Reason), span(q.Now.Sub(q.Since)), q.Lane, follow.Short(q.Detail)})
		return nil
	})
	switch {
	case err != nil:
		return err
	case c.JSON:
	case listed == 0:
		s.say("no session is quarantined%s", map[bool]string{true: " as " + c.Reason}[c.Reason != ""])
	default:
		err = s.table(rows)
	}
	if more {
		s.say("there are more: --limit 0 lists all")
	}
	return err
}

// eachQuarantine gives the quarantines of a reason to f, a page at a time, at
// most limit where that is above 0, and reports whether there are more.
func eachQuarantine(ctx context.Context, store *crdb.Store, reason claims.Reason, limit int, f func(crdb.Quarantine) error) (more bool, err error) {
	n := 0
	for after := (crdb.Cursor{}); ; {
		page, next, err := store.Quarantines(ctx, reason, after, pageSize)
		if err != nil {
			return false, err
		}
		for _, q := range page {
			if limit > 0 && n == limit {
				return true, nil
			}
			n++
			if err := f(q); err != nil {
				return false, err
			}
		}
		if next == nil {
			return false, nil
		}
		after = *next
	}
}

type quarantineShowCmd struct {
	Session string `arg:"" help:"Its id."`
	JSON    bool   `name:"json" help:"As one JSON object."`
	databaseFlags
}

func (c *quarantineShowCmd) run(ctx context.Context, s streams) error {
	session, err := parseSession(c.Session)
	if err != nil {
		return err
	}
	store, err := c.open(ctx, s)
	if err != nil {
		return err
	}
	defer store.Close()
	d, err := quarantined(ctx, store, session)
	if err != nil {
		return err
	}
	events, err := store.Tail(ctx, session, lastEvents)
	if err != nil {
		return err
	}
	if c.JSON {
		lines := make([]json.RawMessage, len(events))
		for i, e := range events {
			lines[i] = e.Line
		}
		return s.json(struct {
			crdb.SessionDetail
			Events []json.RawMessage `json:"events"` // the last ones, oldest first
		}{d, lines})
	}
	return showQuarantine(s.out, d, events)
}

// quarantined reads a session that must be quarantined.
func quarantined(ctx context.Context, store *crdb.Store, session claims.SessionID) (crdb.SessionDetail, error) {
	d, err := store.Session(ctx, session)
	switch {
	case errors.Is(err, crdb.ErrNoSession):
		return d, fmt.Errorf("no session %s: nothing was ever sent to it (reveille quarantine list lists the quarantined)", session)
	case err != nil:
		return d, err
	case d.Quarantine == nil:
		return d, fmt.Errorf("session %s is not quarantined but %s: nothing to release, nothing was changed", session, d.State)
	}
	return d, nil
}

// showQuarantine writes what an operator decides by.
func showQuarantine(out io.Writer, d crdb.SessionDetail, events []claims.Record) error {
	var ev crdb.Evidence
	if err := json.Unmarshal(d.Quarantine.Evidence, &ev); err != nil {
		return fmt.Errorf("the evidence of session %s does not decode: %w", d.Session, err)
	}
	if err := showSession(out, d); err != nil {
		return err
	}
	w := tabwriter.NewWriter(out, 0, 0, 2, ' ', 0)
	for _, row := range append(evidenceRows(ev), releaseRows(d, ev)...) {
		fmt.Fprintf(w, "%s\t%s\n", row[0], row[1])
	}
	if err := w.Flush(); err != nil {
		return err
	}
	p := follow.NewPrinter(out, time.Local)
	for _, e := range events {
		if err := p.Event(e, false); err != nil {
			return err
		}
	}
	return nil
}

// evidenceRows tell what was taken out of circulation, as it was.
func evidenceRows(ev crdb.Evidence) (rows [][2]string) {
	add := func(name, format string, args ...any) {
		rows = append(rows, [2]string{name, fmt.Sprintf(format, args...)})
	}
	if c := ev.Claim; c != nil {
		add("was", "%s, execution %s of holder %s, epoch %d, %d steps started", c.Phase, c.RanAs, c.Holder, c.Epoch, c.Steps)
		if c.Reason != "" || c.Revoked != "" || c.Verdict != "" {
			add("", "interrupted: %s; revoked: %s; verdict: %s", cmp.Or(follow.Short(c.Reason), "no"), cmp.Or(string(c.Revoked), "no"), cmp.Or(string(c.Verdict), "none"))
		}
		if c.Step != nil {
			add("open step", "%s", follow.Short(*c.Step))
		}
	}
	if c := ev.Continuation; c != nil {
		add("promised", "number %d: %s", c.Number, follow.Short(c.Body))
	}
	if len(ev.Inputs) > 0 {
		add("head", "inputs %s", follow.Short(strings.Join(ev.Inputs, " ")))
	}
	if ev.Wakes > 0 {
		add("head", "%d wakes without an input", ev.Wakes)
	}
	return rows
}

// releaseRows tell what each release would do.
func releaseRows(d crdb.SessionDetail, ev crdb.Evidence) [][2]string {
	var retry, cancel []string
	if ev.Claim != nil && ev.Claim.StepID != nil {
		retry = append(retry, "fails the open step as worker_lost and continues it, with its inputs")
		cancel = append(cancel, "closes the open step as interrupted (joined: false)")
	}
	if ev.Continuation != nil {
		if d.Quarantine.Reason == claims.ReasonSuperseded {
			retry = append(retry, "cancels the promise, since its chain has a newer one")
		} else {
			retry = append(retry, "promises again what was promised")
		}
		cancel = append(cancel, "cancels the promise")
	}
	if n := len(ev.Inputs); n > 0 || ev.Wakes > 0 {
		head := fmt.Sprintf("the head (%d inputs, %d wakes)", n, ev.Wakes)
		retry, cancel = append(retry, "gives back "+head), append(cancel, "cancels "+head)
	}
	if retry == nil {
		retry, cancel = []string{"nothing was taken"}, []string{"nothing was taken"}
	}
	waits := fmt.Sprintf("%d pending inputs, wakes and continuations", d.Pending())
	return [][2]string{
		{"retry", strings.Join(retry, "; ") + "; then goes on with " + waits},
		{"interrupted", strings.Join(cancel, "; ") + "; then goes on with " + waits},
		{"discard", strings.Join(cancel, "; ") + "; cancels " + waits},
		{"release", fmt.Sprintf("reveille quarantine release %s --as retry|interrupted|discard --why TEXT", d.Session)},
	}
}

type quarantineReleaseCmd struct {
	Session string `arg:"" optional:"" help:"Its id; without one, --reason says which."`
	As      string `help:"retry runs again what was quarantined; interrupted cancels it and goes on with what is pending; discard cancels that too (${enum})." enum:"retry,interrupted,discard" required:""`
	Why     string `help:"Why, for the event." required:""`
	By      string `help:"Who, for the event; the user and host where it is empty."`
	Reason  string `help:"Release all sessions that are quarantined for this reason."`
	Yes     bool   `help:"With --reason: don't ask."`
	JSON    bool   `name:"json" help:"One JSON object a line."`
	databaseFlags
}

func (c *quarantineReleaseCmd) run(ctx context.Context, s streams) error {
	switch {
	case (c.Session == "") == (c.Reason == ""):
		return flags.Usage("release one SESSION, or all of one --reason")
	case strings.TrimSpace(c.Why) == "":
		return flags.Usage("--why is empty: say why, the event keeps it")
	case c.Yes && c.Reason == "":
		return flags.Usage("--yes is of --reason")
	}
	if err := checkReason(c.Reason); err != nil {
		return err
	}
	if c.By == "" {
		c.By = whoami()
	}
	store, err := c.open(ctx, s)
	if err != nil {
		return err
	}
	defer store.Close()
	if c.Reason != "" {
		return c.all(ctx, s, store)
	}
	session, err := parseSession(c.Session)
	if err != nil {
		return err
	}
	d, err := quarantined(ctx, store, session)
	if err != nil {
		return err
	}
	return c.release(ctx, s, store, session, d.Quarantine.ID)
}

// whoami is the user and the host, as far as they are known.
func whoami() string {
	name := cmp.Or(os.Getenv("USER"), "unknown")
	if u, err := user.Current(); err == nil {
		name = u.Username
	}
	if host, err := os.Hostname(); err == nil {
		name += "@" + host
	}
	return name
}

func (c *quarantineReleaseCmd) release(ctx context.Context, s streams, store *crdb.Store, session claims.SessionID, id string) error {
	settled, err := store.Release(ctx, claims.Release{
		Session: session, Quarantine: id, How: claims.ReleaseHow(c.As), By: c.By, Why: c.Why,
	}, &claims.Token{ID: uuid.NewString()})
	switch {
	case errors.Is(err, claims.ErrNotQuarantined):
		return fmt.Errorf("session %s is not in that quarantine any more: somebody released it meanwhile, nothing was changed", session)
	case errors.Is(err, claims.ErrNothingToRetry):
		return fmt.Errorf("session %s can't be tried again: its promise does not decode and its log tells of none; release it as interrupted or discard", session)
	case err != nil:
		return err
	case c.JSON:
		return s.json(struct {
			Session    claims.SessionID `json:"session"`
			Quarantine string           `json:"quarantine"`
			How        string           `json:"how"`
			Ready      bool             `json:"ready"`
		}{session, id, c.As, settled.Ready})
	}
	next := "it has nothing due"
	if settled.Ready {
		next = "it is ready"
	}
	_, err = fmt.Fprintf(s.out, "released %s as %s; %s\n", session, c.As, next)
	return err
}

// all releases what is quarantined for the reason now, one session after the
// other. One that can't be released does not keep the others.
func (c *quarantineReleaseCmd) all(ctx context.Context, s streams, store *crdb.Store) error {
	var found []crdb.Quarantine
	_, err := eachQuarantine(ctx, store, claims.Reason(c.Reason), 0, func(q crdb.Quarantine) error {
		found = append(found, q)
		return nil
	})
	if err != nil {
		return err
	}
	if len(found) == 0 {
		s.say("no session is quarantined as %s", c.Reason)
		return nil
	}
	if !c.Yes {
		sure, err := s.ask(fmt.Sprintf("release %d sessions that are quarantined as %s as %s?", len(found), c.Reason, c.As))
		if err != nil || !sure {
			return err
		}
	}
	failed := 0
	for _, q := range found {
		if err := c.release(ctx, s, store, q.Session, q.ID); err != nil {
			if ctx.Err() != nil {
				return stopped()
			}
			failed++
			s.say("%v", err)
		}
	}
	if failed > 0 {
		return fmt.Errorf("%d of %d sessions were not released: see above", failed, len(found))
	}
	return nil
}

// ask asks a person, and answers false unless that one says yes.
func (s streams) ask(question string) (bool, error) {
	if f, ok := s.in.(*os.File); ok && !term.IsTerminal(int(f.Fd())) {
		return false, flags.Usage("nobody can be asked here: say --yes to do it without asking")
	}
	fmt.Fprintf(s.err, "reveille: %s [y/N] ", question)
	answer, err := bufio.NewReader(s.in).ReadString('\n')
	if err != nil && !errors.Is(err, io.EOF) {
		return false, err
	}
	switch strings.ToLower(strings.TrimSpace(answer)) {
	case "y", "yes":
		return true, nil
	}
	s.say("nothing was changed")
	return false, nil
}

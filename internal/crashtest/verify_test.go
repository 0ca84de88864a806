package crashtest

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"github.com/jackc/pgx/v5"
	"github.com/nats-io/nats.go/jetstream"

	"reveille/claims"
	"reveille/internal/judge"
)

// verify holds what is left against what was sent.
func verify(w *world, all []sent, tr trial) {
	w.t.Helper()
	var sessions []judge.Row
	var inputs []judge.Input
	w.rows(&sessions, `SELECT s.session_id AS id, COALESCE(s.execution_id::TEXT, '') AS execution,
			COALESCE(s.quarantine_id::TEXT, '') AS quarantine, s.epoch, s.last_seq, s.command_seq,
			COALESCE(q.reason, '') AS reason, COALESCE(q.evidence::JSONB -> 'claim' ->> 'step_id', '') AS open_step
		FROM sessions s LEFT JOIN quarantines q ON q.session_id = s.session_id AND q.quarantine_id = s.quarantine_id
		ORDER BY s.session_id`)
	w.rows(&inputs, `SELECT session_id AS session, input_id AS id, state, COALESCE(step_id::TEXT, '') AS step FROM inputs`)
	rules := judge.Rules{Refusal: refused}
	for _, r := range tr.reasons {
		rules.Reasons = append(rules.Reasons, string(r))
	}
	stream, alerts, started := w.stream("RV_EVENTS"), w.stream("RV_QUARANTINE"), w.handlerLines()
	checked := map[claims.SessionID]bool{}
	for _, s := range sessions {
		id := claims.SessionID(s.ID)
		checked[id] = true
		log := w.log(s.ID)
		c := judge.Session{Row: s, Log: log, Stream: stream[s.ID], Alerts: alerts[s.ID], Calls: started[s.ID]}
		for _, cmd := range all {
			if cmd.session == id {
				c.Commands = append(c.Commands, cmd.judged())
			}
		}
		for _, in := range inputs {
			if in.Session == s.ID {
				c.Inputs = append(c.Inputs, in)
			}
		}
		if problems := judge.Judge(rules, c); len(problems) > 0 {
			w.t.Errorf("session %s:\n- %s\n%s", s.ID, strings.Join(problems, "\n- "), w.story(c))
		}
	}
	for _, cmd := range all {
		if !checked[cmd.session] {
			w.t.Errorf("session %s is not there; it was sent %+v", cmd.session, cmd)
		}
	}
	w.verifyRejected(all)
	if tr.deadly != "" {
		if got := w.texts("SELECT reason FROM quarantines WHERE session_id = $1", string(tr.deadly)); !slices.Equal(got, []string{"attempts_exhausted"}) {
			w.t.Errorf("the session that kills its workers is quarantined for %q, want attempts_exhausted", got)
		}
	}
}

// rows reads rows into structs by their columns' names.
func (w *world) rows(into any, query string) {
	w.t.Helper()
	rows, err := w.db.Query(context.Background(), query)
	if err == nil {
		switch into := into.(type) {
		case *[]judge.Row:
			*into, err = pgx.CollectRows(rows, pgx.RowToStructByName[judge.Row])
		case *[]judge.Input:
			*into, err = pgx.CollectRows(rows, pgx.RowToStructByName[judge.Input])
		}
	}
	if err != nil {
		w.t.Fatalf("%s: %v", query, err)
	}
}

// log is a session's log in the database, an event a line.
func (w *world) log(session string) []string {
	w.t.Helper()
	var out []string
	for _, lines := range w.texts("SELECT lines FROM events WHERE session_id = $1 ORDER BY last_seq", session) {
		out = append(out, strings.Split(lines, "\n")...)
	}
	return out
}

// messages reads a whole stream.
func (w *world) messages(stream string) []jetstream.Msg {
	w.t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	s, err := w.conn.JetStream().Stream(ctx, stream)
	if err != nil {
		w.t.Fatal(err)
	}
	n := s.CachedInfo().State.Msgs
	if n == 0 {
		return nil
	}
	cons, err := w.conn.JetStream().OrderedConsumer(ctx, stream, jetstream.OrderedConsumerConfig{})
	if err != nil {
		w.t.Fatal(err)
	}
	msgs, err := cons.Messages()
	if err != nil {
		w.t.Fatal(err)
	}
	defer msgs.Stop()
	var out []jetstream.Msg
	for range n {
		m, err := msgs.Next(jetstream.NextContext(ctx))
		if err != nil {
			w.t.Fatalf("reading %s: %v", stream, err)
		}
		out = append(out, m)
	}
	return out
}

// stream is the bodies of a stream by session.
func (w *world) stream(stream string) map[string][]string {
	w.t.Helper()
	out := map[string][]string{}
	for _, m := range w.messages(stream) {
		session := m.Subject()[strings.LastIndexByte(m.Subject(), '.')+1:]
		out[session] = append(out[session], string(m.Data()))
	}
	return out
}

// handlerLines are what the handlers wrote, by session.
func (w *world) handlerLines() map[string][]judge.Call {
	w.t.Helper()
	text, err := os.ReadFile(w.stepsFile())
	if err != nil {
		w.t.Fatal(err)
	}
	out := map[string][]judge.Call{}
	for line := range strings.Lines(string(text)) {
		var c judge.Call
		var session string
		if n, err := fmt.Sscan(line, &c.What, &session, &c.Epoch, &c.Step); n != 4 {
			w.t.Errorf("a handler wrote %q: %v", line, err)
		}
		out[session] = append(out[session], c)
	}
	return out
}

// verifyRejected: each command that contradicts an earlier one is rejected once, and no other.
func (w *world) verifyRejected(all []sent) {
	w.t.Helper()
	want, got := map[string]int{}, map[string]int{}
	for _, c := range all {
		if conflicts(all, c) {
			want[strconv.FormatUint(c.seq, 10)]++
		}
	}
	for _, m := range w.messages("RV_REJECTED") {
		at := m.Headers().Get("Rv-Stream")
		got[at[strings.LastIndexByte(at, ':')+1:]]++
		if reason := m.Headers().Get("Rv-Reason"); reason != "input_conflict" {
			w.t.Errorf("%s is rejected for %s: %s", m.Subject(), reason, m.Data())
		}
	}
	if fmt.Sprint(got) != fmt.Sprint(want) {
		w.t.Errorf("rejected by sequence: %v, want %v", got, want)
	}
}

// conflicts: an earlier command had the same input with another body.
func conflicts(all []sent, c sent) bool {
	return c.input != "" && slices.ContainsFunc(all, func(o sent) bool {
		return o.session == c.session && o.input == c.input && o.seq < c.seq && o.body != c.body
	})
}

// judged is a command as the judge has it.
func (c sent) judged() judge.Command {
	return judge.Command{
		Session: string(c.session), Kind: string(c.kind), Input: c.input, Delivery: string(c.delivery), Body: c.body, Reason: c.reason,
		Discard: c.discard, NotBefore: c.notAt, Seq: c.seq, Sent: c.at,
	}
}

// story is all that is known of a session, for a failure's message.
func (w *world) story(c judge.Session) string {
	var b strings.Builder
	fmt.Fprintf(&b, "row: %+v\n", c.Row)
	for _, cmd := range c.Commands {
		fmt.Fprintf(&b, "command: %+v\n", cmd)
	}
	for _, in := range c.Inputs {
		fmt.Fprintf(&b, "input: %+v\n", in)
	}
	b.WriteString(strings.Join(c.Log, "\n") + "\n")
	logs, _ := filepath.Glob(filepath.Join(w.dir, "*.log"))
	for _, path := range logs {
		text, _ := os.ReadFile(path)
		for line := range strings.Lines(string(text)) {
			if strings.Contains(line, "session="+c.Row.ID+" ") {
				b.WriteString(filepath.Base(path) + " " + line)
			}
		}
	}
	return b.String()
}

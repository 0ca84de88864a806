package crashtest

import (
	"context"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/nats-io/nats.go/jetstream"

	"reveille/claims"
)

// event is the envelope of contract.md section 2.
type event struct {
	Session   string
	Seq       int64
	Type      claims.EventType
	Time      time.Time
	Execution string
	Epoch     int64
	Step      string
	Data      json.RawMessage
}

// data is what of all events' data is looked at.
type data struct {
	Input     string
	Reason    string
	Step      string
	Outcome   claims.ExecutionOutcome
	Index     int
	Inputs    []string
	Continues *struct {
		Kind claims.ContinuationKind
		Step string
	}
	Code     claims.FailureCode
	Continue bool
}

// left is what the tables say of a session.
type left struct {
	ID, Execution, Quarantine  string
	Epoch, LastSeq, CommandSeq int64
	Reason, OpenStep           string // of the quarantine, and the step that its evidence says was open
}

// row is an input as the table has it.
type row struct{ Session, ID, State, Step string }

// verify holds what is left against what was sent.
func verify(w *world, all []sent, tr trial) {
	w.t.Helper()
	var sessions []left
	var inputs []row
	w.rows(&sessions, `SELECT s.session_id AS id, COALESCE(s.execution_id::TEXT, '') AS execution,
			COALESCE(s.quarantine_id::TEXT, '') AS quarantine, s.epoch, s.last_seq, s.command_seq,
			COALESCE(q.reason, '') AS reason, COALESCE(q.evidence::JSONB -> 'claim' ->> 'step_id', '') AS open_step
		FROM sessions s LEFT JOIN quarantines q ON q.session_id = s.session_id AND q.quarantine_id = s.quarantine_id
		ORDER BY s.session_id`)
	w.rows(&inputs, `SELECT session_id AS session, input_id AS id, state, COALESCE(step_id::TEXT, '') AS step FROM inputs`)
	stream, alerts, started := w.stream("RV_EVENTS"), w.stream("RV_QUARANTINE"), w.handlerLines()
	checked := map[claims.SessionID]bool{}
	for _, s := range sessions {
		id := claims.SessionID(s.ID)
		checked[id] = true
		c := &check{s: s, inputs: map[string]row{}, tr: tr}
		for _, cmd := range all {
			if cmd.session == id {
				c.sent = append(c.sent, cmd)
			}
		}
		for _, in := range inputs {
			if in.Session == s.ID {
				c.inputs[in.ID] = in
			}
		}
		log := w.log(s.ID)
		if !slices.Equal(log, stream[s.ID]) {
			c.wrong("the stream has %d events, the database %d, or they differ:\n%s", len(stream[s.ID]), len(log), strings.Join(stream[s.ID], "\n"))
		}
		c.all(log, started[s.ID])
		if alert := slices.DeleteFunc(slices.Clone(log), func(line string) bool { return !strings.Contains(line, `"type":"session.quarantined"`) }); !slices.Equal(alert, alerts[s.ID]) {
			c.wrong("for alerts there is %q, want %q", alerts[s.ID], alert)
		}
		if len(c.problems) > 0 {
			w.t.Errorf("session %s:\n- %s\n%s", s.ID, strings.Join(c.problems, "\n- "), w.story(c, log))
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
		case *[]left:
			*into, err = pgx.CollectRows(rows, pgx.RowToStructByName[left])
		case *[]row:
			*into, err = pgx.CollectRows(rows, pgx.RowToStructByName[row])
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

// handlerLines are what the handlers wrote, by session: start or end, epoch, step.
func (w *world) handlerLines() map[string][][]string {
	w.t.Helper()
	text, err := os.ReadFile(w.stepsFile())
	if err != nil {
		w.t.Fatal(err)
	}
	out := map[string][][]string{}
	for line := range strings.Lines(string(text)) {
		if f := strings.Fields(line); len(f) == 4 {
			out[f[1]] = append(out[f[1]], []string{f[0], f[2], f[3]})
		} else {
			w.t.Errorf("a handler wrote %q", line)
		}
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

// story is all that is known of a session, for a failure's message.
func (w *world) story(c *check, log []string) string {
	var b strings.Builder
	fmt.Fprintf(&b, "row: %+v\n", c.s)
	for _, cmd := range c.sent {
		fmt.Fprintf(&b, "%d %s %s %q %s %s discard %v not before %v sent %v\n", cmd.seq, cmd.kind, cmd.input, cmd.body, cmd.delivery, cmd.reason, cmd.discard, cmd.notAt, cmd.at.UTC())
	}
	for _, in := range c.inputs {
		fmt.Fprintf(&b, "input %+v\n", in)
	}
	b.WriteString(strings.Join(log, "\n") + "\n")
	logs, _ := filepath.Glob(filepath.Join(w.dir, "*.log"))
	for _, path := range logs {
		text, _ := os.ReadFile(path)
		for line := range strings.Lines(string(text)) {
			if strings.Contains(line, "session="+c.s.ID+" ") {
				b.WriteString(filepath.Base(path) + " " + line)
			}
		}
	}
	return b.String()
}

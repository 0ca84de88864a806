package systemtest

import (
	"context"
	"encoding/json"
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/nats-io/nats.go/jetstream"

	"reveille/claims"
)

// logs are the logs in the database of all sessions.
func (w *world) logs() map[claims.SessionID][]claims.Record {
	w.t.Helper()
	out := map[claims.SessionID][]claims.Record{}
	for _, lines := range w.query("SELECT lines FROM events ORDER BY session_id, last_seq") {
		for line := range strings.SplitSeq(lines, "\n") {
			r := w.parse(line)
			out[r.Session] = append(out[r.Session], r)
		}
	}
	return out
}

// records are a session's log in the database.
func (w *world) records(session claims.SessionID) []claims.Record {
	w.t.Helper()
	var out []claims.Record
	for _, line := range w.logOf(session) {
		out = append(out, w.parse(line))
	}
	return out
}

// logOf is the same, an event a line.
func (w *world) logOf(session claims.SessionID) []string {
	w.t.Helper()
	var out []string
	for _, lines := range w.query("SELECT lines FROM events WHERE session_id = $1 ORDER BY last_seq", string(session)) {
		out = append(out, strings.Split(lines, "\n")...)
	}
	return out
}

func (w *world) parse(line string) claims.Record {
	w.t.Helper()
	r, err := claims.ParseRecord([]byte(line))
	if err != nil {
		w.t.Fatal(err)
	}
	return r
}

// dataOf decodes the data of an event.
func dataOf[T any](t testing.TB, r claims.Record) T {
	t.Helper()
	var d T
	if err := json.Unmarshal(r.Data, &d); err != nil {
		t.Fatalf("data of %s: %v", r.Line, err)
	}
	return d
}

// brief is a log as one line: types, with what tells them apart.
func brief(t testing.TB, log []claims.Record) string {
	t.Helper()
	var out []string
	for _, r := range log {
		d := dataOf[struct {
			Input, Outcome, Code, Kind string
			Inputs                     []string
			Continues                  *claims.Continues
		}](t, r)
		s := string(r.Type)
		switch r.Type {
		case claims.InputAdmitted, claims.InputPromoted, claims.InputCancelled:
			s += "(" + d.Input + ")"
		case claims.StepStartedEvent:
			s += "(" + strings.Join(d.Inputs, "+")
			if d.Continues != nil {
				s += fmt.Sprintf("<%s%d", d.Continues.Kind, d.Continues.Attempt)
			}
			s += ")"
		case claims.StepFailedEvent:
			s += "(" + d.Code + ")"
		case claims.ExecutionEnded:
			s += "(" + d.Outcome + ")"
		case claims.ContinuationCancelled:
			s += "(" + d.Kind + ")"
		}
		out = append(out, s)
	}
	return strings.Join(out, " ")
}

// wantLog compares a session's log with what is wanted, white space aside.
func (w *world) wantLog(session claims.SessionID, want string) {
	w.t.Helper()
	if got, want := brief(w.t, w.records(session)), strings.Join(strings.Fields(want), " "); got != want {
		w.t.Errorf("log of %s\n got %s\nwant %s", session, got, want)
	}
}

// stream reads all of RV_EVENTS, the bodies by session.
func (w *world) stream() map[claims.SessionID][]string {
	w.t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	n, _ := w.messages("RV_EVENTS")
	out := map[claims.SessionID][]string{}
	if n == 0 {
		return out
	}
	cons, err := w.conn.JetStream().OrderedConsumer(ctx, "RV_EVENTS", jetstream.OrderedConsumerConfig{})
	if err != nil {
		w.t.Fatal(err)
	}
	msgs, err := cons.Messages()
	if err != nil {
		w.t.Fatal(err)
	}
	defer msgs.Stop()
	for range n {
		m, err := msgs.Next(jetstream.NextMaxWait(patience))
		if err != nil {
			w.t.Fatal(err)
		}
		session := claims.SessionID(m.Subject()[strings.LastIndexByte(m.Subject(), '.')+1:])
		out[session] = append(out[session], string(m.Data()))
	}
	return out
}

// verify compares the stream with the database event for event, and every
// input with the steps that cover it.
func (w *world) verify() map[claims.SessionID][]claims.Record {
	w.t.Helper()
	stream, logs := w.stream(), w.logs()
	for session := range stream {
		if logs[session] == nil {
			w.t.Errorf("session %s is on the stream, and not in the database", session)
		}
	}
	for session, log := range logs {
		lines := make([]string, len(log))
		for i, r := range log {
			lines[i] = string(r.Line)
		}
		if !slices.Equal(lines, stream[session]) {
			w.t.Errorf("session %s: stream and database differ\ndatabase\n%s\nstream\n%s",
				session, strings.Join(lines, "\n"), strings.Join(stream[session], "\n"))
		}
		for _, wrong := range faults(w.t, log) {
			w.t.Errorf("session %s: %s", session, wrong)
		}
	}
	return logs
}

// stepOf is a step as its log tells it.
type stepOf struct {
	inputs    []string
	continued int // steps that go on with it
	closed    int // terminal events
}

// faults judges one session's log: its order, one terminal event for each step,
// and that each input is covered by one step and that step's continuations (I23,
// I24).
func faults(t testing.TB, log []claims.Record) (out []string) {
	t.Helper()
	wrong := func(format string, args ...any) { out = append(out, fmt.Sprintf(format, args...)) }
	steps, covered, ended := map[claims.StepID]*stepOf{}, map[string]claims.StepID{}, map[string]string{}
	epoch := int64(0)
	var promoted []string // and not yet in a step
	for i, r := range log {
		if r.Seq != int64(i)+1 {
			wrong("event %d stands at place %d", r.Seq, i+1)
		}
		if r.Epoch != 0 && r.Epoch < epoch {
			wrong("epoch %d after %d", r.Epoch, epoch)
		}
		epoch = max(epoch, r.Epoch)
		switch r.Type {
		case claims.InputPromoted, claims.InputCancelled:
			in := dataOf[claims.InputData](t, r).Input
			if before := ended[in]; before != "" {
				wrong("%s of %s after %s", r.Type, in, before)
			}
			ended[in] = string(r.Type)
			if r.Type == claims.InputPromoted {
				promoted = append(promoted, in)
			}
		case claims.StepStartedEvent:
			d := dataOf[claims.StepStartedData](t, r)
			if steps[r.Step] != nil {
				wrong("step %s started twice", r.Step)
			}
			steps[r.Step] = &stepOf{inputs: d.Inputs}
			if c := d.Continues; c != nil {
				before := steps[c.Step]
				switch {
				case before == nil || before.closed == 0:
					wrong("step %s continues %s, which is not closed", r.Step, c.Step)
				case c.Kind == claims.KindContinue && len(d.Inputs) > 0, c.Kind != claims.KindContinue && !slices.Equal(before.inputs, d.Inputs):
					wrong("step %s covers %v, and continues one that covers %v", r.Step, d.Inputs, before.inputs)
				default:
					if before.continued++; before.continued > 1 {
						wrong("step %s is continued twice", c.Step)
					}
				}
			} else {
				for _, in := range d.Inputs {
					if other := covered[in]; other != "" {
						wrong("input %s is covered by %s and %s", in, other, r.Step)
					}
					covered[in] = r.Step
				}
				if !slices.Equal(promoted, d.Inputs) && len(promoted)+len(d.Inputs) > 0 {
					wrong("step %s covers %v, promoted were %v", r.Step, d.Inputs, promoted)
				}
				promoted = nil
			}
		case claims.StepEndedEvent, claims.StepFailedEvent, claims.StepInterruptedEvent:
			if steps[r.Step] == nil {
				wrong("%s of a step that did not start", r.Type)
			} else if steps[r.Step].closed++; steps[r.Step].closed > 1 {
				wrong("step %s closed twice", r.Step)
			}
		}
	}
	for id, s := range steps {
		if s.closed == 0 {
			wrong("step %s is open", id)
		}
	}
	return out
}

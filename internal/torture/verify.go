package main

import (
	"context"
	"encoding/json"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/nats-io/nats.go/jetstream"

	"reveille/internal/judge"
	"reveille/internal/torture/truth"
)

// reasons are those for which the load can get a session quarantined.
var reasons = []string{"cancellation_outcome_unknown", "attempts_exhausted", "no_progress", "never_joined"}

// refusal is the reason of declined steps.
const refusal = "a person refused"

// verifier holds what is left against what was done.
type verifier struct {
	w      *world
	h      *history
	lines  []truth.Line
	events []event // of the database, session by session
	log    map[string][]string
	counts counts
	found  []string
}

// counts is what a run did.
type counts struct {
	sessions, commands, events, calls, quarantined int
	overlaps                                       []time.Duration // that I7 allows
	linear, unknown                                int             // sessions
}

// event is what is looked at here of the envelope of docs/contract.md section 2.
type event struct {
	Session, Type, Execution string
	Seq, Epoch               int64
	Time                     time.Time
}

// slack is how far the times of events can be off this machine's clock.
func (v *verifier) slack() time.Duration { return maxSkew / 2 }

// wrong is a violation, with what happened around it.
func (v *verifier) wrong(session string, at time.Time, format string, args ...any) {
	text := fmt.Sprintf("session %s: ", session) + fmt.Sprintf(format, args...) + "\n"
	if !at.IsZero() {
		text += v.h.around(session, at, v.lines)
	}
	v.found = append(v.found, text)
}

// verify checks everything. The system is idle, and its processes have ended.
func verify(ctx context.Context, w *world, h *history) (*verifier, error) {
	v := &verifier{w: w, h: h, log: map[string][]string{}}
	var err error
	if v.lines, err = truth.Dir(w.dir).Lines(); err != nil {
		return nil, err
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	if err := v.sessions(ctx); err != nil {
		return nil, err
	}
	if err := v.rejected(ctx); err != nil {
		return nil, err
	}
	v.overlaps()
	v.joined()
	v.linear()
	v.found = append(v.found, h.problems...)
	return v, nil
}

// sessions has each session judged.
func (v *verifier) sessions(ctx context.Context) error {
	all, err := rows[judge.Row](ctx, v.w, `SELECT s.session_id AS id, COALESCE(s.execution_id::TEXT, '') AS execution,
			COALESCE(s.quarantine_id::TEXT, '') AS quarantine, s.epoch, s.last_seq, s.command_seq,
			COALESCE(q.reason, '') AS reason, COALESCE(q.evidence::JSONB -> 'claim' ->> 'step_id', '') AS open_step
		FROM sessions s LEFT JOIN quarantines q ON q.session_id = s.session_id AND q.quarantine_id = s.quarantine_id
		ORDER BY s.session_id`)
	if err != nil {
		return err
	}
	inputs, err := rows[judge.Input](ctx, v.w, `SELECT session_id AS session, input_id AS id, state, COALESCE(step_id::TEXT, '') AS step FROM inputs`)
	if err != nil {
		return err
	}
	stored, err := rows[struct{ ID, Lines string }](ctx, v.w, `SELECT session_id AS id, lines FROM events ORDER BY session_id, last_seq`)
	if err != nil {
		return err
	}
	for _, r := range stored {
		v.log[r.ID] = append(v.log[r.ID], strings.Split(r.Lines, "\n")...)
	}
	stream, err := v.w.bodies(ctx, "RV_EVENTS")
	if err != nil {
		return err
	}
	alerts, err := v.w.bodies(ctx, "RV_QUARANTINE")
	if err != nil {
		return err
	}
	rules := judge.Rules{Reasons: reasons, Refusal: refusal, Skew: v.slack(), AlertsLost: v.h.rewinds > 0}
	known := map[string]bool{}
	for _, row := range all {
		known[row.ID] = true
		s := judge.Session{Row: row, Log: v.log[row.ID], Stream: stream[row.ID], Alerts: alerts[row.ID], Releases: v.h.releases[row.ID]}
		for _, in := range inputs {
			if in.Session == row.ID {
				s.Inputs = append(s.Inputs, in)
			}
		}
		for _, c := range v.h.commands {
			if c.Session == row.ID {
				s.Commands = append(s.Commands, c)
			}
		}
		for _, l := range v.lines {
			if l.Session == row.ID && (l.What == truth.Start || l.What == truth.End) {
				s.Calls = append(s.Calls, judge.Call{What: l.What, Epoch: l.Epoch, Step: l.Step, Excused: v.h.asleep(l.Worker, l.At)})
			}
		}
		for _, line := range s.Log {
			var e event
			if err := json.Unmarshal([]byte(line), &e); err != nil {
				return fmt.Errorf("event %q: %w", line, err)
			}
			v.events = append(v.events, e)
		}
		problems := judge.Judge(rules, s)
		if len(problems) > 0 {
			v.wrong(row.ID, v.when(row.ID, problems[0]), "\n  - %s", strings.Join(problems, "\n  - "))
		}
		if row.Quarantine != "" {
			v.counts.quarantined++
		}
		v.counts.events += len(s.Log)
	}
	for _, c := range v.h.commands {
		if !known[c.Session] && !c.Lost {
			v.wrong(c.Session, c.Sent, "it is not there, and was sent %+v (I18)", c)
		}
	}
	v.counts.sessions, v.counts.commands = len(all), len(v.h.commands)
	return nil
}

// when is the time of the event that a problem tells of; of the last one, where it tells of none.
func (v *verifier) when(session, problem string) time.Time {
	seq := len(v.log[session])
	_, _ = fmt.Sscanf(problem, "event %d:", &seq)
	var e event
	if seq < 1 || seq > len(v.log[session]) || json.Unmarshal([]byte(v.log[session][seq-1]), &e) != nil {
		return time.Time{}
	}
	return e.Time
}

// rejected: each malformed command was rejected, once, and no other. Of a stream that lost its tail, not all need be there.
func (v *verifier) rejected(ctx context.Context) error {
	by, err := v.w.bodies(ctx, "RV_REJECTED")
	if err != nil {
		return err
	}
	times := map[string]int{}
	for _, bodies := range by {
		for _, body := range bodies {
			times[body]++
			if !strings.HasPrefix(body, malformedMark) {
				v.found = append(v.found, fmt.Sprintf("a command was rejected that is well-formed (I19): %s", body))
			}
		}
	}
	lost := v.h.rewinds > 0 || v.h.era > 0
	for _, body := range v.h.rejects {
		if n := times[body]; n == 0 && !lost || n > 1 && v.h.rewinds == 0 {
			v.found = append(v.found, fmt.Sprintf("a malformed command was rejected %d times (I19): %s", n, body))
		}
	}
	return nil
}

// overlaps: two handlers of one session at once are allowed only where the worker of one could not run, and so could not
// stop it: until it can again, and a moment longer (I7). That one is mostly the first, and then a handler in Go: a command is
// stopped by its guard. It is the later one where its worker was stopped between its look at the lease and the call.
func (v *verifier) overlaps() {
	for _, l := range v.lines {
		if l.What != truth.Overlap {
			continue
		}
		holder := v.holder(l)
		end, known := v.over(l, holder)
		if holder != nil && v.excused(*holder, l.At) && v.h.asleep(holder.Worker, l.At) && (!known || v.h.asleep(holder.Worker, end)) {
			v.counts.overlaps = append(v.counts.overlaps, end.Sub(l.At))
			continue
		}
		own, ended := v.line(truth.End, l.Step)
		if !ended && l.Kind == truth.Exec {
			own = l // it was killed, or its worker; had it lived on, the next one would have seen it
		}
		if v.h.asleep(l.Worker, l.At) && v.h.asleep(l.Worker, own.At) {
			v.counts.overlaps = append(v.counts.overlaps, own.At.Sub(l.At))
			continue
		}
		v.wrong(l.Session, l.At, "step %s of %s was called while %+v was there, for %v or more (I1, I7)", l.Step, l.Worker, holder, end.Sub(l.At))
	}
}

// excused tells whether a call whose worker could not run may be there at a time: one in Go, or any where nobody could run,
// or a command that began when its worker had just been woken, which its guard ends.
func (v *verifier) excused(call truth.Line, at time.Time) bool {
	begun, ok := v.line(truth.Start, call.Step)
	return call.Kind == truth.Go || v.h.stalled(at) || ok && v.h.asleep(call.Worker, begun.At)
}

// holder is whose call was there when another one of the session began. What the lock says may be of the one before: then
// it is the last one that started.
func (v *verifier) holder(l truth.Line) *truth.Line {
	if h := l.Holder; h != nil && h.Step != l.Step {
		if end, ok := v.line(truth.End, h.Step); !ok || end.At.After(l.At) {
			return h
		}
	}
	var last *truth.Line
	for _, o := range v.lines {
		if o.What == truth.Start && o.Session == l.Session && o.Step != l.Step && o.At.Before(l.At) {
			last = &o
		}
	}
	return last
}

// over is when an overlap was over: when the lock was got, or the other call ended; else it was so when the later call
// ended, and no more is known.
func (v *verifier) over(l truth.Line, holder *truth.Line) (end time.Time, known bool) {
	if o, ok := v.line(truth.Over, l.Step); ok {
		return o.At, true
	}
	if holder != nil {
		if o, ok := v.line(truth.End, holder.Step); ok && o.At.After(l.At) {
			return o.At, true
		}
	}
	if o, ok := v.line(truth.End, l.Step); ok {
		return o.At, false
	}
	return l.At, false
}

// line is what was written of a step.
func (v *verifier) line(what, step string) (truth.Line, bool) {
	i := slices.IndexFunc(v.lines, func(l truth.Line) bool { return l.What == what && l.Step == step })
	if i < 0 {
		return truth.Line{}, false
	}
	return v.lines[i], true
}

// joined: a step that was closed as joined had nothing left of it (I10); one whose worker was lost, too, unless it is a
// handler in Go and that could not run (I7).
func (v *verifier) joined() {
	for _, s := range v.h.suspects {
		if l, ok := v.line(truth.Start, s.step); ok && s.code == "worker_lost" &&
			(l.Kind == truth.Go && v.h.asleep(l.Worker, s.at) || v.h.stalled(s.at)) {
			continue
		}
		v.wrong(s.session, s.at, "%s %s of step %s, and something of it lived (I10)", s.kind, s.code, s.step)
	}
}

// bodies are the messages of a stream by the last token of their subjects.
func (w *world) bodies(ctx context.Context, stream string) (map[string][]string, error) {
	s, err := w.js.Stream(ctx, stream)
	if err != nil {
		return nil, err
	}
	left := s.CachedInfo().State.Msgs
	out := map[string][]string{}
	if left == 0 {
		return out, nil
	}
	consumer, err := w.js.OrderedConsumer(ctx, stream, jetstream.OrderedConsumerConfig{})
	if err != nil {
		return nil, err
	}
	msgs, err := consumer.Messages()
	if err != nil {
		return nil, err
	}
	defer msgs.Stop()
	for range left {
		m, err := msgs.Next(jetstream.NextContext(ctx))
		if err != nil {
			return nil, fmt.Errorf("reading %s: %w", stream, err)
		}
		of := m.Subject()[strings.LastIndexByte(m.Subject(), '.')+1:]
		out[of] = append(out[of], string(m.Data()))
	}
	return out, nil
}

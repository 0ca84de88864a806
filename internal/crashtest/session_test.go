package crashtest

import (
	"encoding/json"
	"fmt"
	"slices"
	"strconv"
	"time"

	"reveille/claims"
)

// check reads one session's log from its beginning and holds each event against those before it.
type check struct {
	s      left
	inputs map[string]row
	sent   []sent // to this session
	tr     trial

	problems []string

	// What the events so far say.
	epoch       int64
	execution   string // that is open; empty: none
	steps       int    // of the open execution
	step        string // that is open; empty: none
	cancelling  string // the reason, where the open step is cancelling
	quarantined bool
	admitted    []string          // in order
	promoted    map[string]string // the step, by input
	order       []string          // of the promoted
	cancelled   map[string]string // the reason, by input
	covered     map[string][]string
	promises    map[string]claims.ContinuationKind // of a next step, by the step that it continues
	failed      string                             // a step that failed in this transaction, and may be tried again
	executions  map[string]bool
	closed      map[string]claims.EventType // how each step ended
	hits        map[string]map[string]bool  // what each interrupt hit
	serves      []time.Time                 // when a bare wake was served or cancelled
}

func (c *check) wrong(format string, args ...any) {
	c.problems = append(c.problems, fmt.Sprintf(format, args...))
}

// all checks a session's log, its rows, and what the handlers wrote.
func (c *check) all(log []string, handlers [][]string) {
	c.promoted, c.cancelled, c.covered = map[string]string{}, map[string]string{}, map[string][]string{}
	c.promises, c.executions, c.closed = map[string]claims.ContinuationKind{}, map[string]bool{}, map[string]claims.EventType{}
	c.hits = map[string]map[string]bool{}
	slices.SortFunc(c.sent, func(a, b sent) int { return int(a.seq) - int(b.seq) })
	for i, line := range log {
		var e event
		var d data
		if err := json.Unmarshal([]byte(line), &e); err != nil {
			c.wrong("event %d: %v", i+1, err)
			return
		}
		if err := json.Unmarshal(e.Data, &d); err != nil {
			c.wrong("data of event %d: %v", i+1, err)
			return
		}
		before := len(c.problems)
		c.envelope(int64(i)+1, e)
		c.event(e, d)
		for n := before; n < len(c.problems); n++ {
			c.problems[n] = fmt.Sprintf("event %d: %s", e.Seq, c.problems[n])
		}
	}
	c.end(int64(len(log)))
	c.everyInput()
	c.everyWake()
	c.everyInterrupt()
	c.everyCall(handlers)
}

func (c *check) envelope(seq int64, e event) {
	switch {
	case e.Seq != seq:
		c.wrong("it stands at place %d", seq)
	case e.Session != c.s.ID:
		c.wrong("it is of session %s", e.Session)
	case e.Execution != "" && e.Epoch < c.epoch:
		c.wrong("epoch %d after %d", e.Epoch, c.epoch)
	case e.Execution != "" && e.Execution != c.execution && e.Type != claims.ExecutionStarted:
		c.wrong("%s of execution %s, while %q is open", e.Type, e.Execution, c.execution)
	case e.Execution == "" && e.Step != "":
		c.wrong("it has a step and no execution")
	case c.quarantined && e.Type != claims.InputAdmitted && e.Type != claims.InputCancelled && e.Type != claims.ExecutionEnded:
		c.wrong("%s of a quarantined session", e.Type)
	}
	if e.Execution != "" && e.Type != claims.ExecutionStarted {
		c.epoch = max(c.epoch, e.Epoch)
	}
}

func (c *check) event(e event, d data) {
	switch e.Type {
	case claims.InputAdmitted:
		if slices.Contains(c.admitted, d.Input) {
			c.wrong("input %s is admitted again", d.Input)
		}
		c.admitted = append(c.admitted, d.Input)
	case claims.InputPromoted:
		c.promote(e, d)
	case claims.InputCancelled:
		c.cancelInput(d)
	case claims.WakeCancelled:
		c.hit(d.Reason, "the head")
		c.serves = append(c.serves, e.Time)
	case claims.ContinuationCancelled:
		c.hit(d.Reason, "the head")
		if _, ok := c.promises[d.Step]; !ok {
			c.wrong("a continuation of step %s is cancelled, which promised none", d.Step)
		}
		delete(c.promises, d.Step)
	case claims.ExecutionStarted:
		c.startExecution(e)
	case claims.ExecutionCancelling:
		if c.step == "" || c.cancelling != "" {
			c.wrong("cancelling, with step %q open, cancelling %q", c.step, c.cancelling)
		}
		c.cancelling = d.Reason
		c.hit(d.Reason, "a step")
	case claims.ExecutionEnded:
		c.endExecution(d)
	case claims.StepStartedEvent:
		c.startStep(e, d)
	case claims.StepEndedEvent, claims.StepFailedEvent, claims.StepInterruptedEvent:
		c.endStep(e, d)
	case claims.TextEvent:
		if e.Step != c.step || c.step == "" {
			c.wrong("text of step %q, while %q is open", e.Step, c.step)
		}
	case claims.SessionQuarantined:
		c.quarantined = true
		c.serves = append(c.serves, e.Time)
		if !slices.Contains(c.tr.reasons, claims.Reason(d.Reason)) {
			c.wrong("quarantined for %s", d.Reason)
		}
		if d.Reason != c.s.Reason {
			c.wrong("quarantined for %s, the row says %q", d.Reason, c.s.Reason)
		}
	default:
		c.wrong("nobody does %s here", e.Type)
	}
}

func (c *check) startExecution(e event) {
	if c.execution != "" {
		c.wrong("execution %s starts while %s is open", e.Execution, c.execution)
	}
	if c.executions[e.Execution] {
		c.wrong("execution %s starts again", e.Execution)
	}
	if e.Epoch <= c.epoch {
		c.wrong("execution starts with epoch %d after %d", e.Epoch, c.epoch)
	}
	c.execution, c.steps, c.epoch, c.executions[e.Execution] = e.Execution, 0, e.Epoch, true
}

func (c *check) endExecution(d data) {
	if c.step != "" && d.Outcome != claims.OutcomeQuarantined {
		c.wrong("execution ends as %s with step %s open", d.Outcome, c.step)
	}
	if c.quarantined != (d.Outcome == claims.OutcomeQuarantined) {
		c.wrong("execution ends as %s, quarantined %v", d.Outcome, c.quarantined)
	}
	if d.Outcome == claims.OutcomeRetrying {
		if c.failed == "" {
			c.wrong("execution ends as retrying, and its step did not fail")
		}
		c.promises[c.failed] = claims.KindRetry
	}
	c.execution, c.failed = "", ""
}

func (c *check) startStep(e event, d data) {
	c.steps++
	switch {
	case e.Execution == "" || c.step != "":
		c.wrong("step %s starts in execution %q with step %q open", e.Step, e.Execution, c.step)
	case c.closed[e.Step] != "":
		c.wrong("step %s starts again", e.Step)
	case d.Index != c.steps:
		c.wrong("step has index %d, want %d", d.Index, c.steps)
	}
	var want []string // that it covers
	if d.Continues == nil {
		for _, in := range c.order {
			if c.promoted[in] == e.Step {
				want = append(want, in)
			}
		}
	} else {
		of := d.Continues.Step
		if kind, ok := c.promises[of]; !ok || kind != d.Continues.Kind {
			c.wrong("step continues step %s as %s, which promised %q", of, d.Continues.Kind, kind)
		}
		delete(c.promises, of)
		if d.Continues.Kind != claims.KindContinue { // that one's inputs were served
			want = c.covered[of]
		}
	}
	if !slices.Equal(d.Inputs, want) {
		c.wrong("step has inputs %q, want %q", d.Inputs, want)
	}
	c.covered[e.Step] = d.Inputs
	c.step, c.cancelling, c.failed = e.Step, "", ""
	c.serves = append(c.serves, e.Time)
}

func (c *check) endStep(e event, d data) {
	if e.Step == "" || e.Step != c.step {
		c.wrong("%s of step %q, while %q is open", e.Type, e.Step, c.step)
	}
	interrupted := e.Type == claims.StepInterruptedEvent
	if c.cancelling != "" && (!interrupted || d.Reason != c.cancelling) {
		c.wrong("%s with reason %q after an interrupt with reason %q (I9)", e.Type, d.Reason, c.cancelling)
	}
	if interrupted && c.cancelling == "" && d.Reason != refused {
		c.hit(d.Reason, "a step") // whose worker was lost
	}
	c.closed[e.Step] = e.Type
	switch {
	case d.Continue:
		c.promises[e.Step] = claims.KindContinue
	case d.Code == claims.CodeWorkerLost:
		c.promises[e.Step] = claims.KindRecovery
	case d.Code == claims.CodeShutdown:
		c.promises[e.Step] = claims.KindHandover
	case e.Type == claims.StepFailedEvent:
		c.failed = e.Step
	}
	c.step, c.cancelling = "", ""
}

func (c *check) promote(e event, d data) {
	switch {
	case !slices.Contains(c.admitted, d.Input):
		c.wrong("input %s is promoted, and was not admitted", d.Input)
	case c.promoted[d.Input] != "":
		c.wrong("input %s is promoted again (I23)", d.Input)
	case c.cancelled[d.Input] != "":
		c.wrong("input %s is promoted after it was cancelled", d.Input)
	}
	c.promoted[d.Input] = e.Step
	c.order = append(c.order, d.Input)
}

func (c *check) cancelInput(d data) {
	c.hit(d.Reason, "the head")
	switch {
	case !slices.Contains(c.admitted, d.Input):
		c.wrong("input %s is cancelled, and was not admitted", d.Input)
	case c.promoted[d.Input] != "":
		c.wrong("input %s is cancelled after it was promoted", d.Input)
	case c.cancelled[d.Input] != "":
		c.wrong("input %s is cancelled again", d.Input)
	}
	c.cancelled[d.Input] = d.Reason
}

// hit notes what an interrupt hit.
func (c *check) hit(reason, what string) {
	if c.hits[reason] == nil {
		c.hits[reason] = map[string]bool{}
	}
	if what == "a step" && c.hits[reason][what] {
		c.wrong("the interrupt %q hits a second step", reason)
	}
	c.hits[reason][what] = true
}

// end holds the log's end against the session's row.
func (c *check) end(last int64) {
	if c.s.LastSeq != last {
		c.wrong("the row says that event %d is the last, it is %d", c.s.LastSeq, last)
	}
	if c.quarantined != (c.s.Quarantine != "") || c.quarantined && c.s.Reason == "" {
		c.wrong("quarantined by its events %v, by its row %q for %q", c.quarantined, c.s.Quarantine, c.s.Reason)
	}
	if c.s.Epoch < c.epoch {
		c.wrong("the row has epoch %d, an event %d", c.s.Epoch, c.epoch)
	}
	if c.s.Execution != "" || c.execution != "" {
		c.wrong("execution %q is open, by the row %q", c.execution, c.s.Execution)
	}
	if c.step != c.s.OpenStep {
		c.wrong("step %q was never closed, and the quarantine has step %q", c.step, c.s.OpenStep)
	}
	if len(c.promises) > 0 && !c.quarantined {
		c.wrong("what was promised was never done: %v (I32)", c.promises)
	}
	want := int64(0)
	if n := len(c.sent); n > 0 {
		want = int64(c.sent[n-1].seq)
	}
	if c.s.CommandSeq != want {
		c.wrong("the last command that was applied has sequence %d, want %d", c.s.CommandSeq, want)
	}
}

// everyInput: each input that was sent is there, in order, and has one fate (I23).
func (c *check) everyInput() {
	var want []string
	first := map[string]sent{}
	for _, cmd := range c.sent {
		if _, ok := first[cmd.input]; cmd.input != "" && !ok {
			first[cmd.input] = cmd
			want = append(want, cmd.input)
		}
	}
	if !slices.Equal(c.admitted, want) {
		c.wrong("inputs %q were admitted, %q were sent", c.admitted, want)
	}
	if len(c.inputs) != len(want) {
		c.wrong("the table has %d inputs, want %d", len(c.inputs), len(want))
	}
	for _, in := range want {
		r, step, reason := c.inputs[in], c.promoted[in], c.cancelled[in]
		ok := false
		switch r.State {
		case "covered":
			ok = step != "" && step == r.Step && (c.closed[step] != "" || step == c.s.OpenStep)
		case "cancelled":
			ok = reason != "" && step == ""
		case "unarmed":
			ok = reason == "" && step == "" && (c.quarantined || !c.wokenAfter(first[in].seq))
		case "armed", "quarantined":
			ok = reason == "" && step == "" && c.quarantined
		}
		if !ok {
			c.wrong("input %s is %s by step %q; by the events it was promoted to %q, cancelled for %q", in, r.State, r.Step, step, reason)
		}
	}
	// What was due at once is promoted in the order in which it was sent, by its delivery.
	for _, how := range []claims.Delivery{claims.Queue, claims.Steer} {
		var sent, got []string
		for _, in := range want {
			if f := first[in]; f.delivery == how && f.notAt.IsZero() && c.promoted[in] != "" {
				sent = append(sent, in)
			}
		}
		for _, in := range c.order {
			if f := first[in]; f.delivery == how && f.notAt.IsZero() {
				got = append(got, in)
			}
		}
		if !slices.Equal(got, sent) {
			c.wrong("%s inputs were promoted in the order %q, sent in the order %q", how, got, sent)
		}
	}
}

// wokenAfter: a wake came after a place in the stream that arms what was admitted.
func (c *check) wokenAfter(seq uint64) bool {
	for i, cmd := range c.sent {
		known := slices.ContainsFunc(c.sent[:i], func(o sent) bool { return cmd.input != "" && o.input == cmd.input })
		if cmd.kind == claims.Wake && cmd.seq > seq && !known {
			return true
		}
	}
	return false
}

// everyWake: a wake without an input buys a step that starts after it, unless it is cancelled or quarantined.
func (c *check) everyWake() {
	for _, cmd := range c.sent {
		if cmd.kind != claims.Wake || cmd.input != "" || c.quarantined {
			continue
		}
		since := cmd.at
		if cmd.notAt.After(since) {
			since = cmd.notAt
		}
		since = since.Truncate(time.Microsecond) // as events tell the time
		if !slices.ContainsFunc(c.serves, func(at time.Time) bool { return !at.Before(since) }) {
			c.wrong("the bare wake %d of %v bought no step", cmd.seq, since.UTC())
		}
	}
}

// everyInterrupt hit one thing, or nothing; with discard also what is pending.
func (c *check) everyInterrupt() {
	for reason, what := range c.hits {
		i := slices.IndexFunc(c.sent, func(cmd sent) bool { return cmd.kind == claims.Interrupt && cmd.reason == reason })
		switch {
		case i < 0:
			c.wrong("nobody interrupted %q", reason)
		case len(what) > 1 && !c.sent[i].discard:
			c.wrong("the interrupt %q hit a step and a head", reason)
		}
	}
}

// everyCall: a step is at most one call of the handler, one that ended was called, and no call of an older epoch does
// anything once one of a newer has begun.
func (c *check) everyCall(lines [][]string) {
	started, newest := map[string]bool{}, int64(0)
	for _, l := range lines {
		epoch, err := strconv.ParseInt(l[1], 10, 64)
		if err != nil || epoch < newest {
			c.wrong("a handler of epoch %s says %s of step %s after one of epoch %d, %v", l[1], l[0], l[2], newest, err)
		}
		newest = max(newest, epoch)
		if l[0] == "start" {
			if started[l[2]] {
				c.wrong("the handler was called twice for step %s", l[2])
			}
			started[l[2]] = true
			if c.closed[l[2]] == "" && l[2] != c.s.OpenStep {
				c.wrong("the handler was called for step %s, which never started", l[2])
			}
		}
	}
	for step, how := range c.closed {
		if how == claims.StepEndedEvent && !started[step] {
			c.wrong("step %s ended, and its handler was not called", step)
		}
	}
}

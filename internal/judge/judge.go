// Package judge holds what is left of a session's life against the contract with its users: it reads the session's log
// from its beginning, and says what in it, in the tables, in the stream or in what the handlers wrote contradicts what
// was sent. It shares nothing with the programs: names of events, codes and states stand here as docs/contract.md has them.
//
// A Session is filled in by whoever has made the history. Judge is pure and may be called from any goroutine.
package judge

import (
	"encoding/json"
	"fmt"
	"slices"
	"time"
)

// Rules are what differs between those who make histories.
type Rules struct {
	// Reasons are those for which a session may be quarantined.
	Reasons []string
	// Refusal is the reason of declined steps; no interrupt has it.
	Refusal string
	// Skew bounds how far the times of events are off the clock that Command.Sent is of.
	Skew time.Duration
	// AlertsLost: the stream of quarantines lost its tail, of which not all is written again.
	AlertsLost bool
}

// Command is one that its stream has acknowledged.
type Command struct {
	Session   string
	Kind      string // admit, wake, interrupt
	Input     string // empty: none
	Delivery  string // queue, steer
	Body      string
	Reason    string // of an interrupt; no two have the same
	Discard   bool
	Execution string    // that an interrupt is for; empty: any
	NotBefore time.Time // zero: it is due at once
	Era       int       // of its stream, which begins anew when the stream loses its tail
	Seq       uint64    // in the stream
	Sent      time.Time // before it was sent
	// Lost: its stream lost it, before or after somebody applied it.
	Lost bool
	// Repeated: it was sent more than once, over a loss of the stream's tail: it may have been applied more than once.
	Repeated bool
}

// Row is what the tables say of a session.
type Row struct {
	ID, Execution, Quarantine  string
	Epoch, LastSeq, CommandSeq int64
	Reason, OpenStep           string // of the quarantine, and the step that its evidence says was open
}

// Input is an input as the table has it.
type Input struct{ Session, ID, State, Step string }

// Call is a line that a handler wrote when it started or ended.
type Call struct {
	What  string // start, end
	Epoch int64
	Step  string
	// Excused: its owner may be late (I7), since its worker could not run.
	Excused bool
}

// Session is one session's history.
type Session struct {
	Row      Row
	Inputs   []Input
	Commands []Command // to this session, in any order
	Releases []string  // why operators released it
	Log      []string  // of the database, an event a line
	Stream   []string  // the same of the stream
	Alerts   []string  // of the stream of quarantines
	Calls    []Call    // in the order in which they were written
}

// event is the envelope of docs/contract.md section 2.
type event struct {
	Session   string
	Seq       int64
	Type      string
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
	Outcome   string
	Index     int
	Inputs    []string
	Continues *struct{ Kind, Step string }
	Code      string
	Continue  bool
	How       string
	Joined    *bool
}

// check reads one session's log from its beginning and holds each event against those before it.
type check struct {
	Session
	rules  Rules
	inputs map[string]Input

	problems []string

	// What the events so far say.
	epoch       int64
	execution   string // that is open; empty: none
	steps       int    // of the open execution
	step        string // that is open; empty: none
	cancelling  string // the reason, where the open step is cancelling
	quarantined bool
	reason      string            // of the last quarantine
	ever        bool              // it was quarantined
	released    string            // how, where a step that was open at the quarantine is still to be closed
	retried     bool              // it was released to be tried again
	admitted    []string          // in order
	promoted    map[string]string // the step, by input
	order       []string          // of the promoted
	cancelled   map[string]string // the reason, by input
	covered     map[string][]string
	promises    map[string]string // kind of a next step, by the step that it continues
	failed      string            // a step that failed in this transaction, and may be tried again
	executions  map[string]bool
	chain       map[string]string // the first execution, by each one that went on with it
	ran         map[string]string // the execution, by step
	closed      map[string]string // how each step ended, as its event's type
	hits        map[string]map[string]bool
	serves      []time.Time // when a bare wake was served or cancelled
	bare        int         // steps that nothing but a bare wake has bought
}

// Judge says what is wrong with a session; nothing where all is well.
func Judge(rules Rules, s Session) []string {
	c := &check{
		Session: s, rules: rules, inputs: map[string]Input{}, promoted: map[string]string{}, cancelled: map[string]string{},
		covered: map[string][]string{}, promises: map[string]string{}, executions: map[string]bool{}, closed: map[string]string{},
		chain: map[string]string{}, ran: map[string]string{}, hits: map[string]map[string]bool{},
	}
	for _, in := range s.Inputs {
		c.inputs[in.ID] = in
	}
	c.Commands = slices.SortedFunc(slices.Values(s.Commands), func(a, b Command) int {
		if a.Era != b.Era {
			return a.Era - b.Era
		}
		return int(a.Seq) - int(b.Seq)
	})
	c.all()
	return c.problems
}

func (c *check) wrong(format string, args ...any) {
	c.problems = append(c.problems, fmt.Sprintf(format, args...))
}

func (c *check) all() {
	if !slices.Equal(c.Log, c.Stream) {
		n := 0
		for n < len(c.Log) && n < len(c.Stream) && c.Log[n] == c.Stream[n] {
			n++
		}
		c.wrong("the stream has %d events, the database %d; they differ from event %d on (I25)", len(c.Stream), len(c.Log), n+1)
	}
	var alerts []string
	for i, line := range c.Log {
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
		if e.Type == "session.quarantined" || e.Type == "session.released" {
			alerts = append(alerts, line)
		}
		before := len(c.problems)
		c.envelope(int64(i)+1, e)
		c.event(e, d)
		for n := before; n < len(c.problems); n++ {
			c.problems[n] = fmt.Sprintf("event %d: %s", e.Seq, c.problems[n])
		}
	}
	if stray := slices.DeleteFunc(slices.Clone(c.Alerts), func(a string) bool { return slices.Contains(alerts, a) }); len(stray) > 0 ||
		!c.rules.AlertsLost && !slices.Equal(c.Alerts, alerts) {
		c.wrong("for alerts there is %q, want %q", c.Alerts, alerts)
	}
	c.end(int64(len(c.Log)))
	c.everyInput()
	c.everyWake()
	c.everyInterrupt()
	c.everyCall()
}

func (c *check) envelope(seq int64, e event) {
	late := c.released != "" && e.Step == c.step // what a release closes
	switch {
	case e.Seq != seq:
		c.wrong("it stands at place %d", seq)
	case e.Session != c.Row.ID:
		c.wrong("it is of session %s", e.Session)
	case e.Execution != "" && e.Epoch < c.epoch:
		c.wrong("epoch %d after %d (I6)", e.Epoch, c.epoch)
	case e.Execution != "" && e.Execution != c.execution && e.Type != "execution.started" && !late:
		c.wrong("%s of execution %s, while %q is open", e.Type, e.Execution, c.execution)
	case e.Execution == "" && e.Step != "":
		c.wrong("it has a step and no execution")
	case c.quarantined && !slices.Contains([]string{"input.admitted", "input.cancelled", "execution.ended", "session.released"}, e.Type):
		c.wrong("%s of a quarantined session (I30)", e.Type)
	}
	if e.Execution != "" && e.Type != "execution.started" {
		c.epoch = max(c.epoch, e.Epoch)
	}
}

func (c *check) event(e event, d data) {
	switch e.Type {
	case "input.admitted":
		if slices.Contains(c.admitted, d.Input) {
			c.wrong("input %s is admitted again (I20)", d.Input)
		}
		c.admitted = append(c.admitted, d.Input)
	case "input.promoted":
		c.promote(e, d)
	case "input.cancelled":
		c.cancelInput(d)
	case "wake.cancelled":
		c.hit(d.Reason, "the head", "")
		c.serves = append(c.serves, e.Time)
	case "continuation.cancelled":
		c.hit(d.Reason, "the head", c.ran[d.Step])
		if _, ok := c.promises[d.Step]; !ok {
			c.wrong("a continuation of step %s is cancelled, which promised none", d.Step)
		}
		delete(c.promises, d.Step)
	case "execution.started":
		c.startExecution(e)
	case "execution.cancelling":
		if c.step == "" || c.cancelling != "" {
			c.wrong("cancelling, with step %q open, cancelling %q", c.step, c.cancelling)
		}
		c.cancelling = d.Reason
		c.hit(d.Reason, "a step", e.Execution)
	case "execution.ended":
		c.endExecution(d)
	case "step.started":
		c.startStep(e, d)
	case "step.ended", "step.failed", "step.interrupted":
		c.endStep(e, d)
	case "text", "tool.called", "tool.succeeded", "tool.failed", "snapshot":
		if e.Step != c.step || c.step == "" {
			c.wrong("%s of step %q, while %q is open", e.Type, e.Step, c.step)
		}
	case "session.quarantined":
		c.quarantined, c.ever, c.reason = true, true, d.Reason
		c.serves = append(c.serves, e.Time)
		if !slices.Contains(c.rules.Reasons, d.Reason) {
			c.wrong("quarantined for %s", d.Reason)
		}
	case "session.released":
		if !c.quarantined {
			c.wrong("released, and not quarantined")
		}
		c.quarantined, c.cancelling, c.retried = false, "", c.retried || d.How == "retry"
		if c.step != "" {
			c.released = d.How
		}
	default:
		c.wrong("there is no event of type %s", e.Type)
	}
}

func (c *check) startExecution(e event) {
	if c.execution != "" {
		c.wrong("execution %s starts while %s is open (I1)", e.Execution, c.execution)
	}
	if c.executions[e.Execution] {
		c.wrong("execution %s starts again", e.Execution)
	}
	if e.Epoch <= c.epoch {
		c.wrong("execution starts with epoch %d after %d (I6)", e.Epoch, c.epoch)
	}
	if c.step != "" {
		c.wrong("execution %s starts with step %s open", e.Execution, c.step)
	}
	c.execution, c.steps, c.epoch, c.executions[e.Execution] = e.Execution, 0, e.Epoch, true
}

func (c *check) endExecution(d data) {
	if c.execution == "" {
		c.wrong("an execution ends as %s, and none is open", d.Outcome)
	}
	if c.step != "" && d.Outcome != "quarantined" {
		c.wrong("execution ends as %s with step %s open", d.Outcome, c.step)
	}
	if c.quarantined != (d.Outcome == "quarantined") {
		c.wrong("execution ends as %s, quarantined %v", d.Outcome, c.quarantined)
	}
	if d.Outcome == "retrying" {
		if c.failed == "" {
			c.wrong("execution ends as retrying, and its step did not fail")
		}
		c.promises[c.failed] = "retry"
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
		if kind, ok := c.promises[of]; !ok || kind != d.Continues.Kind && (!c.retried || d.Continues.Kind != "release") {
			c.wrong("step continues step %s as %s, which promised %q (I21)", of, d.Continues.Kind, kind)
		}
		if c.promises[of] != "continue" { // that one's inputs were served
			want = c.covered[of]
		}
		delete(c.promises, of)
		c.chain[e.Execution] = c.first(c.ran[of])
	}
	if !slices.Equal(d.Inputs, want) {
		c.wrong("step has inputs %q, want %q (I23)", d.Inputs, want)
	}
	if d.Continues == nil && len(d.Inputs) == 0 {
		c.bare++
	}
	c.covered[e.Step], c.ran[e.Step] = d.Inputs, e.Execution
	c.step, c.cancelling, c.failed, c.released = e.Step, "", "", ""
	c.serves = append(c.serves, e.Time)
}

// first is the first execution of a chain of continuations.
func (c *check) first(execution string) string {
	if first, ok := c.chain[execution]; ok {
		return first
	}
	return execution
}

func (c *check) endStep(e event, d data) {
	if e.Step == "" || e.Step != c.step {
		c.wrong("%s of step %q, while %q is open", e.Type, e.Step, c.step)
	}
	interrupted := e.Type == "step.interrupted"
	switch {
	case c.released == "retry" && (d.Code != "worker_lost" || e.Type != "step.failed"),
		(c.released == "interrupted" || c.released == "discard") && !interrupted:
		c.wrong("%s %s after a release as %s", e.Type, d.Code, c.released)
	case c.cancelling != "" && (!interrupted || d.Reason != c.cancelling):
		c.wrong("%s with reason %q after an interrupt with reason %q (I9)", e.Type, d.Reason, c.cancelling)
	}
	if interrupted && c.cancelling == "" && (d.Joined == nil || *d.Joined) {
		c.wrong("step %s was closed without a join, and says that it joined (I10)", e.Step)
	}
	if interrupted && c.cancelling == "" && d.Reason != c.rules.Refusal && c.released == "" {
		c.hit(d.Reason, "a step", e.Execution) // whose worker was lost
	}
	c.closed[e.Step] = e.Type
	switch {
	case d.Continue:
		c.promises[e.Step] = "continue"
	case d.Code == "worker_lost" && c.released != "":
		c.promises[e.Step] = "release"
	case d.Code == "worker_lost":
		c.promises[e.Step] = "recovery"
	case d.Code == "shutdown":
		c.promises[e.Step] = "handover"
	case e.Type == "step.failed":
		c.failed = e.Step
	}
	c.step, c.cancelling, c.released = "", "", ""
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
	c.hit(d.Reason, "an input", "")
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

// hit notes what an interrupt hit, in which execution's chain; empty: in none.
func (c *check) hit(reason, what, execution string) {
	if c.hits[reason] == nil {
		c.hits[reason] = map[string]bool{}
	}
	i := slices.IndexFunc(c.Commands, func(cmd Command) bool { return cmd.Kind == "interrupt" && cmd.Reason == reason })
	if i >= 0 {
		cmd := c.Commands[i]
		if what == "a step" && c.hits[reason][what] && !cmd.Repeated && !cmd.Lost {
			c.wrong("the interrupt %q hits a second step", reason)
		}
		if cmd.Execution != "" && !cmd.Discard && (execution == "" || c.first(execution) != c.first(cmd.Execution)) {
			c.wrong("the interrupt %q is for execution %s and hits %s of execution %q", reason, cmd.Execution, what, execution)
		}
	}
	c.hits[reason][what] = true
}

// end holds the log's end against the session's row.
func (c *check) end(last int64) {
	r := c.Row
	if r.LastSeq != last {
		c.wrong("the row says that event %d is the last, it is %d", r.LastSeq, last)
	}
	if c.quarantined != (r.Quarantine != "") || c.quarantined && r.Reason != c.reason {
		c.wrong("quarantined by its events %v for %q, by its row %q for %q", c.quarantined, c.reason, r.Quarantine, r.Reason)
	}
	if r.Epoch < c.epoch {
		c.wrong("the row has epoch %d, an event %d (I6)", r.Epoch, c.epoch)
	}
	if r.Execution != "" || c.execution != "" {
		c.wrong("execution %q is open, by the row %q (I32)", c.execution, r.Execution)
	}
	if c.step != r.OpenStep {
		c.wrong("step %q was never closed, and the quarantine has step %q (I32)", c.step, r.OpenStep)
	}
	if len(c.promises) > 0 && !c.quarantined {
		c.wrong("what was promised was never done: %v (I32)", c.promises)
	}
	if n := len(c.Commands); n > 0 && c.Commands[n-1].Era == 0 && !c.Commands[n-1].Lost && r.CommandSeq != int64(c.Commands[n-1].Seq) {
		c.wrong("the last command that was applied has sequence %d, want %d (I18)", r.CommandSeq, c.Commands[n-1].Seq)
	}
}

// everyInput: each input that was sent is there, in order, and has one fate (I23).
func (c *check) everyInput() {
	var want []string
	first := map[string]Command{}
	for _, cmd := range c.Commands {
		if cmd.Input == "" || cmd.Lost && !slices.Contains(c.admitted, cmd.Input) {
			continue
		}
		if f, ok := first[cmd.Input]; !ok {
			first[cmd.Input] = cmd
			want = append(want, cmd.Input)
		} else if f.Lost { // it may be this one that was applied
			f.NotBefore = time.Unix(1, 0)
			first[cmd.Input] = f
		}
	}
	got := slices.Clone(c.admitted)
	if len(c.Commands) > 0 && c.Commands[len(c.Commands)-1].Era > 0 { // one that was lost and sent again came later than it was sent first
		want, got = slices.Sorted(slices.Values(want)), slices.Sorted(slices.Values(got))
	}
	if !slices.Equal(got, want) {
		c.wrong("inputs %q were admitted, %q were sent (I18)", c.admitted, want)
	}
	if len(c.inputs) != len(want) {
		c.wrong("the table has %d inputs, want %d", len(c.inputs), len(want))
	}
	for _, in := range want {
		r, step, reason := c.inputs[in], c.promoted[in], c.cancelled[in]
		ok := false
		switch r.State {
		case "covered":
			ok = step != "" && step == r.Step && (c.closed[step] != "" || step == c.Row.OpenStep)
		case "cancelled":
			ok = reason != "" && step == ""
		case "unarmed":
			ok = reason == "" && step == "" && (c.quarantined || !c.wokenAfter(first[in]))
		case "armed", "quarantined":
			ok = reason == "" && step == "" && c.quarantined
		}
		if !ok {
			c.wrong("input %s is %s by step %q; by the events it was promoted to %q, cancelled for %q (I22, I23)", in, r.State, r.Step, step, reason)
		}
	}
	// What was due at once is promoted in the order in which it was admitted, by its delivery.
	for _, how := range []string{"queue", "steer"} {
		var sent, got []string
		for _, in := range c.admitted {
			if f := first[in]; f.Delivery == how && f.NotBefore.IsZero() && c.promoted[in] != "" {
				sent = append(sent, in)
			}
		}
		for _, in := range c.order {
			if f := first[in]; f.Delivery == how && f.NotBefore.IsZero() {
				got = append(got, in)
			}
		}
		if !slices.Equal(got, sent) {
			c.wrong("%s inputs were promoted in the order %q, sent in the order %q (I18)", how, got, sent)
		}
	}
}

// wokenAfter: a wake came after a command that arms what was admitted.
func (c *check) wokenAfter(of Command) bool {
	for i, cmd := range c.Commands {
		known := slices.ContainsFunc(c.Commands[:i], func(o Command) bool { return cmd.Input != "" && o.Input == cmd.Input })
		if cmd.Kind == "wake" && !cmd.Lost && (cmd.Era > of.Era || cmd.Era == of.Era && cmd.Seq > of.Seq) && !known {
			return true
		}
	}
	return false
}

// everyWake: a wake without an input buys a step that starts after it, unless it is cancelled or quarantined; and what
// starts without an input and goes on with nothing was bought by one (I20).
func (c *check) everyWake() {
	wakes := 0
	for _, cmd := range c.Commands {
		if cmd.Kind == "wake" && cmd.Input == "" {
			wakes++
			if cmd.Repeated || cmd.Lost {
				wakes++
			}
		}
	}
	if c.bare > wakes && !c.retried { // a release gives bare wakes again
		c.wrong("%d steps began with nothing, and there were %d wakes without an input: no wake bought them (I20)", c.bare, wakes)
	}
	for _, cmd := range c.Commands {
		if cmd.Kind != "wake" || cmd.Input != "" || cmd.Lost || c.ever {
			continue
		}
		since := cmd.Sent
		if cmd.NotBefore.After(since) {
			since = cmd.NotBefore
		}
		since = since.Add(-c.rules.Skew).Truncate(time.Microsecond) // as events tell the time
		if !slices.ContainsFunc(c.serves, func(at time.Time) bool { return !at.Before(since) }) {
			c.wrong("the bare wake %d of %v bought no step (I22)", cmd.Seq, since.UTC())
		}
	}
}

// everyInterrupt hit one thing, or nothing; with discard also what is pending.
func (c *check) everyInterrupt() {
	for reason, what := range c.hits {
		i := slices.IndexFunc(c.Commands, func(cmd Command) bool { return cmd.Kind == "interrupt" && cmd.Reason == reason })
		switch {
		case i < 0 && !slices.Contains(c.Releases, reason):
			c.wrong("nobody interrupted %q", reason)
		case i >= 0 && what["a step"] && len(what) > 1 && !c.Commands[i].Discard && !c.Commands[i].Repeated && !c.Commands[i].Lost:
			c.wrong("the interrupt %q hit a step and a head", reason)
		}
	}
}

// everyCall: a step is at most one call of the handler, one that ended was called, and no call of an older epoch does
// anything once one of a newer has begun.
func (c *check) everyCall() {
	started, newest := map[string]bool{}, int64(0)
	for _, call := range c.Calls {
		if call.Epoch < newest && !call.Excused {
			c.wrong("a handler of epoch %d says %s of step %s after one of epoch %d (I6, I7)", call.Epoch, call.What, call.Step, newest)
		}
		newest = max(newest, call.Epoch)
		if call.What == "start" {
			if started[call.Step] {
				c.wrong("the handler was called twice for step %s", call.Step)
			}
			started[call.Step] = true
			if c.closed[call.Step] == "" && call.Step != c.Row.OpenStep {
				c.wrong("the handler was called for step %s, which never started", call.Step)
			}
		}
	}
	for step, how := range c.closed {
		if how == "step.ended" && !started[step] {
			c.wrong("step %s ended, and its handler was not called", step)
		}
	}
}

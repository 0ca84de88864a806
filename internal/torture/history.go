package main

import (
	"context"
	"encoding/json"
	"fmt"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/nats-io/nats.go"

	"reveille/internal/judge"
	"reveille/internal/torture/truth"
)

// fault is one that happened.
type fault struct {
	kind, target string
	from, to     time.Time
}

// seen is an event that was heard as it was published.
type seen struct {
	at                        time.Time
	session, kind, step, line string
}

// suspect is a step that was closed as joined while something of it lived.
type suspect struct {
	seen
	code string
}

// history is what a run records of itself while it lasts. Its methods may be called from any goroutine.
type history struct {
	mu       sync.Mutex // guards all below
	began    time.Time
	problems []string
	commands []judge.Command
	rejects  []string // bodies of commands that must be rejected
	era      int
	rewinds  int // of the streams
	faults   []fault
	stops    map[string][]fault // SIGSTOP to SIGCONT, by process
	stalls   []fault            // when nobody on this machine could run
	events   []seen
	first    map[string]time.Time // when an event was heard first, by session and seq
	suspects []suspect
	running  map[string]string // the last execution that was heard to start, by session
	releases map[string][]string
}

func newHistory() *history {
	return &history{
		began: time.Now(), stops: map[string][]fault{}, first: map[string]time.Time{}, running: map[string]string{}, releases: map[string][]string{},
	}
}

// wrong is something that must not be, whatever the checker finds at the end.
func (h *history) wrong(format string, args ...any) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.problems = append(h.problems, fmt.Sprintf(format, args...))
}

// fault notes a fault that is over.
func (h *history) fault(f fault) {
	h.mu.Lock()
	defer h.mu.Unlock()
	f.to = time.Now()
	h.faults = append(h.faults, f)
	fmt.Printf("%6.1fs  %-22s %-28s %5.1fs\n", f.from.Sub(h.began).Seconds(), f.kind, f.target, f.to.Sub(f.from).Seconds())
}

// stopped notes that a process could not run.
func (h *history) stopped(process string, from time.Time) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.stops[process] = append(h.stops[process], fault{from: from, to: time.Now()})
}

// waking is how long after it could run again a process may still do what it was about to do (I7).
const waking = time.Second

// asleep tells whether a process could not run at a time, or had just begun to.
func (h *history) asleep(process string, at time.Time) bool {
	return during(h.stops[process], at) || h.stalled(at)
}

// stalled tells whether nobody on this machine could run, or had just begun to: a worker's guard could not either.
func (h *history) stalled(at time.Time) bool { return during(h.stalls, at) }

func during(all []fault, at time.Time) bool {
	return slices.ContainsFunc(all, func(f fault) bool { return !at.Before(f.from) && at.Before(f.to.Add(waking)) })
}

const (
	stallTick = 50 * time.Millisecond
	// stall is longer than a process of a machine that is merely busy waits for its turn, and well within what lies
	// between the end of a lease and its owner's own deadline.
	stall = 250 * time.Millisecond
)

// watchStalls notes when this process could not run: the others could not either. It returns when ctx ends.
func (h *history) watchStalls(ctx context.Context) {
	for last := time.Now(); pause(ctx, stallTick); last = time.Now() {
		if time.Since(last) > stall {
			h.mu.Lock()
			h.stalls = append(h.stalls, fault{from: last, to: time.Now()})
			h.mu.Unlock()
		}
	}
}

// sent notes a command that its stream has acknowledged.
func (h *history) sent(c judge.Command) {
	h.mu.Lock()
	defer h.mu.Unlock()
	c.Era = h.era
	h.commands = append(h.commands, c)
}

// rejected notes a body that must be rejected.
func (h *history) rejected(body string) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.rejects = append(h.rejects, body)
}

// rewound notes that the streams were taken back in time.
func (h *history) rewound() {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.rewinds++
}

// note is something that is no fault of the system's.
func (h *history) note(format string, args ...any) {
	h.mu.Lock()
	defer h.mu.Unlock()
	fmt.Printf("%6.1fs  %s\n", time.Since(h.began).Seconds(), fmt.Sprintf(format, args...))
}

// kept begins an era where the stream of commands holds less than it has acknowledged. last is its last sequence.
func (h *history) kept(last uint64) {
	h.mu.Lock()
	defer h.mu.Unlock()
	lost := false
	for i := range h.commands {
		if c := &h.commands[i]; c.Era == h.era && c.Seq > last {
			c.Lost, lost = true, true
		}
	}
	if lost {
		h.era++
	}
}

// lastExecution is one that started in a session; empty where none was heard of.
func (h *history) lastExecution(session string) string {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.running[session]
}

func (h *history) released(session, why string) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.releases[session] = append(h.releases[session], why)
}

// hear takes an event as it is published, committed but perhaps not on the stream yet. Of a step that was closed as
// joined nothing may live any more.
func (h *history) hear(dir truth.Dir, m *nats.Msg) {
	var e struct {
		Session, Type, Execution, Step string
		Seq, Epoch                     int64
		Data                           struct {
			Joined *bool
			Code   string
		}
	}
	if err := json.Unmarshal(m.Data, &e); err != nil {
		h.wrong("event %q: %v", m.Data, err)
		return
	}
	s := seen{time.Now(), e.Session, e.Type, e.Step, string(m.Data)}
	lives := false
	if slices.Contains([]string{"step.ended", "step.failed", "step.interrupted"}, e.Type) && (e.Data.Joined == nil || *e.Data.Joined) {
		var err error
		if lives, err = dir.Lives(e.Step); err != nil {
			h.wrong("step %s: %v", e.Step, err)
		}
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	key := fmt.Sprintf("%s:%d", e.Session, e.Seq)
	if _, ok := h.first[key]; ok {
		return
	}
	h.first[key] = s.at
	h.events = append(h.events, s)
	if lives {
		h.suspects = append(h.suspects, suspect{s, e.Data.Code})
	}
	if e.Type == "execution.started" {
		h.running[e.Session] = e.Execution
	}
}

// around is what happened to a session, and what faults there were, within a few seconds of a time.
func (h *history) around(session string, at time.Time, calls []truth.Line) string {
	const near = 4 * time.Second
	type entry struct {
		at   time.Time
		text string
	}
	var all []entry
	for _, f := range h.faults {
		if f.from.Before(at.Add(near)) && f.to.After(at.Add(-near)) {
			all = append(all, entry{f.from, fmt.Sprintf("fault    %s %s for %.1fs", f.kind, f.target, f.to.Sub(f.from).Seconds())})
		}
	}
	for _, c := range h.commands {
		if c.Session == session {
			all = append(all, entry{c.Sent, fmt.Sprintf("command  %d %s %s %s %s %s", c.Seq, c.Kind, c.Input, c.Body, c.Reason, c.Execution)})
		}
	}
	for _, e := range h.events {
		if e.session == session {
			all = append(all, entry{e.at, "event    " + e.line})
		}
	}
	for _, l := range calls {
		if l.Session == session {
			all = append(all, entry{l.At, fmt.Sprintf("handler  %s %s of %s, epoch %d, step %s, pid %d", l.What, l.Kind, l.Worker, l.Epoch, l.Step, l.PID)})
		}
	}
	slices.SortStableFunc(all, func(a, b entry) int { return a.at.Compare(b.at) })
	var b strings.Builder
	for _, e := range all {
		if d := e.at.Sub(at); d > -near && d < near {
			fmt.Fprintf(&b, "  %8.3fs %s\n", e.at.Sub(h.began).Seconds(), e.text)
		}
	}
	return b.String()
}

package main

import (
	"context"
	"fmt"
	"io"
	"os"
	"strings"
	"time"

	"github.com/google/uuid"
	"github.com/nats-io/nats.go"
	"golang.org/x/term"

	"reveille/bus"
	"reveille/claims"
	"reveille/cmd/internal/flags"
	"reveille/cmd/reveille/internal/follow"
)

const (
	// quiet is how long no event must have come, after a command was applied,
	// until it counts as one that caused none. Relaying takes milliseconds.
	quiet = 2 * time.Second
	// quietRejected is how long a rejection may come after the command has left
	// its stream: it was published before that.
	quietRejected = 100 * time.Millisecond
	// appliedPoll is how often the command stream is asked for the command.
	appliedPoll = 250 * time.Millisecond
	// slow is when the user is told that no worker has taken the command.
	slow = 5 * time.Second
	// liveWaiting bounds the live text that waits for its step to start.
	liveWaiting = 64 << 10
	liveQueue   = 1024
)

// tail follows one session and what becomes of one command for it.
type tail struct {
	events   chan claims.Record
	live     chan bus.LiveText
	rejected chan *nats.Msg
	failed   chan error
	stop     func()
}

// followSession begins with the first event whose sequence is from. Everything
// is subscribed to when it returns, so that a command published then causes
// nothing that is missed.
func (n *natsFlags) followSession(ctx context.Context, conn *bus.Conn, session claims.SessionID, from int64, kind claims.CommandKind, msgID string) (*tail, error) {
	ctx, cancel := context.WithCancel(ctx)
	t := &tail{
		events: make(chan claims.Record), live: make(chan bus.LiveText, liveQueue),
		rejected: make(chan *nats.Msg, 1), failed: make(chan error, 1), stop: cancel,
	}
	_, err := conn.NATS().Subscribe(conn.Namespace().Rejected(kind), func(m *nats.Msg) {
		if m.Header.Get(bus.HeaderMsgID) == msgID {
			select {
			case t.rejected <- m:
			default:
			}
		}
	})
	if err == nil {
		_, err = bus.SubscribeLive(conn, session, func(l bus.LiveText) {
			select {
			case t.live <- l:
			default: // the durable text comes in any case
			}
		})
	}
	if err == nil {
		err = conn.NATS().FlushTimeout(n.Timeout)
	}
	if err != nil {
		cancel()
		return nil, err // closing the connection ends the subscriptions
	}
	go func() {
		t.failed <- bus.Watch(ctx, conn, session, from, func(r claims.Record) error {
			select {
			case t.events <- r:
				return nil
			case <-ctx.Done():
				return ctx.Err()
			}
		})
	}()
	return t, nil
}

// watchApplied tells when a worker has applied the command, and when that takes long.
func watchApplied(ctx context.Context, conn *bus.Conn, sequence uint64) (done, late <-chan struct{}) {
	d, l := make(chan struct{}), make(chan struct{})
	go func() {
		tick := time.NewTicker(appliedPoll)
		defer tick.Stop()
		patience := time.NewTimer(slow)
		defer patience.Stop()
		for {
			select {
			case <-ctx.Done():
				return
			case <-patience.C:
				close(l)
			case <-tick.C:
				if ok, err := applied(ctx, conn, sequence); ok && err == nil {
					close(d)
					return
				}
			}
		}
	}()
	return d, l
}

// waiting is what wake --wait and interrupt --wait do alike: it publishes the
// command and gives what follows to see and idle until one is done.
func (n *natsFlags) waiting(ctx context.Context, s streams, conn *bus.Conn, cmd claims.Command, h history, from int64, w waiter) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	msgID := uuid.NewString()
	tail, err := n.followSession(ctx, conn, cmd.Session, from, cmd.Kind, msgID)
	if err != nil {
		return err
	}
	defer tail.stop()
	receipt, err := n.publish(ctx, conn, cmd, msgID)
	if err != nil {
		return err
	}
	w.published(receipt)
	if from > h.last {
		if o, done := w.past(); done {
			return w.end(o)
		}
	}
	applied, late := watchApplied(ctx, conn, receipt.Sequence)
	silence := time.NewTimer(time.Hour)
	silence.Stop()
	defer silence.Stop()
	var recorded *follow.Outcome // by history; what becomes of this command may be another matter
	for isApplied := false; ; {
		select {
		case r := <-tail.events:
			if recorded != nil {
				continue
			}
			o, done := w.event(r)
			if !done && r.Seq == h.last {
				o, done = w.past()
			}
			if done && r.Seq > h.last {
				return w.end(o)
			}
			if done {
				recorded = &o
			}
			if isApplied {
				silence.Reset(quiet)
			}
		case l := <-tail.live:
			w.live(l)
		case <-applied:
			applied, late, isApplied = nil, nil, true
			if recorded != nil {
				silence.Reset(quietRejected)
			} else {
				silence.Reset(quiet)
			}
		case <-silence.C:
			if recorded != nil {
				return w.end(*recorded)
			}
			if o, done := w.idle(); done {
				return w.end(o)
			}
		case <-late:
			late = nil
			s.say("no worker has taken the command for %v: is one running? (reveille workers)", slow)
		case m := <-tail.rejected:
			return fmt.Errorf("the %s was rejected: %s (%s)", cmd.Kind, m.Header.Get(bus.HeaderDetail), m.Header.Get(bus.HeaderReason))
		case err := <-tail.failed:
			if ctx.Err() != nil {
				return stopped()
			}
			return err
		case <-ctx.Done():
			return stopped()
		}
	}
}

// waiter is somebody who waits: its methods are called one after the other.
type waiter interface {
	published(r bus.Receipt)
	event(r claims.Record) (follow.Outcome, bool)
	live(l bus.LiveText)
	// past is called when no event of history is left.
	past() (follow.Outcome, bool)
	// idle is called when the command was applied and no event has come for a while since.
	idle() (follow.Outcome, bool)
	end(o follow.Outcome) error
}

// wakeWait shows what the steps of one input say.
type wakeWait struct {
	s       streams
	cmd     claims.Command
	history history
	wait    *follow.Wait
	own     bool // the input's id is the caller's: it may have been sent before
	old     bool // it was, and that was said

	workers map[claims.ExecutionID]string
	texts   map[claims.StepID]*follow.Text
	early   map[claims.StepID]string // live text of steps whose start has not come
	held    int                      // bytes of early
	midLine bool
	tty     bool
}

func (w *wakeCmd) wait(ctx context.Context, s streams, conn *bus.Conn, cmd claims.Command) error {
	h, err := w.lookUp(ctx, conn, cmd.Session)
	if err != nil {
		return err
	}
	input, from := "", h.last+1
	if cmd.Input != nil {
		input = cmd.Input.ID
	}
	own := w.ID != ""
	if own { // its past is the answer where it was served before
		from = 1
	}
	return w.waiting(ctx, s, conn, cmd, h, from, &wakeWait{
		s: s, cmd: cmd, history: h, own: own, wait: follow.NewWait(input, h.last, h.quarantined), tty: isTerminal(s.out),
		workers: map[claims.ExecutionID]string{}, texts: map[claims.StepID]*follow.Text{}, early: map[claims.StepID]string{},
	})
}

func isTerminal(w io.Writer) bool {
	f, ok := w.(*os.File)
	return ok && term.IsTerminal(int(f.Fd()))
}

func (w *wakeWait) published(r bus.Receipt) {
	if w.cmd.Input == nil {
		w.say("wake of session %s is published (command %d)", w.cmd.Session, r.Sequence)
	} else {
		w.say("wake of session %s is published (command %d), input %s", w.cmd.Session, r.Sequence, w.cmd.Input.ID)
	}
}

func (w *wakeWait) event(r claims.Record) (follow.Outcome, bool) {
	o, done := w.wait.Event(r)
	if w.own && !w.old && w.wait.Seen() && r.Seq <= w.history.last {
		w.old = true // first, since what follows looks as if it ran now
		w.say("input %s was sent before: this is what is recorded of it", w.cmd.Input.ID)
	}
	switch r.Type {
	case claims.ExecutionStarted:
		w.workers[r.Execution] = strings.TrimPrefix(follow.Describe(r), follow.ID(r.Execution)+" on ")
	case claims.StepStartedEvent:
		w.started(r)
	case claims.TextEvent:
		if w.wait.Ours(r.Step) {
			text := w.texts[r.Step]
			if text == nil {
				text = &follow.Text{}
				w.texts[r.Step] = text
			}
			w.print(text.Durable(textOf(r)))
		}
	case claims.ExecutionCancelling:
		if w.wait.Ours(r.Step) {
			w.say("execution %s is being stopped", follow.ID(r.Execution))
		}
	case claims.ToolCalled, claims.ToolSucceeded, claims.ToolFailed, claims.StepFailedEvent:
		if w.wait.Ours(r.Step) {
			w.say("%s: %s", r.Type, follow.Describe(r))
		}
	}
	return o, done
}

func (w *wakeWait) started(r claims.Record) {
	early := w.early[r.Step]
	delete(w.early, r.Step)
	w.held -= len(early)
	if !w.wait.Ours(r.Step) {
		return
	}
	where := ""
	if worker := w.workers[r.Execution]; worker != "" { // its execution may have started before we looked
		where = " on " + worker
	}
	w.say("step %s runs%s", follow.Describe(r), where)
	if r.Seq > w.history.last { // else the beginning of its live text was missed
		w.texts[r.Step] = &follow.Text{}
		w.print(w.texts[r.Step].Live(early))
	}
}

// live takes live text; where its step has not started, as far as the events
// told, it waits: live text is faster than they are.
func (w *wakeWait) live(l bus.LiveText) {
	switch text := w.texts[l.Step]; {
	case text != nil && w.wait.Ours(l.Step):
		w.print(text.Live(l.Text))
	case text == nil && !w.wait.Ours(l.Step) && w.held+len(l.Text) <= liveWaiting:
		w.early[l.Step] += l.Text
		w.held += len(l.Text)
	}
}

func (w *wakeWait) past() (follow.Outcome, bool) { return w.wait.Past() }

// idle ends the wait for an input that was recorded before and that the event
// stream tells nothing of.
func (w *wakeWait) idle() (follow.Outcome, bool) {
	if !w.own || w.wait.Seen() {
		return follow.Outcome{}, false
	}
	return follow.Outcome{Text: "recorded before, and its events are not in the stream any more: there is nothing to wait for"}, true
}

func (w *wakeWait) end(o follow.Outcome) error {
	w.lineEnd()
	return ended(w.s, w.cmd.Session, o)
}

// ended tells how it ended: by a line, and by the exit code.
func ended(s streams, session claims.SessionID, o follow.Outcome) error {
	text := fmt.Sprintf("session %s: %s", session, o.Text)
	if o.Code == follow.CodeCompleted {
		s.say("%s", text)
		return nil
	}
	return &flags.Exit{Code: o.Code, Message: text}
}

// print writes text of a step to standard output, as it is.
func (w *wakeWait) print(text string) {
	if text == "" {
		return
	}
	_, _ = io.WriteString(w.s.out, text) // a reader that is gone ends the program by SIGPIPE
	w.midLine = !strings.HasSuffix(text, "\n")
}

func (w *wakeWait) say(format string, args ...any) {
	w.lineEnd()
	w.s.say(format, args...)
}

// lineEnd keeps lines for people off the text's last line where both are on a screen.
func (w *wakeWait) lineEnd() {
	if w.midLine && w.tty {
		fmt.Fprintln(w.s.err)
		w.midLine = false
	}
}

// stopWait waits for the end of what an interrupt hit.
type stopWait struct {
	s    streams
	cmd  claims.Command
	stop *follow.Stop
	last int64
}

func (i *interruptCmd) wait(ctx context.Context, s streams, conn *bus.Conn, cmd claims.Command) error {
	h, err := i.lookUp(ctx, conn, cmd.Session)
	if err != nil {
		return err
	}
	return i.waiting(ctx, s, conn, cmd, h, 1, &stopWait{
		s: s, cmd: cmd, stop: follow.NewStop(cmd.Execution, h.last, h.quarantined), last: h.last,
	})
}

func (w *stopWait) published(r bus.Receipt) {
	w.s.say("interrupt of session %s is published (command %d)", w.cmd.Session, r.Sequence)
}

func (w *stopWait) event(r claims.Record) (follow.Outcome, bool) {
	if r.Type == claims.ExecutionCancelling && r.Seq > w.last {
		w.s.say("execution %s is being stopped", follow.ID(r.Execution))
	}
	return w.stop.Event(r)
}

func (w *stopWait) live(bus.LiveText)            {}
func (w *stopWait) past() (follow.Outcome, bool) { return follow.Outcome{}, false }
func (w *stopWait) idle() (follow.Outcome, bool) { return w.stop.Idle() }
func (w *stopWait) end(o follow.Outcome) error   { return ended(w.s, w.cmd.Session, o) }

package systemtest

import (
	"context"
	"fmt"
	"strings"
	"sync"
	"testing"
	"time"

	"reveille/bus"
	"reveille/claims"
	"reveille/internal/systemtest/ask"
)

// At SIGTERM a step has --grace to finish; past it, it is told to stop and
// another worker goes on with it at once, which costs no attempt.
func TestHandOverAtSIGTERM(t *testing.T) {
	w := newWorld(t)
	w.askSteps()
	w.start("scanner", "scan")
	for _, handler := range []string{command, inGo, byURL} {
		s := claims.SessionID("handed-over-by-" + handler)
		from := w.asking(handler, "from-"+handler, "--grace", "0s")
		w.publish(wakeOf(s, input("in", claims.Queue)))
		first := w.steps.of(s)
		to := w.asking(handler, "to-"+handler)
		from.signal()
		first.stopped(w)
		second := w.steps.of(s)
		second.continues(w, claims.KindHandover, 0, first)
		if second.Worker != to.name {
			t.Errorf("%s goes on on %s", s, second.Worker)
		}
		from.ended()

		// The second worker has a grace, which the step uses.
		to.signal()
		w.until(to.name+" takes nothing any more", func() bool { return strings.Contains(to.output(), "draining") })
		second.end(w)
		to.ended()
		w.until("its events are relayed", func() bool { return w.count("SELECT count(*) FROM sessions WHERE relayed_seq < last_seq") == 0 })
		w.wantLog(s, `input.admitted(in) execution.started input.promoted(in) step.started(in)
			step.failed(shutdown) execution.ended(handed_over)
			execution.started step.started(in<handover0) step.ended execution.ended(completed)`)
	}
	w.verify()
}

// All workers are restarted, one after the other, under load: no result of a
// step is lost, no attempt is spent, every input is covered, and nothing but
// the shutdowns fails.
func TestRollingRestart(t *testing.T) {
	w := newWorld(t)
	w.askSteps()
	w.start("scanner", "scan")
	handlers := []string{command, inGo, byURL}
	flags := []string{"--slots", "8", "--grace", "200ms"}
	var workers []*proc
	for i, handler := range handlers {
		workers = append(workers, w.asking(handler, fmt.Sprintf("w%d", i), flags...))
	}
	l := w.startLoad()
	for i, p := range workers {
		w.until(p.name+" has steps that do not end", func() bool { return l.heldBy(p.name) == holdEach })
		p.terminate()
		w.until(p.name+" has no step any more", func() bool { return l.heldBy(p.name) == 0 })
		w.asking(handlers[i], p.name+"-new", flags...)
	}
	sessions := l.stop()
	w.idle(sessions)
	logs := w.verify()
	if len(logs) != sessions {
		t.Errorf("%d sessions ran of %d", len(logs), sessions)
	}
	handed, slowest := 0, time.Duration(0)
	for s, log := range logs {
		n, waited := w.handedOver(s, log)
		handed, slowest = handed+n, max(slowest, waited)
	}
	if handed < holdEach*len(workers) {
		t.Errorf("%d steps were handed over, want at least %d", handed, holdEach*len(workers))
	}
	t.Logf("%d sessions, %d hand-overs, the slowest wake waited %v for its step", sessions, handed, slowest)
}

// handedOver wants the one input of a session to be served with nothing in
// between but hand-overs, and returns how many, and how long its wake waited.
func (w *world) handedOver(s claims.SessionID, log []claims.Record) (n int, waited time.Duration) {
	w.t.Helper()
	for _, r := range log {
		switch r.Type {
		case claims.StepStartedEvent:
			if c := dataOf[claims.StepStartedData](w.t, r).Continues; c != nil && (c.Kind != claims.KindHandover || c.Attempt != 0) {
				w.t.Errorf("session %s: a step continues %+v", s, *c)
			}
		case claims.StepFailedEvent:
			n++
			if code := dataOf[claims.Failure](w.t, r).Code; code != claims.CodeShutdown {
				w.t.Errorf("session %s: a step failed with code %s", s, code)
			}
		}
	}
	last := log[len(log)-2]
	if last.Type != claims.StepEndedEvent || string(dataOf[claims.StepEndedData](w.t, last).Result) != `["in"]` {
		w.t.Errorf("session %s: its last step ends with %s", s, last.Line)
	}
	asked, started := w.times(log, claims.InputAdmitted), w.times(log, claims.StepStartedEvent)
	return n, started[0].Sub(asked[0])
}

// load keeps a number of sessions going, with one input each. Their steps end
// at once, but for some of each worker, which end when they were handed over.
type load struct {
	w       *world
	more    chan struct{} // one more session may be woken
	end     chan struct{} // no more may
	open    chan struct{} // no step is held any more
	quit    chan struct{}
	waking  sync.WaitGroup
	answers sync.WaitGroup
	woken   int // waking's own until it has ended

	mu   sync.Mutex
	held map[string]int // by worker
}

const (
	outstanding = 12
	holdEach    = 2
)

func (w *world) startLoad() *load {
	l := &load{
		w: w, more: make(chan struct{}, 1<<20), end: make(chan struct{}), open: make(chan struct{}), quit: make(chan struct{}),
		held: map[string]int{},
	}
	l.waking.Go(l.wake)
	l.answers.Go(func() {
		for {
			select {
			case c := <-w.steps.calls:
				l.answers.Go(func() { l.answer(c) })
			case <-l.quit:
				return
			}
		}
	})
	w.t.Cleanup(func() { // before the processes end
		l.stop()
		close(l.quit)
		l.answers.Wait()
	})
	for range outstanding {
		l.more <- struct{}{}
	}
	return l
}

func (l *load) wake() {
	p := bus.NewPublisher(l.w.conn)
	for {
		select {
		case <-l.end:
			return
		case <-l.more:
		}
		if _, err := p.Publish(context.Background(), wakeOf(session("s", l.woken), input("in", claims.Queue)), bus.Publishing{}); err != nil {
			l.w.t.Errorf("waking a session: %v", err)
			return
		}
		l.woken++
	}
}

// answer ends a step: a held one when it was handed over, as who goes on with it.
func (l *load) answer(c *call) {
	if c.Request.Continues == nil && l.hold(c.Worker) {
		select {
		case <-c.over:
			l.letGo(c.Worker)
			return
		case <-l.open:
			l.letGo(c.Worker)
		}
	}
	_ = ask.Send(c.conn, ask.Answer{Result: ask.Result(c.Request)}) // it may have been stopped meanwhile
	l.more <- struct{}{}
}

func (l *load) hold(worker string) bool {
	select {
	case <-l.open:
		return false
	default:
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.held[worker] == holdEach {
		return false
	}
	l.held[worker]++
	return true
}

func (l *load) letGo(worker string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.held[worker]--
}

func (l *load) heldBy(worker string) int {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.held[worker]
}

// stop lets all steps end, and returns how many sessions were woken.
func (l *load) stop() int {
	if !isClosed(l.end) {
		close(l.end)
		close(l.open)
	}
	l.waking.Wait()
	return l.woken
}

func isClosed(c <-chan struct{}) bool {
	select {
	case <-c:
		return true
	default:
		return false
	}
}

package systemtest

import (
	"context"
	"errors"
	"fmt"
	"os"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/nats-io/nats.go/jetstream"

	"reveille/claims"
)

// outage is how long a server stays away under load.
const outage = 20 * time.Second

// A hundred sessions spread over both workers; two wakes of one session run
// one after the other, in order.
func TestAHundredSessionsSpreadOverBothWorkers(t *testing.T) {
	w := newWorld(t)
	// A step waits at the gate for a line of its own, until the gate stands open:
	// so all hundred run at once.
	gate := newGate(t)
	handler := "test -e " + gate.open + " || read -r _ <" + gate.fifo + "; echo done"
	w.start("worker", "a", "--exec", handler, "--slots", "64")
	w.start("worker", "b", "--exec", handler, "--slots", "64")
	w.start("scanner", "scan")
	const sessions = 100
	for i := range sessions {
		for _, in := range []string{"first", "second"} {
			if err := w.wake(t.Context(), claims.SessionID(fmt.Sprintf("s%d", i)), in); err != nil {
				t.Fatal(err)
			}
		}
	}
	w.until("all run", func() bool { return len(w.query("SELECT session_id FROM claims")) == sessions })
	holders := w.query("SELECT DISTINCT l.name FROM claims c JOIN leases l ON l.holder = c.holder")
	if len(holders) != 2 {
		t.Errorf("sessions run on %v, want both workers", holders)
	}
	gate.release(2 * sessions)
	w.idle(2 * sessions)
	w.verify()
	for i := range sessions {
		var order []string
		for _, line := range w.logOf(claims.SessionID(fmt.Sprintf("s%d", i))) {
			if strings.Contains(line, `"type":"input.promoted"`) {
				order = append(order, line[strings.Index(line, `"data":`):])
			}
		}
		if len(order) != 2 || !strings.Contains(order[0], "first") || !strings.Contains(order[1], "second") {
			t.Errorf("session s%d promoted %v", i, order)
		}
	}
}

// The database, or NATS, away for 20 s under load: no event lost, doubled or
// out of order, no session stuck; the processes stay up and say what they wait for.
func TestDatabaseStoppedUnderLoad(t *testing.T) {
	w := newLastingWorld(t)
	w.outage(w.stopDatabase, w.startDatabase, "waiting for the database")
}

func TestNATSStoppedUnderLoad(t *testing.T) {
	w := newWorld(t)
	w.outage(w.stopNATS, w.startNATS, "NATS")
}

func (w *world) outage(stop, start func(), says string) {
	const handler = "sleep 0.2; echo done"
	w.start("worker", "a", "--exec", handler)
	w.start("worker", "b", "--exec", handler)
	w.start("scanner", "scan")
	ctx, cancel := context.WithCancel(w.t.Context())
	defer cancel()
	const sessions, pause = 40, 50 * time.Millisecond
	var sent int
	var load sync.WaitGroup
	load.Go(func() {
		tick := time.NewTicker(pause)
		defer tick.Stop()
		for ; ; sent++ {
			select {
			case <-ctx.Done():
				return
			case <-tick.C:
			}
			session := claims.SessionID(fmt.Sprintf("s%d", sent%sessions))
			// A command is published until it is acknowledged; its id makes the
			// repetition harmless.
			for w.wake(context.WithoutCancel(ctx), session, fmt.Sprintf("in%d", sent)) != nil {
				continue
			}
		}
	})
	w.until("work runs", func() bool { return len(w.query("SELECT session_id FROM claims")) > 0 })
	stop()
	away := time.NewTimer(outage) // the outage is the scenario, not a wait for something
	<-away.C
	start()
	w.until("work goes on", func() bool { return len(w.query("SELECT session_id FROM claims")) > 0 })
	cancel()
	load.Wait()
	w.idle(sent)
	w.verify()
	w.stayedUp()
	said := false
	for _, p := range w.procs {
		said = said || strings.Contains(p.output(), says)
	}
	if !said {
		w.t.Errorf("no process said %q", says)
	}
	for _, p := range w.procs {
		if !p.gone && p != w.nats {
			p.terminate()
		}
	}
}

// Bad input is rejected with its reason and never blocks its session.
func TestBadInputIsRejected(t *testing.T) {
	w := newWorld(t)
	w.start("worker", "a", "--exec", "echo done")
	w.publishRaw("rv.wake.bad*id", []byte(`{}`))
	w.publishRaw("rv.wake.s", []byte(`{"input":`))
	w.publishRaw("rv.wake.s", []byte(`{"input":{"id":"x","body":1,"delivery":7}}`))
	w.publishRaw("rv.admit.s", []byte(`{"input":{"id":"big","body":"`+strings.Repeat("x", 300<<10)+`"}}`))
	if err := w.wake(t.Context(), "s", "one"); err != nil {
		t.Fatal(err)
	}
	w.publishRaw("rv.wake.s", []byte(`{"input":{"id":"one","body":"another"}}`))
	if err := w.wake(t.Context(), "s", "two"); err != nil {
		t.Fatal(err)
	}
	w.idle(2)
	w.verify()
	reasons := map[string]int{}
	cons, err := w.conn.JetStream().OrderedConsumer(t.Context(), "RV_REJECTED", jetstream.OrderedConsumerConfig{})
	if err != nil {
		t.Fatal(err)
	}
	msgs, err := cons.Messages()
	if err != nil {
		t.Fatal(err)
	}
	defer msgs.Stop()
	for range 5 {
		m, err := msgs.Next(jetstream.NextMaxWait(patience))
		if err != nil {
			t.Fatalf("%v; so far %v", err, reasons)
		}
		reasons[m.Headers().Get("Rv-Reason")]++
	}
	want := map[string]int{"invalid_session": 1, "invalid_body": 2, "too_large": 1, "input_conflict": 1}
	if fmt.Sprint(reasons) != fmt.Sprint(want) {
		t.Errorf("reasons %v, want %v", reasons, want)
	}
}

// A worker that is stopped past its lease and woken later starts nothing, calls
// no handler and writes nothing; its commands are killed, and it goes on as a
// new holder (I7).
func TestI7StoppedPastTheLease(t *testing.T) {
	w := newWorld(t)
	gate := newGate(t)
	pids := t.TempDir()
	handler := "echo $$ > " + pids + "/$RV_EPOCH; test -e " + gate.open + " || read -r _ <" + gate.fifo + "; echo done"
	a := w.start("worker", "a", "--exec", handler, "--kill-after", "1h") // the deadline kills, not --kill-after
	if err := w.wake(t.Context(), "s", "one"); err != nil {
		t.Fatal(err)
	}
	written := func(epoch string) func() bool {
		return func() bool { b, err := os.ReadFile(pids + "/" + epoch); return err == nil && len(b) > 0 }
	}
	w.until("the step runs", written("1"))
	w.start("worker", "b", "--exec", handler)
	w.start("scanner", "scan")
	holder := w.query("SELECT holder::TEXT FROM claims")[0]
	if err := a.cmd.Process.Signal(syscall.SIGSTOP); err != nil {
		t.Fatal(err)
	}
	w.until("another worker runs the continuation", written("3"))
	before := len(w.logOf("s"))
	if err := a.cmd.Process.Signal(syscall.SIGCONT); err != nil {
		t.Fatal(err)
	}
	pid := func() int {
		b, err := os.ReadFile(pids + "/1")
		if err != nil {
			t.Fatal(err)
		}
		n, err := strconv.Atoi(strings.TrimSpace(string(b)))
		if err != nil {
			t.Fatal(err)
		}
		return n
	}()
	w.until("its command is killed", func() bool { return errors.Is(syscall.Kill(pid, 0), syscall.ESRCH) })
	w.until("it goes on as a new holder", func() bool {
		return len(w.query("SELECT name FROM leases WHERE name = 'a' AND holder <> $1::UUID AND expires_at > statement_timestamp()", holder)) == 1
	})
	if log := w.logOf("s"); len(log) != before {
		t.Errorf("it wrote: %v", log[before:])
	}
	gate.release(10)
	w.idle(1)
	w.verify()
	for i, line := range w.logOf("s") {
		if strings.Contains(line, `"worker_lost"`) {
			for _, later := range w.logOf("s")[i+1:] {
				if strings.Contains(later, `"epoch":1,`) {
					t.Errorf("of the stopped worker, after the takeover: %s", later)
				}
			}
		}
	}
	a.terminate()
}

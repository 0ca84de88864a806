package systemtest

import (
	"encoding/json"
	"fmt"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/nats-io/nats.go"

	"reveille/bus"
	"reveille/claims"
)

// percentiles reports the median and the 99th percentile of times under a name.
func percentiles(b *testing.B, name string, times []time.Duration) {
	b.Helper()
	if len(times) == 0 {
		b.Fatalf("no %s was measured", name)
	}
	slices.Sort(times)
	for _, p := range []int{50, 99} {
		at := times[min(len(times)*p/100, len(times)-1)]
		b.ReportMetric(float64(at.Microseconds())/1000, fmt.Sprintf("ms-%s-p%d", name, p))
	}
}

// BenchmarkSaturated measures, with all slots of two workers busy and sessions
// that wait: from publishing an interrupt until it is durable (its notice, which
// follows the commit) and until the step is told; from the end of a step until
// the next session's step is called, and by the database's clock from the end of
// an execution until the next step was started. Under "flood" inputs are
// admitted at full speed meanwhile.
//
//	go test -run '^$' -bench Saturated -benchtime 300x ./internal/systemtest
func BenchmarkSaturated(b *testing.B) {
	for _, flood := range []bool{false, true} {
		name := "quiet"
		if flood {
			name = "flood"
		}
		b.Run(name, func(b *testing.B) { benchmarkSaturated(b, flood) })
	}
}

func benchmarkSaturated(b *testing.B, flood bool) {
	const slots = 16
	w := startWorld(&world{t: b, load: true})
	w.askSteps()
	w.asking(inGo, "a", "--slots", fmt.Sprint(slots))
	w.asking(inGo, "b", "--slots", fmt.Sprint(slots))
	w.start("scanner", "scan")
	notices := w.watchNotices(b)
	woken := 0
	wake := func() {
		w.publish(wakeOf(session("s", woken), input("in", claims.Queue)))
		woken++
	}
	var running []*call
	for range 2 * slots {
		wake()
		running = append(running, w.steps.next("a step in each slot"))
	}
	for range 2 * b.N {
		wake()
	}
	w.applied()
	if flood {
		defer w.flood(b)()
	}
	var durable, told, next, started []time.Duration
	var pairs [][2]claims.SessionID // whose end let whose step start
	b.ResetTimer()
	for n := range b.N {
		i := n % len(running)
		began := time.Now()
		w.publish(interruptOf(running[i].Request.Session))
		durable = append(durable, notices.await(w, running[i].Request.Session).Sub(began))
		running[i].stopped(w)
		told = append(told, time.Since(began))
		running[i] = w.steps.next("a step in the slot of an interrupted one")

		i = (n + 1) % len(running)
		began = time.Now()
		running[i].end(w)
		c := w.steps.next("a step in the slot of one that ended")
		next = append(next, time.Since(began))
		pairs = append(pairs, [2]claims.SessionID{running[i].Request.Session, c.Request.Session})
		running[i] = c
	}
	b.StopTimer()
	logs := w.logs()
	for _, p := range pairs {
		ended, begun := w.times(logs[p[0]], claims.ExecutionEnded), w.times(logs[p[1]], claims.StepStartedEvent)
		started = append(started, begun[0].Sub(ended[len(ended)-1]))
	}
	percentiles(b, "interrupt-durable", durable)
	percentiles(b, "interrupt-told", told)
	percentiles(b, "end-to-next-call", next)
	percentiles(b, "free-to-started", started)
}

// flood admits inputs until it is ended.
func (w *world) flood(b *testing.B) (end func()) {
	quit := make(chan struct{})
	var wg sync.WaitGroup
	wg.Go(func() {
		p := bus.NewPublisher(w.conn)
		for i := 0; ; i++ {
			select {
			case <-quit:
				return
			default:
			}
			if _, err := p.Publish(b.Context(), admitOf(session("flood", i%1000), input(fmt.Sprint(i), claims.Queue)), bus.Publishing{}); err != nil {
				b.Errorf("flooding: %v", err)
				return
			}
		}
	})
	return func() {
		close(quit)
		wg.Wait()
	}
}

// notices are when the first notice of each session came.
type notices struct {
	mu   sync.Mutex
	at   map[claims.SessionID]time.Time
	came chan struct{} // buffered 1
}

func (w *world) watchNotices(b *testing.B) *notices {
	n := &notices{at: map[claims.SessionID]time.Time{}, came: make(chan struct{}, 1)}
	_, err := w.conn.NATS().Subscribe(w.conn.Namespace().Notice("*"), func(m *nats.Msg) {
		var body struct{ Session claims.SessionID }
		if err := json.Unmarshal(m.Data, &body); err != nil {
			b.Errorf("notice %q: %v", m.Data, err)
			return
		}
		n.mu.Lock()
		if _, ok := n.at[body.Session]; !ok {
			n.at[body.Session] = time.Now()
		}
		n.mu.Unlock()
		select {
		case n.came <- struct{}{}:
		default:
		}
	})
	if err != nil {
		b.Fatal(err)
	}
	return n
}

func (n *notices) await(w *world, s claims.SessionID) time.Time {
	deadline := time.After(patience)
	for {
		n.mu.Lock()
		at, ok := n.at[s]
		n.mu.Unlock()
		if ok {
			return at
		}
		select {
		case <-n.came:
		case <-deadline:
			w.t.Fatalf("not within %v: a notice of %s", patience, s)
		}
	}
}

// BenchmarkDelayedWakes measures how long after its time a delayed wake's step
// is started, by the database's clock.
func BenchmarkDelayedWakes(b *testing.B) {
	const delay = 3 * time.Second
	w := startWorld(&world{t: b, load: true})
	w.newHold()
	w.beginDoing("a").wait()
	w.beginDoing("b").wait()
	w.start("scanner", "scan")
	b.ResetTimer()
	due := make([]time.Time, b.N)
	for i := range b.N {
		due[i] = time.Now().Add(delay)
		cmd := wakeOf(session("s", i), input("in", claims.Queue))
		if cmd.NotBefore = due[i]; i%2 == 1 {
			cmd.Input = nil
		}
		w.publish(cmd)
	}
	w.until("all have run", func() bool {
		return w.count("SELECT count(*) FROM sessions WHERE epoch = 1 AND execution_id IS NULL") == b.N
	})
	b.StopTimer()
	var late []time.Duration
	for i := range b.N {
		late = append(late, w.times(w.records(session("s", i)), claims.StepStartedEvent)[0].Sub(due[i]))
	}
	percentiles(b, "late", late)
	b.ReportMetric(float64(late[len(late)-1].Microseconds())/1000, "ms-late-max")
}

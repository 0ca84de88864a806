package runner

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"runtime"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"reveille/claims"
)

// log is a store in memory of one session: it starts its step, records and
// closes. Its fields are set before the pool runs.
type log struct {
	leases
	onRecord  func(ctx context.Context, content []claims.Content) error // before it is kept; may block
	onDecline func(ctx context.Context) error
	onFinish  func(n int) claims.Settlement // what closing the nth step made true
	settled   chan struct{}                 // receives for each settlement

	mu       sync.Mutex
	records  [][]claims.Content
	declines []string
	endings  []claims.Ending
	live     int // bytes of text that were shown
}

func newLog() *log { return &log{settled: make(chan struct{}, 10)} }

func (l *log) Apply(_ context.Context, cmd claims.Command, acq *claims.Acquisition) (claims.Outcome, error) {
	return claims.Outcome{Result: claims.Applied, Started: &claims.Started{
		Claim: claims.Claim{Session: cmd.Session, Execution: acq.Execution, Holder: acq.Holder, Epoch: 1},
		Step:  claims.Step{ID: acq.Step, Index: 1},
	}}, nil
}

func (l *log) Acquire(context.Context, claims.SessionID, claims.Acquisition) (claims.Started, error) {
	return claims.Started{}, claims.ErrNotReady
}

func (l *log) StartStep(_ context.Context, _ claims.Claim, id claims.StepID, _ *claims.Token) (*claims.Step, claims.Settlement, error) {
	return &claims.Step{ID: id, Index: 2}, claims.Settlement{}, nil
}

func (l *log) Record(ctx context.Context, _ claims.Claim, _ claims.Step, content []claims.Content, _ *claims.Token) error {
	if l.onRecord != nil {
		if err := l.onRecord(ctx, content); err != nil {
			return err
		}
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	l.records = append(l.records, content)
	return nil
}

func (l *log) Decline(ctx context.Context, _ claims.Claim, _ claims.Step, tail []claims.Content, reason string, _ *claims.Token) error {
	if l.onDecline != nil {
		if err := l.onDecline(ctx); err != nil {
			return err
		}
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	l.records = append(l.records, tail)
	l.declines = append(l.declines, reason)
	return nil
}

func (l *log) Finish(_ context.Context, _ claims.Claim, e claims.Ending, _ *claims.Token) (claims.Settlement, error) {
	l.mu.Lock()
	l.endings = append(l.endings, e)
	l.records = append(l.records, e.Tail)
	n := len(l.endings)
	l.mu.Unlock()
	s := claims.Settlement{Outcome: "completed"}
	if l.onFinish != nil {
		s = l.onFinish(n)
	}
	if !s.Again {
		l.settled <- struct{}{}
	}
	return s, nil
}

func (l *log) History(context.Context, claims.SessionID, int, int) ([]claims.ClosedStep, error) {
	return nil, nil
}

func (l *log) Settle(_ context.Context, _ claims.Claim, tail []claims.Content, _ *claims.Token) (claims.Settlement, error) {
	return l.left(tail), nil
}

func (l *log) HandOver(_ context.Context, _ claims.Claim, tail []claims.Content, _ *claims.Token) (claims.Settlement, error) {
	return l.left(tail), nil
}

func (l *log) left(tail []claims.Content) claims.Settlement {
	l.mu.Lock()
	l.records = append(l.records, tail)
	l.mu.Unlock()
	l.settled <- struct{}{}
	return claims.Settlement{Outcome: "interrupted"}
}

func (l *log) Revoke(context.Context, claims.Claim, claims.Cause) error { return nil }

func (l *log) Announce(context.Context, claims.SessionID) error { return nil }
func (l *log) Poke(claims.SessionID)                            {}

func (l *log) PublishLive(_ claims.SessionID, _ int64, _ claims.StepID, text string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.live += len(text)
}

// content is all that was recorded, in order.
func (l *log) content() []claims.Content {
	l.mu.Lock()
	defer l.mu.Unlock()
	return slices.Concat(l.records...)
}

func (l *log) text() string {
	var b strings.Builder
	for _, c := range l.content() {
		if d, ok := c.Data.(claims.TextData); ok {
			b.WriteString(d.Text)
		}
	}
	return b.String()
}

func testOptions() Options {
	return Options{
		LeaseOptions: testLease(), Worker: "w", Slots: 1, JoinTimeout: time.Minute, KillAfter: 10 * time.Second,
		MaxSteps: 100, MaxAttempts: 5, RetryBase: time.Millisecond, RetryMax: time.Millisecond,
	}
}

// run runs a step of a session with a handler, and gives the pool, and what
// ends it. The handler gets all of the time that it needs.
func run(t *testing.T, l *log, o Options, h HandlerFunc) (*Pool, func()) {
	t.Helper()
	p, err := NewPool(l, l, h, o, nil, slog.New(slog.DiscardHandler))
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan struct{})
	go func() {
		defer close(done)
		_ = p.Run(ctx)
	}()
	await(t, p.Keeper().Opened(), "the lease")
	out, err := p.Apply(ctx, claims.Command{Kind: claims.Wake, Session: "s"}, true)
	if err != nil || out.Started == nil {
		t.Fatalf("Apply = %+v, %v", out, err)
	}
	return p, func() {
		p.Drain()
		cancel()
		<-done
	}
}

// await ends a test that would hang. In a bubble it is of the bubble's time.
func await[T any](t *testing.T, c <-chan T, what string) T {
	t.Helper()
	select {
	case v := <-c:
		return v
	case <-time.After(5 * time.Minute):
		t.Fatalf("%s did not happen", what)
		panic("unreachable")
	}
}

// everything tries all that an Output can do.
func everything(out *Output) map[string]error {
	return map[string]error{
		"text": out.Text("late"), "called": out.ToolCalled("c", "n", nil), "succeeded": out.ToolSucceeded("c", nil),
		"failed": out.ToolFailed("c", "m"), "decline": out.Decline("no"), "go": out.Go(func() { panic("ran") }),
	}
}

// What a handler keeps of its Output is worth nothing once the step is over,
// also where the next step of the same execution runs.
func TestOutputAfterTheEnd(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l := newLog()
		l.onFinish = func(n int) claims.Settlement { return claims.Settlement{Again: n == 1, Outcome: "completed"} }
		var first *Output
		_, stop := run(t, l, testOptions(), func(ctx context.Context, req Request, out *Output) (Result, error) {
			if req.Index == 1 {
				first = out
				return Result{}, out.Text("one")
			}
			for what, err := range everything(first) {
				if !errors.Is(err, ErrStepOver) {
					t.Errorf("%s after the step: %v, want %v", what, err, ErrStepOver)
				}
			}
			// Who was just past the first look at whether the step is over.
			if err := first.record(claims.Content{Type: claims.TextEvent, Data: claims.TextData{Text: "late"}}); !errors.Is(err, ErrStepOver) {
				t.Errorf("content that comes late: %v, want %v", err, ErrStepOver)
			}
			if err := first.decline("late"); !errors.Is(err, ErrStepOver) {
				t.Errorf("a decline that comes late: %v, want %v", err, ErrStepOver)
			}
			if ctx.Err() != nil {
				t.Errorf("the next step was stopped: %v", context.Cause(ctx))
			}
			return Result{}, out.Text("two")
		})
		defer stop()
		await(t, l.settled, "the settlement")
		if got := l.text(); got != "onetwo" || len(l.declines) > 0 || l.live != len(got) {
			t.Errorf("recorded %q, %d bytes shown, declined %q", got, l.live, l.declines)
		}
	})
}

// A hundred goroutines put out text and calls while the step ends under them:
// what answered no error is recorded, once and in the order of its goroutine;
// what answered ErrStepOver is not.
func TestManyGoroutinesPutOutWhileTheStepEnds(t *testing.T) {
	const emitters = 100
	l := newLog()
	var all sync.WaitGroup
	var kept [emitters]int // calls that answered no error
	_, stop := run(t, l, testOptions(), func(_ context.Context, _ Request, out *Output) (Result, error) {
		started := make(chan struct{}, emitters)
		for g := range emitters {
			all.Go(func() {
				for n := 0; ; n++ {
					err := out.ToolCalled(fmt.Sprint(g), fmt.Sprint(n), json.RawMessage(`{}`))
					if err == nil {
						err = out.Text("x") // between two calls, so that texts are not joined over them
					}
					if err != nil && !errors.Is(err, ErrStepOver) {
						t.Errorf("goroutine %d: %v", g, err)
					}
					if err != nil {
						return
					}
					kept[g] = n + 1
					if n == 3 {
						started <- struct{}{}
					}
				}
			})
		}
		for range emitters {
			await(t, started, "output of all")
		}
		return Result{}, nil // nobody joined them
	})
	await(t, l.settled, "the settlement")
	all.Wait()
	stop()
	var next [emitters]int
	for _, c := range l.content() {
		called, ok := c.Data.(claims.ToolCalledData)
		if !ok {
			continue
		}
		var g int
		if _, err := fmt.Sscan(called.Call, &g); err != nil {
			t.Fatal(err)
		}
		if called.Name != fmt.Sprint(next[g]) {
			t.Fatalf("goroutine %d: call %s is recorded where %d was due", g, called.Name, next[g])
		}
		next[g]++
	}
	for g := range emitters { // one call may be kept whose text was late
		if next[g] != kept[g] && next[g] != kept[g]+1 {
			t.Errorf("goroutine %d: %d calls are recorded, %d were answered", g, next[g], kept[g])
		}
	}
	if texts, sum := len(l.text()), 0; true {
		for _, n := range kept {
			sum += n
		}
		if texts != sum {
			t.Errorf("%d texts are recorded, %d were answered", texts, sum)
		}
	}
}

// Appends come at most every 100 ms, however often a handler puts out.
func TestAppendsAreBatched(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l := newLog()
		_, stop := run(t, l, testOptions(), func(_ context.Context, _ Request, out *Output) (Result, error) {
			for range 1000 {
				if err := out.Text("x"); err != nil {
					return Result{}, err
				}
				time.Sleep(time.Millisecond)
			}
			return Result{}, nil
		})
		defer stop()
		await(t, l.settled, "the settlement")
		if n := len(l.records); n < 9 || n > 11 || len(l.text()) != 1000 {
			t.Errorf("%d appends of %d bytes, want ten of 1000", n, len(l.text()))
		}
	})
}

// Where the log takes nothing, what waits for it is bounded, and so is each
// append; who puts out waits, and is let go when the step must stop.
func TestSlowLog(t *testing.T) {
	for name, c := range map[string]struct {
		stop func(*Pool, *log, claims.ExecutionID) // what makes the step stop
		opts func(*Options)
		want error
		// after the moment that the step must stop: at once, unless the pool itself is
		// to find out; a time-out of the step is heard at its kill.
		after time.Duration
	}{
		"interrupt": {
			stop: func(p *Pool, _ *log, e claims.ExecutionID) {
				p.Notice(claims.Notice{Session: "s", Execution: e, Phase: claims.Cancelling, Since: time.Now()})
			},
			want: claims.ErrInterrupted,
		},
		"revocation": {
			stop: func(p *Pool, _ *log, e claims.ExecutionID) {
				p.Notice(claims.Notice{Session: "s", Execution: e, Phase: claims.Running, Revoked: claims.Unknown})
			},
			want: claims.ErrLeaseLost,
		},
		"lost lease": { // by the worker's own clock, the database is gone
			stop: func(_ *Pool, l *log, _ claims.ExecutionID) {
				l.leases.mu.Lock()
				defer l.leases.mu.Unlock()
				l.beat = func(int) (bool, error) { return false, errors.New("no route to the database") }
			},
			want:  claims.ErrLeaseLost,
			after: testLease().Lease - testLease().MaxClockSkew - testLease().StopMargin - flushEvery,
		},
		"shutdown": {
			stop: func(p *Pool, _ *log, _ claims.ExecutionID) { go p.Drain() },
			want: claims.ErrShutdown,
		},
		"step timeout": {
			stop:  func(*Pool, *log, claims.ExecutionID) {},
			opts:  func(o *Options) { o.StepTimeout = time.Second },
			want:  claims.ErrStepTimeout,
			after: time.Second - flushEvery,
		},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				o := testOptions()
				if c.opts != nil {
					c.opts(&o)
				}
				testSlowLog(t, o, c.stop, c.want, c.after)
			})
		})
	}
}

func testSlowLog(t *testing.T, o Options, stopStep func(*Pool, *log, claims.ExecutionID), want error, after time.Duration) {
	const piece = 10 << 10
	l := newLog()
	gate, first := make(chan struct{}), make(chan claims.ExecutionID, 1)
	l.onRecord = func(_ context.Context, content []claims.Content) error {
		<-gate
		size := 0
		for _, c := range content {
			size += len(c.Data.(claims.TextData).Text)
		}
		if size > maxPending {
			t.Errorf("an append of %d bytes", size)
		}
		return nil
	}
	var answered int
	failed := make(chan error, 1)
	p, stop := run(t, l, o, func(_ context.Context, req Request, out *Output) (Result, error) {
		first <- req.Execution
		for {
			if err := out.Text(strings.Repeat("x", piece)); err != nil {
				failed <- err
				return Result{}, err
			}
			answered += piece
		}
	})
	execution := await(t, first, "the step")
	time.Sleep(flushEvery)
	synctest.Wait() // the handler waits, and the append
	if answered > 2*maxPending || answered < maxPending {
		t.Errorf("%d bytes were taken while the log takes none", answered)
	}
	began := time.Now()
	stopStep(p, l, execution)
	if err := await(t, failed, "the end of the output"); !errors.Is(err, want) || time.Since(began) != after {
		t.Errorf("Text = %v after %v, want %v after %v", err, time.Since(began), want, after)
	}
	close(gate)
	await(t, l.settled, "the settlement")
	stop()
	if got := len(l.text()); got != answered {
		t.Errorf("%d bytes are recorded, %d were answered", got, answered)
	}
}

// A refusal that the log does not take holds its handler up to the kill, not
// for ever; the step waits for its outcome and ends by that.
func TestI12DeclineWhileTheLogTakesNothing(t *testing.T) {
	for name, outcome := range map[string]error{"becomes durable": nil, "is fenced": claims.ErrFenced} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				l := newLog()
				gate, answered := make(chan struct{}), make(chan error, 1)
				l.onDecline = func(context.Context) error { <-gate; return outcome }
				var began time.Time
				p, stop := run(t, l, testOptions(), func(_ context.Context, req Request, out *Output) (Result, error) {
					_ = out.Text("before")
					began = time.Now()
					err := out.Decline("no")
					answered <- err
					return Result{}, err
				})
				synctest.Wait()
				p.stopAll(claims.ErrShutdown)
				if err := await(t, answered, "the answer to the decline"); !errors.Is(err, claims.ErrShutdown) || time.Since(began) != testOptions().KillAfter {
					t.Errorf("Decline = %v after %v, want %v at the kill", err, time.Since(began), claims.ErrShutdown)
				}
				synctest.Wait()
				if len(l.settled) > 0 {
					t.Error("the step was closed before the outcome of its refusal was known")
				}
				close(gate)
				await(t, l.settled, "the settlement")
				stop()
				if declined := slices.Equal(l.declines, []string{"no"}); declined != (outcome == nil) || len(l.endings) > 0 {
					t.Errorf("declined %q, finished %v", l.declines, l.endings)
				}
			})
		})
	}
}

// 100 MB of text in lines, from one handler: nothing piles up, the order holds,
// and the cost of a line does not grow with what waits before it.
func TestFloodOfText(t *testing.T) {
	const total, bound = 100 << 20, 16 << 20
	heap := func() int64 {
		runtime.GC()
		var m runtime.MemStats
		runtime.ReadMemStats(&m)
		return int64(m.HeapAlloc)
	}
	line := strings.Repeat("x", 99) + "\n"
	l := newLog()
	before, most, got, appends := heap(), int64(0), 0, 0
	count := func(content []claims.Content) {
		for _, c := range content {
			text := c.Data.(claims.TextData).Text
			if len(text) > maxText || len(text)%len(line) != 0 || strings.Count(text, "\n") != len(text)/len(line) {
				t.Errorf("an event of %d bytes, not of whole lines", len(text))
			}
			got += len(text)
		}
	}
	l.onRecord = func(_ context.Context, content []claims.Content) error {
		count(content)
		clear(content) // counted: the test itself is not to keep them
		if appends++; appends%10 == 0 {
			most = max(most, heap()-before)
		}
		return nil
	}
	_, stop := run(t, l, testOptions(), func(_ context.Context, _ Request, out *Output) (Result, error) {
		for range total / len(line) {
			if err := out.Text(line); err != nil {
				return Result{}, err
			}
		}
		return Result{}, nil
	})
	await(t, l.settled, "the settlement")
	stop()
	count(l.endings[0].Tail)
	if want := total / len(line) * len(line); got != want || l.live != want || most > bound {
		t.Errorf("%d bytes are recorded and %d shown, want %d; at most %d were held, want %d", got, l.live, want, most, bound)
	}
}

// A flood of small calls is cut into appends that one transaction takes.
func TestAppendsHaveFewEvents(t *testing.T) {
	const calls, most = 10_000, maxPending / contentOverhead
	l := newLog()
	_, stop := run(t, l, testOptions(), func(_ context.Context, _ Request, out *Output) (Result, error) {
		for i := range calls {
			if err := out.ToolSucceeded(fmt.Sprint(i), nil); err != nil {
				return Result{}, err
			}
		}
		return Result{}, nil
	})
	await(t, l.settled, "the settlement")
	stop()
	for _, content := range l.records {
		if len(content) > most {
			t.Errorf("an append of %d events, want at most %d", len(content), most)
		}
	}
	for i, c := range l.content() {
		if d := c.Data.(claims.ToolSucceededData); d.Call != fmt.Sprint(i) {
			t.Fatalf("call %s is the %dth", d.Call, i)
		}
	}
	if got := len(l.content()); got != calls {
		t.Errorf("%d calls are recorded, want %d", got, calls)
	}
}

// What a handler puts out is its own again when the method has answered.
func TestOutputIsCopied(t *testing.T) {
	l := newLog()
	_, stop := run(t, l, testOptions(), func(_ context.Context, _ Request, out *Output) (Result, error) {
		raw := json.RawMessage(`{"n":1}`)
		err := errors.Join(out.ToolCalled("c", "n", raw), out.ToolSucceeded("c", raw))
		copy(raw, `{"n":2}`)
		return Result{}, err
	})
	await(t, l.settled, "the settlement")
	stop()
	content := l.content()
	called, succeeded := content[0].Data.(claims.ToolCalledData), content[1].Data.(claims.ToolSucceededData)
	if want := []byte(`{"n":1}`); !bytes.Equal(called.Input, want) || !bytes.Equal(succeeded.Output, want) {
		t.Errorf("recorded %s and %s, want %s", called.Input, succeeded.Output, want)
	}
}

// One content that no event can hold fails, and harms nothing else.
func TestContentThatIsTooLarge(t *testing.T) {
	l := newLog()
	large := json.RawMessage(`"` + strings.Repeat("x", 1<<20) + `"`)
	_, stop := run(t, l, testOptions(), func(_ context.Context, _ Request, out *Output) (Result, error) {
		if err := out.ToolSucceeded("c", large); !errors.Is(err, claims.ErrTooLarge) {
			t.Errorf("too large: %v", err)
		}
		if err := out.ToolSucceeded("c", json.RawMessage("{")); err == nil {
			t.Error("what is no JSON was taken")
		}
		return Result{}, out.Text(strings.Repeat("é", 1<<20)) // 2 MiB, in pieces at runes
	})
	await(t, l.settled, "the settlement")
	stop()
	if got := l.text(); got != strings.Repeat("é", 1<<20) {
		t.Errorf("recorded %d bytes of text", len(got))
	}
	for _, c := range l.content() {
		if text := c.Data.(claims.TextData).Text; len(text) > maxText || !strings.HasPrefix(text, "é") {
			t.Errorf("a piece of %d bytes", len(text))
		}
	}
}

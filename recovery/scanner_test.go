package recovery

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"reveille/claims"
)

func TestNewRefuses(t *testing.T) {
	w := newWorld()
	p := w.parts("scanner")
	p.Relayer = nil
	if _, err := New(p, Options{}); err == nil || !strings.Contains(err.Error(), "Relayer") {
		t.Errorf("a scanner without a relayer: %v", err)
	}
	if _, err := New(w.parts("scanner"), Options{Batch: -1}); err == nil {
		t.Error("a batch of -1 is taken")
	}
}

func TestI26ExpiredCancels(t *testing.T) {
	for _, interrupted := range []bool{false, true} {
		t.Run(fmt.Sprintf("uncertain interrupted %v", interrupted), func(t *testing.T) {
			w := newWorld()
			w.expired("declined", claims.Cancelled, claims.None)
			w.expired("cancelling", claims.Cancelling, claims.None)
			w.expired("leaked", claims.Cancelled, claims.NeverJoined)
			r := w.scanner(t, Options{UncertainInterrupted: interrupted}).Pass(t.Context()).Lanes[LaneClaims]

			want := map[claims.SessionID]claims.ExecutionOutcome{
				"declined": claims.OutcomeDeclined, "cancelling": claims.OutcomeQuarantined, "leaked": claims.OutcomeQuarantined,
			}
			if interrupted {
				want["cancelling"] = claims.OutcomeInterrupted
			}
			for id, outcome := range want {
				if w.outcomes[id] != outcome {
					t.Errorf("%s ended as %q, want %q", id, w.outcomes[id], outcome)
				}
			}
			if w.count("take") != 0 {
				t.Error("a claim that is not running was taken over")
			}
			if w.quarantines["leaked"] != claims.ReasonNeverJoined {
				t.Errorf("leaked was quarantined as %q", w.quarantines["leaked"])
			}
			if r.Done+r.Quarantined != 3 || len(w.poked) != 3 {
				t.Errorf("%+v, poked %v", r, w.poked)
			}
			if slices.Contains(w.announced, "declined") != true || slices.Contains(w.announced, "leaked") {
				t.Errorf("announced %v", w.announced)
			}
		})
	}
}

func TestI29ThreeHundredPoisonClaims(t *testing.T) {
	w := newWorld()
	for _, id := range sessions("poison", 300) {
		w.expired(id, claims.Running, claims.None).poison = true
	}
	w.expired("good", claims.Running, claims.None)
	s := w.scanner(t, Options{})
	for pass := 1; pass <= 3; pass++ {
		p := s.Pass(t.Context())
		r := p.Lanes[LaneClaims]
		if r.Seen != 100 || r.Quarantined != 100 || !r.Full || !p.More() {
			t.Fatalf("pass %d: %+v", pass, r)
		}
		if _, ok := w.outcomes["good"]; ok {
			t.Fatalf("the good one, last in the lane, was reached in pass %d", pass)
		}
	}
	p := s.Pass(t.Context())
	if r := p.Lanes[LaneClaims]; r.Seen != 1 || r.Done != 1 || p.More() {
		t.Fatalf("pass 4: %+v", r)
	}
	if w.outcomes["good"] != claims.OutcomeRecovered || len(w.quarantines) != 300 || !slices.Equal(w.announced, []claims.SessionID{"good"}) {
		t.Errorf("good %q, %d quarantined, announced %v", w.outcomes["good"], len(w.quarantines), w.announced)
	}
}

func TestI29ThreeHundredPoisonContinuations(t *testing.T) {
	w := newWorld()
	for _, id := range sessions("poison", 300) {
		w.continuation(id, "not JSON")
	}
	w.continuation("good", "")
	s := w.scanner(t, Options{})
	for pass := 1; pass <= 3; pass++ {
		if r := s.Pass(t.Context()).Lanes[LaneRecovery]; r.Quarantined != 100 {
			t.Fatalf("pass %d: %+v", pass, r)
		}
	}
	if r := s.Pass(t.Context()).Lanes[LaneRecovery]; r.Done != 1 {
		t.Fatalf("pass 4: %+v", r)
	}
	if len(w.quarantines) != 300 || w.quarantines["poison000"] != claims.ReasonInvalidContinuation {
		t.Errorf("%d quarantined, the first as %q", len(w.quarantines), w.quarantines["poison000"])
	}
}

func TestI29TwoBatchesOfAnnouncements(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld()
		for _, id := range sessions("c", 101) {
			w.continuation(id, "")
		}
		for _, id := range sessions("o", 101) {
			w.ready = append(w.ready, &worldSession{id: id, due: time.Now()})
		}
		s := w.scanner(t, Options{})
		first := func() int {
			return len(slices.Compact(slices.Sorted(slices.Values(w.announced))))
		}
		s.Pass(t.Context())
		if first() != 200 || len(w.announced) != 200 {
			t.Fatalf("the first pass announced %d sessions, %d times", first(), len(w.announced))
		}
		// A batch of fresh rows of each kind is behind the two that are left over,
		// and in front of those that were announced.
		for _, id := range sessions("fresh-c", 100) {
			w.continuation(id, "")
		}
		for _, id := range sessions("fresh-o", 100) {
			w.ready = append(w.ready, &worldSession{id: id, due: time.Now()})
		}
		s.Pass(t.Context())
		s.Pass(t.Context())
		if first() != 402 || len(w.announced) != 402 {
			t.Fatalf("three passes announced %d of 402 sessions, %d times", first(), len(w.announced))
		}
		s.Pass(t.Context())
		if len(w.announced) != 402 {
			t.Fatal("announced again before Reannounce was over")
		}
		time.Sleep(5 * time.Second) // of the bubble
		for range 3 {
			s.Pass(t.Context())
		}
		if len(w.announced) != 804 {
			t.Errorf("%d announcements after Reannounce, want each again", len(w.announced))
		}
	})
}

// Whatever happens to one lane, the others do all of theirs.
func TestI29LanesDoNotStarveEachOther(t *testing.T) {
	for _, broken := range []string{
		"expired", "touch claims", "due continuations", "touch sessions", "due relays", "convert", "announce", "relay",
		"due retentions", "touch retentions", "delete",
	} {
		t.Run(broken, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				w := newWorld()
				for _, id := range sessions("x", 5) {
					w.expired(id, claims.Running, claims.None)
					w.continuation("c"+id, "")
					w.ready = append(w.ready, &worldSession{id: "o" + id, due: time.Now()})
					w.relays = append(w.relays, &worldSession{id: "r" + id, due: time.Now()})
					w.kept = append(w.kept, &worldSession{id: "k" + id, due: time.Now(), rows: 1})
				}
				w.hook = func(_ context.Context, op string, _ claims.SessionID) error {
					if op == broken {
						return errBroken
					}
					return nil
				}
				p := w.scanner(t, Options{}).Pass(t.Context())
				if p.DatabaseLost {
					t.Error("the database was there")
				}
				working := 0
				for name, r := range p.Lanes {
					if r.Done == 5 {
						working++
					} else if r.Done != 0 {
						t.Errorf("lane %s: %+v", name, r)
					}
				}
				if want := map[bool]int{true: 3, false: 4}[broken == "announce"]; working != want {
					t.Errorf("%d lanes did their work, want %d: %+v", working, want, p.Lanes)
				}
			})
		})
	}
}

func TestI29TouchedBeforeLookedAt(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld()
		w.expired("a", claims.Running, claims.None)
		w.expired("b", claims.Cancelled, claims.None)
		w.continuation("c", "")
		w.continuation("d", "bad")
		w.ready = append(w.ready, &worldSession{id: "e", due: time.Now()})
		w.relays = append(w.relays, &worldSession{id: "f", due: time.Now()})
		w.kept = append(w.kept, &worldSession{id: "h", due: time.Now(), rows: 1})
		w.scanner(t, Options{}).Pass(t.Context())
		for _, order := range [][]string{
			{"expired", "touch claims", "take a", "convert a", "announce a", "end b"},
			{"due continuations", "touch continuations", "announce c", "quarantine d"},
			{"due sessions", "touch sessions", "announce e"},
			{"due relays", "touch relays", "relay f"},
			{"due retentions", "touch retentions", "delete h"},
		} {
			last := -1
			for _, call := range order {
				at := slices.Index(w.calls, call)
				if at <= last {
					t.Errorf("%q is at %d, after %d: %v", call, at, last, w.calls)
				}
				last = at
			}
		}

		// What can't be touched is not looked at.
		w.calls = nil
		w.expired("g", claims.Running, claims.None)
		w.hook = func(_ context.Context, op string, _ claims.SessionID) error {
			if strings.HasPrefix(op, "touch") {
				return errBroken
			}
			return nil
		}
		if r := w.scanner(t, Options{}).Pass(t.Context()).Lanes[LaneClaims]; r.Err == nil || w.count("take") != 0 {
			t.Errorf("%+v, calls %v", r, w.calls)
		}
	})
}

// Rows that hang are in their lane's way once each: those behind them are taken
// in the next pass, and those that hang are tried on.
func TestI29HangingRowsAreInTheWayOnce(t *testing.T) {
	hang := func(ctx context.Context) error {
		<-ctx.Done()
		return ctx.Err()
	}
	for _, tc := range []struct {
		lane  Lane
		op    string
		fill  func(w *world, id claims.SessionID)
		boxes int // how many of the hanging rows a pass gets through
	}{
		{LaneClaims, "end", func(w *world, id claims.SessionID) { w.expired(id, claims.Cancelling, claims.None) }, 1},
		{LaneClaims, "take", func(w *world, id claims.SessionID) { w.expired(id, claims.Running, claims.None) }, 1},
		{LaneClaims, "convert", func(w *world, id claims.SessionID) { w.expired(id, claims.Running, claims.None) }, 1},
		{LaneOrdinary, "announce", func(w *world, id claims.SessionID) {
			w.ready = append(w.ready, &worldSession{id: id, due: time.Now()})
		}, 1},
		{LaneRecovery, "quarantine", func(w *world, id claims.SessionID) { w.continuation(id, "bad") }, 1},
		{LaneRelay, "relay", func(w *world, id claims.SessionID) {
			w.relays = append(w.relays, &worldSession{id: id, due: time.Now()})
		}, 3 * defaultRelays},
	} {
		t.Run(string(tc.lane)+" "+tc.op, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				w := newWorld()
				stuck := 3 * tc.boxes
				for _, id := range append(sessions("hangs", stuck), sessions("z", 10)...) {
					tc.fill(w, id)
				}
				w.hook = func(ctx context.Context, op string, id claims.SessionID) error {
					if op == tc.op && strings.HasPrefix(string(id), "hangs") {
						return hang(ctx)
					}
					return nil
				}
				s := w.scanner(t, Options{})
				good := 0
				for range 5 {
					r := s.Pass(t.Context()).Lanes[tc.lane]
					good += r.Done + r.Quarantined
					time.Sleep(defaultReannounce) // of the bubble
				}
				if good < 10 {
					t.Errorf("5 passes got to %d of 10 good rows behind %d that hang: %v", good, stuck, w.calls)
				}
				before := w.count(tc.op + " hangs000")
				for range 2 * failedFirst * stuck {
					s.Pass(t.Context())
					time.Sleep(defaultReannounce) // of the bubble
				}
				if w.count(tc.op+" hangs000") == before {
					t.Error("a row that hung is not tried again")
				}
			})
		})
	}
}

func TestTimeBox(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld()
		for _, id := range sessions("slow", 50) {
			w.expired(id, claims.Running, claims.None)
		}
		w.ready = append(w.ready, &worldSession{id: "o", due: time.Now()})
		w.hook = func(_ context.Context, op string, _ claims.SessionID) error {
			if op == "convert" {
				time.Sleep(time.Second) // of the bubble
			}
			return nil
		}
		s := w.scanner(t, Options{TimeBox: 4500 * time.Millisecond})
		start := time.Now()
		p := s.Pass(t.Context())
		r := p.Lanes[LaneClaims]
		if r.Done != 5 || r.Skipped != 45 || time.Since(start) != 5*time.Second {
			t.Errorf("%+v in %v: want 5 in 5 s, the last one not cut off", r, time.Since(start))
		}
		if p.Lanes[LaneOrdinary].Done != 1 {
			t.Error("another lane went without")
		}
		if got := w.count("take"); got != 5 {
			t.Errorf("%d claims were taken over, the box ended after 5", got)
		}
		// A row that hangs is given up after as long again.
		w.hook = func(ctx context.Context, op string, _ claims.SessionID) error {
			switch op {
			case "touch claims":
				time.Sleep(time.Second) // so that the row ends after the box, not with it
			case "take":
				<-ctx.Done()
				return ctx.Err()
			}
			return nil
		}
		start = time.Now()
		if r := s.Pass(t.Context()).Lanes[LaneClaims]; r.Failed != 1 || r.Skipped != 44 || time.Since(start) != 5500*time.Millisecond {
			t.Errorf("%+v in %v", r, time.Since(start))
		}
	})
}

func TestI31ThreeScanners(t *testing.T) {
	w := newWorld() // panics where a claim is ended twice
	ids := sessions("s", 100)
	for _, id := range ids {
		w.expired(id, claims.Running, claims.None)
	}
	var wg sync.WaitGroup
	handled := make([]int, 3)
	holders := []claims.HolderID{"one", "two", "three"}
	for _, holder := range holders {
		w.live[holder] = true
	}
	for i, holder := range holders {
		s := newScanner(t, w.parts(holder), Options{Batch: 20})
		wg.Go(func() {
			for range 10 {
				handled[i] += s.Pass(t.Context()).Lanes[LaneClaims].Done
			}
		})
	}
	wg.Wait()
	if sum := handled[0] + handled[1] + handled[2]; sum != 100 || len(w.outcomes) != 100 {
		t.Errorf("%v counted as done, %d ended", handled, len(w.outcomes))
	}
}

func TestUntrustedLeaseTakesNothing(t *testing.T) {
	w := newWorld()
	w.expired("a", claims.Running, claims.None)
	w.expired("b", claims.Cancelling, claims.None)
	var out bytes.Buffer
	p := w.parts("scanner")
	trusted := false
	p.Holder = func() (claims.HolderID, bool) { return "scanner", trusted }
	s := newScanner(t, p, Options{Logger: slog.New(slog.NewTextHandler(&out, nil))})
	for range 3 {
		s.Pass(t.Context())
	}
	if len(w.outcomes) != 0 || w.count("touch claims")+w.count("take")+w.count("end")+w.count("convert") != 0 {
		t.Errorf("calls %v", w.calls)
	}
	if n := strings.Count(out.String(), "waits for a worker lease"); n != 1 {
		t.Errorf("it was said %d times that the scanner waits:\n%s", n, out.String())
	}
	trusted = true
	if r := s.Pass(t.Context()).Lanes[LaneClaims]; r.Done != 1 || r.Quarantined != 1 {
		t.Errorf("%+v", r)
	}
}

// gate runs f when the scanner asks for its lease the nth time, and answers
// with the lease it returns.
func gate(p *Parts, f func(n int) (claims.HolderID, bool)) {
	n := 0
	p.Holder = func() (claims.HolderID, bool) {
		n++
		return f(n)
	}
}

func TestI28LeaseLostBetween(t *testing.T) {
	for _, tc := range []struct {
		name  string
		after string // the call after which the lease is not trusted any more
		never []string
	}{
		{"takeover and conversion", "take", []string{"convert", "conversion failed"}},
		{"conversion and the next", "convert", []string{"conversion failed"}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			for _, answer := range []claims.HolderID{"", "its successor"} {
				w := newWorld()
				w.expired("a", claims.Running, claims.None)
				w.hook = func(_ context.Context, op string, _ claims.SessionID) error {
					if op == "convert" {
						return refusal("23514")
					}
					return nil
				}
				p := w.parts("scanner")
				gate(&p, func(int) (claims.HolderID, bool) {
					if w.count(tc.after) > 0 {
						return answer, answer != ""
					}
					return "scanner", true
				})
				s := newScanner(t, p, Options{})
				r := s.Pass(t.Context()).Lanes[LaneClaims]
				if r.Left != 1 || r.Done+r.Quarantined+r.Failed != 0 {
					t.Errorf("%+v", r)
				}
				for _, op := range tc.never {
					if w.count(op) != 0 {
						t.Errorf("%s was called: %v", op, w.calls)
					}
				}
				if w.count("convert") > 1 || len(s.taken) != 0 {
					t.Errorf("calls %v, still taken %v", w.calls, s.taken)
				}
			}
		})
	}
}

// Another scanner takes over, or an interrupt comes, at each gate of the first.
func TestI28OvertakenAtEachGate(t *testing.T) {
	for _, at := range []string{"take", "convert", "conversion failed"} {
		t.Run("before "+at, func(t *testing.T) {
			w := newWorld()
			w.live["other"] = true
			c := w.expired("a", claims.Running, claims.None)
			other := newScanner(t, w.parts("other"), Options{})
			w.hook = func(ctx context.Context, op string, _ claims.SessionID) error {
				switch {
				case op == at:
					w.mu.Lock()
					w.hook = nil
					w.live["scanner"] = false // stopped for longer than its lease
					w.mu.Unlock()
					if r := other.Pass(ctx).Lanes[LaneClaims]; r.Done != 1 {
						t.Errorf("the other scanner: %+v", r)
					}
				case op == "convert":
					return refusal("23514")
				}
				return nil
			}
			r := w.scanner(t, Options{}).Pass(t.Context()).Lanes[LaneClaims]
			if r.Left != 1 || r.Done+r.Quarantined != 0 {
				t.Errorf("the loser: %+v", r)
			}
			if w.outcomes["a"] != claims.OutcomeRecovered || len(w.quarantines) != 0 || c.takes > 2 {
				t.Errorf("ended as %q, quarantines %v", w.outcomes["a"], w.quarantines)
			}
		})
	}
	t.Run("an interrupt", func(t *testing.T) {
		w := newWorld()
		c := w.expired("a", claims.Running, claims.None)
		w.hook = func(_ context.Context, op string, _ claims.SessionID) error {
			if op == "convert" {
				c.verdict = c.verdict.Raise(claims.Interrupted)
			}
			return nil
		}
		if r := w.scanner(t, Options{}).Pass(t.Context()).Lanes[LaneClaims]; r.Done != 1 || w.outcomes["a"] != claims.OutcomeInterrupted {
			t.Errorf("%+v, %q", r, w.outcomes["a"])
		}
	})
	// What was refused is not what is to be made any more; what is, is refused too
	// in the second case, and quarantined then.
	for refused, want := range map[string]claims.ExecutionOutcome{"until the interrupt": claims.OutcomeInterrupted, "for ever": claims.OutcomeQuarantined} {
		t.Run("an interrupt before the quarantine, refused "+refused, func(t *testing.T) {
			w := newWorld()
			c := w.expired("a", claims.Running, claims.None)
			w.hook = func(_ context.Context, op string, _ claims.SessionID) error {
				switch {
				case op == "conversion failed":
					c.verdict = c.verdict.Raise(claims.Interrupted)
				case op == "convert" && (c.verdict == claims.None || want == claims.OutcomeQuarantined):
					return refusal("23514")
				}
				return nil
			}
			s := w.scanner(t, Options{})
			r := s.Pass(t.Context()).Lanes[LaneClaims]
			if r.Done+r.Quarantined != 1 || r.Left+r.Failed != 0 || w.outcomes["a"] != want || c.takes != 1 || len(s.taken) != 0 {
				t.Errorf("%+v, %q after %v", r, w.outcomes["a"], w.calls)
			}
			if n := w.count("convert"); n != map[claims.ExecutionOutcome]int{claims.OutcomeInterrupted: 4, claims.OutcomeQuarantined: 6}[want] {
				t.Errorf("%d conversions", n)
			}
		})
	}
	t.Run("a continuation that moved", func(t *testing.T) {
		w := newWorld()
		d := w.continuation("a", "bad")
		w.hook = func(_ context.Context, op string, _ claims.SessionID) error {
			if op == "quarantine" {
				d.Unstarted = false
			}
			return nil
		}
		r := w.scanner(t, Options{}).Pass(t.Context()).Lanes[LaneRecovery]
		if r.Left != 1 || r.Quarantined+r.Done != 0 || len(w.quarantines) != 0 {
			t.Errorf("%+v", r)
		}
	})
}

func TestI27ConversionRefusedThreeTimes(t *testing.T) {
	w := newWorld()
	w.expired("refused", claims.Running, claims.None)
	w.expired("healthy", claims.Running, claims.None)
	w.hook = func(_ context.Context, op string, id claims.SessionID) error {
		if op == "convert" && id == "refused" {
			return fmt.Errorf("convert: session refused: %w", refusal("23514"))
		}
		return nil
	}
	r := w.scanner(t, Options{}).Pass(t.Context()).Lanes[LaneClaims]
	if r.Quarantined != 1 || r.Done != 1 || w.count("convert refused") != 3 {
		t.Errorf("%+v, calls %v", r, w.calls)
	}
	if w.quarantines["refused"] != claims.ReasonConversionFailed || w.outcomes["healthy"] != claims.OutcomeRecovered {
		t.Errorf("%v, %v", w.quarantines, w.outcomes)
	}
	if tokens := w.tokens["refused"]; len(slices.Compact(tokens)) != 1 {
		t.Errorf("one conversion used the tokens %v", tokens)
	}
}

// An error that may pass costs no takeover, however often it comes, and ends
// in no quarantine; the claim stays ours and is converted when it has passed.
func TestI27RetryableIsNeverQuarantined(t *testing.T) {
	w := newWorld()
	c := w.expired("a", claims.Running, claims.None)
	fail := true
	w.hook = func(_ context.Context, op string, id claims.SessionID) error {
		if op == "convert" && id == "a" && fail {
			return refusal("40001")
		}
		return nil
	}
	s := w.scanner(t, Options{})
	for range 200 {
		s.Pass(t.Context())
	}
	if c.takes != 1 || len(w.quarantines) != 0 || w.count("conversion failed") != 0 {
		t.Fatalf("%d takeovers, quarantines %v", c.takes, w.quarantines)
	}
	if n := w.count("convert"); n < 6 || n > 12 {
		t.Errorf("%d conversions in 200 passes: it should be tried less and less", n)
	}
	fail = false
	for range longestSkip + 1 {
		s.Pass(t.Context())
	}
	if w.outcomes["a"] != claims.OutcomeRecovered || c.takes != 1 || len(slices.Compact(w.tokens["a"])) != 1 || len(s.taken) != 0 {
		t.Errorf("%q after %d takeovers, tokens %v", w.outcomes["a"], c.takes, w.tokens["a"])
	}
}

func TestI29FailingConversionsLeaveRoom(t *testing.T) {
	w := newWorld()
	for _, id := range sessions("stuck", 60) {
		w.expired(id, claims.Running, claims.None)
	}
	w.hook = func(_ context.Context, op string, id claims.SessionID) error {
		if op == "convert" && strings.HasPrefix(string(id), "stuck") {
			return errBroken
		}
		return nil
	}
	s := w.scanner(t, Options{Batch: 8})
	for pass := range 60 {
		id := claims.SessionID(fmt.Sprintf("fresh%d", pass))
		if pass >= 10 {
			w.expired(id, claims.Running, claims.None)
		}
		if r := s.Pass(t.Context()).Lanes[LaneClaims]; r.Seen > 8 {
			t.Fatalf("pass %d: %+v", pass, r)
		}
		if pass >= 10 && w.outcomes[id] != claims.OutcomeRecovered {
			t.Fatalf("pass %d did not reach the one good claim", pass)
		}
	}
}

func TestTakeoverWithoutAnswer(t *testing.T) {
	w := newWorld()
	c := w.expired("a", claims.Running, claims.None)
	w.hook = func(_ context.Context, op string, _ claims.SessionID) error {
		if op == "take" {
			return errDone
		}
		return nil
	}
	s := w.scanner(t, Options{})
	if r := s.Pass(t.Context()).Lanes[LaneClaims]; r.Failed != 1 || len(s.taken) != 1 {
		t.Fatalf("%+v", r)
	}
	if r := s.Pass(t.Context()).Lanes[LaneClaims]; r.Done != 1 || c.takes != 1 || len(s.taken) != 0 {
		t.Errorf("%+v after %d takeovers", r, c.takes)
	}
}

// What the scanner's lease holds and nobody knows is revoked, and comes back.
func TestI3SweepRevokesTheUnknown(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld()
		s := w.scanner(t, Options{})
		s.Pass(t.Context())
		c := w.expired("lost", claims.Running, claims.None)
		c.holder, c.scanner = "scanner", true
		s.Pass(t.Context())
		if w.count("held") != 1 || len(w.outcomes) != 0 {
			t.Fatalf("calls %v", w.calls)
		}
		time.Sleep(sweepEvery) // of the bubble
		s.Pass(t.Context())
		if w.count("revoke lost") != 1 {
			t.Fatalf("calls %v", w.calls)
		}
		if r := s.Pass(t.Context()).Lanes[LaneClaims]; r.Done != 1 || w.outcomes["lost"] != claims.OutcomeRecovered {
			t.Errorf("%+v", r)
		}
	})
}

func TestDatabaseOutage(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld()
		for _, id := range sessions("s", 10) {
			w.expired(id, claims.Running, claims.None)
		}
		var down atomic.Bool
		w.hook = func(_ context.Context, op string, id claims.SessionID) error {
			if op == "convert" && id == "s003" && w.count("convert s003") == 1 {
				down.Store(true)
			}
			if down.Load() && op != "announce" {
				return errBroken
			}
			return nil
		}
		var out bytes.Buffer
		s := w.scanner(t, Options{Logger: slog.New(slog.NewTextHandler(&out, nil))})
		ctx, cancel := context.WithCancel(t.Context())
		ended := make(chan error)
		go func() { ended <- s.Run(ctx) }()

		time.Sleep(time.Minute) // of the bubble
		synctest.Wait()
		if len(w.outcomes) != 3 || w.count("take") != 4 {
			t.Errorf("%d ended, %d taken over before the outage", len(w.outcomes), w.count("take"))
		}
		if n := strings.Count(out.String(), "waits for the database: connection refused"); n != 1 {
			t.Errorf("the outage was told %d times:\n%s", n, out.String())
		}
		if n := w.count("ping"); n < 5 || n > 30 {
			t.Errorf("%d passes in a minute of outage", n)
		}
		down.Store(false)
		time.Sleep(time.Minute)
		synctest.Wait()
		if len(w.outcomes) != 10 || strings.Count(out.String(), "has the database again") != 1 {
			t.Errorf("%d ended after it:\n%s", len(w.outcomes), out.String())
		}
		cancel()
		if err := <-ended; err != nil {
			t.Error(err)
		}
	})
}

func TestStreamOutage(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld()
		w.expired("claim", claims.Running, claims.None)
		for _, id := range sessions("s", 20) {
			w.ready = append(w.ready, &worldSession{id: id, due: time.Now()})
			w.continuation("c"+id, "")
		}
		w.continuation("bad", "bad")
		up := false
		w.hook = func(ctx context.Context, op string, _ claims.SessionID) error {
			if op == "announce" && !up {
				<-ctx.Done() // nobody answers
				return errors.New("no responders")
			}
			return nil
		}
		var out bytes.Buffer
		s := w.scanner(t, Options{TimeBox: time.Minute, Logger: slog.New(slog.NewTextHandler(&out, nil))})
		start := time.Now()
		p := s.Pass(t.Context())
		if w.outcomes["claim"] != claims.OutcomeRecovered || w.quarantines["bad"] == "" {
			t.Error("what needs no stream was not done")
		}
		if r := p.Lanes[LaneOrdinary]; r.Failed != 1 || r.Skipped != 19 {
			t.Errorf("ordinary: %+v", r)
		}
		if d := time.Since(start); d != 3*2*time.Second {
			t.Errorf("the pass took %v: one announcement of each of three lanes waits for 2 s", d)
		}
		s.Pass(t.Context())
		up = true
		time.Sleep(5 * time.Second) // of the bubble
		s.Pass(t.Context())
		if len(w.announced) != 40 {
			t.Errorf("%d announced afterwards", len(w.announced))
		}
		for _, line := range []string{"waits for the stream: no responders", "has the stream again"} {
			if strings.Count(out.String(), line) != 1 {
				t.Errorf("not once %q:\n%s", line, out.String())
			}
		}
		if strings.Contains(out.String(), "could not be worked on") {
			t.Errorf("an outage is told of rows:\n%s", out.String())
		}
	})
}

func TestI25StuckRelayHoldsNobodyUp(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld()
		for _, id := range sessions("s", 30) {
			w.relays = append(w.relays, &worldSession{id: id, due: time.Now()})
		}
		most, now := 0, 0
		w.hook = func(ctx context.Context, op string, id claims.SessionID) error {
			if op != "relay" {
				return nil
			}
			w.mu.Lock()
			now++
			most = max(most, now)
			w.mu.Unlock()
			defer func() { w.mu.Lock(); now--; w.mu.Unlock() }()
			if id == "s000" {
				<-ctx.Done()
				return ctx.Err()
			}
			time.Sleep(10 * time.Millisecond) // of the bubble
			return nil
		}
		s := w.scanner(t, Options{})
		start := time.Now()
		r := s.Pass(t.Context()).Lanes[LaneRelay]
		if r.Done != 29 || r.Failed != 1 || most != defaultRelays || time.Since(start) != defaultCallTimeout {
			t.Errorf("%+v, %d at once, in %v", r, most, time.Since(start))
		}
	})
}

func TestRunEndsAfterTheRowInHand(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld()
		w.expired("a", claims.Running, claims.None)
		w.expired("b", claims.Running, claims.None)
		ctx, cancel := context.WithCancel(t.Context())
		w.hook = func(ctx context.Context, op string, _ claims.SessionID) error {
			if op == "take" {
				cancel()
			}
			return ctx.Err()
		}
		s := w.scanner(t, Options{})
		if err := s.Run(ctx); err != nil {
			t.Error(err)
		}
		if w.outcomes["a"] != claims.OutcomeRecovered || w.count("take") != 1 {
			t.Errorf("calls %v", w.calls)
		}
	})
}

func TestRunDrainsWithoutPausing(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld()
		for _, id := range sessions("s", 500) {
			w.expired(id, claims.Running, claims.None)
		}
		ctx, cancel := context.WithTimeout(t.Context(), 500*time.Millisecond)
		defer cancel()
		if err := w.scanner(t, Options{Batch: 50}).Run(ctx); err != nil {
			t.Error(err)
		}
		if len(w.outcomes) != 500 {
			t.Errorf("%d of 500 ended before the first pause", len(w.outcomes))
		}
	})
}

// A wake with a time, a retry in its backoff: each is announced at its time, and
// not up to a pause later.
func TestRunAnnouncesAtTheTime(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld()
		start := time.Now()
		at := map[claims.SessionID]time.Duration{}
		w.hook = func(_ context.Context, op string, id claims.SessionID) error {
			if op == "announce" {
				at[id] = time.Since(start)
			}
			return nil
		}
		due := map[claims.SessionID]time.Duration{
			"now": 0, "soon": leastRest, "half": 400 * time.Millisecond, "beside": 401 * time.Millisecond, "later": 7654 * time.Millisecond,
		}
		for id, d := range due {
			w.ready = append(w.ready, &worldSession{id: id, due: start.Add(d)})
		}
		ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
		defer cancel()
		time.AfterFunc(5*time.Second, func() { // in some pause, to be due before it ends
			w.mu.Lock()
			defer w.mu.Unlock()
			due["late"] = 5001 * time.Millisecond
			w.ready = append(w.ready, &worldSession{id: "late", due: start.Add(due["late"])})
		})
		if err := w.scanner(t, Options{Reannounce: time.Hour}).Run(ctx); err != nil {
			t.Error(err)
		}
		late := map[claims.SessionID]time.Duration{"beside": leastRest, "late": 1250 * time.Millisecond / restParts}
		for id, d := range due {
			if got, ok := at[id]; !ok || got < d || got > d+late[id] {
				t.Errorf("%s, due after %v, was announced after %v (%v)", id, d, got, ok)
			}
		}
		if n := w.count("due sessions"); n > 10*4/3+len(due)+1 {
			t.Errorf("%d passes in 10 s", n)
		}
	})
}

// What is due next shortens no pause that is a backoff, and where it is not
// answered the passes go on.
func TestRunWithoutNextDue(t *testing.T) {
	for _, broken := range []string{"expired", "next due", "touch sessions", "due continuations"} {
		synctest.Test(t, func(t *testing.T) {
			w := newWorld()
			w.hook = func(_ context.Context, op string, _ claims.SessionID) error {
				if op == broken || broken == "expired" && op == "ping" {
					return errBroken
				}
				return nil
			}
			for i, id := range sessions("s", 100) {
				w.ready = append(w.ready, &worldSession{id: id, due: time.Now().Add(time.Duration(i) * 600 * time.Millisecond)})
			}
			ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
			defer cancel()
			if err := w.scanner(t, Options{}).Run(ctx); err != nil {
				t.Error(err)
			}
			passes, asked := w.count("expired"), w.count("next due")
			switch broken {
			case "expired":
				if asked != 0 || passes > 15 {
					t.Errorf("%d passes, %d times asked of a database that is lost", passes, asked)
				}
			case "next due":
				if passes < 45 || passes > 80 || asked < 2*passes {
					t.Errorf("%d passes in a minute, asked %d times", passes, asked)
				}
			default:
				if passes < 45 || passes > 80 || asked != 0 {
					t.Errorf("%s fails: %d passes in a minute, asked %d times", broken, passes, asked)
				}
			}
		})
	}
}

// Many marks, one behind the other, make a bounded number of passes.
func TestRunDoesNotSpin(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld()
		for i := range 1000 {
			w.ready = append(w.ready, &worldSession{id: claims.SessionID(fmt.Sprint(i)), due: time.Now().Add(time.Duration(i) * time.Millisecond)})
		}
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		if err := w.scanner(t, Options{Reannounce: time.Hour}).Run(ctx); err != nil {
			t.Error(err)
		}
		if n := w.count("due sessions"); n > 1+int(time.Second/leastRest) || len(w.announced) < 900 {
			t.Errorf("%d passes in a second announced %d of 1000", n, len(w.announced))
		}
	})
}

func TestRetention(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld()
		w.kept = append(w.kept, &worldSession{id: "much", due: time.Now(), rows: 250})
		for _, id := range sessions("k", 9) {
			w.kept = append(w.kept, &worldSession{id: id, due: time.Now(), rows: 3})
		}
		s := w.scanner(t, Options{Batch: 10})
		p := s.Pass(t.Context())
		if r := p.Lanes[LaneRetention]; r.Seen != 10 || r.Done != 10 || !r.Full {
			t.Errorf("%+v", r)
		}
		if p.More() {
			t.Error("what is only to be deleted makes the next pass come at once")
		}
		if len(w.kept) != 1 || w.kept[0].rows != 150 || w.count("delete much") != retentionBatches {
			t.Errorf("%d sessions keep something, after %d deletions of much", len(w.kept), w.count("delete much"))
		}
		for range 2 { // touched: it is away, and the second time nothing is looked for
			if r := s.Pass(t.Context()).Lanes[LaneRetention]; r.Seen != 0 {
				t.Errorf("%+v", r)
			}
		}
		if n := w.count("due retentions"); n != 2 {
			t.Errorf("the lane was read %d times", n)
		}
		for range 180 {
			time.Sleep(time.Second) // of the bubble
			s.Pass(t.Context())
		}
		if n := w.count("due retentions"); n > 2+3+3 || len(w.kept) != 0 {
			t.Errorf("in 3 minutes the lane was read %d times, and %d sessions keep something", n, len(w.kept))
		}
	})
}

// One session that can't be worked on costs its place, and a slow one no other
// lane more than the retention lane's own time.
func TestRetentionHoldsNobodyUp(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld()
		for _, id := range sessions("k", 40) {
			w.kept = append(w.kept, &worldSession{id: id, due: time.Now(), rows: 1000})
		}
		w.hook = func(_ context.Context, op string, id claims.SessionID) error {
			switch {
			case op == "delete" && id == "k000":
				return errBroken
			case op == "delete" && id == "k001":
				return claims.ErrFenced
			case op == "delete":
				time.Sleep(300 * time.Millisecond) // of the bubble
			}
			return nil
		}
		w.ready = append(w.ready, &worldSession{id: "o", due: time.Now()})
		s := w.scanner(t, Options{})
		start := time.Now()
		p := s.Pass(t.Context())
		r := p.Lanes[LaneRetention]
		if r.Failed != 1 || r.Left != 1 || r.Done != 1 || r.Skipped != 37 || p.Lanes[LaneOrdinary].Done != 1 {
			t.Errorf("%+v", p.Lanes)
		}
		if d := time.Since(start); d != 1200*time.Millisecond {
			t.Errorf("it took %v: its box is a second, and the deletion in hand is not cut off", d)
		}
	})
}

func TestMetrics(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld()
		w.expired("a", claims.Cancelling, claims.None)
		w.expired("b", claims.Running, claims.None)
		w.continuation("c", "bad")
		w.ready = append(w.ready, &worldSession{id: "d", due: time.Now()})
		s := w.scanner(t, Options{})
		reg := prometheus.NewPedanticRegistry()
		reg.MustRegister(s.Collectors()...)
		s.Pass(t.Context())
		time.Sleep(5 * time.Second) // of the bubble
		s.Pass(t.Context())
		got := map[string]float64{}
		families, err := reg.Gather()
		if err != nil {
			t.Fatal(err)
		}
		for _, f := range families {
			for _, m := range f.GetMetric() {
				name := f.GetName()
				for _, l := range m.GetLabel() {
					name += " " + l.GetValue()
				}
				got[name] = m.GetGauge().GetValue() + m.GetCounter().GetValue() + float64(m.GetHistogram().GetSampleCount())
			}
		}
		for name, want := range map[string]float64{
			"reveille_oldest_seconds claims":                          0,
			"reveille_oldest_seconds ordinary":                        5, // announced, and not started
			"reveille_oldest_seconds recovery":                        0,
			"reveille_quarantines_total cancellation_outcome_unknown": 1,
			"reveille_quarantines_total invalid_continuation":         1,
			"reveille_scan_rows_total claims done":                    1,
			"reveille_scan_rows_total claims quarantined":             1,
			"reveille_scan_rows_total ordinary done":                  2,
			"reveille_scan_rows_total relay failed":                   0,
			"reveille_scan_pass_seconds relay":                        2,
		} {
			if v, ok := got[name]; !ok || v != want {
				t.Errorf("%s is %v (there: %v), want %v", name, v, ok, want)
			}
		}
	})
}

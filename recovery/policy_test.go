package recovery

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"
	"unicode/utf8"

	"reveille/claims"
)

func TestI26Decide(t *testing.T) {
	for _, tc := range []struct {
		phase   claims.Phase
		revoked claims.Cause
		want    action
	}{
		{claims.Running, claims.None, takeItOver},
		{claims.Running, claims.Unknown, takeItOver},
		{claims.Running, claims.Interrupted, takeItOver},
		{claims.Running, claims.NeverJoined, takeItOver},
		{claims.Cancelling, claims.None, endIt},
		{claims.Cancelling, claims.Unknown, endIt},
		{claims.Cancelling, claims.NeverJoined, endIt},
		{claims.Cancelled, claims.None, endIt},
		{claims.Cancelled, claims.NeverJoined, endIt},
		{"of a later version", claims.None, leaveAlone},
		{"", claims.Unknown, leaveAlone},
	} {
		if got := decide(claims.Candidate{Phase: tc.phase, Revoked: tc.revoked}); got != tc.want {
			t.Errorf("phase %q revoked %q: %d, want %d", tc.phase, tc.revoked, got, tc.want)
		}
	}
}

func TestRotation(t *testing.T) {
	all := allLanes()
	for start := range all {
		seen := 0
		for pass := range uint64(len(all)) {
			order := rotation(all, pass)
			sorted := slices.Sorted(slices.Values(order))
			if !slices.Equal(sorted, slices.Sorted(slices.Values(all))) {
				t.Fatalf("pass %d visits %v", pass, order)
			}
			if order[start] == LaneClaims {
				seen++
			}
		}
		if seen != 1 {
			t.Errorf("claims are at place %d in %d of %d passes", start, seen, len(all))
		}
	}
	if got := rotation(nil, 3); got != nil {
		t.Errorf("no lanes: %v", got)
	}
	if last := ^uint64(0); rotation(all, last)[0] != all[last%uint64(len(all))] {
		t.Error("the last pass of all does not follow")
	}
}

func TestI27Refusals(t *testing.T) {
	for _, tc := range []struct {
		codes string
		want  next
	}{
		{"23514", tryAgain},
		{"23514 23514", tryAgain},
		{"23514 23514 23514", quarantine},
		{"23514 23505 23503", quarantine}, // one class
		{"22P02 22P05 22021", quarantine},
		{"22P02 23514 22P02", tryAgain},
		{"22P02 23514 22P02 23514 22P02", tryAgain},
		{"22P02 23514 22P02 23514 22P02 23514", tryLater},
		{"23514 23514 -", tryLater},
		{"40001", tryLater},
		{"40P01", tryLater},
		{"08006", tryLater},
		{"57P01", tryLater},
		{"-", tryLater},
		{"23", tryLater},
	} {
		var r refusals
		var got next
		for code := range strings.SplitSeq(tc.codes, " ") {
			r, got = r.after(strings.Trim(code, "-"))
		}
		if got != tc.want {
			t.Errorf("%s: %d, want %d", tc.codes, got, tc.want)
		}
	}
}

func FuzzI27Refusals(f *testing.F) {
	f.Add("2323232323", 5)
	f.Add("40001", 1)
	f.Fuzz(func(t *testing.T, s string, width int) {
		width = 1 + max(width, -width)%7
		var r refusals
		for i := 0; len(s) > 0; i++ {
			n := min(width, len(s))
			var got next
			r, got = r.after(s[:n])
			refused := n == 5 && (s[:2] == "22" || s[:2] == "23")
			s = s[n:]
			if !refused && got != tryLater || got == quarantine && r.run != refusalsOfOneClass {
				t.Fatalf("try %d: %d after %+v", i, got, r)
			}
			if got != tryAgain {
				return
			}
			if i >= mostConversions {
				t.Fatal("goes on for ever")
			}
		}
	})
}

func TestRefusalDetail(t *testing.T) {
	d := refusalDetail(refusals{run: 3}, "23514", errors.New(strings.Repeat("ü", 2000)+"\x00\xff"))
	if len(d) > maxDetailBytes || strings.Contains(d, "\x00") || !utf8.ValidString(d) || !strings.Contains(d, "3 times, last with SQLSTATE 23514") {
		t.Errorf("%d bytes: %q", len(d), d)
	}
	if d := detail(strings.Repeat("ü", 2000)); len(d) > maxDetailBytes || !utf8.ValidString(d) || detail("short") != "short" {
		t.Errorf("%d bytes: %q", len(d), d)
	}
}

func TestSkip(t *testing.T) {
	for tries, want := range map[int]uint64{-1: 0, 0: 0, 1: 1, 2: 2, 3: 4, 7: 64, 8: 64, 1 << 40: 64} {
		if got := skip(tries); got != want {
			t.Errorf("after %d tries %d passes, want %d", tries, got, want)
		}
	}
}

func TestPause(t *testing.T) {
	for _, tc := range []struct {
		full             bool
		inARow, failures int
		jitter           float64
		want             time.Duration
	}{
		{false, 0, 0, 0, 750 * time.Millisecond},
		{false, 0, 0, 0.5, time.Second},
		{true, 0, 0, 0.5, 0},
		{true, mostInARow, 0, 0.5, time.Second},
		{true, 0, 1, 0.5, 2 * time.Second}, // nothing spins against a database that is not there
		{false, 0, 3, 0.5, 8 * time.Second},
		{false, 0, 4, 0.5, 10 * time.Second},
		{false, 0, 1 << 40, 0.5, 10 * time.Second},
	} {
		if got := pauseAfter(time.Second, tc.full, tc.inARow, tc.failures, tc.jitter); got != tc.want {
			t.Errorf("%+v: %v", tc, got)
		}
	}
	if got := pauseAfter(time.Minute, false, 0, 9, 0.5); got != time.Minute {
		t.Errorf("a longer time between passes than the longest backoff: %v", got)
	}
}

func FuzzI27Judge(f *testing.F) {
	f.Add("s", int64(1), int64(1), `{"session":"s","number":1,"kind":"retry","lineage":"l","execution":"x","epoch":1}`, true)
	f.Add("s", int64(1), int64(1), `{"session":"other","number":1,"kind":"retry","lineage":"l","execution":"x","epoch":1}`, true)
	f.Add("s", int64(1), int64(0), `{`, false)
	f.Fuzz(func(t *testing.T, session string, number, epoch int64, body string, unstarted bool) {
		d := claims.DueContinuation{Session: claims.SessionID(session), Number: number, Epoch: epoch, Body: body, Unstarted: unstarted}
		announce, bad := judge(d)
		if announce && bad != nil || !unstarted && (announce || bad != nil) || unstarted && !announce && bad == nil {
			t.Fatalf("%v and %v", announce, bad)
		}
		if _, poison := claims.DecodeContinuation(d.Session, number, epoch, []byte(body)); announce && poison != nil {
			t.Fatalf("announced: %v", poison)
		}
	})
}

func TestRestEndsWhenSomethingIsDue(t *testing.T) {
	const pause = time.Second
	for _, tc := range []struct {
		gone, due time.Duration
		ok        bool
		wait      time.Duration
		pass      bool
	}{
		{0, 0, false, 250 * time.Millisecond, false},
		{250 * time.Millisecond, 0, false, 250 * time.Millisecond, false},
		{900 * time.Millisecond, 0, false, 100 * time.Millisecond, true},
		{time.Second, 0, false, 0, true},
		{2 * time.Second, 0, true, 0, true},
		{0, 250 * time.Millisecond, true, 250 * time.Millisecond, true},
		{0, 251 * time.Millisecond, true, 250 * time.Millisecond, false}, // asked again by then
		{0, 100 * time.Millisecond, true, 100 * time.Millisecond, true},
		{0, 0, true, leastRest, true},
		{0, -time.Hour, true, leastRest, true},
		{15 * time.Millisecond, 0, true, 5 * time.Millisecond, true},
		{500 * time.Millisecond, 0, true, 0, true},
		{0, time.Hour, true, 250 * time.Millisecond, false}, // never longer than it would have been
		{990 * time.Millisecond, time.Hour, true, 10 * time.Millisecond, true},
	} {
		if wait, pass := restFor(pause, tc.gone, tc.due, tc.ok); wait != tc.wait || pass != tc.pass {
			t.Errorf("%+v: %v, %v", tc, wait, pass)
		}
	}
	if wait, pass := restFor(0, 0, 0, false); wait != 0 || !pass {
		t.Errorf("no pause: %v, %v", wait, pass)
	}
}

// However often and whatever the database answers, a rest is at least the
// shortest one and at most the pause.
func FuzzRest(f *testing.F) {
	f.Add(int64(time.Second), int64(0), uint8(1))
	f.Add(int64(time.Millisecond), int64(time.Hour), uint8(3))
	f.Add(int64(time.Second), int64(-95), uint8(92))
	f.Fuzz(func(t *testing.T, pause, due int64, answers uint8) {
		whole := time.Duration(pause) % (20 * time.Second)
		whole = max(whole, -whole)
		gone := time.Duration(0)
		for i := range 1000 {
			wait, pass := restFor(whole, gone, time.Duration(due), answers>>(i%8)&1 == 1)
			if gone += wait; wait < 0 || !pass && wait == 0 {
				t.Fatalf("waits %v, pass %v", wait, pass)
			}
			if pass {
				if gone < min(whole, leastRest) || gone > whole {
					t.Fatalf("a pause of %v took %v", whole, gone)
				}
				return
			}
		}
		t.Fatalf("a pause of %v does not end", whole)
	})
}

func TestWorkOrder(t *testing.T) {
	tries := []int{0, 2, 0, 1, 0}
	failures := func(i int) int { return tries[i] }
	for pass := range uint64(2 * failedFirst) {
		want := []int{0, 2, 4, 3, 1}
		if pass%failedFirst == failedFirst-1 {
			want = []int{1, 3, 0, 2, 4}
		}
		if got := workOrder(len(tries), failures, pass); !slices.Equal(got, want) {
			t.Errorf("pass %d takes %v, want %v", pass, got, want)
		}
	}
	if got := workOrder(0, failures, 0); len(got) != 0 {
		t.Errorf("no rows: %v", got)
	}
}

func TestQuiet(t *testing.T) {
	for retention, want := range map[time.Duration]time.Duration{0: 0, time.Second: 10 * time.Millisecond, defaultRetention: time.Minute} {
		if got := quiet(retention); got != want {
			t.Errorf("of %v: %v, want %v", retention, got, want)
		}
	}
}

func TestAges(t *testing.T) {
	const s = time.Second
	now := time.Now()
	a := newAges(15 * s)
	for _, tc := range []struct {
		after   time.Duration
		keys    []string
		overdue []time.Duration
		want    time.Duration
	}{
		{0, []string{"a"}, []time.Duration{0}, 0},
		{5 * s, []string{"a", "b"}, []time.Duration{0, 0}, 5 * s}, // since it was first seen
		{6 * s, nil, nil, 5 * s},                                  // touched, away and as old as it was
		{10 * s, []string{"b"}, []time.Duration{60 * s}, 60 * s},  // the store knows
		{11 * s, []string{"b"}, []time.Duration{0}, 61 * s},
		{12 * s, []string{"b"}, []time.Duration{2 * s}, 5 * s},      // it was due anew
		{21 * s, []string{"a", "b"}, []time.Duration{0, 0}, 11 * s}, // a was not seen for 16 s: it is a new one
		{22 * s, []string{"c"}, []time.Duration{0}, 11 * s},
		{37 * s, nil, nil, 0}, // all were last seen too long ago
	} {
		if got := a.see(now.Add(tc.after), tc.keys, func(i int) time.Duration { return tc.overdue[i] }); got != tc.want {
			t.Errorf("after %v: %v, want %v", tc.after, got, tc.want)
		}
	}
	unknown := func(int) time.Duration { return 0 }
	a.see(now.Add(time.Minute), []string{"a"}, func(int) time.Duration { return time.Hour })
	if !a.failed("a") || a.failed("a") || !a.failed("unknown") || a.failures("a") != 2 || a.failures("unknown") != 0 {
		t.Error("a row is not warned of once")
	}
	if a.worked("a"); a.failures("a") != 0 || !a.failed("a") {
		t.Error("a row that was worked on has failed")
	}
	if a.gone("a"); a.see(now.Add(time.Minute+s), nil, unknown) != 0 {
		t.Error("a row that is gone has an age")
	}
	many := make([]string, mostAges+10)
	for i := range many {
		many[i] = fmt.Sprint(i)
	}
	if got := a.see(now.Add(time.Hour), many, func(i int) time.Duration { return time.Duration(i) }); got != mostAges+9 {
		t.Errorf("the oldest, which is not remembered, counts as %v", got)
	}
	if len(a.rows) != mostAges {
		t.Errorf("%d rows are remembered", len(a.rows))
	}
}

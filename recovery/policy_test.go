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
			t.Errorf("claims are at place %d in %d of 4 passes", start, seen)
		}
	}
	if got := rotation(nil, 3); got != nil {
		t.Errorf("no lanes: %v", got)
	}
	if !slices.Equal(rotation(all, ^uint64(0)), rotation(all, 3)) {
		t.Error("the last pass of all is not like the fourth")
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

func TestAges(t *testing.T) {
	now := time.Now()
	a := newAges(15 * time.Second)
	for _, tc := range []struct {
		after time.Duration
		keys  []string
		want  time.Duration
	}{
		{0, []string{"a"}, 0},
		{5 * time.Second, []string{"a", "b"}, 5 * time.Second},
		{6 * time.Second, nil, 0},
		{10 * time.Second, []string{"b"}, 5 * time.Second},
		{21 * time.Second, []string{"a", "b"}, 16 * time.Second}, // a was not seen for 16 s: it is a new one
	} {
		if got := a.see(now.Add(tc.after), tc.keys); got != tc.want {
			t.Errorf("after %v: %v, want %v", tc.after, got, tc.want)
		}
	}
	if !a.warn("a") || a.warn("a") || !a.warn("unknown") {
		t.Error("a row is not warned of once")
	}
	many := make([]string, mostAges+10)
	for i := range many {
		many[i] = fmt.Sprint(i)
	}
	a.see(now.Add(time.Hour), many)
	if len(a.rows) != mostAges {
		t.Errorf("%d rows are remembered", len(a.rows))
	}
}

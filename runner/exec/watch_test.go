package exec

import (
	"fmt"
	"maps"
	"testing"
	"time"
)

// What a guard kills, and when: the steps of a lease whose deadline is over by one of two clocks, and no others.
func TestI7GuardHoldsToTheDeadline(t *testing.T) {
	now := time.Now()
	lease := func(holder string, monotonic, wall time.Duration) string {
		return fmt.Sprintf("=%s %d %d", holder, monotonic, now.Add(wall).UnixNano())
	}
	live := lease("h", time.Second, time.Second)
	for name, tc := range map[string]struct {
		lines []string
		want  map[string]int
		next  time.Duration // when to look again
	}{
		"nothing":              {nil, nil, guardIdle},
		"before it":            {[]string{"+a 7 h", live}, nil, guardLook},
		"shortly before it":    {[]string{"+a 7 h", lease("h", 20*time.Millisecond, time.Second)}, nil, 20 * time.Millisecond},
		"by the monotonic":     {[]string{"+a 7 h", lease("h", 0, time.Second)}, map[string]int{"a": 7}, guardPoll},
		"by the wall clock":    {[]string{"+a 7 h", lease("h", time.Second, 0)}, map[string]int{"a": 7}, guardPoll},
		"moved":                {[]string{"+a 7 h", lease("h", 0, 0), live}, nil, guardLook},
		"of another lease":     {[]string{"+a 7 h", live, "+b 8 i", lease("i", 0, 0)}, map[string]int{"b": 8}, guardPoll},
		"all of a lease":       {[]string{"+a 7 h", "+b 0 h", lease("h", 0, 0)}, map[string]int{"a": 7, "b": 0}, guardPoll},
		"over already":         {[]string{"+a 7 h", "-a", lease("h", 0, 0)}, nil, guardIdle},
		"without a lease":      {[]string{"+a 7", lease("h", 0, 0)}, nil, guardIdle},
		"lines of another age": {[]string{"", "+a", "+a x h", "=h x", "=h x y", "?", "-", "+", "=  "}, nil, guardIdle},
	} {
		w := newWatched()
		for _, line := range tc.lines {
			w.hear(line, now)
		}
		if next := w.next(now); next != tc.next {
			t.Errorf("%s: looks again after %v, want %v", name, next, tc.next)
		}
		var got map[string]int
		w.killDue(now, func(steps map[string]int) bool { got = maps.Clone(steps); return false })
		if !maps.Equal(got, tc.want) {
			t.Errorf("%s: kills %v, want %v", name, got, tc.want)
		}
	}
}

// What can't be killed is looked for less often after a while.
func TestGuardDoesNotSpin(t *testing.T) {
	now, w := time.Now(), newWatched()
	w.hear("+a 7 h", now)
	w.hear(fmt.Sprintf("=h 0 %d", now.UnixNano()), now)
	looks := 0
	for at := now; at.Before(now.Add(2 * guardGiveUp)); at = at.Add(w.next(at)) {
		w.killDue(at, func(map[string]int) bool { looks++; return true })
	}
	if fast, slow := int(guardGiveUp/guardPoll), int(guardGiveUp/guardLook); looks < fast || looks > fast+slow+1 {
		t.Errorf("looked %d times, want %d and %d", looks, fast, slow)
	}
}

// It looks until nothing was there three times in a row, and again when the step says that it has started after all: its
// worker could stand still between the two.
func TestI7GuardLooksUntilNothingIsThere(t *testing.T) {
	now, w := time.Now(), newWatched()
	answers := []bool{true, false, false, true, false, false, false}
	looks := 0
	kill := func(map[string]int) bool { looks++; return answers[(looks-1)%len(answers)] }
	w.hear("+a 0 h", now)
	w.hear(fmt.Sprintf("=h 0 %d", now.UnixNano()), now)
	for w.next(now) == guardPoll {
		w.killDue(now, kill)
	}
	if looks != len(answers) {
		t.Errorf("looked %d times, want %d", looks, len(answers))
	}
	w.killDue(now, kill)
	if looks != len(answers) {
		t.Error("looked for what is gone")
	}
	w.hear("+a 7 h", now)
	w.killDue(now, kill)
	if looks != len(answers)+1 {
		t.Error("did not look for what started late")
	}
	w.hear("-a", now)
	if w.killDue(now, kill); len(w.deadlines) != 0 || looks != len(answers)+1 {
		t.Errorf("remembers %v, looked %d times", w.deadlines, looks)
	}
}

package main

import (
	"cmp"
	"fmt"
	"strings"
	"testing"
	"time"

	"reveille/internal/torture/truth"
)

// told makes a verifier of what was told: at, session, type, execution, epoch.
func told(began time.Time, events ...event) *verifier {
	v := &verifier{h: newHistory()}
	for i, e := range events {
		e.Seq = int64(i) + 1
		v.events = append(v.events, e)
		v.h.first[fmt.Sprintf("%s:%d", e.Session, e.Seq)] = e.Time.Add(100 * time.Millisecond)
	}
	v.h.began = began
	return v
}

func TestLinear(t *testing.T) {
	began := time.Now()
	at := func(n int) time.Time { return began.Add(time.Duration(n) * time.Second) }
	started := func(n int, x string, epoch int64) event { return event{"s", "execution.started", x, 0, epoch, at(n)} }
	ended := func(n int, x string) event { return event{"s", "execution.ended", x, 0, 0, at(n)} }
	call := func(n int, x string, epoch int64) truth.Line {
		return truth.Line{At: at(n), What: truth.Start, Session: "s", Execution: x, Epoch: epoch, Worker: "w"}
	}
	for name, tc := range map[string]struct {
		events []event
		calls  []truth.Line
		stop   bool
		want   string
	}{
		"one after the other": {
			events: []event{started(0, "a", 1), ended(2, "a"), started(4, "b", 2), ended(6, "b")},
			calls:  []truth.Line{call(1, "a", 1), call(5, "b", 2)},
		},
		"two at once": {
			events: []event{started(0, "a", 1), started(2, "b", 2), ended(4, "a"), ended(6, "b")},
			want:   "not linearizable",
		},
		"an epoch twice": {
			events: []event{started(0, "a", 1), ended(2, "a"), started(4, "b", 1), ended(6, "b")},
			want:   "not linearizable",
		},
		"called when it was another's": {
			events: []event{started(0, "a", 1), ended(2, "a"), started(4, "b", 2), ended(8, "b")},
			calls:  []truth.Line{call(1, "a", 1), call(6, "a", 1)},
			want:   "not linearizable",
		},
		"called when it was another's, by one that had been asleep": {
			events: []event{started(0, "a", 1), ended(2, "a"), started(4, "b", 2), ended(8, "b")},
			calls:  []truth.Line{call(1, "a", 1), call(6, "a", 1)},
			stop:   true,
		},
	} {
		v := told(began, tc.events...)
		v.lines = tc.calls
		if tc.stop {
			v.h.stops["w"] = []fault{{from: at(2), to: at(6)}}
		}
		v.linear()
		got := strings.Join(v.found, "\n")
		if (tc.want == "") != (got == "") || !strings.Contains(got, tc.want) {
			t.Errorf("%s: %q, want %q", name, got, tc.want)
		}
	}
}

func TestSchedule(t *testing.T) {
	w := &world{nodes: []*node{{mounted: true}}}
	plan, left := schedule(w, 7, time.Minute, nil)
	if len(left) > 0 {
		t.Errorf("left out: %q", left)
	}
	times := map[string]int{}
	for _, p := range plan {
		times[p.kind.name]++
		if p.at <= 0 || p.at >= time.Minute {
			t.Errorf("%s at %v", p.kind.name, p.at)
		}
	}
	for _, k := range kinds {
		if times[k.name] != 1 {
			t.Errorf("%s comes %d times in a minute, want once", k.name, times[k.name])
		}
	}
	again, _ := schedule(w, 7, time.Minute, nil)
	for i := range plan {
		if plan[i].at != again[i].at || plan[i].kind.name != again[i].kind.name || plan[i].rng.Uint64() != again[i].rng.Uint64() {
			t.Fatalf("fault %d is %v of %q, and was %v of %q", i, again[i].at, again[i].kind.name, plan[i].at, plan[i].kind.name)
		}
	}
	if plan, _ := schedule(w, 7, time.Hour, nil); len(plan) < 1000 {
		t.Errorf("%d faults in an hour", len(plan))
	}
	_, left = schedule(&world{external: true, nodes: []*node{{}, {}, {}}}, 7, time.Minute, nil)
	if got := strings.Join(left, ", "); got != "crash database, lose stream tail, disk full" {
		t.Errorf("left out with a cluster and a database of somebody's: %q", got)
	}
}

func TestOverlaps(t *testing.T) {
	began := time.Now()
	at := func(n int) time.Time { return began.Add(time.Duration(n) * time.Second) }
	for name, tc := range map[string]struct {
		kind    string // of the first
		killed  bool   // the later one was, so it says no end
		stopped string
		from    int
		to      int
		wrong   int
	}{
		"nobody was stopped":                    {wrong: 1},
		"the first was, until the end":          {stopped: "a", from: 1, to: 8},
		"the first was, and is a command":       {kind: truth.Exec, stopped: "a", from: 1, to: 8, wrong: 1},
		"the first was, and went on for long":   {stopped: "a", from: 1, to: 6, wrong: 1},
		"the later one was, and ended at once":  {stopped: "b", from: 1, to: 6},
		"the later one was, and not at the end": {stopped: "b", from: 1, to: 4, wrong: 1},
		"the later one was, and was killed":     {kind: truth.Exec, killed: true, stopped: "b", from: 1, to: 6},
	} {
		line := func(n int, what, step, worker string) truth.Line {
			return truth.Line{At: at(n), What: what, Kind: cmp.Or(tc.kind, truth.Go), Session: "s", Step: step, Worker: worker}
		}
		first := line(0, truth.Start, "1", "a")
		overlap := line(5, truth.Overlap, "2", "b")
		overlap.Holder = &first
		lines := []truth.Line{first, overlap, line(5, truth.Start, "2", "b"), line(8, truth.End, "1", "a")}
		if !tc.killed {
			lines = append(lines, line(6, truth.End, "2", "b"))
		}
		v := &verifier{h: newHistory(), lines: lines}
		v.h.stops[tc.stopped] = []fault{{from: at(tc.from), to: at(tc.to)}}
		if tc.stopped == "" {
			clear(v.h.stops)
		}
		v.overlaps()
		if len(v.found) != tc.wrong || len(v.counts.overlaps) != 1-tc.wrong {
			t.Errorf("%s: %d violations and %d overlaps that are allowed, want %d", name, len(v.found), len(v.counts.overlaps), tc.wrong)
		}
	}
}

package scantest

import (
	"slices"
	"strings"
	"testing"
	"time"

	"reveille/claims"
	"reveille/recovery"
)

const batch = 100

// S2: 300 claims whose step rows don't decode are older than a good one. Three
// passes quarantine them, the fourth recovers the good one.
func TestS2I29ThreeHundredPoisonClaims(t *testing.T) {
	e := newEnv(t)
	worker := e.lease("worker")
	e.many("poison", 3*batch, func(id claims.SessionID) { e.wake(id, worker) })
	e.wake("good", worker)
	e.exec("UPDATE claims SET step = 'not JSON' WHERE session_id LIKE 'poison%'")
	e.expire(worker)
	s := e.scanner(e.parts(), recovery.Options{Batch: batch})
	for pass := 1; pass <= 3; pass++ {
		r := s.Pass(t.Context()).Lanes[recovery.LaneClaims]
		if r.Seen != batch || r.Quarantined != batch || r.Done+r.Failed+r.Left != 0 {
			t.Fatalf("pass %d: %+v", pass, r)
		}
		if n := e.row("SELECT count(*) FROM quarantines WHERE reason = 'invalid_step'"); n != int64(pass*batch) {
			t.Fatalf("after pass %d %v are quarantined", pass, n)
		}
	}
	if e.number("claims", "good") != int64(1) || len(e.announced) != 0 {
		t.Fatal("the good one was not behind all others")
	}
	if r := s.Pass(t.Context()).Lanes[recovery.LaneClaims]; r.Seen != 1 || r.Done != 1 || r.Quarantined != 0 {
		t.Errorf("pass 4: %+v", r)
	}
	e.tail("good", `execution.ended {"outcome":"recovered"}`)
	if n := e.row("SELECT count(*) FROM quarantines"); n != int64(3*batch) || e.number("continuations", "good") != int64(1) {
		t.Errorf("%v are quarantined, %v continuations of the good one", n, e.number("continuations", "good"))
	}
	if !slices.Equal(e.announced, []claims.SessionID{"good"}) {
		t.Errorf("announced %v", e.announced)
	}
}

// S2: the same with continuations.
func TestS2I29ThreeHundredPoisonContinuations(t *testing.T) {
	e := newEnv(t)
	worker := e.lease("worker")
	e.many("poison", 3*batch, func(id claims.SessionID) { e.handOver(e.wake(id, worker)) })
	e.handOver(e.wake("good", worker))
	e.exec("UPDATE continuations SET body = 'not JSON' WHERE session_id LIKE 'poison%'")
	s := e.scanner(e.parts(), recovery.Options{Batch: batch})
	for pass := 1; pass <= 3; pass++ {
		r := s.Pass(t.Context()).Lanes[recovery.LaneRecovery]
		if r.Seen != batch || r.Quarantined != batch || r.Done+r.Failed+r.Left != 0 {
			t.Fatalf("pass %d: %+v", pass, r)
		}
		if n := e.row("SELECT count(*) FROM quarantines WHERE reason = 'invalid_continuation'"); n != int64(pass*batch) {
			t.Fatalf("after pass %d %v are quarantined", pass, n)
		}
	}
	if len(e.announced) != 0 {
		t.Fatalf("announced %v: the good one was not behind all others", e.announced)
	}
	if r := s.Pass(t.Context()).Lanes[recovery.LaneRecovery]; r.Seen != 1 || r.Done != 1 {
		t.Errorf("pass 4: %+v", r)
	}
	if n := e.row("SELECT count(*) FROM quarantines"); n != int64(3*batch) || !slices.Equal(e.announced, []claims.SessionID{"good"}) {
		t.Errorf("%v are quarantined, announced %v", n, e.announced)
	}
	if next := e.acquire("good", e.lease("worker")); next.Step.Continues == nil || next.Step.Continues.Kind != claims.KindHandover {
		t.Errorf("the good one goes on as %+v", next.Step)
	}
}

// S3: a batch and one row more in either lane fail: nobody starts them, or they
// can't even be announced, and they are due again at once. One pass makes two
// batches of first announcements. A fresh batch of either kind comes in behind
// them: it is announced within the passes that there are batches, in both lanes.
func TestS3I29TwoBatchesOfAnnouncements(t *testing.T) {
	for name, refused := range map[string]bool{"never started": false, "never announced": true} {
		t.Run(name, func(t *testing.T) {
			e := newEnv(t)
			worker := e.lease("worker")
			continuation := func(id claims.SessionID) { e.handOver(e.wake(id, worker)) }
			ordinary := func(id claims.SessionID) { e.wake(id, "") }
			e.many("c-old", batch+1, continuation)
			e.many("o-old", batch+1, ordinary)
			e.refuses = refused
			s := e.scanner(e.parts(), recovery.Options{Batch: batch, Reannounce: time.Microsecond})
			first := map[claims.SessionID]bool{}
			pass := func() (fresh map[string]int) {
				e.announced = nil
				p := s.Pass(t.Context())
				for _, lane := range []recovery.Lane{recovery.LaneRecovery, recovery.LaneOrdinary} {
					if r := p.Lanes[lane]; r.Seen != batch || r.Skipped+r.Left != 0 || (r.Failed == batch) != refused || (r.Done == batch) == refused {
						t.Errorf("lane %s: %+v", lane, r)
					}
				}
				fresh = map[string]int{}
				for _, id := range e.announced {
					if kind, _, _ := strings.Cut(string(id), "0"); !first[id] {
						first[id] = true
						fresh[kind]++
					}
				}
				return fresh
			}
			if got := pass(); got["c-old"] != batch || got["o-old"] != batch || len(e.announced) != 2*batch {
				t.Fatalf("the first pass made %d announcements, %v of them first ones", len(e.announced), got)
			}
			e.many("c-new", batch, continuation)
			e.many("o-new", batch, ordinary)
			for n, want := range []map[string]int{
				{"c-old": 1, "o-old": 1}, // and 99 of those that failed before the fresh ones were there
				{"c-new": batch - 1, "o-new": batch - 1},
				{"c-new": 1, "o-new": 1},
			} {
				got := pass()
				for _, kind := range []string{"c-old", "o-old", "c-new", "o-new"} {
					if got[kind] != want[kind] {
						t.Errorf("pass %d made first announcements %v, want %v", n+2, got, want)
						break
					}
				}
			}
			if len(first) != 2*(2*batch+1) {
				t.Errorf("%d of %d sessions were announced in four passes", len(first), 2*(2*batch+1))
			}
		})
	}
}

// S4: a continuation that does not decode is in nobody's way: the wake of
// another session and the good continuation of a third are announced in the
// pass that quarantines it.
func TestS4I29MalformedContinuationBlocksNobody(t *testing.T) {
	e := newEnv(t)
	worker := e.lease("worker")
	e.handOver(e.wake("malformed", worker))
	e.exec("UPDATE continuations SET body = '{' WHERE session_id = 'malformed'")
	e.handOver(e.wake("continued", worker))
	e.wake("woken", "")
	p := e.scanner(e.parts(), recovery.Options{}).Pass(t.Context())
	if r := p.Lanes[recovery.LaneRecovery]; r.Quarantined != 1 || r.Done != 1 || r.Failed != 0 {
		t.Errorf("recovery: %+v", r)
	}
	if r := p.Lanes[recovery.LaneOrdinary]; r.Done != 1 {
		t.Errorf("ordinary: %+v", r)
	}
	slices.Sort(e.announced)
	if !slices.Equal(e.announced, []claims.SessionID{"continued", "woken"}) || e.reason("malformed") != "invalid_continuation" {
		t.Errorf("announced %v, quarantined as %v", e.announced, e.reason("malformed"))
	}
	for _, id := range e.announced {
		if next := e.acquire(id, e.lease("worker")); len(next.Step.Inputs) != 1 {
			t.Errorf("%s starts %+v", id, next.Step)
		}
	}
}

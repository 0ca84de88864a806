package crdb_test

import (
	"fmt"
	"slices"
	"testing"
	"time"

	"reveille/claims"
)

// TestNextDue: a scanner is told when it must look again, at the time of what waits and not at the time of a mark that
// is only there in case its process dies.
func TestNextDue(t *testing.T) {
	base := newRig(t)
	want := func(r *rig, within, least, most time.Duration) {
		t.Helper()
		in, ok, err := r.store.NextDue(r.ctx(), within)
		r.ok(err)
		if ok != (most > 0) || ok && (in < least || in > most) {
			t.Fatalf("due in %v (%v), want %v to %v", in, ok, least, most)
		}
	}
	want(base, time.Hour, 0, 0)

	r := base.fresh("ready") // its mark is in two seconds, and it is ready now
	r.wake(input("a"))
	want(r, time.Hour, 0, 0)

	r = base.fresh("retry")
	r.run(input("a"))
	r.ok(r.finish(retried)) // its backoff
	want(r, 2*time.Hour, 50*time.Minute, time.Hour)

	r = base.fresh("late")
	r.wakeAt(input("a"), 30*time.Minute)
	want(r, time.Hour, 25*time.Minute, 30*time.Minute)
	want(r, time.Minute, 0, 0)

	r = base.fresh("wake")
	r.wakeAt(nil, 20*time.Minute)
	want(r, time.Hour, 15*time.Minute, 20*time.Minute)

	// An earlier time moves a mark that was set in case its process dies.
	r = base.fresh("moved")
	r.wake(input("a"))
	r.ok(r.acquire())
	r.ok(r.finish(nil))
	r.wakeAt(input("b"), time.Second)
	if at := scan[bool](r, "SELECT ready_due_at <= ready_at FROM sessions WHERE session_id = 'moved'"); !at {
		t.Fatal("a delayed input waits for a mark that is later")
	}
	base.checkAll()
}

// TestI29ExpiredClaimsAreMerged: those first that were touched longest ago, whoever held them: of a hundred dead
// workers, of one with many claims, of one whose lease row is gone, revoked ones of a live worker; never a live one.
func TestI29ExpiredClaimsAreMerged(t *testing.T) {
	r := newRig(t)
	insert := func(holder claims.HolderID, name, revoked string, age int) {
		r.exec(`INSERT INTO claims (session_id, execution_id, ran_as, holder, scanner, epoch, phase, reason, revoked, verdict, steps, acquired_at, phase_at, due_at)
			SELECT $1::TEXT, u.id, u.id, $2::UUID, FALSE, 1, 'running', '', $3::TEXT, '', 1, u.at, u.at, u.at
			FROM (SELECT gen_random_uuid() AS id, statement_timestamp() - $4::INT8 * INTERVAL '1 second' AS at) AS u`, name, string(holder), revoked, int64(age))
	}
	var want []string // the oldest first
	type row struct {
		name string
		age  int
	}
	var rows []row
	add := func(holder claims.HolderID, revoked string, ages ...int) {
		for _, age := range ages {
			name := fmt.Sprintf("s%06d", age)
			insert(holder, name, revoked, age)
			rows = append(rows, row{name, age})
		}
	}
	many := r.lease("worker", longLease)
	for age := 1000; age < 1200; age++ { // more than a page, older than the rest
		add(many, "", age)
	}
	r.expire(many)
	for i := range 40 {
		h := r.lease("worker", longLease)
		add(h, "", 100+i, 500+i)
		r.expire(h)
	}
	add(claims.HolderID(newID()), "", 50, 900) // nobody has its lease row
	live := r.lease("worker", longLease)
	add(live, "unknown", 70, 2000)
	insert(live, "live", "", 5000)

	slices.SortFunc(rows, func(a, b row) int { return b.age - a.age })
	for _, row := range rows {
		want = append(want, row.name)
	}
	for _, limit := range []int{1, 7, 100, 1000} {
		var found []claims.Candidate
		for range 4 { // the walk that finds the lost lease goes on from call to call
			var err error
			found, err = r.store.ExpiredClaims(r.ctx(), limit)
			r.ok(err)
			if limit < 1000 || len(found) == len(want) {
				break
			}
		}
		var got []string
		for _, c := range found {
			got = append(got, string(c.Session))
			if c.Revoked == claims.None && c.Session != "s000050" && c.Session != "s000900" && c.Overdue <= 0 {
				t.Errorf("%s is overdue since %v", c.Session, c.Overdue)
			}
		}
		expected := slices.Clone(want)
		if limit < 1000 { // the one without a lease row may come a call later
			expected = slices.DeleteFunc(expected, func(s string) bool { return s == "s000900" || s == "s000050" })
			got = slices.DeleteFunc(got, func(s string) bool { return s == "s000900" || s == "s000050" })
			expected = expected[:min(len(got), len(expected))]
			if len(found) != limit {
				t.Errorf("%d claims found, the limit is %d", len(found), limit)
			}
		}
		if !slices.Equal(got, expected) {
			t.Errorf("limit %d: found %v, want %v", limit, got, expected)
		}
	}
}

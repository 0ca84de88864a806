package recovery

import (
	"cmp"
	"fmt"
	"slices"
	"strings"
	"time"

	"reveille/claims"
)

// Lane is one kind of row that a pass looks at; it is the label of the metrics.
type Lane string

// The lanes of docs/design.md section 6.
const (
	LaneClaims    Lane = "claims"    // claims of dead holders, or revoked
	LaneRecovery  Lane = "recovery"  // continuations that are due and nobody started
	LaneOrdinary  Lane = "ordinary"  // other ready sessions that nobody started
	LaneRelay     Lane = "relay"     // sessions whose unpublished events are overdue
	LaneRetention Lane = "retention" // sessions that keep something past its retention
)

// allLanes in the order of the first pass.
func allLanes() []Lane {
	return []Lane{LaneClaims, LaneRecovery, LaneOrdinary, LaneRelay, LaneRetention}
}

// rotation is the order of the lanes in a pass, counted from 0: each pass
// starts with the lane after the one that the pass before it started with, so
// that none is always behind another one's time box.
func rotation(lanes []Lane, pass uint64) []Lane {
	n := len(lanes)
	if n == 0 {
		return nil
	}
	first := int(pass % uint64(n))
	out := make([]Lane, 0, n)
	out = append(out, lanes[first:]...)
	return append(out, lanes[:first]...)
}

// failedFirst is each how many passes the rows that failed before come first.
const failedFirst = 4

// workOrder is the order in which a lane takes n rows. They were touched
// together and come back together, in the same order: where one that hangs came
// first each time, the time box would end before the others each time. So those
// that failed least come first, and in each failedFirst-th pass last, since who
// failed once must not wait for ever for who is new.
func workOrder(n int, failures func(i int) int, pass uint64) []int {
	out := make([]int, n)
	for i := range out {
		out[i] = i
	}
	sign := 1
	if pass%failedFirst == failedFirst-1 {
		sign = -1
	}
	slices.SortStableFunc(out, func(a, b int) int { return sign * cmp.Compare(failures(a), failures(b)) })
	return out
}

// action is what to do with a claim that was found expired.
type action int

const (
	leaveAlone action = iota
	endIt             // its step is not to be recovered: EndExpired removes or quarantines it (I26)
	takeItOver        // take over, then convert
)

// decide is what to do with a candidate. That it is expired is the store's
// word; the transaction that acts on it judges again, under its fence. A phase
// that this version does not know is left to one that does.
func decide(c claims.Candidate) action {
	switch c.Phase {
	case claims.Running, claims.Cancelling, claims.Cancelled:
	default:
		return leaveAlone
	}
	switch claims.Next(claims.State{Phase: c.Phase, Revoked: c.Revoked}, claims.OpScan) {
	case claims.TakeOver:
		return takeItOver
	case claims.Remove, claims.ToQuarantine:
		return endIt
	default:
		return leaveAlone
	}
}

// judge is what to do with a continuation that was found due: nothing where
// somebody has its session, quarantine where it is poison (I27), else announce.
func judge(d claims.DueContinuation) (announce bool, bad *claims.Poison) {
	if !d.Unstarted {
		return false, nil
	}
	_, bad = claims.DecodeContinuation(d.Session, d.Number, d.Epoch, []byte(d.Body))
	if bad == nil && d.Superseded {
		bad = claims.SupersededContinuation(d.Number)
	}
	return bad == nil, bad
}

// Bounds of the attempts to convert one claim in one pass.
const (
	// refusalsOfOneClass is how many fresh transactions in a row the database
	// must refuse with the same class before the values are to blame (I27): on
	// PostgreSQL one 23505 may be a serialization conflict.
	refusalsOfOneClass = 3
	// mostConversions bounds the attempts where the class changes between them.
	mostConversions = 6
)

// refusals counts what a claim's conversions were refused with.
type refusals struct {
	class string // of the last one, two characters of SQLSTATE
	run   int    // how many in a row were of that class
	tried int
}

// next is what to do after a conversion that failed.
type next int

const (
	tryAgain   next = iota // in a fresh transaction, now
	tryLater               // in a later pass: the error says nothing about the claim's values
	quarantine             // the database does not take it (I27)
)

// after counts one failed conversion. code is the SQLSTATE that it was refused
// with; an empty one, or another class than 22 and 23, was no refusal.
func (r refusals) after(code string) (refusals, next) {
	r.tried++
	class := ""
	if len(code) == 5 {
		class = code[:2]
	}
	if class != "22" && class != "23" {
		return refusals{tried: r.tried}, tryLater
	}
	if class == r.class {
		r.run++
	} else {
		r.class, r.run = class, 1
	}
	switch {
	case r.run >= refusalsOfOneClass:
		return r, quarantine
	case r.tried >= mostConversions:
		return r, tryLater
	default:
		return r, tryAgain
	}
}

// maxDetailBytes bounds what is told of a row or of an error of the database.
const maxDetailBytes = 1024

// refusalDetail tells an operator how the database refused a conversion.
func refusalDetail(r refusals, code string, err error) string {
	s := fmt.Sprintf("the database refused its conversion %d times, last with SQLSTATE %s: %v", r.run, code, err)
	return detail(strings.ReplaceAll(strings.ToValidUTF8(s, "\uFFFD"), "\x00", "")) // no TEXT holds a NUL
}

// detail bounds a text: a row that is poison may say anything, of any length.
func detail(s string) string {
	if len(s) > maxDetailBytes {
		s = strings.ToValidUTF8(s[:maxDetailBytes], "")
	}
	return s
}

// longestSkip bounds how many passes a claim waits whose conversion keeps failing.
const longestSkip = 64

// skip is how many passes a claim waits after that many failed tries, so that
// one that never succeeds costs less and less and the others keep their places.
func skip(tries int) uint64 {
	if tries < 1 {
		return 0
	}
	return min(uint64(1)<<min(tries-1, 32), longestSkip)
}

// Bounds of the pause between two passes.
const (
	// longestPause bounds the backoff while the database does not answer.
	longestPause = 10 * time.Second
	// mostInARow bounds the passes without a pause while batches are full: what
	// comes back after Reannounce must not keep the scanner spinning.
	mostInARow = 20
)

// pauseAfter is the time between a pass and the next. full: a batch was full,
// and there is more; inARow counts the passes since the last pause; failures
// counts the passes in a row that the database answered nothing to. jitter, in
// [0,1), spreads scanners that started together over ±25 %.
func pauseAfter(every time.Duration, full bool, inARow, failures int, jitter float64) time.Duration {
	if full && failures == 0 && inARow < mostInARow {
		return 0
	}
	d := every
	for range min(failures, 32) {
		if d >= longestPause {
			break
		}
		d = min(d*2, max(longestPause, every))
	}
	return d - d/4 + time.Duration(jitter*float64(d/2))
}

const (
	// leastRest is the shortest pause that something due makes: it bounds the
	// passes of a second, whatever the database answers.
	leastRest = 20 * time.Millisecond
	// restParts: a pause is waited out in this many parts, between which the
	// scanner asks again what is due next. What comes in during a pause, to be due
	// before its end, is late by at most one of them.
	restParts = 4
)

// restFor is how long to wait now, of a pause of which some is gone, and whether
// a pass follows then. due is in how long something that waits for its time is
// due, where there is any: the pause ends then, and not up to a pause later.
func restFor(pause, gone, due time.Duration, ok bool) (wait time.Duration, pass bool) {
	left := max(0, pause-gone)
	part := min(left, max(pause/restParts, leastRest))
	if at := max(due, leastRest-gone, 0); ok && at <= part {
		return at, true
	}
	return part, part == left
}

// Bounds of the retention lane, which nobody waits for.
const (
	// retentionShare of a time box is the retention lane's.
	retentionShare = 5
	// retentionBatches is how many batches of rows one session's place in the lane deletes.
	retentionBatches = 10
	// retentionPart of the retention is how late the lane may look, but at most
	// longestQuiet.
	retentionPart = 100
	longestQuiet  = time.Minute
)

// quiet is how long the retention lane is not visited after it found nothing.
func quiet(retention time.Duration) time.Duration {
	return min(retention/retentionPart, longestQuiet)
}

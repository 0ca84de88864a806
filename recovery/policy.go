package recovery

import (
	"fmt"
	"strings"
	"time"

	"reveille/claims"
)

// Lane is one kind of row that a pass looks at; it is the label of the metrics.
type Lane string

// The lanes of design.md section 6.
const (
	LaneClaims   Lane = "claims"   // claims of dead holders, or revoked
	LaneRecovery Lane = "recovery" // continuations that are due and nobody started
	LaneOrdinary Lane = "ordinary" // other ready sessions that nobody started
	LaneRelay    Lane = "relay"    // sessions whose unpublished events are overdue
)

// allLanes in the order of the first pass.
func allLanes() []Lane { return []Lane{LaneClaims, LaneRecovery, LaneOrdinary, LaneRelay} }

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

// maxDetailBytes bounds what a quarantine says about an error of the database.
const maxDetailBytes = 1024

// refusalDetail tells an operator how the database refused a conversion.
func refusalDetail(r refusals, code string, err error) string {
	s := fmt.Sprintf("the database refused its conversion %d times, last with SQLSTATE %s: %v", r.run, code, err)
	s = strings.ReplaceAll(strings.ToValidUTF8(s, "\uFFFD"), "\x00", "") // no TEXT holds a NUL
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

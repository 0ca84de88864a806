package doctor

import (
	"context"
	"fmt"
	"time"
)

// clockSamples is how often a clock is asked: the shortest round trip counts.
const clockSamples = 5

// interval is a difference of two clocks, and how sure that is: the answer was
// made somewhere on its way, so it is off by at most half the round trip.
type interval struct{ ahead, unsure time.Duration }

// measure compares a clock with this machine's.
func (d *doctor) measure(ctx context.Context, ask func(context.Context) (time.Time, error)) (interval, error) {
	best := interval{unsure: -1}
	for range clockSamples {
		before := d.now()
		at, err := ask(ctx)
		half := d.now().Sub(before) / 2
		if err != nil {
			if best.unsure < 0 {
				return best, err
			}
			break
		}
		if best.unsure < 0 || half < best.unsure {
			best = interval{at.Sub(before.Add(half)), half}
		}
	}
	return best, nil
}

func (d *doctor) databaseClock(ctx context.Context) []Finding {
	if d.store == nil {
		return nil
	}
	ahead, err := d.measure(ctx, d.store.Now)
	if err != nil {
		return []Finding{bad(Fail, checkClock, fixDatabaseErrors, "%s", oneLine(err))}
	}
	d.ahead = &ahead
	return []Finding{ahead.judge("the database", "this machine", d.MaxClockSkew)}
}

// streamClock compares the clock that stamps commands with the database's, or
// with this machine's where there is no database.
func (d *doctor) streamClock(ctx context.Context) []Finding {
	if d.conn == nil || len(d.there) == 0 {
		return nil
	}
	stream := d.there[0].Want.Name
	ahead, err := d.measure(ctx, func(ctx context.Context) (time.Time, error) { return d.conn.StreamTime(ctx, stream) })
	if err != nil {
		return []Finding{bad(Fail, checkClock, fixNoAnswer, "the time of stream %s: %s", stream, oneLine(err))}
	}
	other := "this machine"
	if d.ahead != nil {
		other = "the database"
		ahead = interval{ahead.ahead - d.ahead.ahead, ahead.unsure + d.ahead.unsure}
	}
	return []Finding{ahead.judge("NATS", other, d.MaxClockSkew)}
}

// judge says what a difference means beside the skew that workers are told to
// expect. Only what is sure is held against it.
func (i interval) judge(one, other string, limit time.Duration) Finding {
	way := "ahead of"
	if i.ahead < 0 {
		way = "behind"
	}
	found := fmt.Sprintf("%s is %v %s %s, give or take %v (--max-clock-skew is %v)",
		one, shown(i.ahead.Abs()), way, other, shown(i.unsure), limit)
	sure := i.ahead.Abs() - i.unsure
	const fix = "let both follow one time server (NTP), or give all workers and scanners a larger --max-clock-skew, and --lease with it"
	switch {
	case sure > limit:
		return bad(Fail, checkClock, fix, "%s", found)
	case sure > limit/2:
		return bad(Warn, checkClock, fix, "%s", found)
	case i.unsure > limit/2:
		return bad(Warn, checkClock, "ask from where the way is shorter: where workers run", "%s: the answers take too long to tell more", found)
	}
	return ok(checkClock, "%s", found)
}

// shown is a time to a tenth of a millisecond.
func shown(d time.Duration) time.Duration { return d.Round(100 * time.Microsecond) }

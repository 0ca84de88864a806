package recovery

import (
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"reveille/claims"
)

// metrics of a scanner, as docs/contract.md section 5 names them.
type metrics struct {
	passSeconds *prometheus.HistogramVec
	rows        *prometheus.CounterVec
	oldest      *prometheus.GaugeVec
	quarantines *prometheus.CounterVec
}

func newMetrics() *metrics {
	m := &metrics{
		passSeconds: prometheus.NewHistogramVec(prometheus.HistogramOpts{
			Name: "reveille_scan_pass_seconds", Help: "Time of one visit of a scanner to a lane.",
			Buckets: prometheus.ExponentialBuckets(0.001, 4, 8),
		}, []string{"lane"}),
		rows: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "reveille_scan_rows_total", Help: "Rows that scanners looked at, by lane and what became of them.",
		}, []string{"lane", "result"}),
		oldest: prometheus.NewGaugeVec(prometheus.GaugeOpts{
			Name: "reveille_oldest_seconds",
			Help: "For how long the oldest of the rows that a scanner found in a lane lately, and did not end, had been due. 0 where there was none.",
		}, []string{"lane"}),
		quarantines: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "reveille_quarantines_total", Help: "Sessions that scanners quarantined, by reason.",
		}, []string{"reason"}),
	}
	for _, l := range allLanes() {
		if l != LaneRetention { // what is kept too long hurts nobody
			m.oldest.WithLabelValues(string(l))
		}
		m.passSeconds.WithLabelValues(string(l))
		for _, o := range []outcome{done, quarantined, left, failed, skipped} {
			m.rows.WithLabelValues(string(l), string(o))
		}
	}
	return m
}

func (m *metrics) collectors() []prometheus.Collector {
	return []prometheus.Collector{m.passSeconds, m.rows, m.oldest, m.quarantines}
}

func (m *metrics) quarantined(r claims.Reason) { m.quarantines.WithLabelValues(string(r)).Inc() }

// seenAgainWithin, in times of what a touched row stays away and the time
// between passes, is how long a row is remembered that is not seen any more.
const seenAgainWithin = 3

// mostAges bounds the rows of a lane that are remembered; more than these are
// dated only while they are seen. A row is some hundred bytes.
const mostAges = 10_000

// ages remembers since when the rows of a lane are due, by the scanner's own
// monotonic clock: the store says how long a row is overdue, and where it
// doesn't know, it is since the scanner first saw it. A row that was touched is
// away for a while, and counts meanwhile as old as it was.
type ages struct {
	rows map[string]*age
	// keep is how long a row is remembered that is not seen any more.
	keep time.Duration
}

type age struct {
	since, last time.Time
	tries       int // that failed, in a row
}

func newAges(keep time.Duration) *ages { return &ages{rows: map[string]*age{}, keep: keep} }

// see notes the rows of a pass and how long each is overdue, 0 where that is
// not known, and answers the age of the oldest of those that are remembered.
func (a *ages) see(now time.Time, keys []string, overdue func(i int) time.Duration) (oldest time.Duration) {
	for k, r := range a.rows {
		if now.Sub(r.last) > a.keep {
			delete(a.rows, k)
		}
	}
	for i, k := range keys {
		r, ok := a.rows[k]
		if !ok {
			r = &age{since: now}
			if len(a.rows) < mostAges {
				a.rows[k] = r
			}
		}
		if d := overdue(i); d > 0 {
			r.since = now.Add(-d)
		}
		r.last = now
		oldest = max(oldest, now.Sub(r.since))
	}
	for _, r := range a.rows {
		oldest = max(oldest, r.last.Sub(r.since))
	}
	return oldest
}

// gone forgets a row.
func (a *ages) gone(key string) { delete(a.rows, key) }

// failed counts a try that failed, and reports whether it was the first in a row.
func (a *ages) failed(key string) (first bool) {
	r, ok := a.rows[key]
	if !ok {
		return true
	}
	r.tries++
	return r.tries == 1
}

// worked forgets that tries failed.
func (a *ages) worked(key string) {
	if r, ok := a.rows[key]; ok {
		r.tries = 0
	}
}

// failures is how many tries failed in a row.
func (a *ages) failures(key string) int {
	if r, ok := a.rows[key]; ok {
		return r.tries
	}
	return 0
}

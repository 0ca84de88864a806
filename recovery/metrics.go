package recovery

import (
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"reveille/claims"
)

// metrics of a scanner, as contract.md section 5 names them.
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
			Help: "For how long at least the oldest row of a lane's last pass has been due: since this scanner first saw it. 0 where there was none.",
		}, []string{"lane"}),
		quarantines: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "reveille_quarantines_total", Help: "Sessions that scanners quarantined, by reason.",
		}, []string{"reason"}),
	}
	for _, l := range allLanes() {
		m.oldest.WithLabelValues(string(l))
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
// not dated. A row is some hundred bytes.
const mostAges = 10_000

// ages remembers since when a scanner sees which rows of a lane, by its own
// monotonic clock. What the store gives with a row is its place in the lane,
// which each touch moves, and no time since when it is due.
type ages struct {
	rows map[string]*age
	// keep is how long a row is remembered that is not seen any more.
	keep time.Duration
}

type age struct {
	first, last time.Time
	warned      bool
}

func newAges(keep time.Duration) *ages { return &ages{rows: map[string]*age{}, keep: keep} }

// see notes the rows of a pass and answers the age of the oldest of them.
func (a *ages) see(now time.Time, keys []string) (oldest time.Duration) {
	for k, r := range a.rows {
		if now.Sub(r.last) > a.keep {
			delete(a.rows, k)
		}
	}
	for _, k := range keys {
		r, ok := a.rows[k]
		if !ok {
			if len(a.rows) >= mostAges {
				continue
			}
			r = &age{first: now}
			a.rows[k] = r
		}
		r.last = now
		oldest = max(oldest, now.Sub(r.first))
	}
	return oldest
}

// gone forgets a row.
func (a *ages) gone(key string) { delete(a.rows, key) }

// warn reports whether an error of the row has not been told yet.
func (a *ages) warn(key string) bool {
	r, ok := a.rows[key]
	if !ok {
		return true
	}
	first := !r.warned
	r.warned = true
	return first
}

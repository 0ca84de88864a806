package runner

import (
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"reveille/claims"
)

type leaseMetrics struct {
	beats   *prometheus.CounterVec
	seconds *prometheus.HistogramVec
	lost    prometheus.Counter
}

func newLeaseMetrics() *leaseMetrics {
	return &leaseMetrics{
		beats:   counterVec("heartbeats_total", "Heartbeats, by result.", "result"),
		seconds: histogramVec("heartbeat_seconds", "Time of a heartbeat, by result.", prometheus.DefBuckets, "result"),
		lost: prometheus.NewCounter(prometheus.CounterOpts{
			Name: "reveille_lease_lost_total", Help: "Times this process lost its worker lease and went on as a new holder.",
		}),
	}
}

func (m *leaseMetrics) observe(result string, took time.Duration) {
	m.beats.WithLabelValues(result).Inc()
	m.seconds.WithLabelValues(result).Observe(took.Seconds())
}

// Collectors are the metrics of the worker lease.
func (k *Keeper) Collectors() []prometheus.Collector {
	return []prometheus.Collector{k.metrics.beats, k.metrics.seconds, k.metrics.lost}
}

// poolMetrics are the metrics of a Pool; see docs/contract.md section 5.
type poolMetrics struct {
	acquires, revoked, executions, steps *prometheus.CounterVec
	stepSeconds, cancelSeconds           *prometheus.HistogramVec
	wakeToStart                          prometheus.Histogram
	gauges                               []prometheus.Collector
}

// Buckets from what a local wake takes to what an agent's step takes.
var (
	latencyBuckets = []float64{.001, .0025, .005, .01, .025, .05, .1, .25, .5, 1, 2.5, 5, 10, 30, 60}
	stepBuckets    = []float64{.01, .1, 1, 5, 15, 60, 300, 900, 3600, 4 * 3600}
)

func newPoolMetrics(p *Pool) *poolMetrics {
	m := &poolMetrics{
		acquires:      counterVec("acquires_total", "Attempts to acquire a claim, by result.", "result"),
		revoked:       counterVec("revoked_total", "Claims revoked by this worker, by cause.", "cause"),
		executions:    counterVec("executions_total", "Executions settled by this worker, by outcome.", "outcome"),
		steps:         counterVec("steps_total", "Steps closed by this worker, by status.", "status"),
		stepSeconds:   histogramVec("step_seconds", "Time from calling the handler until all of the step has joined, by status.", stepBuckets, "status"),
		cancelSeconds: histogramVec("cancel_seconds", "Parts of a cancellation: until the owner noticed, until the step joined, until it was settled.", latencyBuckets, "part"),
		wakeToStart: prometheus.NewHistogram(prometheus.HistogramOpts{
			Name: "reveille_wake_to_start_seconds", Help: "Time from recording the oldest thing that a step serves until the step was started, by the database's clock.", Buckets: latencyBuckets,
		}),
	}
	gauge := func(name, help string, f func() float64) {
		m.gauges = append(m.gauges, prometheus.NewGaugeFunc(prometheus.GaugeOpts{Name: "reveille_" + name, Help: help}, f))
	}
	gauge("slots", "Slots of this worker.", func() float64 { return float64(p.opts.Slots) })
	gauge("slots_busy", "Slots in use, leaked ones included.", func() float64 { return float64(p.busy()) })
	gauge("slots_leaked", "Slots given up because something in them never joined.", func() float64 { return float64(p.leakedSlots()) })
	for _, phase := range []claims.Phase{claims.Running, claims.Cancelling, claims.Cancelled} {
		m.gauges = append(m.gauges, prometheus.NewGaugeFunc(prometheus.GaugeOpts{
			Name: "reveille_claims_active", Help: "Claims of this worker, by the phase last heard.", ConstLabels: prometheus.Labels{"phase": string(phase)},
		}, func() float64 { return float64(p.active(phase)) }))
	}
	return m
}

// Collectors are the metrics of the pool.
func (p *Pool) Collectors() []prometheus.Collector {
	m := p.metrics
	return append([]prometheus.Collector{
		m.acquires, m.revoked, m.executions, m.steps, m.stepSeconds, m.cancelSeconds, m.wakeToStart,
	}, m.gauges...)
}

func counterVec(name, help, label string) *prometheus.CounterVec {
	return prometheus.NewCounterVec(prometheus.CounterOpts{Name: "reveille_" + name, Help: help}, []string{label})
}

func histogramVec(name, help string, buckets []float64, label string) *prometheus.HistogramVec {
	return prometheus.NewHistogramVec(prometheus.HistogramOpts{Name: "reveille_" + name, Help: help, Buckets: buckets}, []string{label})
}

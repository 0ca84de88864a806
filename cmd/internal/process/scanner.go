package process

import (
	"context"
	"io"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"reveille/bus"
	"reveille/claims"
	"reveille/claims/crdb"
	"reveille/cmd/internal/flags"
	"reveille/recovery"
	"reveille/runner"
)

// scannerConns is enough for the lanes and the relays of one pass.
const scannerConns = 12

// leastRetention is what docs/jetstream.md asks of the database: a server that loses
// its last minutes loses acknowledged events, and a quiet session notices late.
const leastRetention = 24 * time.Hour

// Rows of leases that expired are kept for an operator to see, then swept.
const (
	sweepEvery = time.Minute
	keepLeases = time.Hour
)

// Scanner runs a scanner until ctx ends.
func Scanner(ctx context.Context, f flags.Scanner, stderr io.Writer) error {
	scanner := name(f.WorkerID)
	log := f.Logger(stderr).With("scanner", scanner)
	if err := leaseOptions(f.Lease).Validate(); err != nil {
		return flags.Usage("%v", err)
	}
	if f.Batch < 1 || f.Every <= 0 || f.MaxRecoveries < 1 || f.MaxTakeovers < 1 {
		return flags.Usage("--batch %d, --every %v, --max-recoveries %d, --max-takeovers %d: want more than 0 of each",
			f.Batch, f.Every, f.MaxRecoveries, f.MaxTakeovers)
	}
	if f.Retention < leastRetention {
		return flags.Usage("--retention %v: want %v or more, so that what a stream loses with its server can be published again", f.Retention, leastRetention)
	}
	p, err := connect(ctx, f.Database, f.NATS, f.DBTimeout, scannerConns, f.HTTP, "reveille-scanner "+scanner, log)
	if err != nil {
		return err
	}
	defer p.close()
	keeper, err := runner.NewKeeper(p.store, leaseOptions(f.Lease),
		claims.Lease{Kind: "scanner", Name: scanner, Version: flags.Version()}, nil, log)
	if err != nil {
		return err
	}
	scan, err := recovery.New(recovery.Parts{
		Claims: p.store, Conversions: p.store, Held: p.store, Continuations: p.store, Sessions: p.store, Relays: p.store,
		Retentions: p.store, Database: p.store, Announcer: bus.NewSweepingAnnouncer(p.conn), Relayer: p.relay, Copies: p.relay, Holder: keeper.Holder,
	}, recovery.Options{
		Batch: f.Batch, Every: f.Every, Limits: claims.Limits{Recoveries: f.MaxRecoveries, Takeovers: f.MaxTakeovers},
		UncertainInterrupted: f.UncertainCancel == "interrupt", Retention: f.Retention, Logger: log,
	})
	if err != nil {
		return err
	}
	p.registry.MustRegister(scan.Collectors()...)
	p.registry.MustRegister(keeper.Collectors()...)
	p.registry.MustRegister(newQuarantinedGauge(p.store))
	p.web.check(p.healthy(keeper))

	base := context.WithoutCancel(ctx)
	background := start(base, keeper.Run, p.relay.Run)
	passes := start(ctx, func(ctx context.Context) error {
		streams := bus.StreamOptions{Replicas: f.Replicas, MaxClockSkew: f.MaxClockSkew, Retention: f.Retention}
		if err := p.ensureStreams(ctx, streams); err != nil {
			return err
		}
		select { // the first lease; a lost one it waits for by itself
		case <-keeper.Opened():
		case <-ctx.Done():
			return ctx.Err()
		}
		return scan.Run(ctx)
	}, func(ctx context.Context) error {
		p.sweepLeases(ctx)
		return nil
	})
	log.Info("scanner up", "version", flags.Version(), "http", f.HTTP)
	<-ctx.Done()
	log.Info("stopping: the row in hand is finished")
	passes.wait()
	flush, cancel := context.WithTimeout(base, flushTimeout)
	defer cancel()
	if err := p.relay.Flush(flush); err != nil {
		log.Warn("not all events are relayed; the next scanner does", "error", err)
	}
	background.stop()
	log.Info("scanner down")
	return nil
}

// ensureStreams waits until the streams are there.
func (p *parts) ensureStreams(ctx context.Context, o bus.StreamOptions) error {
	for said := false; ; said = true {
		_, err := p.conn.Ensure(ctx, o)
		if err == nil || ctx.Err() != nil {
			return ctx.Err()
		}
		if !said {
			p.log.Warn("waiting for the streams", "error", err)
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-time.After(time.Second):
		}
	}
}

func (p *parts) sweepLeases(ctx context.Context) {
	tick := time.NewTicker(sweepEvery)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
			if err := p.store.DeleteDeadLeases(ctx, keepLeases); err != nil && ctx.Err() == nil {
				p.log.Warn("dead leases not swept; tried again in a minute", "error", err)
			}
		}
	}
}

// quarantinedGauge counts the quarantined sessions when it is asked.
type quarantinedGauge struct {
	store *crdb.Store
	desc  *prometheus.Desc
}

func newQuarantinedGauge(store *crdb.Store) quarantinedGauge {
	return quarantinedGauge{store, prometheus.NewDesc("reveille_quarantined", "Sessions in quarantine, by reason.", []string{"reason"}, nil)}
}

func (g quarantinedGauge) Describe(ch chan<- *prometheus.Desc) { ch <- g.desc }

func (g quarantinedGauge) Collect(ch chan<- prometheus.Metric) {
	counts, err := g.store.Quarantined(context.Background())
	if err != nil {
		return // a scrape without it is better than none; readyz tells why
	}
	for _, reason := range claims.Reasons() {
		ch <- prometheus.MustNewConstMetric(g.desc, prometheus.GaugeValue, float64(counts[reason]), string(reason))
	}
}

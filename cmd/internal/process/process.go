// Package process wires the worker and the scanner: flags to parts, signals to
// an orderly end, metrics and health to an HTTP address. Both processes start
// without a database or NATS, say what they wait for, and outlive the loss of
// either.
package process

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"os"
	"strings"
	"time"

	"github.com/google/uuid"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"
	"github.com/prometheus/client_golang/prometheus/promhttp"

	"reveille/bus"
	"reveille/claims"
	"reveille/claims/crdb"
	"reveille/cmd/internal/flags"
	"reveille/runner"
)

// Bounds of an orderly end, for what has no flag of its own.
const (
	flushTimeout = 5 * time.Second
	httpTimeout  = 5 * time.Second
)

// name is what a process calls itself: as told, or by its host.
func name(told string) string {
	if told != "" {
		return told
	}
	host, err := os.Hostname()
	if err != nil {
		host = "unknown"
	}
	return host + "-" + uuid.NewString()[:8]
}

// parts is what a worker and a scanner both stand on.
type parts struct {
	log      *slog.Logger
	store    *crdb.Store
	conn     *bus.Conn
	relay    *bus.Relay
	registry *prometheus.Registry
	web      *web
}

// connect opens the health address, then waits for the database and NATS.
func connect(ctx context.Context, db flags.Database, n flags.NATS, dbTimeout time.Duration, conns int, addr, app string, log *slog.Logger) (*parts, error) {
	ns, err := bus.ParseNamespace(n.Namespace)
	if err != nil {
		return nil, flags.Usage("--namespace: %v", err)
	}
	if err := crdb.CheckURL(db.DatabaseURL); err != nil {
		return nil, flags.Usage("--database-url: %v", err)
	}
	if err := bus.CheckURL(n.NATSURL); err != nil {
		return nil, flags.Usage("--nats-url: %v", err)
	}
	p := &parts{log: log, registry: prometheus.NewRegistry()}
	p.registry.MustRegister(collectors.NewGoCollector(), collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}))
	if p.web, err = newWeb(addr, p.registry); err != nil {
		return nil, err
	}
	if p.store, err = openStore(ctx, db.DatabaseURL, crdb.Options{Timeout: dbTimeout, MaxConns: int32(conns), AppName: app}, log); err != nil {
		p.close()
		return nil, err
	}
	p.conn, err = bus.Connect(ctx, bus.Options{URL: n.NATSURL, Creds: n.NATSCreds, CA: n.NATSCA, Name: app, Namespace: ns, Logger: log})
	if err != nil {
		p.close()
		return nil, err
	}
	p.relay = bus.NewRelay(p.conn, p.store, bus.RelayOptions{Logger: log})
	p.registry.MustRegister(p.store.Collectors()...)
	p.registry.MustRegister(p.relay.Collectors()...)
	return p, nil
}

// openStore waits for a database with a schema. A database that can't be
// meant, a bad URL or a wrong password, is an error at once.
func openStore(ctx context.Context, url string, o crdb.Options, log *slog.Logger) (*crdb.Store, error) {
	waiting := ""
	for pause := 200 * time.Millisecond; ; pause = min(2*pause, 2*time.Second) {
		store, err := crdb.Open(ctx, url, o)
		if err == nil {
			if err = store.CheckSchema(ctx); err == nil {
				if waiting != "" {
					log.Info("database is there")
				}
				return store, nil
			}
			store.Close()
		}
		if !crdb.Unavailable(err) {
			return nil, err
		}
		if msg := err.Error(); msg != waiting {
			waiting = msg
			log.Warn("waiting for the database", "error", err)
		}
		select {
		case <-ctx.Done():
			return nil, fmt.Errorf("stopped while waiting for the database: %w", err)
		case <-time.After(pause):
		}
	}
}

func (p *parts) close() {
	if p.conn != nil {
		p.conn.Close()
	}
	if p.store != nil {
		p.store.Close()
	}
	p.web.close()
}

// healthy is what /readyz asks: the lease, the database, NATS.
func (p *parts) healthy(keeper *runner.Keeper) func(context.Context) error {
	return func(ctx context.Context) error {
		var errs []error
		if _, ok := keeper.Holder(); !ok {
			errs = append(errs, errors.New("no live worker lease"))
		}
		if err := p.store.Ping(ctx); err != nil {
			errs = append(errs, fmt.Errorf("database: %w", err))
		}
		if err := p.conn.Health(ctx); err != nil {
			errs = append(errs, fmt.Errorf("NATS: %w", err))
		}
		return errors.Join(errs...)
	}
}

// events tells others what became durable.
type events struct {
	*bus.Announcer
	relay *bus.Relay
	live  *bus.Live
}

func (e events) Poke(s claims.SessionID) { e.relay.Poke(s) }

func (e events) PublishLive(s claims.SessionID, epoch int64, step claims.StepID, text string) {
	e.live.PublishLive(s, epoch, step, text)
}

// web serves metrics and health.
type web struct {
	server *http.Server
	done   chan struct{}
	ready  chan func(context.Context) error
}

// newWeb listens at once, so that an address in use is an error of the start
// and a process that waits for its servers is alive and not ready.
func newWeb(addr string, registry *prometheus.Registry) (*web, error) {
	l, err := net.Listen("tcp", addr)
	if err != nil {
		return nil, fmt.Errorf("--http: %w; give another address", err)
	}
	w := &web{done: make(chan struct{}), ready: make(chan func(context.Context) error, 1)}
	w.ready <- func(context.Context) error { return errors.New("starting: waiting for the database or NATS") }
	mux := http.NewServeMux()
	mux.Handle("GET /metrics", promhttp.HandlerFor(registry, promhttp.HandlerOpts{}))
	mux.HandleFunc("GET /healthz", func(rw http.ResponseWriter, _ *http.Request) { fmt.Fprintln(rw, "ok") })
	mux.HandleFunc("GET /readyz", func(rw http.ResponseWriter, r *http.Request) {
		check := <-w.ready
		w.ready <- check
		ctx, cancel := context.WithTimeout(r.Context(), httpTimeout)
		defer cancel()
		if err := check(ctx); err != nil {
			http.Error(rw, strings.ReplaceAll(err.Error(), "\n", "; "), http.StatusServiceUnavailable)
			return
		}
		fmt.Fprintln(rw, "ready")
	})
	w.server = &http.Server{Handler: mux, ReadHeaderTimeout: httpTimeout}
	go func() {
		defer close(w.done)
		_ = w.server.Serve(l) // ends with close
	}()
	return w, nil
}

func (w *web) check(f func(context.Context) error) {
	<-w.ready
	w.ready <- f
}

func (w *web) close() {
	ctx, cancel := context.WithTimeout(context.Background(), httpTimeout)
	defer cancel()
	if err := w.server.Shutdown(ctx); err != nil {
		_ = w.server.Close()
	}
	<-w.done
}

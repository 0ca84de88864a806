package main

import (
	"context"
	"fmt"
	"log/slog"
	"os"
	"sync/atomic"
	"time"

	"github.com/schollz/progressbar/v3"
	"golang.org/x/sync/errgroup"
	"golang.org/x/term"

	"reveille/bus"
	"reveille/claims"
	"reveille/claims/crdb"
	"reveille/cmd/internal/flags"
)

// rebuildSessions is how many sessions are published at once; each has one
// event in flight.
const rebuildSessions = 64

type relayCmd struct {
	Rebuild bool `help:"Compare the event stream with the database, session by session, and publish what the stream has not. Safe beside running workers; stopped, it goes on where it was." required:""`

	DatabaseURL string `help:"Database: postgres://user:password@host:port/name." placeholder:"URL"`
	natsFlags
	Replicas  int           `help:"Replicas of the streams, where they are missing." default:"1"`
	Retention time.Duration `help:"How long the streams keep events, where they are missing." default:"168h"`
	// What a new command stream stamps must be later than what an earlier one did (I18).
	MaxClockSkew time.Duration `help:"Largest difference between two clocks, waited before the command stream is made where it is missing." default:"1s"`
}

func (c *relayCmd) run(ctx context.Context, s streams) error {
	db := databaseFlags{DatabaseURL: c.DatabaseURL, devFlags: c.devFlags}
	if c.Replicas < 1 || c.Retention <= 0 {
		return flags.Usage("--replicas %d, --retention %v: want more than 0 of each", c.Replicas, c.Retention)
	}
	store, err := db.open(ctx, s)
	if err != nil {
		return err
	}
	defer store.Close()
	conn, err := c.connect(ctx, s)
	if err != nil {
		return err
	}
	defer conn.Close()
	if _, err := conn.Ensure(ctx, bus.StreamOptions{Replicas: c.Replicas, Retention: c.Retention, MaxClockSkew: c.MaxClockSkew}); err != nil {
		return err
	}
	total, err := store.CountRelayed(ctx)
	if err != nil {
		return err
	}
	r := &rebuild{
		store: store,
		relay: bus.NewRelay(conn, store, bus.RelayOptions{Logger: slog.New(slog.NewTextHandler(s.err, &slog.HandlerOptions{Level: slog.LevelWarn}))}),
		bar:   progress(s, total),
	}
	relaying, stop := context.WithCancel(context.WithoutCancel(ctx))
	done := make(chan struct{})
	go func() {
		defer close(done)
		_ = r.relay.Run(relaying) // ends with stop
	}()
	err = r.run(ctx)
	stop()
	<-done
	_ = r.bar.Exit() // only drawing
	switch {
	case ctx.Err() != nil:
		s.say("stopped after %d sessions, %d events published; type it again to go on", r.looked.Load(), r.events.Load())
		return stopped()
	case err != nil:
		return err
	}
	_, err = fmt.Fprintf(s.out, "published %d events of %d sessions; %d sessions were whole\n", r.events.Load(), r.mended.Load(), r.looked.Load()-r.mended.Load())
	return err
}

// progress is a bar on a terminal, and nothing elsewhere.
func progress(s streams, total int64) *progressbar.ProgressBar {
	f, ok := s.err.(*os.File)
	return progressbar.NewOptions64(total, progressbar.OptionSetWriter(s.err), progressbar.OptionSetDescription("sessions"),
		progressbar.OptionShowCount(), progressbar.OptionSetPredictTime(true), progressbar.OptionThrottle(100*time.Millisecond),
		progressbar.OptionClearOnFinish(), progressbar.OptionSetVisibility(ok && term.IsTerminal(int(f.Fd()))))
}

// rebuild goes through the sessions once.
type rebuild struct {
	store *crdb.Store
	relay *bus.Relay
	bar   *progressbar.ProgressBar

	looked, mended, events atomic.Int64
}

func (r *rebuild) run(ctx context.Context) error {
	for after := claims.SessionID(""); ; {
		page, err := r.store.Relayed(ctx, after, bus.VerifyMost)
		if err != nil || len(page) == 0 {
			return err
		}
		after = page[len(page)-1].Session
		short, err := r.relay.Verify(ctx, page)
		if err != nil {
			return err
		}
		r.step(len(page) - len(short))
		group, groupCtx := errgroup.WithContext(ctx)
		group.SetLimit(rebuildSessions)
		for _, session := range short {
			group.Go(func() error {
				n, err := r.relay.Repair(groupCtx, session, true)
				r.events.Add(n)
				if err != nil {
					return err
				}
				if n > 0 {
					r.mended.Add(1)
				}
				r.step(1)
				return nil
			})
		}
		if err := group.Wait(); err != nil {
			return fmt.Errorf("%w; type it again to go on", err)
		}
	}
}

func (r *rebuild) step(n int) {
	r.looked.Add(int64(n))
	_ = r.bar.Add(n) // only drawing
}

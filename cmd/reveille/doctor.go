package main

import (
	"context"
	"fmt"
	"log/slog"
	"time"

	"reveille/bus"
	"reveille/cmd/internal/flags"
	"reveille/cmd/reveille/internal/doctor"
)

type doctorCmd struct {
	Role string `help:"Whose permissions the NATS user must have (publisher, observer, worker, scanner, operator); without it, what the user can't do is a warning." placeholder:"ROLE" enum:"publisher,observer,worker,scanner,operator," default:""`
	JSON bool   `name:"json" help:"One JSON object a line."`

	DatabaseURL string `help:"Database: postgres://user:password@host:port/name." placeholder:"URL"`
	natsFlags
	Replicas     int           `help:"Replicas that the streams are to have." default:"1"`
	Retention    time.Duration `help:"How long the streams are to keep events." default:"168h"`
	MaxClockSkew time.Duration `help:"Largest difference between two clocks, as workers and scanners have it." default:"1s"`
}

func (c *doctorCmd) run(ctx context.Context, s streams) error {
	ns, err := bus.ParseNamespace(c.Namespace)
	if err != nil {
		return flags.Usage("--namespace: %v", err)
	}
	if c.Replicas < 1 || c.Retention <= 0 || c.MaxClockSkew <= 0 || c.Timeout <= 0 {
		return flags.Usage("--replicas %d, --retention %v, --max-clock-skew %v, --timeout %v: want more than 0 of each",
			c.Replicas, c.Retention, c.MaxClockSkew, c.Timeout)
	}
	count := map[doctor.Status]int{}
	err = doctor.Run(ctx, doctor.Options{
		DatabaseURL: c.DatabaseURL,
		// What goes wrong on the connection is a finding, and not in a log.
		NATS:         bus.Options{URL: c.NATSURL, Creds: c.NATSCreds, CA: c.NATSCA, Name: "reveille doctor", Namespace: ns, Logger: slog.New(slog.DiscardHandler)},
		Streams:      bus.StreamOptions{Replicas: c.Replicas, Retention: c.Retention},
		MaxClockSkew: c.MaxClockSkew, Timeout: c.Timeout, Role: bus.Role(c.Role),
	}, func(f doctor.Finding) error {
		count[f.Status]++
		if c.JSON {
			return s.json(f)
		}
		return s.finding(f)
	})
	switch {
	case ctx.Err() != nil:
		return stopped()
	case err != nil:
		return err
	case count[doctor.Fail] > 0:
		return fmt.Errorf("%d of %d findings are FAIL: see above what to do", count[doctor.Fail], count[doctor.OK]+count[doctor.Warn]+count[doctor.Fail])
	}
	return nil
}

// finding writes one line.
func (s streams) finding(f doctor.Finding) error {
	fix := ""
	if f.Fix != "" {
		fix = "; fix: " + f.Fix
	}
	_, err := fmt.Fprintf(s.out, "%-4s  %-11s  %s%s\n", f.Status, f.Check, f.Found, fix)
	return err
}

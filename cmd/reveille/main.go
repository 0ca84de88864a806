// Command reveille is for operators and newcomers: it runs everything on one
// machine, sends commands, follows sessions and shows what the database holds.
package main

import (
	"context"
	"fmt"
	"io"
	"log/slog"
	"os"
	"time"

	"github.com/alecthomas/kong"

	"reveille/claims/crdb"
	"reveille/cmd/internal/devstate"
	"reveille/cmd/internal/flags"
	"reveille/cmd/internal/process"
	"reveille/cmd/reveille/internal/dev"
)

func main() {
	if process.IsGuard(os.Args) {
		os.Exit(process.RunGuard())
	}
	dev.EndWithParent()
	os.Exit(flags.Main("reveille", run))
}

const description = `Runs Reveille on one machine (dev), sends commands to sessions and shows what they do.

Where no server is named, by a flag or its RV_ variable, the commands use those of the "reveille dev" that runs on the
state folder .reveille (--dev-state).`

// cli is the command line. A hidden command takes exactly the flags of the
// program of its name: dev runs it.
type cli struct {
	Dev       dev.Flags    `cmd:"" help:"Run everything in one process tree: NATS, a database, workers, a scanner."`
	Migrate   migrateCmd   `cmd:"" help:"Create the database's schema, or bring it up to date."`
	Wake      wakeCmd      `cmd:"" help:"Run a session, with an input or without."`
	Admit     admitCmd     `cmd:"" help:"Record an input for a session without running it."`
	Interrupt interruptCmd `cmd:"" help:"Cancel what a session runs, or would run next."`
	Watch     watchCmd     `cmd:"" help:"Follow the events and the live text of a session, or of all."`
	Sessions  sessionsCmd  `cmd:"" help:"List sessions."`
	Show      showCmd      `cmd:"" help:"Show one session: its claim, what waits, its last steps."`
	Workers   workersCmd   `cmd:"" help:"List workers and scanners with their leases."`

	Quarantine quarantineCmd `cmd:"" help:"List, show and release sessions that were taken out of circulation."`

	Relay relayCmd `cmd:"" help:"Publish again what the event stream lost."`

	Doctor doctorCmd `cmd:"" help:"Check the database, NATS, permissions, clocks and processes; say what is wrong and the fix."`

	Worker  flags.Worker  `cmd:"" hidden:"" help:"What the program worker does."`
	Scanner flags.Scanner `cmd:"" hidden:"" help:"What the program scanner does."`

	Version kong.VersionFlag `help:"Print the version." env:"-"`
}

func run(ctx context.Context, args []string, stdout, stderr io.Writer) error {
	var c cli
	found := &devstate.Discovery{}
	parsed, err := flags.Parse("reveille", description, &c, args, stdout, stderr, kong.Resolvers(found), kong.ConfigureHelp(kong.HelpOptions{Compact: true, FlagsLast: true, NoExpandSubcommands: true}))
	if err != nil {
		return err
	}
	std := streams{in: os.Stdin, out: stdout, err: stderr, servers: found}
	switch command := commandOf(parsed); command {
	case "dev":
		return dev.Run(ctx, c.Dev, os.Args[0], stdout, stderr)
	case "worker":
		return process.Worker(ctx, c.Worker, stderr)
	case "scanner":
		return process.Scanner(ctx, c.Scanner, stderr)
	case "migrate":
		return c.Migrate.run(ctx, std)
	case "wake":
		return c.Wake.run(ctx, std)
	case "admit":
		return c.Admit.run(ctx, std)
	case "interrupt":
		return c.Interrupt.run(ctx, std)
	case "watch":
		return c.Watch.run(ctx, std)
	case "sessions":
		return c.Sessions.run(ctx, std)
	case "show":
		return c.Show.run(ctx, std)
	case "workers":
		return c.Workers.run(ctx, std)
	case "relay":
		return c.Relay.run(ctx, std)
	case "doctor":
		return c.Doctor.run(ctx, std)
	case "quarantine list":
		return c.Quarantine.List.run(ctx, std)
	case "quarantine show":
		return c.Quarantine.Show.run(ctx, std)
	case "quarantine release":
		return c.Quarantine.Release.run(ctx, std)
	default:
		return fmt.Errorf("command %q is not wired", command)
	}
}

// commandOf is the command's name, with that of the group it is in.
func commandOf(parsed *kong.Context) string {
	node := parsed.Selected()
	if node.Parent != nil && node.Parent.Type == kong.CommandNode {
		return node.Parent.Name + " " + node.Name
	}
	return node.Name
}

// streams are what a command reads and writes, and where it got its servers from.
type streams struct {
	in       io.Reader
	out, err io.Writer
	servers  *devstate.Discovery
}

// say writes a line for people beside the output.
func (s streams) say(format string, args ...any) {
	fmt.Fprintf(s.err, "reveille: "+format+"\n", args...)
}

// sayer is a log for people: a line each, as the program's own.
type sayer struct {
	streams
	level slog.Leveler
}

func (h *sayer) Enabled(_ context.Context, l slog.Level) bool { return l >= h.level.Level() }
func (h *sayer) WithAttrs([]slog.Attr) slog.Handler           { return h }
func (h *sayer) WithGroup(string) slog.Handler                { return h }

func (h *sayer) Handle(_ context.Context, r slog.Record) error {
	line := r.Message
	r.Attrs(func(a slog.Attr) bool {
		line += fmt.Sprintf(" (%s: %v)", a.Key, a.Value)
		return true
	})
	h.say("%s", line)
	return nil
}

// devFlags say which reveille dev a command looks for.
type devFlags struct {
	DevState string        `help:"State folder of the reveille dev whose servers are used where none is named." default:".reveille" placeholder:"DIR" env:"RV_DEV_STATE,RV_STATE"`
	Timeout  time.Duration `help:"To connect, and for each answer of a server." default:"5s"`
}

// databaseFlags are the flags of commands that read the database.
type databaseFlags struct {
	DatabaseURL string `help:"Database: postgres://user:password@host:port/name." placeholder:"URL"`
	devFlags    `embed:""`
}

// natsFlags are the flags of commands that speak NATS.
type natsFlags struct {
	NATSURL   string `name:"nats-url" help:"NATS servers, comma-separated." default:"nats://127.0.0.1:4222" placeholder:"URL"`
	NATSCreds string `name:"nats-creds" help:"Credentials file for NATS." placeholder:"FILE"`
	NATSCA    string `name:"nats-ca" help:"CA certificates for NATS." placeholder:"FILE"`
	Namespace string `help:"First token of all subjects." default:"rv"`
	devFlags  `embed:""`
}

type migrateCmd struct {
	databaseFlags
	DryRun bool `help:"Only list what would be applied."`
}

func (m *migrateCmd) run(ctx context.Context, s streams) error {
	if err := m.check(); err != nil {
		return err
	}
	done, err := crdb.Migrate(ctx, m.DatabaseURL, m.DryRun)
	if err != nil {
		return m.unreachable(s, err)
	}
	for _, step := range done {
		if m.DryRun {
			fmt.Fprintf(s.out, "would apply %s\n", step.Name)
		} else {
			fmt.Fprintf(s.out, "applied %s\n", step.Name)
		}
	}
	if len(done) == 0 {
		fmt.Fprintln(s.out, "the schema is up to date")
	}
	return nil
}

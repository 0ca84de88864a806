// Package flags holds the flags that the programs share, each with its
// environment variable RV_<FLAG>; flags win. It parses, checks what can be
// checked without a server, and turns errors into one line.
package flags

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"os/signal"
	"runtime/debug"
	"strings"
	"syscall"
	"time"

	"github.com/alecthomas/kong"
	"golang.org/x/term"
)

// Exit codes of all programs.
const (
	exitFailed = 1
	exitUsage  = 2
)

// ErrHelp: help or the version was asked for and printed.
var ErrHelp = errors.New("help printed")

// Exit is an error with an exit code of its own; an empty Message prints nothing.
type Exit struct {
	Code    int
	Message string
}

func (e *Exit) Error() string { return e.Message }

// Usage is an error of how the program was called: exit code 2.
func Usage(format string, args ...any) error {
	return &Exit{Code: exitUsage, Message: fmt.Sprintf(format, args...)}
}

// Database are the flags of the database.
type Database struct {
	DatabaseURL string `help:"Database: postgres://user:password@host:port/name of a CockroachDB or PostgreSQL." placeholder:"URL" required:""`
	DevState    string `help:"State folder of a reveille dev whose database, NATS and namespace are used where none is named." placeholder:"DIR" env:"-"`
}

// NATS are the flags of the connection to NATS.
type NATS struct {
	NATSURL   string `name:"nats-url" help:"NATS servers, comma-separated." default:"nats://127.0.0.1:4222" placeholder:"URL"`
	NATSCreds string `name:"nats-creds" help:"Credentials file for NATS." placeholder:"FILE"`
	NATSCA    string `name:"nats-ca" help:"CA certificates for NATS." placeholder:"FILE"`
	Namespace string `help:"First token of all subjects." default:"rv"`
	Replicas  int    `help:"Replicas of the streams that it creates." default:"1"`
}

// Log are the flags of logging.
type Log struct {
	LogFormat string `help:"Format of the log: auto is text on a terminal, else json (${enum})." enum:"auto,text,json" default:"auto"`
	LogLevel  string `help:"Least level that is logged (${enum})." enum:"debug,info,warn,error" default:"info"`
}

// Logger makes the logger that the flags ask for.
func (l Log) Logger(w io.Writer) *slog.Logger {
	var level slog.Level
	_ = level.UnmarshalText([]byte(l.LogLevel)) // kong checked it against the enum
	opts := &slog.HandlerOptions{Level: level, ReplaceAttr: readable}
	text := l.LogFormat == "text"
	if f, ok := w.(*os.File); ok && l.LogFormat == "auto" {
		text = term.IsTerminal(int(f.Fd()))
	}
	if text {
		return slog.New(slog.NewTextHandler(w, opts))
	}
	return slog.New(slog.NewJSONHandler(w, opts))
}

// readable has durations say their unit in JSON too, which else are nanoseconds.
func readable(_ []string, a slog.Attr) slog.Attr {
	if a.Value.Kind() == slog.KindDuration {
		a.Value = slog.StringValue(a.Value.Duration().String())
	}
	return a
}

// Lease are the times of a worker lease.
type Lease struct {
	Lease        time.Duration `help:"How long a process owns its sessions after its last heartbeat." default:"15s"`
	Heartbeat    time.Duration `help:"Between two heartbeats." default:"5s"`
	MaxClockSkew time.Duration `help:"Largest difference between two clocks of the database's nodes." default:"1s"`
	StopMargin   time.Duration `help:"From cancelling to killing the steps of a process that lost its lease." default:"1s"`
	DBTimeout    time.Duration `name:"db-timeout" help:"Of one attempt of a transaction." default:"2s"`
}

// Worker are the flags of the worker.
type Worker struct {
	Database `embed:""`
	NATS     `embed:""`
	Log      `embed:""`
	Lease    `embed:""`

	HTTP          string        `name:"http" help:"Address of /metrics, /healthz and /readyz." default:":9090"`
	WorkerID      string        `help:"Name of this worker; host name and a random suffix where it is empty." placeholder:"NAME"`
	Slots         int           `help:"Sessions at once." default:"64"`
	Grace         time.Duration `help:"For steps to finish at SIGTERM, before the rest is handed over." default:"20s"`
	JoinTimeout   time.Duration `help:"For a killed step to join, before its slot is given up." default:"5m"`
	MaxSteps      int           `help:"Steps of one execution before it yields." default:"100"`
	MaxAttempts   int           `help:"Attempts of a step that fails in a way that may be retried." default:"5"`
	RetryBase     time.Duration `help:"Delay of the first retry; it doubles from there." default:"1s"`
	RetryMax      time.Duration `help:"Longest delay of a retry." default:"5m"`
	Handler       string        `help:"What runs a step (${enum})." enum:"exec,http" default:"exec"`
	Exec          string        `help:"Command of --handler exec, run for each step by /bin/sh -c." placeholder:"CMD"`
	HTTPURL       string        `name:"http-url" help:"URL of --handler http, where each step is posted." placeholder:"URL"`
	KillAfter     time.Duration `help:"From interrupting a step to killing it." default:"10s"`
	StepTimeout   time.Duration `help:"Longest run of one step; 0 is none." default:"0"`
	History       int           `help:"Closed steps of its session that a step gets; 0 reads none." default:"20"`
	MaxInputBytes int           `help:"Largest body of a command." default:"262144"`
}

// Scanner are the flags of the scanner.
type Scanner struct {
	Database `embed:""`
	NATS     `embed:""`
	Log      `embed:""`
	Lease    `embed:""`

	HTTP            string        `name:"http" help:"Address of /metrics, /healthz and /readyz." default:":9091"`
	WorkerID        string        `help:"Name of this scanner; host name and a random suffix where it is empty." placeholder:"NAME"`
	Batch           int           `help:"Rows of one pass in each lane." default:"100"`
	Every           time.Duration `help:"Between two passes." default:"1s"`
	MaxRecoveries   int           `help:"Recoveries in a chain before the session is quarantined." default:"3"`
	MaxTakeovers    int           `help:"Takeovers without a step that ended before the session is quarantined." default:"10"`
	Retention       time.Duration `help:"How long events, closed steps and served inputs are kept, in the database (once they are on the stream) and in the streams that it creates." default:"168h"`
	UncertainCancel string        `help:"What becomes of a cancellation whose worker was lost (${enum})." enum:"quarantine,interrupt" default:"quarantine"`
}

// Versioned is the flag of a program that says its version.
type Versioned struct {
	Version kong.VersionFlag `help:"Print the version." env:"-"`
}

// Parse parses args into the flags that cli points to. Its errors are usage
// errors of one line; after --help or --version it returns ErrHelp.
func Parse(name, description string, cli any, args []string, stdout, stderr io.Writer, options ...kong.Option) (*kong.Context, error) {
	exited := false
	options = append([]kong.Option{
		kong.Name(name), kong.Description(description), kong.Writers(stdout, stderr),
		kong.DefaultEnvars("RV"), kong.Exit(func(int) { exited = true }),
		kong.ConfigureHelp(kong.HelpOptions{Compact: true, FlagsLast: true}),
		kong.Vars{"version": name + " " + Version()},
	}, options...)
	parser, err := kong.New(cli, options...)
	if err != nil {
		return nil, err
	}
	ctx, err := parser.Parse(args)
	if exited {
		return nil, ErrHelp
	}
	if err != nil {
		var parse *kong.ParseError
		if errors.As(err, &parse) && parse.Context != nil && parse.Context.Selected() != nil {
			name = parse.Context.Selected().FullPath()
		}
		// A flag that may be left out has the empty word among its own.
		return nil, Usage("%s; see %s --help", strings.Replace(err.Error(), `,"" but`, " but", 1), name)
	}
	return ctx, nil
}

// Version is the version of the program as it was built.
func Version() string {
	info, ok := debug.ReadBuildInfo()
	if !ok {
		return "unknown"
	}
	version := info.Main.Version
	for _, s := range info.Settings {
		if s.Key == "vcs.revision" && len(s.Value) >= 12 {
			version += "+" + s.Value[:12]
		}
	}
	return strings.Trim(version, "()")
}

// Main runs a program and returns its exit code. Its context ends at the first
// SIGINT or SIGTERM; a second one ends the process at once.
func Main(name string, run func(ctx context.Context, args []string, stdout, stderr io.Writer) error) int {
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM)
	defer stop()
	context.AfterFunc(ctx, stop)
	err := run(ctx, os.Args[1:], os.Stdout, os.Stderr)
	var exit *Exit
	switch {
	case err == nil || errors.Is(err, ErrHelp):
		return 0
	case errors.As(err, &exit):
		if exit.Message != "" {
			fmt.Fprintf(os.Stderr, "%s: %s\n", name, oneLine(exit.Message))
		}
		return exit.Code
	default:
		fmt.Fprintf(os.Stderr, "%s: %s\n", name, oneLine(err.Error()))
		return exitFailed
	}
}

func oneLine(s string) string { return strings.Join(strings.Fields(s), " ") }

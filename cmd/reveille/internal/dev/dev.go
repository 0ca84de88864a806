// Package dev is `reveille dev`: everything that Reveille is made of, in one
// process tree. The process itself is the NATS server; the database, the
// workers and the scanner are its children.
//
// What holds:
//
//   - One dev per state folder: a lock that dies with its process guards it.
//   - Whatever ends this process, kill -9 too, ends its children; a worker that
//     is killed takes its commands with it (see runner/exec.Guard).
//   - The data survive that, and a second start finds them.
//   - A child that ends by itself is started again, ever later.
//
// What is not promised: that a stop is quick. Steps get --grace to finish and
// --kill-after to stop; a second Ctrl-C waits for neither.
package dev

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"time"

	"reveille/bus"
	"reveille/claims/crdb"
	"reveille/cmd/internal/devstate"
	"reveille/cmd/internal/flags"
	"reveille/internal/localdb"
	"reveille/runner"
	rvhttp "reveille/runner/http"
)

// Flags of reveille dev. Where a default is not that of the worker, it is for
// watching: a lost worker is recovered from, and Ctrl-C is done, within seconds.
type Flags struct {
	Workers     int    `help:"Workers to run; 0 leaves that to programs of your own (with --dev-state)." default:"2"`
	State       string `help:"Folder of all data; commands in the same folder find the servers through it." default:".reveille" placeholder:"DIR"`
	NATSPort    int    `name:"nats-port" help:"Port of the NATS server on 127.0.0.1; 0 takes a free one." default:"4222"`
	DatabaseURL string `help:"Use this database instead of a private one." placeholder:"URL"`
	Namespace   string `help:"First token of all subjects." default:"rv"`
	LogLevel    string `help:"Least level of the log that is shown (${enum}); starts, stops, recoveries and what commands say on standard error are always." enum:"debug,info,warn,error" default:"warn"`

	Handler     string        `help:"What runs a step (${enum})." enum:"exec,http" default:"exec"`
	Exec        string        `help:"Command that runs each step, by /bin/sh -c; without it a demo that counts to ten." placeholder:"CMD"`
	HTTPURL     string        `name:"http-url" help:"URL of --handler http, where each step is posted." placeholder:"URL"`
	Slots       int           `help:"Sessions at once, of each worker." default:"16"`
	History     int           `help:"Closed steps of its session that a step gets." default:"20"`
	StepTimeout time.Duration `help:"Longest run of one step; 0 is none." default:"0"`
	Grace       time.Duration `help:"For steps to finish at Ctrl-C, before they are handed over to the next start." default:"5s"`
	KillAfter   time.Duration `help:"From interrupting a step to killing it." default:"5s"`

	Lease        time.Duration `help:"How long a lost worker owns its sessions." default:"6s"`
	Heartbeat    time.Duration `help:"Between two heartbeats." default:"1s"`
	MaxClockSkew time.Duration `help:"Largest difference between two clocks of the database's nodes." default:"1s"`
	StopMargin   time.Duration `help:"From cancelling to killing the steps of a process that lost its lease." default:"1s"`
	DBTimeout    time.Duration `name:"db-timeout" help:"Of one attempt of a transaction." default:"2s"`
}

const (
	maxWorkers = 64
	// stopTimeout is what a child may take to stop beyond --grace and --kill-after.
	stopTimeout = 15 * time.Second
	// databaseStop is what the database may take for its checkpoint.
	databaseStop = 30 * time.Second
	// readyTimeout bounds the wait for the children before what runs is printed.
	readyTimeout = 60 * time.Second
	readyPoll    = 100 * time.Millisecond
	httpTimeout  = 2 * time.Second
)

// Demo is the command that runs steps where none is given: it shows what it
// got and takes its time, so that there is something to watch and to interrupt.
const Demo = `request=$(cat)
case $request in *'"continues":{'*) echo 'the step before was cut off, this one goes on for it' ;; esac
printf 'got %s\n' "$(printf '%s\n' "$request" | sed 's/.*"inputs":\(\[.*\]\),"continues":.*/\1/')"
for n in 1 2 3 4 5 6 7 8 9 10; do echo "$n of 10"; sleep 1; done
echo '{"type":"ended","result":"counted to ten"}'`

// Run runs everything until ctx ends, or until something ends that it can't do
// without. program is how the user called this program, for the lines to paste.
func Run(ctx context.Context, f Flags, program string, stdout, stderr io.Writer) (err error) {
	if err := f.validate(); err != nil {
		return err
	}
	state, err := openState(f.State)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, state.close()) }()
	d := &dev{flags: f, program: program, stdout: stdout, console: newConsole(stderr, f.LogLevel), state: state}

	if err := portFree(f.NATSPort); err != nil { // before a database is made for nothing
		return err
	}
	stopDatabase, err := d.startDatabase(ctx)
	if err != nil && ctx.Err() != nil {
		return nil // Ctrl-C while it started
	}
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, stopDatabase()) }()
	stopNATS, err := d.startNATS()
	if err != nil {
		return err
	}
	defer stopNATS()
	forget, err := state.remember(devstate.Servers{PID: os.Getpid(), NATSURL: d.natsURL, DatabaseURL: d.database.URL(), Namespace: f.Namespace})
	if err != nil {
		return err
	}
	defer forget()
	return d.supervise(ctx)
}

func (f *Flags) validate() error {
	if f.Workers < 0 || f.Workers > maxWorkers {
		return flags.Usage("--workers %d: want 0 to %d", f.Workers, maxWorkers)
	}
	if f.NATSPort < 0 || f.NATSPort > 65535 {
		return flags.Usage("--nats-port %d: want 0 to 65535", f.NATSPort)
	}
	if f.Slots < 1 {
		return flags.Usage("--slots %d: want 1 or more", f.Slots)
	}
	if f.Grace < 0 || f.KillAfter < 0 || f.StepTimeout < 0 || f.History < 0 {
		return flags.Usage("--grace %v, --kill-after %v, --step-timeout %v, --history %d: want 0 or more of each", f.Grace, f.KillAfter, f.StepTimeout, f.History)
	}
	if _, err := bus.ParseNamespace(f.Namespace); err != nil {
		return flags.Usage("--namespace: %v", err)
	}
	if err := f.validateHandler(); err != nil {
		return err
	}
	lease := runner.LeaseOptions{
		Lease: f.Lease, Heartbeat: f.Heartbeat, MaxClockSkew: f.MaxClockSkew, StopMargin: f.StopMargin, DBTimeout: f.DBTimeout,
	}
	if err := lease.Validate(); err != nil {
		return flags.Usage("%v", err)
	}
	return nil
}

// validateHandler refuses what the workers would, before anything is started,
// and a URL that would be passed over for the demo.
func (f *Flags) validateHandler() error {
	switch {
	case f.Handler != "http" && f.HTTPURL != "" && f.Exec == "":
		return flags.Usage("--http-url is of --handler http: add that, or leave the URL out")
	case f.Handler != "http":
		return nil
	case f.HTTPURL == "":
		return flags.Usage("--handler http needs --http-url URL, where a step is posted")
	}
	if _, err := rvhttp.ParseURL(f.HTTPURL); err != nil {
		return flags.Usage("--http-url: %v", err)
	}
	return nil
}

type dev struct {
	flags   Flags
	program string
	stdout  io.Writer
	console *console
	state   *state

	database *localdb.Server
	natsURL  string
	natsWhat string // for people
}

// startDatabase starts the database and brings its schema up to date.
func (d *dev) startDatabase(ctx context.Context) (stop func() error, err error) {
	start, cancel := context.WithTimeout(ctx, 2*readyTimeout) // the first start makes a database
	defer cancel()
	d.database, err = localdb.Start(start, localdb.Options{Dir: d.flags.State, URL: d.flags.DatabaseURL, Log: d.console.writer("database")})
	if err != nil {
		return nil, err
	}
	stop = func() error {
		ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), databaseStop)
		defer cancel()
		return d.database.Stop(ctx)
	}
	applied, err := crdb.Migrate(start, d.database.URL(), false)
	if err != nil {
		return nil, errors.Join(err, stop())
	}
	if len(applied) > 0 {
		d.console.say("database", "%d migrations applied", len(applied))
	}
	return stop, nil
}

// supervise runs the children until ctx ends.
func (d *dev) supervise(ctx context.Context) error {
	self, err := os.Executable()
	if err != nil {
		return fmt.Errorf("can't find this program to start it as a worker: %w", err)
	}
	s := &supervisor{
		self: self, console: d.console, stopTimeout: d.flags.Grace + d.flags.KillAfter + stopTimeout,
		env: append(os.Environ(), childVariable+"=1", "RV_DATABASE_URL="+d.database.URL()),
	}
	if d.flags.Handler == "http" {
		s.env = append(s.env, "RV_HTTP_URL="+d.flags.HTTPURL) // it may hold a password
	}
	children := d.children()
	running, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	var over sync.WaitGroup
	for _, c := range children {
		over.Go(func() {
			if err := s.run(running, c); err != nil {
				cancel(err)
			}
		})
	}
	over.Go(func() {
		select {
		case <-d.database.Done():
			cancel(fmt.Errorf("%w; start reveille dev again", d.database.Err()))
		case <-running.Done():
		}
	})
	d.await(running, children)
	if running.Err() == nil {
		d.banner(children)
	}
	<-running.Done()
	d.console.say("dev", "stopping: steps get %v to finish, then they are handed over; Ctrl-C again kills", d.flags.Grace)
	over.Wait()
	if ctx.Err() != nil {
		return nil // as it was asked to
	}
	return context.Cause(running)
}

func (d *dev) children() []*child {
	f := d.flags
	common := func(c *child, address string) []string {
		return []string{
			"--nats-url=" + d.natsURL, "--namespace=" + f.Namespace, "--replicas=1", "--http=" + address, "--worker-id=" + c.name,
			"--lease=" + f.Lease.String(), "--heartbeat=" + f.Heartbeat.String(), "--max-clock-skew=" + f.MaxClockSkew.String(),
			"--stop-margin=" + f.StopMargin.String(), "--db-timeout=" + f.DBTimeout.String(),
			"--log-format=json", "--log-level=" + d.console.childLevel(),
		}
	}
	handler := []string{"--handler=" + f.Handler} // its URL is in the environment
	if f.Handler == "exec" {
		command := f.Exec
		if command == "" {
			command = Demo
		}
		handler = append(handler, "--exec="+command)
	}
	scanner := &child{name: "scanner", port: scannerPort}
	scanner.args = func(address string) []string { return append([]string{"scanner"}, common(scanner, address)...) }
	children := []*child{scanner}
	for i := range f.Workers {
		w := &child{name: fmt.Sprintf("worker-%d", i+1), port: workerPort(i)}
		w.args = func(address string) []string {
			args := append([]string{"worker"}, common(w, address)...)
			args = append(args, fmt.Sprintf("--slots=%d", f.Slots), fmt.Sprintf("--history=%d", f.History), "--step-timeout="+f.StepTimeout.String(),
				"--grace="+f.Grace.String(), "--kill-after="+f.KillAfter.String())
			return append(args, handler...)
		}
		children = append(children, w)
	}
	return children
}

// await waits until all children say that they are ready, at most readyTimeout.
func (d *dev) await(ctx context.Context, children []*child) {
	ctx, cancel := context.WithTimeout(ctx, readyTimeout)
	defer cancel()
	client := &http.Client{Timeout: httpTimeout}
	defer client.CloseIdleConnections()
	tick := time.NewTicker(readyPoll)
	defer tick.Stop()
	for _, c := range children {
		for {
			answer := c.ready(ctx, client)
			if answer == "" {
				break
			}
			select {
			case <-tick.C:
				continue
			case <-ctx.Done():
			}
			if errors.Is(ctx.Err(), context.DeadlineExceeded) {
				d.console.say("dev", "%s is not ready yet: %s", c.name, answer)
			}
			break
		}
	}
}

// ready asks a child whether it is; empty is yes.
func (c *child) ready(ctx context.Context, client *http.Client) string {
	_, address, up := c.where()
	if !up {
		return "it is being started"
	}
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://"+address+"/readyz", nil)
	if err != nil {
		return err.Error()
	}
	resp, err := client.Do(req)
	if err != nil {
		return err.Error()
	}
	defer resp.Body.Close()
	body, err := io.ReadAll(io.LimitReader(resp.Body, 4<<10))
	if err != nil {
		return err.Error()
	}
	if resp.StatusCode == http.StatusOK {
		return ""
	}
	return strings.TrimSpace(string(body))
}

// banner prints what runs where and what to type next.
func (d *dev) banner(children []*child) {
	var b strings.Builder
	row := func(name, format string, args ...any) {
		fmt.Fprintf(&b, "  %-10s %s\n", name, fmt.Sprintf(format, args...))
	}
	b.WriteString("\nReveille runs:\n\n")
	row("database", "%s", d.database.Describe())
	row("NATS", "%s", d.natsWhat)
	for i := range children { // the workers first
		c := children[(i+1)%len(children)]
		pid, address, _ := c.where()
		row(c.name, "pid %d, http://%s/metrics", pid, address)
	}
	row("steps", "%s", d.flags.steps())
	row("state", "%s (kept for the next start)", d.flags.State)
	where := ""
	if d.flags.State != devstate.Default {
		where = " --dev-state " + quote(d.flags.State)
	}
	fmt.Fprintf(&b, `
Paste into another terminal, in this folder:

  %[1]s wake s1 --input '"hello"' --wait%[2]s
  %[1]s watch s1%[2]s
  %[1]s interrupt s1 --wait%[2]s

Ctrl-C stops everything. Kill a worker in mid-step (kill -9 PID) and watch its session go on.
ready
`, d.program, where)
	_, _ = io.WriteString(d.stdout, b.String()) // a reader that is gone hears nothing
}

// steps says for people what runs a step.
func (f *Flags) steps() string {
	if f.Workers == 0 {
		return "run by workers of your own: start them with --dev-state " + quote(f.State) + " --http 127.0.0.1:0"
	}
	if f.Handler == "http" {
		u, err := rvhttp.ParseURL(f.HTTPURL)
		if err != nil {
			return err.Error()
		}
		return "posted to " + u.Redacted()
	}
	if f.Exec == "" {
		return "run a demo that counts to ten (your own: --exec 'COMMAND', or --handler http --http-url URL)"
	}
	command, _, more := strings.Cut(f.Exec, "\n")
	if more {
		command += " …"
	}
	return "run by /bin/sh -c " + quote(command)
}

// quote is a word for the shell.
func quote(s string) string {
	if s != "" && !strings.ContainsFunc(s, func(r rune) bool {
		return !(r >= 'a' && r <= 'z' || r >= 'A' && r <= 'Z' || r >= '0' && r <= '9' || strings.ContainsRune("-_./:=,+", r))
	}) {
		return s
	}
	return "'" + strings.ReplaceAll(s, "'", `'\''`) + "'"
}

// under is a path in the state folder.
func (d *dev) under(name string) string { return filepath.Join(d.flags.State, name) }

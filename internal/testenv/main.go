// Command testenv runs a command beside a database server for tests:
//
//	go run ./internal/testenv -- go test ./...
//
// It starts one ephemeral server, unless RV_TEST_DATABASE_URL names one, sets that variable for the command, and
// afterwards stops the server and removes its data. It exits as the command did (128 + signal where that ended it; `go
// run` itself makes 1 of all failures).
//
// The command has a process group of its own, so that a signal reaches all of it once: SIGINT and SIGTERM are passed
// on, a second one kills. It can't read from a terminal therefore.
package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"os/signal"
	"syscall"
	"time"

	"reveille/internal/localdb"
)

const (
	urlVariable = "RV_TEST_DATABASE_URL"
	stopTimeout = 20 * time.Second

	exitFailed = 1
	exitUsage  = 2
	exitSignal = 128 // + the signal, as shells do
)

func main() {
	os.Exit(run(os.Args[1:], os.Stdin, os.Stdout, os.Stderr))
}

func run(args []string, stdin io.Reader, stdout, stderr io.Writer) int {
	if len(args) > 0 && args[0] == "--" {
		args = args[1:]
	}
	if len(args) == 0 {
		fmt.Fprintln(stderr, "testenv: no command given: write testenv -- COMMAND ARGUMENTS…")
		return exitUsage
	}
	// From before the server starts: it must not outlive a signal that comes meanwhile.
	signals := make(chan os.Signal, 2)
	signal.Notify(signals, syscall.SIGINT, syscall.SIGTERM)
	defer signal.Stop(signals)

	env := os.Environ()
	if os.Getenv(urlVariable) == "" {
		server, err := startServer(signals, stderr)
		if err != nil {
			fmt.Fprintln(stderr, "testenv:", err)
			return exitFailed
		}
		fmt.Fprintln(stderr, "testenv:", server.Describe())
		env = append(env, urlVariable+"="+server.URL())
		defer func() {
			ctx, cancel := context.WithTimeout(context.Background(), stopTimeout)
			defer cancel()
			if err := server.Stop(ctx); err != nil {
				fmt.Fprintln(stderr, "testenv:", err)
			}
		}()
	}

	cmd := exec.Command(args[0], args[1:]...)
	cmd.Env, cmd.Stdin, cmd.Stdout, cmd.Stderr = env, stdin, stdout, stderr
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	if err := cmd.Start(); err != nil {
		fmt.Fprintln(stderr, "testenv: can't run the command:", err)
		return exitFailed
	}
	done := make(chan error, 1)
	go func() { done <- cmd.Wait() }()
	for sent := 0; ; {
		select {
		case err := <-done:
			return exitCode(err, stderr)
		case sig := <-signals:
			s, ok := sig.(syscall.Signal)
			if sent++; sent > 1 || !ok {
				s = syscall.SIGKILL
			}
			_ = syscall.Kill(-cmd.Process.Pid, s)
		}
	}
}

// startServer gives up at the first signal.
func startServer(signals <-chan os.Signal, stderr io.Writer) (*localdb.Server, error) {
	ctx, cancel := context.WithCancelCause(context.Background())
	defer cancel(nil)
	type result struct {
		server *localdb.Server
		err    error
	}
	started := make(chan result, 1)
	go func() {
		bounded, stop := context.WithTimeout(ctx, time.Minute)
		defer stop()
		server, err := localdb.StartTemp(bounded, stderr)
		started <- result{server, err}
	}()
	select {
	case r := <-started:
		return r.server, r.err
	case sig := <-signals:
		cancel(nil)
		r := <-started
		if r.server != nil {
			stopCtx, stop := context.WithTimeout(context.Background(), stopTimeout)
			defer stop()
			r.err = r.server.Stop(stopCtx)
		}
		return nil, errors.Join(fmt.Errorf("stopped by signal: %v", sig), r.err)
	}
}

func exitCode(err error, stderr io.Writer) int {
	var exit *exec.ExitError
	switch {
	case err == nil:
		return 0
	case !errors.As(err, &exit):
		fmt.Fprintln(stderr, "testenv:", err)
		return exitFailed
	}
	if status, ok := exit.Sys().(syscall.WaitStatus); ok && status.Signaled() {
		return exitSignal + int(status.Signal())
	}
	return exit.ExitCode()
}

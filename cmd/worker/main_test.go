package main

import (
	"bytes"
	"context"
	"errors"
	"os"
	"os/exec"
	"strings"
	"testing"
	"time"

	"reveille/cmd/internal/flags"
)

// asProgram makes the test binary the program that it tests.
const asProgram = "RV_TEST_AS_WORKER"

// patience bounds the run of a program that should end at once.
const patience = 60 * time.Second

func TestMain(m *testing.M) {
	if os.Getenv(asProgram) != "" {
		main()
		return
	}
	os.Exit(m.Run())
}

// TestRefused: how it was called is checked before any server is looked for,
// and told in one line with exit code 2.
func TestRefused(t *testing.T) {
	t.Parallel()
	for _, tc := range []struct{ args, want string }{
		{"--handler exec", "worker: --handler exec needs --exec CMD, the command that runs a step"},
		{"", "worker: --handler exec needs --exec CMD, the command that runs a step"},
		{"--handler http", "worker: --handler http needs --http-url URL, where a step is posted"},
		{"--handler http --exec true", "worker: --handler http needs --http-url URL, where a step is posted"},
		{"--handler http --http-url ftp://u:secret@host/", `worker: --http-url: URL with scheme "ftp": want http or https`},
		{"--handler smtp", "worker: --handler must be one of"},
	} {
		ctx, cancel := context.WithTimeout(t.Context(), patience)
		defer cancel()
		args := append(strings.Fields(tc.args), "--database-url=postgres://u@127.0.0.1:1/x", "--nats-url=nats://127.0.0.1:1", "--http=127.0.0.1:0")
		cmd := exec.CommandContext(ctx, os.Args[0], args...)
		for _, kv := range os.Environ() { // nothing of the machine's settings
			if !strings.HasPrefix(kv, "RV_") {
				cmd.Env = append(cmd.Env, kv)
			}
		}
		cmd.Env = append(cmd.Env, asProgram+"=1", "GORACE=atexit_sleep_ms=0")
		var stdout, stderr bytes.Buffer
		cmd.Stdout, cmd.Stderr = &stdout, &stderr
		err := cmd.Run()
		var exit *exec.ExitError
		if !errors.As(err, &exit) || exit.ExitCode() != 2 {
			t.Errorf("worker %s: %v, want exit code 2", tc.args, err)
		}
		got := stderr.String()
		if stdout.Len() > 0 || !strings.HasPrefix(got, tc.want) || strings.Count(got, "\n") != 1 || strings.Contains(got, "secret") {
			t.Errorf("worker %s printed %q and %q, want one line with %q", tc.args, stdout.String(), got, tc.want)
		}
	}
}

func TestVersion(t *testing.T) {
	t.Parallel()
	var stdout, stderr bytes.Buffer
	if err := run(t.Context(), []string{"--version"}, &stdout, &stderr); !errors.Is(err, flags.ErrHelp) || !strings.HasPrefix(stdout.String(), "worker ") || stderr.Len() > 0 {
		t.Errorf("--version: %v, printed %q and %q", err, stdout.String(), stderr.String())
	}
}

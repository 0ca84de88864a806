package main

import (
	"bytes"
	"context"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"
)

// helperEnv makes this test binary the command testenv itself.
const helperEnv = "TESTENV_TEST_MAIN"

func TestMain(m *testing.M) {
	if os.Getenv(helperEnv) != "" {
		main()
	}
	os.Exit(m.Run())
}

// testenv returns the command, with urlVariable set to url.
func testenv(t *testing.T, url string, args ...string) *exec.Cmd {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), 2*time.Minute)
	t.Cleanup(cancel)
	cmd := exec.CommandContext(ctx, os.Args[0], args...)
	cmd.Env = append(os.Environ(), helperEnv+"=1", urlVariable+"="+url)
	return cmd
}

func code(t *testing.T, cmd *exec.Cmd) int {
	t.Helper()
	if cmd.ProcessState == nil {
		t.Fatal("the command did not run")
	}
	return cmd.ProcessState.ExitCode()
}

// dataOf takes the data directory out of testenv's line about its server.
func dataOf(t *testing.T, stderr string) string {
	t.Helper()
	_, rest, ok := strings.Cut(stderr, "data in ")
	if !ok {
		t.Fatalf("no data directory in %q", stderr)
	}
	dir, _, _ := strings.Cut(rest, "\n")
	return dir
}

func TestCommandGetsServerAndItsExitCodeComesBack(t *testing.T) {
	t.Parallel()
	cmd := testenv(t, "", "--", "/bin/sh", "-c", `echo "$RV_TEST_DATABASE_URL"; cat; exit 7`)
	var stdout, stderr bytes.Buffer
	cmd.Stdin, cmd.Stdout, cmd.Stderr = strings.NewReader("input"), &stdout, &stderr
	cmd.Run()
	if code(t, cmd) != 7 || !strings.HasPrefix(stdout.String(), "postgres://") || !strings.HasSuffix(stdout.String(), "\ninput") {
		t.Errorf("exit code %d, output %q, %q", code(t, cmd), &stdout, &stderr)
	}
	data := dataOf(t, stderr.String())
	if _, err := os.Stat(filepath.Dir(filepath.Dir(data))); !os.IsNotExist(err) {
		t.Errorf("the folder of %s is left: %v", data, err)
	}
}

func TestServerOfTheCallerIsUsed(t *testing.T) {
	t.Parallel()
	cmd := testenv(t, "postgres://elsewhere/x", "--", "/bin/sh", "-c", `echo "$RV_TEST_DATABASE_URL"`)
	out, err := cmd.Output()
	if string(out) != "postgres://elsewhere/x\n" {
		t.Errorf("output %q, %v", out, err)
	}
}

func TestSignals(t *testing.T) {
	t.Parallel()
	for _, tc := range []struct {
		name, script string
		signals      []syscall.Signal
		want         int
	}{
		{"passed on", `trap 'exit 9' INT; echo ready; while :; do read line; done`, []syscall.Signal{syscall.SIGINT}, 9},
		{"ends the command", `echo ready; read line`, []syscall.Signal{syscall.SIGTERM}, 128 + 15},
		{"the second kills", `trap 'echo heard' TERM; echo ready; while :; do read line; done`, []syscall.Signal{syscall.SIGTERM, syscall.SIGTERM}, 128 + 9},
	} {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()
			cmd := testenv(t, "postgres://elsewhere/x", "/bin/sh", "-c", tc.script)
			in, err := cmd.StdinPipe() // kept open: `read` waits
			if err != nil {
				t.Fatal(err)
			}
			defer in.Close()
			out, err := cmd.StdoutPipe()
			if err != nil {
				t.Fatal(err)
			}
			if err := cmd.Start(); err != nil {
				t.Fatal(err)
			}
			for i, s := range tc.signals {
				want := "ready\n"
				if i > 0 {
					want = "heard\n"
				}
				line := make([]byte, len(want))
				if _, err := io.ReadFull(out, line); err != nil || string(line) != want {
					t.Fatalf("the command says %q, %v", line, err)
				}
				if err := cmd.Process.Signal(s); err != nil {
					t.Fatal(err)
				}
			}
			cmd.Wait()
			if code(t, cmd) != tc.want {
				t.Errorf("exit code %d, want %d", code(t, cmd), tc.want)
			}
		})
	}
}

func TestUsage(t *testing.T) {
	t.Parallel()
	for want, args := range map[int][]string{exitUsage: {"--"}, exitFailed: {"--", "/no/such/command"}} {
		cmd := testenv(t, "postgres://elsewhere/x", args...)
		var stderr bytes.Buffer
		cmd.Stderr = &stderr
		cmd.Run()
		if code(t, cmd) != want || strings.Count(stderr.String(), "\n") != 1 {
			t.Errorf("%v: exit code %d, %q", args, code(t, cmd), &stderr)
		}
	}
}

package app_test

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"os"
	"os/exec"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/nats-io/nats-server/v2/server"
	"go.uber.org/goleak"

	"reveille/bus"
	"reveille/claims"
	"reveille/claims/crdb"
	"reveille/internal/dbtest"
	"reveille/runner"
	"reveille/worker"
)

const (
	// asProgram makes the test binary the program that it tests.
	asProgram = "RV_TEST_AS_WORKER"
	// patience ends a test that hangs; no test waits for it otherwise.
	patience = 2 * time.Minute
)

func TestMain(m *testing.M) {
	if os.Getenv(asProgram) != "" {
		worker.Main(runner.HandlerFunc(step))
	}
	goleak.VerifyTestMain(dbtest.With(m, func(ctx context.Context, url string) error {
		_, err := crdb.Migrate(ctx, url, false)
		return err
	}))
}

// step says what its input is, and waits for its end where that is "wait".
func step(ctx context.Context, req runner.Request, out *runner.Output) (runner.Result, error) {
	body := string(req.Inputs[0].Body)
	if err := out.Text(body); err != nil {
		return runner.Result{}, err
	}
	if body == `"wait"` {
		<-ctx.Done()
		return runner.Result{}, context.Cause(ctx)
	}
	return runner.Result{Value: req.Inputs[0].Body}, nil
}

// program is the worker around step, with nothing of the machine's settings.
func program(ctx context.Context, args ...string) (cmd *exec.Cmd, stdout, stderr *bytes.Buffer) {
	cmd = exec.CommandContext(ctx, os.Args[0], args...)
	for _, kv := range os.Environ() {
		if !strings.HasPrefix(kv, "RV_") {
			cmd.Env = append(cmd.Env, kv)
		}
	}
	cmd.Env = append(cmd.Env, asProgram+"=1", "GORACE=atexit_sleep_ms=0")
	stdout, stderr = &bytes.Buffer{}, &bytes.Buffer{}
	cmd.Stdout, cmd.Stderr = stdout, stderr
	return cmd, stdout, stderr
}

// A program whose main is worker.Main runs steps, and at SIGTERM hands over the
// one that is open.
func TestWorkerInGo(t *testing.T) {
	database := dbtest.New(t) // may start a server first, which has a deadline of its own
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	nats, conn := startNATS(ctx, t)
	cmd, _, stderr := program(ctx, "--http=127.0.0.1:0", "--slots=2", "--grace=0s", "--nats-url="+nats)
	cmd.Env = append(cmd.Env, "RV_DATABASE_URL="+database)
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = cmd.Process.Kill() })

	wake := func(session claims.SessionID, body string) {
		t.Helper()
		in := &claims.Input{ID: "in_1", Delivery: claims.Queue, Body: json.RawMessage(body)}
		if _, err := bus.NewPublisher(conn).Wake(ctx, session, in, time.Time{}, bus.Publishing{}); err != nil {
			t.Fatal(err)
		}
	}
	wake("ends", `"Ada"`)
	ended := awaitEvent(ctx, t, conn, "ends", claims.StepEndedEvent)
	if want := `{"result":"Ada","continue":false}`; string(ended.Data) != want {
		t.Errorf("step.ended says %s, want %s", ended.Data, want)
	}
	wake("waits", `"wait"`)
	awaitEvent(ctx, t, conn, "waits", claims.TextEvent)
	if err := cmd.Process.Signal(syscall.SIGTERM); err != nil {
		t.Fatal(err)
	}
	if err := cmd.Wait(); err != nil {
		t.Errorf("worker ended with %v, want exit code 0; it said\n%s", err, stderr)
	}
	failed := awaitEvent(ctx, t, conn, "waits", claims.StepFailedEvent)
	if !strings.Contains(string(failed.Data), `"code":"shutdown"`) {
		t.Errorf("step.failed says %s, want code shutdown", failed.Data)
	}
	over := awaitEvent(ctx, t, conn, "waits", claims.ExecutionEnded)
	if !strings.Contains(string(over.Data), `"handed_over"`) {
		t.Errorf("execution.ended says %s, want handed_over", over.Data)
	}
}

// startNATS starts a server with all streams, and connects to it.
func startNATS(ctx context.Context, t *testing.T) (url string, conn *bus.Conn) {
	t.Helper()
	srv, err := server.NewServer(&server.Options{Host: "127.0.0.1", Port: server.RANDOM_PORT, NoSigs: true, NoLog: true, JetStream: true, StoreDir: t.TempDir()})
	if err != nil {
		t.Fatal(err)
	}
	srv.Start()
	t.Cleanup(func() {
		srv.Shutdown()
		srv.WaitForShutdown()
	})
	if !srv.ReadyForConnections(patience) {
		t.Fatal("the NATS server does not start")
	}
	if conn, err = bus.Connect(ctx, bus.Options{URL: srv.ClientURL(), Name: t.Name()}); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(conn.Close)
	if _, err := conn.Ensure(ctx, bus.StreamOptions{MaxClockSkew: time.Millisecond}); err != nil {
		t.Fatal(err)
	}
	return srv.ClientURL(), conn
}

// awaitEvent waits for the first event of a type in a session.
func awaitEvent(ctx context.Context, t *testing.T, conn *bus.Conn, session claims.SessionID, want claims.EventType) claims.Event {
	t.Helper()
	found := errors.New("found")
	var event claims.Event
	err := bus.Watch(ctx, conn, session, 1, func(r claims.Record) error {
		if event = r.Event; event.Type == want {
			return found
		}
		return nil
	})
	if !errors.Is(err, found) {
		t.Fatalf("no %s of session %s: %v", want, session, err)
	}
	return event
}

// What such a program is called with is told in one line, and its help has
// nothing of other handlers.
func TestCall(t *testing.T) {
	for _, c := range []struct {
		args string
		code int
		want string
	}{
		{"--exec true", 2, "--exec and --http-url are of the worker program: this one has a handler of its own"},
		{"--http-url http://h/", 2, "--exec and --http-url are of the worker program"},
		{"--slots 0", 2, "--slots is 0"},
		{"--nosuch", 2, "unknown flag --nosuch"},
		{"--lease 1s", 2, "--lease"},
		{"--help", 0, "--slots"},
	} {
		ctx, cancel := context.WithTimeout(t.Context(), patience)
		cmd, stdout, stderr := program(ctx, append(strings.Fields(c.args), "--database-url=postgres://u@127.0.0.1:1/x", "--nats-url=nats://127.0.0.1:1", "--http=127.0.0.1:0")...)
		err := cmd.Run()
		cancel()
		if code := cmd.ProcessState.ExitCode(); code != c.code {
			t.Errorf("%s: exit code %d (%v), want %d", c.args, code, err, c.code)
		}
		said := stderr.String() + stdout.String()
		if !strings.Contains(said, c.want) || c.code != 0 && strings.Count(said, "\n") != 1 {
			t.Errorf("%s printed %q, want one line with %q", c.args, said, c.want)
		}
		if c.code == 0 && (strings.Contains(said, "--exec") || strings.Contains(said, "--http-url") || strings.Contains(said, "--handler")) {
			t.Errorf("%s has flags of other handlers:\n%s", c.args, said)
		}
	}
}

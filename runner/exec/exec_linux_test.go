package exec

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"reveille/claims"
	"reveille/runner"
	"reveille/runner/exec/members"
	"reveille/runner/lines"
)

func TestOptions(t *testing.T) {
	for name, o := range map[string]Options{
		"no command":     {Command: " \n"},
		"zero byte":      {Command: "a\x00b"},
		"negative kill":  {Command: "a", KillAfter: -1},
		"too short line": {Command: "a", MaxLineBytes: 3},
	} {
		if _, err := New(o); err == nil || strings.Contains(err.Error(), "\n") {
			t.Errorf("%s: New = %v, want one line", name, err)
		}
	}
	h, err := New(Options{Command: "true"})
	if err != nil || h.opts.KillAfter != DefaultKillAfter || h.opts.MaxLineBytes != lines.DefaultMax {
		t.Errorf("New = %+v, %v, want the defaults", h, err)
	}
}

func TestRequestAndEnvironment(t *testing.T) {
	for name, value := range map[string]string{
		"RV_DATABASE_URL": "postgres://secret", "RV_NATS_CREDS": "secret", "RV_HTTP_URL": "http://u:secret@h", "RV_NATS_URL": "nats://u:secret@h",
		"PGPASSWORD": "secret", "PGPASSFILE": "secret", "PGSERVICEFILE": "secret", "PGSSLKEY": "secret", "PGSSLPASSWORD": "secret",
		"TRACEPARENT": "inherited", "RV_STEP": "inherited", "RV_EPOCH": "inherited", "RV_NAMESPACE": "kept",
	} {
		t.Setenv(name, value)
	}
	dir := t.TempDir()
	h := newHandler(t, Options{Command: fmt.Sprintf("cat > %[1]s/in; cat /proc/self/environ > %[1]s/env", dir)})
	for _, trace := range []string{"", "00-1-2-01"} {
		req := request()
		req.Trace = trace
		if _, err := h.Step(t.Context(), req, (&recorder{}).output()); err != nil {
			t.Fatal(err)
		}
		req.History = []claims.ClosedStep{}
		want, err := claims.Marshal(req)
		if err != nil {
			t.Fatal(err)
		}
		got, err := os.ReadFile(filepath.Join(dir, "in"))
		if err != nil || string(got) != string(want)+"\n" {
			t.Errorf("standard input = %q, %v, want the line %s", got, err, want)
		}
		env, err := os.ReadFile(filepath.Join(dir, "env"))
		if err != nil {
			t.Fatal(err)
		}
		entries := strings.Split(string(env), "\x00")
		for _, want := range []string{
			"RV_SESSION=ses_1", "RV_EXECUTION=" + string(req.Execution), "RV_EPOCH=3",
			"RV_STEP=" + string(req.Step), "RV_NAMESPACE=kept",
		} {
			if !slices.Contains(entries, want) {
				t.Errorf("environment lacks %s", want)
			}
		}
		if s := string(env); strings.Contains(s, "secret") || strings.Contains(s, "inherited") {
			t.Errorf("environment leaks: %q", entries)
		}
		if has := slices.Contains(entries, "TRACEPARENT="+trace); has != (trace != "") {
			t.Errorf("TRACEPARENT of %q there: %v", trace, has)
		}
	}
}

func TestEventsInOrder(t *testing.T) {
	rec := &recorder{}
	h := newHandler(t, Options{Command: `cat <<'END'
{"type":"text","text":"a<b"}
{"type":"tool.called","call":"c1","name":"grep","input":{"q": 1}}
{"type":"tool.succeeded","call":"c1","output":[1, 2]}
{"type":"ended","result":"first","continue":true}
plain
{"type":"tool.failed","call":"c2","error":"no"}
{"type":"ended","result":{"n": 1}}
{"type":"nosuch"}
END
printf 'no newline'`})
	result, err := h.Step(t.Context(), request(), rec.output())
	if err != nil || string(result.Value) != `{"n":1}` || result.Continue {
		t.Errorf("Step = %s, %v, %v, want the last ended", result.Value, result.Continue, err)
	}
	// encoding/json escapes < here, the log does not.
	want := `text {"text":"a\u003cb"}
tool.called {"call":"c1","name":"grep","input":{"q":1}}
tool.succeeded {"call":"c1","output":[1,2]}
text {"text":"plain\n"}
tool.failed {"call":"c2","error":"no"}
text {"text":"{\"type\":\"nosuch\"}\n"}
text {"text":"no newline"}
`
	if got := rec.lines(); got != want {
		t.Errorf("events\n%swant\n%s", got, want)
	}
}

func TestLongLines(t *testing.T) {
	const length = 10 << 20
	rec := &recorder{}
	h := newHandler(t, Options{Command: fmt.Sprintf(`
		head -c %d /dev/zero | tr '\0' x; echo
		printf '{"type":"text","text":"'; head -c %d /dev/zero | tr '\0' y; printf '"}\n'
		echo '{"type":"text","text":"z"}'`, length, lines.DefaultMax)})
	if _, err := h.Step(t.Context(), request(), rec.output()); err != nil {
		t.Fatal(err)
	}
	want := strings.Repeat("x", length) + "\n" + `{"type":"text","text":"` + strings.Repeat("y", lines.DefaultMax) + "\"}\nz"
	if got := rec.text(); got != want {
		t.Errorf("text has %d bytes, want %d", len(got), len(want))
	}
	for _, c := range rec.content {
		if n := len(c.Data.(claims.TextData).Text); n > lines.DefaultMax {
			t.Errorf("a piece has %d bytes", n)
		}
	}
}

func TestPartialLineIsFlushed(t *testing.T) {
	gate, seen := newFifo(t), make(chan string, 10)
	rec := &recorder{fail: func(c claims.Content) error {
		seen <- c.Data.(claims.TextData).Text
		return nil
	}}
	h := newHandler(t, Options{Command: "printf 'name? \\303'; read x < " + gate.path + "; printf '\\251 {\"type\":\"text\"}\\n'"})
	c := inBackground(t.Context(), h, request(), rec)
	if got := await(t, seen, "the prompt"); got != "name? " {
		t.Errorf("flushed %q, want the whole runes", got)
	}
	gate.open(t)
	if a := await(t, c, "the end"); a.err != nil {
		t.Error(a.err)
	}
	if got, want := rec.text(), "name? é {\"type\":\"text\"}\n"; got != want {
		t.Errorf("text = %q, want %q", got, want)
	}
}

func TestExitStatus(t *testing.T) {
	for _, c := range []struct {
		command string
		want    *runner.Failure
	}{
		{"exit 0", nil},
		{"echo why >&2; exit 1", &runner.Failure{Message: "exit status 1: why"}},
		{"exit 3", &runner.Failure{Message: "exit status 3"}},
		{"echo busy >&2; exit 75", &runner.Failure{Message: "exit status 75: busy", Retryable: true}},
		{"kill -KILL $$", &runner.Failure{Message: "killed by SIGKILL"}},
		{"ulimit -c 0; kill -SEGV $$", &runner.Failure{Message: "killed by SIGSEGV"}},
		{"printf 'a\\377b' >&2; exit 2", &runner.Failure{Message: "exit status 2: a\uFFFDb"}},
		{
			"head -c 100000 /dev/zero | tr '\\0' x >&2; echo é >&2; exit 2",
			&runner.Failure{Message: "exit status 2: " + strings.Repeat("x", messageBytes-2) + "é"},
		},
	} {
		_, err := newHandler(t, Options{Command: c.command}).Step(t.Context(), request(), (&recorder{}).output())
		if c.want == nil {
			if err != nil {
				t.Errorf("%s: %v", c.command, err)
			}
			continue
		}
		c.want.Code = claims.CodeExit
		assertFailure(t, err, *c.want)
	}
	_, err := newHandler(t, Options{Command: "nosuchcommand"}).Step(t.Context(), request(), (&recorder{}).output())
	var f *runner.Failure
	if !errors.As(err, &f) || !strings.HasPrefix(f.Message, "exit status 127: ") || f.Retryable {
		t.Errorf("unknown command: %v, want status 127 with the shell's words", err)
	}
}

func TestCannotStart(t *testing.T) {
	var f *runner.Failure
	h := newHandler(t, Options{Command: "true " + strings.Repeat("x", 1<<20)})
	_, err := h.Step(t.Context(), request(), (&recorder{}).output())
	if !errors.As(err, &f) || f.Code != claims.CodeExit || f.Retryable || !strings.Contains(f.Message, "argument list too long") {
		t.Errorf("too long a command: %v", err)
	}
	h = newHandler(t, Options{Command: "true"})
	h.shell = filepath.Join(t.TempDir(), "sh")
	_, err = h.Step(t.Context(), request(), (&recorder{}).output())
	if !errors.As(err, &f) || f.Code != claims.CodeExit || f.Retryable || !strings.Contains(f.Message, "no such file") {
		t.Errorf("no shell: %v", err)
	}
	for err, want := range map[error]bool{
		unix.EAGAIN: true, unix.ENOMEM: true, unix.EMFILE: true, unix.ENFILE: true, unix.ENOENT: false, unix.E2BIG: false,
	} {
		if got := isShortage(&os.PathError{Op: "fork/exec", Path: "/bin/sh", Err: err}); got != want {
			t.Errorf("isShortage(%v) = %v", err, got)
		}
	}
}

func TestShortOfDescriptors(t *testing.T) {
	var old unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_NOFILE, &old); err != nil {
		t.Fatal(err)
	}
	h, req, out := newHandler(t, Options{Command: "true"}), request(), (&recorder{}).output()
	if err := unix.Setrlimit(unix.RLIMIT_NOFILE, &unix.Rlimit{Cur: 3, Max: old.Max}); err != nil {
		t.Fatal(err)
	}
	_, err := h.Step(t.Context(), req, out)
	if err := unix.Setrlimit(unix.RLIMIT_NOFILE, &old); err != nil {
		t.Fatal(err)
	}
	var f *runner.Failure
	if !errors.As(err, &f) || f.Code != claims.CodeExit || !f.Retryable {
		t.Errorf("Step = %v, want a retryable failure", err)
	}
}

func TestStandardStreamsOfOddCommands(t *testing.T) {
	big := request()
	big.Inputs[0].Body = json.RawMessage(`"` + strings.Repeat("x", 1<<20) + `"`)
	for name, command := range map[string]string{
		"never reads its input":  "true",
		"closes its input":       "exec 0<&-; true",
		"reads a part of it":     "head -c 10 > /dev/null",
		"closes its output":      "exec 1>&-; cat > /dev/null",
		"closes its error":       "exec 2>&-; cat > /dev/null",
		"closes all of them":     "exec 0<&- 1>&- 2>&-; true",
		"has a child with input": "sleep 1000 & true",
	} {
		if _, err := newHandler(t, Options{Command: command}).Step(t.Context(), big, (&recorder{}).output()); err != nil {
			t.Errorf("a command that %s: %v", name, err)
		}
	}
}

func TestStderrToLog(t *testing.T) {
	var log strings.Builder
	h := newHandler(t, Options{
		Command: "echo one >&2; printf two >&2",
		Log:     slog.New(slog.NewTextHandler(&log, nil)),
	})
	if _, err := h.Step(t.Context(), request(), (&recorder{}).output()); err != nil {
		t.Fatal(err)
	}
	if s := log.String(); strings.Count(s, "stderr of the command") != 2 || !strings.Contains(s, "line=one") ||
		!strings.Contains(s, "line=two") || strings.Count(s, "session=ses_1") != 2 {
		t.Errorf("log = %s", s)
	}
}

func TestOutputFails(t *testing.T) {
	broken := errors.New("disk is full")
	for _, c := range []struct {
		err     error
		command string
		want    error
	}{
		{broken, "yes | head -c 1000000; exit 0", broken},
		{broken, "yes | head -c 1000000; exit 3", broken},
		{claims.ErrTooLarge, "echo x", claims.ErrTooLarge},
		{fmt.Errorf("record: %w", claims.ErrCancelled), "yes | head -c 1000000; exit 0", nil}, // the phase decides
		{runner.ErrStepOver, "echo x", nil},
	} {
		calls := 0
		rec := &recorder{fail: func(claims.Content) error { calls++; return c.err }}
		_, err := newHandler(t, Options{Command: c.command}).Step(t.Context(), request(), rec.output())
		if !errors.Is(err, c.want) || calls != 1 {
			t.Errorf("%q with %v: Step = %v after %d calls, want %v after 1", c.command, c.err, err, calls, c.want)
		}
	}
}

func TestDeclined(t *testing.T) {
	rec, pids, gate := &recorder{}, newFifo(t), newFifo(t)
	h := newHandler(t, Options{Command: `trap 'echo more; exit 3' TERM
		sh -c 'echo $$ > ` + pids.path + `; exec sleep 1000' & echo $$ > ` + pids.path + `
		read x < ` + gate.path + `
		echo before; echo '{"type":"declined","reason":"not today"}'; echo after; wait`})
	c := inBackground(t.Context(), h, request(), rec)
	all := []life{pids.process(t), pids.process(t)}
	gate.open(t)
	if a := await(t, c, "the end"); a.err != nil {
		t.Error(a.err)
	}
	assertGone(t, all...)
	if got := rec.text(); got != "before\n" || !slices.Equal(rec.reasons, []string{"not today"}) {
		t.Errorf("text = %q, reasons %q, want nothing after the decline", got, rec.reasons)
	}
}

func TestDeclineFails(t *testing.T) {
	broken := errors.New("no database")
	out := runner.NewOutput(func(claims.Content) error { return nil }, func(string) error { return broken })
	h := newHandler(t, Options{Command: `echo '{"type":"declined"}'; exec sleep 1000`})
	if _, err := h.Step(t.Context(), request(), out); !errors.Is(err, broken) {
		t.Errorf("Step = %v, want %v, and the command stopped", err, broken)
	}
}

// A step that is interrupted, in every way that a command may take it.
func TestI10InterruptionReturnsWhenAllAreGone(t *testing.T) {
	everyWay(t, testI10InterruptionReturnsWhenAllAreGone)
}

func testI10InterruptionReturnsWhenAllAreGone(t *testing.T, newHandler func(Options) *Handler) {
	const ignores = `trap '' TERM; `
	for name, c := range map[string]struct {
		command   string // $PIDS: tell a process; its last line must leave it blocked
		processes int
		killAfter time.Duration
	}{
		"dies of SIGTERM":            {`echo $$ > $PIDS; exec sleep 1000`, 1, never},
		"with a child":               {`sh -c 'echo $$ > $PIDS; exec sleep 1000' & echo $$ > $PIDS; wait`, 2, never},
		"ignores SIGTERM":            {ignores + `echo $$ > $PIDS; exec sleep 1000`, 1, time.Millisecond},
		"grandchild ignores SIGTERM": {`sh -c "trap '' TERM; (echo \$\$ > $PIDS; exec sleep 1000) & wait" & echo $$ > $PIDS; wait`, 2, time.Millisecond},
		"setsid grandchild":          {`setsid sh -c 'echo $$ > $PIDS; exec sleep 1000' & echo $$ > $PIDS; wait`, 2, never},
		"daemon":                     {`(setsid sh -c 'echo $$ > $PIDS; exec sleep 1000' &) ; echo $$ > $PIDS; exec sleep 1000`, 2, never},
		"setsid ignores SIGTERM":     {`setsid sh -c "trap '' TERM; echo \$\$ > $PIDS; exec sleep 1000" & echo $$ > $PIDS; wait`, 2, time.Millisecond},
		"child without environment":  {`P=$PIDS; env -i setsid sh -c 'echo $$ > '$P'; exec sleep 1000' & echo $$ > $PIDS; wait`, 2, never},
		"job control":                {`set -m; sh -c 'echo $$ > $PIDS; exec sleep 1000' & echo $$ > $PIDS; wait`, 2, never},
		"is stopped":                 {`echo $$ > $PIDS; kill -STOP $$`, 1, time.Millisecond},
	} {
		t.Run(name, func(t *testing.T) {
			pids := newFifo(t)
			t.Setenv("PIDS", pids.path)
			ctx, cancel := context.WithCancelCause(t.Context())
			h := newHandler(Options{Command: c.command, KillAfter: c.killAfter})
			done := inBackground(ctx, h, request(), &recorder{})
			var all []life
			for range c.processes {
				all = append(all, pids.process(t))
			}
			cancel(claims.ErrInterrupted)
			if a := await(t, done, "the end"); !errors.Is(a.err, claims.ErrInterrupted) {
				t.Errorf("Step = %v, want %v", a.err, claims.ErrInterrupted)
			}
			assertGone(t, all...)
		})
	}
}

func TestI7KilledKillsAtOnce(t *testing.T) {
	everyWay(t, testI7KilledKillsAtOnce)
}

func testI7KilledKillsAtOnce(t *testing.T, newHandler func(Options) *Handler) {
	pids := newFifo(t)
	t.Setenv("PIDS", pids.path)
	h := newHandler(Options{Command: `trap 'echo term > $PIDS' TERM
		setsid sh -c "trap '' TERM; echo \$\$ > $PIDS; exec sleep 1000" &
		echo $$ > $PIDS; while :; do wait; done`})
	killed := make(chan struct{})
	req := request()
	req.Killed = killed
	ctx, cancel := context.WithCancelCause(t.Context())
	done := inBackground(ctx, h, req, &recorder{})
	all := []life{pids.process(t), pids.process(t)}
	cancel(claims.ErrLeaseLost)
	if got := pids.line(t); got != "term" { // SIGTERM came, and was not enough
		t.Fatalf("command says %q", got)
	}
	close(killed)
	if a := await(t, done, "the end"); !errors.Is(a.err, claims.ErrLeaseLost) || !strings.Contains(a.err.Error(), "SIGKILL") {
		t.Errorf("Step = %v", a.err)
	}
	assertGone(t, all...)
}

func TestKilledWithoutCancellation(t *testing.T) {
	killed := make(chan struct{})
	close(killed)
	req := request()
	req.Killed = killed
	_, err := newHandler(t, Options{Command: "exec sleep 1000"}).Step(t.Context(), req, (&recorder{}).output())
	if !errors.Is(err, errKilled) {
		t.Errorf("Step = %v, want %v", err, errKilled)
	}
}

func TestCancelledBeforeStart(t *testing.T) {
	ctx, cancel := context.WithCancelCause(t.Context())
	cancel(claims.ErrShutdown)
	marker := filepath.Join(t.TempDir(), "ran")
	_, err := newHandler(t, Options{Command: "touch " + marker}).Step(ctx, request(), (&recorder{}).output())
	if _, stat := os.Stat(marker); !errors.Is(err, claims.ErrShutdown) || stat == nil {
		t.Errorf("Step = %v, file: %v, want no start", err, stat)
	}
}

// Whether a command that exits 0 on SIGTERM has succeeded.
func TestExitZeroWhenStopped(t *testing.T) {
	for last, want := range map[string]error{
		`echo '{"type":"ended","result":7}'`: nil,
		`echo bye`:                           claims.ErrShutdown,
	} {
		ready := newFifo(t)
		h := newHandler(t, Options{Command: "trap '" + strings.ReplaceAll(last, "'", `'\''`) + "; exit 0' TERM\necho go > " + ready.path + "\nwhile :; do read x < " + newFifo(t).path + "; done"})
		ctx, cancel := context.WithCancelCause(t.Context())
		done := inBackground(ctx, h, request(), &recorder{})
		ready.line(t)
		cancel(claims.ErrShutdown)
		a := await(t, done, "the end")
		if !errors.Is(a.err, want) || want == nil && string(a.result.Value) != "7" {
			t.Errorf("%s: Step = %s, %v, want %v", last, a.result.Value, a.err, want)
		}
	}
}

func TestI10LeaderExitsBeforeItsChildren(t *testing.T) {
	everyWay(t, testI10LeaderExitsBeforeItsChildren)
}

func testI10LeaderExitsBeforeItsChildren(t *testing.T, newHandler func(Options) *Handler) {
	for name, c := range map[string]struct {
		child     string
		killAfter time.Duration
	}{
		"child":              {`sh -c 'echo $$ > $PIDS; exec sleep 1000' &`, never},
		"child that ignores": {`sh -c "trap '' TERM; echo \$\$ > $PIDS; exec sleep 1000" &`, time.Millisecond},
		"daemon":             {`(setsid sh -c 'echo $$ > $PIDS; exec sleep 1000' &)`, never},
		"daemon that ignores": {
			`(setsid sh -c "trap '' TERM; echo \$\$ > $PIDS; (echo \$\$ > $PIDS; exec sleep 1000) & wait" &)`, time.Millisecond,
		},
		"daemon that forks when told to end": {
			`(setsid sh -c "trap 'sleep 1000 & sleep 1000' TERM; echo \$\$ > $PIDS; while :; do wait; done" &)`, time.Millisecond,
		},
	} {
		t.Run(name, func(t *testing.T) {
			pids, gate := newFifo(t), newFifo(t)
			t.Setenv("PIDS", pids.path)
			rec := &recorder{}
			h := newHandler(Options{
				Command:   c.child + "\nread x < " + gate.path + "\necho bye; echo '{\"type\":\"ended\",\"result\":1}'",
				KillAfter: c.killAfter,
			})
			done := inBackground(t.Context(), h, request(), rec)
			child := pids.process(t)
			gate.open(t)
			if a := await(t, done, "the end"); a.err != nil || string(a.result.Value) != "1" {
				t.Errorf("Step = %s, %v, want the leader's success", a.result.Value, a.err)
			}
			assertGone(t, child)
			if got := rec.text(); got != "bye\n" {
				t.Errorf("text = %q", got)
			}
		})
	}
}

// A member that the first SIGTERM was lost on gets another when the leader ends.
func TestLeftoversAreToldAgain(t *testing.T) {
	everyWay(t, testLeftoversAreToldAgain)
}

func testLeftoversAreToldAgain(t *testing.T, newHandler func(Options) *Handler) {
	pids, gate, blocked := newFifo(t), newFifo(t), newFifo(t)
	t.Setenv("PIDS", pids.path)
	h := newHandler(Options{Command: `trap 'read x < ` + gate.path + `; exit 1' TERM
		sh -c 'trap "trap - TERM; echo once > $PIDS" TERM; echo $$ > $PIDS; while :; do read x < ` + blocked.path + `; done' &
		while :; do wait; done`})
	ctx, cancel := context.WithCancelCause(t.Context())
	done := inBackground(ctx, h, request(), &recorder{})
	child := pids.process(t)
	cancel(claims.ErrInterrupted)
	if got := pids.line(t); got != "once" {
		t.Fatalf("child says %q", got)
	}
	gate.open(t)
	if a := await(t, done, "the end"); !errors.Is(a.err, claims.ErrInterrupted) {
		t.Errorf("Step = %v", a.err)
	}
	assertGone(t, child)
}

func TestKilledReachesWhatTheLeaderLeft(t *testing.T) {
	everyWay(t, testKilledReachesWhatTheLeaderLeft)
}

func testKilledReachesWhatTheLeaderLeft(t *testing.T, newHandler func(Options) *Handler) {
	pids, gate := newFifo(t), newFifo(t)
	t.Setenv("PIDS", pids.path)
	killed := make(chan struct{})
	req := request()
	req.Killed = killed
	h := newHandler(Options{Command: `sh -c 'trap "echo term > $PIDS" TERM; echo $$ > $PIDS; while :; do read x < ` + newFifo(t).path + `; done' &
		read x < ` + gate.path + `; exit 3`})
	done := inBackground(t.Context(), h, req, &recorder{})
	child := pids.process(t)
	gate.open(t)
	if got := pids.line(t); got != "term" {
		t.Fatalf("child says %q", got)
	}
	close(killed)
	assertFailure(t, await(t, done, "the end").err, runner.Failure{Code: claims.CodeExit, Message: "exit status 3"})
	assertGone(t, child)
}

func TestI10BlockedOutputDoesNotDelayTheKill(t *testing.T) {
	everyWay(t, testI10BlockedOutputDoesNotDelayTheKill)
}

func testI10BlockedOutputDoesNotDelayTheKill(t *testing.T, newHandler func(Options) *Handler) {
	pids, blocked, gate := newFifo(t), make(chan struct{}), make(chan struct{})
	var once sync.Once
	rec := &recorder{fail: func(claims.Content) error {
		once.Do(func() { close(blocked) })
		<-gate
		return claims.ErrCancelled
	}}
	ctx, cancel := context.WithCancelCause(t.Context())
	h := newHandler(Options{Command: "echo $$ > " + pids.path + "; trap '' TERM; exec yes", KillAfter: time.Millisecond})
	done := inBackground(ctx, h, request(), rec)
	leader := pids.process(t)
	await(t, blocked, "output")
	cancel(claims.ErrInterrupted)
	leader.awaitEnd(t) // the output is still blocked
	close(gate)
	if a := await(t, done, "the end"); !errors.Is(a.err, claims.ErrInterrupted) {
		t.Errorf("Step = %v", a.err)
	}
	assertGone(t, leader)
}

func TestManyAtOnce(t *testing.T) {
	everyWay(t, testManyAtOnce)
}

func testManyAtOnce(t *testing.T, newHandler func(Options) *Handler) {
	guard, err := StartGuard(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	defer guard.Close()
	h := newHandler(Options{Command: `echo $RV_STEP; (setsid sleep 1000 &)`, KillAfter: DefaultKillAfter, Guard: guard})
	var all sync.WaitGroup
	for range 20 {
		all.Go(func() {
			rec, req := &recorder{}, request()
			if _, err := h.Step(t.Context(), req, rec.output()); err != nil || rec.text() != string(req.Step)+"\n" {
				t.Errorf("Step = %v, text %q", err, rec.text())
			}
		})
	}
	all.Wait()
	if len(guard.steps) != 0 {
		t.Errorf("the guard still knows %v", guard.steps)
	}
}

func BenchmarkStep(b *testing.B) {
	h, err := New(Options{Command: "true"})
	if err != nil {
		b.Fatal(err)
	}
	for way, cgroups := range map[string]*members.Cgroups{"proc": nil, "cgroup": h.cgroups} {
		b.Run(way, func(b *testing.B) {
			h := &Handler{opts: h.opts, shell: h.shell, cgroups: cgroups}
			for b.Loop() {
				if _, err := h.Step(b.Context(), request(), (&recorder{}).output()); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}

package exec

import (
	"context"
	"encoding/json"
	"errors"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"reveille/claims"
	"reveille/runner"
	"reveille/runner/exec/members"
)

// A daemon that also dropped its environment is found by the step's cgroup
// only. Without one it is not of the step: it lives on, and though it holds all
// of the step's pipes, what is in them is read and no more is waited for.
func TestDaemonWithoutEnvironment(t *testing.T) {
	everyWay(t, func(t *testing.T, handler func(Options) *Handler) {
		for _, cause := range []error{nil, claims.ErrInterrupted} {
			testDaemonWithoutEnvironment(t, handler, cause)
		}
	})
}

func testDaemonWithoutEnvironment(t *testing.T, handler func(Options) *Handler, cause error) {
	pids, gate := newFifo(t), newFifo(t)
	rec := &recorder{}
	command := `(env -i setsid sh -c 'echo $$ > ` + pids.path + `; exec sleep 1000' &)
		read x < ` + gate.path + `; head -c 50000 /dev/zero | tr '\0' x`
	if cause != nil {
		command += "; exec sleep 1000"
	}
	h := handler(Options{Command: command})
	req := request()
	req.Inputs[0].Body = json.RawMessage(`"` + strings.Repeat("x", 1<<20) + `"`) // the pipe of standard input is full
	ctx, cancel := context.WithCancelCause(t.Context())
	defer cancel(nil)
	seen := make(chan struct{})
	var once sync.Once
	rec.fail = func(claims.Content) error { once.Do(func() { close(seen) }); return nil }
	done := inBackground(ctx, h, req, rec)
	daemon := pids.process(t)
	gate.open(t)
	if cause != nil {
		await(t, seen, "text")
		cancel(cause)
	}
	if a := await(t, done, "the end"); !errors.Is(a.err, cause) {
		t.Errorf("Step = %v, want %v", a.err, cause)
	}
	if got := rec.text(); cause == nil && got != strings.Repeat("x", 50000) {
		t.Errorf("text has %d bytes, want 50000", len(got))
	}
	if h.cgroups != nil {
		assertGone(t, daemon)
		return
	}
	if !daemon.lives() {
		t.Error("the daemon was found without a cgroup: then the documentation is wrong")
	}
	if err := unix.Kill(daemon.PID, unix.SIGKILL); err != nil {
		t.Error(err)
	}
	daemon.endAndReap(t)
}

// A chain of processes, each of which starts the next and ends, out of the
// group: whoever is found is gone before a signal comes. A cgroup is killed as
// a whole. Without one such a chain may get away; the step still returns.
func TestI10ChainOfProcesses(t *testing.T) {
	everyWay(t, func(t *testing.T, handler func(Options) *Handler) {
		said := newFifo(t)
		script := filepath.Join(t.TempDir(), "chain")
		if err := os.WriteFile(script, []byte("#!/bin/sh\ntrap '' TERM\nsetsid \"$0\" >/dev/null 2>&1 &\n"), 0o700); err != nil {
			t.Fatal(err)
		}
		ctx, cancel := context.WithCancelCause(t.Context())
		h := handler(Options{Command: "setsid " + script + "; echo go > " + said.path + "; exec sleep 1000", KillAfter: time.Millisecond})
		done := inBackground(ctx, h, request(), &recorder{})
		said.line(t)
		cancel(claims.ErrInterrupted)
		if a := await(t, done, "the end"); !errors.Is(a.err, claims.ErrInterrupted) {
			t.Errorf("Step = %v", a.err)
		}
		if h.cgroups != nil {
			if pid, err := unix.Wait4(-1, nil, unix.WNOHANG, nil); !errors.Is(err, unix.ECHILD) {
				t.Errorf("process %d is left: %v", pid, err)
			}
			return
		}
		if err := os.Remove(script); err != nil { // which ends it
			t.Fatal(err)
		}
		reaped := make(chan struct{})
		go func() {
			defer close(reaped)
			for {
				if _, err := unix.Wait4(-1, nil, 0, nil); errors.Is(err, unix.ECHILD) {
					return
				}
			}
		}()
		await(t, reaped, "the end of the chain")
	})
}

// An orphan that ended before anybody looked is known by its cgroup, and reaped
// with the step; else it is left until it is old.
func TestOrphanThatEndedUnseen(t *testing.T) {
	everyWay(t, func(t *testing.T, handler func(Options) *Handler) {
		pids, gate, end := newFifo(t), newFifo(t), newFifo(t)
		h := handler(Options{Command: `(setsid sh -c 'echo $$ > ` + pids.path + `; read x < ` + end.path + `' &)
			read x < ` + gate.path})
		done := inBackground(t.Context(), h, request(), &recorder{})
		orphan := pids.process(t)
		end.open(t)
		orphan.awaitEnd(t)
		gate.open(t)
		if a := await(t, done, "the end"); a.err != nil {
			t.Fatal(a.err)
		}
		if h.cgroups == nil {
			orphan.endAndReap(t)
		}
		assertGone(t, orphan)
	})
}

// Where a cgroup can be made and not be entered, there is a step all the same.
func TestCgroupThatCannotBeEntered(t *testing.T) {
	dir := t.TempDir()
	for name, at := range map[string]string{"is none": dir, "can't be made": filepath.Join(dir, "missing")} {
		h := newHandler(t, Options{Command: "echo x; exit 3"})
		h.cgroups = members.CgroupsAt(at)
		rec := &recorder{}
		_, err := h.Step(t.Context(), request(), rec.output())
		assertFailure(t, err, runner.Failure{Code: claims.CodeExit, Message: "exit status 3"})
		if rec.text() != "x\n" {
			t.Errorf("%s: text %q", name, rec.text())
		}
	}
	if left, err := os.ReadDir(dir); err != nil || len(left) > 0 {
		t.Errorf("left behind: %v, %v", left, err)
	}
}

// A command that closes its output goes on; its exit is the end.
func TestClosedOutputIsNotTheEnd(t *testing.T) {
	pids, gate := newFifo(t), newFifo(t)
	rec := &recorder{}
	h := newHandler(t, Options{Command: "echo before; exec 1>&- 2>&-; echo $$ > " + pids.path + "; read x < " + gate.path + "; echo after; exit 3"})
	done := inBackground(t.Context(), h, request(), rec)
	leader := pids.process(t)
	if !leader.lives() {
		t.Error("the command ended with its output")
	}
	gate.open(t)
	assertFailure(t, await(t, done, "the end").err, runner.Failure{Code: claims.CodeExit, Message: "exit status 3"})
	if rec.text() != "before\n" {
		t.Errorf("text %q", rec.text())
	}
}

func TestInvalidUTF8(t *testing.T) {
	rec := &recorder{}
	h := newHandler(t, Options{Command: `printf 'a\377b\n{"type":"text","text":"c\377"}\n{"type":"ended","result":"\377"}\n\303'`})
	result, err := h.Step(t.Context(), request(), rec.output())
	if want := "a\uFFFDb\nc\uFFFD\uFFFD"; err != nil || rec.text() != want || string(result.Value) != "\"\uFFFD\"" {
		t.Errorf("Step = %s, %v, text %q, want %q", result.Value, err, rec.text(), want)
	}
}

// 100 MB of text from one command, to a log that takes none of it for a while:
// the command waits, nothing piles up, and all of it comes.
func TestFloodIsBounded(t *testing.T) {
	const (
		lines, length = 100_000, 1000
		bound         = 16 << 20 // of the heap, over what there was
	)
	heap := func() int64 {
		runtime.GC()
		var m runtime.MemStats
		runtime.ReadMemStats(&m)
		return int64(m.HeapAlloc)
	}
	before, most := heap(), int64(0)
	got, pieces := 0, 0
	blocked, gate := make(chan struct{}), make(chan struct{})
	out := runner.NewOutput(func(c claims.Content) error {
		if pieces++; pieces == 1 {
			close(blocked)
			<-gate
		}
		got += len(c.Data.(claims.TextData).Text)
		if pieces%(lines/20) == 0 {
			most = max(most, heap()-before)
		}
		return nil
	}, nil)
	pids := newFifo(t)
	h := newHandler(t, Options{Command: "echo $$ > " + pids.path + "; yes " + strings.Repeat("x", length-1) + " | head -n 100000"})
	done := make(chan error, 1)
	go func() {
		_, err := h.Step(t.Context(), request(), out)
		done <- err
	}()
	leader := pids.process(t)
	await(t, blocked, "output")
	if grown := heap() - before; grown > bound || !leader.lives() {
		t.Errorf("with its output blocked the command lives: %v, and %d bytes are held", leader.lives(), grown)
	}
	close(gate)
	if err := await(t, done, "the end"); err != nil {
		t.Error(err)
	}
	if got != lines*length || most > bound {
		t.Errorf("%d bytes of text, want %d; at most %d were held, want %d", got, lines*length, most, bound)
	}
}

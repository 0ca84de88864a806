package dev

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"reveille/cmd/internal/devstate"
	"reveille/cmd/internal/flags"
)

// TestDemo runs the demo as a worker does, with a sleep that takes no time.
func TestDemo(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	if err := os.WriteFile(filepath.Join(dir, "sleep"), []byte("#!/bin/sh\n"), 0o755); err != nil {
		t.Fatal(err)
	}
	var counted strings.Builder
	for n := range 10 {
		fmt.Fprintf(&counted, "%d of 10\n", n+1)
	}
	counted.WriteString(`{"type":"ended","result":"counted to ten"}` + "\n")
	const history = `"history":[{"step":"x","inputs":[{"id":"old","delivery":"queue","body":"old"}],"text":"","result":null,"status":"ended"}]}`
	for request, want := range map[string]string{
		`{"session":"s1","index":1,"inputs":[{"id":"in_1","delivery":"queue","body":"hi"}],"continues":null,` + history: `got [{"id":"in_1","delivery":"queue","body":"hi"}]` + "\n",
		`{"session":"s1","index":1,"inputs":[],"continues":{"kind":"recovery","step":"x","attempt":1},` + history:       "the step before was cut off, this one goes on for it\ngot []\n",
	} {
		cmd := exec.Command("/bin/sh", "-c", Demo)
		cmd.Env = append(os.Environ(), "PATH="+dir+string(os.PathListSeparator)+os.Getenv("PATH"))
		cmd.Stdin = strings.NewReader(request + "\n")
		got, err := cmd.CombinedOutput()
		if err != nil || string(got) != want+counted.String() {
			t.Errorf("%s: %v, printed\n%s", request, err, got)
		}
	}
}

func TestConsole(t *testing.T) {
	t.Parallel()
	for _, tc := range []struct{ level, line, want string }{
		{"warn", `{"time":"x","level":"INFO","msg":"worker up","worker":"w","slots":16,"http":"127.0.0.1:9090"}`, "worker up slots=16 http=127.0.0.1:9090"},
		{"warn", `{"time":"x","level":"INFO","msg":"connected to NATS"}`, ""},
		{"info", `{"time":"x","level":"INFO","msg":"connected to NATS"}`, "connected to NATS"},
		{"warn", `{"level":"WARN","msg":"waiting","error":"two words\n","n":{"a":1}}`, `WARN waiting error="two words\n" n="{\"a\":1}"`},
		{"error", `{"level":"WARN","msg":"waiting"}`, ""},
		{"debug", `{"level":"DEBUG","msg":"detail"}`, "DEBUG detail"},
		{"warn", `{"level":"INFO","msg":"stderr of the command","session":"s1","step":"x","line":"careful \u001b[2J \"now\""}`, `stderr of s1: careful \x1b[2J "now"`},
		{"error", "panic: nil\x07", `panic: nil\a`},
		{"warn", `{"broken":`, `{"broken":`},
	} {
		var out bytes.Buffer
		c := newConsole(&out, tc.level)
		c.line("worker-1", []byte(tc.line))
		got := strings.TrimSuffix(out.String(), "\n")
		if got != "" {
			if _, err := time.Parse(time.TimeOnly, got[:8]); err != nil {
				t.Errorf("%s: line %q begins with no time", tc.line, got)
			}
			got = strings.TrimPrefix(got[8:], " worker-1  ")
		}
		if got != tc.want {
			t.Errorf("%s at %s: %q, want %q", tc.line, tc.level, got, tc.want)
		}
	}
	if got := newConsole(io.Discard, "warn").childLevel(); got != "info" {
		t.Errorf("children log at %s, want info: their starts are shown", got)
	}
	if got := newConsole(io.Discard, "debug").childLevel(); got != "debug" {
		t.Errorf("children log at %s, want debug", got)
	}
}

func TestLineWriter(t *testing.T) {
	t.Parallel()
	var got []string
	w := &lineWriter{line: func(b []byte) { got = append(got, string(b)) }}
	for _, piece := range []string{"one\ntw", "o\n\nth", "ree"} {
		if n, err := w.Write([]byte(piece)); n != len(piece) || err != nil {
			t.Fatal(n, err)
		}
	}
	w.end()
	long := strings.Repeat("x", maxLine+10)
	fmt.Fprintln(w, long)
	w.end()
	if len(got) != 4 || got[0] != "one" || got[1] != "two" || got[2] != "three" || got[3] != long[:maxLine] {
		t.Errorf("lines are %.80q", got)
	}
}

func TestState(t *testing.T) {
	t.Parallel()
	dir := filepath.Join(t.TempDir(), "a", "b")
	if s, _, err := devstate.Discover(dir); s != nil || err != nil {
		t.Fatalf("found %+v, %v where nothing is", s, err)
	}
	s, err := openState(dir)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := openState(dir); err == nil || !strings.Contains(err.Error(), fmt.Sprintf("another reveille dev (pid %d)", os.Getpid())) {
		t.Errorf("a second lock: %v", err)
	}
	want := devstate.Servers{PID: 1, NATSURL: "nats://x", DatabaseURL: "postgres://u:secret@y", Namespace: "rv"}
	forget, err := s.remember(want)
	if err != nil {
		t.Fatal(err)
	}
	got, path, err := devstate.Discover(dir)
	if err != nil || *got != want {
		t.Errorf("found %+v, %v", got, err)
	}
	if info, err := os.Stat(path); err != nil || info.Mode().Perm() != 0o600 {
		t.Errorf("%s with the password: %v, %v", path, info.Mode(), err)
	}
	forget()
	if s, _, err := devstate.Discover(dir); s != nil || err != nil {
		t.Errorf("found %+v, %v after it was forgotten", s, err)
	}
	if err := s.close(); err != nil {
		t.Fatal(err)
	}
	again, err := openState(dir)
	if err != nil {
		t.Fatalf("the lock was not freed: %v", err)
	}
	if err := again.close(); err != nil {
		t.Error(err)
	}
}

// TestChildRefuses: a child that refuses its settings is not started over and over.
func TestChildRefuses(t *testing.T) {
	t.Parallel()
	var out bytes.Buffer
	s := &supervisor{self: "/bin/sh", console: newConsole(&out, "warn"), stopTimeout: time.Minute}
	c := &child{name: "worker-1", port: 19090, args: func(string) []string { return []string{"-c", "echo bad flag >&2; exit 2"} }}
	err := s.run(t.Context(), c)
	if err == nil || !strings.Contains(err.Error(), "worker-1 refuses its settings") || !strings.Contains(out.String(), "bad flag") {
		t.Errorf("%v, printed %q", err, out.String())
	}
	s.self = filepath.Join(t.TempDir(), "none")
	if err := s.run(t.Context(), c); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("a program that there is not: %v", err)
	}
}

// It is alone: where other tests fork, their children have copies of its sockets for a moment.
func TestFreeAddress(t *testing.T) {
	s := &supervisor{}
	a, b := &child{name: "a", port: 19190}, &child{name: "b", port: 19190}
	first, err := s.freeAddress(a)
	if err != nil {
		t.Fatal(err)
	}
	second, err := s.freeAddress(b)
	if err != nil || second == first {
		t.Errorf("both children get %s: %v", first, err)
	}
	if again, err := s.freeAddress(a); err != nil || again != first {
		t.Errorf("a gets %s, then %s: %v", first, again, err)
	}
	held, err := net.Listen("tcp", first)
	if err != nil {
		t.Fatal(err)
	}
	polls := 0
	s.sleep = func(time.Duration) { // its socket lingers for two looks
		if polls++; polls == 2 {
			_ = held.Close()
		}
	}
	if again, err := s.freeAddress(a); err != nil || again != first || polls != 2 {
		t.Errorf("a gets %s, then %s after %d looks: %v", first, again, polls, err)
	}
}

func TestQuote(t *testing.T) {
	t.Parallel()
	for in, want := range map[string]string{"a/b-c.sh": "a/b-c.sh", "": "''", "a b": "'a b'", "it's": `'it'\''s'`} {
		if got := quote(in); got != want {
			t.Errorf("%q is %s, want %s", in, got, want)
		}
	}
}

func TestFlagsRefused(t *testing.T) {
	t.Parallel()
	good := Flags{
		Workers: 2, NATSPort: 4222, Namespace: "rv", Slots: 16, Lease: 6 * time.Second, Heartbeat: time.Second,
		MaxClockSkew: time.Second, StopMargin: time.Second, DBTimeout: 2 * time.Second, Handler: "exec",
	}
	if err := good.validate(); err != nil {
		t.Fatal(err)
	}
	for name, change := range map[string]func(*Flags){
		"workers": func(f *Flags) { f.Workers = 65 }, "port": func(f *Flags) { f.NATSPort = -1 }, "slots": func(f *Flags) { f.Slots = 0 },
		"grace": func(f *Flags) { f.Grace = -1 }, "namespace": func(f *Flags) { f.Namespace = "." }, "lease": func(f *Flags) { f.Lease = 5 * time.Second },
		"no URL": func(f *Flags) { f.Handler = "http" }, "URL": func(f *Flags) { f.Handler, f.HTTPURL = "http", "ftp://host" },
		"URL for the demo": func(f *Flags) { f.HTTPURL = "http://host" },
	} {
		f := good
		change(&f)
		var exit *flags.Exit
		if err := f.validate(); !errors.As(err, &exit) || exit.Code != 2 {
			t.Errorf("%s: %v, want a usage error", name, err)
		}
	}
}

// TestHandlerFlags: what runs the steps reaches the workers, a password only by their environment.
func TestHandlerFlags(t *testing.T) {
	t.Parallel()
	for _, tc := range []struct {
		flags        Flags
		args, banner string
	}{
		{Flags{Handler: "exec"}, "--handler=exec --exec=" + Demo, "run a demo that counts to ten"},
		{Flags{Handler: "exec", Exec: "cat x\ntrue"}, "--handler=exec --exec=cat x\ntrue", "run by /bin/sh -c 'cat x …'"},
		{Flags{Handler: "exec", Exec: "true", HTTPURL: "http://u:secret@host/step"}, "--handler=exec --exec=true", "run by /bin/sh -c true"},
		{Flags{Handler: "http", HTTPURL: "http://u:secret@host/step"}, "--handler=http", "posted to http://u:xxxxx@host/step"},
	} {
		tc.flags.Workers = 1
		if err := tc.flags.validateHandler(); err != nil {
			t.Error(err)
		}
		d := &dev{flags: tc.flags, console: newConsole(io.Discard, "warn")}
		for _, c := range d.children() {
			args := strings.Join(c.args("127.0.0.1:1"), " ")
			if is := strings.HasSuffix(args, tc.args); is != (c.name == "worker-1") || strings.Contains(args, "secret") {
				t.Errorf("%s gets %s, want the worker, and nobody else, to get %s", c.name, args, tc.args)
			}
		}
		if got := tc.flags.steps(); !strings.HasPrefix(got, tc.banner) || strings.Contains(got, "secret") {
			t.Errorf("the banner says %q, want %q", got, tc.banner)
		}
	}
}

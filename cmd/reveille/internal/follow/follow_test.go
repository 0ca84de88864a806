package follow_test

import (
	"bufio"
	"bytes"
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"reveille/claims"
	"reveille/cmd/reveille/internal/follow"
)

var update = flag.Bool("update", false, "write the golden files anew")

// sequence reads events as they are written in testdata: one a line, "seq type
// execution step data"; a dash is nothing, a number sign begins a comment.
func sequence(t *testing.T, text string) []claims.Record {
	t.Helper()
	var out []claims.Record
	for line := range strings.Lines(text) {
		line, _, _ = strings.Cut(line, " # ")
		if line = strings.TrimSpace(line); line == "" || line[0] == '#' {
			continue
		}
		fields := strings.Fields(line)
		if len(fields) < 4 {
			t.Fatalf("event %q: want seq, type, execution, step and perhaps data", line)
		}
		seq, err := strconv.ParseInt(fields[0], 10, 64)
		if err != nil {
			t.Fatal(err)
		}
		dash := func(s string) string { return strings.Trim(s, "-") }
		r := claims.Record{Event: claims.Event{
			Session: "s1", Seq: seq, Type: claims.EventType(fields[1]), Execution: claims.ExecutionID(dash(fields[2])),
			Step: claims.StepID(dash(fields[3])), Epoch: 1, Data: []byte("{}"),
			Time: claims.Stamp(time.Date(2026, 11, 29, 23, 59, 55, 0, time.UTC).Add(time.Duration(seq) * 500 * time.Millisecond)),
		}}
		if at := strings.IndexByte(line, '{'); at >= 0 {
			r.Data = []byte(line[at:])
		}
		out = append(out, r)
	}
	return out
}

// TestWait plays the recorded sequences of testdata/wait: each begins with "wait INPUT SINCE [QUARANTINED]" and ends
// with "exit CODE AT TEXT", where AT is the sequence at which the wait was over, or "waiting".
func TestWait(t *testing.T) {
	t.Parallel()
	for name, c := range cases(t, "testdata/wait") {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			words := strings.Fields(c.head)
			since, err := strconv.ParseInt(words[2], 10, 64)
			if err != nil {
				t.Fatal(err)
			}
			w := follow.NewWait(strings.Trim(words[1], "-"), since, strings.Join(words[3:], " "))
			got := "waiting"
			if o, done := w.Past(); since == 0 && done {
				got = fmt.Sprintf("exit %d 0 %s", o.Code, o.Text)
			}
			for _, r := range sequence(t, c.events) {
				if got != "waiting" {
					break
				}
				o, done := w.Event(r)
				if !done && r.Seq == since {
					o, done = w.Past()
				}
				if done {
					got = fmt.Sprintf("exit %d %d %s", o.Code, r.Seq, o.Text)
				}
			}
			if got != c.want {
				t.Errorf("got  %s\nwant %s", got, c.want)
			}
		})
	}
}

// TestStop plays testdata/stop: as TestWait, with "stop EXECUTION SINCE [QUARANTINED]"; at the end the interrupt is
// applied and nothing comes any more.
func TestStop(t *testing.T) {
	t.Parallel()
	for name, c := range cases(t, "testdata/stop") {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			words := strings.Fields(c.head)
			since, err := strconv.ParseInt(words[2], 10, 64)
			if err != nil {
				t.Fatal(err)
			}
			s := follow.NewStop(claims.ExecutionID(strings.Trim(words[1], "-")), since, strings.Join(words[3:], " "))
			got := ""
			for _, r := range sequence(t, c.events) {
				if o, done := s.Event(r); done {
					got = fmt.Sprintf("exit %d %d %s", o.Code, r.Seq, o.Text)
					break
				}
			}
			if o, done := s.Idle(); got == "" && done {
				got = fmt.Sprintf("exit %d idle %s", o.Code, o.Text)
			} else if got == "" {
				got = "waiting"
			}
			if got != c.want {
				t.Errorf("got  %s\nwant %s", got, c.want)
			}
		})
	}
}

type testCase struct{ head, events, want string }

// cases reads a file of cases: "== name", a head, events, what is wanted.
func cases(t *testing.T, file string) map[string]testCase {
	t.Helper()
	f, err := os.Open(file)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	out := map[string]testCase{}
	var name string
	var lines []string
	flush := func() {
		if name != "" {
			out[name] = testCase{lines[0], strings.Join(lines[1:len(lines)-1], "\n"), lines[len(lines)-1]}
		}
	}
	for in := bufio.NewScanner(f); in.Scan(); {
		line := strings.TrimSpace(in.Text())
		switch rest, ok := strings.CutPrefix(line, "== "); {
		case ok:
			flush()
			name, lines = rest, nil
		case line != "" && line[0] != '#':
			lines = append(lines, line)
		}
	}
	flush()
	if len(out) == 0 {
		t.Fatalf("%s has no cases", file)
	}
	return out
}

func TestText(t *testing.T) {
	t.Parallel()
	for _, tc := range []struct{ name, pieces, want string }{
		{"live first", "l:one ,l:two,d:one two", "one two"},
		{"durable first", "d:one two,l:one ,l:two", "one two"},
		{"interleaved", "l:one ,d:one t,l:two,d:wo three,l: three,l: four,d: four", "one two three four"},
		{"no live", "d:one ,d:two", "one two"},
		{"live lost in the middle", "l:one ,l:three,d:one two three,d: four,l: four", "one three\nwo three four"},
		{"live lost at the beginning", "l:two,d:one ,d:two", "two\none two"},
		{"live lost, durable ahead", "d:one two three,l:three,d: four,l: four", "one two three four"},
		{"live lost at the end", "l:one,d:one two", "one two"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()
			var text follow.Text
			got := ""
			for piece := range strings.SplitSeq(tc.pieces, ",") {
				if s, ok := strings.CutPrefix(piece, "l:"); ok {
					got += text.Live(s)
				} else {
					got += text.Durable(strings.TrimPrefix(piece, "d:"))
				}
			}
			if got != tc.want {
				t.Errorf("%q shows %q, want %q", tc.pieces, got, tc.want)
			}
		})
	}
}

// TestPrinter shows testdata/events, with live text before some, and compares with the golden file.
func TestPrinter(t *testing.T) {
	t.Parallel()
	text, err := os.ReadFile("testdata/events")
	if err != nil {
		t.Fatal(err)
	}
	var got bytes.Buffer
	p := follow.NewPrinter(&got, time.UTC)
	for line := range strings.Lines(string(text)) {
		if live, ok := strings.CutPrefix(line, "live "); ok {
			step, quoted, _ := strings.Cut(strings.TrimSpace(live), " ")
			s, err := strconv.Unquote(quoted)
			if err != nil {
				t.Fatal(err)
			}
			if err := p.Live("s1", claims.StepID(step), s); err != nil {
				t.Fatal(err)
			}
			continue
		}
		for _, r := range sequence(t, line) {
			if err := p.Event(r, true); err != nil {
				t.Fatal(err)
			}
		}
	}
	golden(t, "testdata/events.golden", got.Bytes())
}

func golden(t *testing.T, file string, got []byte) {
	t.Helper()
	if *update {
		if err := os.WriteFile(filepath.FromSlash(file), got, 0o644); err != nil {
			t.Fatal(err)
		}
	}
	want, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	if !bytes.Equal(got, want) {
		t.Errorf("got:\n%s\nwant %s (go test -update writes it):\n%s", got, file, want)
	}
}

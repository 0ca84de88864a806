package exec

import (
	"bytes"
	"context"
	"errors"
	"io"
	"log/slog"
	"os"
	"regexp"
	"strings"
	"testing"
	"time"
	"unicode/utf8"

	"golang.org/x/sys/unix"
)

func newParser(rec *recorder) *parser {
	return &parser{out: rec.output(), max: DefaultMaxLineBytes, declined: make(chan struct{})}
}

func TestLines(t *testing.T) {
	deep := `{"type":"ended","result":` + strings.Repeat("[", 2000) + strings.Repeat("]", 2000) + "}"
	for line, event := range map[string]bool{
		`{"type":"text","text":"x"}`:                     true,
		` 	{"type":"text","text":""} ` + "\r":            true,
		`{"type":"text","text":"x","call":7}`:            true, // call is nothing of a text
		`{"type":"tool.called","call":"c","name":"n"}`:   true,
		`{"type":"tool.succeeded","call":"c"}`:           true,
		`{"type":"tool.failed","call":"c"}`:              true,
		`{"type":"ended"}`:                               true,
		`{"type":"ended","result":null,"continue":true}`: true,
		`{"type":"declined"}`:                            true,
		``:                                               false,
		`x`:                                              false,
		`{`:                                              false,
		`{}`:                                             false,
		`[{"type":"text","text":"x"}]`:                   false,
		`{"type":"text","text":"x"} {"type":"text","text":"x"}`: false,
		`{"type":"text"}`:                                        false,
		`{"type":"text","text":null}`:                            false,
		`{"type":"text","text":7}`:                               false,
		`{"type":7}`:                                             false,
		`{"type":"step.ended"}`:                                  false,
		`{"type":"tool.called","call":"c"}`:                      false,
		`{"type":"tool.called","call":7,"name":"n"}`:             false,
		`{"type":"tool.succeeded"}`:                              false,
		`{"type":"tool.failed","call":"c","error":{"code":"x"}}`: false,
		`{"type":"ended","continue":"yes"}`:                      false,
		`{"type":"declined","reason":7}`:                         false,
		deep:                                                     false,
	} {
		rec := &recorder{}
		p := newParser(rec)
		p.add([]byte(line + "\n"))
		if asText := rec.text() == line+"\n"; asText == event {
			t.Errorf("%q: event %v, want %v (%s)", line, !asText, event, rec.lines())
		}
		if p.err != nil {
			t.Errorf("%q: %v", line, p.err)
		}
	}
}

func TestInvalidUTF8(t *testing.T) {
	rec := &recorder{}
	p := newParser(rec)
	p.add([]byte("a\xffb\n{\"type\":\"text\",\"text\":\"c\xff\"}\n{\"type\":\"tool.called\",\"call\":\"\xff\",\"name\":\"n\",\"input\":\"\xff\"}\n" +
		"{\"type\":\"ended\",\"result\":\"\xff\"}\n"))
	want := "text {\"text\":\"a\uFFFDb\\n\"}\ntext {\"text\":\"c\uFFFD\"}\ntool.called {\"call\":\"\uFFFD\",\"name\":\"n\",\"input\":\"\uFFFD\"}\n"
	if got := rec.lines(); got != want || string(p.result.Value) != "\"\uFFFD\"" {
		t.Errorf("events\n%sand %s, want\n%s", got, p.result.Value, want)
	}
}

// However a line is read, flushed and cut, its text is the same, in pieces that
// are valid wherever the line is.
func FuzzText(f *testing.F) {
	f.Add([]byte("héllo\nwörld"), uint8(3), uint8(1))
	f.Add(bytes.Repeat([]byte("日本語"), 100), uint8(7), uint8(2))
	f.Add([]byte("\xf0\x9f\x98 \xff\xff{\n"), uint8(1), uint8(1))
	runs := regexp.MustCompile("\uFFFD+")
	f.Fuzz(func(t *testing.T, in []byte, size, flushes uint8) {
		rec := &recorder{}
		p := newParser(rec)
		p.max = minLineBytes
		for i, rest := 0, in; len(rest) > 0; i++ {
			n := min(len(rest), 1+int(size))
			p.add(rest[:n])
			if rest = rest[n:]; flushes > 0 && i%int(flushes) == 0 && p.canFlush() {
				p.flush()
			}
			if len(p.pending) > minLineBytes {
				t.Fatalf("%d bytes are pending", len(p.pending))
			}
		}
		if len(p.pending) > 0 {
			p.line("")
		}
		if bytes.Contains(in, []byte("type")) {
			return // may be an event
		}
		// A run of bad bytes is one U+FFFD, two where it was cut.
		want := runs.ReplaceAllString(strings.ToValidUTF8(string(in), "\uFFFD"), "\uFFFD")
		if got := runs.ReplaceAllString(rec.text(), "\uFFFD"); got != want {
			t.Fatalf("text %q, want %q", got, want)
		}
		if utf8.Valid(in) && rec.text() != string(in) {
			t.Fatalf("text %q, want %q", rec.text(), in)
		}
	})
}

// The reader takes what is in the pipe when the step is gone, though another
// process keeps the pipe open, and the writer goes on for ever.
func TestStreamEnds(t *testing.T) {
	for _, writes := range []int{0, 1, 60000, maxPipeBytes} {
		r, w, err := os.Pipe()
		if err != nil {
			t.Fatal(err)
		}
		if _, err := unix.FcntlInt(w.Fd(), unix.F_SETPIPE_SZ, maxPipeBytes); err != nil {
			t.Fatal(err)
		}
		if _, err := w.Write(make([]byte, writes)); err != nil {
			t.Fatal(err)
		}
		s := &stream{f: r}
		s.finish()
		read, buffer := 0, make([]byte, readBytes)
		for err = nil; err == nil; {
			var n int
			if n, err = s.read(buffer, flushAfter); n > 0 && writes == maxPipeBytes {
				if _, err := w.Write(make([]byte, n)); err != nil { // as fast as it is read
					t.Fatal(err)
				}
			}
			read += n
		}
		if read != writes || !errors.Is(err, io.EOF) {
			t.Errorf("read %d of %d bytes: %v", read, writes, err)
		}
		closeAll([]*os.File{r, w})
	}
}

// counted is a log that counts what it is given.
type counted struct{ lines, omitted, longest int }

func (c *counted) Enabled(context.Context, slog.Level) bool { return true }
func (c *counted) WithAttrs([]slog.Attr) slog.Handler       { return c }
func (c *counted) WithGroup(string) slog.Handler            { return c }
func (c *counted) Handle(_ context.Context, r slog.Record) error {
	r.Attrs(func(a slog.Attr) bool {
		switch a.Key {
		case "line":
			c.lines++
			c.longest = max(c.longest, len(a.Value.String()))
		case "omitted_lines":
			c.omitted += int(a.Value.Int64())
		}
		return true
	})
	return nil
}

func TestStderrFlood(t *testing.T) {
	count := &counted{}
	l := &stderrLog{log: slog.New(count)}
	start := time.Now()
	for second := range 3 {
		for range 1000 {
			l.add([]byte("line\nline\n"), start.Add(time.Duration(second)*time.Second))
		}
	}
	l.end(start.Add(2 * time.Second))
	if count.lines != 3*stderrPerSecond || count.lines+count.omitted != 6000 {
		t.Errorf("logged %d, omitted %d, want %d and the rest of 6000", count.lines, count.omitted, 3*stderrPerSecond)
	}

	count = &counted{}
	l = &stderrLog{log: slog.New(count)}
	for range 100 {
		l.add(bytes.Repeat([]byte("x"), readBytes), start)
	}
	l.end(start)
	if count.longest != stderrLineBytes || len(l.tail) != stderrTailBytes || cap(l.line) > 2*stderrLineBytes {
		t.Errorf("longest line %d, tail %d, buffer %d", count.longest, len(l.tail), cap(l.line))
	}
}

func TestDeclineStopsParsing(t *testing.T) {
	rec := &recorder{}
	p := newParser(rec)
	p.add([]byte("{\"type\":\"declined\"}\nx\n{\"type\":\"declined\"}\n{\"type\":\"ended\",\"result\":1}\n"))
	if !isClosed(p.declined) || len(rec.reasons) != 1 || len(rec.content) != 0 || p.ended {
		t.Errorf("reasons %q, content %v, ended %v, want one decline and nothing else", rec.reasons, rec.content, p.ended)
	}
}

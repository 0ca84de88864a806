package exec

import (
	"bytes"
	"context"
	"errors"
	"io"
	"log/slog"
	"os"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

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
			if n, err = s.Read(buffer); n > 0 && writes == maxPipeBytes {
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

package exec

import (
	"bytes"
	"errors"
	"io"
	"log/slog"
	"os"
	"strings"
	"sync/atomic"
	"time"
	"unicode/utf8"

	"golang.org/x/sys/unix"
)

const (
	readBytes = 32 << 10
	// maxPipeBytes is the most an unprivileged process can have in a pipe on Linux.
	maxPipeBytes = 1 << 20

	stderrLineBytes = 4 << 10
	stderrTailBytes = 4 << 10
	// stderrPerSecond lines of a step are logged; the rest is counted.
	stderrPerSecond = 100
)

// stream is the read end of a pipe from the command.
type stream struct {
	f    *os.File
	gone atomic.Bool // the step is over: read what is there, wait for nothing
	left int         // bytes that were read since
}

// Read waits for bytes until finish, and then takes what is there.
func (s *stream) Read(p []byte) (int, error) {
	if !s.gone.Load() {
		n, err := s.f.Read(p)
		if !errors.Is(err, os.ErrDeadlineExceeded) {
			return n, err
		}
	}
	return s.readLeft(p)
}

// readLeft reads what the pipe holds. It ends at an empty pipe, or at as much
// as a pipe holds: somebody who is not of the step may go on writing.
func (s *stream) readLeft(p []byte) (n int, err error) {
	conn, err := s.f.SyscallConn()
	if err != nil || s.left >= maxPipeBytes {
		return 0, io.EOF
	}
	for {
		_ = s.f.SetReadDeadline(time.Time{})
		var failed error
		err = conn.Read(func(fd uintptr) bool {
			n, failed = unix.Read(int(fd), p)
			return true // don't wait
		})
		if errors.Is(err, os.ErrDeadlineExceeded) || errors.Is(failed, unix.EINTR) {
			continue // finish's deadline came after ours was cleared; it sets one only
		}
		if err != nil || failed != nil || n <= 0 {
			return 0, io.EOF
		}
		s.left += n
		return n, nil
	}
}

// finish makes the reader end once it has read what is in the pipe.
func (s *stream) finish() {
	s.gone.Store(true)
	_ = s.f.SetReadDeadline(time.Unix(1, 0))
}

// drain reads to the end of a stream, whatever becomes of what is read, so that
// the command is never blocked by a log that takes no more.
func drain(s *stream, to io.Writer) {
	defer s.f.Close()
	buffer := make([]byte, readBytes)
	for {
		n, err := s.Read(buffer)
		_, _ = to.Write(buffer[:n])
		if err != nil {
			return
		}
	}
}

// stderrLog writes standard error to the log and keeps its tail. A flood costs
// the command, not the log: what is above the rate is counted and dropped.
type stderrLog struct {
	log     *slog.Logger
	line    []byte
	tail    []byte
	window  time.Time // when the second began that lines are counted in
	lines   int
	omitted int
}

// Write never fails.
func (l *stderrLog) Write(chunk []byte) (int, error) {
	l.add(chunk, time.Now())
	return len(chunk), nil
}

func (l *stderrLog) add(chunk []byte, now time.Time) {
	l.tail = append(l.tail, chunk...)
	if over := len(l.tail) - stderrTailBytes; over > 0 {
		l.tail = append(l.tail[:0], l.tail[over:]...)
	}
	for len(chunk) > 0 {
		part, rest, found := bytes.Cut(chunk, []byte("\n"))
		if room := stderrLineBytes - len(l.line); len(part) > room {
			part, rest, found = part[:room], chunk[room:], true // cut the line
		}
		l.line = append(l.line, part...)
		if found {
			l.write(now)
		}
		chunk = rest
	}
}

func (l *stderrLog) write(now time.Time) {
	if now.Sub(l.window) >= time.Second {
		l.report()
		l.window, l.lines = now, 0
	}
	if l.lines++; l.lines <= stderrPerSecond {
		l.log.Info("stderr of the command", "line", strings.ToValidUTF8(string(l.line), "\uFFFD"))
	} else {
		l.omitted++
	}
	l.line = l.line[:0]
}

// report logs how many lines were left out, once for each second at most.
func (l *stderrLog) report() {
	if l.omitted > 0 {
		l.log.Warn("stderr of the command is too fast for the log", "omitted_lines", l.omitted)
		l.omitted = 0
	}
}

func (l *stderrLog) end(now time.Time) {
	if len(l.line) > 0 {
		l.write(now)
	}
	l.report()
}

// message is the end of standard error, at most limit bytes of valid UTF-8.
func (l *stderrLog) message(limit int) string {
	s := strings.TrimSpace(strings.ToValidUTF8(string(l.tail), "\uFFFD"))
	if over := len(s) - limit; over > 0 {
		for s = s[over:]; s != "" && !utf8.RuneStart(s[0]); {
			s = s[1:]
		}
	}
	return s
}

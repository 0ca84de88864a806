package exec

import (
	"bytes"
	"encoding/json"
	"errors"
	"io"
	"log/slog"
	"os"
	"strings"
	"sync/atomic"
	"time"
	"unicode/utf8"

	"golang.org/x/sys/unix"

	"reveille/claims"
	"reveille/runner"
)

const (
	readBytes = 32 << 10
	// flushAfter is how long text without a newline waits for the rest of its line.
	flushAfter = 100 * time.Millisecond
	// pieceBytes is how much of a line that is known to be text is held back.
	pieceBytes = 64 << 10
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

// errSilent answers a read that waited long enough.
var errSilent = errors.New("nothing to read yet")

// read waits for bytes, at most for wait if that isn't 0.
func (s *stream) read(p []byte, wait time.Duration) (int, error) {
	var deadline time.Time
	if wait > 0 {
		deadline = time.Now().Add(wait)
	}
	_ = s.f.SetReadDeadline(deadline) // before the look at gone: finish does it the other way round
	if s.gone.Load() {
		return s.readLeft(p)
	}
	n, err := s.f.Read(p)
	if errors.Is(err, os.ErrDeadlineExceeded) {
		if s.gone.Load() {
			return s.readLeft(p)
		}
		return n, errSilent
	}
	return n, err
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

// parser turns standard output into a step's output. It is used by one
// goroutine; its results are read when that is over.
type parser struct {
	out      *runner.Output
	max      int
	declined chan struct{} // closed when the command has declined

	pending []byte // of a line that has not ended
	isText  bool   // a part of that line went out as text already: so does the rest

	err     error // of the Output; nothing is recorded after it
	refused bool  // the decline is durable; nothing is recorded after it
	ended   bool
	result  runner.Result
}

// readAll reads to the end of the stream, whatever becomes of the output, so
// that the command is never blocked by a log that takes no more.
func (p *parser) readAll(s *stream) {
	defer s.f.Close()
	buffer := make([]byte, readBytes)
	for {
		var wait time.Duration
		if p.canFlush() {
			wait = flushAfter
		}
		n, err := s.read(buffer, wait)
		p.add(buffer[:n])
		switch {
		case errors.Is(err, errSilent):
			p.flush()
		case err != nil:
			if len(p.pending) > 0 {
				p.line("")
			}
			return
		}
	}
}

func (p *parser) over() bool { return p.err != nil || p.refused }

func (p *parser) add(chunk []byte) {
	for len(chunk) > 0 && !p.over() {
		part, rest, found := bytes.Cut(chunk, []byte("\n"))
		p.grow(part)
		if found {
			p.line("\n")
		}
		chunk = rest
	}
	if p.over() {
		p.pending = nil
	}
}

// grow appends to the pending line and passes it on as text where it gets too long.
func (p *parser) grow(part []byte) {
	for !p.over() {
		limit := p.max
		if p.isText {
			limit = min(limit, pieceBytes)
		}
		room := limit - len(p.pending)
		if len(part) <= room {
			p.pending = append(p.pending, part...)
			return
		}
		p.pending = append(p.pending, part[:room]...)
		part = part[room:]
		p.flush()
	}
}

// canFlush reports whether what is pending is text, however its line goes on.
func (p *parser) canFlush() bool {
	if p.isText {
		return wholeRunes(p.pending) > 0
	}
	start := bytes.TrimLeft(p.pending, " \t\r")
	return len(start) > 0 && start[0] != '{' && wholeRunes(p.pending) > 0
}

// flush passes on what is pending, but for the first bytes of a rune.
func (p *parser) flush() {
	n := wholeRunes(p.pending)
	p.isText = true
	p.text(string(p.pending[:n]))
	p.pending = append(p.pending[:0], p.pending[n:]...)
}

// line ends the pending line.
func (p *parser) line(newline string) {
	line := p.pending
	if p.isText || !p.event(line) {
		p.text(string(line) + newline)
	}
	p.isText, p.pending = false, line[:0]
	if cap(line) > pieceBytes {
		p.pending = nil // a long line's memory is not kept for short ones
	}
}

func (p *parser) text(s string) { p.put(p.out.Text(s)) }

// put notes how an Output method ended.
func (p *parser) put(err error) {
	if err != nil && p.err == nil {
		p.err = err
	}
}

// event puts out what a line says if it is an object of contract.md section 3,
// and reports whether it is.
func (p *parser) event(line []byte) bool {
	if start := bytes.TrimLeft(line, " \t\r"); len(start) == 0 || start[0] != '{' {
		return false
	}
	line, err := claims.CleanJSON(line) // valid UTF-8, of bounded depth
	var is struct {
		Type claims.EventType `json:"type"`
	}
	if err != nil || json.Unmarshal(line, &is) != nil {
		return false
	}
	switch is.Type {
	case claims.TextEvent:
		var d struct{ Text *string }
		if json.Unmarshal(line, &d) != nil || d.Text == nil {
			return false
		}
		p.text(*d.Text)
	case claims.ToolCalled:
		var d claims.ToolCalledData
		if json.Unmarshal(line, &d) != nil || d.Call == "" || d.Name == "" {
			return false
		}
		p.put(p.out.ToolCalled(d.Call, d.Name, d.Input))
	case claims.ToolSucceeded:
		var d claims.ToolSucceededData
		if json.Unmarshal(line, &d) != nil || d.Call == "" {
			return false
		}
		p.put(p.out.ToolSucceeded(d.Call, d.Output))
	case claims.ToolFailed:
		var d claims.ToolFailedData
		if json.Unmarshal(line, &d) != nil || d.Call == "" {
			return false
		}
		p.put(p.out.ToolFailed(d.Call, d.Error))
	case "declined":
		var d claims.ReasonData
		if json.Unmarshal(line, &d) != nil {
			return false
		}
		p.decline(d.Reason)
	case "ended":
		var d claims.StepEndedData
		if json.Unmarshal(line, &d) != nil {
			return false
		}
		p.ended, p.result = true, runner.Result{Value: d.Result, Continue: d.Continue}
	default:
		return false
	}
	return true
}

// decline records the refusal and has the command stopped, also where it could
// not be recorded: a person said no.
func (p *parser) decline(reason string) {
	err := p.out.Decline(reason)
	p.put(err)
	p.refused = err == nil
	close(p.declined) // once: nothing is parsed after either
}

// wholeRunes is the length of b without a rune at its end that may go on.
func wholeRunes(b []byte) int {
	for i := len(b) - 1; i >= max(0, len(b)-utf8.UTFMax); i-- {
		if utf8.RuneStart(b[i]) {
			if utf8.FullRune(b[i:]) {
				return len(b)
			}
			return i
		}
	}
	return len(b)
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

func (l *stderrLog) readAll(s *stream) {
	defer s.f.Close()
	buffer := make([]byte, readBytes)
	for {
		n, err := s.read(buffer, 0)
		l.add(buffer[:n], time.Now())
		if err != nil {
			l.end(time.Now())
			return
		}
	}
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

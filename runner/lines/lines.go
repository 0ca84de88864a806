// Package lines reads what the code of a step says, wherever it runs: one JSON
// object a line (docs/contract.md section 3) and everything else as text. It turns
// the lines into the step's output.
//
// Invariants:
//
//   - However the bytes are cut into writes, the output is the same, but for
//     where text is cut into pieces.
//   - A piece of text is cut between runes. Bytes that are not UTF-8 become
//     U+FFFD, in text and in JSON.
//   - Memory is bounded by the longest line that is read as JSON: a longer one
//     is text, passed on as it comes.
//   - Text without a newline, such as a prompt or one token after the other,
//     waits at most 100 ms for the rest of its line. What could still become an
//     object waits for its newline.
//   - Nothing is put out after an error of the Output or a durable decline.
package lines

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"
	"unicode/utf8"

	"reveille/claims"
	"reveille/runner"
)

const (
	// DefaultMax is the longest line, without its newline, that is read as JSON.
	DefaultMax = 1 << 20
	// MinMax is the least that a Parser can be bounded to: a rune must fit, and a
	// little more makes sense of it.
	MinMax = 64

	// flushAfter is how long text without a newline waits for the rest of its line.
	flushAfter = 100 * time.Millisecond
	// pieceBytes is how much of a line that is known to be text is held back.
	pieceBytes = 64 << 10
)

var (
	// ErrDeclined answers what comes after a decline: nothing of it is put out.
	ErrDeclined = errors.New("step is declined: nothing after it is put out")

	errClosed = errors.New("lines are closed")
)

// Said is what the lines came to.
type Said struct {
	// Err is the Output's first error, and nothing was put out after it.
	Err error
	// Declined: a person refused, and that is durable. Nothing was put out after it.
	Declined bool
	// Ended: there was an `ended` line. Result is the last one's.
	Ended  bool
	Result runner.Result
}

// Parser turns lines into the output of one step. It is an io.Writer that
// blocks while the Output does. All methods are safe for concurrent use; the
// writes of one stream come from one goroutine.
type Parser struct {
	out      *runner.Output
	max      int
	declined chan struct{}

	mu      sync.Mutex
	timer   *time.Timer // flushes; nil until it is needed
	armed   bool        // the timer runs
	closed  bool
	pending []byte // of a line that has not ended
	isText  bool   // a part of that line went out as text already: so does the rest
	said    Said
}

// New makes a parser for a step's output, with lines of JSON of at most max
// bytes, not less than MinMax.
func New(out *runner.Output, max int) *Parser {
	if max < MinMax {
		panic(fmt.Sprintf("lines of %d bytes: want %d or more", max, MinMax))
	}
	return &Parser{out: out, max: max, declined: make(chan struct{})}
}

// Declined is closed when a line has declined the step, also where that could
// not be made durable: whoever says the lines is to be stopped.
func (p *Parser) Declined() <-chan struct{} { return p.declined }

// Write takes the next bytes. Once nothing may be put out any more it answers
// why, the Output's error or ErrDeclined, and drops what it is given: a
// command's pipe is read on all the same, a body is not.
func (p *Parser) Write(b []byte) (int, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	n := len(b)
	for len(b) > 0 && p.over() == nil {
		part, rest, found := bytes.Cut(b, []byte("\n"))
		p.grow(part)
		if found {
			p.line("\n")
		}
		b = rest
	}
	if err := p.over(); err != nil {
		p.pending = nil
		return 0, err
	}
	if !p.armed && p.canFlush() {
		p.arm()
	}
	return n, nil
}

// Close ends the last line, where it had no newline, and tells what all of
// them came to. Nothing is put out after it has returned.
func (p *Parser) Close() Said {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.over() == nil && len(p.pending) > 0 {
		p.line("")
	}
	p.closed, p.pending = true, nil
	if p.timer != nil {
		p.timer.Stop()
	}
	return p.said
}

// over is why nothing may be put out any more, or nil.
func (p *Parser) over() error {
	switch {
	case p.said.Err != nil:
		return p.said.Err
	case p.said.Declined:
		return ErrDeclined
	case p.closed:
		return errClosed
	}
	return nil
}

func (p *Parser) arm() {
	p.armed = true
	if p.timer != nil {
		p.timer.Reset(flushAfter)
		return
	}
	p.timer = time.AfterFunc(flushAfter, func() {
		p.mu.Lock()
		defer p.mu.Unlock()
		p.armed = false
		if p.over() == nil && p.canFlush() {
			p.flush()
		}
	})
}

// grow appends to the pending line and passes it on as text where it gets too long.
func (p *Parser) grow(part []byte) {
	for p.over() == nil {
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
func (p *Parser) canFlush() bool {
	if p.isText {
		return wholeRunes(p.pending) > 0
	}
	start := bytes.TrimLeft(p.pending, " \t\r")
	return len(start) > 0 && start[0] != '{' && wholeRunes(p.pending) > 0
}

// flush passes on what is pending, but for the first bytes of a rune.
func (p *Parser) flush() {
	n := wholeRunes(p.pending)
	p.isText = true
	p.text(string(p.pending[:n]))
	p.pending = append(p.pending[:0], p.pending[n:]...)
}

// line ends the pending line.
func (p *Parser) line(newline string) {
	line := p.pending
	if p.isText || !p.event(line) {
		p.text(string(line) + newline)
	}
	p.isText, p.pending = false, line[:0]
	if cap(line) > pieceBytes {
		p.pending = nil // a long line's memory is not kept for short ones
	}
}

func (p *Parser) text(s string) { p.put(p.out.Text(s)) }

// put notes how an Output method ended.
func (p *Parser) put(err error) {
	if p.said.Err == nil {
		p.said.Err = err
	}
}

// members are those of the objects of docs/contract.md section 3, by their type.
var members = map[string][]string{
	"text":           {"text"},
	"tool.called":    {"call", "name", "input"},
	"tool.succeeded": {"call", "output"},
	"tool.failed":    {"call", "error"},
	"declined":       {"reason"},
	"ended":          {"result", "continue"},
}

// kind is the type of an object of docs/contract.md section 3, or empty. It has no
// member but its own, to the letter (encoding/json ignores case): a result with
// a misspelt continue must not pass for one without.
func kind(line []byte) claims.EventType {
	var object map[string]json.RawMessage
	var name string
	if json.Unmarshal(line, &object) != nil || json.Unmarshal(object["type"], &name) != nil {
		return ""
	}
	for member := range object {
		if member != "type" && !slices.Contains(members[name], member) {
			return ""
		}
	}
	return claims.EventType(name)
}

// event puts out what a line says if it is an object of docs/contract.md section 3,
// and reports whether it is.
func (p *Parser) event(line []byte) bool {
	if start := bytes.TrimLeft(line, " \t\r"); len(start) == 0 || start[0] != '{' {
		return false
	}
	line, err := claims.CleanJSON(line) // valid UTF-8, of bounded depth
	if err != nil {
		return false
	}
	switch kind(line) {
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
		p.said.Ended, p.said.Result = true, runner.Result{Value: d.Result, Continue: d.Continue}
	default:
		return false
	}
	return true
}

// decline records the refusal and has whoever says the lines stopped, also
// where it could not be recorded: a person said no.
func (p *Parser) decline(reason string) {
	err := p.out.Decline(reason)
	p.put(err)
	p.said.Declined = err == nil
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

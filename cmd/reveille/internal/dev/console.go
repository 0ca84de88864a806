package dev

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"log/slog"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"
	"unicode"
)

// maxLine bounds a line of a child's log; the rest of a longer one is dropped.
const maxLine = 64 << 10

// commandStderr is the log entry in which a worker passes on what its command
// wrote to standard error.
const commandStderr = "stderr of the command"

// A child that has logged this has its HTTP address.
const workerUp, scannerUp = "worker up", "scanner up"

// lifecycle are the log entries that are shown whatever their level.
var lifecycle = []string{
	workerUp, "worker down", scannerUp, "scanner down", "step failed", "claim taken over", commandStderr,
}

// console writes the logs of all processes to one place, a line each, with the
// name of the process in front. It is safe for concurrent use.
type console struct {
	level slog.Level

	mu sync.Mutex
	w  io.Writer
}

func newConsole(w io.Writer, level string) *console {
	c := &console{w: w}
	_ = c.level.UnmarshalText([]byte(level)) // it was checked against the enum
	return c
}

// childLevel is what the children must log so that all that is shown comes.
func (c *console) childLevel() string {
	return strings.ToLower(min(c.level, slog.LevelInfo).String())
}

// say writes a line of dev's own.
func (c *console) say(from, format string, args ...any) {
	c.write(time.Now(), from, fmt.Sprintf(format, args...))
}

func (c *console) write(at time.Time, from, text string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	fmt.Fprintf(c.w, "%s %-9s %s\n", at.Format(time.TimeOnly), from, strings.TrimRight(text, " "))
}

// entry writes an entry of somebody's log, where its level or its message is shown.
func (c *console) entry(from, level, message, rest string) {
	var l slog.Level
	if err := l.UnmarshalText([]byte(level)); err != nil {
		l = slog.LevelError
	}
	switch {
	case l >= c.level && l != slog.LevelInfo:
		message = level + " " + message
	case l >= c.level, slices.Contains(lifecycle, message):
	default:
		return
	}
	c.write(time.Now(), from, plain(message)+rest)
}

// line writes a line that a child wrote: an entry of its log as JSON, of which
// it returns the message, or anything else, such as a panic, as it is.
func (c *console) line(from string, raw []byte) (message string) {
	entries, ok := members(raw)
	if !ok {
		c.say(from, "%s", plain(string(raw)))
		return ""
	}
	var level, session, said string
	var rest strings.Builder
	for _, e := range entries {
		switch e.key {
		case slog.TimeKey, "worker", "scanner": // the console has its own
		case slog.LevelKey:
			level = e.text()
		case slog.MessageKey:
			message = e.text()
		default:
			switch e.key {
			case "session":
				session = e.text()
			case "line":
				said = e.text()
			}
			fmt.Fprintf(&rest, " %s=%s", plain(e.key), word(e.text()))
		}
	}
	if message == commandStderr {
		c.write(time.Now(), from, "stderr of "+plain(session)+": "+plain(said))
	} else {
		c.entry(from, level, message, rest.String())
	}
	return message
}

type member struct {
	key   string
	value json.RawMessage
}

func (m member) text() string {
	var s string
	if json.Unmarshal(m.value, &s) == nil {
		return s
	}
	return string(m.value)
}

// members are the members of a JSON object in their order.
func members(raw []byte) ([]member, bool) {
	dec := json.NewDecoder(bytes.NewReader(raw))
	if t, err := dec.Token(); err != nil || t != json.Delim('{') {
		return nil, false
	}
	var out []member
	for dec.More() {
		key, err := dec.Token()
		if err != nil {
			return nil, false
		}
		var m member
		m.key, _ = key.(string)
		if err := dec.Decode(&m.value); err != nil {
			return nil, false
		}
		out = append(out, m)
	}
	return out, true
}

// plain is text that can't command a terminal.
func plain(s string) string {
	if !strings.ContainsFunc(s, func(r rune) bool { return !unicode.IsPrint(r) }) {
		return s
	}
	quoted := strconv.Quote(s)
	return strings.ReplaceAll(quoted[1:len(quoted)-1], `\"`, `"`)
}

// word is a value on a line of key=value.
func word(s string) string {
	if s == "" || strings.ContainsFunc(s, func(r rune) bool { return r == ' ' || r == '"' || r == '=' || !unicode.IsPrint(r) }) {
		return strconv.Quote(s)
	}
	return s
}

// writer is where somebody writes lines that go to the console under a name.
func (c *console) writer(from string) *lineWriter {
	return &lineWriter{line: func(raw []byte) { c.say(from, "%s", plain(string(raw))) }}
}

// lineWriter calls line for each line that is written to it.
type lineWriter struct {
	line func([]byte)

	mu      sync.Mutex
	pending []byte
}

func (l *lineWriter) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	n := len(p)
	for len(p) > 0 {
		part, rest, found := bytes.Cut(p, []byte("\n"))
		l.pending = append(l.pending, part[:min(len(part), max(0, maxLine-len(l.pending)))]...)
		if found {
			l.flush()
		}
		p = rest
	}
	return n, nil
}

// end passes on a last line that has no newline.
func (l *lineWriter) end() {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.flush()
}

func (l *lineWriter) flush() {
	if len(l.pending) > 0 {
		l.line(l.pending)
	}
	l.pending = l.pending[:0]
}

package claims

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"strings"
	"time"
	"unicode/utf8"
)

// EventType names an event of the log.
type EventType string

// The events of docs/contract.md section 2.
const (
	InputAdmitted         EventType = "input.admitted"
	InputPromoted         EventType = "input.promoted"
	InputCancelled        EventType = "input.cancelled"
	WakeCancelled         EventType = "wake.cancelled"
	ContinuationCancelled EventType = "continuation.cancelled"
	ExecutionStarted      EventType = "execution.started"
	ExecutionCancelling   EventType = "execution.cancelling"
	ExecutionEnded        EventType = "execution.ended"
	StepStartedEvent      EventType = "step.started"
	TextEvent             EventType = "text"
	ToolCalled            EventType = "tool.called"
	ToolSucceeded         EventType = "tool.succeeded"
	ToolFailed            EventType = "tool.failed"
	SnapshotEvent         EventType = "snapshot"
	StepEndedEvent        EventType = "step.ended"
	StepFailedEvent       EventType = "step.failed"
	StepInterruptedEvent  EventType = "step.interrupted"
	SessionQuarantined    EventType = "session.quarantined"
	SessionReleased       EventType = "session.released"
)

// TimeFormat is RFC 3339 in UTC with microseconds, as events carry it.
const TimeFormat = "2006-01-02T15:04:05.000000Z07:00"

// Event is the envelope of docs/contract.md section 2. Its JSON is the body of the
// message on <ns>.event.<session>, byte for byte what the database holds.
type Event struct {
	Session   SessionID       `json:"session"`
	Seq       int64           `json:"seq"`
	Type      EventType       `json:"type"`
	Time      string          `json:"time"`
	Execution ExecutionID     `json:"execution,omitempty"`
	Epoch     int64           `json:"epoch,omitempty"`
	Step      StepID          `json:"step,omitempty"`
	Trace     string          `json:"traceparent,omitempty"`
	Data      json.RawMessage `json:"data"`
}

// Record is an event of the log with its exact bytes.
type Record struct {
	Event
	Line []byte // the JSON of the event, without a newline
}

// ParseRecord reads an event back from its line.
func ParseRecord(line []byte) (Record, error) {
	var r Record
	if err := json.Unmarshal(line, &r.Event); err != nil {
		return Record{}, fmt.Errorf("event of the log: %w", err)
	}
	r.Line = line
	return r, nil
}

// Stamp formats a database time for an event.
func Stamp(t time.Time) string { return t.UTC().Format(TimeFormat) }

// Marshal encodes v as one line of JSON: valid UTF-8, without a newline and
// without escaping <, > and &, which the log has no reason to.
func Marshal(v any) ([]byte, error) {
	var b bytes.Buffer
	enc := json.NewEncoder(&b)
	enc.SetEscapeHTML(false)
	if err := enc.Encode(v); err != nil {
		return nil, err
	}
	return bytes.TrimSuffix(b.Bytes(), []byte("\n")), nil
}

// CleanText makes a text one that a database holds: valid UTF-8 without NUL;
// what is not becomes U+FFFD.
func CleanText(s string) string {
	return strings.ReplaceAll(strings.ToValidUTF8(s, "\uFFFD"), "\x00", "\uFFFD")
}

// maxJSONDepth bounds the nesting of JSON that came from outside.
const maxJSONDepth = 1000

// CleanJSON checks and compacts JSON that came from outside. Databases hold it
// as TEXT: bytes that are not UTF-8 become U+FFFD, as encoding/json reads them.
func CleanJSON(raw []byte) (json.RawMessage, error) {
	if !utf8.Valid(raw) {
		raw = []byte(strings.ToValidUTF8(string(raw), "\uFFFD"))
	}
	depth, inString := 0, false
	for i := 0; i < len(raw); i++ {
		switch c := raw[i]; {
		case inString && c == '\\':
			i++
		case c == '"':
			inString = !inString
		case inString:
		case c == '{' || c == '[':
			if depth++; depth > maxJSONDepth {
				return nil, fmt.Errorf("JSON is nested deeper than %d", maxJSONDepth)
			}
		case c == '}' || c == ']':
			depth--
		}
	}
	var b bytes.Buffer
	if err := json.Compact(&b, raw); err != nil {
		return nil, err
	}
	return b.Bytes(), nil
}

// SameJSON reports whether two JSON texts say the same, whatever their white
// space and the order of their keys. Numbers are compared as they are written.
func SameJSON(a, b []byte) bool {
	if bytes.Equal(a, b) {
		return true
	}
	x, err := canonical(a)
	if err != nil {
		return false
	}
	y, err := canonical(b)
	return err == nil && bytes.Equal(x, y)
}

func canonical(raw []byte) ([]byte, error) {
	dec := json.NewDecoder(bytes.NewReader(raw))
	dec.UseNumber()
	var v any
	if err := dec.Decode(&v); err != nil {
		return nil, err
	}
	if _, err := dec.Token(); !errors.Is(err, io.EOF) {
		return nil, errors.New("more than one JSON value")
	}
	return json.Marshal(v) // maps are written in the order of their keys
}

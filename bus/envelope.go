package bus

import (
	"encoding/json"
	"fmt"
	"regexp"
	"strings"
	"time"
	"unicode"
	"unicode/utf8"

	"github.com/google/uuid"
	"github.com/nats-io/nats.go"

	"reveille/claims"
)

// RejectReason is why a command can't be applied; it is the value of the
// header Rv-Reason.
type RejectReason string

// The reasons of docs/contract.md section 1.
const (
	InvalidSession RejectReason = "invalid_session"
	InvalidBody    RejectReason = "invalid_body"
	TooLarge       RejectReason = "too_large"
	InputConflict  RejectReason = "input_conflict"
)

// Rejection says why a command is never applied (I19).
type Rejection struct {
	Reason RejectReason
	Detail string // one line for people
}

func (r *Rejection) Error() string { return string(r.Reason) + ": " + r.Detail }

func invalidBody(format string, args ...any) *Rejection {
	return &Rejection{InvalidBody, fmt.Sprintf(format, args...)}
}

const (
	// DefaultMaxInputBytes bounds the body of a command.
	DefaultMaxInputBytes = 256 << 10
	// maxInputIDBytes bounds an input's id, which is a key of a table.
	maxInputIDBytes = 256
	// maxReasonBytes is where the reason of an interrupt is cut.
	maxReasonBytes = 1 << 10
)

// Raw is a message of the command stream as it was stored.
type Raw struct {
	Subject  string
	Header   nats.Header
	Data     []byte
	Sequence uint64
	Time     time.Time // the stream's own stamp, exact to the nanosecond
}

// Decode reads a command. It is pure: whoever decodes a message, now or after
// a redelivery, finds the same. maxBytes bounds the whole body; 0 is
// DefaultMaxInputBytes. The command's Kind is set for a rejected one too,
// unless the subject is none of the command stream's.
func Decode(ns Namespace, m Raw, maxBytes int) (claims.Command, *Rejection) {
	if maxBytes <= 0 {
		maxBytes = DefaultMaxInputBytes
	}
	cmd := claims.Command{Sequence: int64(m.Sequence), Time: m.Time.UnixNano(), Trace: traceparent(m.Header)}
	var err error
	cmd.Kind, cmd.Session, err = ns.parseCommandSubject(m.Subject)
	switch {
	case err != nil:
		return cmd, &Rejection{InvalidSession, err.Error()}
	case len(m.Data) > maxBytes:
		return cmd, &Rejection{TooLarge, fmt.Sprintf("body of %d bytes, %d are allowed", len(m.Data), maxBytes)}
	}
	body, rej := object("body", m.Data, true)
	if rej != nil {
		return cmd, rej
	}
	switch cmd.Kind {
	case claims.Interrupt:
		rej = decodeInterrupt(&cmd, body)
	default:
		rej = decodeInput(&cmd, body)
	}
	return cmd, rej
}

// fields are the members of a JSON object, by their exact names: encoding/json
// would match "INPUT" with input too. Of a name that comes twice the last counts.
type fields map[string]json.RawMessage

// object reads a JSON object and nothing after it.
func object(what string, raw []byte, emptyOK bool) (fields, *Rejection) {
	if emptyOK && strings.Trim(string(raw), " \t\r\n") == "" {
		return nil, nil
	}
	var f fields
	if err := json.Unmarshal(raw, &f); err != nil {
		return nil, invalidBody("%s is not a JSON object: %v", what, err)
	}
	if f == nil {
		return nil, invalidBody("%s is null, want a JSON object", what)
	}
	return f, nil
}

// get returns a member that is there and not null: an optional one that a
// client library wrote as null is one that is not there.
func (f fields) get(name string) (json.RawMessage, bool) {
	raw, ok := f[name]
	return raw, ok && string(raw) != "null"
}

// text reads an optional string.
func (f fields) text(name string) (s string, ok bool, rej *Rejection) {
	raw, ok := f.get(name)
	if !ok {
		return "", false, nil
	}
	if err := json.Unmarshal(raw, &s); err != nil {
		return "", false, invalidBody("%s is not a string", name)
	}
	return s, true, nil
}

func decodeInput(cmd *claims.Command, body fields) *Rejection {
	raw, ok := body.get("input")
	if ok {
		in, rej := parseInput(raw)
		if rej != nil {
			return rej
		}
		cmd.Input = in
	}
	if cmd.Kind == claims.Admit {
		if !ok {
			return invalidBody("an admit needs an input")
		}
		return nil
	}
	at, ok, rej := body.text("not_before")
	if rej != nil || !ok {
		return rej
	}
	var t time.Time
	if err := t.UnmarshalText([]byte(at)); err != nil { // strict RFC 3339
		return invalidBody("not_before %.64q is not RFC 3339", at)
	}
	t = t.UTC()
	switch {
	case t.Year() > 9999:
		return invalidBody("not_before is past the year 9999")
	case t.Unix() > 0: // what is long past is now
		cmd.NotBefore = t
	}
	return nil
}

func parseInput(raw json.RawMessage) (*claims.Input, *Rejection) {
	f, rej := object("input", raw, false)
	if rej != nil {
		return nil, rej
	}
	in := &claims.Input{Delivery: claims.Queue}
	if in.ID, rej = inputID(f); rej != nil {
		return nil, rej
	}
	delivery, ok, rej := f.text("delivery")
	switch {
	case rej != nil:
		return nil, rej
	case !ok:
	case claims.Delivery(delivery) == claims.Queue, claims.Delivery(delivery) == claims.Steer:
		in.Delivery = claims.Delivery(delivery)
	default:
		return nil, invalidBody("delivery %.32q, want queue or steer", delivery)
	}
	body, ok := f["body"] // null is a body
	if !ok {
		return nil, invalidBody("input has no body")
	}
	var err error
	if in.Body, err = claims.CleanJSON(body); err != nil {
		return nil, invalidBody("input's body: %v", err)
	}
	return in, nil
}

// inputID reads the caller's idempotency key. It must come out as the bytes
// that the caller meant, so whatever a JSON decoder would replace (bytes that
// are not UTF-8, half of a surrogate pair) is refused: two keys must not
// become one.
func inputID(f fields) (string, *Rejection) {
	id, ok, rej := f.text("id")
	switch {
	case rej != nil:
		return "", rej
	case !ok:
		return "", invalidBody("input has no id")
	case id == "" || len(id) > maxInputIDBytes:
		return "", invalidBody("input's id has %d bytes, want 1 to %d", len(id), maxInputIDBytes)
	case !utf8.ValidString(id) || strings.ContainsRune(id, utf8.RuneError):
		return "", invalidBody("input's id is not valid UTF-8")
	case strings.ContainsFunc(id, unicode.IsControl):
		return "", invalidBody("input's id has a control character")
	}
	return id, nil
}

func decodeInterrupt(cmd *claims.Command, body fields) *Rejection {
	reason, _, rej := body.text("reason")
	if rej != nil {
		return rej
	}
	cmd.Reason = cutReason(reason)
	pending, ok, rej := body.text("pending")
	switch {
	case rej != nil:
		return rej
	case !ok || pending == "keep":
	case pending == "discard":
		cmd.Discard = true
	default:
		return invalidBody("pending %.32q, want keep or discard", pending)
	}
	execution, ok, rej := body.text("execution")
	if rej != nil || !ok {
		return rej
	}
	id, err := uuid.Parse(execution)
	if err != nil || len(execution) != 36 { // Parse takes braces, urn: and bare hex too
		return invalidBody("execution %.64q is not a UUID", execution)
	}
	cmd.Execution = claims.ExecutionID(id.String())
	return nil
}

// cutReason bounds a reason at a rune's boundary. A NUL can't be held by every
// column type and says nothing.
func cutReason(s string) string {
	s = strings.ReplaceAll(strings.ToValidUTF8(s, "\uFFFD"), "\x00", "\uFFFD")
	if len(s) <= maxReasonBytes {
		return s
	}
	end := maxReasonBytes
	for !utf8.RuneStart(s[end]) {
		end--
	}
	return s[:end]
}

var traceparentRE = regexp.MustCompile(`^00-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}$`)

// traceparent returns the W3C trace context (Recommendation 2021, version 00)
// of a message, or nothing where it has none that is valid.
func traceparent(h nats.Header) string {
	for k, vs := range h {
		if len(vs) != 1 || !strings.EqualFold(k, HeaderTraceparent) {
			continue // some carriers write their keys as HTTP does
		}
		v := vs[0]
		if traceparentRE.MatchString(v) && v[3:35] != strings.Repeat("0", 32) && v[36:52] != strings.Repeat("0", 16) {
			return v
		}
	}
	return ""
}

// commandBody is what this package's own client sends.
type commandBody struct {
	Input     *claims.Input `json:"input,omitempty"`
	NotBefore string        `json:"not_before,omitempty"`
	Reason    string        `json:"reason,omitempty"`
	Pending   string        `json:"pending,omitempty"`
	Execution string        `json:"execution,omitempty"`
}

// Encode is the inverse of Decode for a command that a client made: subject,
// headers and body. A command that a worker would reject is rejected here, as
// a *Rejection; maxBytes is as for Decode.
func Encode(ns Namespace, cmd claims.Command, maxBytes int) (*nats.Msg, error) {
	b := commandBody{Input: cmd.Input, Reason: cmd.Reason, Execution: string(cmd.Execution)}
	if !cmd.NotBefore.IsZero() {
		b.NotBefore = cmd.NotBefore.UTC().Format(time.RFC3339Nano)
	}
	if cmd.Discard {
		b.Pending = "discard"
	}
	m := &nats.Msg{Subject: ns.Command(cmd.Kind, cmd.Session), Header: nats.Header{}}
	if b != (commandBody{}) {
		var err error
		if m.Data, err = claims.Marshal(b); err != nil {
			return nil, fmt.Errorf("encoding %s: %w", m.Subject, err)
		}
	}
	if cmd.Trace != "" {
		m.Header.Set(HeaderTraceparent, cmd.Trace)
	}
	if _, rej := Decode(ns, Raw{Subject: m.Subject, Header: m.Header, Data: m.Data}, maxBytes); rej != nil {
		return nil, rej
	}
	return m, nil
}

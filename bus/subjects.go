// Package bus is everything of Reveille that speaks NATS: subjects and
// streams, the command intake, the ready queue, the relay of events, notices
// to owners, live text, and the client that upstreams use.
//
// The database is the truth; the bus carries requests to it and copies of it.
// What the bus promises, and where:
//
//   - Commands of one session are handed to the Applier in stream order, each
//     until it was applied, and acknowledged only then (I18, I19: Intake).
//   - A ready session is announced at most once at a time and pulled only into
//     a free slot (Announcer, Ready). An announcement is a hint: losing one
//     costs time, never work.
//   - The event stream holds each session's events once and in order (I25: Relay).
//
// Not promised: that a command reaches its Applier once (the Applier tells a
// duplicate), that a notice or a piece of live text arrives at all, or that
// the copy of an event under quarantine exists only once.
//
// Everything here is safe for concurrent use, and survives restarts of the
// server, changes of leader, and streams or consumers that were deleted.
package bus

import (
	"fmt"
	"strings"

	"reveille/claims"
)

// Namespace is the first token of every subject: [a-z0-9-]{1,32}.
type Namespace string

// DefaultNamespace is the namespace where none is given.
const DefaultNamespace Namespace = "rv"

// maxNamespaceBytes keeps stream and durable names far below the server's limit.
const maxNamespaceBytes = 32

// ParseNamespace checks a namespace that came from outside.
func ParseNamespace(s string) (Namespace, error) {
	if s == "" || len(s) > maxNamespaceBytes {
		return "", fmt.Errorf("namespace of %d bytes: want 1 to %d of a-z 0-9 -", len(s), maxNamespaceBytes)
	}
	for i := range len(s) {
		if c := s[i]; (c < 'a' || c > 'z') && (c < '0' || c > '9') && c != '-' {
			return "", fmt.Errorf("namespace has byte %q at %d: want a-z 0-9 -", c, i)
		}
	}
	return Namespace(s), nil
}

// The second tokens of the subjects.
const (
	tokenEvent      = "event"
	tokenQuarantine = "quarantine"
	tokenRejected   = "rejected"
	tokenReady      = "ready"
	tokenLive       = "live"
	tokenWorker     = "worker"
	tokenNotice     = "notice"
)

// Command is the subject of a command of this kind.
func (ns Namespace) Command(kind claims.CommandKind, session claims.SessionID) string {
	return ns.join(string(kind), string(session))
}

// AnyCommand covers the commands of every kind of one session, on the command
// stream: what I18 asks the stream for.
func (ns Namespace) AnyCommand(session claims.SessionID) string { return ns.join("*", string(session)) }

// Event is the subject of a session's events; the session "*" is all of them.
func (ns Namespace) Event(session claims.SessionID) string {
	return ns.join(tokenEvent, string(session))
}

// Quarantine is the subject of the copies of quarantine and release events.
func (ns Namespace) Quarantine(session claims.SessionID) string {
	return ns.join(tokenQuarantine, string(session))
}

// Rejected is the subject of commands of this kind that can't be applied.
func (ns Namespace) Rejected(kind claims.CommandKind) string {
	return ns.join(tokenRejected, string(kind))
}

// ReadySubject is the subject that announces a session with work and no claim.
func (ns Namespace) ReadySubject(session claims.SessionID) string {
	return ns.join(tokenReady, string(session))
}

// LiveSubject is the subject of a session's live text; the session "*" is all of them.
func (ns Namespace) LiveSubject(session claims.SessionID) string {
	return ns.join(tokenLive, string(session))
}

// Notice is the subject on which the holder of a worker lease is told to look
// at one of its claims. The token is the holder's id, not the worker's name: a
// process that lost its lease is another holder, and the old one is not told.
func (ns Namespace) Notice(holder claims.HolderID) string {
	return string(ns) + "." + tokenWorker + "." + string(holder) + "." + tokenNotice
}

func (ns Namespace) join(second, third string) string { return string(ns) + "." + second + "." + third }

// The streams of a namespace: the namespace in upper case, "-" as "_".

// CommandStream holds admit, wake and interrupt.
func (ns Namespace) CommandStream() string { return ns.stream("COMMANDS") }

// ReadyStream holds the announcements.
func (ns Namespace) ReadyStream() string { return ns.stream("READY") }

// EventStream holds the events.
func (ns Namespace) EventStream() string { return ns.stream("EVENTS") }

// QuarantineStream holds the copies of quarantine and release events.
func (ns Namespace) QuarantineStream() string { return ns.stream("QUARANTINE") }

// RejectedStream holds the commands that can't be applied.
func (ns Namespace) RejectedStream() string { return ns.stream("REJECTED") }

func (ns Namespace) stream(suffix string) string {
	return strings.ToUpper(strings.ReplaceAll(string(ns), "-", "_")) + "_" + suffix
}

// parseCommandSubject splits the subject of a command. The kind is known for
// whatever the command stream can hold; the session is checked, since NATS
// takes "*", ">" and control bytes as literal tokens of a published subject.
func (ns Namespace) parseCommandSubject(subject string) (claims.CommandKind, claims.SessionID, error) {
	rest, ok := strings.CutPrefix(subject, string(ns)+".")
	kind, token, found := strings.Cut(rest, ".")
	if !ok || !found {
		return "", "", fmt.Errorf("subject %q is no command", subject)
	}
	k := claims.CommandKind(kind)
	switch k {
	case claims.Admit, claims.Wake, claims.Interrupt:
	default:
		return "", "", fmt.Errorf("subject %q is no command", subject)
	}
	session, err := claims.ParseSession(token)
	return k, session, err
}

// Headers of Reveille's messages.
const (
	HeaderSeq         = "Rv-Seq"   // of an event, in its session
	HeaderEpoch       = "Rv-Epoch" // of an event
	HeaderType        = "Rv-Type"  // of an event
	HeaderTraceparent = "traceparent"

	HeaderReason    = "Rv-Reason"    // of a rejected command, one of the RejectReasons
	HeaderDetail    = "Rv-Detail"    // of a rejected command, for people
	HeaderSubject   = "Rv-Subject"   // the subject the rejected command was published on
	HeaderMsgID     = "Rv-Msg-Id"    // the Nats-Msg-Id it was published with
	HeaderStreamSeq = "Rv-Stream"    // stream id and sequence it had
	HeaderTruncated = "Rv-Truncated" // the length of the body, where it had to be cut
)

// SubjectRow is one row of the wire contract; subjects.md shows the same and a
// test holds them together.
type SubjectRow struct {
	Subject, Stream, Publisher, Consumer, Body, Headers, Ack, Retention, Version string
}

// versionRule is the same for all: bodies grow, they do not change.
const versionRule = "fields may be added; none changes its meaning or type"

// SubjectTable is the wire contract, with the default namespace.
func SubjectTable() []SubjectRow {
	return []SubjectRow{
		{
			"`rv.admit.<session>`", "`RV_COMMANDS`", "upstream", "worker, durable `intake-<id>`",
			"`{\"input\":{\"id\",\"delivery\",\"body\"}}`", "`Nats-Msg-Id` (optional), `traceparent` (optional)",
			"after the transaction committed, or after it was published as rejected", "until acknowledged",
			"unknown fields are ignored, wrong types rejected",
		},
		{
			"`rv.wake.<session>`", "`RV_COMMANDS`", "upstream", "worker, durable `intake-<id>`",
			"empty, or `{\"input\",\"not_before\"}`", "`Nats-Msg-Id` (optional), `traceparent` (optional)",
			"after the transaction committed, or after it was published as rejected", "until acknowledged",
			"unknown fields are ignored, wrong types rejected",
		},
		{
			"`rv.interrupt.<session>`", "`RV_COMMANDS`", "upstream", "worker, durable `interrupts-<id>`",
			"empty, or `{\"reason\",\"pending\",\"execution\"}`", "`Nats-Msg-Id` (optional), `traceparent` (optional)",
			"after the transaction committed, or after it was published as rejected", "until acknowledged",
			"unknown fields are ignored, wrong types rejected",
		},
		{
			"`rv.event.<session>`", "`RV_EVENTS`", "worker, scanner", "anyone",
			"the event, byte for byte what the database holds",
			"`Nats-Msg-Id: <session>:<seq>`, `Rv-Seq`, `Rv-Epoch`, `Rv-Type`, `traceparent` (optional), `Nats-Expected-Last-Subject-Sequence`",
			"none", "`--retention`", versionRule,
		},
		{
			"`rv.quarantine.<session>`", "`RV_QUARANTINE`", "worker, scanner", "alerting",
			"a copy of the `session.quarantined` or `session.released` event, at least once",
			"`Nats-Msg-Id: <session>:<seq>`, `Rv-Seq`, `Rv-Epoch`, `Rv-Type`, `traceparent` (optional)",
			"none", "`--retention`", versionRule,
		},
		{
			"`rv.rejected.<kind>`", "`RV_REJECTED`", "worker", "upstream, operators",
			"the command's own body; cut where it and the headers would not fit a message",
			"`Nats-Msg-Id: <stream id>:<sequence>:<time>`, `Rv-Reason`, `Rv-Detail`, `Rv-Subject`, `Rv-Stream: <stream id>:<sequence>`, `Rv-Msg-Id` (the command's `Nats-Msg-Id`), `Rv-Truncated` (its length, where it was cut), and the command's own headers but `Nats-*` and `Rv-*`",
			"none", "`--retention`", versionRule,
		},
		{
			"`rv.ready.<session>`", "`RV_READY`", "worker, scanner", "worker, durable `ready-<id>`",
			"empty", "none (no `Nats-Msg-Id`: a used id would swallow the next announcement)",
			"confirmed, before the session is acquired", "until acknowledged, one a session", "internal",
		},
		{
			"`rv.live.<session>`", "none", "worker", "anyone",
			"`{\"session\",\"epoch\",\"step\",\"text\"}`", "none", "none", "none: who listens hears it", versionRule,
		},
		{
			"`rv.worker.<holder>.notice`", "none", "worker", "the worker that holds this lease",
			"`{\"holder\",\"session\",\"execution\",\"phase\",\"revoked\",\"since\"}`", "none", "none",
			"none: the heartbeat's read is the fall-back", "internal",
		},
	}
}

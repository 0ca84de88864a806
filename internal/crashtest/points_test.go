package crashtest

import (
	"fmt"
	"slices"
	"strings"
	"testing"

	"reveille/claims"
	"reveille/internal/faultproxy"
	"reveille/sql"
)

// The programs that are killed.
const (
	worker  = "worker"
	scanner = "scanner"
)

// What a dead process leaves for a scanner, where that is not a running claim.
const (
	leavesCancelling = "an expiring cancelling claim"
	leavesCancelled  = "an expiring cancelled claim"
)

// rows are the crash points of docs/design.md section 7: what a process dies after.
var rows = []string{
	"receiving a command, before commit",
	"commit, before ack",
	"acquiring, before the first step",
	"step.started",
	"step.ended, before settling",
	"cancelling, before settling",
	"decline, before removal",
	"append, before publish",
	"publish, before noting it",
	"takeover, before converting",
}

// Rows that section 7 does not need, since they leave what others do.
const (
	settling     = "settling, before telling"
	handingOver  = "SIGTERM, while handing over"
	ending       = "touching, while ending an expired claim"
	quarantining = "takeover or touch, while quarantining"
	starting     = "starting"
)

// point is where a process is killed: at a moment of a transaction that it sends to the database. Nothing of what the
// moment is before goes on: not the COMMIT, nor the server's answer to it.
type point struct {
	row     string
	name    string
	program string
	at      faultproxy.Moment
	in      func(transaction) bool
	// needs is what somebody else's death must leave for the process to get there; leaves is the counterpart.
	needs, leaves string
	// tell is where the process is told to end, by SIGTERM, so that it, or the next one, gets to the point; nil: it is not.
	tell func(faultproxy.Moment, transaction) bool
	// by are scripts that lead there; none: all do.
	by []string
	// trial is the only one that can get there; empty: all can.
	trial string
}

func (p *point) String() string { return fmt.Sprintf("%s (%s): %s", p.row, p.program, p.name) }

// transaction is what a process has sent of one so far.
type transaction struct {
	statements []string // their text, in order
	appended   string   // the events, as JSON after the first's beginning
	session    string   // whose events they are
}

func (t transaction) has(statement string) bool {
	return slices.Contains(t.statements, statement)
}

// now: the last statement is this one.
func (t transaction) now(statement string) bool {
	return len(t.statements) > 0 && t.statements[len(t.statements)-1] == statement
}

func (t transaction) says(types ...claims.EventType) bool {
	for _, typ := range types {
		if !strings.Contains(t.appended, `"type":"`+string(typ)+`"`) {
			return false
		}
	}
	return true
}

func (t transaction) ended(outcome claims.ExecutionOutcome) bool {
	return strings.Contains(t.appended, `"outcome":"`+string(outcome)+`"`)
}

func (t transaction) closesStep() bool {
	return t.says(claims.StepEndedEvent) || t.says(claims.StepFailedEvent) || t.says(claims.StepInterruptedEvent)
}

// read makes out what a transaction is.
func read(tx []faultproxy.Statement) transaction {
	var t transaction
	for _, st := range tx {
		t.statements = append(t.statements, st.SQL)
		if st.SQL != sql.InsertEvents {
			continue
		}
		for _, arg := range st.Args { // the lines are among them, inside the encoding of an array
			if _, lines, ok := strings.Cut(string(arg), `{"session":"`); ok {
				t.appended = lines
				t.session, _, _ = strings.Cut(lines, `"`)
			}
		}
	}
	return t
}

// The names of the trials; see trials.
const (
	limitless = "limits out of the way"
	limited   = "limits at their defaults"
)

const (
	beforeStatement = faultproxy.BeforeStatement
	beforeCommit    = faultproxy.BeforeCommit
	afterCommit     = faultproxy.AfterCommit
)

func workerPoint(row, name string, at faultproxy.Moment, in func(transaction) bool) *point {
	return &point{row: row, name: name, program: worker, at: at, in: in}
}

func scannerPoint(row, name string, at faultproxy.Moment, in func(transaction) bool) *point {
	return &point{row: row, name: name, program: scanner, at: at, in: in}
}

func (p *point) leaving(what string) *point     { p.leaves = what; return p }
func (p *point) needing(what string) *point     { p.needs = what; return p }
func (p *point) onlyIn(trial string) *point     { p.trial = trial; return p }
func (p *point) after(scripts ...string) *point { p.by = scripts; return p }

func (p *point) toldWhen(f func(faultproxy.Moment, transaction) bool) *point {
	p.tell = f
	return p
}

func statement(s string) func(transaction) bool { return func(t transaction) bool { return t.now(s) } }

func with(s string) func(transaction) bool { return func(t transaction) bool { return t.has(s) } }

// The transactions that several points are in.
func admits(t transaction) bool {
	return t.says(claims.InputAdmitted) && strings.Contains(t.appended, `"armed":false`)
}

func wakes(t transaction) bool {
	return t.says(claims.InputAdmitted) && !admits(t)
}

func wakesAndAcquires(t transaction) bool { return wakes(t) && t.says(claims.ExecutionStarted) }

func wakesOnly(t transaction) bool { return wakes(t) && !t.says(claims.ExecutionStarted) }

func cancelsStep(t transaction) bool { return t.says(claims.ExecutionCancelling) }

func cancelsHead(t transaction) bool {
	return t.says(claims.InputCancelled) || t.says(claims.ContinuationCancelled) || t.says(claims.WakeCancelled)
}

func acquires(t transaction) bool {
	return t.says(claims.ExecutionStarted) && !t.says(claims.InputAdmitted)
}

func settlesInterrupted(t transaction) bool {
	return t.has(sql.RemoveClaims) && t.ended(claims.OutcomeInterrupted)
}

func records(t transaction) bool { return t.says(claims.TextEvent) && !t.closesStep() }

func handsOver(t transaction) bool {
	return t.says(claims.StepFailedEvent) && t.ended(claims.OutcomeHandedOver)
}

func converts(t transaction) bool {
	return t.has(sql.RemoveRecoveryClaim) && t.says(claims.StepFailedEvent)
}

// itRuns: the process has something to hand over.
func itRuns(at faultproxy.Moment, t transaction) bool {
	return at == afterCommit && t.says(claims.StepStartedEvent)
}

// itIsUp: the process takes signals.
func itIsUp(_ faultproxy.Moment, t transaction) bool { return t.now(sql.Heartbeat) }

// points are all of them; each row has its own.
var points = []*point{
	workerPoint(rows[0], "an admit", beforeCommit, admits).after("admitted"),
	workerPoint(rows[0], "a wake that acquires", beforeCommit, wakesAndAcquires).after("once"),
	workerPoint(rows[0], "a wake that does not", beforeCommit, wakesOnly).after("queued"),
	workerPoint(rows[0], "an interrupt of a step", beforeCommit, cancelsStep).after("stopped", "replaced"),
	workerPoint(rows[0], "a command that causes no event", beforeCommit, func(t transaction) bool {
		return t.has(sql.LockSession) && t.now(sql.SaveSessions) && t.appended == ""
	}).after("bare", "twice"),

	workerPoint(rows[1], "an admit", afterCommit, admits).after("admitted"),
	workerPoint(rows[1], "a wake that acquires", afterCommit, wakesAndAcquires).after("once"),
	workerPoint(rows[1], "a wake that does not", afterCommit, wakesOnly).after("queued", "steered"),
	workerPoint(rows[1], "an interrupt of a step", afterCommit, cancelsStep).after("stopped", "replaced"),
	workerPoint(rows[1], "an interrupt of a head", afterCommit, cancelsHead).after("given up", "discarded"),

	// An acquisition starts its first step, so this leaves one that never ran; a claim without a step is left only
	// between two steps.
	workerPoint(rows[2], "a ready session, before COMMIT", beforeCommit, acquires).after("retried", "later"),
	workerPoint(rows[2], "a ready session", afterCommit, acquires).after("retried", "later"),
	workerPoint(rows[2], "between two steps", beforeStatement, statement(sql.ClaimStartStep)).after("queued", "more"),

	workerPoint(rows[3], "the next step", afterCommit, with(sql.ClaimStartStep)).after("queued", "more"),
	workerPoint(rows[3], "its handler has put out text", afterCommit, records).after("steered", "queued"),
	workerPoint(rows[3], "its handler has ended", beforeCommit, func(t transaction) bool { return t.says(claims.StepEndedEvent) }),
	workerPoint(rows[3], "its handler has failed", beforeCommit, func(t transaction) bool { return t.ended(claims.OutcomeRetrying) }).after("retried"),

	workerPoint(rows[4], "more is due", afterCommit, func(t transaction) bool {
		return t.has(sql.ClaimCloseStep) && !t.has(sql.InsertContinuation)
	}).after("queued", "failed"),
	workerPoint(rows[4], "a next is promised", afterCommit, func(t transaction) bool {
		return t.has(sql.ClaimCloseStep) && t.has(sql.InsertContinuation)
	}).after("more", "more bare"),

	workerPoint(rows[5], "all has joined", beforeCommit, settlesInterrupted).after("stopped", "pressed").leaving(leavesCancelling),

	workerPoint(rows[6], "declined", afterCommit, with(sql.ClaimDecline)).after("declined").leaving(leavesCancelled),
	workerPoint(rows[6], "all has joined", beforeCommit, func(t transaction) bool {
		return t.has(sql.RemoveClaims) && t.ended(claims.OutcomeDeclined)
	}).after("declined").leaving(leavesCancelled),

	workerPoint(rows[7], "the relay reads", beforeStatement, statement(sql.Unrelayed)),
	scannerPoint(rows[7], "the relay reads", beforeStatement, statement(sql.Unrelayed)),

	workerPoint(rows[8], "the mark", beforeStatement, statement(sql.NoteRelayed)),
	workerPoint(rows[8], "the mark, before COMMIT", beforeCommit, with(sql.NoteRelayed)),
	scannerPoint(rows[8], "the mark", beforeStatement, statement(sql.NoteRelayed)),

	scannerPoint(rows[9], "the takeover, before COMMIT", beforeCommit, with(sql.ClaimTakeOver)),
	scannerPoint(rows[9], "the takeover", afterCommit, with(sql.ClaimTakeOver)),
	scannerPoint(rows[9], "the conversion, before COMMIT", beforeCommit, converts),
	scannerPoint(rows[9], "the conversion, before telling", afterCommit, converts),

	workerPoint(settling, "completed", afterCommit, func(t transaction) bool { return t.ended(claims.OutcomeCompleted) }),
	workerPoint(settling, "retrying", afterCommit, func(t transaction) bool { return t.ended(claims.OutcomeRetrying) }).after("retried"),
	workerPoint(settling, "interrupted", afterCommit, settlesInterrupted).after("stopped", "pressed"),
	workerPoint(handingOver, "before COMMIT", beforeCommit, handsOver).after("steered").toldWhen(itRuns),
	workerPoint(handingOver, "before telling", afterCommit, handsOver).after("steered").toldWhen(itRuns),
	workerPoint(starting, "its lease is open", afterCommit, with(sql.OpenLease)).toldWhen(itIsUp),

	scannerPoint(ending, "touched", afterCommit, with(sql.TouchClaims)),
	scannerPoint(ending, "declined, before COMMIT", beforeCommit, func(t transaction) bool {
		return t.has(sql.RemoveExpiredClaim) && t.ended(claims.OutcomeDeclined)
	}).needing(leavesCancelled),
	scannerPoint(ending, "interrupted, before COMMIT", beforeCommit, func(t transaction) bool {
		return t.has(sql.RemoveExpiredClaim) && t.says(claims.StepInterruptedEvent)
	}).needing(leavesCancelling).onlyIn(limitless),
	scannerPoint(quarantining, "before COMMIT", beforeCommit, with(sql.InsertQuarantine)).needing(leavesCancelling).onlyIn(limited),
	scannerPoint(quarantining, "before telling", afterCommit, with(sql.InsertQuarantine)).needing(leavesCancelling).onlyIn(limited),
	scannerPoint(starting, "its lease is open", afterCommit, with(sql.OpenLease)).toldWhen(itIsUp),
}

// Every row of section 7 has a point, and every point can be told from the others.
func TestEveryCrashPointIsInTheTable(t *testing.T) {
	seen, names := map[string]bool{}, map[string]bool{}
	for _, p := range points {
		seen[p.row] = true
		if names[p.String()] {
			t.Errorf("two points are called %q", p)
		}
		names[p.String()] = true
	}
	for _, p := range points {
		for _, name := range p.by {
			if scripts[name] == nil {
				t.Errorf("%q comes after the script %q, which is not there", p, name)
			}
		}
	}
	for _, r := range rows {
		if !seen[r] {
			t.Errorf("no process is killed after %q", r)
		}
	}
}

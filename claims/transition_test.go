package claims

import (
	"errors"
	"fmt"
	"strings"
	"testing"
)

// table is docs/design.md section 2, cell by cell. The columns are running live, running expired, cancelling live,
// cancelling expired, cancelled live, cancelled expired. In a column of expired claims "a/b" is a where the lease
// expired and b where the claim was revoked.
const table = `
op                     | running    | expired           | cancelling | expired         | cancelled | expired
acquire                | busy       | busy              | busy       | busy            | busy      | busy
interrupt, step open   | cancelling | revoke            | nochange   | nochange        | nochange  | nochange
interrupt, no step     | head       | head              | nochange   | nochange        | nochange  | nochange
revoke                 | revoke     | revoke            | revoke     | revoke          | revoke    | revoke
start                  | yes        | fenced            | iscanc     | fenced          | iscanc    | fenced
record                 | yes        | fenced            | yes        | fenced          | iscanc    | fenced
decline                | cancelled  | fenced            | iscanc     | fenced          | nochange  | fenced
close                  | yes        | yes/fenced        | iscanc     | iscanc          | iscanc    | iscanc
settle                 | remove     | remove/fenced     | iscanc     | iscanc          | remove    | remove/fenced
settle interrupted     | illegal    | illegal           | interrupt  | interrupt/fenced| remove    | remove/fenced
hand over              | continue   | continue/fenced   | interrupt  | interrupt/fenced| remove    | remove/fenced
scan                   | nochange   | takeover          | nochange   | quarantine      | nochange  | remove
`

var cells = map[string]Effect{
	"busy": Busy, "fenced": Fenced, "iscanc": IsCancelled, "illegal": Illegal, "nochange": NoChange, "yes": Allow,
	"cancelling": ToCancelling, "head": CancelHead, "revoke": MarkRevoked, "verdict": RaiseVerdict, "cancelled": ToCancelled,
	"remove": Remove, "interrupt": CloseAndRemove, "continue": Continue, "takeover": TakeOver, "quarantine": ToQuarantine,
}

var rowOps = map[string]Op{
	"acquire": OpAcquire, "interrupt, step open": OpInterrupt, "interrupt, no step": OpInterrupt, "revoke": OpRevoke, "start": OpStart,
	"record": OpRecord, "decline": OpDecline, "close": OpClose, "settle": OpSettle, "settle interrupted": OpSettleInterrupt,
	"hand over": OpHandOver, "scan": OpScan,
}

var (
	phases = []Phase{Running, Cancelling, Cancelled}
	causes = []Cause{None, Unknown, Interrupted, NeverJoined}
)

// states are all there can be, and the few that cannot.
func states() []State {
	var out []State
	for _, p := range phases {
		for _, c := range causes {
			for bits := range 16 {
				out = append(out, State{Phase: p, Revoked: c, LeaseLive: bits&1 != 0, StepOpen: bits&2 != 0, Own: bits&4 != 0, Scanner: bits&8 != 0})
			}
		}
	}
	return out
}

// parseTable returns the cells by row and column.
func parseTable(t *testing.T) map[string][]string {
	t.Helper()
	rows := map[string][]string{}
	for i, line := range strings.Split(strings.TrimSpace(table), "\n") {
		parts := strings.Split(line, "|")
		for j := range parts {
			parts[j] = strings.TrimSpace(parts[j])
		}
		if len(parts) != 7 {
			t.Fatalf("row %d has %d cells", i, len(parts))
		}
		if i > 0 {
			rows[parts[0]] = parts[1:]
		}
	}
	return rows
}

// expected reads the table for a state, with the rules that stand beside it.
func expected(t *testing.T, rows map[string][]string, s State, row string) Effect {
	t.Helper()
	op := rowOps[row]
	if !s.Own && op != OpAcquire && op != OpInterrupt && op != OpScan {
		return Fenced
	}
	column := map[Phase]int{Running: 0, Cancelling: 2, Cancelled: 4}[s.Phase]
	if !s.LeaseLive || s.Revoked != None {
		column++
	}
	byLease, byRevocation, two := strings.Cut(rows[row][column], "/")
	word := byLease
	if two && s.Revoked != None {
		word = byRevocation
	}
	effect, ok := cells[word]
	if !ok {
		t.Fatalf("row %q has a cell %q", row, word)
	}
	// "remove (never_joined: quarantine)", and an interrupt of what a scanner holds sets its verdict.
	if op == OpScan && effect == Remove && s.Revoked == NeverJoined {
		return ToQuarantine
	}
	if op == OpInterrupt && effect == ToCancelling && s.Scanner {
		return RaiseVerdict
	}
	return effect
}

func TestTransitionTable(t *testing.T) {
	rows := parseTable(t)
	if len(rows) != len(rowOps) {
		t.Fatalf("the table has %d rows, want %d", len(rows), len(rowOps))
	}
	n := 0
	for row := range rows {
		for _, s := range states() {
			if row == "interrupt, step open" && !s.StepOpen || row == "interrupt, no step" && s.StepOpen {
				continue
			}
			n++
			if got, want := Next(s, rowOps[row]), expected(t, rows, s, row); got != want {
				t.Errorf("%s of %+v: effect %d, want %d", row, s, got, want)
			}
		}
	}
	if want := len(states()) * (len(rowOps) - 1); n != want {
		t.Errorf("looked at %d cells, want %d", n, want)
	}
}

func TestTransitionsAreTotal(t *testing.T) {
	seen := map[Effect]bool{}
	for op := range opEnd {
		for _, s := range states() {
			e := Next(s, op)
			if e < 0 || e >= effectEnd {
				t.Errorf("op %d of %+v has effect %d", op, s, e)
			}
			seen[e] = true
		}
	}
	for e := range effectEnd {
		if !seen[e] {
			t.Errorf("no operation has effect %d", e)
		}
	}
}

func TestEffectErrors(t *testing.T) {
	want := map[Effect]error{Busy: ErrBusy, Fenced: ErrFenced, IsCancelled: ErrCancelled, Illegal: ErrIllegal}
	for e := range effectEnd {
		if got := e.Err(); !errors.Is(got, want[e]) || (got == nil) != (want[e] == nil) {
			t.Errorf("effect %d stands for %v, want %v", e, got, want[e])
		}
	}
}

func TestUnknownPhasesAndOperationsPanic(t *testing.T) {
	panics := func(name string, s State, op Op) {
		t.Helper()
		defer func() {
			if recover() == nil {
				t.Errorf("%s did not panic", name)
			}
		}()
		Next(s, op)
	}
	for op := range opEnd {
		if op == OpAcquire {
			continue // it looks at no phase
		}
		panics(fmt.Sprint("op ", op, " of an unknown phase"), State{Phase: "paused", Own: true}, op)
	}
	panics("op -1", State{Phase: Running, Own: true}, -1)
	panics("opEnd", State{Phase: Running, Own: true}, opEnd)
}

func TestCausesAreOnlyRaised(t *testing.T) {
	for i, a := range causes {
		for j, b := range causes {
			if got := a.Raise(b); got != causes[max(i, j)] {
				t.Errorf("%q raised to %q is %q", a, b, got)
			}
		}
	}
	if got := Unknown.Raise("nonsense"); got != Unknown {
		t.Errorf("raised to nonsense: %q", got)
	}
}

// FuzzTransitions holds rules that go over single cells.
func FuzzTransitions(f *testing.F) {
	f.Add(uint8(0), uint8(0), uint8(3), uint8(1))
	f.Add(uint8(2), uint8(3), uint8(15), uint8(9))
	f.Fuzz(func(t *testing.T, phase, cause, bits, operation uint8) {
		s := State{
			Phase: phases[int(phase)%len(phases)], Revoked: causes[int(cause)%len(causes)],
			LeaseLive: bits&1 != 0, StepOpen: bits&2 != 0, Own: bits&4 != 0, Scanner: bits&8 != 0,
		}
		op := Op(int(operation) % int(opEnd))
		e := Next(s, op)
		owners := op != OpAcquire && op != OpInterrupt && op != OpScan
		writes := e.Err() == nil && e != NoChange
		switch {
		case op == OpAcquire && e != Busy: // I2
			t.Error("acquisition is not busy")
		case owners && !s.Own && e != Fenced: // I5
			t.Error("somebody else's operation is not fenced")
		case owners && op != OpRevoke && s.Revoked != None && writes: // a revoked claim is the scanner's
			t.Error("the owner writes on a revoked claim")
		case (op == OpStart || op == OpRecord || op == OpDecline) && !s.Live() && writes: // I5
			t.Error("the owner starts or records without a live lease")
		case s.Phase == Cancelling && (e == Continue || op == OpClose && writes || op == OpSettle && writes): // I9
			t.Error("a cancellation is overwritten")
		case op == OpScan && s.Live() && e != NoChange: // I1
			t.Error("a scanner takes a live claim")
		case op == OpScan && s.Phase == Cancelling && e == TakeOver: // I26
			t.Error("an uncertain cancellation is recovered")
		case e == TakeOver && op != OpScan, e == ToCancelling && (op != OpInterrupt || !s.StepOpen || !s.Live()):
			t.Error("wrong operation for its effect")
		}
	})
}

package spec

import (
	"os"
	"reflect"
	"testing"

	"reveille/claims"
)

// limit bounds an exploration of the default tests.
const limit = 1_000_000

type model struct {
	name   string
	config Config
}

var small = []model{
	{"one of everything", Config{Inputs: 1, Scanners: 1, Budget: Budget{Faults: 1, Interrupts: 1, Wakes: 1, Turns: 1, Releases: 1}}},
	{"two inputs", Config{Inputs: 2, Scanners: 1, Budget: Budget{Faults: 1, Interrupts: 1, Turns: 1, Releases: 1}}},
	{"two faults, two scanners", Config{Inputs: 1, Scanners: 2, Budget: Budget{Faults: 2, Interrupts: 2, Releases: 1}}},
	{"--uncertain-cancel=interrupt", Config{Inputs: 1, Scanners: 1, Budget: Budget{Faults: 2, Interrupts: 1}, UncertainInterrupts: true}},
}

// Together they take a few minutes and less than 8 GiB.
var large = []model{
	{"two faults, two inputs", Config{Inputs: 2, Scanners: 1, Budget: Budget{Faults: 2, Interrupts: 1, Wakes: 1, Turns: 1, Releases: 1}}},
	{"one fault, two of the rest", Config{Inputs: 2, Scanners: 1, Budget: Budget{Faults: 1, Interrupts: 2, Wakes: 2, Turns: 2, Releases: 2}}},
	{"three faults, two scanners", Config{Inputs: 1, Scanners: 2, Budget: Budget{Faults: 3, Interrupts: 2, Turns: 1, Releases: 1}}},
	{"four faults, two scanners", Config{Inputs: 1, Scanners: 2, Budget: Budget{Faults: 4, Interrupts: 1, Turns: 1}}},
	{"--uncertain-cancel=interrupt", Config{Inputs: 1, Scanners: 2, Budget: Budget{Faults: 2, Interrupts: 1, Wakes: 1, Turns: 1, Releases: 1}, UncertainInterrupts: true}},
}

func check(t *testing.T, m model, limit int) Result {
	t.Helper()
	r, err := Check(m.config, limit)
	if err != nil {
		t.Fatalf("%s: %v", m.name, err)
	}
	if r.Violation != nil {
		t.Fatalf("%s: %v", m.name, r.Violation)
	}
	t.Logf("%-30s %9d states, %9d transitions, depth %3d, %8d at rest", m.name, r.States, r.Transitions, r.Depth, r.Rests)
	return r
}

// TestModel also holds that nothing in the model is idle: each action happens.
func TestModel(t *testing.T) {
	taken := map[string]int{}
	for _, m := range small {
		for i, n := range check(t, m, limit).Taken {
			taken[actions[i].name] += n
		}
	}
	for _, a := range actions {
		if mutantsOnly := a.name == "heartbeat after its lease expired"; taken[a.name] == 0 && !mutantsOnly {
			t.Errorf("action %q never happens", a.name)
		}
	}
}

// TestLarge takes minutes and gigabytes: make spec.
func TestLarge(t *testing.T) {
	if os.Getenv("RV_TEST_SPEC") != "large" {
		t.Log("make spec explores the large bounds (RV_TEST_SPEC=large)")
		return
	}
	for _, m := range large {
		t.Run(m.name, func(t *testing.T) { check(t, m, 100*limit) })
	}
}

// mutants are found within these budgets, by these properties. Where one breaks
// several, it is the nearest that is named.
var mutants = []struct {
	rule   string
	budget Budget
	want   property
}{
	{"AcquireOverwrites", Budget{Faults: 1, Wakes: 1}, noOverwrite},
	{"UnknownIsAcquired", Budget{Faults: 1}, oneHandler},
	{"NoMinuteCheck", Budget{Faults: 1}, reachesRest},
	{"LooksUpFirst", Budget{}, registered},
	{"HeartbeatRevives", Budget{Faults: 1}, noRevival},
	{"NoExecutionFence", Budget{Faults: 1}, onlyOwners},
	{"TakeoverKeepsExecution", Budget{Faults: 1}, onlyOwners},
	{"TakeoverKeepsEpoch", Budget{Faults: 1}, oneEpoch},
	{"NoDeadline", Budget{Faults: 1}, deadline},
	{"NoOwnershipCheck", Budget{Faults: 1}, checkedCall},
	{"CloseOverCancelling", Budget{Interrupts: 1}, cancellationStays},
	{"TrustTheHandler", Budget{Interrupts: 1}, cancellationStays},
	{"SettleBeforeJoin", Budget{}, joinedFirst},
	{"NeverJoinedIsRecovered", Budget{Faults: 1}, oneHandler},
	{"DeclineKeepsPhase", Budget{Turns: 1}, oneEnd},
	{"RegisterLate", Budget{}, registered},
	{"InterruptionDropsWakes", Budget{Interrupts: 1, Wakes: 1}, wakesSurvive},
	{"RemovalForgetsReady", Budget{Faults: 1, Turns: 1}, readyMark},
	{"PromiseNotConsumed", Budget{Faults: 1}, coveredOnce},
	{"RecoveryArmsInputs", Budget{Faults: 1}, coveredOnce},
	{"HandOverPromisesNothing", Budget{Faults: 1}, coveredOnce},
	{"DeclinedIsQuarantined", Budget{Faults: 1, Turns: 1}, knownOutcome},
	{"CancellingIsRecovered", Budget{Faults: 1, Interrupts: 1}, cancellationStays},
	{"InterruptSkipsExpired", Budget{Faults: 1, Interrupts: 1}, cancellationStays},
	{"InterruptSkipsScanner", Budget{Faults: 1, Interrupts: 1}, cancellationStays},
	{"VerdictIsLowered", Budget{Faults: 2, Interrupts: 1}, cancellationStays},
	{"ScannerIgnoresExpiry", Budget{Interrupts: 1}, fencedQuarantine},
	{"QuarantineRuns", Budget{Faults: 1, Interrupts: 1, Wakes: 1}, noQuarantinedRun},
	{"ReleaseForgetsStep", Budget{Faults: 1, Interrupts: 1, Releases: 1}, oneEnd},
	{"NoTakeover", Budget{Faults: 1}, reachesRest},
}

// TestMutants breaks one rule at a time: each must be missed, or the model says
// nothing about it. The traces are the shortest; -v shows them.
func TestMutants(t *testing.T) {
	tried := map[string]bool{}
	for _, m := range mutants {
		tried[m.rule] = true
		t.Run(m.rule, func(t *testing.T) {
			c := Config{Inputs: 1, Scanners: 1, Budget: m.budget}
			reflect.ValueOf(&c.Rules).Elem().FieldByName(m.rule).SetBool(true)
			r, err := Check(c, limit)
			switch {
			case err != nil:
				t.Fatal(err)
			case r.Violation == nil:
				t.Fatalf("not found in %d states", r.States)
			case r.Violation.Property != m.want:
				t.Errorf("breaks another property than %v", m.want)
			}
			t.Logf("%d states: %v", r.States, r.Violation)
		})
	}
	for _, s := range spared {
		tried[s] = true
	}
	for f := range reflect.TypeFor[Rules]().Fields() {
		if !tried[f.Name] {
			t.Errorf("rule %s has no mutant here", f.Name)
		}
	}
}

// spared are rules that no property needs.
var spared = []string{"NoResolution", "AcquireWithoutLease"}

// TestSpared: without these rules sessions wait for a scanner, and count a
// takeover; nothing else breaks. Should that change, they become mutants.
func TestSpared(t *testing.T) {
	for _, rule := range spared {
		m := model{rule, Config{Inputs: 1, Scanners: 1, Budget: Budget{Faults: 1, Interrupts: 1, Wakes: 1}}}
		reflect.ValueOf(&m.config.Rules).Elem().FieldByName(rule).SetBool(true)
		check(t, m, limit)
	}
}

// TestTheTableIsThatOfClaims holds the model's decisions against the function
// that decides in the code, in all states and for all operations.
func TestTheTableIsThatOfClaims(t *testing.T) {
	phases := map[phase]claims.Phase{running: claims.Running, cancelling: claims.Cancelling, cancelled: claims.Cancelled}
	causes := map[cause]claims.Cause{noCause: claims.None, unknown: claims.Unknown, interrupted: claims.Interrupted, neverJoined: claims.NeverJoined}
	for op := claims.OpAcquire; op <= claims.OpScan; op++ {
		for p, phase := range phases {
			for k, cause := range causes {
				for bits := range 16 {
					v := view{phase: p, revoked: k, lease: bits&1 != 0, stepOpen: bits&2 != 0, own: bits&4 != 0, scanner: bits&8 != 0}
					s := claims.State{Phase: phase, Revoked: cause, LeaseLive: v.lease, StepOpen: v.stepOpen, Own: v.own, Scanner: v.scanner}
					if got, want := (Rules{}).decide(v, op), claims.Next(s, op); got != want {
						t.Errorf("operation %d of %+v: the model has effect %d, claims %d", op, s, got, want)
					}
				}
			}
		}
	}
	for a, from := range causes {
		for b, to := range causes {
			if got, want := causes[max(a, b)], from.Raise(to); got != want {
				t.Errorf("%q raised to %q is %q in the model, %q in claims", from, to, got, want)
			}
		}
	}
}

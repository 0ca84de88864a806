package systemtest

import (
	"testing"

	"reveille/claims"
)

// Admitted inputs stay asleep over interrupts and the death of everything; one
// wake arms them all, in order. A wake of what was served buys nothing; one of
// what is asleep arms it.
func TestAdmittedInputsStayAsleep(t *testing.T) {
	w := newLastingWorld(t)
	w.askSteps()
	w.asking(command, "a")
	w.start("scanner", "scan1")
	// A step runs while they come in, and is interrupted.
	w.publish(wakeOf("s", input("first", claims.Queue)))
	first := w.steps.of("s")
	w.publish(admitOf("s", input("a", claims.Queue)), admitOf("s", input("b", claims.Steer)), admitOf("s", input("c", claims.Queue)))
	w.applied()
	w.publish(interruptOf("s"))
	first.stopped(w)
	w.ended("s", claims.OutcomeInterrupted)
	w.publish(interruptOf("s")) // with nothing that runs or would run
	w.applied()
	w.asleep("a", "b", "c")
	w.crash()
	w.startDatabase()
	w.asking(inGo, "b")
	w.start("scanner", "scan2")
	w.publish(interruptOf("s"), admitOf("s", input("a", claims.Queue)))
	w.applied()
	w.other()
	w.asleep("a", "b", "c")

	w.publish(wakeOf("s", nil))
	for _, want := range []string{"a b", "c"} {
		c := w.steps.of("s")
		if c.inputs() != want {
			t.Fatalf("a step covers %q, want %q", c.inputs(), want)
		}
		c.end(w)
	}
	w.ended("s", claims.OutcomeCompleted)
	w.publish(wakeOf("s", input("a", claims.Queue)), wakeOf("s", input("first", claims.Queue)))
	w.applied()
	w.other()
	w.publish(admitOf("s", input("d", claims.Queue)), wakeOf("s", input("d", claims.Queue)))
	w.steps.of("s").end(w)
	w.idle(7)
	w.verify()
	w.wantLog("s", `input.admitted(first) execution.started input.promoted(first) step.started(first)
		input.admitted(a) input.admitted(b) input.admitted(c) execution.cancelling step.interrupted execution.ended(interrupted)
		execution.started input.promoted(a) input.promoted(b) step.started(a+b) step.ended
		input.promoted(c) step.started(c) step.ended execution.ended(completed)
		input.admitted(d) execution.started input.promoted(d) step.started(d) step.ended execution.ended(completed)`)
}

// asleep wants the pending inputs of session s to be these, all unarmed.
func (w *world) asleep(want ...string) {
	w.t.Helper()
	w.steps.none("asleep")
	if got := w.query("SELECT input_id FROM inputs WHERE session_id = 's' AND state = 'unarmed' ORDER BY position"); len(got) != len(want) {
		w.t.Errorf("asleep are %v, want %v", got, want)
	}
}

// other runs a session from its wake to its end: whatever was to be started
// before has been announced by then.
func (w *world) other() {
	w.t.Helper()
	w.others++
	s := session("other", w.others)
	w.publish(wakeOf(s, input("in", claims.Queue)))
	w.steps.next("a step of "+string(s)).only(w, s).end(w)
	w.ended(s, claims.OutcomeCompleted)
}

// only wants a call to be of a session.
func (c *call) only(w *world, s claims.SessionID) *call {
	w.t.Helper()
	if c.Request.Session != s {
		w.t.Fatalf("a step of %s starts, want one of %s", c.Request.Session, s)
	}
	return c
}

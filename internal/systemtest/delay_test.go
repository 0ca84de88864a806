package systemtest

import (
	"testing"
	"time"

	"reveille/claims"
)

// Delayed wakes, with and without an input, survive the death of everything and
// start at their time, not before; until then they block nothing.
func TestDelayedWakesSurviveACrash(t *testing.T) {
	const delay = 8 * time.Second
	w := newLastingWorld(t)
	w.askSteps()
	w.asking(command, "a")
	w.start("scanner", "scan1")
	due := time.Now().Add(delay).UTC()
	later := func(session claims.SessionID, in *claims.Input) claims.Command {
		cmd := wakeOf(session, in)
		cmd.NotBefore = due
		return cmd
	}
	w.publish(
		later("input", input("later", claims.Queue)),
		later("bare", nil),
		admitOf("bare", input("admitted", claims.Queue)),
		later("both", input("later", claims.Queue)),
		wakeOf("both", input("now", claims.Queue)),
	)
	now := w.steps.next("what is due now")
	if now.Request.Session != "both" || now.inputs() != "now" {
		t.Fatalf("%s starts with %q", now.Request.Session, now.inputs())
	}
	now.end(w)
	w.ended("both", claims.OutcomeCompleted)
	w.applied()
	w.steps.none("before its time")
	w.crash()
	w.startDatabase()
	w.asking(inGo, "b")
	w.start("scanner", "scan2")
	for _, session := range []claims.SessionID{"input", "bare", "both"} {
		w.steps.of(session).end(w)
	}
	w.idle(4)
	w.verify()
	for _, session := range []claims.SessionID{"input", "bare", "both"} {
		started := w.times(w.records(session), claims.StepStartedEvent)
		late := started[len(started)-1].Sub(due)
		if late < 0 {
			t.Errorf("%s starts %v before its time", session, -late)
		}
		t.Logf("%s starts %v after its time", session, late)
	}
	w.wantLog("bare", `input.admitted(admitted) execution.started input.promoted(admitted) step.started(admitted)
		step.ended execution.ended(completed)`)
	w.wantLog("both", `input.admitted(later) input.admitted(now)
		execution.started input.promoted(now) step.started(now) step.ended execution.ended(completed)
		execution.started input.promoted(later) step.started(later) step.ended execution.ended(completed)`)
}

package systemtest

import (
	"os"
	"path/filepath"
	"testing"

	"reveille/claims"
)

// NATS comes back with an older copy of its files. What was applied since is not
// applied again, what is published now under sequences that were used is, each
// once and in order (I18), and the event stream is made whole (I25).
func TestI18NATSRestoredFromBackup(t *testing.T) {
	const sessions = 5
	w := newWorld(t)
	w.askSteps()
	w.asking(inGo, "a")
	w.asking(command, "b")
	w.start("scanner", "scan")
	store, copied := filepath.Join(w.dir, "nats"), filepath.Join(w.dir, "backup")
	inputs := 0
	round := func(ids ...string) {
		for _, id := range ids {
			for i := range sessions {
				w.publish(wakeOf(session("s", i), input(id, claims.Queue)))
				inputs++
			}
		}
		for range sessions * len(ids) {
			w.steps.next("a step").end(w)
		}
		w.idle(inputs)
	}
	round("1", "2")
	w.applied()
	w.stopNATS()
	if err := os.CopyFS(copied, os.DirFS(store)); err != nil {
		t.Fatal(err)
	}
	w.startNATS()
	round("3", "4", "5")
	w.applied()
	_, before := w.messages("RV_COMMANDS")
	w.stopNATS()
	if err := os.RemoveAll(store); err != nil {
		t.Fatal(err)
	}
	if err := os.Rename(copied, store); err != nil {
		t.Fatal(err)
	}
	w.startNATS()
	_, after := w.messages("RV_COMMANDS")
	if after >= before {
		t.Fatalf("the restored stream ends at %d, and ended at %d before", after, before)
	}
	round("6")
	w.applied()
	for s, log := range w.verify() {
		if got := len(w.times(log, claims.StepStartedEvent)); got != 6 {
			t.Errorf("session %s: %d steps, want 6", s, got)
		}
	}
}

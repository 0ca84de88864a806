package main

import (
	"os/exec"
	"testing"
)

// TestMutantsAreThere: each mutant's edits apply to the code as it is, and what comes of them is a program. They are compiled
// together, since each by itself takes as long as all.
func TestMutantsAreThere(t *testing.T) {
	all := mutant{name: "all"}
	for _, m := range mutants {
		if _, err := m.overlay(t.TempDir()); err != nil {
			t.Error(err)
		}
		all.edits = append(all.edits, m.edits...)
	}
	overlay, err := all.overlay(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	if out, err := exec.Command("go", "build", "-overlay", overlay, "reveille/bus", "reveille/claims/crdb", "reveille/runner/...").CombinedOutput(); err != nil {
		t.Errorf("%v: %s", err, out)
	}
}

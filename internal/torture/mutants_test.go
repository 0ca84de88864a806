package main

import (
	"os/exec"
	"testing"
)

// TestMutantsAreThere: each mutant's edits apply to the code as it is, and what comes of them is a program.
func TestMutantsAreThere(t *testing.T) {
	for _, m := range mutants {
		t.Run(m.name, func(t *testing.T) {
			overlay, err := m.overlay(t.TempDir())
			if err != nil {
				t.Fatal(err)
			}
			if out, err := exec.Command("go", "build", "-overlay", overlay, "reveille/bus", "reveille/claims/crdb", "reveille/runner").CombinedOutput(); err != nil {
				t.Errorf("%v: %s", err, out)
			}
		})
	}
}

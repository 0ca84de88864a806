//go:build mutants

package main

import (
	"math/rand/v2"
	"testing"
	"time"
)

// TestMutantsAreFound: what breaks a rule is found within five minutes.
func TestMutantsAreFound(t *testing.T) {
	for _, m := range mutants {
		t.Run(m.name, func(t *testing.T) {
			began := time.Now()
			found, err := hunt(t.Context(), options{Seed: rand.Uint64(), Time: time.Minute, Nats: 1, Workers: 3, Scanners: 2, Mutant: m.name})
			switch {
			case err != nil:
				t.Fatal(err)
			case found == 0:
				t.Errorf("not found within %v: %s", time.Since(began).Round(time.Second), m.rule)
			default:
				t.Logf("found after %v: %s", time.Since(began).Round(time.Second), m.rule)
			}
		})
	}
}

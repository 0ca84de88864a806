package spec

import (
	"os"
	"reflect"
	"testing"

	"reveille/claims"
)

// limit bounds an exploration of the default test.
const limit = 2_000_000

func check(t *testing.T, name string, c Config, limit int) Result {
	t.Helper()
	r, err := Check(c, limit)
	if err != nil {
		t.Fatalf("%s: %v", name, err)
	}
	if r.Violation != nil {
		t.Fatalf("%s: %v", name, r.Violation)
	}
	t.Logf("%-28s %9d states %9d transitions, depth %3d, %8d at rest", name, r.States, r.Transitions, r.Depth, r.Rests)
	return r
}

func TestModel(t *testing.T) {
	for _, m := range small {
		check(t, m.name, m.config, limit)
	}
}

// TestLarge takes minutes and gigabytes: make spec.
func TestLarge(t *testing.T) {
	if os.Getenv("RV_TEST_SPEC") != "large" {
		t.Log("RV_TEST_SPEC=large explores the large bounds; make spec sets it")
		return
	}
	for _, m := range large {
		t.Run(m.name, func(t *testing.T) { check(t, m.name, m.config, 100*limit) })
	}
}

type model struct {
	name   string
	config Config
}

var small = []model{
	{"one fault", Config{Inputs: 1, Scanners: 1, Budget: Budget{Faults: 1, Interrupts: 1, Wakes: 1}}},
}

var large = []model{}

func TestMutants(t *testing.T) {
	_ = reflect.TypeOf(Rules{})
	_ = claims.OpScan
}

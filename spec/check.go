package spec

import (
	"errors"
	"fmt"
	"hash/maphash"
	"slices"
	"strings"
)

// Result is what an exploration found.
type Result struct {
	States, Transitions, Depth int
	Rests                      int   // states that I32 asks every other to reach
	Taken                      []int // how often each action was
	// Violation is nil where every property holds.
	Violation *Violation
}

// Violation is a property that a state breaks, and the shortest way there.
type Violation struct {
	Property property
	Trace    []Step
}

// Step is one line of a trace.
type Step struct{ Process, Action, After string }

func (v *Violation) String() string {
	var b strings.Builder
	fmt.Fprintf(&b, "%v\n", v.Property)
	for i, s := range v.Trace {
		fmt.Fprintf(&b, "%3d  %-10s %-45s %s\n", i+1, s.Process, s.Action, s.After)
	}
	return b.String()
}

// errTooLarge: an exploration went over its limit, and proves nothing.
var errTooLarge = errors.New("more states than the limit")

// explorer holds the explored graph. Its states are canonical; they are found
// again by an open hash table of their indexes, which takes less than a map.
type explorer struct {
	c       *Config
	states  []state
	parents []int32
	slots   []int32 // index + 1
	seed    maphash.Seed
	// The edges of the system's own steps, by their source: those of state i end
	// at ends[i].
	edges []int32
	ends  []int
}

// Check explores all that can happen, breadth first, up to limit states, and
// stops at the first state that breaks a property; the first is the nearest.
// Where none does, it looks from which states the system gets to no rest.
func Check(c Config, limit int) (Result, error) {
	x := &explorer{c: &c, slots: make([]int32, 1<<16), seed: maphash.MakeSeed()}
	r := Result{Taken: make([]int, len(actions))}
	x.find(state{Left: c.Budget}.canonical(), -1)
	for level, at := 0, 0; at < len(x.states); at++ {
		if at == level { // all of a depth are found before the first of the next is looked at
			r.Depth++
			level = len(x.states)
		}
		if bad := x.states[at].check(); bad != holdsAll {
			r.States, r.Violation = len(x.states), &Violation{bad, x.trace(at)}
			return r, nil
		}
		if len(x.states) > limit {
			return r, fmt.Errorf("%w of %d", errTooLarge, limit)
		}
		x.expand(at, r.Taken)
	}
	for _, n := range r.Taken {
		r.Transitions += n
	}
	r.States = len(x.states)
	var stuck int
	if r.Rests, stuck = x.stuck(); stuck >= 0 {
		r.Violation = &Violation{reachesRest, x.trace(stuck)}
	}
	return r, nil
}

// expand finds the successors of a state, and counts the actions that lead there.
func (x *explorer) expand(at int, taken []int) {
	from := x.states[at]
	for k, a := range actions {
		a.next(x.c, from, func(s state, _ int) {
			taken[k]++
			i := x.find(s.canonical(), int32(at))
			if a.who == system {
				x.edges = append(x.edges, i)
			}
		})
	}
	x.ends = append(x.ends, len(x.edges))
}

// find is the index of a state, which is added where it is new.
func (x *explorer) find(s state, parent int32) int32 {
	mask := uint64(len(x.slots) - 1)
	slot := maphash.Comparable(x.seed, s) & mask
	for ; x.slots[slot] != 0; slot = (slot + 1) & mask {
		if i := x.slots[slot] - 1; x.states[i] == s {
			return i
		}
	}
	x.states = append(x.states, s)
	x.parents = append(x.parents, parent)
	x.slots[slot] = int32(len(x.states))
	if 2*len(x.states) > len(x.slots) {
		x.grow()
	}
	return int32(len(x.states) - 1)
}

func (x *explorer) grow() {
	x.slots = make([]int32, 2*len(x.slots))
	mask := uint64(len(x.slots) - 1)
	for i, s := range x.states {
		slot := maphash.Comparable(x.seed, s) & mask
		for x.slots[slot] != 0 {
			slot = (slot + 1) & mask
		}
		x.slots[slot] = int32(i + 1)
	}
}

// stuck looks backwards from the states at rest, over the system's own steps,
// and answers the first state that it does not come to; -1: there is none (AG EF).
func (x *explorer) stuck() (rests, first int) {
	// The edges by their target, in one array: those of i are back[from[i]:from[i+1]].
	from := make([]int, len(x.states)+1)
	for _, to := range x.edges {
		from[to+1]++
	}
	for i := range x.states {
		from[i+1] += from[i]
	}
	back, fill := make([]int32, len(x.edges)), slices.Clone(from)
	at := 0
	for i, end := range x.ends {
		for ; at < end; at++ {
			to := x.edges[at]
			back[fill[to]] = int32(i)
			fill[to]++
		}
	}
	reach := make([]bool, len(x.states))
	var todo []int32
	for i := range x.states {
		if x.states[i].atRest() {
			reach[i] = true
			todo = append(todo, int32(i))
		}
	}
	rests = len(todo)
	for len(todo) > 0 {
		i := todo[len(todo)-1]
		todo = todo[:len(todo)-1]
		for _, p := range back[from[i]:from[i+1]] {
			if !reach[p] {
				reach[p] = true
				todo = append(todo, p)
			}
		}
	}
	return rests, slices.Index(reach, false)
}

// trace is the way to a state. The explored states are canonical, so that it is
// walked again with processes that keep their names.
func (x *explorer) trace(at int) []Step {
	var way []state
	for i := int32(at); i >= 0; i = x.parents[i] {
		way = append(way, x.states[i])
	}
	slices.Reverse(way)
	now := state{Left: x.c.Budget}
	var out []Step
	for _, want := range way[1:] {
		next, step, ok := x.step(now, want)
		if !ok {
			panic("spec: a trace that cannot be walked again")
		}
		now, out = next, append(out, step)
	}
	return out
}

func (x *explorer) step(from, want state) (next state, step Step, ok bool) {
	for _, a := range actions {
		a.next(x.c, from, func(s state, process int) {
			if !ok && s.canonical() == want {
				next, ok = s, true
				step = Step{Process: processName(process), Action: a.name, After: s.String()}
			}
		})
	}
	return next, step, ok
}

func processName(p int) string {
	switch {
	case p < 0:
		return ""
	case p < workers:
		return fmt.Sprintf("worker %d", p+1)
	default:
		return fmt.Sprintf("scanner %d", p-workers+1)
	}
}

var (
	phaseNames  = [...]string{"no claim", "running", "cancelling", "cancelled"}
	causeNames  = [...]string{"", "unknown", "interrupted", "never_joined"}
	kindNames   = [...]string{"", "continue", "retry", "recovery", "handover", "release"}
	inputNames  = [...]string{"", "unarmed", "armed", "covered", "held", "over"}
	reasonNames = [...]string{"", "outcome unknown", "never joined", "attempts exhausted"}
	leaseNames  = [...]string{"", ", past its deadline", ", lease expired"}
)

// String is what of a state a reader of a trace wants to see: the rows, and
// which handlers are alive.
func (s state) String() string {
	out := []string{phaseNames[s.Claim.Phase]}
	add := func(is bool, format string, args ...any) {
		if is {
			out = append(out, fmt.Sprintf(format, args...))
		}
	}
	k := s.Claim
	add(k.Phase != noClaim && k.Present, "of %s", processName(int(k.Holder)))
	add(k.Phase != noClaim && !k.Present, "of an old holder")
	add(k.Phase != noClaim && !s.leaseLive(), "expired")
	add(k.Revoked != noCause, "revoked %s", causeNames[k.Revoked])
	add(k.Verdict != noCause, "verdict %s", causeNames[k.Verdict])
	add(k.StepOpen, "step open")
	for i, w := range s.Workers {
		add(w.alive(), "handler of worker %d alive%s", i+1, leaseNames[w.Lease])
	}
	for _, p := range s.Promises {
		add(p.Kind != noPromise, "promised %s", kindNames[p.Kind])
	}
	for i, in := range s.Inputs {
		add(in != absent, "input %d %s", i+1, inputNames[in])
	}
	add(s.Wake, "wake pending")
	add(s.Quarantine.Reason != inCirculation, "quarantined: %s", reasonNames[s.Quarantine.Reason])
	return strings.Join(out, "; ")
}

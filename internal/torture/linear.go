package main

import (
	"fmt"
	"slices"
	"time"

	"github.com/anishathalye/porcupine"

	"reveille/internal/torture/truth"
)

// Operations on the ownership of one session.
const (
	acquire = "acquire" // the execution began to own the session
	settle  = "settle"  // it ceased to
	call    = "call"    // its handler was called: it owns it
)

// operation is one of them, by an execution.
type operation struct {
	session, what, execution string
	epoch                    int64
}

// owned is the state of a session.
type owned struct {
	execution string // empty: nobody's
	epoch     int64  // of the last owner
}

// ownership is what a session must be like: nobody's, or of one execution, each with a greater epoch than the one before.
var ownership = porcupine.Model{
	Partition: func(history []porcupine.Operation) [][]porcupine.Operation {
		by := map[string][]porcupine.Operation{}
		for _, op := range history {
			s := op.Input.(operation).session
			by[s] = append(by[s], op)
		}
		var parts [][]porcupine.Operation
		for _, ops := range by {
			parts = append(parts, ops)
		}
		return parts
	},
	Init: func() any { return owned{} },
	Step: func(state, input, _ any) (bool, any) {
		s, op := state.(owned), input.(operation)
		switch op.what {
		case acquire:
			return s.execution == "" && op.epoch > s.epoch, owned{op.execution, op.epoch}
		case settle:
			return s.execution == op.execution, owned{"", s.epoch}
		default:
			return s.execution == op.execution && op.epoch == s.epoch, s
		}
	},
	DescribeOperation: func(input, _ any) string {
		op := input.(operation)
		return fmt.Sprintf("%s %s of %s, epoch %d", op.what, op.execution, op.session, op.epoch)
	},
	DescribeState: func(state any) string { return fmt.Sprintf("%+v", state) },
}

// linear tells which sessions' ownership can't be put in one order that agrees with the times at which things were seen
// from outside. An acquisition lies between the time that its event tells and the first time that anybody saw it: the
// event, or its handler's call. A settlement likewise. A call is where the handler wrote that it started. What a handler
// did whose worker had just been asleep is left out (I7).
func (v *verifier) linear() {
	slack := v.slack().Nanoseconds()
	type span struct{ from, to int64 }
	began, ended, epochs := map[string]span{}, map[string]span{}, map[string]int64{}
	sessions := map[string]string{}
	end := time.Now().Add(time.Hour).UnixNano()
	for _, e := range v.events {
		s := span{e.Time.UnixNano() - slack, end}
		if at, ok := v.h.first[fmt.Sprintf("%s:%d", e.Session, e.Seq)]; ok {
			s.to = max(at.UnixNano(), s.from)
		}
		switch e.Type {
		case "execution.started":
			began[e.Execution], epochs[e.Execution], sessions[e.Execution] = s, e.Epoch, e.Session
		case "execution.ended":
			ended[e.Execution] = s
		}
	}
	var history []porcupine.Operation
	add := func(what, execution string, epoch int64, s span) {
		history = append(history, porcupine.Operation{
			Input: operation{sessions[execution], what, execution, epoch}, Call: s.from, Return: s.to,
		})
	}
	for _, l := range v.lines {
		b, ok := began[l.Execution]
		if l.What != truth.Start || !ok || v.h.asleep(l.Worker, l.At) {
			continue // where no execution started, the judge says so
		}
		at := l.At.UnixNano()
		add(call, l.Execution, l.Epoch, span{at, at})
		b.to = max(min(b.to, at), b.from)
		began[l.Execution] = b
		v.counts.calls++
	}
	for x, s := range began {
		add(acquire, x, epochs[x], s)
		if s, ok := ended[x]; ok {
			add(settle, x, epochs[x], s)
		}
	}
	for _, part := range ownership.Partition(history) {
		switch porcupine.CheckOperationsTimeout(ownership, part, 20*time.Second) {
		case porcupine.Illegal:
			session := part[0].Input.(operation).session
			slices.SortFunc(part, func(a, b porcupine.Operation) int { return int(a.Call - b.Call) })
			at, text := shortest(part)
			v.wrong(session, time.Unix(0, at), "acquisitions and settlements are not linearizable (I1):\n%s", text)
		case porcupine.Unknown:
			v.counts.unknown++
		default:
			v.counts.linear++
		}
	}
}

// shortest is the shortest beginning of a history that is not linearizable, as text: its last few operations.
func shortest(part []porcupine.Operation) (at int64, text string) {
	n := 1
	for n < len(part) && porcupine.CheckOperationsTimeout(ownership, part[:n], time.Second) != porcupine.Illegal {
		n++
	}
	for _, op := range part[max(0, n-6):n] {
		text += fmt.Sprintf("  %s: from %d to %d ms\n", ownership.DescribeOperation(op.Input, nil), op.Call/1e6, op.Return/1e6)
	}
	return part[n-1].Call, text
}

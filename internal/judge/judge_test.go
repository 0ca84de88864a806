package judge

import (
	"encoding/json"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"
)

var rules = Rules{Reasons: []string{"attempts_exhausted", "cancellation_outcome_unknown"}, Refusal: "refused"}

var began = time.Date(2026, 11, 29, 12, 0, 0, 0, time.UTC)

// story writes a session's log: an event is its type, execution, epoch and step, and its data.
type story struct{ Session }

func (s *story) tell(kind, execution string, epoch int64, step, data string) *story {
	seq := int64(len(s.Log)) + 1
	e := map[string]any{
		"session": "s", "seq": seq, "type": kind, "time": began.Add(time.Duration(seq) * time.Second).Format("2006-01-02T15:04:05.000000Z07:00"),
		"data": json.RawMessage(data),
	}
	for name, v := range map[string]string{"execution": execution, "step": step} {
		if v != "" {
			e[name] = v
		}
	}
	if execution != "" {
		e["epoch"] = epoch
	}
	line, err := json.Marshal(e)
	if err != nil {
		panic(err)
	}
	s.Log = append(s.Log, string(line))
	s.Row.LastSeq = seq
	return s
}

func (s *story) command(c Command) *story {
	c.Session, c.Seq, c.Sent = "s", uint64(len(s.Commands))+1, began
	s.Commands = append(s.Commands, c)
	s.Row.CommandSeq = int64(c.Seq)
	return s
}

func (s *story) wake(id string) *story {
	return s.command(Command{Kind: "wake", Input: id, Delivery: "queue", Body: "x"}).
		tell("input.admitted", "", 0, "", fmt.Sprintf(`{"input":%q,"delivery":"queue","armed":true}`, id))
}

// starts an execution with a step of an input.
func (s *story) start(n int64, id string) *story {
	x, step := fmt.Sprint("x", n), fmt.Sprint("t", n)
	s.Row.Epoch = n
	s.Calls = append(s.Calls, Call{"start", n, step, false}, Call{"end", n, step, false})
	s.Inputs = append(s.Inputs, Input{"s", id, "covered", step})
	return s.tell("execution.started", x, n, "", `{"worker":"w","recovery":0}`).
		tell("input.promoted", x, n, step, fmt.Sprintf(`{"input":%q}`, id)).
		tell("step.started", x, n, step, fmt.Sprintf(`{"index":1,"inputs":[%q],"continues":null}`, id))
}

func (s *story) end(n int64) *story {
	x := fmt.Sprint("x", n)
	return s.tell("step.ended", x, n, fmt.Sprint("t", n), `{"result":null,"continue":false}`).
		tell("execution.ended", x, n, "", `{"outcome":"completed"}`)
}

func newStory() *story { return &story{Session{Row: Row{ID: "s"}}} }

// good is a session with two inputs that ran one after the other.
func good() *story { return newStory().wake("a").start(1, "a").end(1).wake("b").start(2, "b").end(2) }

func judged(s *story) []string {
	s.Stream = slices.Clone(s.Log)
	for _, l := range s.Log {
		if strings.Contains(l, `"session.quarantined"`) || strings.Contains(l, `"session.released"`) {
			s.Alerts = append(s.Alerts, l)
		}
	}
	return Judge(rules, s.Session)
}

func TestGood(t *testing.T) {
	interrupt := Command{Kind: "interrupt", Reason: "stop"}
	interrupted := func() *story {
		return newStory().wake("a").start(1, "a").command(interrupt).
			tell("execution.cancelling", "x1", 1, "t1", `{"reason":"stop"}`).
			tell("step.interrupted", "x1", 1, "t1", `{"reason":"stop","joined":true}`).
			tell("execution.ended", "x1", 1, "", `{"outcome":"interrupted"}`)
	}
	lost := func() *story {
		s := newStory().wake("a").start(1, "a").tell("step.failed", "x1", 2, "t1", `{"code":"worker_lost"}`).
			tell("execution.ended", "x1", 2, "", `{"outcome":"recovered"}`).
			tell("execution.started", "x3", 3, "", `{"worker":"w","recovery":1}`).
			tell("step.started", "x3", 3, "t3", `{"index":1,"inputs":["a"],"continues":{"kind":"recovery","step":"t1","attempt":1}}`)
		s.Row.Epoch = 3
		s.Calls = append(s.Calls, Call{"start", 3, "t3", false})
		return s.end(3)
	}
	released := func() *story {
		s := newStory().wake("a").start(1, "a").command(interrupt).
			tell("execution.cancelling", "x1", 1, "t1", `{"reason":"stop"}`).
			tell("session.quarantined", "", 0, "", `{"reason":"cancellation_outcome_unknown"}`).
			tell("execution.ended", "x1", 1, "", `{"outcome":"quarantined"}`).
			tell("session.released", "", 0, "", `{"how":"interrupted","why":"because"}`).
			tell("step.interrupted", "x1", 1, "t1", `{"reason":"because","joined":false}`)
		s.Releases = []string{"because"}
		return s
	}
	for name, s := range map[string]*story{
		"two inputs": good(), "interrupted": interrupted(), "recovered": lost(), "released": released(),
	} {
		if problems := judged(s); len(problems) > 0 {
			t.Errorf("%s: %q", name, problems)
		}
	}
}

func TestWrong(t *testing.T) {
	for name, tc := range map[string]struct {
		s    func() *story
		want string
	}{
		"an input is lost": {func() *story { return good().command(Command{Kind: "wake", Input: "c", Delivery: "queue"}) }, "were sent (I18)"},
		"an input waits for ever": {func() *story {
			s := good().wake("c")
			s.Inputs = append(s.Inputs, Input{"s", "c", "armed", ""})
			return s
		}, "input c is armed"},
		"an input runs twice": {func() *story { return good().start(3, "a").end(3) }, "promoted again (I23)"},
		"two owners":          {func() *story { return newStory().wake("a").start(1, "a").wake("b").start(2, "b").end(2).end(1) }, "while x1 is open (I1)"},
		"an epoch goes back": {func() *story {
			s := newStory().wake("a").start(2, "a").end(2).wake("b").start(1, "b").end(1)
			s.Row.Epoch = 2
			return s
		}, "with epoch 1 after 2 (I6)"},
		"a step ends twice": {func() *story {
			return newStory().wake("a").start(1, "a").tell("step.ended", "x1", 1, "t1", `{}`).tell("step.failed", "x1", 1, "t1", `{"code":"exit"}`).
				tell("execution.ended", "x1", 1, "", `{"outcome":"failed"}`)
		}, `step.failed of step "t1", while "" is open`},
		"a step ends in spite of an interrupt": {func() *story {
			return newStory().wake("a").start(1, "a").command(Command{Kind: "interrupt", Reason: "stop"}).
				tell("execution.cancelling", "x1", 1, "t1", `{"reason":"stop"}`).end(1)
		}, "(I9)"},
		"nobody interrupted": {func() *story {
			return newStory().wake("a").start(1, "a").tell("execution.cancelling", "x1", 1, "t1", `{"reason":"stop"}`).
				tell("step.interrupted", "x1", 1, "t1", `{"reason":"stop","joined":true}`).tell("execution.ended", "x1", 1, "", `{"outcome":"interrupted"}`)
		}, "nobody interrupted"},
		"an interrupt hits another execution": {func() *story {
			return newStory().wake("a").start(1, "a").command(Command{Kind: "interrupt", Reason: "stop", Execution: "x9"}).
				tell("execution.cancelling", "x1", 1, "t1", `{"reason":"stop"}`).
				tell("step.interrupted", "x1", 1, "t1", `{"reason":"stop","joined":true}`).tell("execution.ended", "x1", 1, "", `{"outcome":"interrupted"}`)
		}, "is for execution x9"},
		"a promise is forgotten": {func() *story {
			return newStory().wake("a").start(1, "a").tell("step.failed", "x1", 1, "t1", `{"code":"worker_lost"}`).
				tell("execution.ended", "x1", 1, "", `{"outcome":"recovered"}`)
		}, "never done"},
		"a bare wake buys nothing": {func() *story {
			s := good().command(Command{Kind: "wake"})
			s.Commands[2].Sent = began.Add(time.Hour)
			return s
		}, "bought no step (I22)"},
		"a step that nobody asked for": {func() *story {
			s := good().tell("execution.started", "x3", 3, "", `{"worker":"w"}`).tell("step.started", "x3", 3, "t3", `{"index":1,"inputs":null,"continues":null}`)
			s.Calls = append(s.Calls, Call{"start", 3, "t3", false})
			s.Row.Epoch = 3
			return s.end(3)
		}, "no wake"},
		"a quarantined session runs": {func() *story {
			s := newStory().tell("session.quarantined", "", 0, "", `{"reason":"attempts_exhausted"}`).wake("a").start(1, "a").end(1)
			s.Row.Quarantine, s.Row.Reason = "q", "attempts_exhausted"
			return s
		}, "of a quarantined session (I30)"},
		"an old owner goes on": {func() *story {
			s := good()
			s.Calls = append(s.Calls, Call{"end", 1, "t1", false})
			return s
		}, "a handler of epoch 1 says end of step t1 after one of epoch 2"},
		"a call of no step": {func() *story {
			s := good()
			s.Calls = append(s.Calls, Call{"start", 3, "t9", false})
			return s
		}, "never started"},
		"out of order": {func() *story {
			return newStory().wake("a").wake("b").start(1, "b").end(1).start(2, "a").end(2)
		}, "in the order"},
	} {
		problems := judged(tc.s())
		if !strings.Contains(strings.Join(problems, "\n"), tc.want) {
			t.Errorf("%s: %q, want something with %q", name, problems, tc.want)
		}
	}
	s := good()
	problems := Judge(rules, s.Session)
	if len(problems) != 1 || !strings.Contains(problems[0], "(I25)") {
		t.Errorf("an empty stream: %q", problems)
	}
}

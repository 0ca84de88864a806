package crdb

import (
	"encoding/json"
	"slices"
	"strings"

	"reveille/claims"
)

// history builds closed steps from a log that is read backwards: a step is
// begun by its terminal event and finished by its step.started.
type history struct {
	n, budget int
	open      map[claims.StepID]*building
	closed    []claims.ClosedStep // newest first
	over      bool
}

type building struct {
	step claims.ClosedStep
	text []string // newest first
}

func newHistory(n, maxBytes int) *history {
	return &history{n: n, budget: maxBytes, open: map[claims.StepID]*building{}}
}

func (h *history) full() bool { return h.over || len(h.closed) >= h.n }

// add takes the lines of one append, which is older than all before it.
func (h *history) add(lines string) error {
	all := strings.Split(lines, "\n")
	for _, line := range slices.Backward(all) {
		if h.full() {
			return nil
		}
		r, err := claims.ParseRecord([]byte(line))
		if err != nil {
			return err
		}
		if err := h.event(r); err != nil {
			return err
		}
	}
	return nil
}

func (h *history) event(r claims.Record) error {
	terminal := func(status claims.StepStatus, result json.RawMessage) {
		// A continuation may be open while its session's older steps are closed.
		if len(h.open)+len(h.closed) < h.n {
			h.open[r.Step] = &building{step: claims.ClosedStep{Step: r.Step, Status: status, Result: result}}
		}
	}
	null := json.RawMessage("null")
	switch r.Type {
	case claims.StepEndedEvent:
		var d claims.StepEndedData
		if err := json.Unmarshal(r.Data, &d); err != nil {
			return err
		}
		terminal(claims.StepEnded, orNull(d.Result))
	case claims.StepFailedEvent:
		var d claims.Failure
		if err := json.Unmarshal(r.Data, &d); err != nil {
			return err
		}
		terminal(claims.StepFailed, null)
		if b := h.open[r.Step]; b != nil {
			b.step.Failure = &d
		}
	case claims.StepInterruptedEvent:
		terminal(claims.StepInterrupted, null)
	case claims.TextEvent:
		b := h.open[r.Step]
		if b == nil {
			return nil
		}
		var d claims.TextData
		if err := json.Unmarshal(r.Data, &d); err != nil {
			return err
		}
		b.text = append(b.text, d.Text)
	case claims.StepStartedEvent:
		b := h.open[r.Step]
		if b == nil {
			return nil
		}
		var d claims.StepStartedData
		if err := json.Unmarshal(r.Data, &d); err != nil {
			return err
		}
		delete(h.open, r.Step)
		h.close(b, d.Inputs)
	}
	return nil
}

func (h *history) close(b *building, inputs []string) {
	slices.Reverse(b.text)
	b.step.Text = strings.Join(b.text, "")
	b.step.Inputs = make([]claims.Input, len(inputs))
	for i, id := range inputs {
		b.step.Inputs[i] = claims.Input{ID: id}
	}
	if h.budget -= sizeOf(b.step); h.budget < 0 {
		h.over = true
		return
	}
	h.closed = append(h.closed, b.step)
}

// steps returns what was found, oldest first, never nil.
func (h *history) steps() []claims.ClosedStep {
	out := slices.Clone(h.closed)
	slices.Reverse(out)
	if out == nil {
		return []claims.ClosedStep{}
	}
	return out
}

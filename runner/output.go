package runner

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"strings"
	"sync"

	"reveille/claims"
)

// ErrStepOver answers output that comes after its step has ended: it is not
// recorded.
var ErrStepOver = errors.New("step is over: its output is not recorded any more")

// Output is where a handler puts what its step says. All methods are safe for
// concurrent use. They block while the log cannot keep up, and answer
// ErrStepOver, or the cause for which the step may say no more, once that is so.
type Output struct {
	record  func(claims.Content) error
	decline func(reason string) error

	mu     sync.Mutex
	active int // the handler itself and every finalizer that has not returned
	joined chan struct{}
	panics *Failure
}

// NewOutput makes an Output over two functions: record takes content, from as
// many goroutines as bring some; decline makes the refusal durable before it
// returns (I12). Where one that the handler did not join comes just as the step
// ends, they answer ErrStepOver themselves. The runner makes Outputs for its
// handlers; tests of a handler make their own.
func NewOutput(record func(claims.Content) error, decline func(reason string) error) *Output {
	return &Output{record: record, decline: decline, active: 1, joined: make(chan struct{})}
}

// Text appends text. Bytes that are not UTF-8 become U+FFFD.
func (o *Output) Text(s string) error {
	if s == "" {
		return nil
	}
	return o.put(claims.TextEvent, claims.TextData{Text: strings.ToValidUTF8(s, "\uFFFD")})
}

// ToolCalled says that a tool was called, under an id of the handler's.
func (o *Output) ToolCalled(call, name string, input json.RawMessage) error {
	return o.put(claims.ToolCalled, claims.ToolCalledData{Call: call, Name: name, Input: orNull(input)})
}

// ToolSucceeded says what a call gave.
func (o *Output) ToolSucceeded(call string, output json.RawMessage) error {
	return o.put(claims.ToolSucceeded, claims.ToolSucceededData{Call: call, Output: orNull(output)})
}

// ToolFailed says why a call gave nothing.
func (o *Output) ToolFailed(call, message string) error {
	return o.put(claims.ToolFailed, claims.ToolFailedData{Call: call, Error: message})
}

// Decline says that a person refused: the step is interrupted at once and
// durably, and the claim goes when the finalizers have joined (I12). Nothing
// that is put out after it is recorded.
func (o *Output) Decline(reason string) error {
	o.mu.Lock()
	over := o.active == 0
	o.mu.Unlock()
	if over {
		return ErrStepOver
	}
	return o.decline(strings.ToValidUTF8(reason, "\uFFFD"))
}

// Go runs a finalizer: something of the step that outlives the handler's
// return. The step is closed only after it has returned too. It answers
// ErrStepOver, and runs nothing, where the handler and all its finalizers have
// returned.
func (o *Output) Go(f func()) error {
	o.mu.Lock()
	defer o.mu.Unlock()
	if o.active == 0 {
		return ErrStepOver
	}
	o.active++
	go func() {
		defer o.leave()
		defer func() {
			if v := recover(); v != nil {
				o.mu.Lock()
				o.panics = &Failure{Code: claims.CodePanic, Message: fmt.Sprintf("finalizer: %v", v)}
				o.mu.Unlock()
			}
		}()
		f()
	}()
	return nil
}

// panicked is the panic of a finalizer, which fails the step as the handler's
// own does.
func (o *Output) panicked() error {
	o.mu.Lock()
	defer o.mu.Unlock()
	if o.panics == nil {
		return nil
	}
	return o.panics
}

// leave counts the handler or a finalizer out.
func (o *Output) leave() {
	o.mu.Lock()
	defer o.mu.Unlock()
	if o.active--; o.active == 0 {
		close(o.joined)
	}
}

func (o *Output) put(t claims.EventType, data any) error {
	o.mu.Lock()
	over := o.active == 0
	o.mu.Unlock()
	if over {
		return ErrStepOver
	}
	return o.record(claims.Content{Type: t, Data: data})
}

// orNull is a copy: content is written after the handler has gone on.
func orNull(raw json.RawMessage) json.RawMessage {
	if len(raw) == 0 {
		return json.RawMessage("null")
	}
	return bytes.Clone(raw)
}

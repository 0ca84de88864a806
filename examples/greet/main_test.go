package main

import (
	"context"
	"encoding/json"
	"errors"
	"strings"
	"testing"

	"reveille/claims"
	"reveille/runner"
)

func TestGreet(t *testing.T) {
	var said strings.Builder
	out := runner.NewOutput(func(c claims.Content) error {
		said.WriteString(c.Data.(claims.TextData).Text)
		return nil
	}, func(string) error { return errors.New("nobody declines here") })
	step := func(ctx context.Context, body string) (runner.Result, error) {
		return greet(ctx, runner.Request{Inputs: []claims.Input{{ID: "in_1", Body: json.RawMessage(body)}}}, out)
	}
	result, err := step(t.Context(), `"Ada"`)
	if err != nil || string(result.Value) != "1" || said.String() != "Hello, Ada!\n" {
		t.Errorf("says %q with %s, %v", said.String(), result.Value, err)
	}
	if _, err = step(t.Context(), "7"); err == nil || !strings.Contains(err.Error(), "input in_1: want a name") {
		t.Errorf("a number: %v", err)
	}
	ctx, cancel := context.WithCancelCause(t.Context())
	cancel(claims.ErrInterrupted)
	if _, err = step(ctx, `"Ada"`); !errors.Is(err, claims.ErrInterrupted) {
		t.Errorf("interrupted: %v", err)
	}
}

package runner_test

import (
	"context"
	"encoding/json"
	"fmt"

	"reveille/claims"
	"reveille/runner"
)

// hello greets whom its inputs name.
func hello(_ context.Context, req runner.Request, out *runner.Output) (runner.Result, error) {
	for _, input := range req.Inputs {
		if err := out.Text("Hello, " + string(input.Body) + "!\n"); err != nil {
			return runner.Result{}, err
		}
	}
	return runner.Result{Value: json.RawMessage(fmt.Sprint(len(req.Inputs)))}, nil
}

// A test of a handler brings a request, and an Output that keeps what it says.
func ExampleNewOutput() {
	out := runner.NewOutput(func(c claims.Content) error {
		if text, ok := c.Data.(claims.TextData); ok {
			fmt.Print(text.Text)
		}
		return nil
	}, func(reason string) error { return nil })

	result, err := runner.HandlerFunc(hello).Step(context.Background(), runner.Request{
		Session: "ses_1", Index: 1,
		Inputs: []claims.Input{
			{ID: "in_1", Delivery: claims.Queue, Body: json.RawMessage(`"Ada"`)},
			{ID: "in_2", Delivery: claims.Steer, Body: json.RawMessage(`"Grace"`)},
		},
	}, out)
	fmt.Printf("result %s, error %v\n", result.Value, err)
	// Output:
	// Hello, "Ada"!
	// Hello, "Grace"!
	// result 2, error <nil>
}

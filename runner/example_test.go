package runner_test

import (
	"context"
	"encoding/json"
	"fmt"

	"reveille/runner"
	"reveille/worker"
)

// greet greets whom its inputs name. It stops when its step must, and says how
// far it came as it goes.
func greet(ctx context.Context, req runner.Request, out *runner.Output) (runner.Result, error) {
	for _, input := range req.Inputs {
		var name string
		if err := json.Unmarshal(input.Body, &name); err != nil {
			return runner.Result{}, fmt.Errorf("input %s: want a name: %w", input.ID, err)
		}
		if err := context.Cause(ctx); err != nil {
			return runner.Result{}, err
		}
		if err := out.Text("Hello, " + name + "!\n"); err != nil {
			return runner.Result{}, err
		}
	}
	return runner.Result{Value: json.RawMessage(fmt.Sprint(len(req.Inputs)))}, nil
}

// The whole program. Its flags and its environment are those of the worker
// program, RV_DATABASE_URL and RV_NATS_URL first.
func ExampleHandler() {
	worker.Main(runner.HandlerFunc(greet))
}

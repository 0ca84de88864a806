// Command greet is a whole worker with a handler in Go: it greets whom the inputs of a step name. Its flags and its
// environment are those of the worker program.
package main

import (
	"context"
	"encoding/json"
	"fmt"

	"reveille/runner"
	"reveille/worker"
)

func main() { worker.Main(runner.HandlerFunc(greet)) }

// greet stops when its step must, and says how far it came as it goes.
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

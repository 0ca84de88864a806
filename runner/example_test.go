package runner_test

import (
	"reveille/runner"
	"reveille/worker"
)

// The whole program. Its flags and its environment are those of the worker
// program, RV_DATABASE_URL and RV_NATS_URL first. A handler that does something
// is in examples/greet.
func ExampleHandler() {
	worker.Main(runner.HandlerFunc(hello))
}

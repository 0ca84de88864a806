// Package worker makes a worker of a handler in Go: a program that takes
// commands, claims sessions and runs their steps with it, as the worker program
// does with a command or a URL. It has the same flags (but --handler, --exec and
// --http-url), the same environment variables, metrics, health endpoints and
// exit codes, and any number of either run side by side.
//
//	func main() { worker.Main(runner.HandlerFunc(step)) }
//
// A handler that runs commands itself can do that with package runner/exec,
// and start an exec.Guard for them: Main is that guard too.
package worker

import (
	"os"

	"reveille/cmd/worker/app"
	"reveille/runner"
)

// Main runs a worker with a handler, as os.Args and the environment say, and
// does not return: it exits with 0, or with 1 where the worker failed, or with
// 2 where it was called wrongly. The first SIGINT or SIGTERM ends it in an
// orderly way, within --grace and --kill-after: steps finish, or are handed over
// to another worker. A second one ends it at once.
func Main(handler runner.Handler) { os.Exit(app.Main(handler)) }

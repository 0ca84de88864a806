// Command worker takes commands from JetStream, claims sessions in the database and runs
// their steps through a handler. Any number of them run at once.
package main

import (
	"context"
	"io"
	"os"

	"github.com/alecthomas/kong"

	"reveille/cmd/internal/devstate"
	"reveille/cmd/internal/flags"
	"reveille/cmd/internal/process"
)

func main() {
	if process.IsGuard(os.Args) {
		os.Exit(process.RunGuard())
	}
	os.Exit(flags.Main("worker", run))
}

func run(ctx context.Context, args []string, stdout, stderr io.Writer) error {
	var f struct {
		flags.Worker `embed:""`
		flags.Versioned
	}
	if _, err := flags.Parse("worker", "Takes commands, claims sessions and runs their steps.", &f, args, stdout, stderr, kong.Resolvers(&devstate.Discovery{})); err != nil {
		return err
	}
	return process.Worker(ctx, f.Worker, stderr)
}

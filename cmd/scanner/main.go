// Command scanner recovers what crashed workers left, and quarantines what it cannot
// decide. Any number of them run at once.
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

func main() { os.Exit(flags.Main("scanner", run)) }

func run(ctx context.Context, args []string, stdout, stderr io.Writer) error {
	var f struct {
		flags.Scanner `embed:""`
		flags.Versioned
	}
	if _, err := flags.Parse("scanner", "Recovers what crashed workers left, in bounded and fair batches.", &f, args, stdout, stderr, kong.Resolvers(&devstate.Discovery{})); err != nil {
		return err
	}
	return process.Scanner(ctx, f.Scanner, stderr)
}

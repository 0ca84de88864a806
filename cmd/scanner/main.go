// Command scanner recovers what crashed workers left, and quarantines what it cannot
// decide. Any number of them run at once.
package main

import (
	"context"
	"io"
	"os"

	"reveille/cmd/internal/flags"
	"reveille/cmd/internal/process"
)

func main() { os.Exit(flags.Main("scanner", run)) }

func run(ctx context.Context, args []string, stdout, stderr io.Writer) error {
	var f flags.Scanner
	if _, err := flags.Parse("scanner", "Recovers what crashed workers left, in bounded and fair batches.", &f, args, stdout, stderr); err != nil {
		return err
	}
	return process.Scanner(ctx, f, stderr)
}

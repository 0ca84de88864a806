// Package app is the worker program around a handler in Go. Programs import
// package worker: what this stands on is for packages below cmd only.
package app

import (
	"context"
	"io"
	"os"
	"path/filepath"
	"slices"

	"github.com/alecthomas/kong"

	"reveille/cmd/internal/devstate"
	"reveille/cmd/internal/flags"
	"reveille/cmd/internal/process"
	"reveille/runner"
)

// Main runs the program that os.Args call and returns its exit code.
func Main(handler runner.Handler) int {
	if process.IsGuard(os.Args) {
		return process.RunGuard()
	}
	name := filepath.Base(os.Args[0])
	return flags.Main(name, func(ctx context.Context, args []string, stdout, stderr io.Writer) error {
		return run(ctx, name, args, handler, stdout, stderr)
	})
}

func run(ctx context.Context, name string, args []string, handler runner.Handler, stdout, stderr io.Writer) error {
	var f struct {
		flags.Worker `embed:""`
		flags.Versioned
	}
	const what = "Takes commands, claims sessions and runs their steps with a handler of its own."
	if _, err := flags.Parse(name, what, &f, args, stdout, stderr, kong.PostBuild(hideHandlers), kong.Resolvers(&devstate.Discovery{})); err != nil {
		return err
	}
	return process.Custom(ctx, f.Worker, handler, stderr)
}

// hideHandlers leaves the flags of other handlers out of the help.
func hideHandlers(k *kong.Kong) error {
	for _, flag := range k.Model.Flags {
		flag.Hidden = flag.Hidden || slices.Contains([]string{"handler", "exec", "http-url"}, flag.Name)
	}
	return nil
}

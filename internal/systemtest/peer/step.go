package main

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"os/signal"
	"syscall"

	"reveille/claims"
	"reveille/internal/systemtest/ask"
	"reveille/runner"
)

const exitRetryable = 75

// step is the command of a step whose test, at the socket of the environment,
// says what it does.
func step() int {
	told := make(chan os.Signal, 1)
	signal.Notify(told, syscall.SIGTERM)
	stop := make(chan struct{})
	go func() {
		<-told
		close(stop)
	}()
	fail := func(err any) int {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	line, err := io.ReadAll(os.Stdin)
	if err != nil {
		return fail(err)
	}
	s := ask.Step{Worker: os.Getenv(ask.EnvWorker)}
	if err := json.Unmarshal(line, &s.Request); err != nil {
		return fail(err)
	}
	a, err := ask.Test(os.Getenv(ask.EnvSocket), s, stop, func() string { return "SIGTERM" })
	switch {
	case err != nil:
		return fail(err)
	case a.Error != "" && a.Retryable:
		fail(a.Error)
		return exitRetryable
	case a.Error != "":
		return fail(a.Error)
	}
	if line, err = json.Marshal(map[string]any{"type": "ended", "result": a.Result, "continue": a.Continue}); err != nil {
		return fail(err)
	}
	fmt.Println(string(line))
	return 0
}

// asking is the same in Go.
type asking struct{ worker, socket string }

func (h asking) Step(ctx context.Context, req runner.Request, _ *runner.Output) (runner.Result, error) {
	a, err := ask.Test(h.socket, ask.Step{Worker: h.worker, Request: req}, ctx.Done(), func() string {
		return context.Cause(ctx).Error()
	})
	switch {
	case err != nil:
		return runner.Result{}, err
	case a.Error != "":
		return runner.Result{}, &runner.Failure{Code: claims.CodeHandler, Message: a.Error, Retryable: a.Retryable}
	}
	return runner.Result{Value: a.Result, Continue: a.Continue}, nil
}

// doing does what an input's body says; see ask.EnvSocket.
type doing struct{ open <-chan struct{} }

func (d doing) Step(ctx context.Context, req runner.Request, _ *runner.Output) (runner.Result, error) {
	first := req.Continues == nil
	for _, in := range req.Inputs {
		switch string(in.Body) {
		case `"hold"`:
			select {
			case <-d.open:
			case <-ctx.Done():
				return runner.Result{}, context.Cause(ctx)
			}
		case `"again"`:
			if first {
				return runner.Result{Value: ask.Result(req), Continue: true}, nil
			}
		case `"retry"`:
			if first {
				return runner.Result{}, &runner.Failure{Code: claims.CodeHandler, Message: "once", Retryable: true}
			}
		}
	}
	return runner.Result{Value: ask.Result(req)}, nil
}

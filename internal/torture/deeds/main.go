// Command deeds is the handlers of a torture run: a worker with a handler in Go, and with the argument "step" the command
// of a step. What a step does, its inputs' bodies say (Deed), and what it does it writes down (package truth).
package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"os/signal"
	"syscall"
	"time"

	"reveille/claims"
	"reveille/internal/torture/truth"
	"reveille/runner"
	"reveille/worker"
)

// Times of the deeds.
const (
	lingers  = 1200 * time.Millisecond // what does not stop when it is told to
	talks    = 250 * time.Millisecond
	resumes  = 3 * time.Second
	longest  = 6 * time.Second // what waits to be stopped
	refusing = 100 * time.Millisecond
)

const exitRetryable = 75

// deed is the body of an input.
type deed struct {
	Do string `json:"do"`
}

// Refusal is the reason of declined steps.
const refusal = "a person refused"

func main() {
	role := ""
	if len(os.Args) > 1 {
		role = os.Args[1]
	}
	switch role {
	case "step":
		os.Exit(step())
	case "linger":
		signal.Ignore(syscall.SIGTERM, syscall.SIGINT, syscall.SIGHUP)
		time.Sleep(lingers)
	default:
		worker.Main(runner.HandlerFunc(inGo))
	}
}

// does is what a step is to do. One that goes on with another has been told already.
func does(req runner.Request) string {
	for _, in := range req.Inputs {
		var d deed
		if json.Unmarshal(in.Body, &d) != nil || d.Do == "" {
			continue
		}
		switch {
		case d.Do == "deadly", req.Continues == nil:
			return d.Do
		case req.Continues.Kind != claims.KindRetry: // long enough for its former owner to come back and find it
			return "resume"
		case d.Do == "retry" && req.Continues.Attempt < 2:
			return d.Do
		}
		return "end"
	}
	return "end"
}

// begin writes down that a step's handler was called.
func begin(kind string, req runner.Request) (*truth.Call, error) {
	return truth.Dir(os.Getenv(truth.EnvDir)).Begin(truth.Line{
		Kind: kind, Worker: os.Getenv(truth.EnvWorker), Session: string(req.Session), Execution: string(req.Execution), Epoch: req.Epoch,
		Step: string(req.Step),
	})
}

// crash ends the worker at once.
func crash() {
	pid, err := truth.Dir(os.Getenv(truth.EnvDir)).PID(os.Getenv(truth.EnvWorker))
	if err == nil {
		_ = syscall.Kill(pid, syscall.SIGKILL) // somebody may have been first
	}
}

// errFailed is how a step fails.
var errFailed = errors.New("it was told to fail")

// inGo is the handler in Go.
func inGo(ctx context.Context, req runner.Request, out *runner.Output) (runner.Result, error) {
	call, err := begin(truth.Go, req)
	if err != nil {
		return runner.Result{}, err
	}
	defer call.End()
	wait := func(d time.Duration) error {
		select {
		case <-ctx.Done():
			return context.Cause(ctx)
		case <-time.After(d):
			return nil
		}
	}
	result := runner.Result{Value: json.RawMessage(`"done"`)}
	switch does(req) {
	case "fail":
		return result, errFailed
	case "retry":
		return result, &runner.Failure{Code: claims.CodeHandler, Message: errFailed.Error(), Retryable: true}
	case "more":
		result.Continue = true
	case "decline":
		if err := out.Decline(refusal); err != nil {
			return result, err
		}
		return result, wait(refusing)
	case "talk", "fork":
		if err := out.Text("well, "); err != nil {
			return result, err
		}
		return result, errors.Join(wait(talks), out.Text("that was it"))
	case "resume":
		return result, wait(resumes)
	case "hang":
		return result, wait(longest)
	case "stubborn": // but it knows when its session is another's
		for end := time.Now().Add(lingers); time.Now().Before(end) && !errors.Is(context.Cause(ctx), claims.ErrLeaseLost); {
			time.Sleep(10 * time.Millisecond)
		}
	case "crash", "deadly":
		crash()
		return result, wait(longest)
	case "panic":
		panic("it was told to panic")
	}
	return result, nil
}

// step is the command of a step.
func step() int {
	told := make(chan os.Signal, 1)
	signal.Notify(told, syscall.SIGTERM)
	fail := func(err any) int {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	raw, err := io.ReadAll(os.Stdin)
	if err != nil {
		return fail(err)
	}
	var req runner.Request
	if err := json.Unmarshal(raw, &req); err != nil {
		return fail(err)
	}
	call, err := begin(truth.Exec, req)
	if err != nil {
		return fail(err)
	}
	defer call.End()
	wait := func(d time.Duration) (stopped bool) {
		select {
		case <-told:
			return true
		case <-time.After(d):
			return false
		}
	}
	ended := func(more bool) int {
		fmt.Printf(`{"type":"ended","result":"done","continue":%v}`+"\n", more)
		return 0
	}
	switch does(req) {
	case "fail", "panic":
		return fail(errFailed)
	case "retry":
		return exitRetryable
	case "more":
		return ended(true)
	case "decline":
		fmt.Printf(`{"type":"declined","reason":%q}`+"\n", refusal)
		wait(refusing)
	case "talk":
		fmt.Println("well,")
		if wait(talks) {
			return fail("stopped")
		}
		fmt.Println("that was it")
	case "resume":
		if wait(resumes) {
			return fail("stopped")
		}
	case "hang":
		if wait(longest) {
			return fail("stopped")
		}
	case "stubborn":
		time.Sleep(lingers)
	case "fork": // what it leaves behind neither is in its group nor hears SIGTERM
		child := exec.Command(os.Args[0], "linger")
		child.ExtraFiles = call.Inherit()
		child.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
		if err := child.Start(); err != nil {
			return fail(err)
		}
	case "crash", "deadly":
		crash()
		wait(longest)
		return fail("stopped")
	}
	return ended(false)
}

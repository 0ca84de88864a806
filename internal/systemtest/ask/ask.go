// Package ask is what the system tests and the processes that they start say to
// each other: a step asks its test what it is to do, over a socket, and says
// when it was told to stop.
package ask

import (
	"bufio"
	"encoding/json"
	"errors"
	"fmt"
	"net"

	"reveille/runner"
)

// Step is what a step says first, in one line of JSON.
type Step struct {
	Worker  string
	Request runner.Request
}

// Answer is what the test lets a step do; the zero Answer ends it without a result.
type Answer struct {
	Result    json.RawMessage
	Continue  bool
	Error     string // of a step that fails, or empty
	Retryable bool
}

// Stopped is what a step says that was told to stop. It ends without an answer.
type Stopped struct{ Cause string }

// ErrStopped answers a step that was told to stop.
var ErrStopped = errors.New("told to stop")

// Test asks the test at a socket what a step is to do. When stop is closed it
// says cause, and returns ErrStopped.
func Test(socket string, s Step, stop <-chan struct{}, cause func() string) (Answer, error) {
	conn, err := net.Dial("unix", socket)
	if err != nil {
		return Answer{}, err
	}
	defer conn.Close()
	if err := Send(conn, s); err != nil {
		return Answer{}, err
	}
	type reply struct {
		answer Answer
		err    error
	}
	replies := make(chan reply, 1)
	go func() {
		var r reply
		r.err = Receive(bufio.NewReader(conn), &r.answer)
		replies <- r
	}()
	select {
	case r := <-replies:
		return r.answer, r.err
	case <-stop:
		if err := Send(conn, Stopped{cause()}); err != nil {
			return Answer{}, err
		}
		return Answer{}, ErrStopped
	}
}

// Send writes v as a line.
func Send(conn net.Conn, v any) error {
	line, err := json.Marshal(v)
	if err != nil {
		return err
	}
	_, err = conn.Write(append(line, '\n'))
	return err
}

// Receive reads a line into v.
func Receive(r *bufio.Reader, v any) error {
	line, err := r.ReadBytes('\n')
	if err != nil {
		return err
	}
	if err := json.Unmarshal(line, v); err != nil {
		return fmt.Errorf("%q: %w", line, err)
	}
	return nil
}

// Result is the result that ends a step well: the ids of its inputs.
func Result(req runner.Request) json.RawMessage {
	ids := []string{}
	for _, in := range req.Inputs {
		ids = append(ids, in.ID)
	}
	raw, err := json.Marshal(ids)
	if err != nil {
		panic(err) // strings always marshal
	}
	return raw
}

// What a worker with a handler in Go is told by its environment: who it is, and
// the socket of the test that answers its steps. Without a socket they do what
// their inputs say: "hold" waits until standard input ends, "again" asks for
// another step, "retry" fails once in a way that may be tried again.
const (
	EnvWorker = "SYSTEMTEST_WORKER"
	EnvSocket = "SYSTEMTEST_SOCKET"
)

// Up is what a NATS server prints when it is ready, before its URL.
const Up = "systemtest: up"

// Server configures a NATS server.
type Server struct {
	Store string
	Port  int
}

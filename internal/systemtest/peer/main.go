// Command peer is the processes that the system tests start besides the
// programs themselves: a worker whose handler is written in Go, the command of a
// step, a NATS server, and a watch that ends them all when their test is gone.
package main

import (
	"encoding/json"
	"fmt"
	"io"
	"os"

	"reveille/internal/systemtest/ask"
	"reveille/runner"
	"reveille/worker"
)

func main() {
	role := ""
	if len(os.Args) > 1 {
		role = os.Args[1]
	}
	switch role {
	case "step":
		os.Exit(step())
	case "nats":
		if err := nats(); err != nil {
			fmt.Fprintln(os.Stderr, "nats:", err)
			os.Exit(1)
		}
	case "watch":
		watch(os.Stdin)
	default:
		worker.Main(handler())
	}
}

// handler is what the environment says.
func handler() runner.Handler {
	if socket := os.Getenv(ask.EnvSocket); socket != "" {
		return asking{os.Getenv(ask.EnvWorker), socket}
	}
	open := make(chan struct{})
	go func() { // the test holds the other end
		_, _ = io.Copy(io.Discard, os.Stdin)
		close(open)
	}()
	return doing{open}
}

// config is how the NATS server is configured.
func config() (c ask.Server, err error) {
	if len(os.Args) != 3 {
		return c, fmt.Errorf("%d arguments: want a configuration", len(os.Args)-2)
	}
	return c, json.Unmarshal([]byte(os.Args[2]), &c)
}

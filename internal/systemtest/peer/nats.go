package main

import (
	"errors"
	"fmt"
	"os"
	"os/signal"
	"syscall"
	"time"

	"github.com/nats-io/nats-server/v2/server"

	"reveille/internal/systemtest/ask"
)

// startTimeout bounds the start of the server, which reads its store.
const startTimeout = time.Minute

// nats is a NATS server, until SIGTERM.
func nats() error {
	c, err := config()
	if err != nil {
		return err
	}
	told := make(chan os.Signal, 1)
	signal.Notify(told, syscall.SIGTERM)
	s, err := server.NewServer(&server.Options{
		Host: "127.0.0.1", Port: c.Port, JetStream: true, StoreDir: c.Store, NoSigs: true, NoLog: true,
	})
	if err != nil {
		return err
	}
	s.Start()
	if !s.ReadyForConnections(startTimeout) {
		return errors.New("NATS server is not ready")
	}
	fmt.Println(ask.Up, s.ClientURL())
	<-told
	s.Shutdown()
	s.WaitForShutdown()
	return nil
}

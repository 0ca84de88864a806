package dev

import (
	"errors"
	"fmt"
	"net"
	"os"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/nats-io/nats-server/v2/server"
)

// natsReady bounds the start of the server, which reads its streams back.
const natsReady = 30 * time.Second

// startNATS starts the server in this process, on the loopback only.
func (d *dev) startNATS() (stop func(), err error) {
	port := d.flags.NATSPort
	if port == 0 {
		port = server.RANDOM_PORT
	} else if err := portFree(port); err != nil {
		return nil, err
	}
	dir := d.under("nats")
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return nil, fmt.Errorf("can't make the folder of the streams: %w", err)
	}
	s, err := server.NewServer(&server.Options{
		ServerName: "reveille-dev", Host: "127.0.0.1", Port: port, NoSigs: true,
		// One server and no replica: what it has acknowledged is on the disk.
		JetStream: true, StoreDir: dir, SyncAlways: true,
	})
	if err != nil {
		return nil, fmt.Errorf("NATS server: %w", err)
	}
	log := &natsLog{console: d.console}
	s.SetLogger(log, false, false)
	go s.Start()
	if !s.ReadyForConnections(natsReady) || !s.JetStreamEnabled() {
		s.Shutdown()
		why, _ := log.last.Load().(string)
		if why == "" {
			why = "it is not ready after " + natsReady.String()
		}
		return nil, fmt.Errorf("NATS server on port %d with its data in %s did not start: %s", d.flags.NATSPort, dir, why)
	}
	d.natsURL = s.ClientURL()
	d.natsWhat = fmt.Sprintf("%s (nats-server %s with JetStream, in this process), data in %s", d.natsURL, server.VERSION, dir)
	return func() {
		s.Shutdown()
		s.WaitForShutdown()
	}, nil
}

// portFree looks before the server binds: its own failure ends in a log only.
// Port 0 is any.
func portFree(port int) error {
	l, err := net.Listen("tcp", fmt.Sprintf("127.0.0.1:%d", port))
	if errors.Is(err, syscall.EADDRINUSE) {
		return fmt.Errorf("port %d on 127.0.0.1 is in use, so NATS can't listen there: stop what uses it, or choose another with --nats-port (0 takes a free one)", port)
	}
	if err != nil {
		return fmt.Errorf("NATS can't listen on port %d: %w: choose another with --nats-port", port, err)
	}
	return l.Close()
}

// natsLog shows what the server warns of.
type natsLog struct {
	console *console
	last    atomic.Value // string: the last error
}

func (l *natsLog) Noticef(format string, v ...any) { l.log("INFO", format, v) }
func (l *natsLog) Warnf(format string, v ...any)   { l.log("WARN", format, v) }
func (l *natsLog) Debugf(string, ...any)           {}
func (l *natsLog) Tracef(string, ...any)           {}

func (l *natsLog) Errorf(format string, v ...any) { l.failed(format, v) }
func (l *natsLog) Fatalf(format string, v ...any) { l.failed(format, v) }

func (l *natsLog) failed(format string, v []any) {
	l.last.Store(fmt.Sprintf(format, v...))
	l.log("ERROR", format, v)
}

func (l *natsLog) log(level, format string, v []any) {
	l.console.entry("nats", level, fmt.Sprintf(format, v...), "")
}

package localdb

import (
	"context"
	"fmt"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
)

// cockroachMemory is what an ephemeral store may take; CockroachDB refuses less than 640 MiB.
const cockroachMemory = "1GiB"

// cockroach is a single node; --insecure is the only mode that needs no certificates.
type cockroach struct {
	bin       string
	state     *state
	ephemeral bool
}

func findCockroach() string {
	path, err := exec.LookPath("cockroach")
	if err != nil {
		return ""
	}
	if path, err = filepath.Abs(path); err != nil {
		return ""
	}
	return path
}

func (c *cockroach) name() string { return EngineCockroach }

func (c *cockroach) prepare(context.Context) error {
	if err := os.MkdirAll(c.state.data, 0o700); err != nil {
		return fmt.Errorf("can't make the data directory: %w", err)
	}
	return c.state.write("engine", EngineCockroach+"\n")
}

func (c *cockroach) command(port int) command {
	store := c.state.data
	if c.ephemeral {
		store = "type=mem,size=" + cockroachMemory
	}
	return command{
		title: "CockroachDB", path: c.bin, dir: c.state.data,
		args: []string{
			"start-single-node", "--insecure", "--store=" + store,
			"--listen-addr=127.0.0.1:" + strconv.Itoa(port), "--http-addr=127.0.0.1:0",
			"--pid-file=" + cockroachPidFile(c.state.data),
		},
	}
}

// cockroachPidFile also marks the process as one of these data: an ephemeral one's command line names no folder else.
func cockroachPidFile(data string) string { return filepath.Join(data, "cockroach.pid") }

// ready needs both: the pid file may come before the node takes connections, and a connection alone may be to
// another server that took the port.
func (c *cockroach) ready(ctx context.Context, p *process, port int) bool {
	b, err := os.ReadFile(cockroachPidFile(c.state.data))
	if err != nil || strings.TrimSpace(string(b)) != strconv.Itoa(p.pid) {
		return false
	}
	return ping(ctx, c.url(port, "defaultdb")) == nil
}

func (c *cockroach) url(port int, database string) string {
	u := url.URL{
		Scheme: "postgres", User: url.User("root"),
		Host: "127.0.0.1:" + strconv.Itoa(port), Path: "/" + database, RawQuery: "sslmode=disable",
	}
	return u.String()
}

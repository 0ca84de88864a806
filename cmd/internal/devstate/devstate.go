// Package devstate finds the servers of a reveille dev that runs on a state folder.
package devstate

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"syscall"

	"github.com/alecthomas/kong"
)

// Default is the state folder where none is named.
const Default = ".reveille"

// File tells the commands of the same folder where the servers are. It
// holds the database's password, and is there only while dev runs or after it
// was killed.
const File = "dev.json"

// Servers are where a dev runs its servers.
type Servers struct {
	PID         int    `json:"pid"`
	NATSURL     string `json:"nats_url"`
	DatabaseURL string `json:"database_url"`
	Namespace   string `json:"namespace"`
}

// Discover reads where the dev of a state folder runs its servers, and from
// which file. Where there is none it returns nil.
func Discover(dir string) (*Servers, string, error) {
	path := filepath.Join(dir, File)
	raw, err := os.ReadFile(path)
	if errors.Is(err, fs.ErrNotExist) || errors.Is(err, syscall.ENOTDIR) {
		return nil, path, nil
	}
	if err != nil {
		return nil, path, fmt.Errorf("can't read where reveille dev runs: %w: run as its user, or name the servers", err)
	}
	var s Servers
	if err := json.Unmarshal(raw, &s); err != nil {
		return nil, path, fmt.Errorf("%s does not say where reveille dev runs (%w): remove it", path, err)
	}
	return &s, path, nil
}

// Discovery gives the flags of servers that nobody set those of a reveille dev:
// of commands that have a flag --dev-state, which names its state folder. Where
// that has no default, a folder that no dev runs on is an error.
type Discovery struct {
	from map[string]string // flag → file that its value was taken from
}

// Validate has nothing to check.
func (*Discovery) Validate(*kong.Application) error { return nil }

// Resolve answers for a flag that is not on the command line.
func (d *Discovery) Resolve(c *kong.Context, _ *kong.Path, flag *kong.Flag) (any, error) {
	switch flag.Name {
	case "database-url", "nats-url", "namespace":
	default:
		return nil, nil
	}
	for _, env := range flag.Envs {
		if _, ok := os.LookupEnv(env); ok { // a resolver would win over it
			return nil, nil
		}
	}
	dir, must := folderOf(c)
	if dir == "" {
		return nil, nil
	}
	servers, path, err := Discover(dir)
	if servers == nil && err == nil && must {
		err = fmt.Errorf("no reveille dev runs on %s (--dev-state)", dir)
	}
	if servers == nil || err != nil {
		return nil, err
	}
	if d.from == nil {
		d.from = map[string]string{}
	}
	d.from[flag.Name] = path
	switch flag.Name {
	case "database-url":
		return servers.DatabaseURL, nil
	case "nats-url":
		return servers.NATSURL, nil
	default:
		return servers.Namespace, nil
	}
}

// folderOf is the state folder that a command was told (must), or has by default.
func folderOf(c *kong.Context) (dir string, must bool) {
	node := c.Selected()
	if node == nil {
		node = c.Model.Node // a program without commands
	}
	for _, flag := range node.Flags {
		if flag.Name == "dev-state" {
			dir, _ = c.FlagValue(flag).(string)
			return dir, !flag.HasDefault
		}
	}
	return "", false
}

// Named says where a server's address came from, for an error.
func (d *Discovery) Named(flag string) string {
	if d.from[flag] == "" {
		return ""
	}
	return " (named by " + d.from[flag] + ")"
}

package dev

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"

	"reveille/cmd/internal/devstate"
)

// state is the locked state folder.
type state struct {
	dir  string
	lock *os.File
}

func openState(dir string) (*state, error) {
	// Others may pass through: the database may run as another user.
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return nil, fmt.Errorf("can't make the state folder: %w: name another with --state", err)
	}
	path := filepath.Join(dir, "lock")
	lock, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE, 0o600)
	if err != nil {
		return nil, fmt.Errorf("can't open the state folder's lock: %w: name another folder with --state, or run as its owner", err)
	}
	if err := syscall.Flock(int(lock.Fd()), syscall.LOCK_EX|syscall.LOCK_NB); err != nil {
		holder := make([]byte, 32)
		n, _ := lock.Read(holder)
		lock.Close()
		if errors.Is(err, syscall.EWOULDBLOCK) {
			return nil, fmt.Errorf("another reveille dev (pid %s) runs on %s: stop it, or name another folder with --state and another port with --nats-port",
				strings.TrimSpace(string(holder[:n])), dir)
		}
		return nil, fmt.Errorf("can't lock %s: %w", path, err)
	}
	s := &state{dir: dir, lock: lock}
	// Only for the message above; the lock counts without it.
	_ = lock.Truncate(0)
	_, _ = lock.WriteAt([]byte(strconv.Itoa(os.Getpid())+"\n"), 0)
	// The folder holds a password and may stand in somebody's repository.
	ignore := filepath.Join(dir, ".gitignore")
	if _, err := os.Lstat(ignore); errors.Is(err, fs.ErrNotExist) {
		_ = os.WriteFile(ignore, []byte("*\n"), 0o644)
	}
	return s, nil
}

// close frees the lock by name: a child that is just being forked may hold a
// copy of the descriptor for a moment.
func (s *state) close() error {
	return errors.Join(syscall.Flock(int(s.lock.Fd()), syscall.LOCK_UN), s.lock.Close())
}

// remember writes where the servers are, for their user only; forget removes it.
func (s *state) remember(servers devstate.Servers) (forget func(), err error) {
	raw, err := json.Marshal(servers)
	if err != nil {
		return nil, err
	}
	path := filepath.Join(s.dir, devstate.File)
	tmp := path + ".new"
	_ = os.Remove(tmp) // its mode may be another
	if err := os.WriteFile(tmp, append(raw, '\n'), 0o600); err != nil {
		return nil, fmt.Errorf("can't write to the state folder: %w", err)
	}
	if err := os.Rename(tmp, path); err != nil {
		return nil, fmt.Errorf("can't write to the state folder: %w", err)
	}
	return func() { _ = os.Remove(path) }, nil
}

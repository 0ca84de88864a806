package localdb

import (
	"crypto/rand"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"time"
)

const (
	tempPrefix = "reveille-test-"
	// sweepAge keeps the sweep off a folder that was made a moment ago and is not locked yet.
	sweepAge = 10 * time.Minute
)

// state is the folder below Options.Dir that holds what a later start needs: lock, engine, password, port, logs, and
// the data unless the server's user can't get there.
type state struct {
	dir   string // absolute, symbolic links resolved
	data  string // set by the engine
	moved string // why the data are elsewhere, or empty
	lock  *os.File
}

// openState makes and locks the folder.
func openState(dir string) (*state, error) {
	abs, err := filepath.Abs(dir)
	if err != nil {
		return nil, fmt.Errorf("state folder %s: %w", dir, err)
	}
	abs = filepath.Join(abs, "database")
	if err := os.MkdirAll(abs, 0o755); err != nil {
		return nil, fmt.Errorf("can't make the state folder: %w: give another one", err)
	}
	if abs, err = filepath.EvalSymlinks(abs); err != nil {
		return nil, fmt.Errorf("state folder %s: %w", dir, err)
	}
	// The server's user must pass through it; a strict umask must not send the data elsewhere.
	if info, err := os.Stat(abs); err == nil && info.Mode().Perm() != 0o711 {
		if err := os.Chmod(abs, 0o711); err != nil {
			return nil, fmt.Errorf("can't set the mode of the state folder: %w: give another one, or run as its owner", err)
		}
	}
	lock, err := takeLock(filepath.Join(abs, "lock"))
	if err != nil {
		return nil, err
	}
	return &state{dir: abs, lock: lock}, nil
}

// takeLock locks with flock, which the kernel gives back however the process ends.
func takeLock(path string) (*os.File, error) {
	f, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE, 0o600)
	if err != nil {
		return nil, fmt.Errorf("can't open the lock: %w: give another state folder, or run as its owner", err)
	}
	if err := syscall.Flock(int(f.Fd()), syscall.LOCK_EX|syscall.LOCK_NB); err != nil {
		holder := make([]byte, 32)
		n, _ := f.Read(holder)
		f.Close()
		if errors.Is(err, syscall.EWOULDBLOCK) {
			return nil, fmt.Errorf("%w: process %s runs a database on %s: stop it or give another state folder",
				ErrInUse, strings.TrimSpace(string(holder[:n])), filepath.Dir(path))
		}
		return nil, fmt.Errorf("can't lock %s: %w", path, err)
	}
	// Only for the message above; the lock counts without it.
	_ = f.Truncate(0)
	_, _ = f.WriteAt([]byte(strconv.Itoa(os.Getpid())+"\n"), 0)
	return f, nil
}

// close frees the lock by name: a child that another goroutine is just forking may hold a copy of the descriptor for
// a moment, and with it the lock.
func (s *state) close() error {
	return errors.Join(syscall.Flock(int(s.lock.Fd()), syscall.LOCK_UN), s.lock.Close())
}

func (s *state) path(name string) string { return filepath.Join(s.dir, name) }

// read returns a file's text, or nothing where it is not there.
func (s *state) read(name string) string {
	b, err := os.ReadFile(s.path(name))
	if err != nil {
		return ""
	}
	return strings.TrimSpace(string(b))
}

// write replaces a file in one step, readable by its owner only.
func (s *state) write(name, text string) error {
	tmp := s.path(name + ".new")
	if err := os.WriteFile(tmp, []byte(text), 0o600); err != nil {
		return fmt.Errorf("can't write to the state folder: %w", err)
	}
	if err := os.Rename(tmp, s.path(name)); err != nil {
		return fmt.Errorf("can't write to the state folder: %w", err)
	}
	return nil
}

// password returns the one that is there, or makes one.
func (s *state) password() (string, error) {
	if p := s.read("password"); p != "" {
		return p, nil
	}
	p := randomHex(16)
	return p, s.write("password", p+"\n")
}

func (s *state) choosePort(asked, try int) (int, error) {
	if asked != 0 {
		return asked, nil
	}
	remembered := 0
	if try == 1 {
		remembered, _ = strconv.Atoi(s.read("port"))
	}
	return freePort(remembered)
}

// openLog begins a new log and keeps the one before, which may tell of a crash.
func (s *state) openLog() (*os.File, error) {
	path := s.path("server.log")
	if err := os.Rename(path, path+".1"); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, fmt.Errorf("can't rotate the server's log: %w", err)
	}
	f, err := os.OpenFile(path, os.O_WRONLY|os.O_CREATE|os.O_APPEND, 0o600)
	if err != nil {
		return nil, fmt.Errorf("can't open the server's log: %w", err)
	}
	return f, nil
}

// elsewhere returns the folder below /var/tmp that stands in for this state folder; the same one at every start.
func (s *state) elsewhere() (string, error) {
	sum := sha256.Sum256([]byte(s.dir))
	dir := filepath.Join(tempBase, "reveille-"+hex.EncodeToString(sum[:6]))
	if err := os.Mkdir(dir, 0o711); err != nil && !errors.Is(err, fs.ErrExist) {
		return "", fmt.Errorf("can't make a folder for the data: %w", err)
	}
	// Anybody may write to /var/tmp: what stands there under this name must be a folder that we made.
	info, err := os.Lstat(dir)
	if err != nil {
		return "", fmt.Errorf("can't look at the folder for the data: %w", err)
	}
	if st, ok := info.Sys().(*syscall.Stat_t); !ok || !info.IsDir() || int(st.Uid) != os.Geteuid() || info.Mode().Perm()&0o022 != 0 {
		return "", fmt.Errorf("%s is not a folder of this user that only it can write to: remove it, or give a state folder that other users can pass through", dir)
	}
	if err := os.Chmod(dir, 0o711); err != nil {
		return "", fmt.Errorf("can't set the mode of the folder for the data: %w", err)
	}
	// Data there of a state folder that was removed since: its owner wanted a fresh start. One copy is kept, in case
	// that was a mistake; without its password nobody signs in to it by accident.
	if s.read("password") == "" {
		old := dir + ".old"
		if exists(filepath.Join(dir, dataName(EnginePostgres))) {
			if err := os.RemoveAll(old); err != nil {
				return "", fmt.Errorf("can't remove older data: %w", err)
			}
			if err := os.Rename(dir, old); err != nil {
				return "", fmt.Errorf("can't put older data aside: %w", err)
			}
			return s.elsewhere()
		}
	}
	return dir, nil
}

func exists(path string) bool {
	_, err := os.Lstat(path)
	return err == nil
}

func randomHex(bytes int) string {
	b := make([]byte, bytes)
	_, _ = rand.Read(b) // never fails: crypto/rand ends the program first
	return hex.EncodeToString(b)
}

func makeTemp() (string, error) {
	base := tempBase
	if !exists(base) {
		base = os.TempDir()
	}
	dir, err := os.MkdirTemp(base, tempPrefix)
	if err != nil {
		return "", fmt.Errorf("can't make a folder for a test database: %w", err)
	}
	// MkdirTemp's 0700 would keep the server's user out.
	if err := os.Chmod(dir, 0o711); err != nil {
		return "", fmt.Errorf("can't set the mode of a folder for a test database: %w", err)
	}
	return dir, nil
}

// sweepTemp removes what test processes left that were killed: their locks are free. Failing to is no reason to fail.
func sweepTemp() {
	dirs, _ := filepath.Glob(filepath.Join(tempBase, tempPrefix+"*"))
	for _, dir := range dirs {
		info, err := os.Lstat(dir)
		if err != nil || !info.IsDir() || time.Since(info.ModTime()) < sweepAge {
			continue
		}
		if st, ok := info.Sys().(*syscall.Stat_t); !ok || int(st.Uid) != os.Geteuid() {
			continue
		}
		lock, err := takeLock(filepath.Join(dir, "database", "lock"))
		if err != nil {
			_ = os.Remove(dir) // where it is empty
			continue
		}
		for _, engine := range []string{EnginePostgres, EngineCockroach} {
			killAll(serverProcesses(engine, filepath.Join(dir, "database", dataName(engine))))
		}
		_ = os.RemoveAll(dir)
		_ = lock.Close()
	}
}

// Package truth is what the handlers of a torture run write down by themselves, so that nothing of it has to be asked of
// the system under test: a line when a call starts and when it ends, and locks of the kernel that are held exactly as
// long as anything of the call lives.
//
// Each call takes the lock of its session and the lock of its step. What it starts inherits them, and the kernel lets go
// when the last of them is gone, however it dies. So a lock that is held is a handler that lives, and a call that finds
// its session's lock held has seen an overlap with its own eyes.
//
// All is in one folder (Dir), which a process finds in its environment.
package truth

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"
)

// Variables of the environment of workers and of their handlers.
const (
	EnvDir    = "TORTURE_DIR"    // the folder
	EnvWorker = "TORTURE_WORKER" // the name of the worker's process
)

// What a line tells.
const (
	Start   = "start"
	End     = "end"
	Overlap = "overlap" // the session's lock was held at the start
	Over    = "over"    // it was got, after Held
)

// Kinds of handlers.
const (
	Exec = "exec"
	Go   = "go"
)

// Line is one line of the file.
type Line struct {
	At        time.Time `json:"at"`
	What      string    `json:"what"`
	Kind      string    `json:"kind"` // of handler
	Worker    string    `json:"worker"`
	Session   string    `json:"session"`
	Execution string    `json:"execution"`
	Epoch     int64     `json:"epoch"`
	Step      string    `json:"step"`
	PID       int       `json:"pid"`
	// Of an overlap: who held the lock, and until it was got for how long.
	Holder *Line         `json:"holder,omitempty"`
	Held   time.Duration `json:"held,omitempty"`
}

// Dir is the folder of a run.
type Dir string

func (d Dir) file() string              { return filepath.Join(string(d), "calls") }
func (d Dir) lock(of, id string) string { return filepath.Join(string(d), of+"-"+id) }
func (d Dir) pid(worker string) string  { return filepath.Join(string(d), "pid-"+worker) }
func (d Dir) SetPID(w string, n int) error {
	return os.WriteFile(d.pid(w), []byte(strconv.Itoa(n)), 0o600)
}

// PID is the process of a worker.
func (d Dir) PID(worker string) (int, error) {
	text, err := os.ReadFile(d.pid(worker))
	if err != nil {
		return 0, err
	}
	return strconv.Atoi(strings.TrimSpace(string(text)))
}

// write appends a line; one write of less than a page is not torn.
func (d Dir) write(l Line) error {
	l.At = time.Now()
	raw, err := json.Marshal(l)
	if err != nil {
		return err
	}
	f, err := os.OpenFile(d.file(), os.O_WRONLY|os.O_APPEND|os.O_CREATE, 0o600)
	if err != nil {
		return err
	}
	_, err = f.Write(append(raw, '\n'))
	return errors.Join(err, f.Close())
}

// Lines are all lines so far.
func (d Dir) Lines() ([]Line, error) {
	text, err := os.ReadFile(d.file())
	if err != nil && !os.IsNotExist(err) {
		return nil, err
	}
	var lines []Line
	for raw := range strings.Lines(string(text)) {
		var l Line
		if err := json.Unmarshal([]byte(raw), &l); err != nil {
			return nil, fmt.Errorf("line %q: %w", raw, err)
		}
		lines = append(lines, l)
	}
	return lines, nil
}

// Call is a handler that runs. End is called once.
type Call struct {
	dir           Dir
	line          Line
	session, step *os.File
	waiting       sync.WaitGroup // for a session's lock that somebody else held
}

// Begin writes down that a call starts, and takes its locks.
func (d Dir) Begin(l Line) (*Call, error) {
	l.What, l.PID = Start, os.Getpid()
	c := &Call{dir: d, line: l}
	var err error
	if c.step, err = lock(d.lock("step", l.Step), unix.LOCK_EX|unix.LOCK_NB); err != nil {
		return nil, fmt.Errorf("a call of step %s is not the first: %w", l.Step, err)
	}
	path := d.lock("session", l.Session)
	if c.session, err = lock(path, unix.LOCK_EX|unix.LOCK_NB); errors.Is(err, unix.EWOULDBLOCK) {
		err = c.overlap(path)
	} else if err == nil {
		err = c.sign(path)
	}
	if err != nil {
		return nil, err
	}
	return c, d.write(l)
}

// sign writes into the session's lock who has it.
func (c *Call) sign(path string) error {
	raw, err := json.Marshal(c.line)
	if err != nil {
		return err
	}
	return os.WriteFile(path, raw, 0o600)
}

// overlap writes down who else is there, and when it is gone.
func (c *Call) overlap(path string) error {
	began := time.Now()
	l := c.line
	l.What = Overlap
	if raw, err := os.ReadFile(path); err == nil {
		l.Holder = &Line{}
		if json.Unmarshal(raw, l.Holder) != nil {
			l.Holder = nil // it was just being written
		}
	}
	if err := c.dir.write(l); err != nil {
		return err
	}
	c.waiting.Go(func() {
		f, err := lock(path, unix.LOCK_EX)
		if err != nil {
			return // End has given up waiting: it stays as it was written
		}
		l.What, l.Held = Over, time.Since(began)
		_ = c.dir.write(l) // the overlap stands already
		_ = f.Close()
	})
	return nil
}

// Inherit are the files that whatever the call starts must get, so that the locks are its as well.
func (c *Call) Inherit() []*os.File {
	if c.session == nil {
		return []*os.File{c.step}
	}
	return []*os.File{c.session, c.step}
}

// End writes down that the call is over, and lets go of its locks, unless something that it started has them.
func (c *Call) End() error {
	l := c.line
	l.What = End
	err := c.dir.write(l)
	for _, f := range c.Inherit() {
		err = errors.Join(err, f.Close())
	}
	return err
}

// Lives tells whether anything of a call of a step is left.
func (d Dir) Lives(step string) (bool, error) {
	path := d.lock("step", step)
	if _, err := os.Stat(path); err != nil {
		return false, nil // it was never called
	}
	f, err := lock(path, unix.LOCK_EX|unix.LOCK_NB)
	if errors.Is(err, unix.EWOULDBLOCK) {
		return true, nil
	}
	if err != nil {
		return false, err
	}
	return false, f.Close()
}

// lock opens a file and locks it.
func lock(path string, how int) (*os.File, error) {
	f, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE, 0o600)
	if err != nil {
		return nil, err
	}
	for {
		err = unix.Flock(int(f.Fd()), how)
		if !errors.Is(err, unix.EINTR) {
			break
		}
	}
	if err != nil {
		return nil, errors.Join(err, f.Close())
	}
	return f, nil
}

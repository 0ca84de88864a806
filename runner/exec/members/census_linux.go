package members

import (
	"sync"
	"time"
)

// census is one reading of /proc, shared by the steps that asked for it before
// it began. When many steps end at once, each of them reading all processes
// would cost the square of their number.
type census struct {
	done      chan struct{}
	processes []Process
	doubt     bool // a process may have been missed
	err       error

	mu    sync.Mutex
	marks map[int]mark // of processes that somebody asked for
}

type mark struct {
	step  string
	empty bool
}

// mark is readMark, once for all who share the census. It is read after the
// census began, as each of them would have.
func (c *census) mark(pid int) (step string, empty bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	m, known := c.marks[pid]
	if !known {
		m.step, m.empty = readMark(pid)
		c.marks[pid] = m
	}
	return m.step, m.empty
}

// looks hands out censuses.
var looks censuses

type censuses struct {
	mu      sync.Mutex
	reading bool    // one is being read
	next    *census // the one after it, for those who came since
}

// take returns a census that began after it was called.
func (cs *censuses) take() *census {
	cs.mu.Lock()
	if cs.next == nil {
		cs.next = &census{done: make(chan struct{}), marks: map[int]mark{}}
	}
	c := cs.next
	if !cs.reading {
		cs.reading = true
		go cs.run() // nobody's own: who reads for the others must not wait for them
	}
	cs.mu.Unlock()
	<-c.done
	return c
}

// run reads one census after the other while somebody waits for one.
func (cs *censuses) run() {
	cs.mu.Lock()
	defer cs.mu.Unlock()
	for c := cs.next; c != nil; c = cs.next {
		cs.next = nil
		cs.mu.Unlock()
		c.read()
		cs.mu.Lock()
	}
	cs.reading = false
}

func (c *census) read() {
	defer close(c.done)
	var vanished bool
	if c.processes, vanished, c.err = readAll(); c.err == nil {
		c.doubt = reapOrphans(c.processes, time.Now()) || vanished
	}
}

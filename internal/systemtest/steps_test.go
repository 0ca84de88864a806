package systemtest

import (
	"bufio"
	"encoding/json"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"path/filepath"
	"strings"
	"sync"
	"time"

	"reveille/claims"
	"reveille/internal/systemtest/ask"
)

// steps takes the steps of all workers of a world.
type steps struct {
	w     *world
	path  string
	l     net.Listener
	web   *httptest.Server // asks on that socket for workers of --handler http
	calls chan *call
	wg    sync.WaitGroup

	waiting []*call // received and not asked for yet
}

// call is one step in the hands of the test.
type call struct {
	ask.Step
	conn net.Conn
	// over receives why the step was told to stop, and is closed when its process
	// has let go of it: after its answer, its stop, or its death.
	over chan string
}

// askSteps makes the socket. It must be there before the first worker.
func (w *world) askSteps() *steps {
	w.t.Helper()
	s := &steps{w: w, path: filepath.Join(w.dir, "steps"), calls: make(chan *call, 10000)}
	var err error
	if s.l, err = net.Listen("unix", s.path); err != nil {
		w.t.Fatal(err)
	}
	s.wg.Go(func() {
		for {
			c, err := s.l.Accept()
			if err != nil { // closed
				return
			}
			s.wg.Go(func() { s.serve(c) })
		}
	})
	s.web = httptest.NewServer(s)
	w.steps = s
	return s
}

// close ends the socket after all processes are gone.
func (s *steps) close() {
	s.web.Close()
	_ = s.l.Close()
	s.wg.Wait()
}

// ServeHTTP is the URL of a worker, which the path names.
func (s *steps) ServeHTTP(rw http.ResponseWriter, r *http.Request) {
	step := ask.Step{Worker: r.URL.Path[1:]}
	body, err := io.ReadAll(r.Body)
	if err == nil {
		err = json.Unmarshal(body, &step.Request)
	}
	if err != nil {
		http.Error(rw, err.Error(), http.StatusBadRequest)
		return
	}
	a, err := ask.Test(s.path, step, r.Context().Done(), func() string { return "the request was closed" })
	switch {
	case err != nil:
		http.Error(rw, err.Error(), http.StatusInternalServerError)
	case a.Error != "" && a.Retryable:
		http.Error(rw, a.Error, http.StatusServiceUnavailable)
	case a.Error != "":
		http.Error(rw, a.Error, http.StatusInternalServerError)
	default:
		rw.Header().Set("Content-Type", "application/x-ndjson")
		// An answer that is lost is the worker's to notice.
		_ = json.NewEncoder(rw).Encode(map[string]any{"type": "ended", "result": a.Result, "continue": a.Continue})
	}
}

func (s *steps) serve(conn net.Conn) {
	defer conn.Close()
	c := &call{conn: conn, over: make(chan string, 1)}
	defer close(c.over)
	lines := bufio.NewReader(conn)
	if ask.Receive(lines, &c.Step) != nil { // it was killed meanwhile
		return
	}
	s.calls <- c
	var stop ask.Stopped
	if ask.Receive(lines, &stop) == nil {
		c.over <- stop.Cause
	}
}

// next is the step that began next.
func (s *steps) next(what string) *call {
	s.w.t.Helper()
	return s.match(what, func(*call) bool { return true })
}

// of is the next step of a session.
func (s *steps) of(session claims.SessionID) *call {
	s.w.t.Helper()
	return s.match("a step of "+string(session), func(c *call) bool { return c.Request.Session == session })
}

// match takes the first step that fits; the others wait to be asked for.
func (s *steps) match(what string, fits func(*call) bool) *call {
	s.w.t.Helper()
	for i, c := range s.waiting {
		if fits(c) {
			s.waiting = append(s.waiting[:i], s.waiting[i+1:]...)
			return c
		}
	}
	deadline := time.After(patience)
	for {
		select {
		case c := <-s.calls:
			if fits(c) {
				return c
			}
			s.waiting = append(s.waiting, c)
		case <-deadline:
			s.w.t.Fatalf("not within %v: %s", patience, what)
		}
	}
}

// none complains of a step that began and nobody asked for.
func (s *steps) none(why string) {
	s.w.t.Helper()
	for {
		select {
		case c := <-s.calls:
			s.waiting = append(s.waiting, c)
			continue
		default:
		}
		break
	}
	for _, c := range s.waiting {
		s.w.t.Errorf("%s: a step of %s began", why, c.Request.Session)
	}
}

func (c *call) answer(w *world, a ask.Answer) {
	w.t.Helper()
	if err := ask.Send(c.conn, a); err != nil {
		w.t.Fatalf("answering a step of %s: %v", c.Request.Session, err)
	}
}

// end ends the step with a result that names its inputs.
func (c *call) end(w *world) { w.t.Helper(); c.answer(w, ask.Answer{Result: ask.Result(c.Request)}) }

// inputs are the ids of what the step covers.
func (c *call) inputs() string {
	var ids []string
	for _, in := range c.Request.Inputs {
		ids = append(ids, in.ID)
	}
	return strings.Join(ids, " ")
}

// stopped waits until the step was told to stop, and answers why.
func (c *call) stopped(w *world) string {
	w.t.Helper()
	select {
	case cause, ok := <-c.over:
		if !ok {
			w.t.Fatalf("the step of %s ended without being told to stop", c.Request.Session)
		}
		return cause
	case <-time.After(patience):
		w.t.Fatalf("not within %v: the step of %s is told to stop", patience, c.Request.Session)
		return ""
	}
}

// running says whether nothing has ended or stopped the step.
func (c *call) running() bool {
	select {
	case <-c.over:
		return false
	default:
		return true
	}
}

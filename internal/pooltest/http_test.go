package pooltest

import (
	"encoding/json"
	"fmt"
	"net/http"
	"net/http/httptest"
	"testing"
	"time"

	"reveille/runner"
	steps "reveille/runner/http"
)

// posted is one request of a step, in the hands of the test.
type posted struct {
	epoch  string
	req    runner.Request
	write  chan string
	closed <-chan struct{} // the worker closed the request
}

// stepServer answers steps with the lines that the test writes.
func stepServer(t *testing.T, status int, header http.Header) (url string, calls chan *posted) {
	t.Helper()
	calls = make(chan *posted, 4)
	server := httptest.NewServer(http.HandlerFunc(func(rw http.ResponseWriter, r *http.Request) {
		p := &posted{epoch: r.Header.Get("Rv-Epoch"), write: make(chan string), closed: r.Context().Done()}
		if err := json.NewDecoder(r.Body).Decode(&p.req); err != nil {
			t.Errorf("body of a step: %v", err)
		}
		calls <- p
		for name, values := range header {
			rw.Header()[name] = values
		}
		rw.Header().Set("Content-Type", "application/x-ndjson")
		rw.WriteHeader(status)
		for status == http.StatusOK {
			_ = http.NewResponseController(rw).Flush() // the other end is gone where it fails
			select {
			case line, more := <-p.write:
				if !more {
					return
				}
				fmt.Fprintln(rw, line)
			case <-p.closed:
				return
			}
		}
	}))
	t.Cleanup(server.Close)
	return server.URL, calls
}

// byHTTP is a worker whose steps are posted to url.
func (w *world) byHTTP(url string) *member {
	w.t.Helper()
	h, err := steps.New(steps.Options{URL: url})
	if err != nil {
		w.t.Fatal(err)
	}
	w.t.Cleanup(h.Close)
	return w.workerWith(options(), func(runner.Handler) runner.Handler { return h })
}

// A shutdown in mid-stream closes the request and hands the step over; the next worker's request says so, under a
// higher epoch, and no attempt is spent.
func TestHTTPHandOverAtShutdown(t *testing.T) {
	w := newWorld(t)
	url, calls := stepServer(t, http.StatusOK, nil)
	m, other := w.byHTTP(url), w.byHTTP(url)
	m.wake("s", "a")
	first := wait(w, "request", calls)
	first.write <- `{"type":"text","text":"half"}`
	drained := make(chan struct{})
	go func() { defer close(drained); m.pool.Drain() }()
	wait(w, "the request to be closed", first.closed)
	wait(w, "drain", drained)
	other.pool.Start(t.Context(), "s")
	second := wait(w, "request of the next worker", calls)
	if c := second.req.Continues; c == nil || c.Kind != "handover" || c.Attempt != 0 || second.req.Inputs[0].ID != "a" || first.epoch != "1" || second.epoch != "2" {
		t.Errorf("goes on with %+v under epoch %s after %s", second.req, second.epoch, first.epoch)
	}
	second.write <- `{"type":"ended","result":1}`
	close(second.write)
	w.settled("s")
	types := w.types("s")
	if count(types, "step.failed(shutdown)") != 1 || count(types, "step.ended") != 1 || count(types, "execution.ended(completed)") != 1 {
		t.Errorf("events: %s", types)
	}
}

// A server that is overloaded says when it wants to be asked again, and frees the slot until then.
func TestHTTPRetryAfter(t *testing.T) {
	w := newWorld(t)
	url, calls := stepServer(t, http.StatusServiceUnavailable, http.Header{"Retry-After": {"3000"}})
	m := w.byHTTP(url)
	free := m.pool.Free()
	m.wake("s", "a")
	wait(w, "request", calls)
	w.settled("s")
	w.until("a free slot", func() bool { return m.pool.Free() == free })
	var after float64
	err := w.db.QueryRow(t.Context(), `SELECT EXTRACT(EPOCH FROM not_before - statement_timestamp())::FLOAT8 FROM continuations WHERE session_id = 's'`).Scan(&after)
	if err != nil || after < 2900 || after > (51*time.Minute).Seconds() {
		t.Errorf("the retry is in %v s, %v", after, err)
	}
	if types := w.types("s"); count(types, "execution.ended(retrying)") != 1 {
		t.Errorf("events: %s", types)
	}
}

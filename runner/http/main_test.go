package http

import (
	"bufio"
	"context"
	"crypto/tls"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"strings"
	"sync"
	"testing"
	"time"

	"go.uber.org/goleak"

	"reveille/claims"
	"reveille/runner"
)

// patience ends a test that hangs; no test waits for it otherwise.
const patience = 60 * time.Second

func TestMain(m *testing.M) {
	// Nothing here may go through a proxy; see TestNoProxy.
	for _, name := range []string{"HTTP_PROXY", "HTTPS_PROXY", "http_proxy", "https_proxy"} {
		if err := os.Setenv(name, "http://127.0.0.1:1"); err != nil {
			panic(err)
		}
	}
	goleak.VerifyTestMain(m)
}

// recorder is the log of a step.
type recorder struct {
	mu      sync.Mutex
	content []claims.Content
	reasons []string
	fail    func(claims.Content) error // called outside of mu; may block
	refuse  error                      // answers a decline
}

func (r *recorder) output() *runner.Output {
	return runner.NewOutput(func(c claims.Content) error {
		if r.fail != nil {
			if err := r.fail(c); err != nil {
				return err
			}
		}
		r.mu.Lock()
		defer r.mu.Unlock()
		r.content = append(r.content, c)
		return nil
	}, func(reason string) error {
		r.mu.Lock()
		defer r.mu.Unlock()
		r.reasons = append(r.reasons, reason)
		return r.refuse
	})
}

func (r *recorder) text() string {
	r.mu.Lock()
	defer r.mu.Unlock()
	var b strings.Builder
	for _, c := range r.content {
		if d, ok := c.Data.(claims.TextData); ok {
			b.WriteString(d.Text)
		}
	}
	return b.String()
}

// events are type and data, one a line.
func (r *recorder) events() string {
	r.mu.Lock()
	defer r.mu.Unlock()
	var b strings.Builder
	for _, c := range r.content {
		data, err := json.Marshal(c.Data)
		if err != nil {
			panic(err)
		}
		fmt.Fprintf(&b, "%s %s\n", c.Type, data)
	}
	return b.String()
}

// signalled is a recorder that tells of everything it is given.
func signalled() (*recorder, <-chan claims.Content) {
	c := make(chan claims.Content, 1000)
	return &recorder{fail: func(content claims.Content) error {
		c <- content
		return nil
	}}, c
}

func newHandler(t *testing.T, o Options) *Handler {
	t.Helper()
	h, err := New(o)
	if err != nil {
		t.Fatal(err)
	}
	h.transport.IdleConnTimeout = patience // the tests' own pauses are not to close any
	t.Cleanup(h.Close)
	return h
}

// serve starts a server and a handler that posts to it.
func serve(t *testing.T, f http.HandlerFunc) *Handler {
	t.Helper()
	s := httptest.NewServer(f)
	t.Cleanup(s.Close) // after the handler's connections were closed
	return newHandler(t, Options{URL: s.URL + "/step"})
}

// serveTLS is serve over TLS, with the HTTP version it is told.
func serveTLS(t *testing.T, http2 bool, f http.HandlerFunc) (*Handler, *httptest.Server) {
	t.Helper()
	s := httptest.NewUnstartedServer(f)
	s.EnableHTTP2 = http2
	s.StartTLS()
	t.Cleanup(s.Close)
	h := newHandler(t, Options{URL: s.URL + "/step"})
	h.transport.TLSClientConfig = &tls.Config{RootCAs: s.Client().Transport.(*http.Transport).TLSClientConfig.RootCAs}
	return h, s
}

// serveRaw is a server that speaks for itself on each of its connections, which
// are closed when it is done with them, and at the end of the test.
func serveRaw(t *testing.T, talk func(conn net.Conn, in *bufio.Reader)) *Handler {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	talkOn(t, l, talk)
	h := newHandler(t, Options{URL: "http://" + l.Addr().String() + "/step"})
	dial := h.transport.DialContext
	h.transport.DialContext = func(ctx context.Context, network, address string) (net.Conn, error) {
		conn, err := dial(ctx, network, address)
		if err == nil {
			err = conn.(*net.TCPConn).SetWriteBuffer(socketBytes)
		}
		return conn, err
	}
	return h
}

// socketBytes are the buffers of a raw server's connections; the system makes more of it.
const socketBytes = 4 << 10

func talkOn(t *testing.T, l net.Listener, talk func(conn net.Conn, in *bufio.Reader)) {
	var over sync.WaitGroup
	over.Go(func() {
		for {
			conn, err := l.Accept()
			if err != nil {
				return
			}
			over.Go(func() {
				defer conn.Close()
				_ = conn.SetDeadline(time.Now().Add(patience))
				if c, ok := conn.(*net.TCPConn); ok {
					_ = c.SetReadBuffer(socketBytes)
				}
				talk(conn, bufio.NewReader(conn))
			})
		}
	})
	t.Cleanup(func() {
		l.Close()
		over.Wait()
	})
}

// readRequest reads a request to its end; false where there is none.
func readRequest(in *bufio.Reader) bool {
	r, err := http.ReadRequest(in)
	if err != nil {
		return false
	}
	_, err = io.Copy(io.Discard, r.Body)
	return err == nil
}

// awaitClosed returns when the other side has closed the connection.
func awaitClosed(t *testing.T, in *bufio.Reader) {
	if _, err := io.Copy(io.Discard, in); errors.Is(err, os.ErrDeadlineExceeded) {
		t.Error("the connection was not closed")
	}
}

// orPatience waits on a server, which outlives a test that failed.
func orPatience(c <-chan struct{}) {
	select {
	case <-c:
	case <-time.After(patience):
	}
}

func request() runner.Request {
	return runner.Request{
		Session: "ses_1", Execution: "e0000000-0000-4000-8000-000000000001", Epoch: 3,
		Step: "50000000-0000-4000-8000-000000000001", Index: 1,
		Inputs: []claims.Input{{ID: "in_1", Delivery: claims.Queue, Body: json.RawMessage(`{"x":"<é>"}`)}},
		Killed: make(chan struct{}),
	}
}

// largeRequest is one that the sockets to a raw server do not hold whole.
func largeRequest() runner.Request {
	req := request()
	req.Inputs[0].Body = json.RawMessage(`"` + strings.Repeat("x", 512<<10) + `"`)
	return req
}

// answered is what Step returned.
type answered struct {
	result runner.Result
	err    error
}

// inBackground runs a step and gives its answer when it has returned.
func inBackground(ctx context.Context, h *Handler, req runner.Request, r *recorder) <-chan answered {
	c := make(chan answered, 1)
	go func() {
		result, err := h.Step(ctx, req, r.output())
		c <- answered{result, err}
	}()
	return c
}

// step runs a step to its end.
func step(t *testing.T, h *Handler, r *recorder) (runner.Result, error) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	a := await(t, inBackground(ctx, h, request(), r), "the end of the step")
	if errors.Is(a.err, context.DeadlineExceeded) {
		t.Fatalf("the step did not end: %v", a.err)
	}
	return a.result, a.err
}

func await[T any](t *testing.T, c <-chan T, what string) T {
	t.Helper()
	select {
	case v := <-c:
		return v
	case <-time.After(2 * patience): // a step's own end comes first
		t.Fatalf("waited in vain for %s", what)
		panic("unreachable")
	}
}

// failure is the error of a step as a failure with code handler.
func failure(t *testing.T, err error) runner.Failure {
	t.Helper()
	var f *runner.Failure
	if !errors.As(err, &f) || f.Code != claims.CodeHandler || f.Message == "" {
		t.Fatalf("Step = %v, want a failure of the handler", err)
	}
	return *f
}

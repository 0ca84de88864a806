package http

import (
	"bufio"
	"context"
	"errors"
	"io"
	"net"
	"net/http"
	"strings"
	"sync/atomic"
	"testing"

	"reveille/claims"
	"reveille/runner"
)

// held is a server that answers with a part of an answer and then waits for its
// request to be closed.
type held struct {
	there  chan struct{} // the part was sent
	closed chan struct{} // the request was closed
}

func newHeld() *held {
	return &held{there: make(chan struct{}, 10), closed: make(chan struct{}, 10)}
}

func (s *held) answers(media, part string) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		_, _ = io.Copy(io.Discard, r.Body)
		if part != "" {
			w.Header().Set("Content-Type", media)
			_, _ = io.WriteString(w, part)
			flush(w)
		}
		s.there <- struct{}{}
		<-r.Context().Done()
		s.closed <- struct{}{}
	}
}

func flush(w http.ResponseWriter) { _ = http.NewResponseController(w).Flush() }

// TestI10InterruptionClosesTheRequest: whatever the cause, and wherever it comes,
// Step returns with it when the request is over, and the server hears of it.
func TestI10InterruptionClosesTheRequest(t *testing.T) {
	t.Parallel()
	causes := []error{claims.ErrInterrupted, claims.ErrShutdown, claims.ErrLeaseLost, claims.ErrStepTimeout}
	for name, tc := range map[string]struct{ media, part, text string }{
		"before the header": {"", "", ""},
		"in the stream":     {streamed, "one\n", "one\n"},
		"in a line":         {streamed, "one\ntwo", "one\ntwo"},
		"in an object":      {streamed, "one\n{\"type\":", "one\n{\"type\":"},
		"in the document":   {single, "[1,", ""},
	} {
		for _, http2 := range []bool{false, true} {
			s := newHeld()
			h, _ := serveTLS(t, http2, s.answers(tc.media, tc.part))
			for _, cause := range causes {
				ctx, cancel := context.WithCancelCause(t.Context())
				r, said := signalled()
				done := inBackground(ctx, h, request(), r)
				await(t, s.there, "the request")
				if tc.text != "" {
					await(t, said, "the first line")
				}
				cancel(cause)
				a := await(t, done, "the step")
				if !errors.Is(a.err, cause) || a.result.Value != nil || a.result.Continue {
					t.Errorf("%s over HTTP/2 %v, %v: %+v, %v", name, http2, cause, a.result, a.err)
				}
				if f := (*runner.Failure)(nil); errors.As(a.err, &f) {
					t.Errorf("%s, %v: it is a failure: %+v", name, cause, f)
				}
				if !strings.HasPrefix(tc.text, r.text()) || tc.text != "" && r.text() == "" {
					t.Errorf("%s, %v: text %q, want %q or the lines of it that came", name, cause, r.text(), tc.text)
				}
				await(t, s.closed, "the end of the request")
			}
		}
	}
}

// TestHandOverKeepsAResult: what was said before the shutdown is the result of
// the step, though its answer goes on.
func TestHandOverKeepsAResult(t *testing.T) {
	t.Parallel()
	s := newHeld()
	h := serve(t, s.answers(streamed, `{"type":"ended","result":7,"continue":true}`+"\nbye\n"))
	ctx, cancel := context.WithCancelCause(t.Context())
	r, said := signalled()
	done := inBackground(ctx, h, request(), r)
	await(t, said, "the last line")
	cancel(claims.ErrShutdown)
	if a := await(t, done, "the step"); a.err != nil || string(a.result.Value) != "7" || !a.result.Continue {
		t.Errorf("%+v, %v, want 7 and another step", a.result, a.err)
	}
	await(t, s.closed, "the end of the request")
}

// TestSaid: what an answer says itself is its step's end, also where its request
// was closed meanwhile; that it came to an end is not.
func TestSaid(t *testing.T) {
	t.Parallel()
	h := newHandler(t, Options{URL: "http://steps.example/"})
	for _, tc := range []struct {
		code        int
		media, body string
		said        bool
	}{
		{200, streamed, `{"type":"ended"}`, true},
		{200, streamed, `{"type":"ended"}` + "\nbye", true},
		{200, streamed, `{"type":"declined"}`, true},
		{200, streamed, "text\n", false},
		{200, streamed, "", false},
		{200, single, `{"a":1}`, true},
		{200, single, "null\n", true},
		{200, single, "12", false},
		{200, single, "", false},
		{200, single, "[1,", false},
		{200, "text/html", "x", false},
		{503, single, `"x"`, false},
	} {
		a := &answer{h: h, ctx: t.Context(), close: func() {}, resp: &http.Response{
			StatusCode: tc.code, ProtoMajor: 1, ContentLength: -1, TransferEncoding: []string{"chunked"},
			Header: http.Header{"Content-Type": {tc.media}}, Body: io.NopCloser(strings.NewReader(tc.body)),
		}}
		if _, err := a.read((&recorder{}).output()); a.said != tc.said {
			t.Errorf("%d %s %q: said %v, want %v (%v)", tc.code, tc.media, tc.body, a.said, tc.said, err)
		}
	}
}

func TestCancelledBeforeItIsSent(t *testing.T) {
	t.Parallel()
	h := serve(t, func(http.ResponseWriter, *http.Request) { t.Error("it was sent") })
	ctx, cancel := context.WithCancelCause(t.Context())
	cancel(claims.ErrLeaseLost)
	if _, err := h.Step(ctx, request(), (&recorder{}).output()); !errors.Is(err, claims.ErrLeaseLost) {
		t.Errorf("Step = %v", err)
	}
}

// TestI7KilledClosesTheRequest: also without a cancellation before it.
func TestI7KilledClosesTheRequest(t *testing.T) {
	t.Parallel()
	for _, part := range []string{"", "one\n"} {
		s := newHeld()
		h := serve(t, s.answers(streamed, part))
		killed := make(chan struct{})
		req := request()
		req.Killed = killed
		done := inBackground(t.Context(), h, req, &recorder{})
		await(t, s.there, "the request")
		close(killed)
		if a := await(t, done, "the step"); !errors.Is(a.err, errKilled) {
			t.Errorf("Step = %v", a.err)
		}
		await(t, s.closed, "the end of the request")
	}
}

// TestI10BlockedOutputDoesNotKeepTheRequest: the request is closed while the
// log takes nothing, and Step returns when the log has answered.
func TestI10BlockedOutputDoesNotKeepTheRequest(t *testing.T) {
	t.Parallel()
	for _, http2 := range []bool{false, true} {
		s := newHeld()
		h, _ := serveTLS(t, http2, s.answers(streamed, "one\n"))
		ctx, cancel := context.WithCancelCause(t.Context())
		blocked, release := make(chan struct{}), make(chan struct{})
		r := &recorder{fail: func(claims.Content) error {
			close(blocked)
			orPatience(release)
			return context.Cause(ctx)
		}}
		done := inBackground(ctx, h, request(), r)
		await(t, blocked, "the output")
		cancel(claims.ErrInterrupted)
		await(t, s.closed, "the end of the request")
		select {
		case a := <-done:
			t.Errorf("Step returned %v while its output was blocked", a.err)
		default:
		}
		close(release)
		if a := await(t, done, "the step"); !errors.Is(a.err, claims.ErrInterrupted) {
			t.Errorf("Step = %v", a.err)
		}
	}
}

// TestHTTP2StreamIsReset: an interruption costs its stream, not its connection.
func TestHTTP2StreamIsReset(t *testing.T) {
	t.Parallel()
	var connections atomic.Int32
	s := newHeld()
	h, _ := serveTLS(t, true, s.answers(streamed, "one\n"))
	dial := h.transport.DialContext
	h.transport.DialContext = func(ctx context.Context, network, address string) (net.Conn, error) {
		connections.Add(1)
		return dial(ctx, network, address)
	}
	for range 10 {
		ctx, cancel := context.WithCancelCause(t.Context())
		r, said := signalled()
		done := inBackground(ctx, h, request(), r)
		await(t, said, "a line")
		cancel(claims.ErrInterrupted)
		await(t, done, "the step")
		await(t, s.closed, "the end of the request")
	}
	if connections.Load() != 1 {
		t.Errorf("%d connections, want 1", connections.Load())
	}
}

// TestUnreadRequest: a server that reads no request and says nothing is waited
// for until the step must stop.
func TestUnreadRequest(t *testing.T) {
	t.Parallel()
	there, over, gone := make(chan struct{}, 1), make(chan struct{}), make(chan struct{}, 1)
	h := serveRaw(t, func(_ net.Conn, in *bufio.Reader) {
		if _, err := http.ReadRequest(in); err != nil {
			t.Error(err)
		}
		there <- struct{}{}
		orPatience(over)
		awaitClosed(t, in)
		gone <- struct{}{}
	})
	ctx, cancel := context.WithCancelCause(t.Context())
	done := inBackground(ctx, h, largeRequest(), &recorder{})
	await(t, there, "the header of the request")
	cancel(claims.ErrInterrupted)
	if a := await(t, done, "the step"); !errors.Is(a.err, claims.ErrInterrupted) {
		t.Errorf("Step = %v", a.err)
	}
	close(over)
	await(t, gone, "the end of the connection")
}

// TestDeclined: the request is closed at once, and nothing after it counts.
func TestDeclined(t *testing.T) {
	t.Parallel()
	s := newHeld()
	h := serve(t, s.answers(streamed, "one\n"+`{"type":"declined","reason":"no"}`+"\ntwo\n"+`{"type":"ended","result":1}`+"\n"))
	r := &recorder{}
	result, err := step(t, h, r)
	if err != nil || result.Value != nil || r.text() != "one\n" || len(r.reasons) != 1 || r.reasons[0] != "no" {
		t.Errorf("%s, %v with text %q and reasons %q", result.Value, err, r.text(), r.reasons)
	}
	await(t, s.closed, "the end of the request")

	// Where it can't be made durable the error is the step's, and the request is closed too.
	r = &recorder{refuse: claims.ErrFenced}
	if _, err := step(t, h, r); !errors.Is(err, claims.ErrFenced) {
		t.Errorf("Step = %v", err)
	}
	await(t, s.closed, "the end of the request")
}

// TestOutputFails: what can't be recorded ends the request.
func TestOutputFails(t *testing.T) {
	t.Parallel()
	s := newHeld()
	h := serve(t, s.answers(streamed, "one\ntwo\n"))
	r := &recorder{fail: func(c claims.Content) error {
		if c.Data.(claims.TextData).Text == "two\n" {
			return claims.ErrTooLarge
		}
		return nil
	}}
	if _, err := step(t, h, r); !errors.Is(err, claims.ErrTooLarge) || r.text() != "one\n" {
		t.Errorf("Step = %v with text %q", err, r.text())
	}
	await(t, s.closed, "the end of the request")
}

package http

import (
	"bufio"
	"bytes"
	"context"
	"io"
	"log"
	"net"
	"net/http"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"reveille/claims"
	"reveille/runner"
	"reveille/runner/lines"
)

// silent is the log of a server whose clients break off.
var silent = log.New(io.Discard, "", 0)

// answers is a server with one answer.
func answers(code int, body string, header ...string) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		_, _ = io.Copy(io.Discard, r.Body)
		for i := 0; i < len(header); i += 2 {
			w.Header()[header[i]] = []string{header[i+1]}
		}
		w.WriteHeader(code)
		_, _ = io.WriteString(w, body)
	}
}

func TestStream(t *testing.T) {
	t.Parallel()
	const body = "plain\n" +
		`{"type":"text","text":"a"}` + "\n" +
		`{"type":"tool.called","call":"c1","name":"ls","input":{"path":"."}}` + "\r\n" +
		`{"type":"tool.succeeded","call":"c1","output":["x"]}` + "\n" +
		`{"type":"tool.failed","call":"c2","error":"no"}` + "\n" +
		"a\xffb\x00\n" +
		`{"type":"ended","result":1}` + "\n" +
		`{"type":"ended","result":{"n":2},"continue":true}` + "\n" +
		"last"
	const want = `text {"text":"plain\n"}
text {"text":"a"}
tool.called {"call":"c1","name":"ls","input":{"path":"."}}
tool.succeeded {"call":"c1","output":["x"]}
tool.failed {"call":"c2","error":"no"}
text {"text":"a` + "\uFFFD" + `b\u0000\n"}
text {"text":"last"}
`
	for _, media := range []string{"application/x-ndjson", "Application/X-NDJSON; charset=utf-8", "application/x-ndjson; bad parameter"} {
		h := serve(t, answers(http.StatusOK, body, "Content-Type", media))
		r := &recorder{}
		result, err := step(t, h, r)
		if err != nil || string(result.Value) != `{"n":2}` || !result.Continue || r.events() != want {
			t.Errorf("%s: %s, continue %v, %v, events\n%swant\n%s", media, result.Value, result.Continue, err, r.events(), want)
		}
	}
	for body, text := range map[string]string{"": "", "only text": "only text", "\n": "\n"} {
		h := serve(t, answers(http.StatusAccepted, body, "Content-Type", streamed))
		r := &recorder{}
		if result, err := step(t, h, r); err != nil || result.Value != nil || result.Continue || r.text() != text {
			t.Errorf("%q: %s, %v, text %q", body, result.Value, err, r.text())
		}
	}
}

// TestStreamAsItComes: a server's line is put out before its next, a line
// without an end too, and one that comes byte by byte is one.
func TestStreamAsItComes(t *testing.T) {
	t.Parallel()
	r, said := signalled()
	h := serve(t, func(w http.ResponseWriter, req *http.Request) {
		_, _ = io.Copy(io.Discard, req.Body)
		w.Header().Set("Content-Type", streamed)
		for _, part := range []string{"one\n", "two ", "three\n"} {
			_, _ = io.WriteString(w, part)
			flush(w)
			select {
			case c := <-said:
				if c.Data != (claims.TextData{Text: part}) {
					t.Errorf("put out %v, want %q", c.Data, part)
				}
			case <-req.Context().Done():
				t.Errorf("waited in vain for %q", part)
				return
			}
		}
		for _, b := range []byte(`{"type":"tool.called","call":"c","name":"n"}` + "\n" + `{"type":"ended","result":"ok"}`) {
			_, _ = w.Write([]byte{b})
			flush(w)
		}
	})
	result, err := step(t, h, r)
	if err != nil || string(result.Value) != `"ok"` || !strings.HasSuffix(r.events(), "tool.called {\"call\":\"c\",\"name\":\"n\",\"input\":null}\n") {
		t.Errorf("%s, %v, events\n%s", result.Value, err, r.events())
	}
}

func TestDocument(t *testing.T) {
	t.Parallel()
	limit := `"` + strings.Repeat("x", DefaultMaxBodyBytes-2) + `"`
	for _, tc := range []struct{ body, result, failure string }{
		{`{"a":[1,2,null]}`, `{"a":[1,2,null]}`, ""},
		{" [ 1 ]\n", `[1]`, ""},
		{`{"type":"ended","result":1}`, `{"type":"ended","result":1}`, ""}, // it is the result, not a line
		{`null`, `null`, ""},
		{`7`, `7`, ""},
		{"\"a\xff\"", "\"a\uFFFD\"", ""},
		{`"\u0000"`, `"\u0000"`, ""},
		{``, ``, ""},
		{" \n", ``, ""},
		{limit, limit, ""},
		{limit + " ", ``, "longer than 1048576 bytes"},
		{`{"a":1} {"a":2}`, ``, "not one JSON document: invalid character '{' after top-level value"},
		{`{"a":`, ``, "unexpected end of JSON input"},
		{`hello`, ``, "not one JSON document"},
		{"\"a\x00b\"", ``, "not one JSON document: invalid character"},
		{strings.Repeat("[", 2000) + strings.Repeat("]", 2000), ``, "nested deeper"},
	} {
		h := serve(t, answers(http.StatusOK, tc.body, "Content-Type", "application/json; charset=utf-8"))
		r := &recorder{}
		result, err := step(t, h, r)
		if tc.failure == "" {
			if err != nil || string(result.Value) != tc.result || result.Continue || len(r.content) != 0 {
				t.Errorf("%.100q: %.100s, %v, events %.100s", tc.body, result.Value, err, r.events())
			}
			continue
		}
		if f := failure(t, err); f.Retryable || !strings.Contains(f.Message, tc.failure) {
			t.Errorf("%.100q: %+v, want a final failure with %q", tc.body, f, tc.failure)
		}
	}
}

func TestNoBody(t *testing.T) {
	t.Parallel()
	for _, f := range []http.HandlerFunc{
		answers(http.StatusNoContent, "", "Content-Type", "text/plain"),
		answers(http.StatusOK, "", "Content-Type", streamed),
		answers(http.StatusOK, "", "Content-Type", single),
		answers(http.StatusOK, ""),
		answers(http.StatusResetContent, ""),
		func(w http.ResponseWriter, _ *http.Request) { flush(w) }, // chunked
		func(w http.ResponseWriter, _ *http.Request) {
			w.Header().Set("Content-Type", streamed)
			flush(w)
		},
	} {
		for _, http2 := range []bool{false, true} {
			h, _ := serveTLS(t, http2, f)
			r := &recorder{}
			if result, err := step(t, h, r); err != nil || result.Value != nil || result.Continue || len(r.content) != 0 {
				t.Errorf("%+v, %v, events %s", result, err, r.events())
			}
		}
	}
}

func TestFailures(t *testing.T) {
	t.Parallel()
	for name, tc := range map[string]struct {
		f         http.HandlerFunc
		message   string
		retryable bool
		after     time.Duration
	}{
		"500":              {answers(500, "boom\n"), "handler answered 500 Internal Server Error: boom", false, 0},
		"404 without body": {answers(404, ""), "handler answered 404 Not Found", false, 0},
		"400 of odd bytes": {answers(400, "\xff\xfe\n\n"), "handler answered 400 Bad Request: \uFFFD", false, 0},
		"599":              {answers(599, "x"), "handler answered status 599: x", false, 0},
		"502":              {answers(502, "x", "Retry-After", "9"), "handler answered 502 Bad Gateway: x", false, 0},
		"304":              {answers(304, ""), "handler answered 304 Not Modified", false, 0},
		"429":              {answers(429, "slow down"), "handler answered 429 Too Many Requests: slow down", true, 0},
		"429, later":       {answers(429, "", "Retry-After", "7"), "handler answered 429 Too Many Requests", true, 7 * time.Second},
		"503": {
			answers(503, `{"type":"ended"}`, "Content-Type", streamed, "Retry-After", "120"),
			`handler answered 503 Service Unavailable: {"type":"ended"}`, true, 2 * time.Minute,
		},
		"503 at a date": {
			answers(503, "", "Date", "Sun, 06 Nov 1994 08:49:07 GMT", "Retry-After", "Sun, 06 Nov 1994 08:49:37 GMT"),
			"handler answered 503 Service Unavailable", true, 30 * time.Second,
		},
		"long": {answers(500, strings.Repeat("é", 1<<20)), "handler answered 500 Internal Server Error: " + strings.Repeat("é", messageBytes/2), false, 0},
		"HTML": {
			answers(200, "<p>hi", "Content-Type", "text/html; charset=utf-8"),
			`answer has content type "text/html; charset=utf-8", want application/x-ndjson or application/json: <p>hi`, false, 0,
		},
		"no type": {
			func(w http.ResponseWriter, _ *http.Request) {
				w.Header()["Content-Type"] = nil
				_, _ = io.WriteString(w, "7")
			}, `answer has content type "", want application/x-ndjson or application/json: 7`, false, 0,
		},
		"no type at all": {
			answers(200, "7", "Content-Type", "json"),
			`answer has content type "json", want application/x-ndjson or application/json: 7`, false, 0,
		},
		"encoded": {
			answers(200, "x", "Content-Type", single, "Content-Encoding", "gzip"),
			`answer has content encoding "gzip", which was not asked for: send it without`, false, 0,
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			r := &recorder{}
			_, err := step(t, serve(t, tc.f), r)
			if f := failure(t, err); f.Message != tc.message || f.Retryable != tc.retryable || f.After != tc.after {
				t.Errorf("%+v, want %+v", f, tc)
			}
			if len(r.content) != 0 {
				t.Errorf("events %s", r.events())
			}
		})
	}
}

func TestRetryAfter(t *testing.T) {
	t.Parallel()
	now := time.Date(1994, 11, 6, 8, 49, 7, 0, time.UTC)
	const date = "Sun, 06 Nov 1994 08:49:07 GMT"
	for _, tc := range []struct {
		value, date string
		want        time.Duration
	}{
		{"", "", 0},
		{"0", "", 0},
		{" 90 ", "", 90 * time.Second},
		{"007", "", 7 * time.Second},
		{"3600", "", time.Hour},
		{"3601", "", time.Hour},
		{"99999999999999999999999999", "", time.Hour},
		{"-1", "", 0},
		{"1.5", "", 0},
		{"+3", "", 0},
		{"soon", "", 0},
		{"Sun, 06 Nov 1994 08:49:37 GMT", "", 30 * time.Second},
		{"Sunday, 06-Nov-94 08:49:37 GMT", "", 30 * time.Second},
		{"Sun Nov  6 08:49:37 1994", "", 30 * time.Second},
		{"Sun, 06 Nov 1994 08:49:00 GMT", "", 0},
		{"Thu, 31 Dec 9999 23:59:59 GMT", "", time.Hour},
		{"Mon, 01 Jan 0001 00:00:00 GMT", "", 0},
		{"Sun, 06 Nov 1994 09:00:37 GMT", "Sun, 06 Nov 1994 09:00:07 GMT", 30 * time.Second}, // its clock is ahead of ours
		{"Sun, 06 Nov 1994 08:00:37 GMT", "Sun, 06 Nov 1994 08:00:07 GMT", 30 * time.Second}, // or behind
		{"Sun, 06 Nov 1994 08:49:37 GMT", "yesterday", 30 * time.Second},
		{"5", date, 5 * time.Second},
	} {
		header := http.Header{}
		header.Set("Retry-After", tc.value)
		header.Set("Date", tc.date)
		if got := retryAfter(header, now); got != tc.want {
			t.Errorf("%q at %q: %v, want %v", tc.value, tc.date, got, tc.want)
		}
	}
}

// TestCutOff: what may not be all of an answer is not taken for it.
func TestCutOff(t *testing.T) {
	t.Parallel()
	const (
		ok     = "HTTP/1.1 200 OK\r\n"
		stream = ok + "Content-Type: application/x-ndjson\r\n"
		doc    = ok + "Content-Type: application/json\r\n"
		chunks = "Transfer-Encoding: chunked\r\n\r\n"
		ended  = `{"type":"ended","result":7}`
	)
	old := func(s string) string { return strings.Replace(s, "HTTP/1.1", "HTTP/1.0", 1) + "\r\n" }
	for _, tc := range []struct {
		answer, text, result, failure string
		final                         bool
	}{
		{answer: stream + chunks + "4\r\none\n\r\n", text: "one\n", failure: "answer was cut off: unexpected EOF"},
		{answer: stream + chunks + "4\r\non", text: "on", failure: "answer was cut off: unexpected EOF"},
		{answer: stream + chunks + "x\r\n", failure: "answer was cut off: invalid byte in chunk length"},
		{answer: stream + "Content-Length: 100\r\n\r\none\n", text: "one\n", failure: "answer was cut off: unexpected EOF"},
		{answer: old(stream) + "one\n", text: "one\n", failure: "answer may be cut off"},
		{answer: old(stream), failure: "answer may be cut off"},
		// An ended line is an end.
		{answer: stream + chunks + "1c\r\n" + ended + "\n\r\n", result: "7"},
		{answer: stream + "Content-Length: 100\r\n\r\n" + ended + "\nmore\n", text: "more\n", result: "7"},
		{answer: old(stream) + "one\n" + ended, text: "one\n", result: "7"},
		{answer: doc + chunks + "1\r\n7\r\n", failure: "answer was cut off: unexpected EOF"},
		{answer: doc + "Content-Length: 3\r\n\r\n[1", failure: "answer was cut off: unexpected EOF"},
		{answer: doc + "Content-Length: 2\r\n\r\n12345", result: "12"},
		// A document that says itself where it ends.
		{answer: old(doc) + "[1]\n", result: "[1]"},
		{answer: old(doc) + `{"a":1}`, result: `{"a":1}`},
		{answer: old(doc) + `"7"`, result: `"7"`},
		{answer: old(doc) + "null", result: "null"},
		{answer: old(doc) + "12", failure: "answer may be cut off"},
		{answer: old(doc), failure: "answer may be cut off"},
		{answer: old(doc) + `{"a":`, failure: "unexpected end of JSON input"},
		{answer: old(ok), failure: `answer has content type ""`, final: true},
		{answer: old(ok + "Content-Length: 0\r\n"), result: ""},
		{answer: old("HTTP/1.1 204 No Content\r\n"), result: ""},
	} {
		r := &recorder{}
		result, err := step(t, serveRaw(t, says(tc.answer)), r)
		if r.text() != tc.text {
			t.Errorf("%q: text %q, want %q", tc.answer, r.text(), tc.text)
		}
		if tc.failure == "" {
			if err != nil || string(result.Value) != tc.result {
				t.Errorf("%q: %s, %v, want %s", tc.answer, result.Value, err, tc.result)
			}
			continue
		}
		if f := failure(t, err); f.Retryable == tc.final || !strings.Contains(f.Message, tc.failure) {
			t.Errorf("%q: %+v, want %q", tc.answer, f, tc.failure)
		}
	}
}

// TestHTTP2CutOff: a stream that its server aborts.
func TestHTTP2CutOff(t *testing.T) {
	t.Parallel()
	for body, ends := range map[string]bool{"one\n": false, "one\n" + `{"type":"ended","result":7}` + "\n": true} {
		r, said := signalled()
		h, _ := serveTLS(t, true, func(w http.ResponseWriter, req *http.Request) {
			w.Header().Set("Content-Type", streamed)
			_, _ = io.WriteString(w, body)
			flush(w)
			select { // a reset overtakes what is on its way
			case <-said:
			case <-req.Context().Done():
			}
			panic(http.ErrAbortHandler)
		})
		result, err := step(t, h, r)
		if ends {
			if err != nil || string(result.Value) != "7" {
				t.Errorf("%s, %v, want 7", result.Value, err)
			}
			continue
		}
		if f := failure(t, err); !f.Retryable || !strings.Contains(f.Message, "cut off") {
			t.Errorf("%+v, want a retryable failure", f)
		}
	}
}

// TestInformationalAnswers: 1xx are no answer, but for 101, which is none that we asked for.
func TestInformationalAnswers(t *testing.T) {
	t.Parallel()
	h := serve(t, func(w http.ResponseWriter, r *http.Request) {
		for _, code := range []int{http.StatusProcessing, http.StatusEarlyHints, http.StatusContinue} {
			w.WriteHeader(code)
		}
		answers(http.StatusOK, "7", "Content-Type", single)(w, r)
	})
	if result, err := step(t, h, &recorder{}); err != nil || string(result.Value) != "7" {
		t.Errorf("%s, %v", result.Value, err)
	}
	gone := make(chan struct{}, 1)
	h = serveRaw(t, func(conn net.Conn, in *bufio.Reader) {
		readRequest(in)
		_, _ = io.WriteString(conn, "HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: x\r\n\r\n")
		awaitClosed(t, in)
		gone <- struct{}{}
	})
	_, err := step(t, h, &recorder{})
	if f := failure(t, err); f.Retryable || f.Message != "handler answered 101 Switching Protocols" {
		t.Errorf("%+v", f)
	}
	await(t, gone, "the end of the connection")
}

// TestAnswerBeforeTheRequestIsRead: it is the answer, and the rest of the request is not waited for.
func TestAnswerBeforeTheRequestIsRead(t *testing.T) {
	t.Parallel()
	for answer, want := range map[string]string{
		"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 1\r\n\r\n7":                                  "",
		"HTTP/1.1 200 OK\r\nContent-Type: application/x-ndjson\r\n\r\n" + `{"type":"ended","result":7}` + "\n":             "",
		"HTTP/1.1 413 Too Large\r\nContent-Length: 8\r\n\r\ntoo much":                                                      "handler answered 413 Request Entity Too Large: too much",
		"HTTP/1.1 200 OK\r\nContent-Type: application/x-ndjson\r\n\r\n" + `{"type":"declined","reason":"no"}` + "\nmore\n": "-",
	} {
		over, gone := make(chan struct{}), make(chan struct{}, 1)
		h := serveRaw(t, func(conn net.Conn, in *bufio.Reader) {
			if _, err := http.ReadRequest(in); err != nil {
				t.Error(err)
			}
			_, _ = io.WriteString(conn, answer)
			if strings.Contains(answer, "ended") {
				if c, ok := conn.(*net.TCPConn); ok {
					_ = c.CloseWrite()
				}
			}
			orPatience(over)
			awaitClosed(t, in)
			gone <- struct{}{}
		})
		r := &recorder{}
		a := await(t, inBackground(t.Context(), h, largeRequest(), r), "the step")
		close(over)
		switch want {
		case "":
			if a.err != nil || string(a.result.Value) != "7" {
				t.Errorf("%q: %s, %v", answer, a.result.Value, a.err)
			}
		case "-":
			if a.err != nil || a.result.Value != nil || len(r.reasons) != 1 {
				t.Errorf("%q: %s, %v, reasons %q", answer, a.result.Value, a.err, r.reasons)
			}
		default:
			if f := failure(t, a.err); f.Message != want {
				t.Errorf("%q: %+v", answer, f)
			}
		}
		h.Close()
		await(t, gone, "the end of the connection")
	}
}

// TestLongLines: a line that is too long to be an object is text, in pieces,
// and so is a stream without a newline.
func TestLongLines(t *testing.T) {
	t.Parallel()
	const piece = 16 << 10
	for _, tc := range []struct {
		first, last, result string
		bytes               int
	}{
		{`{"type":"text","text":"`, "\"}\n" + `{"type":"ended","result":7}`, "7", 10 << 20},
		{"", "", "", 64 << 20},
	} {
		h := serve(t, func(w http.ResponseWriter, r *http.Request) {
			_, _ = io.Copy(io.Discard, r.Body)
			w.Header().Set("Content-Type", streamed)
			_, _ = io.WriteString(w, tc.first)
			part := bytes.Repeat([]byte("é"), piece/2)
			for range tc.bytes / piece {
				_, _ = w.Write(part)
			}
			_, _ = io.WriteString(w, tc.last)
		})
		var text, longest int
		broken := false
		out := runner.NewOutput(func(c claims.Content) error {
			d := c.Data.(claims.TextData).Text
			text, longest, broken = text+len(d), max(longest, len(d)), broken || strings.ContainsRune(d, '\uFFFD')
			return nil
		}, nil)
		result, err := h.Step(t.Context(), request(), out)
		want := tc.bytes
		if tc.first != "" {
			want += len(tc.first) + len("\"}\n")
		}
		if err != nil || string(result.Value) != tc.result || text != want || longest > lines.DefaultMax || broken {
			t.Errorf("%s, %v: %d bytes of text in pieces of up to %d, broken %v; want %d and a result of %q", result.Value, err, text, longest, broken, want, tc.result)
		}
	}
}

// TestBlockedOutputBlocksTheServer: what the log does not take stays with the
// server, but for what is on its way.
func TestBlockedOutputBlocksTheServer(t *testing.T) {
	t.Parallel()
	for _, tc := range []struct {
		http2 bool
		limit int64 // HTTP/1 fills the buffers of two sockets
	}{{false, 64 << 20}, {true, 1 << 20}} {
		blocked, release := make(chan struct{}), make(chan struct{})
		failed := make(chan error, 1)
		var sent atomic.Int64
		h, _ := serveTLS(t, tc.http2, func(w http.ResponseWriter, r *http.Request) {
			_, _ = io.Copy(io.Discard, r.Body)
			w.Header().Set("Content-Type", streamed)
			_, _ = io.WriteString(w, "one\n")
			flush(w)
			orPatience(blocked)
			// Whoever reads takes all of it in that time, or as much as is too much.
			err := http.NewResponseController(w).SetWriteDeadline(time.Now().Add(time.Second))
			for line := bytes.Repeat([]byte("x"), 16<<10); err == nil && sent.Load() < 4*tc.limit; {
				var n int
				n, err = w.Write(line)
				sent.Add(int64(n))
			}
			failed <- err
		})
		var once sync.Once
		done := inBackground(t.Context(), h, request(), &recorder{fail: func(claims.Content) error {
			once.Do(func() {
				close(blocked)
				orPatience(release)
			})
			return nil
		}})
		if err := await(t, failed, "the server's end"); err == nil || sent.Load() > tc.limit {
			t.Errorf("HTTP/2 %v: the server sent %d bytes to a step whose output is blocked, with error %v; want %d at most and an error", tc.http2, sent.Load(), err, tc.limit)
		}
		close(release)
		if f := failure(t, await(t, done, "the step").err); !f.Retryable {
			t.Errorf("%+v, want a retryable failure", f)
		}
	}
}

// pipes is a network in memory.
type pipes chan net.Conn

func (p pipes) Accept() (net.Conn, error) {
	conn, ok := <-p
	if !ok {
		return nil, net.ErrClosed
	}
	return conn, nil
}
func (p pipes) Close() error   { return nil }
func (p pipes) Addr() net.Addr { return &net.TCPAddr{} }

// inMemory runs a test with a clock and a network of its own, and counts the
// connections.
func inMemory(t *testing.T, f http.HandlerFunc, test func(t *testing.T, h *Handler, connections *atomic.Int32)) {
	synctest.Test(t, func(t *testing.T) {
		network := make(pipes)
		s := &http.Server{Handler: f}
		served := make(chan error)
		go func() { served <- s.Serve(network) }()
		h, err := New(Options{URL: "http://steps.example/"})
		if err != nil {
			t.Fatal(err)
		}
		var connections atomic.Int32
		h.transport.DialContext = func(context.Context, string, string) (net.Conn, error) {
			connections.Add(1)
			here, there := net.Pipe()
			network <- there
			return here, nil
		}
		test(t, h, &connections)
		h.Close()
		close(network)
		<-served
		if err := s.Close(); err != nil {
			t.Error(err)
		}
	})
}

// TestSlowRefusal: the body of a refusal is waited for, not for ever.
func TestSlowRefusal(t *testing.T) {
	t.Parallel()
	for message, f := range map[string]func(w http.ResponseWriter, r *http.Request){
		"handler answered 500 Internal Server Error: half": func(w http.ResponseWriter, r *http.Request) {
			w.WriteHeader(http.StatusInternalServerError)
			_, _ = io.WriteString(w, "half")
			flush(w)
			<-r.Context().Done()
		},
		`answer has content type "text/plain", want application/x-ndjson or application/json`: func(w http.ResponseWriter, r *http.Request) {
			w.Header().Set("Content-Type", "text/plain")
			flush(w)
			<-r.Context().Done()
		},
	} {
		inMemory(t, f, func(t *testing.T, h *Handler, _ *atomic.Int32) {
			began := time.Now()
			_, err := h.Step(t.Context(), request(), (&recorder{}).output())
			if f := failure(t, err); f.Message != message || f.Retryable {
				t.Errorf("%+v, want %q", f, message)
			}
			if waited := time.Since(began); waited != messageWait {
				t.Errorf("waited %v, want %v", waited, messageWait)
			}
		})
	}
}

// TestIdleConnectionsAreClosed: before the server does it under a request.
func TestIdleConnectionsAreClosed(t *testing.T) {
	t.Parallel()
	inMemory(t, answers(http.StatusOK, "7", "Content-Type", single), func(t *testing.T, h *Handler, connections *atomic.Int32) {
		for i, pause := range []time.Duration{0, idleTimeout / 2, idleTimeout + 1, idleTimeout / 2} {
			time.Sleep(pause) // of the test's own clock
			synctest.Wait()
			if _, err := h.Step(t.Context(), request(), (&recorder{}).output()); err != nil {
				t.Fatal(err)
			}
			if want := int32(1 + i/2); connections.Load() != want {
				t.Errorf("%d connections at step %d, want %d", connections.Load(), i, want)
			}
		}
	})
}

// TestEndlessAnswers: what is too much is not read on.
func TestEndlessAnswers(t *testing.T) {
	t.Parallel()
	for want, tc := range map[string]struct {
		code  int
		media string
	}{
		"longer than 1048576 bytes":                           {http.StatusOK, single},
		`content type "text/html"`:                            {http.StatusOK, "text/html"},
		"handler answered 500 Internal Server Error: xxxxxxx": {http.StatusInternalServerError, single},
	} {
		gone := make(chan struct{})
		h := serve(t, func(w http.ResponseWriter, r *http.Request) {
			defer close(gone)
			_, _ = io.Copy(io.Discard, r.Body)
			w.Header().Set("Content-Type", tc.media)
			w.WriteHeader(tc.code)
			part := bytes.Repeat([]byte("x"), 16<<10)
			for sent := 0; sent < 1<<30; sent += len(part) {
				if _, err := w.Write(part); err != nil {
					return
				}
			}
			t.Errorf("%s: all of it was read", want)
		})
		_, err := step(t, h, &recorder{})
		if f := failure(t, err); f.Retryable || !strings.Contains(f.Message, want) || len(f.Message) > messageBytes+200 {
			t.Errorf("%.200s…, want %q", f.Message, want)
		}
		await(t, gone, "the server's end")
	}
}

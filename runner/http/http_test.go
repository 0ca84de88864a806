package http

import (
	"bufio"
	"context"
	"crypto/tls"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync/atomic"
	"testing"

	"reveille/claims"
	"reveille/runner"
)

func TestOptions(t *testing.T) {
	t.Parallel()
	for raw, want := range map[string]string{
		"":                                "scheme",
		"127.0.0.1:8080/step":             "not a URL",
		"localhost:8080/step":             "scheme",
		"ftp://host/step":                 `scheme "ftp"`,
		"http:///step":                    "without a host",
		"http://:80/step":                 "without a host",
		"http:step":                       "without a host",
		"http://host:0/":                  "port 0",
		"http://host:65536/":              "port 65536",
		"http://host:http/":               "not a URL",
		"http://host/\x00":                "not a URL",
		"http://host/#here":               "fragment",
		"http://u:secret@host:65536/":     "port",
		"http://u:secret@ho st/":          "not a URL",
		"http://u:secret@host/%zz?secret": "not a URL",
	} {
		_, err := New(Options{URL: raw})
		if err == nil || !strings.Contains(err.Error(), want) || strings.Contains(err.Error(), "secret") || strings.Contains(err.Error(), "\n") {
			t.Errorf("%q: %v, want one line with %q", raw, err, want)
		}
	}
	for _, raw := range []string{"http://host", "HTTPS://host:1/step?x=y", "http://u:secret@[::1]:8080/step"} {
		h, err := New(Options{URL: raw})
		if err != nil {
			t.Errorf("%q: %v", raw, err)
			continue
		}
		h.Close()
	}
	for _, o := range []Options{{URL: "http://host", MaxLineBytes: 63}, {URL: "http://host", MaxBodyBytes: -1}} {
		if _, err := New(o); err == nil {
			t.Errorf("%+v is taken", o)
		}
	}
}

func TestRequest(t *testing.T) {
	t.Parallel()
	type got struct {
		method, path, body string
		header             http.Header
	}
	requests := make(chan got, 10)
	s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		body, err := io.ReadAll(r.Body)
		if err != nil {
			t.Errorf("request: %v", err)
		}
		requests <- got{r.Method, r.RequestURI, string(body), r.Header}
	}))
	defer s.Close()
	h := newHandler(t, Options{URL: strings.Replace(s.URL, "http://", "http://user:pass%20word@", 1) + "/step?a=b"})
	req := request()
	req.Trace = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
	req.Continues = &claims.Continues{Kind: claims.KindRetry, Step: "s", Attempt: 2}
	req.History = []claims.ClosedStep{{Step: "s", Status: claims.StepFailed}}
	if _, err := h.Step(t.Context(), req, (&recorder{}).output()); err != nil {
		t.Fatal(err)
	}
	r := await(t, requests, "the request")
	want, err := claims.Marshal(req)
	if err != nil {
		t.Fatal(err)
	}
	if r.method != "POST" || r.path != "/step?a=b" || r.body != string(want) {
		t.Errorf("%s %s\n%s\nwant POST /step?a=b\n%s", r.method, r.path, r.body, want)
	}
	for name, want := range map[string]string{
		"Content-Type": "application/json", "Accept": "application/x-ndjson, application/json",
		"Rv-Session": "ses_1", "Rv-Epoch": "3", "Rv-Execution": string(req.Execution), "Rv-Step": string(req.Step),
		"Traceparent": req.Trace, "Authorization": "Basic dXNlcjpwYXNzIHdvcmQ=", "Content-Length": fmt.Sprint(len(want)),
		"Accept-Encoding": "", "Idempotency-Key": "", "X-Idempotency-Key": "",
	} {
		if got := r.header.Get(name); got != want {
			t.Errorf("%s is %q, want %q", name, got, want)
		}
	}

	req = runner.Request{Session: "s"}
	if _, err := newHandler(t, Options{URL: s.URL}).Step(t.Context(), req, (&recorder{}).output()); err != nil {
		t.Fatal(err)
	}
	r = await(t, requests, "the request")
	for _, name := range []string{"Traceparent", "Authorization"} {
		if v, ok := r.header[name]; ok {
			t.Errorf("%s is %q where there is none", name, v)
		}
	}
	if !strings.Contains(r.body, `"inputs":[],"continues":null,"history":[]`) {
		t.Errorf("empty lists in %s", r.body)
	}
}

// TestNoProxy: the environment of the tests names a proxy.
func TestNoProxy(t *testing.T) {
	t.Parallel()
	for url, want := range map[string]string{"http://steps.example/": "steps.example:80", "https://steps.example/": "steps.example:443"} {
		h := newHandler(t, Options{URL: url})
		var dialled string
		h.transport.DialContext = func(_ context.Context, _, address string) (net.Conn, error) {
			dialled = address
			return nil, errors.New("no network here")
		}
		if _, err := step(t, h, &recorder{}); err == nil || dialled != want {
			t.Errorf("dialled %q with error %v, want %s", dialled, err, want)
		}
	}
}

func TestNoAnswer(t *testing.T) {
	t.Parallel()
	plain := httptest.NewServer(http.NotFoundHandler())
	defer plain.Close()
	secret := httptest.NewTLSServer(http.NotFoundHandler()) // of an authority that the system does not know
	defer secret.Close()
	secret.Config.ErrorLog = silent
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	if err := l.Close(); err != nil {
		t.Fatal(err)
	}
	unknown := newHandler(t, Options{URL: "http://steps.example/"})
	unknown.transport.DialContext = func(context.Context, string, string) (net.Conn, error) {
		return nil, &net.DNSError{Err: "no such host", Name: "steps.example", IsNotFound: true}
	}
	for name, tc := range map[string]struct {
		h    *Handler
		want string
	}{
		"refused":        {newHandler(t, Options{URL: "http://" + l.Addr().String() + "/step?secret"}), "connection refused"},
		"unknown host":   {unknown, "no such host"},
		"authority":      {newHandler(t, Options{URL: secret.URL}), "certificate"},
		"TLS to no TLS":  {newHandler(t, Options{URL: strings.Replace(plain.URL, "http:", "https:", 1)}), "not look like a TLS handshake"},
		"cut":            {serveRaw(t, func(_ net.Conn, in *bufio.Reader) { readRequest(in) }), "EOF"},
		"cut in header":  {serveRaw(t, says("HTTP/1.1 200 OK\r\nContent-Ty")), "connection broken"},
		"no HTTP":        {serveRaw(t, says("hello\r\n\r\n")), "malformed HTTP"},
		"too much of it": {serveRaw(t, says("HTTP/1.1 200 OK\r\nX: "+strings.Repeat("x", 2*maxHeaderBytes)+"\r\n\r\n")), "header"},
		"two lengths":    {serveRaw(t, says("HTTP/1.1 200 OK\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\n12")), "Content-Length"},
	} {
		t.Run(name, func(t *testing.T) {
			r := &recorder{}
			_, err := step(t, tc.h, r)
			f := failure(t, err)
			if !f.Retryable || !strings.HasPrefix(f.Message, "no answer from the handler: ") || !strings.Contains(f.Message, tc.want) || strings.Contains(f.Message, "secret") {
				t.Errorf("%+v, want a retryable failure with %q", f, tc.want)
			}
			if len(r.content) != 0 {
				t.Errorf("output %v", r.content)
			}
		})
	}
}

// says is a raw server that reads the request, answers with bytes, and closes.
func says(answer string) func(net.Conn, *bufio.Reader) {
	return func(conn net.Conn, in *bufio.Reader) {
		if readRequest(in) {
			_, _ = io.WriteString(conn, answer)
		}
	}
}

// TestSentOnce: a request that a server read is not sent again, though its
// connection was used before, where a transport likes to think that it was just closed.
func TestSentOnce(t *testing.T) {
	t.Parallel()
	var requests atomic.Int32
	h := serveRaw(t, func(conn net.Conn, in *bufio.Reader) {
		for readRequest(in) && requests.Add(1) == 1 {
			if _, err := io.WriteString(conn, "HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n"); err != nil {
				t.Error(err)
			}
		}
	})
	if _, err := step(t, h, &recorder{}); err != nil {
		t.Fatal(err)
	}
	_, err := step(t, h, &recorder{})
	if f := failure(t, err); !f.Retryable || requests.Load() != 2 {
		t.Errorf("%+v after %d requests, want a retryable failure and 2", f, requests.Load())
	}
}

// TestSentOnceHTTP2: nor is one whose stream was reset as an error of the protocol.
func TestSentOnceHTTP2(t *testing.T) {
	t.Parallel()
	s := httptest.NewTLSServer(http.NotFoundHandler()) // for its certificate
	defer s.Close()
	l, err := tls.Listen("tcp", "127.0.0.1:0", &tls.Config{Certificates: s.TLS.Certificates, NextProtos: []string{"h2"}})
	if err != nil {
		t.Fatal(err)
	}
	var requests atomic.Int32
	talkOn(t, l, func(conn net.Conn, in *bufio.Reader) { resetStreams(conn, in, &requests) })
	h := newHandler(t, Options{URL: "https://" + l.Addr().String()})
	h.transport.TLSClientConfig = &tls.Config{RootCAs: s.Client().Transport.(*http.Transport).TLSClientConfig.RootCAs}
	_, err = step(t, h, &recorder{})
	if f := failure(t, err); !f.Retryable || !strings.Contains(f.Message, errSent.Error()) || requests.Load() != 1 {
		t.Errorf("%+v after %d requests, want a retryable failure and 1", f, requests.Load())
	}
}

// resetStreams speaks as much HTTP/2 as it takes to read requests and to answer
// each with RST_STREAM, PROTOCOL_ERROR (RFC 9113 sections 4.1 and 6).
func resetStreams(conn net.Conn, in *bufio.Reader, requests *atomic.Int32) {
	const data, headers, reset, settings, endStream, ack = 0, 1, 3, 4, 1, 1
	frame := func(kind, flags byte, stream uint32, payload []byte) {
		head := []byte{0, 0, byte(len(payload)), kind, flags}
		_, _ = conn.Write(append(binary.BigEndian.AppendUint32(head, stream), payload...))
	}
	if _, err := in.Discard(len("PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n")); err != nil {
		return
	}
	frame(settings, 0, 0, nil)
	for {
		var head [9]byte
		if _, err := io.ReadFull(in, head[:]); err != nil {
			return
		}
		length := int(head[0])<<16 | int(head[1])<<8 | int(head[2])
		if _, err := in.Discard(length); err != nil {
			return
		}
		kind, flags, stream := head[3], head[4], binary.BigEndian.Uint32(head[5:])
		switch {
		case kind == settings && flags&ack == 0:
			frame(settings, ack, 0, nil)
		case (kind == data || kind == headers) && flags&endStream != 0:
			requests.Add(1)
			frame(reset, 0, stream, []byte{0, 0, 0, 1})
		}
	}
}

func TestRedirects(t *testing.T) {
	t.Parallel()
	elsewhere := httptest.NewServer(http.HandlerFunc(func(http.ResponseWriter, *http.Request) {
		t.Error("a redirect was followed to another host")
	}))
	defer elsewhere.Close()
	h := serve(t, func(w http.ResponseWriter, r *http.Request) {
		body, err := io.ReadAll(r.Body)
		if r.Method != "POST" || err != nil || !strings.Contains(string(body), `"session":"ses_1"`) || r.Header.Get("Rv-Epoch") != "3" ||
			r.Header.Get("Authorization") == "" {
			t.Errorf("%s %s with %q and %v", r.Method, r.URL, body, r.Header)
		}
		to, code := "", http.StatusTemporaryRedirect
		switch path := strings.TrimPrefix(r.URL.Path, "/"); path {
		case "relative", "2":
			to = "/1?x=y#z"
		case "absolute":
			to, code = "http://other:user@"+strings.ToUpper(r.Host)+"/1", http.StatusPermanentRedirect
		case "3", "4", "5":
			to = "/" + string(path[0]-1)
		case "loop":
			to = "/loop"
		case "301", "302", "303":
			to = "/1"
			if _, err := fmt.Sscan(path, &code); err != nil {
				t.Error(err)
			}
		case "host":
			to = elsewhere.URL
		case "scheme":
			to = "https://" + r.Host
		case "nowhere":
		case "bad":
			to = "http://a b/"
		case "1":
			w.Header().Set("Content-Type", single)
			_, _ = io.WriteString(w, `"there"`)
			return
		}
		if to != "" {
			w.Header().Set("Location", to)
		}
		w.WriteHeader(code)
	})
	h.authorization = "Basic eDp5"
	base := strings.TrimSuffix(h.url.String(), "step")
	for path, want := range map[string]string{
		"relative": "", "absolute": "", "4": "",
		"5": "more than 3 times", "loop": "more than 3 times",
		"301": "301 Moved Permanently, which makes a POST a GET", "302": "with 302 Found", "303": "with 303 See Other",
		"host": "not followed from", "scheme": "handler redirects to https://", "nowhere": "to no URL", "bad": "to no URL",
	} {
		var err error
		if h.url, err = ParseURL(base + path); err != nil {
			t.Fatal(err)
		}
		result, err := step(t, h, &recorder{})
		if want == "" {
			if err != nil || string(result.Value) != `"there"` {
				t.Errorf("%s: %s, %v", path, result.Value, err)
			}
			continue
		}
		if f := failure(t, err); f.Retryable || !strings.Contains(f.Message, want) {
			t.Errorf("%s: %+v, want a final failure with %q", path, f, want)
		}
	}
}

// TestConnectionsAreReused: whatever is answered, as long as it is read to its end.
func TestConnectionsAreReused(t *testing.T) {
	t.Parallel()
	answers := []func(w http.ResponseWriter){
		func(w http.ResponseWriter) { w.WriteHeader(http.StatusNoContent) },
		func(w http.ResponseWriter) {
			w.Header().Set("Content-Type", single)
			_, _ = io.WriteString(w, `{"a":1}`)
		},
		func(w http.ResponseWriter) {
			w.Header().Set("Content-Type", streamed)
			for range 100 {
				_, _ = io.WriteString(w, "line\n")
				flush(w)
			}
			_, _ = io.WriteString(w, `{"type":"ended"}`)
		},
		func(w http.ResponseWriter) { http.Error(w, "no", http.StatusTooManyRequests) },
		func(w http.ResponseWriter) { w.WriteHeader(http.StatusTeapot) },
	}
	var turn, connections atomic.Int32
	f := func(w http.ResponseWriter, r *http.Request) {
		_, _ = io.Copy(io.Discard, r.Body)
		answers[int(turn.Add(1))%len(answers)](w)
	}
	for _, name := range []string{"HTTP/1.1", "HTTP/2.0"} {
		connections.Store(0)
		h, s := serveTLS(t, name == "HTTP/2.0", func(w http.ResponseWriter, r *http.Request) {
			if r.Proto != name {
				t.Errorf("request is %s, want %s", r.Proto, name)
			}
			f(w, r)
		})
		dial := h.transport.DialContext
		h.transport.DialContext = func(ctx context.Context, network, address string) (net.Conn, error) {
			connections.Add(1)
			return dial(ctx, network, address)
		}
		for range 50 {
			if _, err := step(t, h, &recorder{}); err != nil {
				failure(t, err)
			}
		}
		if connections.Load() != 1 {
			t.Errorf("%s: %d connections for 50 steps, want 1", name, connections.Load())
		}
		s.Close()
	}
}

// TestIdleConnectionsAreKept: as many as there were at once.
func TestIdleConnectionsAreKept(t *testing.T) {
	t.Parallel()
	const slots, rounds = 64, 5
	var arrived, connections atomic.Int32
	var together [rounds]chan struct{}
	for i := range together {
		together[i] = make(chan struct{})
	}
	h := serve(t, func(http.ResponseWriter, *http.Request) {
		n := arrived.Add(1) - 1
		if n%slots == slots-1 {
			close(together[n/slots])
		}
		orPatience(together[n/slots]) // all are open at once
	})
	dial := h.transport.DialContext
	h.transport.DialContext = func(ctx context.Context, network, address string) (net.Conn, error) {
		connections.Add(1)
		return dial(ctx, network, address)
	}
	for range rounds {
		var all []<-chan answered
		for range slots {
			all = append(all, inBackground(t.Context(), h, request(), &recorder{}))
		}
		for _, c := range all {
			if a := await(t, c, "a step"); a.err != nil {
				t.Fatal(a.err)
			}
		}
	}
	if got := connections.Load(); got != slots {
		t.Errorf("%d connections for %d times %d steps, want %d", got, rounds, slots, slots)
	}
}

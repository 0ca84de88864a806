// Package http runs each step of a session as one request to a URL: a POST of
// the step's request, answered by lines of output as they come, or by one JSON
// document (docs/contract.md section 3).
//
// Words:
//
//   - The server is what answers at the URL.
//   - The answer is complete when HTTP says so: by its length, its last chunk or
//     the end of its stream. Where only the closing of the connection ends it
//     (HTTP/1.0), it is complete when its content says so.
//
// Invariants:
//
//   - A step is sent once. What may have reached the server is never sent again
//     here: that is a retry, a step of its own, which tells the server so in
//     `continues`.
//   - Step returns only when the request is over: its body is closed, and where
//     the answer was not complete its connection (HTTP/2: its stream) with it.
//   - The context and Request.Killed close the request also while the step's
//     output is blocked.
//   - Memory is bounded: MaxLineBytes of a stream, MaxBodyBytes of a document,
//     2 KiB of any other body, 64 KiB of headers, 256 KiB of an HTTP/2 stream
//     that is not read yet. A step whose output is blocked blocks its server.
//
// What becomes of a step:
//
//   - 2xx with application/x-ndjson: its lines are the output. The last `ended`
//     line is the result, however the answer goes on; a complete answer without
//     one ends with null; one that is cut off is a retryable failure. `declined`
//     closes the request at once.
//   - 2xx with application/json: the document is the result.
//   - 2xx without a body: the result is null. 2xx with anything else fails.
//   - 429 and 503 fail in a way that is retried, not before Retry-After (at most
//     an hour of it). Any other status fails.
//   - No answer: whatever kept the request from the server or the answer's
//     header from us is a retryable failure. Most such requests never arrived;
//     one that did may have been executed, and only the server can know.
//   - 307 and 308 are followed within the URL's scheme, host and port, three
//     times at most. Every other redirect fails: a POST would become a GET, or
//     the session's data would go where nobody sent them.
//
// No time-out of its own cuts a step short: a long step may answer late, and its
// stream may be silent (--step-timeout bounds both). A server that vanished is
// noticed by TCP keep-alive.
//
// Not promised: that the server has stopped when the request is closed. It is
// the server's part to end its work when its request ends, and to have what it
// writes to refuse an epoch (Rv-Epoch) that is older than one it has seen.
//
// Proxies of the environment (HTTP_PROXY, HTTPS_PROXY) are not used: they hold
// back streams, end silent requests and keep a request open that we closed, and
// they are often set on a machine for something else than its sessions' data.
package http

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/http"
	"net/url"
	"strconv"
	"strings"
	"sync"
	"time"

	"reveille/runner"
	"reveille/runner/lines"
)

// DefaultMaxBodyBytes is the longest JSON document that is taken as a result. A
// larger one would not fit into the event that tells of it.
const DefaultMaxBodyBytes = 1 << 20

const (
	dialTimeout = 10 * time.Second
	tlsTimeout  = 10 * time.Second
	// idleTimeout is below the 2 s after which the first of the common servers
	// close an idle connection: a request that crosses that is lost, and with it an
	// attempt of its step.
	idleTimeout = time.Second
	// maxIdle is above the slots of any worker, so that a full one keeps all of its
	// connections.
	maxIdle = 1024

	maxHeaderBytes = 64 << 10
	// streamBytes of an HTTP/2 stream are on their way at most; enough for 25 MB/s
	// at 10 ms.
	streamBytes = 256 << 10
)

// Options of a Handler.
type Options struct {
	// URL takes the steps: http or https. Its user and password, if it has them,
	// are sent as Basic authorization.
	URL string
	// MaxLineBytes bounds a line of a streamed answer without its newline. A longer
	// one is passed on as text, in pieces. 0 is lines.DefaultMax, lines.MinMax the least.
	MaxLineBytes int
	// MaxBodyBytes bounds a JSON document; a longer one fails its step. 0 is
	// DefaultMaxBodyBytes.
	MaxBodyBytes int
}

// Handler posts steps to a URL. It implements runner.Handler, is safe for
// concurrent use, and must be closed after the last step.
type Handler struct {
	opts          Options
	url           *url.URL // without user
	authorization string
	transport     *http.Transport
}

var _ runner.Handler = (*Handler)(nil)

var (
	// errKilled is why a request was closed whose Request.Killed was before its
	// context was done.
	errKilled = errors.New("killed by the runner")
	// errOver closes what is left of a request that this package is done with.
	errOver = errors.New("request is over")
)

// New makes a handler; it connects to nothing. It fails where the options make
// no sense.
func New(o Options) (*Handler, error) {
	if o.MaxLineBytes == 0 {
		o.MaxLineBytes = lines.DefaultMax
	}
	if o.MaxBodyBytes == 0 {
		o.MaxBodyBytes = DefaultMaxBodyBytes
	}
	if o.MaxLineBytes < lines.MinMax {
		return nil, fmt.Errorf("lines of %d bytes: want %d or more", o.MaxLineBytes, lines.MinMax)
	}
	if o.MaxBodyBytes < 1 {
		return nil, fmt.Errorf("documents of %d bytes: want 1 or more", o.MaxBodyBytes)
	}
	u, err := ParseURL(o.URL)
	if err != nil {
		return nil, err
	}
	h := &Handler{opts: o, url: u, authorization: basic(u.User), transport: newTransport()}
	h.url.User = nil
	return h, nil
}

// ParseURL checks a URL that is to take steps. Its errors show nothing of it but
// what is wrong: it may hold a password.
func ParseURL(raw string) (*url.URL, error) {
	u, err := url.Parse(raw)
	if err != nil {
		if typed := (*url.Error)(nil); errors.As(err, &typed) {
			err = typed.Err
		}
		return nil, fmt.Errorf("not a URL: %w; want one such as http://127.0.0.1:8080/step", err)
	}
	port, err := strconv.Atoi(u.Port())
	switch {
	case u.Scheme != "http" && u.Scheme != "https":
		return nil, fmt.Errorf("URL with scheme %q: want http or https, as in http://127.0.0.1:8080/step", u.Scheme)
	case u.Hostname() == "":
		return nil, errors.New("URL without a host: want one such as http://127.0.0.1:8080/step")
	case u.Port() != "" && (err != nil || port < 1 || port > 65535):
		return nil, fmt.Errorf("URL with port %s: want 1 to 65535", u.Port())
	case u.Fragment != "":
		return nil, errors.New("URL with a fragment (#…): no server gets that, leave it out")
	}
	return u, nil
}

func newTransport() *http.Transport {
	return &http.Transport{
		Proxy:                  nil, // see the package
		DialContext:            (&net.Dialer{Timeout: dialTimeout}).DialContext,
		TLSHandshakeTimeout:    tlsTimeout,
		MaxIdleConnsPerHost:    maxIdle,
		IdleConnTimeout:        idleTimeout,
		MaxResponseHeaderBytes: maxHeaderBytes,
		DisableCompression:     true, // what compresses a stream may hold it back
		ForceAttemptHTTP2:      true,
		HTTP2:                  &http.HTTP2Config{MaxReceiveBufferPerStream: streamBytes},
	}
}

// Close closes the connections that no step uses.
func (h *Handler) Close() { h.transport.CloseIdleConnections() }

// Step posts the step once and reads the answer; see the package for what
// becomes of it. Failures are *runner.Failure with code handler. It sends
// nothing where the context is done already; that the claim is still owned the
// runner checks, immediately before (I16).
//
// A request that was cancelled answers context.Cause, wrapped, unless it was told
// `ended` or a whole document: a server that stops when its request is closed may
// still end its answer in good order, with half of the work done. An Output
// method's error closes the request and is answered, wrapped.
func (h *Handler) Step(ctx context.Context, req runner.Request, out *runner.Output) (runner.Result, error) {
	// No newline at its end: a server that decodes it has then read the request to
	// its end, and many see only after that when the request is cancelled.
	body, err := req.Document()
	if err != nil {
		return runner.Result{}, fmt.Errorf("request of step %s: %w", req.Step, err)
	}
	ctx, cancel := context.WithCancelCause(ctx)
	var watch sync.WaitGroup
	watch.Go(func() {
		select {
		case <-req.Killed:
			cancel(errKilled)
		case <-ctx.Done():
		}
	})
	defer watch.Wait()
	defer cancel(errOver)
	a := &answer{h: h, ctx: ctx, close: func() { cancel(errOver) }}
	result, err := a.get(req, body, out)
	if cause := context.Cause(ctx); cause != nil && !errors.Is(cause, errOver) && !a.said {
		return runner.Result{}, fmt.Errorf("request closed: %w", cause)
	}
	return result, err
}

// origin is what a redirect may not leave.
func origin(u *url.URL) string {
	port := u.Port()
	switch {
	case port != "":
	case u.Scheme == "https":
		port = "443"
	default:
		port = "80"
	}
	return u.Scheme + "://" + net.JoinHostPort(strings.ToLower(u.Hostname()), port)
}

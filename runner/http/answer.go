package http

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"mime"
	"net/http"
	"strconv"
	"strings"
	"time"

	"reveille/claims"
	"reveille/runner"
	"reveille/runner/lines"
)

const (
	// messageBytes of a body that is not the answer we want go into the failure.
	messageBytes = 2 << 10
	// messageWait is how long they are waited for: the failure is certain already.
	messageWait = 2 * time.Second
	// maxRetryAfter bounds a server's word. A retry that comes too early is told so
	// again; one that comes in a year is lost.
	maxRetryAfter = time.Hour
)

// answer is what comes of one request.
type answer struct {
	h     *Handler
	ctx   context.Context // the request's
	close func()          // ends the request, whatever is left of it
	resp  *http.Response
	// said: how the step ended is in the answer itself, not only in that it came to
	// an end.
	said bool
}

// get sends the request, reads the answer and says how its step ended.
func (a *answer) get(req runner.Request, body []byte, out *runner.Output) (_ runner.Result, err error) {
	if a.resp, err = a.h.post(a.ctx, req, body); err != nil {
		return runner.Result{}, err
	}
	defer a.resp.Body.Close()
	return a.read(out)
}

func (a *answer) read(out *runner.Output) (runner.Result, error) {
	if a.resp.StatusCode < 200 || a.resp.StatusCode > 299 {
		return runner.Result{}, a.refusal()
	}
	if a.resp.ContentLength == 0 {
		return runner.Result{}, nil
	}
	if coding := a.resp.Header.Get("Content-Encoding"); coding != "" && !strings.EqualFold(coding, "identity") {
		return runner.Result{}, failed(false, "answer has content encoding %.50q, which was not asked for: send it without", coding)
	}
	// Its parameters may be wrong: a charset says nothing about JSON (RFC 8259 section 11).
	media, _, _ := mime.ParseMediaType(a.resp.Header.Get("Content-Type"))
	switch media {
	case streamed:
		return a.stream(out)
	case single:
		return a.single()
	}
	said, empty := a.start()
	if empty {
		return runner.Result{}, nil
	}
	return runner.Result{}, failed(false, "answer has content type %.100q, want %s or %s%s", a.resp.Header.Get("Content-Type"), streamed, single, said)
}

// stream takes the answer as lines of output.
func (a *answer) stream(out *runner.Output) (runner.Result, error) {
	output := lines.New(out, a.h.opts.MaxLineBytes)
	_, err := io.Copy(output, a.resp.Body)
	said := output.Close()
	a.said = said.Declined || said.Err != nil || said.Ended
	switch {
	case said.Declined:
		return runner.Result{}, nil
	case said.Err != nil:
		return runner.Result{}, fmt.Errorf("output of the handler: %w", said.Err)
	case said.Ended:
		return said.Result, nil
	case err != nil:
		return runner.Result{}, failed(true, "answer was cut off: %v", err)
	case a.endsByClosing():
		return runner.Result{}, failed(true, "answer may be cut off: it has neither a length nor chunks nor an ended line")
	}
	return runner.Result{}, nil
}

// single takes the answer as one JSON document.
func (a *answer) single() (runner.Result, error) {
	limit := a.h.opts.MaxBodyBytes
	raw, err := io.ReadAll(io.LimitReader(a.resp.Body, int64(limit)+1))
	if len(raw) > limit {
		return runner.Result{}, failed(false, "answer is longer than %d bytes: say less, or stream it as %s", limit, streamed)
	}
	if err != nil {
		return runner.Result{}, failed(true, "answer was cut off: %v", err)
	}
	raw = bytes.TrimSpace(raw)
	cuttable := len(raw) == 0 || raw[len(raw)-1] >= '0' && raw[len(raw)-1] <= '9' // nothing, or a number
	if cuttable && a.endsByClosing() {
		return runner.Result{}, failed(true, "answer may be cut off: it has neither a length nor chunks")
	}
	if len(raw) == 0 {
		return runner.Result{}, nil
	}
	value, err := claims.CleanJSON(raw)
	if err != nil {
		return runner.Result{}, failed(a.endsByClosing(), "answer is not one JSON document: %v", err)
	}
	a.said = !cuttable
	return runner.Result{Value: value}, nil
}

// endsByClosing reports whether the end of the body can't be told from a
// connection that broke (RFC 9112 section 6.3, item 8).
func (a *answer) endsByClosing() bool {
	return a.resp.ProtoMajor == 1 && a.resp.ContentLength < 0 && len(a.resp.TransferEncoding) == 0
}

// refusal is the failure that a status means.
func (a *answer) refusal() error {
	if a.resp.StatusCode < 200 { // 101: what follows is no body but the connection, which nothing but closing ends
		return failed(false, "handler answered %s", status(a.resp))
	}
	said, _ := a.start()
	f := failed(false, "handler answered %s%s", status(a.resp), said)
	if a.resp.StatusCode == http.StatusTooManyRequests || a.resp.StatusCode == http.StatusServiceUnavailable {
		f.Retryable, f.After = true, retryAfter(a.resp.Header, time.Now())
	}
	return f
}

// start reads the beginning of a body for a message, and reports whether that
// was a complete body of nothing.
func (a *answer) start() (said string, empty bool) {
	timer := time.AfterFunc(messageWait, a.close)
	defer timer.Stop()
	raw, err := io.ReadAll(io.LimitReader(a.resp.Body, messageBytes))
	if len(raw) == 0 {
		return "", err == nil && !a.endsByClosing()
	}
	said = strings.TrimSpace(strings.ToValidUTF8(string(raw), "\uFFFD"))
	if said == "" {
		return "", false
	}
	return ": " + said, false
}

// retryAfter is the least delay that a server asks for (RFC 9110 section
// 10.2.3): seconds, or a date, which is read by the server's own clock where it
// tells that. What is neither asks for nothing.
func retryAfter(header http.Header, now time.Time) time.Duration {
	value := strings.TrimSpace(header.Get("Retry-After"))
	if value == "" {
		return 0
	}
	if strings.Trim(value, "0123456789") == "" {
		seconds, err := strconv.ParseInt(value, 10, 64)
		if err != nil || seconds > int64(maxRetryAfter/time.Second) { // out of range
			return maxRetryAfter
		}
		return time.Duration(seconds) * time.Second
	}
	at, err := http.ParseTime(value)
	if err != nil {
		return 0
	}
	if date, err := http.ParseTime(header.Get("Date")); err == nil {
		now = date
	}
	return min(max(at.Sub(now), 0), maxRetryAfter)
}

// status is a response's status in our words, the server's own may be any.
func status(resp *http.Response) string {
	if text := http.StatusText(resp.StatusCode); text != "" {
		return strconv.Itoa(resp.StatusCode) + " " + text
	}
	return "status " + strconv.Itoa(resp.StatusCode)
}

func failed(retryable bool, format string, args ...any) *runner.Failure {
	return &runner.Failure{Code: claims.CodeHandler, Message: fmt.Sprintf(format, args...), Retryable: retryable}
}

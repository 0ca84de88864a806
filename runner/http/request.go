package http

import (
	"bytes"
	"context"
	"crypto/tls"
	"encoding/base64"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/http/httptrace"
	"net/url"
	"strconv"
	"sync/atomic"

	"reveille/runner"
)

// The media types of an answer.
const (
	streamed = "application/x-ndjson"
	single   = "application/json"
)

// errSent answers a transport that would send a step again.
var errSent = errors.New("stream was reset, and the request may have been executed")

// maxRedirects is enough for a slash at the end and a move; more is a loop.
const maxRedirects = 3

// header names the step. It has no Idempotency-Key: with one the transport
// would send a step again by itself.
func (h *Handler) header(req runner.Request) http.Header {
	header := http.Header{}
	header.Set("Content-Type", single)
	header.Set("Accept", streamed+", "+single)
	header.Set("User-Agent", "reveille")
	header.Set("Rv-Session", string(req.Session))
	header.Set("Rv-Execution", string(req.Execution))
	header.Set("Rv-Epoch", strconv.FormatInt(req.Epoch, 10))
	header.Set("Rv-Step", string(req.Step))
	if req.Trace != "" {
		header.Set("traceparent", req.Trace)
	}
	if h.authorization != "" {
		header.Set("Authorization", h.authorization)
	}
	return header
}

// basic is the Authorization of a URL's user (RFC 7617).
func basic(user *url.Userinfo) string {
	if user == nil {
		return ""
	}
	password, _ := user.Password()
	return "Basic " + base64.StdEncoding.EncodeToString([]byte(user.Username()+":"+password))
}

// post sends the request, follows redirects, and returns at the header of the
// answer. Its error says how the step failed.
func (h *Handler) post(ctx context.Context, req runner.Request, body []byte) (*http.Response, error) {
	target := h.url
	for range 1 + maxRedirects {
		r, err := http.NewRequestWithContext(ctx, http.MethodPost, target.String(), bytes.NewReader(body))
		if err != nil {
			return nil, fmt.Errorf("request of step %s: %w", req.Step, err)
		}
		r.Header = h.header(req)
		resp, err := h.transport.RoundTrip(sentOnce(r))
		if err != nil {
			return nil, failed(true, "no answer from the handler: %v", err)
		}
		if !redirects(resp.StatusCode) {
			return resp, nil
		}
		_ = resp.Body.Close() // what it says is in its header
		if target, err = h.redirected(target, resp); err != nil {
			return nil, err
		}
	}
	return nil, failed(false, "handler redirects more than %d times: give the URL that answers", maxRedirects)
}

// sentOnce keeps the transport from sending a request again that the server may
// have executed. Over HTTP/1 it repeats only what it has written nothing of.
// Over HTTP/2 it also repeats what the server reset as an error of the protocol,
// which is no word that it was not looked at (RFC 9113 section 8.7).
func sentOnce(r *http.Request) *http.Request {
	var h2, sent atomic.Bool
	again := r.GetBody
	r.GetBody = func() (io.ReadCloser, error) {
		if sent.Load() {
			return nil, errSent
		}
		return again()
	}
	return r.WithContext(httptrace.WithClientTrace(r.Context(), &httptrace.ClientTrace{
		GotConn: func(info httptrace.GotConnInfo) {
			conn, ok := info.Conn.(*tls.Conn)
			h2.Store(ok && conn.ConnectionState().NegotiatedProtocol == "h2")
		},
		WroteHeaders: func() {
			if h2.Load() {
				sent.Store(true)
			}
		},
	}))
}

func redirects(status int) bool {
	switch status {
	case http.StatusMovedPermanently, http.StatusFound, http.StatusSeeOther,
		http.StatusTemporaryRedirect, http.StatusPermanentRedirect:
		return true
	}
	return false
}

// redirected is where a redirect leads, if it may be followed.
func (h *Handler) redirected(from *url.URL, resp *http.Response) (*url.URL, error) {
	if resp.StatusCode != http.StatusTemporaryRedirect && resp.StatusCode != http.StatusPermanentRedirect {
		return nil, failed(false, "handler redirects with %s, which makes a POST a GET: redirect with 307 or 308, or give the URL that answers", status(resp))
	}
	location := resp.Header.Get("Location")
	to, err := from.Parse(location)
	if location == "" || err != nil {
		return nil, failed(false, "handler redirects with %s to no URL: give the URL that answers", status(resp))
	}
	if origin(to) != origin(h.url) {
		return nil, failed(false, "handler redirects to %.200s, not followed from %s: give the URL that answers", origin(to), origin(h.url))
	}
	return to, nil
}

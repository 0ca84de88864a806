package main

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"reveille/claims"
	"reveille/runner"
	rvhttp "reveille/runner/http"
)

// patience ends a test that hangs.
const patience = 60 * time.Second

// TestCounts takes no time: its clock is its own.
func TestCounts(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		w := httptest.NewRecorder()
		step(w, httptest.NewRequestWithContext(t.Context(), http.MethodPost, "/step", strings.NewReader(`{"session":"s1","inputs":[{"id":"in_1","body":7}]}`)))
		want := `got [{"id":"in_1","body":7}]` + "\n"
		for n := range 10 {
			want += fmt.Sprintf("%d of 10\n", n+1)
		}
		want += `{"type":"ended","result":"counted to ten"}` + "\n"
		if got := w.Body.String(); w.Code != http.StatusOK || w.Header().Get("Content-Type") != "application/x-ndjson" || got != want {
			t.Errorf("answered %d %v\n%s\nwant\n%s", w.Code, w.Header(), got, want)
		}
	})
}

func TestBadRequest(t *testing.T) {
	t.Parallel()
	w := httptest.NewRecorder()
	step(w, httptest.NewRequestWithContext(t.Context(), http.MethodPost, "/step", strings.NewReader("{")))
	if w.Code != http.StatusBadRequest || w.Body.String() != "unexpected end of JSON input\n" {
		t.Errorf("answered %d %q", w.Code, w.Body.String())
	}
}

// TestInterrupted is the example under the handler of the worker: its text
// comes at once, and it stops when its step is interrupted.
func TestInterrupted(t *testing.T) {
	t.Parallel()
	stopped := make(chan struct{})
	s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		step(w, r)
		close(stopped)
	}))
	defer s.Close()
	handler, err := rvhttp.New(rvhttp.Options{URL: s.URL})
	if err != nil {
		t.Fatal(err)
	}
	defer handler.Close()
	ctx, cancel := context.WithCancelCause(t.Context())
	defer cancel(nil)
	said := make(chan string, 10)
	out := runner.NewOutput(func(c claims.Content) error {
		said <- c.Data.(claims.TextData).Text
		return nil
	}, func(string) error { return errors.New("nobody declines here") })
	done := make(chan error, 1)
	go func() {
		_, err := handler.Step(ctx, runner.Request{Session: "s1"}, out)
		done <- err
	}()
	if first := await(t, said, "text"); first != "got []\n" {
		t.Errorf("said %q first", first)
	}
	cancel(claims.ErrInterrupted)
	if err := await(t, done, "the end of the step"); !errors.Is(err, claims.ErrInterrupted) {
		t.Errorf("Step = %v", err)
	}
	await(t, stopped, "the end of the count")
}

func await[T any](t *testing.T, c <-chan T, what string) T {
	t.Helper()
	select {
	case v := <-c:
		return v
	case <-time.After(patience):
		t.Fatalf("waited in vain for %s", what)
		panic("unreachable")
	}
}

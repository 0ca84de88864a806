package tracing

import (
	"context"
	"errors"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"

	"go.opentelemetry.io/otel/codes"
	sdk "go.opentelemetry.io/otel/sdk/trace"
	"go.opentelemetry.io/otel/sdk/trace/tracetest"

	"reveille/claims"
	"reveille/runner"
)

const upstream = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"

// fakeStore starts and settles whatever it is asked.
type fakeStore struct {
	runner.Store
	applied string // traceparent of the command
	err     error
}

func (f *fakeStore) Apply(_ context.Context, cmd claims.Command, acq *claims.Acquisition) (claims.Outcome, error) {
	f.applied = cmd.Trace
	if acq == nil {
		return claims.Outcome{Result: claims.Applied}, nil
	}
	return claims.Outcome{Result: claims.Applied, Started: &claims.Started{Claim: claims.Claim{Execution: acq.Execution}, Step: claims.Step{Trace: cmd.Trace}}}, nil
}

func (f *fakeStore) Acquire(_ context.Context, _ claims.SessionID, acq claims.Acquisition) (claims.Started, error) {
	return claims.Started{Claim: claims.Claim{Execution: acq.Execution}, Step: claims.Step{Trace: f.applied}}, f.err
}

func (f *fakeStore) Finish(context.Context, claims.Claim, claims.Ending, *claims.Token) (claims.Settlement, error) {
	return claims.Settlement{Outcome: claims.OutcomeCompleted}, f.err
}

func recorded(t *testing.T) (*Spans, *tracetest.InMemoryExporter) {
	t.Helper()
	exporter := tracetest.NewInMemoryExporter()
	s := with(sdk.NewTracerProvider(sdk.WithSyncer(exporter)))
	t.Cleanup(func() { s.Close(slog.New(slog.DiscardHandler)) })
	return s, exporter
}

// TestSpans: command, claim, step and settlement of one trace, across two workers, each under the one that caused it.
func TestSpans(t *testing.T) {
	t.Parallel()
	s, exporter := recorded(t)
	store := &fakeStore{}
	spanned := s.Store(store)
	cmd := claims.Command{Kind: claims.Wake, Session: "s1", Trace: upstream}
	apply := s.Apply(func(ctx context.Context, cmd claims.Command, _ bool) (claims.Outcome, error) {
		return spanned.Apply(ctx, cmd, nil)
	})
	if _, err := apply(t.Context(), cmd, true); err != nil {
		t.Fatal(err)
	}
	started, err := spanned.Acquire(t.Context(), "s1", claims.Acquisition{Execution: "e1"})
	if err != nil {
		t.Fatal(err)
	}
	var inHandler string
	h := s.Handler(runner.HandlerFunc(func(_ context.Context, req runner.Request, _ *runner.Output) (runner.Result, error) {
		inHandler = req.Trace
		return runner.Result{}, errors.New("no")
	}))
	if _, err := h.Step(t.Context(), runner.Request{Session: "s1", Trace: started.Step.Trace}, nil); err == nil {
		t.Fatal("the handler's error is lost")
	}
	if _, err := spanned.Finish(t.Context(), started.Claim, claims.Ending{}, nil); err != nil {
		t.Fatal(err)
	}
	spans := map[string]tracetest.SpanStub{}
	for _, span := range exporter.GetSpans() {
		spans[span.Name] = span
		if got := span.SpanContext.TraceID().String(); got != strings.Split(upstream, "-")[1] {
			t.Errorf("span %s is of trace %s", span.Name, got)
		}
	}
	command := spans["command wake"]
	if got := command.Parent.SpanID().String(); got != strings.Split(upstream, "-")[2] {
		t.Errorf("the command is under %s", got)
	}
	for _, name := range []string{"claim", "step", "settle"} {
		if span := spans[name]; span.Parent.SpanID() != command.SpanContext.SpanID() {
			t.Errorf("%s is under %s, the command is %s", name, span.Parent.SpanID(), command.SpanContext.SpanID())
		}
	}
	if !strings.Contains(inHandler, spans["step"].SpanContext.SpanID().String()) {
		t.Errorf("the handler was given %s", inHandler)
	}
	if spans["step"].Status.Code != codes.Error || spans["settle"].Status.Code == codes.Error {
		t.Errorf("statuses are %v and %v", spans["step"].Status, spans["settle"].Status)
	}
	if _, left := s.traces.Load(claims.ExecutionID("e1")); left {
		t.Error("an execution that ended is remembered")
	}
}

// TestForgets: an execution that was taken away is not remembered either; one that may be settled yet is.
func TestForgets(t *testing.T) {
	t.Parallel()
	s, _ := recorded(t)
	store := &fakeStore{}
	spanned := s.Store(store)
	started, err := spanned.Acquire(t.Context(), "s1", claims.Acquisition{Execution: "e1"})
	if err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct {
		err  error
		left bool
	}{{errors.New("connection lost"), true}, {claims.ErrFenced, false}} {
		store.err = c.err
		if _, err := spanned.Finish(t.Context(), started.Claim, claims.Ending{}, nil); !errors.Is(err, c.err) {
			t.Fatalf("answered %v", err)
		}
		if _, left := s.traces.Load(claims.ExecutionID("e1")); left != c.left {
			t.Errorf("after %v it is remembered: %v", c.err, left)
		}
	}
}

// TestPanicEndsItsSpan, and is still a panic.
func TestPanicEndsItsSpan(t *testing.T) {
	t.Parallel()
	s, exporter := recorded(t)
	h := s.Handler(runner.HandlerFunc(func(context.Context, runner.Request, *runner.Output) (runner.Result, error) { panic("no") }))
	func() {
		defer func() {
			if recover() == nil {
				t.Error("the panic is gone")
			}
		}()
		_, _ = h.Step(t.Context(), runner.Request{}, nil)
	}()
	if spans := exporter.GetSpans(); len(spans) != 1 || spans[0].Status.Code != codes.Error {
		t.Errorf("spans are %v", spans)
	}
}

type withSnapshots struct{ runner.HandlerFunc }

func (withSnapshots) Snapshot(context.Context, runner.Request, runner.SnapshotAt) (string, error) {
	return "tree", nil
}

// TestNothingIsWrapped where no endpoint is named; and a handler's snapshots are not hidden where one is.
func TestNothingIsWrapped(t *testing.T) {
	t.Setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "")
	t.Setenv("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "")
	none, err := Start(t.Context(), "reveille-worker", "w", "v", slog.New(slog.DiscardHandler))
	if err != nil || none != nil {
		t.Fatalf("spans %v, %v", none, err)
	}
	store := &fakeStore{}
	if got := none.Store(store); got != runner.Store(store) {
		t.Error("the store is wrapped")
	}
	plain := withSnapshots{}
	if _, same := none.Handler(plain).(withSnapshots); !same {
		t.Error("the handler is wrapped")
	}
	none.Close(nil)
	s, _ := recorded(t)
	if _, ok := s.Handler(plain).(runner.Snapshotter); !ok {
		t.Error("snapshots are hidden")
	}
	if _, ok := s.Handler(plain.HandlerFunc).(runner.Snapshotter); ok {
		t.Error("a handler without snapshots has some")
	}
}

// TestExport: to the endpoint that the environment names, and a protocol that is not spoken is refused.
func TestExport(t *testing.T) {
	got := make(chan string, 8)
	collector := httptest.NewServer(http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) { got <- r.URL.Path }))
	defer collector.Close()
	t.Setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collector.URL)
	log := slog.New(slog.DiscardHandler)
	s, err := Start(t.Context(), "reveille-worker", "w", "v", log)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := s.Store(&fakeStore{}).Acquire(t.Context(), "s1", claims.Acquisition{Execution: "e"}); err != nil {
		t.Fatal(err)
	}
	s.Close(log)
	select {
	case path := <-got:
		if path != "/v1/traces" {
			t.Errorf("exported to %s", path)
		}
	default:
		t.Error("nothing was exported")
	}
	t.Setenv("OTEL_EXPORTER_OTLP_PROTOCOL", "grpc")
	if _, err := Start(t.Context(), "reveille-worker", "w", "v", log); err == nil || !strings.Contains(err.Error(), "http/protobuf") {
		t.Errorf("grpc: %v", err)
	}
}

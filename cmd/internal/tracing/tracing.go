// Package tracing exports what a worker does as OpenTelemetry spans, where
// OTEL_EXPORTER_OTLP_ENDPOINT (or …_TRACES_ENDPOINT) is set; elsewhere it is not
// there: a nil Spans gives back what it was given, and nothing is wrapped.
//
// A span of a command is the child of the trace context that came with it; what
// the database keeps with the input is the span's, so that claim, step and
// settlement, which may be another worker's, are its children. The handler gets
// the step's.
package tracing

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"sync"
	"time"

	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/codes"
	"go.opentelemetry.io/otel/exporters/otlp/otlptrace/otlptracehttp"
	"go.opentelemetry.io/otel/propagation"
	"go.opentelemetry.io/otel/sdk/resource"
	sdk "go.opentelemetry.io/otel/sdk/trace"
	"go.opentelemetry.io/otel/trace"

	"reveille/claims"
	"reveille/runner"
)

const (
	scope = "reveille"
	// flushTimeout bounds the export of the last spans.
	flushTimeout = 5 * time.Second
)

// Spans makes and exports spans. All methods are safe for concurrent use and of
// a nil Spans.
type Spans struct {
	provider *sdk.TracerProvider
	tracer   trace.Tracer
	// traces are the trace contexts of the executions that run here: a settlement
	// does not say what it is of.
	traces sync.Map // claims.ExecutionID → string
}

// Start makes Spans as the OTEL_ variables of the OpenTelemetry specification
// say, or nil where they name no endpoint. A collector that does not answer
// costs spans, never work.
func Start(ctx context.Context, service, instance, version string, log *slog.Logger) (*Spans, error) {
	if os.Getenv("OTEL_EXPORTER_OTLP_ENDPOINT") == "" && os.Getenv("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT") == "" {
		return nil, nil
	}
	for _, name := range []string{"OTEL_EXPORTER_OTLP_PROTOCOL", "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL"} {
		if p := os.Getenv(name); p != "" && p != "http/protobuf" {
			return nil, fmt.Errorf("%s is %q: spans are exported as http/protobuf, to the collector's port 4318; unset it", name, p)
		}
	}
	exporter, err := otlptracehttp.New(ctx)
	if err != nil {
		return nil, fmt.Errorf("OpenTelemetry exporter: %w", err)
	}
	res, err := resource.New(ctx, resource.WithAttributes(
		attribute.String("service.name", service), attribute.String("service.instance.id", instance), attribute.String("service.version", version),
	), resource.WithTelemetrySDK(), resource.WithFromEnv()) // the environment wins
	if err != nil {
		return nil, fmt.Errorf("OpenTelemetry resource: %w", err)
	}
	log.Info("spans are exported")
	return with(sdk.NewTracerProvider(sdk.WithBatcher(exporter), sdk.WithResource(res))), nil
}

func with(provider *sdk.TracerProvider) *Spans {
	return &Spans{provider: provider, tracer: provider.Tracer(scope)}
}

// Close exports what is left, within a few seconds.
func (s *Spans) Close(log *slog.Logger) {
	if s == nil {
		return
	}
	ctx, cancel := context.WithTimeout(context.Background(), flushTimeout)
	defer cancel()
	if err := s.provider.Shutdown(ctx); err != nil {
		log.Warn("the last spans are not exported", "error", err)
	}
}

// parent is a context under a W3C traceparent, which may be empty.
func parent(ctx context.Context, traceparent string) context.Context {
	return propagation.TraceContext{}.Extract(ctx, propagation.MapCarrier{"traceparent": traceparent})
}

// traceparent is the W3C traceparent of a context's span.
func traceparent(ctx context.Context) string {
	carrier := propagation.MapCarrier{}
	propagation.TraceContext{}.Inject(ctx, carrier)
	return carrier["traceparent"]
}

// span starts a span under a traceparent.
func (s *Spans) span(ctx context.Context, under, name string, began time.Time, attrs ...attribute.KeyValue) (context.Context, trace.Span) {
	return s.tracer.Start(parent(ctx, under), name, trace.WithTimestamp(began), trace.WithAttributes(attrs...))
}

func end(span trace.Span, err error) {
	if err != nil {
		span.RecordError(err)
		span.SetStatus(codes.Error, err.Error())
	}
	span.End()
}

func session(id claims.SessionID) attribute.KeyValue {
	return attribute.String("reveille.session", string(id))
}

func execution(id claims.ExecutionID) attribute.KeyValue {
	return attribute.String("reveille.execution", string(id))
}

// Apply is how a command is applied.
type Apply func(ctx context.Context, cmd claims.Command, mayAcquire bool) (claims.Outcome, error)

// Apply applies a command under a span, whose trace context the command then has.
func (s *Spans) Apply(apply Apply) Apply {
	if s == nil {
		return apply
	}
	return func(ctx context.Context, cmd claims.Command, mayAcquire bool) (claims.Outcome, error) {
		ctx, span := s.span(ctx, cmd.Trace, "command "+string(cmd.Kind), time.Now(), session(cmd.Session))
		cmd.Trace = traceparent(ctx)
		out, err := apply(ctx, cmd, mayAcquire)
		span.SetAttributes(attribute.String("reveille.result", string(out.Result)))
		end(span, err)
		return out, err
	}
}

// Handler calls a handler under a span, whose trace context its request then has.
func (s *Spans) Handler(h runner.Handler) runner.Handler {
	if s == nil {
		return h
	}
	spanned := handler{s, h}
	if snapshotter, ok := h.(runner.Snapshotter); ok {
		return struct {
			handler
			runner.Snapshotter
		}{spanned, snapshotter}
	}
	return spanned
}

type handler struct {
	spans *Spans
	next  runner.Handler
}

func (h handler) Step(ctx context.Context, req runner.Request, out *runner.Output) (runner.Result, error) {
	ctx, span := h.spans.span(ctx, req.Trace, "step", time.Now(), session(req.Session), execution(req.Execution),
		attribute.String("reveille.step", string(req.Step)), attribute.Int64("reveille.epoch", req.Epoch), attribute.Int("reveille.index", req.Index))
	panicked := true
	defer func() {
		if panicked {
			span.SetStatus(codes.Error, "the handler panicked")
			span.End()
		}
	}()
	req.Trace = traceparent(ctx)
	result, err := h.next.Step(ctx, req, out)
	panicked = false
	end(span, err)
	return result, err
}

// Store is a store whose claims and settlements have spans.
func (s *Spans) Store(store runner.Store) runner.Store {
	if s == nil {
		return store
	}
	return &spannedStore{store, s}
}

type spannedStore struct {
	runner.Store
	spans *Spans
}

func (s *spannedStore) started(st *claims.Started) {
	if st != nil {
		s.spans.traces.Store(st.Claim.Execution, st.Step.Trace)
	}
}

func (s *spannedStore) Apply(ctx context.Context, cmd claims.Command, acq *claims.Acquisition) (claims.Outcome, error) {
	out, err := s.Store.Apply(ctx, cmd, acq)
	s.started(out.Started)
	return out, err
}

func (s *spannedStore) Acquire(ctx context.Context, id claims.SessionID, acq claims.Acquisition) (claims.Started, error) {
	began := time.Now()
	started, err := s.Store.Acquire(ctx, id, acq)
	if err == nil { // what it is of is known now
		_, span := s.spans.span(ctx, started.Step.Trace, "claim", began, session(id), execution(started.Claim.Execution))
		span.End()
		s.started(&started)
	}
	return started, err
}

func (s *spannedStore) StartStep(ctx context.Context, c claims.Claim, id claims.StepID, token *claims.Token) (*claims.Step, claims.Settlement, error) {
	step, settled, err := s.Store.StartStep(ctx, c, id, token)
	switch {
	case step != nil:
		s.spans.traces.Store(c.Execution, step.Trace)
	case err == nil || errors.Is(err, claims.ErrFenced):
		s.spans.traces.Delete(c.Execution)
	}
	return step, settled, err
}

func (s *spannedStore) Finish(ctx context.Context, c claims.Claim, e claims.Ending, token *claims.Token) (claims.Settlement, error) {
	return s.settle(ctx, c, func() (claims.Settlement, error) { return s.Store.Finish(ctx, c, e, token) })
}

func (s *spannedStore) Settle(ctx context.Context, c claims.Claim, tail []claims.Content, token *claims.Token) (claims.Settlement, error) {
	return s.settle(ctx, c, func() (claims.Settlement, error) { return s.Store.Settle(ctx, c, tail, token) })
}

func (s *spannedStore) HandOver(ctx context.Context, c claims.Claim, tail []claims.Content, token *claims.Token) (claims.Settlement, error) {
	return s.settle(ctx, c, func() (claims.Settlement, error) { return s.Store.HandOver(ctx, c, tail, token) })
}

// Revoke is the last that is heard of an execution.
func (s *spannedStore) Revoke(ctx context.Context, c claims.Claim, cause claims.Cause) error {
	s.spans.traces.Delete(c.Execution)
	return s.Store.Revoke(ctx, c, cause)
}

func (s *spannedStore) settle(ctx context.Context, c claims.Claim, f func() (claims.Settlement, error)) (claims.Settlement, error) {
	under, _ := s.spans.traces.Load(c.Execution)
	of, _ := under.(string)
	_, span := s.spans.span(ctx, of, "settle", time.Now(), session(c.Session), execution(c.Execution))
	settled, err := f()
	span.SetAttributes(attribute.String("reveille.outcome", string(settled.Outcome)), attribute.Bool("reveille.again", settled.Again))
	end(span, err)
	if err == nil && !settled.Again || errors.Is(err, claims.ErrFenced) {
		s.spans.traces.Delete(c.Execution)
	}
	return settled, err
}

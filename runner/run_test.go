package runner

import (
	"context"
	"errors"
	"log/slog"
	"slices"
	"testing"
	"testing/synctest"
	"time"

	"reveille/claims"
)

// Whoever finds at a look that the time is up finds the cause at the same look, before any timer or goroutine has had a
// turn: a step that was not called for that reason must not be taken for one that ended well, which the database,
// where the lease has the skew and the margin left to live, would believe (I16).
func TestI16NoCallHasACause(t *testing.T) {
	o := testLease()
	for range 1000 {
		tenure := newTenure("h", &o, time.Now().Add(o.MaxClockSkew+o.StopMargin-o.Lease))
		e := newExecution(&Pool{}, tenure, "s")
		e.known = true
		if e.mayCall() {
			t.Fatal("it may call past the deadline")
		}
		if !errors.Is(context.Cause(e.ctx), claims.ErrLeaseLost) {
			t.Fatalf("and the cause is %v, want ErrLeaseLost", context.Cause(e.ctx))
		}
		e.stop(nil)
	}
}

// ends notes how steps and executions are ended.
type ends struct {
	Steps
	Settler
	Events
	how    []string
	ending claims.Ending
}

func (e *ends) Finish(_ context.Context, _ claims.Claim, ending claims.Ending, _ *claims.Token) (claims.Settlement, error) {
	e.how, e.ending = append(e.how, "finish"), ending
	return claims.Settlement{}, nil
}

func (e *ends) HandOver(context.Context, claims.Claim, []claims.Content, *claims.Token) (claims.Settlement, error) {
	e.how = append(e.how, "hand over")
	return claims.Settlement{}, nil
}

func (e *ends) Poke(claims.SessionID) {}

// A worker that stood still past its lease finds its step ended, by the guard: that is no failure of the step's, also
// where the worker's own timers have not had a turn yet and the database still calls the lease live (I7).
func TestI7StepThatTheGuardEndedIsHandedOver(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		o := testLease()
		for left, want := range map[time.Duration]string{time.Second: "finish", 0: "hand over"} {
			e := &ends{}
			p := &Pool{steps: e, settle: e, events: e, log: slog.New(slog.DiscardHandler), hard: t.Context()}
			p.metrics = newPoolMetrics(p)
			tenure := newTenure("h", &o, time.Now().Add(o.MaxClockSkew+o.StopMargin-o.Lease+left))
			x := newExecution(p, tenure, "s")
			x.known = true
			p.close(x, claims.Step{}, ending{called: true, err: &Failure{Code: claims.CodeExit, Message: "killed by SIGKILL"}}, p.log)
			if !slices.Equal(e.how, []string{want}) {
				t.Errorf("%v before the lease is over: %q, want %s", left, e.how, want)
			}
			x.stop(nil)
		}
	})
}

// What a step's end means where it has something to do with a stop: what the handler answered before one counts, what
// came of it does not.
func TestEndsOfStops(t *testing.T) {
	final := &Failure{Code: claims.CodeHandler, Message: "no such model"}
	wait := func(ctx context.Context) { <-ctx.Done() }
	failsFirst := func(ctx context.Context, out *Output) (Result, error) {
		return Result{}, errors.Join(out.Go(func() { wait(ctx) }), final)
	}
	for name, tc := range map[string]struct {
		timeout  time.Duration
		shutdown time.Duration // 0: none
		handler  func(ctx context.Context, out *Output) (Result, error)
		how      string
		code     claims.FailureCode // of the step; empty: none, or it is handed over
		yield    bool               // no step of the execution follows
	}{
		"fails, then the shutdown": {
			shutdown: time.Second, how: "finish", code: claims.CodeHandler, yield: true,
			handler: failsFirst,
		},
		"fails at the shutdown": {
			shutdown: time.Second, how: "hand over",
			handler: func(ctx context.Context, _ *Output) (Result, error) { wait(ctx); return Result{}, final },
		},
		"ends well, and the shutdown breaks a finalizer": {
			shutdown: time.Second, how: "hand over",
			handler: func(ctx context.Context, out *Output) (Result, error) {
				return Result{}, out.Go(func() { wait(ctx); panic("broken") })
			},
		},
		"fails, then the timeout": {
			timeout: time.Second, how: "finish", code: claims.CodeHandler, yield: true,
			handler: failsFirst,
		},
		"fails at the timeout": {
			timeout: time.Second, how: "finish", code: claims.CodeTimeout, yield: true,
			handler: func(ctx context.Context, _ *Output) (Result, error) { wait(ctx); return Result{}, final },
		},
		"ends well past the timeout": { // whose kill is under way, and would hit the next step
			timeout: time.Second, how: "finish", yield: true,
			handler: func(ctx context.Context, _ *Output) (Result, error) { wait(ctx); return Result{Continue: true}, nil },
		},
		"ends well": {
			timeout: time.Second, how: "finish",
			handler: func(context.Context, *Output) (Result, error) { return Result{Continue: true}, nil },
		},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				o, e := testLease(), &ends{}
				p := &Pool{
					opts:  Options{JoinTimeout: time.Hour, KillAfter: time.Hour, StepTimeout: tc.timeout, MaxSteps: 100, MaxAttempts: 1},
					steps: e, settle: e, events: e, log: slog.New(slog.DiscardHandler), hard: t.Context(),
					handler: HandlerFunc(func(ctx context.Context, _ Request, out *Output) (Result, error) { return tc.handler(ctx, out) }),
				}
				p.metrics = newPoolMetrics(p)
				x := newExecution(p, newTenure("h", &o, time.Now()), "s")
				x.known = true
				if tc.shutdown > 0 {
					time.AfterFunc(tc.shutdown, func() {
						p.mu.Lock()
						p.draining = true
						p.mu.Unlock()
						x.stop(claims.ErrShutdown)
					})
				}
				step := claims.Step{Index: 1}
				p.close(x, step, p.step(x, step, p.log), p.log)
				x.stop(nil)
				if !slices.Equal(e.how, []string{tc.how}) {
					t.Errorf("%q, want %s", e.how, tc.how)
				}
				var code claims.FailureCode
				if f := e.ending.Failure; f != nil {
					code = f.Code
				}
				if code != tc.code || e.ending.Yield != tc.yield {
					t.Errorf("failed with %q, yields %v; want %q, %v", code, e.ending.Yield, tc.code, tc.yield)
				}
			})
		})
	}
}

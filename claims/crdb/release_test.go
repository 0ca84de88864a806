package crdb_test

import (
	"errors"
	"fmt"
	"strings"
	"sync"
	"testing"
	"time"

	"reveille/claims"
)

// quarantine is the id of the session's quarantine.
func (r *rig) quarantine() string {
	r.t.Helper()
	return scan[string](r, "SELECT quarantine_id::TEXT FROM quarantines WHERE session_id = $1", string(r.session))
}

func (r *rig) release(how claims.ReleaseHow) (err error) {
	r.t.Helper()
	r.settled, err = r.store.Release(r.ctx(), claims.Release{Session: r.session, Quarantine: r.quarantine(), How: how, By: "ann", Why: "looked at it"}, r.newToken())
	return err
}

// outcomeUnknown quarantines the session with step a open.
func outcomeUnknown(r *rig) {
	running(r)
	r.interrupt()
	r.lose()
	r.ok(r.endExpired(false))
}

// exhausted quarantines the session with step a open, by a scanner that recovers nothing.
func exhausted(r *rig) {
	takenOver(r)
	r.convertWithin(claims.Limits{Takeovers: 10})
}

func (r *rig) convertWithin(l claims.Limits) {
	r.t.Helper()
	var err error
	r.settled, err = r.store.Convert(r.ctx(), r.claim, l, r.newToken())
	r.ok(err)
	if r.settled.Outcome != claims.OutcomeQuarantined {
		r.t.Fatalf("converted as %+v", r.settled)
	}
}

// invalidStep quarantines the session with step a open, whose row says what change makes of it.
func invalidStep(change string) func(*rig) {
	return func(r *rig) {
		takenOver(r)
		r.exec("UPDATE claims SET step = "+change+" WHERE session_id = $1", string(r.session))
		r.convertWithin(claims.Limits{Recoveries: 3, Takeovers: 10})
	}
}

// badContinuation quarantines the session for a continuation of step a that was changed so.
func badContinuation(promise func(*rig), change string) func(*rig) {
	return func(r *rig) {
		running(r)
		promise(r)
		r.exec("UPDATE continuations SET body = "+change+", not_before = statement_timestamp() WHERE session_id = $1", string(r.session))
		r.wantErr(r.acquire(), claims.ErrQuarantined)
	}
}

// headOf quarantines the session between steps, with its head: b, steer c and a bare wake; d waits behind.
func headOf(r *rig) {
	r.run(input("a"))
	r.wake(input("b"), steer("c"), input("d"))
	r.wake()
	r.ok(r.finish(nil))
	r.lose()
	r.ok(r.takeOver())
	r.convertWithin(claims.Limits{})
}

// runOn runs whatever the session has to run and returns the steps it took.
func (r *rig) runOn() string {
	r.t.Helper()
	from := len(r.briefs())
	r.holder = r.lease("worker", longLease)
	for range 10 {
		err := r.acquire()
		if errors.Is(err, claims.ErrNotReady) {
			break
		}
		r.ok(err)
		for r.finishAndStart() {
		}
	}
	var steps []string
	for _, b := range r.briefs()[from:] {
		if strings.HasPrefix(b, "step.started") {
			steps = append(steps, strings.TrimPrefix(b, "step.started"))
		}
	}
	return strings.Join(steps, "")
}

// finishAndStart ends the open step and starts the next, where there is one.
func (r *rig) finishAndStart() bool {
	r.t.Helper()
	r.ok(r.finish(nil))
	if !r.settled.Again {
		return false
	}
	r.ok(r.startStep())
	return r.nextStep != nil
}

// TestI30Release: each way out of each quarantine, what it appends, and what the session runs afterwards. Whatever was
// damaged, a step has one end, and no input is served twice or lost.
func TestI30Release(t *testing.T) {
	base := newRig(t)
	gone := "'not JSON'"
	handOver := func(r *rig) { r.ok(r.handOver()) }
	goesOn := func(r *rig) { r.ok(r.finish(func(e *claims.Ending) { e.Continue, e.Yield = true, true })) }
	retries := func(r *rig) { r.ok(r.finish(retried)) }
	interrupted := "session.released(interrupted) step.interrupted(unjoined)"
	cancelled := "session.released(interrupted) continuation.cancelled"
	for name, c := range map[string]struct {
		setup                  func(*rig)
		retry, steps           string // what a retry appends, and the steps that then run
		interrupted, andThen   string
		discarded, andAfterwrd string
	}{
		"outcome unknown": {
			outcomeUnknown, "session.released(retry) step.failed(worker_lost)", "(a<release0)",
			interrupted, "", "session.released(discard) step.interrupted(unjoined)", "",
		},
		"exhausted, and b waits": {
			func(r *rig) { exhausted(r); r.wake(input("b")) }, "session.released(retry) step.failed(worker_lost)", "(a<release0)(b)",
			interrupted, "(b)", "session.released(discard) step.interrupted(unjoined) input.cancelled(b)", "",
		},
		"a step that does not decode": {
			invalidStep(gone), "session.released(retry) step.failed(worker_lost)", "(a<release0)", interrupted, "",
			"session.released(discard) step.interrupted(unjoined)", "",
		},
		"a step of somebody else": {
			invalidStep(`replace(step, '"session":"', '"session":"not-')`), "session.released(retry) step.failed(worker_lost)", "(a<release0)",
			interrupted, "", "session.released(discard) step.interrupted(unjoined)", "",
		},
		"another step than the log's": {
			func(r *rig) {
				takenOver(r)
				r.exec("UPDATE claims SET step_id = gen_random_uuid() WHERE session_id = $1", string(r.session))
				r.convertWithin(claims.Limits{Recoveries: 3, Takeovers: 10})
			}, "session.released(retry) step.failed(worker_lost)", "(a<release0)", interrupted, "",
			"session.released(discard) step.interrupted(unjoined)", "",
		},
		"no step is open in the log": {
			func(r *rig) {
				betweenSteps(r)
				r.exec("UPDATE claims SET step_id = gen_random_uuid(), step = 'x' WHERE session_id = $1", string(r.session))
				r.lose()
				r.ok(r.takeOver())
				r.convertWithin(claims.Limits{Recoveries: 3, Takeovers: 10})
			}, "session.released(retry)", "(b)", "session.released(interrupted)", "(b)", "session.released(discard) input.cancelled(b)", "",
		},
		"a promise that does not decode, after a hand-over": {
			badContinuation(handOver, gone), "session.released(retry)", "(a<release0)", cancelled + "(handover)", "",
			"session.released(discard) continuation.cancelled(handover)", "",
		},
		"a promise that does not decode, after continue": {
			badContinuation(goesOn, gone), "session.released(retry)", "(<release0)", cancelled + "(continue)", "",
			"session.released(discard) continuation.cancelled(continue)", "",
		},
		"a promise of somebody else, after a failure": {
			badContinuation(retries, `replace(body, '"session":"', '"session":"not-')`), "session.released(retry)", "(a<release0)",
			cancelled + "(retry)", "", "session.released(discard) continuation.cancelled(retry)", "",
		},
		"a promise under another number": {
			badContinuation(retries, `replace(body, '"number":1', '"number":7')`), "session.released(retry)", "(a<release0)",
			cancelled + "(retry)", "", "session.released(discard) continuation.cancelled(retry)", "",
		},
		"a promise that its chain had overtaken": {
			func(r *rig) {
				running(r)
				retries(r)
				r.exec(`INSERT INTO continuations (session_id, number, shard, lineage, not_before, due_at, body)
					SELECT session_id, 2, shard, lineage, not_before, due_at, replace(body, '"number":1', '"number":2') FROM continuations WHERE session_id = $1`, string(r.session))
				r.exec("UPDATE sessions SET promised = 2, continuations = 2 WHERE session_id = $1", string(r.session))
				r.pass()
				r.wantErr(r.acquire(), claims.ErrQuarantined)
			}, "session.released(retry) continuation.cancelled(retry)", "(a<retry1)", cancelled + "(retry)", "(a<retry1)",
			"session.released(discard) continuation.cancelled(retry) continuation.cancelled(retry)", "",
		},
		"a head, between steps": {
			headOf, "session.released(retry)", "(b+c)(d)", "session.released(interrupted) input.cancelled(b) input.cancelled(c) wake.cancelled", "(d)",
			"session.released(discard) input.cancelled(b) input.cancelled(c) wake.cancelled input.cancelled(d)", "",
		},
		"wakes that wait": {
			func(r *rig) { outcomeUnknown(r); r.wake(); r.wakeAt(nil, time.Hour); r.admit(input("b")) },
			"session.released(retry) step.failed(worker_lost)", "(a<release0)(b)", interrupted, "(b)",
			"session.released(discard) step.interrupted(unjoined) input.cancelled(b) wake.cancelled", "",
		},
	} {
		for how, want := range map[claims.ReleaseHow]struct{ log, steps string }{
			claims.ReleaseRetry: {c.retry, c.steps}, claims.ReleaseInterrupted: {c.interrupted, c.andThen}, claims.ReleaseDiscard: {c.discarded, c.andAfterwrd},
		} {
			t.Run(name+", "+string(how), func(t *testing.T) {
				r := base.fresh(name + " " + string(how))
				r.t = t
				c.setup(r)
				before := len(r.briefs())
				r.ok(r.release(how))
				r.wantTail(before, want.log)
				if n := scan[int64](r, "SELECT count(*) FROM quarantines WHERE session_id = $1", string(r.session)); n != 0 {
					t.Error("it is still quarantined")
				}
				if takeovers := scan[int64](r, "SELECT takeovers FROM sessions WHERE session_id = $1", string(r.session)); takeovers != 0 {
					t.Errorf("%d takeovers are still counted", takeovers)
				}
				r.check()
				if how == claims.ReleaseRetry && strings.Contains(want.steps, "<release") {
					if found := scan[bool](r, "SELECT bool_and(due_at <= statement_timestamp()) FROM continuations WHERE session_id = $1", string(r.session)); !found {
						t.Error("the scanner does not announce it at once")
					}
				}
				r.pass()
				if got := r.runOn(); got != want.steps {
					t.Errorf("it ran %q, want %q", got, want.steps)
				}
				r.check()
				if left := scan[int64](r, "SELECT count(*) FROM inputs WHERE session_id = $1 AND state = 'quarantined'", string(r.session)); left != 0 {
					t.Errorf("%d inputs are quarantined still", left)
				}
			})
		}
	}
}

// TestI30ReleaseTellsWho, and refuses what is not, or not any more, or another quarantine.
func TestI30ReleaseTellsWho(t *testing.T) {
	r := newRig(t)
	outcomeUnknown(r)
	first := r.quarantine()
	ask := func(session claims.SessionID, id string, how claims.ReleaseHow) error {
		_, err := r.store.Release(r.ctx(), claims.Release{Session: session, Quarantine: id, How: how, By: "a\x00nn", Why: "it is \xff fixed"}, r.newToken())
		return err
	}
	log := len(r.briefs())
	r.wantErr(ask(r.session, newID(), claims.ReleaseRetry), claims.ErrNotQuarantined)
	r.wantErr(ask("nobody", first, claims.ReleaseRetry), claims.ErrNotQuarantined)
	r.wantErr(ask(r.session, first, "twice"), claims.ErrIllegal)
	r.wantTail(log, "")
	r.ok(ask(r.session, first, claims.ReleaseRetry))
	r.wantErr(ask(r.session, first, claims.ReleaseDiscard), claims.ErrNotQuarantined)
	r.wantTail(log, "session.released(retry) step.failed(worker_lost)")
	if got, want := string(r.log()[log].Data), `{"how":"retry","by":"a\ufffdnn","why":"it is \ufffd fixed"}`; got != strings.ReplaceAll(want, `\ufffd`, "\uFFFD") {
		t.Errorf("the event says %s, want %s", got, want)
	}
	// Quarantined again: the old id releases nothing.
	r.holder = r.lease("worker", longLease)
	r.ok(r.acquire())
	r.interrupt()
	r.lose()
	r.ok(r.endExpired(false))
	r.wantErr(ask(r.session, first, claims.ReleaseRetry), claims.ErrNotQuarantined)
	r.check()
}

// TestI30NothingToRetry: a promise that does not decode, and that the log does not tell of, is not made up.
func TestI30NothingToRetry(t *testing.T) {
	r := newRig(t)
	r.run(input("a"))
	r.ok(r.finish(nil))
	r.exec(`INSERT INTO continuations (session_id, number, shard, lineage, not_before, due_at, body)
		VALUES ('s', 1, 0, gen_random_uuid(), statement_timestamp(), statement_timestamp(), '?')`)
	r.exec("UPDATE sessions SET promised = 1, continuations = 1 WHERE session_id = 's'")
	r.wantErr(r.acquire(), claims.ErrQuarantined)
	log := len(r.briefs())
	r.wantErr(r.release(claims.ReleaseRetry), claims.ErrNothingToRetry)
	r.wantTail(log, "")
	r.ok(r.release(claims.ReleaseInterrupted))
	r.wantTail(log, "session.released(interrupted) continuation.cancelled()")
	r.check()
}

// TestI30ReleasesAtOnce: of releases that race each other, a wake, an interrupt and a scanner one is done, and the wake is
// never lost (I22).
func TestI30ReleasesAtOnce(t *testing.T) {
	base := newRig(t)
	for i := range 20 {
		r := base.fresh(fmt.Sprintf("race%d", i))
		outcomeUnknown(r)
		id := r.quarantine()
		var wg sync.WaitGroup
		errs := make([]error, 3)
		for k, how := range []claims.ReleaseHow{claims.ReleaseRetry, claims.ReleaseInterrupted, claims.ReleaseDiscard} {
			wg.Go(func() {
				_, errs[k] = r.store.Release(r.ctx(), claims.Release{Session: r.session, Quarantine: id, How: how, By: "x", Why: "y"}, &claims.Token{ID: newID()})
			})
		}
		wake, interrupt := waking(input("b"))(r), interrupting(r)
		wg.Go(func() {
			if _, err := r.store.Apply(r.ctx(), wake, nil); err != nil {
				t.Errorf("wake: %v", err)
			}
			if _, err := r.store.Apply(r.ctx(), interrupt, nil); err != nil {
				t.Errorf("interrupt: %v", err)
			}
		})
		wg.Go(func() {
			if _, err := r.store.EndExpired(r.ctx(), r.candidate, false, &claims.Token{ID: newID()}); !errors.Is(err, claims.ErrFenced) {
				t.Errorf("a scanner ended it: %v", err)
			}
		})
		wg.Wait()
		done := 0
		for _, err := range errs {
			if err == nil {
				done++
			} else if !errors.Is(err, claims.ErrNotQuarantined) {
				t.Errorf("release: %v", err)
			}
		}
		if released := strings.Count(strings.Join(r.briefs(), " "), "session.released"); done != 1 || released != 1 {
			t.Fatalf("%d releases were done, the log has %d", done, released)
		}
		r.check()
	}
}

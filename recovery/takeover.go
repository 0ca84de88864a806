package recovery

import (
	"context"
	"errors"
	"slices"
	"time"

	"github.com/google/uuid"

	"reveille/claims"
)

// taking is a claim that this scanner takes over, from before the transaction
// that does it until the claim is ended or somebody else's. While it is one,
// nothing else ends it: the claim lives as long as the scanner's lease. So a
// conversion that failed is tried again here, under the same fence and token,
// and costs the session no takeover.
type taking struct {
	candidate claims.Candidate
	holder    claims.HolderID
	as        claims.ExecutionID
	claim     claims.Claim
	taken     bool // the takeover has answered: claim is ours
	token     *claims.Token
	found     time.Time
	tries     int
	notBefore uint64 // the pass that tries it again
}

// overdue is since when its worker's lease has been expired; 0: unknown.
func (t *taking) overdue() time.Duration {
	if t.candidate.Overdue == 0 {
		return 0
	}
	return t.candidate.Overdue + time.Since(t.found)
}

const (
	// resumedShare: at most a fourth of a batch are claims whose conversion
	// failed before, so that they never fill it.
	resumedShare = 4
	// mostTaken, in batches, bounds what is tried again. What is dropped is
	// found by the sweep, revoked, and comes back to the lane of all scanners.
	mostTaken = 10
	// sweepEvery is how often the scanner looks for claims that its lease keeps
	// alive and that it does not know (I3).
	sweepEvery = time.Minute
)

// errUntrusted: the scanner's own lease is past its local deadline, or none.
var errUntrusted = errors.New("none is trusted by its own clocks")

// trusts asks whether the lease is still that one and trusted, now (I7).
func (s *Scanner) trusts(holder claims.HolderID) bool {
	now, ok := s.parts.Holder()
	return ok && now == holder
}

func (l *lane) claims() {
	holder, trusted := l.parts.Holder()
	if !trusted {
		l.lease.is(l.log, errUntrusted)
		return
	}
	l.lease.is(l.log, nil)
	resumed := l.resumable(holder)
	fresh, err := l.parts.Claims.ExpiredClaims(l.box, l.opts.Batch-len(resumed))
	if !l.read("read", err) {
		return
	}
	l.res.Full = len(fresh)+len(resumed) >= l.opts.Batch
	if len(fresh) > 0 {
		if fresh, err = l.parts.Claims.TouchClaims(l.box, fresh); !l.read("touched", err) {
			return
		}
	}
	l.sweep(holder)
	keys := make([]string, 0, len(resumed)+len(fresh))
	for _, t := range resumed {
		keys = append(keys, claimKey(t.candidate))
	}
	for _, c := range fresh {
		keys = append(keys, claimKey(c))
	}
	l.saw(keys, func(i int) time.Duration {
		if i < len(resumed) {
			return resumed[i].overdue()
		}
		return fresh[i-len(resumed)].Overdue
	})
	failures := l.failures(keys)
	l.each(keys, func(i int) int {
		if i < len(resumed) {
			return resumed[i].tries
		}
		return failures(i)
	}, func(ctx context.Context, i int) (outcome, error) {
		if i < len(resumed) {
			return l.take(ctx, resumed[i])
		}
		return l.claim(ctx, fresh[i-len(resumed)], holder)
	})
}

func claimKey(c claims.Candidate) string { return string(c.Session) + " " + string(c.Execution) }

// resumable takes what is due to be tried again. What another lease of this
// process took is that lease's: it expires with it.
func (l *lane) resumable(holder claims.HolderID) []*taking {
	l.taken = slices.DeleteFunc(l.taken, func(t *taking) bool { return t.holder != holder })
	var out []*taking
	for _, t := range l.taken {
		if t.notBefore <= l.number && len(out) < max(1, l.opts.Batch/resumedShare) {
			out = append(out, t)
		}
	}
	return out
}

// sweep revokes claims that live only because this process does (I3): all that
// its lease holds is read first, and looked up afterwards.
func (l *lane) sweep(holder claims.HolderID) {
	if now := time.Now(); now.Sub(l.swept) >= sweepEvery {
		l.swept = now
	} else {
		return
	}
	held, err := l.parts.Held.Held(l.box, holder)
	if err != nil {
		l.read("swept", err)
		return
	}
	for _, n := range held {
		known := slices.ContainsFunc(l.taken, func(t *taking) bool { return t.candidate.Session == n.Session })
		if known || n.Revoked != claims.None {
			continue
		}
		claim := claims.Claim{Session: n.Session, Execution: n.Execution, Holder: holder}
		if err := l.parts.Held.Revoke(l.box, claim, claims.Unknown); err != nil && !moved(err) {
			l.log.Warn("a claim that nobody here knows could not be revoked", "session", n.Session, "execution", n.Execution, "error", err)
		}
	}
}

// claim works on one expired claim.
func (l *lane) claim(ctx context.Context, c claims.Candidate, holder claims.HolderID) (outcome, error) {
	switch decide(c) {
	case endIt:
		return l.endExpired(ctx, c, holder)
	case takeItOver:
		if slices.ContainsFunc(l.taken, func(t *taking) bool { return t.candidate.Session == c.Session }) {
			return left, nil // its takeover has not answered yet; it is tried again in its turn
		}
		t := &taking{
			candidate: c, holder: holder, found: time.Now(),
			as:    claims.ExecutionID(uuid.NewString()),
			token: &claims.Token{ID: uuid.NewString()},
		}
		l.taken = append(l.taken, t) // before the transaction begins
		if excess := len(l.taken) - mostTaken*l.opts.Batch; excess > 0 {
			l.taken = slices.Delete(l.taken, 0, excess)
		}
		return l.take(ctx, t)
	default:
		return left, nil
	}
}

func (l *lane) endExpired(ctx context.Context, c claims.Candidate, holder claims.HolderID) (outcome, error) {
	if !l.trusts(holder) {
		return skipped, nil
	}
	settled, err := l.parts.Claims.EndExpired(ctx, c, l.opts.UncertainInterrupted, &claims.Token{ID: uuid.NewString()})
	switch {
	case moved(err):
		return left, nil
	case err != nil:
		return failed, err
	}
	return l.settled(ctx, c, claims.Claim{Session: c.Session, Execution: c.Execution}, settled), nil
}

// take takes a claim over, unless that has been done, and ends it. On return
// it is ended, somebody else's, or still in l.taken for a later pass.
func (l *lane) take(ctx context.Context, t *taking) (outcome, error) {
	if !t.taken {
		if !l.trusts(t.holder) {
			l.drop(t)
			return skipped, nil
		}
		claim, err := l.parts.Conversions.TakeOver(ctx, t.candidate, t.holder, t.as)
		switch {
		case moved(err):
			l.drop(t)
			return left, nil
		case err != nil: // it may have been done: the same id asks again
			l.later(t)
			return failed, err
		}
		t.claim, t.taken = claim, true
		l.log.Info("claim taken over", "session", claim.Session, "from", t.candidate.Execution, "to", claim.Execution,
			"epoch", claim.Epoch, "revoked", t.candidate.Revoked)
	}
	return l.convert(ctx, t)
}

// convert ends a claim that is ours: converted, or quarantined where the
// database does not take the conversion (I27).
func (l *lane) convert(ctx context.Context, t *taking) (outcome, error) {
	var r refusals
	for {
		if !l.trusts(t.holder) {
			l.drop(t) // it expires with its lease, and another scanner takes it
			return left, nil
		}
		settled, err := l.parts.Conversions.Convert(ctx, t.claim, l.opts.Limits, t.token)
		switch {
		case err == nil:
			l.drop(t)
			return l.settled(ctx, t.candidate, t.claim, settled), nil
		case moved(err):
			l.drop(t)
			return left, nil
		}
		code, _ := l.parts.Conversions.RefusedCode(err)
		var n next
		switch r, n = r.after(code); n {
		case quarantine:
			what, again, err := l.conversionFailed(ctx, t, refusalDetail(r, code, err))
			if !again {
				return what, err
			}
			r = refusals{}
		case tryLater:
			l.later(t)
			return failed, err
		case tryAgain:
		}
	}
}

// conversionFailed quarantines a claim whose conversion was refused. Where its
// verdict was raised meanwhile, that conversion is not the one to be made any
// more: again says that the claim is to be converted anew.
func (l *lane) conversionFailed(ctx context.Context, t *taking, why string) (what outcome, again bool, err error) {
	if !l.trusts(t.holder) {
		l.drop(t)
		return left, false, nil
	}
	settled, err := l.parts.Conversions.ConversionFailed(ctx, t.claim, why, &claims.Token{ID: uuid.NewString()})
	if moved(err) { // the takeover, asked again, tells whose it is
		var now claims.Claim
		now, err = l.parts.Conversions.TakeOver(ctx, t.candidate, t.holder, t.as)
		if err == nil && now.Verdict != t.claim.Verdict { // verdicts are only raised: that ends
			t.claim = now
			return "", true, nil
		}
		if err == nil {
			err = claims.ErrFenced
		}
	}
	switch {
	case moved(err):
		l.drop(t)
		return left, false, nil
	case err != nil:
		l.later(t)
		return failed, false, err
	}
	l.drop(t)
	return l.settled(ctx, t.candidate, t.claim, settled), false, nil
}

// drop forgets a claim that is ended or not ours.
func (l *lane) drop(t *taking) {
	l.taken = slices.DeleteFunc(l.taken, func(o *taking) bool { return o == t })
}

// later puts a claim behind the others that are to be tried again.
func (l *lane) later(t *taking) {
	l.drop(t)
	t.tries++
	t.notBefore = l.number + skip(t.tries)
	l.taken = append(l.taken, t)
}

// settled tells who must hear of a claim's end.
func (l *lane) settled(ctx context.Context, c claims.Candidate, claim claims.Claim, settled claims.Settlement) outcome {
	l.parts.Relayer.Poke(c.Session)
	attrs := []any{
		"session", c.Session, "execution", claim.Execution, "epoch", claim.Epoch,
		"from", c.Phase, "revoked", c.Revoked, "to", settled.Outcome,
	}
	if settled.Outcome == claims.OutcomeQuarantined {
		l.metrics.quarantined(settled.Reason)
		l.log.Warn("session quarantined", append(attrs, "reason", settled.Reason)...)
		return quarantined
	}
	l.log.Info("expired claim ended", attrs...)
	if settled.Ready {
		// Lost, it is made again by the lanes of what is ready.
		if err := l.announce(ctx, c.Session); err != nil {
			l.log.Debug("session not announced", "session", c.Session, "error", err)
		}
	}
	return done
}

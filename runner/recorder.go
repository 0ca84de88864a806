package runner

import (
	"context"
	"errors"
	"sync"
	"time"
	"unicode/utf8"

	"github.com/google/uuid"

	"reveille/claims"
)

// Bounds of what a step puts out.
const (
	flushEvery = 100 * time.Millisecond // at most this often one append (design.md section 5)
	maxPending = 1 << 20                // bytes that wait for an append before the handler does
	// maxText is the largest text of one event: as JSON it may grow sixfold and
	// must still fit the server's maximum payload (I24).
	maxText = 128 << 10
	// contentOverhead is the envelope around content.
	contentOverhead = 1 << 10
)

// recorder buffers what a step puts out and appends it in batches. What is
// left at the join goes into the transaction that closes the step.
type recorder struct {
	exec *execution
	step claims.Step

	mu      sync.Mutex
	room    sync.Cond // bytes were taken, or err was set
	pending []claims.Content
	bytes   int
	err     error // answers all later output
	timer   *time.Timer
	flushes sync.Mutex // one append at a time, in order
	running sync.WaitGroup
	closed  bool
	release func() bool // lets go of the execution's context
}

func newRecorder(e *execution, step claims.Step) *recorder {
	r := &recorder{exec: e, step: step}
	r.room.L = &r.mu
	r.release = context.AfterFunc(e.ctx, func() {
		r.mu.Lock()
		defer r.mu.Unlock()
		r.room.Broadcast()
	})
	return r
}

// put takes content, and waits while too much is waiting already.
func (r *recorder) put(c claims.Content) error {
	if c.Type == claims.TextEvent {
		return r.text(c.Data.(claims.TextData).Text)
	}
	raw, err := claims.Marshal(c.Data)
	if err != nil {
		return err
	}
	if len(raw)+contentOverhead > r.exec.pool.opts.MaxEventBytes {
		return claims.ErrTooLarge
	}
	return r.add(c, len(raw))
}

func (r *recorder) text(s string) error {
	e := r.exec
	e.pool.events.PublishLive(e.session, e.epoch, r.step.ID, s)
	for len(s) > 0 {
		n := cut(s, maxText)
		if err := r.add(claims.Content{Type: claims.TextEvent, Data: claims.TextData{Text: s[:n]}}, n); err != nil {
			return err
		}
		s = s[n:]
	}
	return nil
}

// cut is the length of the longest prefix of at most n bytes that ends at a rune.
func cut(s string, n int) int {
	if len(s) <= n {
		return len(s)
	}
	for n > 0 && !utf8.RuneStart(s[n]) {
		n--
	}
	return n
}

func (r *recorder) add(c claims.Content, size int) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	for r.err == nil && !r.closed && r.bytes > 0 && r.bytes+size > maxPending {
		if r.exec.ctx.Err() != nil { // a step that must stop does not wait for the log
			return context.Cause(r.exec.ctx)
		}
		r.flushSoon(0)
		r.room.Wait()
	}
	switch {
	case r.err != nil:
		return r.err
	case r.closed:
		return ErrStepOver
	}
	r.bytes += size
	r.append(c)
	r.flushSoon(flushEvery)
	return nil
}

// append joins text to the text before it. Callers hold mu.
func (r *recorder) append(c claims.Content) {
	if n := len(r.pending); n > 0 && c.Type == claims.TextEvent && r.pending[n-1].Type == claims.TextEvent {
		before := r.pending[n-1].Data.(claims.TextData).Text
		after := c.Data.(claims.TextData).Text
		if len(before)+len(after) <= maxText {
			r.pending[n-1].Data = claims.TextData{Text: before + after}
			return
		}
	}
	r.pending = append(r.pending, c)
}

// flushSoon sees to it that an append is on its way. Callers hold mu.
func (r *recorder) flushSoon(in time.Duration) {
	if r.timer != nil && in > 0 || r.closed {
		return
	}
	if r.timer != nil && !r.timer.Stop() {
		return // it is running
	}
	if r.timer == nil {
		r.running.Add(1)
	}
	r.timer = time.AfterFunc(in, func() {
		defer r.running.Done()
		r.flush()
	})
}

// flush appends what is pending, and goes on until it is appended or may not be.
func (r *recorder) flush() {
	r.flushes.Lock()
	defer r.flushes.Unlock()
	r.mu.Lock()
	batch := r.pending
	r.pending, r.bytes, r.timer = nil, 0, nil
	r.room.Broadcast()
	err := r.err
	r.mu.Unlock()
	if len(batch) == 0 || err != nil {
		return
	}
	e := r.exec
	token := claims.Token{ID: uuid.NewString()}
	err = e.pool.persist(e.lost(), "record", e, func(ctx context.Context) error {
		return e.pool.steps.Record(ctx, e.claim, r.step, batch, &token)
	})
	if err != nil {
		e.heard(err)
		r.fail(err)
		return
	}
	e.pool.events.Poke(e.session)
}

// fail answers all later output with err.
func (r *recorder) fail(err error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.err == nil {
		r.err = err
	}
	r.room.Broadcast()
}

// decline makes a refusal durable with what was put out before it (I12).
func (r *recorder) decline(reason string) error {
	r.flushes.Lock()
	defer r.flushes.Unlock()
	r.mu.Lock()
	tail, err := r.pending, r.err
	r.pending, r.bytes = nil, 0
	r.mu.Unlock()
	e := r.exec
	if e.declined() {
		return nil
	}
	if err != nil {
		return err
	}
	token := claims.Token{ID: uuid.NewString()}
	err = e.pool.persist(e.lost(), "decline", e, func(ctx context.Context) error {
		return e.pool.steps.Decline(ctx, e.claim, r.step, tail, reason, &token)
	})
	if err != nil {
		e.heard(err)
		r.fail(err)
		return err
	}
	e.hearPhase(claims.Cancelled)
	r.fail(claims.ErrCancelled)
	e.pool.events.Poke(e.session)
	return nil
}

// close ends the recording after the join and returns what was not appended.
func (r *recorder) close() []claims.Content {
	r.release()
	r.mu.Lock()
	r.closed = true
	r.room.Broadcast()
	if r.timer != nil && r.timer.Stop() {
		r.timer = nil
		r.running.Done()
	}
	r.mu.Unlock()
	r.running.Wait()
	r.mu.Lock()
	defer r.mu.Unlock()
	tail := r.pending
	r.pending = nil
	if r.err != nil && !errors.Is(r.err, claims.ErrTooLarge) {
		return nil // it may not be recorded
	}
	return tail
}

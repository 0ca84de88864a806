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
	flushEvery = 100 * time.Millisecond // at most this often one append (docs/design.md section 5)
	maxPending = 1 << 20                // bytes that wait for an append before the handler does
	// maxText is the largest text of one event: as JSON it may grow sixfold and
	// must still fit the server's maximum payload (I24).
	maxText = 128 << 10
	// contentOverhead is the envelope around content. It is counted as pending too:
	// so the events of one append are few enough for one transaction.
	contentOverhead = 1 << 10
)

// recorder buffers what a step puts out and appends it in batches. What is
// left at the join goes into the transaction that closes the step.
//
// It holds at most maxPending bytes, or one content that is larger, and as much
// again while that is being appended; whoever brings more waits. A step that
// must stop does not wait for the log: its context's end lets go whoever waits
// in put, and the kill whoever waits in decline, since a refusal that is under
// way may still become durable.
type recorder struct {
	ctx  context.Context // the step's
	exec *execution
	step claims.Step
	over chan struct{} // closed by close

	mu      sync.Mutex
	room    sync.Cond // bytes were taken, err was set, or the step must stop
	pending []claims.Content
	text    []byte // put out after pending, and not yet one of it
	bytes   int    // of both
	err     error  // answers all later output
	timer   *time.Timer
	closed  bool

	turn    chan struct{}  // held by the one append, or decline, that is under way: they keep their order
	running sync.WaitGroup // appends and a decline
}

func newRecorder(ctx context.Context, e *execution, step claims.Step) *recorder {
	r := &recorder{ctx: ctx, exec: e, step: step, over: make(chan struct{}), turn: make(chan struct{}, 1)}
	r.room.L = &r.mu
	go r.watch()
	return r
}

// watch lets go those who wait when the step must stop.
func (r *recorder) watch() {
	for stopped := r.ctx.Done(); ; stopped = nil {
		select {
		case <-stopped:
		case <-r.exec.killed:
		case <-r.over:
			return
		}
		r.mu.Lock()
		r.room.Broadcast()
		r.mu.Unlock()
		if stopped == nil {
			return
		}
	}
}

// mustStop is why the step may not wait for the log any more, or nil.
func (r *recorder) mustStop() error {
	return context.Cause(r.ctx)
}

// put takes content, and waits while too much is waiting already.
func (r *recorder) put(c claims.Content) error {
	if c.Type == claims.TextEvent {
		return r.putText(c.Data.(claims.TextData).Text)
	}
	raw, err := claims.Marshal(c.Data)
	if err != nil {
		return err
	}
	if len(raw)+contentOverhead > r.exec.pool.opts.MaxEventBytes {
		return claims.ErrTooLarge
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	if err := r.await(len(raw) + contentOverhead); err != nil {
		return err
	}
	r.seal()
	r.pending = append(r.pending, c)
	r.bytes += len(raw) + contentOverhead
	r.flushSoon(flushEvery)
	return nil
}

// putText takes text, in pieces: each is shown live once the log has room for it.
func (r *recorder) putText(s string) error {
	e := r.exec
	for len(s) > 0 {
		n := cut(s, maxText)
		if err := r.addText(s[:n]); err != nil {
			return err
		}
		e.pool.events.PublishLive(e.session, e.epoch, r.step.ID, s[:n])
		s = s[n:]
	}
	return nil
}

func (r *recorder) addText(s string) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	if err := r.await(len(s) + contentOverhead); err != nil {
		return err
	}
	if len(r.text)+len(s) > maxText {
		r.seal()
	}
	if len(r.text) == 0 {
		r.bytes += contentOverhead
	}
	r.text = append(r.text, s...)
	r.bytes += len(s)
	r.flushSoon(flushEvery)
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

// await waits for room, and reports why there will be none. Callers hold mu.
func (r *recorder) await(size int) error {
	for r.err == nil && !r.closed && r.bytes > 0 && r.bytes+size > maxPending {
		if err := r.mustStop(); err != nil {
			return err
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
	return nil
}

// seal ends the text that following text is joined to. Callers hold mu.
func (r *recorder) seal() {
	if len(r.text) > 0 {
		r.pending = append(r.pending, claims.Content{Type: claims.TextEvent, Data: claims.TextData{Text: string(r.text)}})
		r.text = r.text[:0]
	}
}

// take empties what is pending. Callers hold mu.
func (r *recorder) take() []claims.Content {
	r.seal()
	batch := r.pending
	r.pending, r.bytes = nil, 0
	r.room.Broadcast()
	return batch
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
	r.turn <- struct{}{}
	defer func() { <-r.turn }()
	r.mu.Lock()
	batch, err := r.take(), r.err
	r.timer = nil
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

// decline makes a refusal durable with what was put out before it (I12). Past
// the kill it is not waited for; close does.
func (r *recorder) decline(reason string) error {
	r.mu.Lock()
	if r.closed {
		r.mu.Unlock()
		return ErrStepOver
	}
	r.running.Add(1)
	r.mu.Unlock()
	done := make(chan error, 1)
	go func() {
		defer r.running.Done()
		done <- r.persistDecline(reason)
	}()
	select {
	case err := <-done:
		return err
	case <-r.exec.killed:
		return r.mustStop()
	}
}

func (r *recorder) persistDecline(reason string) error {
	r.turn <- struct{}{}
	defer func() { <-r.turn }()
	r.mu.Lock()
	tail, err := r.take(), r.err
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
	close(r.over)
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
	tail := r.take()
	if r.err != nil && !errors.Is(r.err, claims.ErrTooLarge) {
		return nil // it may not be recorded
	}
	return tail
}

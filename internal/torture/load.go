package main

import (
	"context"
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"sync"
	"sync/atomic"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"reveille/internal/judge"
)

const (
	drivers = 4
	// lasting are the sessions of a driver that get one thing after another; a fresh one gets one.
	lasting = 5
	// mostBusy and mostQueued bound what waits: the load waits for the workers, and leaves slots for what is recovered.
	mostBusy, mostQueued = 12, 60
	// tick is between two things that a driver does.
	tick = 120 * time.Millisecond
	// lookTimeout bounds a look at what waits.
	lookTimeout = 2 * time.Second
	// delay is of what is not due at once.
	delay = 400 * time.Millisecond
)

// deeds are what handlers are told to do, as often as they stand here.
var deeds = []string{
	"end", "end", "end", "end", "end", "talk", "talk", "talk", "more", "more", "retry", "retry", "fail", "decline", "hang", "hang", "stubborn",
	"fork", "crash", "panic",
}

// load sends commands to sessions, and releases what is quarantined.
type load struct {
	w *world
	h *history
	// publishing is held for writing by whoever takes the stream of commands back in time.
	publishing sync.RWMutex
	restarts   atomic.Int64 // of servers
	until      time.Time    // when the load ends
	room       atomic.Bool
	made       atomic.Int64 // sessions
	deadly     atomic.Int64 // inputs that kill each worker
}

// driver sends one thing after another. A lasting session is of one driver, so what it is sent has one order.
type driver struct {
	*load
	ctx    context.Context
	number int
	rng    *rand.Rand
	ids    int
	last   map[string]judge.Command // the last command with an input, by session
}

// run drives until ctx ends.
func (l *load) run(ctx context.Context, seed uint64) {
	var all sync.WaitGroup
	defer all.Wait()
	all.Go(func() {
		for ctx.Err() == nil {
			look, cancel := context.WithTimeout(ctx, lookTimeout) // the answer of a server that was killed does not come
			busy, err1 := l.w.busy(look)
			queued, err2 := l.w.queued(look)
			cancel()
			l.room.Store(err1 == nil && err2 == nil && busy < mostBusy && queued < mostQueued)
			pause(ctx, 2*pollEvery)
		}
	})
	for n := range drivers {
		d := &driver{load: l, ctx: ctx, number: n, rng: rand.New(rand.NewPCG(seed, uint64(n)+1)), last: map[string]judge.Command{}}
		all.Go(func() {
			for pause(ctx, tick) {
				if l.room.Load() {
					d.something()
				}
			}
		})
	}
	all.Go(func() { l.operate(ctx, rand.New(rand.NewPCG(seed, 99))) })
}

// pause waits, and reports false where ctx ended.
func pause(ctx context.Context, d time.Duration) bool {
	select {
	case <-ctx.Done():
		return false
	case <-time.After(d):
		return true
	}
}

// busy counts the sessions that have something to do.
func (w *world) busy(ctx context.Context) (int, error) {
	return w.number(ctx, `SELECT count(*) FROM sessions WHERE quarantine_id IS NULL
		AND (execution_id IS NOT NULL OR armed > 0 OR continuations > 0 OR delayed > 0 OR wakes > wakes_served)`)
}

// queued counts the commands that are still to be delivered or acknowledged. What stays in the stream beyond that is what
// its server failed to remove when it was acknowledged (its disk was full, say): it was applied, and its age removes it.
func (w *world) queued(ctx context.Context) (n int, err error) {
	s, err := w.js.Stream(ctx, "RV_COMMANDS")
	if err != nil {
		return 0, err
	}
	durables := s.ListConsumers(ctx)
	for c := range durables.Info() {
		n += int(c.NumPending) + c.NumAckPending
	}
	return n, durables.Err()
}

// session is a fresh one, or a lasting one of the driver's.
func (d *driver) session() string {
	if d.rng.IntN(3) > 0 {
		return fmt.Sprintf("lasting-%d-%d", d.number, d.rng.IntN(lasting))
	}
	return fmt.Sprintf("once-%d", d.made.Add(1))
}

func (d *driver) id() string {
	d.ids++
	return fmt.Sprintf("in-%d-%d", d.number, d.ids)
}

func (d *driver) deed() string {
	if d.rng.IntN(150) == 0 && d.deadly.Add(1) < 4 {
		return "deadly"
	}
	return deeds[d.rng.IntN(len(deeds))]
}

func (d *driver) wake(s, delivery string) judge.Command {
	return judge.Command{Session: s, Kind: "wake", Input: d.id(), Delivery: delivery, Body: d.deed()}
}

func (d *driver) interrupt(s string) judge.Command {
	return judge.Command{Session: s, Kind: "interrupt", Reason: "because of " + d.id()}
}

// something is one thing that upstream services do.
func (d *driver) something() {
	s := d.session()
	switch d.rng.IntN(16) {
	case 0, 1, 2, 3:
		d.publish(d.wake(s, "queue"))
	case 4: // more than one step can take
		d.publish(d.wake(s, "queue"))
		d.publish(d.wake(s, "queue"))
		d.publish(d.wake(s, "steer"))
	case 5, 6:
		d.publish(d.wake(s, "steer"))
	case 7: // a bare wake
		d.publish(judge.Command{Session: s, Kind: "wake"})
	case 8: // admitted, and woken later, or not
		c := d.wake(s, "queue")
		c.Kind = "admit"
		d.publish(c)
		if d.rng.IntN(2) == 0 {
			d.publish(judge.Command{Session: s, Kind: "wake"})
		}
	case 9: // not due at once
		c := d.wake(s, "queue")
		if d.rng.IntN(2) == 0 {
			c = judge.Command{Session: s, Kind: "wake"}
		}
		c.NotBefore = time.Now().Add(delay)
		d.publish(c)
	case 10: // the same again
		if c, ok := d.last[s]; ok {
			d.publish(c)
		}
	case 11, 12: // stop
		d.publish(d.interrupt(s))
	case 13: // stop, all of it
		c := d.interrupt(s)
		c.Discard = true
		d.publish(c)
	case 14: // stop that, and start this
		c := d.interrupt(s)
		c.Execution = d.h.lastExecution(s)
		d.publish(c)
		d.publish(d.wake(s, "queue"))
	case 15:
		d.malformed(s)
	}
}

// malformed is what must be rejected, and change nothing.
func (d *driver) malformed(s string) {
	subject, body := "", malformedMark+d.id()+`"`
	switch d.rng.IntN(3) {
	case 0:
		subject = "rv.wake." + s // it ends too early
	case 1:
		subject, body = "rv.interrupt."+s, body+`,"reason":7}`
	case 2:
		subject, body = "rv.admit.-"+s, body+`,"input":{"id":"x","body":1}}`
	}
	d.send(subject, body, func(uint64, int, int) { d.h.rejected(body) })
}

// malformedMark begins each of those bodies.
const malformedMark = `{"malformed":"`

// publish sends a command until the stream has it, and notes it.
func (d *driver) publish(c judge.Command) {
	body := "{"
	comma := func() {
		if len(body) > 1 {
			body += ","
		}
	}
	if c.Input != "" {
		body += fmt.Sprintf(`"input":{"id":%q,"delivery":%q,"body":{"do":%q}}`, c.Input, c.Delivery, c.Body)
		d.last[c.Session] = c
	}
	if !c.NotBefore.IsZero() {
		comma()
		body += fmt.Sprintf(`"not_before":%q`, c.NotBefore.UTC().Format(time.RFC3339Nano))
	}
	if c.Kind == "interrupt" {
		body += fmt.Sprintf(`"reason":%q,"pending":%q`, c.Reason, map[bool]string{false: "keep", true: "discard"}[c.Discard])
		if c.Execution != "" {
			body += fmt.Sprintf(`,"execution":%q`, c.Execution)
		}
	}
	c.Sent = time.Now()
	d.send("rv."+c.Kind+"."+c.Session, body+"}", func(seq uint64, attempts, restarts int) {
		c.Seq, c.Repeated = seq, attempts > 1 && restarts > 0
		d.h.sent(c)
	})
}

// send publishes a message until the stream has it. Commands are published with a message id, so that a repetition is none.
// What is to be noted of it is noted before the stream can be taken back: how often it was tried, and over how many
// restarts of the servers.
func (d *driver) send(subject, body string, note func(seq uint64, attempts, restarts int)) {
	m := &nats.Msg{Subject: subject, Data: []byte(body)}
	id := fmt.Sprintf("%d-%d-%s", d.number, time.Now().UnixNano(), subject)
	began := d.restarts.Load()
	for attempts := 1; ; attempts++ {
		d.publishing.RLock()
		ctx, cancel := context.WithTimeout(context.Background(), 2*time.Second)
		ack, err := d.w.js.PublishMsg(ctx, m, jetstream.WithMsgID(id))
		cancel()
		if err == nil {
			note(ack.Sequence, attempts, int(d.restarts.Load()-began))
		}
		d.publishing.RUnlock()
		if err == nil {
			return
		}
		if d.ctx.Err() != nil && time.Since(d.until) > patience { // the faults are over
			d.h.wrong("%s can't be published: %v", subject, err)
			return
		}
		if attempts%10 == 0 {
			d.h.note("driver %d has tried %d times to publish on %s: %v", d.number, attempts, subject, err)
		}
		time.Sleep(pollEvery) // the servers come back: the load ends after the faults
	}
}

// operate releases what is quarantined, now and then.
func (l *load) operate(ctx context.Context, rng *rand.Rand) {
	ways := []string{"retry", "interrupted", "discard"}
	for n := 0; pause(ctx, time.Second); n++ {
		look, cancel := context.WithTimeout(ctx, lookTimeout)
		sessions, err := rows[struct{ ID string }](look, l.w, `SELECT session_id AS id FROM quarantines ORDER BY created_at LIMIT 1`)
		cancel()
		if err != nil || len(sessions) == 0 {
			continue
		}
		s, why := sessions[0].ID, fmt.Sprintf("released as number %d", n)
		l.h.released(s, why)
		cmd := exec.CommandContext(ctx, l.w.program("reveille"), "quarantine", "release", s, "--as", ways[rng.IntN(len(ways))], "--why", why)
		cmd.Env = append(os.Environ(), "RV_DATABASE_URL="+l.w.url, "RV_NATS_URL="+l.w.nc.ConnectedUrl())
		if out, err := cmd.CombinedOutput(); err != nil && ctx.Err() == nil {
			l.h.note("release of %s: %v: %s", s, err, out)
		}
	}
}

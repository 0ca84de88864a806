package crashtest

import (
	"context"
	"encoding/json"
	"fmt"
	"maps"
	"math/rand/v2"
	"path/filepath"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"reveille/bus"
	"reveille/claims"
)

const (
	drivers = 4
	// mostBusy bounds the sessions with work, and mostQueued the commands that nobody has applied: the load waits for
	// the processes, however slow they are.
	mostBusy, mostQueued = 10, 30
	// lasting are the sessions of a driver that get one script after another; the others get one each.
	lasting = 2
	// talking is how long a handler takes that has something to say, so that there is something to interrupt.
	talking = "0.2"
	// delay is of what is not due at once.
	delay = 300 * time.Millisecond
	// retryBase is the delay of a first retry.
	retryBase = 400 * time.Millisecond
)

// What an input tells its handler to do.
const (
	plain   = "plain"   // end
	talk    = "talk"    // say something, take a while
	more    = "more"    // end, and ask for another step
	decline = "decline" // say that a person refused
	retry   = "retry"   // fail, until it is tried again
	failing = "fail"    // fail for good
)

// stepsFile is where the handlers write: a line when one starts and a line when it ends.
func (w *world) stepsFile() string { return filepath.Join(w.dir, "steps") }

// handler is the command of --exec. Its answer to a continuation of what asked for one is the end of that.
func (w *world) handler() string {
	return `read -r request
say() { echo "$1 $RV_SESSION $RV_EPOCH $RV_STEP" >>'` + w.stepsFile() + `'; }
ended() { say end; echo "{\"type\":\"ended\",\"result\":\"$1\",\"continue\":$2}"; }
say start
case $request in
*'"do":"decline"'*) echo '{"type":"declined","reason":"` + refused + `"}' ;;
*'"do":"fail"'*) exit 1 ;;
*'"do":"retry"'*) case $request in *'"kind":"retry"'*) ended done false ;; *) exit 75 ;; esac ;;
*'"do":"more"'*) ended more true ;;
*'"do":"talk"'*) echo '{"type":"text","text":"well"}'; sleep ` + talking + `; ended done false ;;
*) ended done false ;;
esac`
}

// refused is the reason of a declined step.
const refused = "a person refused"

// sent is a command that the stream has acknowledged.
type sent struct {
	session  claims.SessionID
	kind     claims.CommandKind
	input    string // empty: none
	delivery claims.Delivery
	body     string
	reason   string // of an interrupt
	discard  bool
	notAt    time.Time // before when it is not due; zero: it is due at once
	seq      uint64    // in the stream
	at       time.Time // before it was sent
}

// load sends commands to sessions until it is stopped.
type load struct {
	w   *world
	pub *bus.Publisher
	// wanted are the scripts that lead to where processes are to be killed.
	wanted func() []string

	idle atomic.Bool // there is room for more

	mu   sync.Mutex // guards the rest
	sent []sent
	made int // sessions
}

// driver sends one script after another. A lasting session is of one driver, so that what it is sent has one order.
type driver struct {
	*load
	number int
	rng    *rand.Rand
	inputs int
}

// run drives until ctx ends.
func (l *load) run(ctx context.Context, seed uint64) {
	var all sync.WaitGroup
	defer all.Wait()
	all.Go(func() {
		tick := time.NewTicker(lookEvery)
		defer tick.Stop()
		for {
			l.idle.Store(l.w.busy() < mostBusy && l.w.queued() < mostQueued)
			select {
			case <-ctx.Done():
				return
			case <-tick.C:
			}
		}
	})
	for n := range drivers {
		d := &driver{load: l, number: n, rng: rand.New(rand.NewPCG(seed, uint64(n)+1))}
		all.Go(func() {
			tick := time.NewTicker(lookEvery)
			defer tick.Stop()
			for {
				select {
				case <-ctx.Done():
					return
				case <-tick.C:
				}
				if l.idle.Load() {
					d.script()
				}
			}
		})
	}
}

// busy counts the sessions that have something to do.
func (w *world) busy() int {
	return len(w.texts(`SELECT session_id FROM sessions WHERE quarantine_id IS NULL
		AND (execution_id IS NOT NULL OR armed > 0 OR continuations > 0 OR delayed > 0 OR wakes > wakes_served)`))
}

// queued counts the commands that nobody has acknowledged.
func (w *world) queued() int {
	s, err := w.conn.JetStream().Stream(context.Background(), w.conn.Namespace().CommandStream())
	if err != nil {
		w.wrong("the command stream: %v", err)
		return 0
	}
	return int(s.CachedInfo().State.Msgs)
}

// session is a fresh one, or a lasting one of the driver's.
func (d *driver) session() claims.SessionID {
	if d.rng.IntN(4) == 0 {
		return claims.SessionID(fmt.Sprintf("lasting-%d-%d", d.number, d.rng.IntN(lasting)))
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	d.made++
	return claims.SessionID(fmt.Sprintf("s%d", d.made))
}

// scripts are what upstream services do with a session, by name.
var scripts = map[string]func(d *driver, s claims.SessionID){
	"once":   func(d *driver, s claims.SessionID) { d.wake(s, plain) },
	"queued": func(d *driver, s claims.SessionID) { d.wake(s, talk); d.wake(s, plain); d.wake(s, plain) },
	"admitted": func(d *driver, s claims.SessionID) {
		d.admit(s, plain, claims.Queue)
		d.admit(s, plain, claims.Steer)
		d.bare(s)
	},
	"steered": func(d *driver, s claims.SessionID) { d.wake(s, talk); d.steer(s, plain); d.steer(s, plain) },
	"stopped": func(d *driver, s claims.SessionID) { d.wake(s, talk); d.interrupt(s, false) },
	"replaced": func(d *driver, s claims.SessionID) {
		d.wake(s, talk)
		d.wake(s, plain)
		d.interrupt(s, false)
		d.wake(s, plain)
	},
	"discarded": func(d *driver, s claims.SessionID) {
		d.wake(s, talk)
		d.wake(s, plain)
		d.admit(s, plain, claims.Queue)
		d.interrupt(s, true)
	},
	"declined":  func(d *driver, s claims.SessionID) { d.wake(s, decline); d.wake(s, plain) },
	"retried":   func(d *driver, s claims.SessionID) { d.wake(s, retry); d.wake(s, plain) },
	"given up":  func(d *driver, s claims.SessionID) { d.wake(s, retry); d.pause(); d.interrupt(s, false) },
	"more":      func(d *driver, s claims.SessionID) { d.wake(s, more); d.wake(s, plain) },
	"more bare": func(d *driver, s claims.SessionID) { d.wake(s, more); d.bare(s) },
	"failed":    func(d *driver, s claims.SessionID) { d.wake(s, failing); d.wake(s, plain) },
	"later":     func(d *driver, s claims.SessionID) { d.later(s, true); d.later(s, false) },
	"bare":      func(d *driver, s claims.SessionID) { d.bare(s); d.bare(s) },
	"twice":     func(d *driver, s claims.SessionID) { d.twice(s) },
	"pressed":   func(d *driver, s claims.SessionID) { d.wake(s, talk); d.bare(s); d.interrupt(s, false) },
}

// names are the scripts in an order, so that a seed means the same again.
var names = slices.Sorted(maps.Keys(scripts))

// script sends a session one script: mostly one that leads to where a process is to be killed.
func (d *driver) script() {
	name := names[d.rng.IntN(len(names))]
	if wanted := d.wanted(); len(wanted) > 0 && d.rng.IntN(4) > 0 {
		name = wanted[d.rng.IntN(len(wanted))]
	}
	scripts[name](d, d.session())
}

// pause gives a step the time to fail, so that what comes then hits its continuation.
func (d *driver) pause() {
	select {
	case <-time.After(retryBase):
	case <-d.w.ctx.Done():
	}
}

func (d *driver) input() string {
	d.inputs++
	return fmt.Sprintf("in-%d-%d", d.number, d.inputs)
}

func (d *driver) wake(s claims.SessionID, do string) {
	d.publish(sent{session: s, kind: claims.Wake, input: d.input(), delivery: claims.Queue, body: do})
}

func (d *driver) steer(s claims.SessionID, do string) {
	d.publish(sent{session: s, kind: claims.Wake, input: d.input(), delivery: claims.Steer, body: do})
}

func (d *driver) admit(s claims.SessionID, do string, how claims.Delivery) {
	d.publish(sent{session: s, kind: claims.Admit, input: d.input(), delivery: how, body: do})
}

func (d *driver) bare(s claims.SessionID) { d.publish(sent{session: s, kind: claims.Wake}) }

// later is a wake that is not due at once, with an input or without.
func (d *driver) later(s claims.SessionID, input bool) {
	c := sent{session: s, kind: claims.Wake, notAt: time.Now().Add(delay)}
	if input {
		c.input, c.delivery, c.body = d.input(), claims.Queue, plain
	}
	d.publish(c)
}

// twice sends an input again, as it was, and once more with another body, which is rejected.
func (d *driver) twice(s claims.SessionID) {
	c := sent{session: s, kind: claims.Wake, input: d.input(), delivery: claims.Queue, body: plain}
	d.publish(c)
	d.publish(c)
	c.body = talk
	d.publish(c)
	d.wake(s, plain)
}

func (d *driver) interrupt(s claims.SessionID, discard bool) {
	d.publish(sent{session: s, kind: claims.Interrupt, reason: "because of " + d.input(), discard: discard})
}

// publish sends a command until the stream has it, and notes it.
func (l *load) publish(c sent) {
	cmd := claims.Command{Kind: c.kind, Session: c.session, Reason: c.reason, Discard: c.discard, NotBefore: c.notAt}
	if c.input != "" {
		cmd.Input = &claims.Input{ID: c.input, Delivery: c.delivery, Body: json.RawMessage(`{"do":"` + c.body + `"}`)}
	}
	c.at = time.Now()
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	receipt, err := l.pub.Publish(ctx, cmd, bus.Publishing{})
	if err != nil {
		l.w.wrong("publishing %+v: %v", c, err)
		return
	}
	c.seq = receipt.Sequence
	l.mu.Lock()
	defer l.mu.Unlock()
	l.sent = append(l.sent, c)
}

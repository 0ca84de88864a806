package systemtest

import (
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"reveille/bus"
	"reveille/claims"
)

// planned is the commands of one session, in the order they are published.
type planned struct {
	session  claims.SessionID
	commands []claims.Command
	last     uint64 // the stream sequence of the last one
}

// plan is the commands of one session; its last is a wake, so that nothing stays asleep.
func plan(rng *rand.Rand, n, commands int) *planned {
	p := &planned{session: claims.SessionID(fmt.Sprintf("s%d", n))}
	var inputs []*claims.Input
	fresh := func() *claims.Input {
		in := &claims.Input{ID: fmt.Sprintf("in%d", len(p.commands)), Delivery: claims.Queue, Body: json.RawMessage(`"do"`)}
		if rng.IntN(4) == 0 {
			in.Delivery = claims.Steer
		}
		switch rng.IntN(40) {
		case 0:
			in.Body = json.RawMessage(`"hold"`)
		case 1:
			in.Body = json.RawMessage(`"again"`)
		case 2:
			in.Body = json.RawMessage(`"retry"`)
		}
		inputs = append(inputs, in)
		return in
	}
	for len(p.commands) < commands-1 {
		cmd := claims.Command{Kind: claims.Wake, Session: p.session}
		switch r := rng.IntN(20); {
		case r < 9:
			cmd.Input = fresh()
		case r < 13:
			cmd.Kind, cmd.Input = claims.Admit, fresh()
		case r < 15: // bare
		case r < 16 && len(inputs) > 0: // the same once more
			if cmd.Input = inputs[rng.IntN(len(inputs))]; rng.IntN(2) == 0 {
				cmd.Kind = claims.Admit
			}
		default:
			cmd.Kind, cmd.Discard = claims.Interrupt, rng.IntN(8) == 0
			cmd.Reason = fmt.Sprintf("c%d", len(p.commands))
		}
		p.commands = append(p.commands, cmd)
	}
	p.commands = append(p.commands, claims.Command{Kind: claims.Wake, Session: p.session})
	for i := range p.commands {
		p.commands[i].Trace = fmt.Sprintf("00-%032x-%016x-01", n+1, i+1) // its events carry it
	}
	return p
}

// of is the index of the command that an event comes from.
func (p *planned) of(r claims.Record) int {
	var n, i int
	if _, err := fmt.Sscanf(r.Trace, "00-%32x-%16x-01", &n, &i); err != nil {
		return -1
	}
	return i - 1
}

// A thousand sessions with twenty commands each, published back to back, three
// workers and a scanner that are killed at random: per session the commands are
// applied in stream order, each once (I18), every input is covered by one step
// or cancelled by an interrupt that came after it, and no session is stuck.
func TestI18AThousandSessions(t *testing.T) {
	const sessions, each, kills = 1000, 20, 8
	seed := uint64(time.Now().UnixNano())
	t.Logf("seed %d", seed)
	rng := rand.New(rand.NewPCG(seed, 0))
	w := startWorld(&world{t: t, load: true})
	hold := w.newHold()
	var plans []*planned
	inputs := 0
	for i := range sessions {
		p := plan(rng, i, each)
		plans = append(plans, p)
		inputs += len(p.inputs())
	}
	started := time.Now()
	victims := w.startVictims()
	published := w.publishPlans(plans, seed)
	// Each input has an event when it is admitted and one when it is promoted or
	// cancelled, so all of these come to pass.
	var at []uint64
	for range kills {
		at = append(at, rng.Uint64N(2*uint64(inputs)))
	}
	slices.Sort(at)
	for _, n := range at {
		w.within(longPatience, fmt.Sprintf("there are %d events", n), func() bool { _, last := w.messages("RV_EVENTS"); return last >= n })
		victims.killOne(rng)
	}
	published.Wait()
	hold.open()
	t.Logf("all is published after %v", time.Since(started))
	w.within(longPatience, "nothing is left over", func() bool {
		n, _ := w.messages("RV_COMMANDS")
		return n == 0 && w.count(`SELECT count(*) FROM sessions WHERE quarantine_id IS NULL AND execution_id IS NULL
			AND armed + unarmed + delayed + continuations = 0 AND wakes = wakes_served AND relayed_seq = last_seq`) == sessions
	})
	t.Logf("nothing is left over after %v", time.Since(started))

	marks := map[claims.SessionID]string{}
	for _, row := range w.query("SELECT session_id || ' ' || command_seq || ' ' || wakes FROM sessions") {
		id, mark, _ := strings.Cut(row, " ")
		marks[claims.SessionID(id)] = mark
	}
	logs := w.verify()
	for _, p := range plans {
		for _, wrong := range p.faults(t, logs[p.session]) {
			t.Errorf("session %s: %s", p.session, wrong)
		}
		if want := fmt.Sprint(p.last, " ", p.bare()); marks[p.session] != want {
			t.Errorf("session %s: last command and bare wakes are %s, want %s", p.session, marks[p.session], want)
		}
	}
}

// longPatience bounds what is long on a busy machine.
const longPatience = 10 * time.Minute

// victims are three workers and a scanner.
type victims struct {
	w     *world
	procs []*proc
}

func (w *world) startVictims() *victims {
	w.t.Helper()
	v := &victims{w: w, procs: make([]*proc, 4)}
	for i := range v.procs {
		v.begin(i)
	}
	for _, p := range v.procs {
		p.wait()
	}
	return v
}

func (v *victims) begin(i int) {
	v.w.t.Helper()
	if i > 0 {
		v.procs[i] = v.w.beginDoing(fmt.Sprintf("w%d", i), "--retry-base", "100ms", "--retry-max", "100ms")
		return
	}
	// What a person would have to decide is decided, or sessions that were
	// cancelling would end in quarantine.
	v.procs[i] = v.w.begin("scanner", "scan", "--every", "200ms", "--uncertain-cancel", "interrupt",
		"--max-recoveries", "100", "--max-takeovers", "100")
}

// killOne kills one of them and starts it again, and does not wait for it.
func (v *victims) killOne(rng *rand.Rand) {
	v.w.t.Helper()
	i := rng.IntN(len(v.procs))
	v.procs[i].kill()
	v.w.t.Logf("killed %s", v.procs[i].name)
	v.begin(i)
}

// publishPlans publishes all commands, mixed, each session's in order.
func (w *world) publishPlans(plans []*planned, seed uint64) *sync.WaitGroup {
	const publishers = 16
	var wg sync.WaitGroup
	for i := range publishers {
		rng := rand.New(rand.NewPCG(seed, uint64(i)+1))
		wg.Go(func() {
			p := bus.NewPublisher(w.conn)
			var mine []*planned
			for n := i; n < len(plans); n += publishers {
				mine = append(mine, plans[n])
			}
			next := make([]int, len(mine))
			for len(mine) > 0 {
				n := rng.IntN(len(mine))
				receipt, err := p.Publish(w.t.Context(), mine[n].commands[next[n]], bus.Publishing{})
				if err != nil {
					w.t.Errorf("publishing: %v", err)
					return
				}
				mine[n].last = receipt.Sequence
				if next[n]++; next[n] == len(mine[n].commands) {
					mine, next = slices.Delete(mine, n, n+1), slices.Delete(next, n, n+1)
				}
			}
		})
	}
	return &wg
}

// inputs are the ids of the session's inputs by the command that brings each first.
func (p *planned) inputs() map[int]string {
	out, seen := map[int]string{}, map[string]bool{}
	for i, cmd := range p.commands {
		if cmd.Input != nil && !seen[cmd.Input.ID] {
			seen[cmd.Input.ID], out[i] = true, cmd.Input.ID
		}
	}
	return out
}

// bare is how many wakes without an input there are.
func (p *planned) bare() (n int) {
	for _, cmd := range p.commands {
		if cmd.Kind == claims.Wake && cmd.Input == nil {
			n++
		}
	}
	return n
}

// told is what the log of a session says of the session's commands.
type told struct {
	first    map[int]int                      // place of the first event of a command
	hits     map[int]map[claims.EventType]int // of interrupts
	admitted map[string]bool
	gone     map[string]bool // promoted or cancelled
}

// faults compares the log of a session that is idle with its commands.
func (p *planned) faults(t testing.TB, log []claims.Record) (out []string) {
	t.Helper()
	d := &told{first: map[int]int{}, hits: map[int]map[claims.EventType]int{}, admitted: map[string]bool{}, gone: map[string]bool{}}
	brought := map[string]int{} // by which command
	for i, in := range p.inputs() {
		brought[in] = i
	}
	last := 0
	for i, r := range log {
		switch r.Type {
		case claims.InputAdmitted, claims.InputCancelled, claims.WakeCancelled, claims.ContinuationCancelled, claims.ExecutionCancelling:
			c := p.of(r)
			if c < last || c >= len(p.commands) {
				out = append(out, fmt.Sprintf("event %d is of command %d, and one before it of %d", i+1, c, last))
				continue
			}
			last = c
			if _, ok := d.first[c]; !ok {
				d.first[c] = i
			}
			out = append(out, d.take(t, p.commands[c], c, r, brought)...)
		case claims.InputPromoted:
			d.gone[dataOf[claims.InputData](t, r).Input] = true
		}
	}
	for in := range brought {
		if !d.admitted[in] || !d.gone[in] {
			out = append(out, fmt.Sprintf("input %s: admitted %v, promoted or cancelled %v", in, d.admitted[in], d.gone[in]))
		}
	}
	for c, h := range d.hits {
		several := h[claims.ExecutionCancelling] > 1 || h[claims.ContinuationCancelled] > 1 || h[claims.WakeCancelled] > 1
		if several || !p.commands[c].Discard && h[claims.ExecutionCancelling] > 0 && len(h) > 1 {
			out = append(out, fmt.Sprintf("interrupt %d hit %v", c, h))
		}
	}
	return append(out, p.missed(t, log, d)...)
}

// take notes an event that command c caused.
func (d *told) take(t testing.TB, cmd claims.Command, c int, r claims.Record, brought map[string]int) (out []string) {
	t.Helper()
	wrong := func(format string, args ...any) { out = append(out, fmt.Sprintf(format, args...)) }
	if r.Type == claims.InputAdmitted {
		in := dataOf[claims.InputAdmittedData](t, r).Input
		if by, ok := brought[in]; d.admitted[in] || !ok || by != c {
			wrong("input %s is admitted by command %d (before: %v)", in, c, d.admitted[in])
		}
		d.admitted[in] = true
		return out
	}
	if cmd.Kind != claims.Interrupt {
		wrong("%s by command %d, which is %s", r.Type, c, cmd.Kind)
	}
	if d.hits[c] == nil {
		d.hits[c] = map[claims.EventType]int{}
	}
	d.hits[c][r.Type]++
	if r.Type == claims.InputCancelled {
		in := dataOf[claims.InputData](t, r).Input
		d.gone[in] = true
		if brought[in] > c {
			wrong("input %s of command %d is cancelled by command %d", in, brought[in], c)
		}
	}
	return out
}

// missed finds interrupts that hit nothing although, wherever between the
// commands around it it was applied, there was something to hit; and those that
// discard and left an input of before.
func (p *planned) missed(t testing.TB, log []claims.Record, d *told) (out []string) {
	t.Helper()
	target := p.targets(t, log)
	for c, cmd := range p.commands {
		if cmd.Kind != claims.Interrupt {
			continue
		}
		from, to := 0, len(log) // places in the log at which it can have been applied
		for other, at := range d.first {
			if other < c {
				from = max(from, at+1)
			} else if other > c {
				to = min(to, at)
			}
		}
		if d.hits[c] == nil && !slices.Contains(target[from:to+1], false) {
			out = append(out, fmt.Sprintf("interrupt %d hit nothing", c))
		}
		if !cmd.Discard {
			continue
		}
		for i := to; i < len(log); i++ {
			if log[i].Type != claims.InputPromoted {
				continue
			}
			in := dataOf[claims.InputData](t, log[i]).Input
			for brought, id := range p.inputs() {
				if id == in && brought < c {
					out = append(out, fmt.Sprintf("input %s of command %d was promoted behind the discard of command %d", in, brought, c))
				}
			}
		}
	}
	return out
}

// targets says for each place in the log (after so many events) whether an
// interrupt there had something to hit for certain: an open step that was not
// interrupted, or, with none open, an armed input.
func (p *planned) targets(t testing.TB, log []claims.Record) []bool {
	t.Helper()
	interrupted := map[claims.StepID]bool{}
	for _, r := range log {
		if r.Type == claims.StepInterruptedEvent {
			interrupted[r.Step] = true
		}
	}
	out := []bool{false}
	armed := map[string]bool{}
	open := claims.StepID("")
	for _, r := range log {
		switch r.Type {
		case claims.InputAdmitted:
			if d := dataOf[claims.InputAdmittedData](t, r); d.Armed {
				armed[d.Input] = true
			}
		case claims.InputPromoted, claims.InputCancelled:
			delete(armed, dataOf[claims.InputData](t, r).Input)
		case claims.StepStartedEvent:
			open = r.Step
		case claims.StepEndedEvent, claims.StepFailedEvent, claims.StepInterruptedEvent:
			open = ""
		}
		out = append(out, open != "" && !interrupted[open] || open == "" && len(armed) > 0)
	}
	return out
}

package bus

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"reflect"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"reveille/claims"
)

// memApplier is the database as I18 describes it: per session the sequence of
// the last command applied and the greatest timestamp.
type memApplier struct {
	mu       sync.Mutex
	seq      map[claims.SessionID]int64
	time     map[claims.SessionID]int64
	inputs   map[string]string
	applied  []claims.Command // each once, in the order of the transactions
	acquire  []bool           // mayAcquire of each
	passed   []claims.Command
	ready    bool // say so in every outcome
	notice   *claims.Notice
	before   func(claims.Command) error // called first, may block; an error: nothing is written
	after    func(claims.Command) error // called after the commit; an error: its answer is lost
	passOver func(claims.Command) error
}

func newMemApplier() *memApplier {
	return &memApplier{seq: map[claims.SessionID]int64{}, time: map[claims.SessionID]int64{}, inputs: map[string]string{}}
}

// older reports whether the command is a duplicate, or must be confirmed.
func (a *memApplier) older(cmd claims.Command) (duplicate bool, err error) {
	newSeq, newTime := cmd.Sequence > a.seq[cmd.Session], cmd.Time > a.time[cmd.Session]
	switch {
	case !newSeq && !newTime:
		return true, nil
	case !newTime && !cmd.Confirmed:
		return false, claims.ErrUnconfirmed
	}
	return false, nil
}

func (a *memApplier) Apply(_ context.Context, cmd claims.Command, mayAcquire bool) (claims.Outcome, error) {
	if a.before != nil {
		if err := a.before(cmd); err != nil {
			return claims.Outcome{}, err
		}
	}
	out, err := a.commit(cmd, mayAcquire)
	if err == nil && a.after != nil {
		err = a.after(cmd)
	}
	return out, err
}

func (a *memApplier) commit(cmd claims.Command, mayAcquire bool) (claims.Outcome, error) {
	a.mu.Lock()
	defer a.mu.Unlock()
	out := claims.Outcome{Result: claims.Applied, Ready: a.ready, Notice: a.notice}
	duplicate, err := a.older(cmd)
	switch {
	case err != nil:
		return claims.Outcome{}, err
	case duplicate:
		out.Result = claims.Duplicate
		return out, nil
	}
	if in := cmd.Input; in != nil {
		key := string(cmd.Session) + " " + in.ID
		if old, ok := a.inputs[key]; ok && old != string(in.Body) {
			return claims.Outcome{}, fmt.Errorf("input %s: %w", in.ID, claims.ErrInputConflict)
		}
		a.inputs[key] = string(in.Body)
	}
	a.move(cmd)
	a.applied, a.acquire = append(a.applied, cmd), append(a.acquire, mayAcquire)
	return out, nil
}

func (a *memApplier) move(cmd claims.Command) {
	a.seq[cmd.Session], a.time[cmd.Session] = cmd.Sequence, max(a.time[cmd.Session], cmd.Time)
}

func (a *memApplier) PassOver(_ context.Context, cmd claims.Command) error {
	if a.passOver != nil {
		if err := a.passOver(cmd); err != nil {
			return err
		}
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	if duplicate, err := a.older(cmd); err != nil || duplicate {
		return err
	}
	a.move(cmd)
	a.passed = append(a.passed, cmd)
	return nil
}

// ids are the inputs that were applied, of one session or of all.
func (a *memApplier) ids(s claims.SessionID) []string {
	a.mu.Lock()
	defer a.mu.Unlock()
	var out []string
	for _, cmd := range a.applied {
		if s != "" && cmd.Session != s {
			continue
		}
		if cmd.Input == nil {
			out = append(out, string(cmd.Kind))
		} else {
			out = append(out, cmd.Input.ID)
		}
	}
	return out
}

func equal[T any](t testing.TB, what string, got, want T) {
	t.Helper()
	if !reflect.DeepEqual(got, want) {
		t.Errorf("%s: got %v, want %v", what, got, want)
	}
}

// testIntake is an intake whose messages the test hands over itself.
func testIntake(t testing.TB, c *Conn, a Applier, o StreamOptions) (*Intake, *lane) {
	in := NewIntake(c, a, IntakeOptions{Streams: o, Logger: testLog(t)})
	return in, in.wakes.lanes[0]
}

// TestI18_StreamOrder: whatever is handed over first, what was published first
// is applied first; what came before the message in hand acquires nothing.
func TestI18_StreamOrder(t *testing.T) {
	c, st := startServer(t).connectWith(StreamOptions{})
	a := newMemApplier()
	in, ln := testIntake(t, c, a, StreamOptions{})
	publishAll(t, c, wake("s", "1"), wake("other", "x"), wake("s", "2"),
		claims.Command{Kind: claims.Interrupt, Session: "s"}, wake("s", "3"))
	wakes := fetch(t, c, st, st.Intake(), 4)
	interrupt := fetch(t, c, st, st.Interrupts(), 1)[0]

	in.handle(testContext(t), ln, wakes[2]) // "2"
	equal(t, "applied", a.ids("s"), []string{"1", "2"})
	equal(t, "acquired", a.acquire, []bool{false, true})
	in.handle(testContext(t), ln, wakes[3]) // "3": the interrupt is before it
	equal(t, "applied", a.ids("s"), []string{"1", "2", "interrupt", "3"})
	in.handle(testContext(t), ln, wakes[0])
	in.handle(testContext(t), ln, interrupt)
	equal(t, "applied", a.ids(""), []string{"1", "2", "interrupt", "3"})
	in.handle(testContext(t), ln, wakes[1])
	equal(t, "other", a.ids("other"), []string{"x"})
	eventually(t, "all is acknowledged", func() bool { return messages(t, c, "RV_COMMANDS") == 0 })
	equal(t, "applied wakes", counted(t, in, "wake", "applied"), 4)
	equal(t, "duplicates", counted(t, in, "wake", "duplicate")+
		counted(t, in, "interrupt", "duplicate"), 2)
}

// TestI18_RedeliveryAfterCommit: the answer of a commit is lost; the command
// comes again, is recognised and announced again.
func TestI18_RedeliveryAfterCommit(t *testing.T) {
	c, _ := startServer(t).connectWith(StreamOptions{})
	a := newMemApplier()
	a.ready = true
	lost := make(chan struct{}, 1)
	lost <- struct{}{}
	a.after = func(claims.Command) error {
		select {
		case <-lost:
			return errors.New("connection reset")
		default:
			return nil
		}
	}
	in := NewIntake(c, a, IntakeOptions{Logger: testLog(t)})
	publishAll(t, c, wake("s", "1"))
	run(t, in.Run)
	eventually(t, "it is acknowledged", func() bool { return messages(t, c, "RV_COMMANDS") == 0 })
	equal(t, "applied", a.ids("s"), []string{"1"})
	equal(t, "announced", messages(t, c, "RV_READY"), 1)
	equal(t, "results", []float64{
		counted(t, in, "wake", "retried"), counted(t, in, "wake", "duplicate"),
	}, []float64{1, 1})
}

// TestI18_KilledBetweenFetchAndCommit: a worker dies with a message in hand;
// another one gets it after the ack wait, behind one that came later.
func TestI18_KilledBetweenFetchAndCommit(t *testing.T) {
	srv := startServer(t)
	o := StreamOptions{ackWait: 300 * time.Millisecond}
	c, _ := srv.connectWith(o)
	dying := srv.connect()
	st, err := dying.Ensure(testContext(t), o)
	if err != nil {
		t.Fatal(err)
	}
	publishAll(t, c, wake("s", "1"))
	fetch(t, dying, st, st.Intake(), 1)
	publishAll(t, c, wake("s", "2"))
	a := newMemApplier()
	run(t, NewIntake(c, a, IntakeOptions{Streams: o, Logger: testLog(t)}).Run)
	eventually(t, "both are acknowledged", func() bool { return messages(t, c, "RV_COMMANDS") == 0 })
	equal(t, "applied", a.ids("s"), []string{"1", "2"})
}

// TestI18_StreamDeletedAndRecreated: the new stream counts from 1 again.
// Nothing of it is taken for a duplicate, what is in hand of the old one is
// let go, and its late acknowledgement removes nothing.
func TestI18_StreamDeletedAndRecreated(t *testing.T) {
	c, st := startServer(t).connectWith(StreamOptions{})
	a := newMemApplier()
	in, ln := testIntake(t, c, a, StreamOptions{})
	publishAll(t, c, wake("s", "1"), wake("s", "2"), wake("s", "3"))
	old := fetch(t, c, st, st.Intake(), 3)
	in.handle(testContext(t), ln, old[1]) // "1" and "2"
	if err := c.js.DeleteStream(testContext(t), "RV_COMMANDS"); err != nil {
		t.Fatal(err)
	}
	st2, err := c.Ensure(testContext(t), StreamOptions{})
	if err != nil || st2.CommandsID == st.CommandsID {
		t.Fatalf("%+v, %v", st2, err)
	}
	publishAll(t, c, wake("s", "a"), wake("s", "b"), wake("s", "c"))
	in.handle(testContext(t), ln, old[2]) // sequence 3 is "c" now
	equal(t, "applied", a.ids("s"), []string{"1", "2"})
	if err := old[0].msg.DoubleAck(testContext(t)); err == nil {
		t.Error("an acknowledgement for the old stream is confirmed")
	}
	equal(t, "commands", messages(t, c, "RV_COMMANDS"), 3)
	fresh := fetch(t, c, st2, st2.Intake(), 3)
	in.handle(testContext(t), ln, fresh[2])
	equal(t, "applied", a.ids("s"), []string{"1", "2", "a", "b", "c"})
	for _, h := range fresh[:2] {
		in.handle(testContext(t), ln, h)
	}
	equal(t, "applied", a.ids("s"), []string{"1", "2", "a", "b", "c"})
	eventually(t, "all is acknowledged", func() bool { return messages(t, c, "RV_COMMANDS") == 0 })
}

// TestI18_RunSurvivesDeletion: a running intake makes the stream anew.
func TestI18_RunSurvivesDeletion(t *testing.T) {
	c, _ := startServer(t).connectWith(StreamOptions{})
	a := newMemApplier()
	run(t, NewIntake(c, a, IntakeOptions{Logger: testLog(t)}).Run)
	publishAll(t, c, wake("s", "1"))
	eventually(t, "the first", func() bool { return len(a.ids("s")) == 1 })
	if err := c.js.DeleteStream(testContext(t), "RV_COMMANDS"); err != nil {
		t.Fatal(err)
	}
	publishAll(t, c, wake("s", "2")) // tries on until the stream is there
	eventually(t, "the second", func() bool { return len(a.ids("s")) == 2 })

	st, err := c.Ensure(testContext(t), StreamOptions{})
	if err != nil {
		t.Fatal(err)
	}
	for _, durable := range []string{st.Intake(), st.Interrupts()} {
		if err := c.js.DeleteConsumer(testContext(t), "RV_COMMANDS", durable); err != nil {
			t.Fatal(err)
		}
	}
	publishAll(t, c, wake("s", "3"), claims.Command{Kind: claims.Interrupt, Session: "s"})
	eventually(t, "what came after the consumers were deleted", func() bool { return len(a.ids("s")) == 4 })
}

// fakeSource is a command stream with a replica that says something else.
type fakeSource struct {
	replica, leader []Raw
	fail            error
}

func oldestOf(ms []Raw, from uint64) (Raw, error) {
	for _, m := range ms {
		if m.Sequence >= from {
			return m, nil
		}
	}
	return Raw{}, errNoMessage
}

func (s *fakeSource) Oldest(_ context.Context, _ claims.SessionID, from uint64) (Raw, error) {
	return oldestOf(s.replica, from)
}

func (s *fakeSource) LeaderOldest(_ context.Context, _ claims.SessionID, from uint64) (Raw, error) {
	if s.fail != nil {
		return Raw{}, s.fail
	}
	return oldestOf(s.leader, from)
}

func (s *fakeSource) LeaderAt(_ context.Context, seq uint64) (Raw, error) {
	if s.fail != nil {
		return Raw{}, s.fail
	}
	m, err := oldestOf(s.leader, seq)
	if err == nil && m.Sequence != seq {
		return Raw{}, errNoMessage
	}
	return m, err
}

func raw(seq uint64, at int64) Raw {
	return Raw{Subject: "rv.wake.s", Sequence: seq, Time: time.Unix(0, at)}
}

// TestI18_Answers: which answer of the stream counts for the message in hand.
func TestI18_Answers(t *testing.T) {
	hand := raw(10, 100)
	down := errors.New("no leader")
	for name, tc := range map[string]struct {
		source fakeSource
		want   uint64 // its sequence; 0: let go
		err    error
	}{
		"itself":                          {fakeSource{replica: []Raw{hand}}, 10, nil},
		"earlier in both":                 {fakeSource{replica: []Raw{raw(9, 99)}}, 9, nil},
		"replica has not got it, leader":  {fakeSource{leader: []Raw{hand}}, 10, nil},
		"replica has another, leader not": {fakeSource{replica: []Raw{raw(10, 99)}, leader: []Raw{hand}}, 10, nil},
		"leader knows an earlier one":     {fakeSource{replica: []Raw{raw(12, 120)}, leader: []Raw{raw(9, 99)}}, 9, nil},
		"same sequence, other time":       {fakeSource{replica: []Raw{raw(10, 99)}, leader: []Raw{raw(10, 99)}}, 0, errLetGo},
		"earlier sequence, later time":    {fakeSource{replica: []Raw{raw(1, 200)}, leader: []Raw{raw(1, 200)}}, 0, errLetGo},
		"later sequence, earlier time":    {fakeSource{replica: []Raw{raw(11, 50)}, leader: []Raw{raw(11, 50)}}, 0, errLetGo},
		"later in both: it is done":       {fakeSource{replica: []Raw{raw(11, 101)}, leader: []Raw{raw(11, 101)}}, 0, errLetGo},
		"nothing there":                   {fakeSource{}, 0, errLetGo},
		"replica unknown, leader is down": {fakeSource{fail: down}, 0, down},
		"replica enough, leader is down":  {fakeSource{replica: []Raw{hand}, fail: down}, 10, nil},
	} {
		got, err := next(t.Context(), &tc.source, "s", hand.place(), 1)
		if got.Sequence != tc.want || !errors.Is(err, tc.err) {
			t.Errorf("%s: %d, %v", name, got.Sequence, err)
		}
	}
}

// TestI18_Rewound: the stream lost its end and uses sequences again, under a
// clock that went back; only the leader tells such a message from an old one.
func TestI18_Rewound(t *testing.T) {
	c, _ := startServer(t).connectWith(StreamOptions{})
	a := newMemApplier()
	in, ln := testIntake(t, c, a, StreamOptions{})
	a.seq["s"], a.time["s"] = 5, 1000
	fresh := raw(6, 900) // a newer sequence, an older time
	src := &fakeSource{replica: []Raw{fresh}}
	in.src = src
	cmd, rej := Decode("rv", fresh, 0)
	if rej != nil {
		t.Fatal(rej)
	}
	h := &hand{Raw: fresh, cmd: cmd}
	if _, err := in.bring(testContext(t), ln, h); !errors.Is(err, errLetGo) {
		t.Fatalf("the leader does not have it: %v", err)
	}
	src.leader = []Raw{raw(6, 901)}
	if _, err := in.bring(testContext(t), ln, h); !errors.Is(err, errLetGo) {
		t.Fatalf("the leader has another: %v", err)
	}
	equal(t, "applied", len(a.applied), 0)
	src.leader = []Raw{fresh}
	if result, err := in.bring(testContext(t), ln, h); err != nil || result != claims.Applied {
		t.Fatalf("the leader has it: %s, %v", result, err)
	}
	if len(a.applied) != 1 || !a.applied[0].Confirmed {
		t.Errorf("applied %+v", a.applied)
	}
}

// TestI19_Undecodable: what can't be decoded is told, counted and gone, and
// holds up nothing of its session.
func TestI19_Undecodable(t *testing.T) {
	c, st := startServer(t).connectWith(StreamOptions{})
	a := newMemApplier()
	in := NewIntake(c, a, IntakeOptions{Logger: testLog(t)})
	h := nats.Header{"Nats-Msg-Id": {"mine"}, "traceparent": {trace}, "Rv-Reason": {"mine"}, "X": {"y"}}
	for _, m := range []*nats.Msg{
		{Subject: "rv.wake.s", Data: []byte("{"), Header: h},
		{Subject: "rv.wake.*", Data: []byte("{}")},
		{Subject: "rv.admit.>", Data: []byte("{}")},
		{Subject: "rv.interrupt.s", Data: []byte(strings.Repeat(" ", 256<<10+1))},
	} {
		if _, err := c.publish(testContext(t), m); err != nil {
			t.Fatal(err)
		}
	}
	publishAll(t, c, wake("s", "1"))
	run(t, in.Run)
	eventually(t, "all is acknowledged", func() bool { return messages(t, c, "RV_COMMANDS") == 0 })
	equal(t, "applied", a.ids(""), []string{"1"})
	told := map[string]Raw{}
	for _, m := range stored(t, c, "RV_REJECTED") {
		told[m.Subject+" "+m.Header.Get(HeaderSubject)+" "+m.Header.Get(HeaderReason)] = m
	}
	equal(t, "rejected", len(told), 4)
	for _, want := range []string{
		"rv.rejected.wake rv.wake.s invalid_body", "rv.rejected.wake rv.wake.* invalid_session",
		"rv.rejected.admit rv.admit.> invalid_session", "rv.rejected.interrupt rv.interrupt.s too_large",
	} {
		if _, ok := told[want]; !ok {
			t.Errorf("nothing says %q", want)
		}
	}
	m := told["rv.rejected.wake rv.wake.s invalid_body"]
	equal(t, "body", string(m.Data), "{")
	equal(t, "own header", m.Header.Get("X"), "y")
	equal(t, "own id", m.Header.Get(HeaderMsgID), "mine")
	equal(t, "place", m.Header.Get(HeaderStreamSeq), st.CommandsID+":1")
	equal(t, "rejected wakes", counted(t, in, "wake", "rejected"), 2)
}

// TestI19_RejectedAlwaysFits: whatever the headers and the size of a command,
// it can be told.
func TestI19_RejectedAlwaysFits(t *testing.T) {
	c, _ := startServer(t).connectWith(StreamOptions{})
	in, _ := testIntake(t, c, newMemApplier(), StreamOptions{})
	most := int(c.nc.MaxPayload())
	for i, h := range []nats.Header{
		{},
		{"Nats-Rollup": {"all"}, "Nats-TTL": {"1h"}, "Nats-Expected-Last-Sequence": {"7"}, "Nats-Schedule": {"@every 1s"}},
		{"Big": {strings.Repeat("x", 60<<10)}},
		{"Big": {strings.Repeat("x", most-1000)}},
	} {
		m := Raw{Subject: "rv.wake." + strings.Repeat("x\x01", 500), Header: h, Data: make([]byte, most), Sequence: uint64(i + 1)}
		rej := &Rejection{TooLarge, strings.Repeat("é\r\n", 1000)}
		if err := in.reject(testContext(t), m, "id", claims.Wake, rej); err != nil {
			t.Errorf("%d: %v", i, err)
		}
		if err := in.reject(testContext(t), m, "id", claims.Wake, rej); err != nil { // a redelivery
			t.Errorf("%d: %v", i, err)
		}
	}
	equal(t, "told", messages(t, c, "RV_REJECTED"), 4)
}

// TestI19_Conflict: published first, then the mark moves, then it is
// acknowledged; a failure between repeats what is behind it only.
func TestI19_Conflict(t *testing.T) {
	c, st := startServer(t).connectWith(StreamOptions{})
	a := newMemApplier()
	in, ln := testIntake(t, c, a, StreamOptions{})
	fails := 1
	a.passOver = func(claims.Command) error {
		equal(t, "told before the mark moves", messages(t, c, "RV_REJECTED"), 1)
		equal(t, "not acknowledged before the mark moves", messages(t, c, "RV_COMMANDS"), 2)
		if fails > 0 {
			fails--
			return errors.New("database is away")
		}
		return nil
	}
	publishAll(t, c, wake("s", "1"))
	in.handle(testContext(t), ln, fetch(t, c, st, st.Intake(), 1)[0])
	eventually(t, "the first is acknowledged", func() bool { return messages(t, c, "RV_COMMANDS") == 0 })
	conflict := wake("s", "1")
	conflict.Input.Body = []byte(`2`)
	publishAll(t, c, conflict, wake("s", "2"))
	hands := fetch(t, c, st, st.Intake(), 2)
	in.handle(testContext(t), ln, hands[1]) // fails at the conflict before it
	equal(t, "applied", a.ids("s"), []string{"1"})
	in.handle(testContext(t), ln, hands[0])
	in.handle(testContext(t), ln, fetch(t, c, st, st.Intake(), 1)[0])
	equal(t, "applied", a.ids("s"), []string{"1", "2"})
	equal(t, "passed over", len(a.passed), 1)
	eventually(t, "all is acknowledged", func() bool { return messages(t, c, "RV_COMMANDS") == 0 })
	told := stored(t, c, "RV_REJECTED")
	equal(t, "told", len(told), 1)
	equal(t, "reason", told[0].Header.Get(HeaderReason), "input_conflict")
}

// TestI19_NotAcknowledgedBeforeCommit: while nothing commits, nothing is lost.
func TestI19_NotAcknowledgedBeforeCommit(t *testing.T) {
	c, _ := startServer(t).connectWith(StreamOptions{})
	a := newMemApplier()
	var mu sync.Mutex
	down, tried := true, make(chan struct{}, 100)
	a.before = func(claims.Command) error {
		mu.Lock()
		defer mu.Unlock()
		select {
		case tried <- struct{}{}:
		default:
		}
		if down {
			return errors.New("database is away")
		}
		return nil
	}
	run(t, NewIntake(c, a, IntakeOptions{Logger: testLog(t)}).Run)
	publishAll(t, c, wake("s", "1"), wake("s", "2"))
	for range 4 {
		receive(t, "an attempt", tried)
	}
	equal(t, "kept", messages(t, c, "RV_COMMANDS"), 2)
	mu.Lock()
	down = false
	mu.Unlock()
	eventually(t, "all is acknowledged", func() bool { return messages(t, c, "RV_COMMANDS") == 0 })
	equal(t, "applied", a.ids("s"), []string{"1", "2"})
}

// TestInterruptsPassWakes: with every lane of wakes stuck, an interrupt of
// another session is applied.
func TestInterruptsPassWakes(t *testing.T) {
	c, _ := startServer(t).connectWith(StreamOptions{})
	a := newMemApplier()
	gate, stuck := make(chan struct{}), make(chan struct{}, 100)
	a.before = func(cmd claims.Command) error {
		if cmd.Kind == claims.Wake {
			stuck <- struct{}{}
			<-gate
		}
		return nil
	}
	run(t, NewIntake(c, a, IntakeOptions{Lanes: 2, Logger: testLog(t)}).Run)
	for i := range 40 {
		publishAll(t, c, wake(session(i), "1"))
	}
	receive(t, "a stuck wake", stuck)
	receive(t, "a stuck wake", stuck)
	publishAll(t, c, claims.Command{Kind: claims.Interrupt, Session: "other"})
	eventually(t, "the interrupt is applied", func() bool { return len(a.ids("other")) == 1 })
	close(gate)
	eventually(t, "the wakes are applied", func() bool { return len(a.ids("")) == 41 })
	equal(t, "kinds", a.applied[0].Kind, claims.Interrupt)
}

// TestDrain: Run lets what is being applied finish, gives back what it has not
// begun, and past its time-out cancels.
func TestDrain(t *testing.T) {
	c, _ := startServer(t).connectWith(StreamOptions{})
	a := newMemApplier()
	gate, begun := make(chan struct{}), make(chan struct{}, 100)
	a.before = func(claims.Command) error {
		begun <- struct{}{}
		<-gate
		return nil
	}
	stop := run(t, NewIntake(c, a, IntakeOptions{Lanes: 1, Logger: testLog(t)}).Run)
	publishAll(t, c, wake("s", "1"), wake("s", "2"), wake("s", "3"))
	receive(t, "the first", begun)
	stopped := make(chan struct{})
	go func() { stop(); close(stopped) }()
	select {
	case <-stopped:
		t.Error("Run does not wait for what is being applied")
	case <-time.After(50 * time.Millisecond):
	}
	close(gate)
	receive(t, "the end of Run", stopped)
	equal(t, "applied", a.ids("s"), []string{"1"})
	b := newMemApplier()
	b.seq, b.time = a.seq, a.time
	began := time.Now()
	run(t, NewIntake(c, b, IntakeOptions{Logger: testLog(t)}).Run)
	eventually(t, "the rest is applied elsewhere", func() bool { return len(b.ids("s")) == 2 })
	if d := time.Since(began); d > ackWait/2 {
		t.Errorf("the rest was given back only by the ack wait: %v", d)
	}
}

// TestOutcomeIsTold: the announcement and the notice are out before the
// message is acknowledged.
func TestOutcomeIsTold(t *testing.T) {
	c, st := startServer(t).connectWith(StreamOptions{})
	a := newMemApplier()
	in, ln := testIntake(t, c, a, StreamOptions{})
	a.ready = true
	a.notice = &claims.Notice{Holder: "h1", Session: "s", Execution: "e", Phase: claims.Cancelling, Revoked: claims.Interrupted, Since: time.Unix(5, 0).UTC()}
	got := make(chan claims.Notice, 1)
	stop, err := SubscribeNotices(c, "h1", func(n claims.Notice) { got <- n })
	if err != nil {
		t.Fatal(err)
	}
	defer stop()
	publishAll(t, c, wake("s", "1"), claims.Command{Kind: claims.Interrupt, Session: "s"})
	in.handle(testContext(t), ln, fetch(t, c, st, st.Interrupts(), 1)[0])
	equal(t, "notice", receive(t, "notice", got), *a.notice)
	equal(t, "announced", messages(t, c, "RV_READY"), 1)
}

// TestI18_ManyWorkers: workers that fail at random before and after their
// commits, a server that restarts, interrupts and wakes mixed: each command
// once, each session's in the order they were published.
func TestI18_ManyWorkers(t *testing.T) {
	seed := uint64(time.Now().UnixNano())
	t.Logf("seed %d", seed)
	rng := rand.New(rand.NewPCG(seed, 1))
	srv := startServer(t)
	o := StreamOptions{ackWait: time.Second}
	c, _ := srv.connectWith(o)
	a := newMemApplier()
	var mu sync.Mutex
	roll := func(claims.Command) error {
		mu.Lock()
		defer mu.Unlock()
		if rng.IntN(10) == 0 {
			return errors.New("injected")
		}
		return nil
	}
	a.before, a.after = roll, roll
	for range 3 {
		w := srv.connect()
		run(t, NewIntake(w, a, IntakeOptions{Streams: o, Lanes: 4, Logger: testLog(t)}).Run)
	}
	const sessions, each = 8, 12
	want := map[claims.SessionID][]string{}
	for i := range each {
		for n := range sessions {
			s := session(n)
			cmd := wake(s, fmt.Sprint(i))
			if i%4 == 3 {
				cmd = claims.Command{Kind: claims.Interrupt, Session: s}
				want[s] = append(want[s], "interrupt")
			} else {
				want[s] = append(want[s], cmd.Input.ID)
			}
			publishAll(t, c, cmd)
		}
		if i == each/2 {
			srv.restart()
		}
	}
	eventually(t, "all is acknowledged", func() bool {
		info, err := streamInfo(testContext(t), c.js, "RV_COMMANDS")
		return err == nil && info.State.Msgs == 0
	})
	for s, ids := range want {
		equal(t, string(s), a.ids(s), ids)
	}
}

var _ jetstream.Msg = (*fakeMsg)(nil)

// fakeMsg is a message whose acknowledgements are counted.
type fakeMsg struct {
	jetstream.Msg
	acks, naks int
}

func (m *fakeMsg) Ack() error                       { m.acks++; return nil }
func (m *fakeMsg) Nak() error                       { m.naks++; return nil }
func (m *fakeMsg) NakWithDelay(time.Duration) error { m.naks++; return nil }

// TestI19_Acknowledgements: exactly what is done is acknowledged.
func TestI19_Acknowledgements(t *testing.T) {
	c, _ := startServer(t).connectWith(StreamOptions{})
	for _, err := range []error{nil, errLetGo, errLaneFull, context.Canceled, errors.New("x"), claims.ErrOutcomeUnknown} {
		in, _ := testIntake(t, c, newMemApplier(), StreamOptions{})
		m := &fakeMsg{}
		in.settle(testContext(t), &hand{msg: m, cmd: claims.Command{Kind: claims.Wake}, held: time.Now()}, claims.Applied, err)
		if done := err == nil; (m.acks == 1) != done || (m.naks == 1) == done {
			t.Errorf("%v: %d acks, %d naks", err, m.acks, m.naks)
		}
	}
}

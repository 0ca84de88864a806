package bus

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"
	"unicode/utf8"

	"github.com/nats-io/nats.go"

	"reveille/claims"
)

func TestPublisher(t *testing.T) {
	c, st := startServer(t).connectWith(StreamOptions{})
	p := NewPublisher(c)
	at := time.Date(2026, 12, 1, 8, 0, 0, 1000, time.UTC)
	if _, err := p.Admit(testContext(t), "s", *input("a", `{"x":1}`), Publishing{Trace: trace}); err != nil {
		t.Fatal(err)
	}
	if _, err := p.Wake(testContext(t), "s", input("b", `null`), at, Publishing{}); err != nil {
		t.Fatal(err)
	}
	if _, err := p.Wake(testContext(t), "s", nil, time.Time{}, Publishing{}); err != nil {
		t.Fatal(err)
	}
	i := InterruptOptions{Reason: "stop", Discard: true, Execution: "ab9d8f00-1111-2222-3333-444455556666"}
	first, err := p.Interrupt(testContext(t), "s", i, Publishing{MsgID: "once"})
	if err != nil || first.Duplicate || first.Sequence != 4 {
		t.Fatalf("%+v, %v", first, err)
	}
	if again, err := p.Interrupt(testContext(t), "s", i, Publishing{MsgID: "once"}); err != nil || !again.Duplicate {
		t.Errorf("the same message id: %+v, %v", again, err)
	}
	got := fetch(t, c, st, st.Intake(), 3)
	got = append(got, fetch(t, c, st, st.Interrupts(), 1)...)
	want := []claims.Command{
		{Kind: claims.Admit, Input: input("a", `{"x":1}`), Trace: trace},
		{Kind: claims.Wake, Input: input("b", `null`), NotBefore: at},
		{Kind: claims.Wake},
		{Kind: claims.Interrupt, Reason: "stop", Discard: true, Execution: i.Execution},
	}
	for n, h := range got {
		w := want[n]
		w.Session, w.Sequence, w.Time = "s", int64(n+1), h.Time.UnixNano()
		equal(t, "command", h.cmd, w)
		if h.rej != nil {
			t.Error(h.rej)
		}
	}
}

func TestPublisherRefuses(t *testing.T) {
	srv := startServer(t)
	c := srv.connect()
	p := NewPublisher(c)
	var rej *Rejection
	if _, err := p.Wake(testContext(t), "a.b", nil, time.Time{}, Publishing{}); !errors.As(err, &rej) || rej.Reason != InvalidSession {
		t.Errorf("session: %v", err)
	}
	if _, err := p.Admit(testContext(t), "s", *input("", "1"), Publishing{}); !errors.As(err, &rej) || rej.Reason != InvalidBody {
		t.Errorf("input: %v", err)
	}
	if _, err := p.Admit(testContext(t), "s", *input("a", `"`+strings.Repeat("x", 256<<10)+`"`), Publishing{}); !errors.As(err, &rej) || rej.Reason != TooLarge {
		t.Errorf("size: %v", err)
	}
	ctx, cancel := context.WithTimeout(testContext(t), 100*time.Millisecond)
	defer cancel()
	if _, err := p.Wake(ctx, "s", nil, time.Time{}, Publishing{}); err == nil || !strings.Contains(err.Error(), "RV_COMMANDS") {
		t.Errorf("without a stream: %v", err)
	}
}

// TestPublisherRetries: the stream appears, and the server comes back, while
// somebody publishes.
func TestPublisherRetries(t *testing.T) {
	srv := startServer(t)
	c := srv.connect()
	done := make(chan error, 1)
	go func() {
		_, err := NewPublisher(c).Wake(testContext(t), "s", nil, time.Time{}, Publishing{})
		done <- err
	}()
	if _, err := c.Ensure(testContext(t), StreamOptions{}); err != nil {
		t.Fatal(err)
	}
	if err := receive(t, "publish", done); err != nil {
		t.Fatal(err)
	}
	srv.stop()
	go func() {
		_, err := NewPublisher(c).Wake(testContext(t), "s", nil, time.Time{}, Publishing{})
		done <- err
	}()
	srv.start()
	if err := receive(t, "publish", done); err != nil {
		t.Fatal(err)
	}
	equal(t, "commands", messages(t, c, "RV_COMMANDS"), 2)
}

// watchAll follows into a channel until the test ends.
func watchAll(t *testing.T, c *Conn, s claims.SessionID, from int64) <-chan claims.Record {
	got := make(chan claims.Record, 10000)
	run(t, func(ctx context.Context) error {
		return Watch(ctx, c, s, from, func(r claims.Record) error { got <- r; return nil })
	})
	return got
}

func TestWatch(t *testing.T) {
	srv := startServer(t)
	c, _ := srv.connectWith(StreamOptions{})
	l := newMemLog()
	r := startRelay(t, c, l)
	relay := func(s claims.SessionID, n int) {
		t.Helper()
		l.add(s, n)
		r.Poke(s)
		flush(t, r)
	}
	relay("s", 3)
	relay("other", 2)
	one := watchAll(t, srv.connect(), "s", 2)
	all := watchAll(t, srv.connect(), "", 0)
	fresh := watchAll(t, srv.connect(), "s", FromNew)
	takes := func(what string, from <-chan claims.Record, seqs ...int64) {
		t.Helper()
		for _, seq := range seqs {
			rec := receive(t, what, from)
			if rec.Seq != seq || string(rec.Line) != string(l.events[rec.Session][seq-1].Line) {
				t.Fatalf("%s: got %s, want %d", what, rec.Line, seq)
			}
		}
	}
	takes("one", one, 2, 3)
	takes("all", all, 1, 2, 3, 1, 2)
	// When the new-only watcher's consumer is there can be seen at the server.
	eventually(t, "three consumers", func() bool {
		info, err := streamInfo(testContext(t), c.js, "RV_EVENTS")
		return err == nil && info.State.Consumers == 3
	})
	relay("s", 2)
	takes("one", one, 4, 5)
	takes("all", all, 4, 5)
	takes("fresh", fresh, 4, 5)
	srv.restart()
	relay("s", 1)
	takes("one after a restart", one, 6)
	takes("all after a restart", all, 6)
	rewind(t, c, l, "s", 6) // another stream with the same events
	relay("s", 1)
	takes("one after a rebuild", one, 7)
	sentinel := errors.New("enough")
	if err := Watch(testContext(t), c, "s", 7, func(claims.Record) error { return sentinel }); !errors.Is(err, sentinel) {
		t.Errorf("got %v", err)
	}
}

func TestLive(t *testing.T) {
	c := startServer(t).connect()
	got := make(chan LiveText, 1000)
	stop, err := SubscribeLive(c, "", func(x LiveText) { got <- x })
	if err != nil {
		t.Fatal(err)
	}
	defer stop()
	l := NewLive(c)
	run(t, l.Run)
	text := strings.Repeat("é\x00", 300_000) // 600 kB of which a third becomes six times as much
	l.PublishLive("s", 3, "step", text)
	var b strings.Builder
	for b.Len() < len(text) {
		x := receive(t, "a piece", got)
		if x.Session != "s" || x.Epoch != 3 || x.Step != "step" || !utf8.ValidString(x.Text) {
			t.Fatalf("%+v", x)
		}
		b.WriteString(x.Text)
	}
	if b.String() != text {
		t.Error("the pieces are not the text")
	}
}

// TestLiveNeverBlocks: with nobody to take it, live text is dropped.
func TestLiveNeverBlocks(t *testing.T) {
	srv := startServer(t)
	c := srv.connect()
	l := NewLive(c) // it does not run
	for i := range liveQueue + 10 {
		l.PublishLive("s", 1, "step", fmt.Sprint(i))
	}
	equal(t, "dropped", l.Dropped(), 10)
	large := NewLive(c)
	for range 3 {
		large.PublishLive("s", 1, "step", strings.Repeat("x", liveBytes/2))
	}
	equal(t, "dropped of large pieces", large.Dropped(), 1)
	srv.stop()
	eventually(t, "the lost server is noticed", func() bool { return !c.nc.IsConnected() })
	run(t, l.Run)
	eventually(t, "all is dropped", func() bool { return l.Dropped() == liveQueue+10 })
	srv.start()
}

func TestSplit(t *testing.T) {
	for _, text := range []string{"", "a", "abcdefgh", "ééééé", "aéaéaé", "😀😀😀", "\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff", "a\x80\x80\x80\x80\x80\x80\x80\x80\x80"} {
		for most := utf8.UTFMax; most < 9; most++ {
			pieces := split(text, most)
			if strings.Join(pieces, "") != text {
				t.Errorf("%q in %d: %q", text, most, pieces)
			}
			for _, p := range pieces {
				if len(p) > most || p == "" && text != "" || utf8.ValidString(text) && !utf8.ValidString(p) {
					t.Errorf("%q in %d: %q", text, most, pieces)
				}
			}
		}
	}
}

func TestNoticeOfAnotherHolder(t *testing.T) {
	c := startServer(t).connect()
	got := make(chan claims.Notice, 10)
	stop, err := SubscribeNotices(c, "h1", func(n claims.Notice) { got <- n })
	if err != nil {
		t.Fatal(err)
	}
	if err := PublishNotice(c, claims.Notice{Holder: "h2"}); err != nil {
		t.Fatal(err)
	}
	if err := c.nc.Publish("rv.worker.h1.notice", []byte("{")); err != nil {
		t.Fatal(err)
	}
	want := claims.Notice{Holder: "h1", Session: "s", Execution: "e", Phase: claims.Cancelling}
	if err := PublishNotice(c, want); err != nil {
		t.Fatal(err)
	}
	equal(t, "notice", receive(t, "notice", got), want)
	stop()
	if err := PublishNotice(c, want); err != nil {
		t.Fatal(err)
	}
	if err := c.nc.Flush(); err != nil {
		t.Fatal(err)
	}
	equal(t, "after stop", len(got), 0)
}

// TestDeniedIsNamedOnce: a denied publish shows as a time-out; the log names it.
func TestDeniedIsNamedOnce(t *testing.T) {
	var w countingWriter
	c := &Conn{log: textLog(&w), denied: map[string]bool{}}
	for range 3 {
		c.asyncError(nil, nil, fmt.Errorf("%w: publish to x", nats.ErrPermissionViolation))
	}
	equal(t, "lines", w.lines, 1)
}

func TestCheckURL(t *testing.T) {
	for _, good := range []string{"nats://h:1", "tls://h", "ws://h,wss://h", "h:4222", "nats://u:p@h, nats://i", "127.0.0.1"} {
		if err := CheckURL(good); err != nil {
			t.Errorf("%s: %v", good, err)
		}
	}
	for _, bad := range []string{"http://h:4222", "nats://h,postgres://u:secret@h/x"} {
		_, err := Connect(testContext(t), Options{URL: bad})
		if err == nil || !strings.Contains(err.Error(), "want nats, tls, ws or wss") || strings.Contains(err.Error(), "secret") {
			t.Errorf("%s: %v", bad, err)
		}
	}
}

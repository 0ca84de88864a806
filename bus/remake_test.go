package bus

import (
	"errors"
	"io"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"reveille/claims"
)

// lockedWriter is a log that is read while it is written.
type lockedWriter struct {
	mu   sync.Mutex
	text strings.Builder
}

func (w *lockedWriter) Write(p []byte) (int, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.text.Write(p)
}

func (w *lockedWriter) count(s string) int {
	w.mu.Lock()
	defer w.mu.Unlock()
	return strings.Count(w.text.String(), s)
}

// TestDeletedStreamIsMadeAgain: each stream is deleted under a relay and an
// intake that run. They go on when somebody publishes into it, which is when
// they notice; it is said once, and the other streams stay as they are.
func TestDeletedStreamIsMadeAgain(t *testing.T) {
	for stream, use := range map[string]func(t *testing.T, c *Conn, l *memLog, r *Relay){
		"RV_EVENTS": func(t *testing.T, c *Conn, l *memLog, r *Relay) {
			l.add("s", 2)
			r.Poke("s")
			flush(t, r)
			checkCopy(t, c, l) // what was deleted with it, too
		},
		"RV_QUARANTINE": func(t *testing.T, c *Conn, l *memLog, r *Relay) {
			l.add("s", 1, claims.SessionQuarantined)
			r.Poke("s")
			flush(t, r)
			checkCopy(t, c, l)
			equal(t, "copies", messages(t, c, "RV_QUARANTINE"), 1)
		},
		"RV_REJECTED": func(t *testing.T, c *Conn, _ *memLog, _ *Relay) {
			if _, err := c.publish(testContext(t), &nats.Msg{Subject: "rv.wake.s", Data: []byte("no JSON")}); err != nil {
				t.Fatal(err)
			}
			eventually(t, "it is rejected, and acknowledged", func() bool { return messages(t, c, "RV_COMMANDS") == 0 })
			equal(t, "rejected", messages(t, c, "RV_REJECTED"), 1)
		},
		"RV_READY": func(t *testing.T, c *Conn, _ *memLog, _ *Relay) { // no worker has a free slot, and pulls
			publishAll(t, c, wake("s", "1"))
			eventually(t, "it is announced, and acknowledged", func() bool { return messages(t, c, "RV_COMMANDS") == 0 })
			equal(t, "announcements", messages(t, c, "RV_READY"), 1)
		},
	} {
		t.Run(stream, func(t *testing.T) {
			srv := startServer(t)
			var log lockedWriter
			c, err := Connect(testContext(t), Options{URL: srv.srv.ClientURL(), Logger: textLog(io.MultiWriter(&log, &testWriter{t: t}))})
			if err != nil {
				t.Fatal(err)
			}
			t.Cleanup(c.Close)
			kept := strings.Replace("RV_QUARANTINE", stream, "RV_REJECTED", 1)
			for _, cfg := range Configs(c.ns, StreamOptions{}) {
				if cfg.Name == kept { // an operator made it, and wants more
					cfg.MaxAge = 10 * DefaultRetention
					if _, err := c.js.CreateStream(testContext(t), cfg); err != nil {
						t.Fatal(err)
					}
				}
			}
			if _, err := c.Ensure(testContext(t), StreamOptions{}); err != nil {
				t.Fatal(err)
			}
			l, a := newMemLog(), newMemApplier()
			a.ready = true
			r := startRelay(t, c, replayLog{l})
			run(t, NewIntake(c, a, IntakeOptions{Logger: testLog(t)}).Run)
			l.add("s", 3)
			r.Poke("s")
			flush(t, r)
			publishAll(t, c, wake("warm", "1"))
			eventually(t, "the intake runs", func() bool { return messages(t, c, "RV_COMMANDS") == 0 })
			if err := c.js.DeleteStream(testContext(t), stream); err != nil {
				t.Fatal(err)
			}
			use(t, c, l, r)
			c.remaker.wg.Wait()
			equal(t, "lines of log", log.count("streams were missing, and are made again"), 1)
			equal(t, "lines of log of "+stream, log.count("streams="+stream+"\n"), 1)
			info, err := streamInfo(testContext(t), c.js, kept)
			if err != nil || info.Config.MaxAge != 10*DefaultRetention {
				t.Errorf("%s keeps its messages %v now, %v", kept, info.Config.MaxAge, err)
			}
		})
	}
}

// TestI25_DeletedStreamOfQuietSessions: nobody publishes; who compares the
// stream with the database has it made, and then finds all of it lost.
func TestI25_DeletedStreamOfQuietSessions(t *testing.T) {
	c, _ := startServer(t).connectWith(StreamOptions{})
	l := newMemLog()
	r := startRelay(t, c, replayLog{l})
	l.add("s", 3)
	r.Poke("s")
	flush(t, r)
	if err := c.js.DeleteStream(testContext(t), "RV_EVENTS"); err != nil {
		t.Fatal(err)
	}
	marks := []Mark{{Session: "s", Seq: 3}}
	if short, err := r.Verify(testContext(t), marks); !errors.Is(err, jetstream.ErrStreamNotFound) || len(short) > 0 {
		t.Errorf("without the stream: %v, %v", short, err)
	}
	c.remaker.wg.Wait()
	short, err := r.Verify(testContext(t), marks)
	if err != nil || len(short) != 1 {
		t.Fatalf("with an empty one: %v, %v", short, err)
	}
	if _, err := r.Repair(testContext(t), "s", false); err != nil {
		t.Fatal(err)
	}
	checkCopy(t, c, l)
}

// TestI25_VerifyWithoutAnswer: what a server did not answer for is not lost.
func TestI25_VerifyWithoutAnswer(t *testing.T) {
	srv := startServer(t)
	c, _ := srv.connectWith(StreamOptions{})
	r := NewRelay(c, newMemLog(), RelayOptions{})
	srv.stop()
	defer srv.start()
	if short, err := r.Verify(testContext(t), []Mark{{Session: "s", Seq: 3}}); err == nil {
		t.Errorf("a server that is gone is short of %v", short)
	}
}

// TestMissedStreamsAreLookedForRarely: however many miss one.
func TestMissedStreamsAreLookedForRarely(t *testing.T) {
	c, _ := startServer(t).connectWith(StreamOptions{})
	asked := make(chan *nats.Msg, 10000)
	sub, err := c.nc.ChanSubscribe("$JS.API.STREAM.INFO.RV_EVENTS", asked)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = sub.Unsubscribe() }()
	if err := c.nc.Flush(); err != nil {
		t.Fatal(err)
	}
	began := time.Now()
	for range 1000 {
		c.missed()
	}
	c.remaker.wg.Wait()
	for range 1000 {
		c.missed()
	}
	c.remaker.wg.Wait()
	most := 1 + int(time.Since(began)/remakeEvery)
	if err := c.nc.Flush(); err != nil {
		t.Fatal(err)
	}
	if n := len(asked); n < 1 || n > most {
		t.Errorf("it was looked for %d times, at most %d times are due", n, most)
	}
	c.Close()
	c.missed() // nothing is begun then
	c.remaker.wg.Wait()
	equal(t, "looks", len(asked), min(len(asked), most))
}

// TestNothingIsMadeUnasked: who never made the streams makes none now: a client
// that publishes to a name that it got wrong.
func TestNothingIsMadeUnasked(t *testing.T) {
	c := startServer(t).connect()
	if err := NewAnnouncer(c).Announce(testContext(t), "s"); err == nil {
		t.Error("announced into nothing")
	}
	c.remaker.wg.Wait()
	if _, err := streamInfo(testContext(t), c.js, "RV_READY"); !errors.Is(err, jetstream.ErrStreamNotFound) {
		t.Errorf("the stream: %v", err)
	}
}

package bus

import (
	"os"
	"path/filepath"
	"testing"
	"time"

	"reveille/claims"
)

// backup copies the store of the server, which it stops for that; restore puts
// a copy in the place of the store.
func (s *testServer) backup() (copied string) {
	s.t.Helper()
	copied = filepath.Join(s.t.TempDir(), "backup")
	s.stop()
	if err := os.CopyFS(copied, os.DirFS(s.store)); err != nil {
		s.t.Fatal(err)
	}
	s.start()
	return copied
}

func (s *testServer) restore(copied string) {
	s.t.Helper()
	s.stop()
	if err := os.RemoveAll(s.store); err != nil {
		s.t.Fatal(err)
	}
	if err := os.CopyFS(s.store, os.DirFS(copied)); err != nil {
		s.t.Fatal(err)
	}
	s.start()
}

// connected waits until a connection has found the server again.
func connected(t testing.TB, c *Conn) {
	t.Helper()
	eventually(t, "the connection is back", func() bool {
		_, err := streamInfo(testContext(t), c.js, "RV_COMMANDS")
		return err == nil
	})
}

// TestI18_RestoredFromBackup: the server comes back with an older copy of its
// files. What the copy still holds was applied, and is recognised; sequences are
// used again for what is published now, and it is applied, in order, once.
func TestI18_RestoredFromBackup(t *testing.T) {
	for name, running := range map[string]bool{"workers that went on": true, "a worker that is new": false} {
		t.Run(name, func(t *testing.T) {
			srv := startServer(t)
			o := StreamOptions{ackWait: time.Second}
			c, _ := srv.connectWith(o)
			publishAll(t, c, wake("s", "1"), wake("s", "2"), claims.Command{Kind: claims.Interrupt, Session: "s"})
			copied := srv.backup()
			a := newMemApplier()
			stop := run(t, NewIntake(srv.connect(), a, IntakeOptions{Streams: o, Logger: testLog(t)}).Run)
			publishAll(t, c, wake("s", "4"), claims.Command{Kind: claims.Interrupt, Session: "s"}, wake("s", "6"))
			eventually(t, "all is acknowledged", func() bool { return messages(t, c, "RV_COMMANDS") == 0 })
			want := []string{"1", "2", "interrupt", "4", "interrupt", "6"}
			equal(t, "applied", a.ids("s"), want)
			if !running {
				stop()
			}
			srv.restore(copied)
			connected(t, c)
			publishAll(t, c, wake("s", "a"), claims.Command{Kind: claims.Interrupt, Session: "s"}, wake("s", "b"), wake("s", "c"))
			if !running {
				run(t, NewIntake(srv.connect(), a, IntakeOptions{Streams: o, Logger: testLog(t)}).Run)
			}
			eventually(t, "all is acknowledged", func() bool { return messages(t, c, "RV_COMMANDS") == 0 })
			equal(t, "applied", a.ids("s"), append(want, "a", "interrupt", "b", "c"))
		})
	}
}

// TestI18_LateAckAfterRewind: a message was in hand when the server came back
// with an older copy, and its sequence was used again. What is done with it then
// does not remove the new message, which somebody else has in hand by now: where
// only time has passed, and where only the connection is another one.
func TestI18_LateAckAfterRewind(t *testing.T) {
	for name, alone := range map[string]func(*Intake, *hand){
		"another connection": func(_ *Intake, h *hand) { h.held = time.Now() },
		"later":              func(in *Intake, h *hand) { h.held, h.link = time.Now().Add(-2*heldFor), in.link() },
		"never asked":        func(_ *Intake, h *hand) { h.held, h.link = time.Time{}, 0 },
	} {
		t.Run(name, func(t *testing.T) {
			srv := startServer(t)
			c, st := srv.connectWith(StreamOptions{})
			a := newMemApplier()
			in, ln := testIntake(t, c, a, StreamOptions{})
			publishAll(t, c, wake("s", "1"))
			in.handle(testContext(t), ln, fetch(t, c, st, st.Intake(), 1)[0])
			eventually(t, "it is acknowledged", func() bool { return messages(t, c, "RV_COMMANDS") == 0 })
			copied := srv.backup()
			connected(t, c)

			publishAll(t, c, wake("s", "lost"))
			old := fetch(t, c, st, st.Intake(), 1)[0]
			result, err := in.bring(testContext(t), ln, old)
			if err != nil {
				t.Fatal(err)
			}
			srv.restore(copied)
			connected(t, c)
			publishAll(t, c, wake("s", "new"))
			fresh := fetch(t, c, st, st.Intake(), 1)[0]
			equal(t, "the sequence that is used again", fresh.Sequence, old.Sequence)
			alone(in, old)
			in.settle(testContext(t), old, result, nil)
			if err := c.nc.FlushTimeout(flushTimeout); err != nil {
				t.Fatal(err)
			}
			in.handle(testContext(t), ln, fresh)
			equal(t, "applied", a.ids("s"), []string{"1", "lost", "new"})
			eventually(t, "it is acknowledged", func() bool { return messages(t, c, "RV_COMMANDS") == 0 })
		})
	}
}

// TestI18_KilledBetweenCommitAndAck: a worker dies with a command that it has
// applied, and told nobody of; another one gets it again after the ack wait, and
// tells that the session is ready.
func TestI18_KilledBetweenCommitAndAck(t *testing.T) {
	srv := startServer(t)
	o := StreamOptions{ackWait: 300 * time.Millisecond}
	c, _ := srv.connectWith(o)
	dying := srv.connect()
	st, err := dying.Ensure(testContext(t), o)
	if err != nil {
		t.Fatal(err)
	}
	a := newMemApplier()
	publishAll(t, c, wake("s", "1"))
	in, ln := testIntake(t, dying, a, o)
	if _, err := in.bring(testContext(t), ln, fetch(t, dying, st, st.Intake(), 1)[0]); err != nil {
		t.Fatal(err)
	}
	dying.Close()
	a.ready = true
	other := NewIntake(c, a, IntakeOptions{Streams: o, Logger: testLog(t)})
	run(t, other.Run)
	eventually(t, "it is acknowledged", func() bool { return messages(t, c, "RV_COMMANDS") == 0 })
	equal(t, "applied", a.ids("s"), []string{"1"})
	equal(t, "announced", messages(t, c, "RV_READY"), 1)
	equal(t, "duplicates", counted(t, other, "wake", "duplicate"), 1)
}

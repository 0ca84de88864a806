package recovery

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"reveille/claims"
)

// copies adds sessions whose events the stream has up to a sequence, of 9.
func (w *world) addCopies(prefix string, n int, stream int64) {
	for _, id := range sessions(prefix, n) {
		w.copies = append(w.copies, &worldCopy{Mark: claims.Mark{Session: id, Seq: 9}, stream: stream})
	}
}

// lacking counts the sessions that the stream has less of.
func (w *world) lacking() (n int) {
	for _, c := range w.copies {
		if c.stream < c.Seq {
			n++
		}
	}
	return n
}

// TestI25_AuditGoesAround: each pass compares one page, by one request, and the
// pages go around. What is whole is only looked at.
func TestI25_AuditGoesAround(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld()
		w.addCopies("s", 25, 9)
		s := w.scanner(t, Options{Batch: 10})
		pass := func() Result {
			time.Sleep(time.Second) // of the bubble
			return s.Pass(t.Context()).Lanes[LaneRelay]
		}
		for range 4 {
			if r := pass(); r != (Result{}) {
				t.Errorf("a pass over a stream that is whole: %+v", r)
			}
		}
		var asked []string
		for _, c := range w.calls {
			if c == "relayed" || strings.HasPrefix(c, "relayed ") {
				asked = append(asked, strings.TrimPrefix(c, "relayed"))
			}
		}
		if got := strings.Join(asked, ","); got != ", s009, s019," {
			t.Errorf("pages after %q", got)
		}
		if n := w.count("verify"); n != 4 || w.count("repair") != 0 || w.count("touch relays") != 0 {
			t.Errorf("%d requests in 4 passes, %d repairs, %d touches", n, w.count("repair"), w.count("touch relays"))
		}

		// Two lost their tails, one everything.
		w.copies[3].stream, w.copies[12].stream, w.copies[24].stream = 8, 4, 0
		for range 3 {
			pass()
		}
		if n := w.lacking(); n != 0 {
			t.Errorf("%d sessions lack events after a round", n)
		}
		if n := w.count("repair"); n != 3 {
			t.Errorf("%d repairs of 3 sessions", n)
		}
	})
}

// TestI25_AuditOfALostStream: all pages follow each other without a pause, and
// then the audit costs what it did before.
func TestI25_AuditOfALostStream(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld()
		w.addCopies("s", 300, 0)
		var log bytes.Buffer
		s := w.scanner(t, Options{Logger: slog.New(slog.NewTextHandler(&log, nil))})
		passes := 0
		for p := s.Pass(t.Context()); p.More(); p = s.Pass(t.Context()) { // no time goes by
			if r := p.Lanes[LaneRelay]; r.Done != 100 || r.Seen != 0 {
				t.Fatalf("%+v", r)
			}
			passes++
		}
		if passes != 3 || w.lacking() != 0 {
			t.Errorf("%d passes, %d sessions lack events", passes, w.lacking())
		}
		if n := strings.Count(log.String(), "\n"); n != 3 {
			t.Errorf("%d lines of log for 3 pages:\n%s", n, log.String())
		}
		n := w.count("verify")
		for range 10 {
			s.Pass(t.Context())
		}
		if got := w.count("verify") - n; got > 1 {
			t.Errorf("%d requests in passes without a pause", got)
		}
	})
}

// TestI25_AuditLeavesAlone: a session whose events left the stream by their age,
// and one that can't be published again, are not looked at in each round.
func TestI25_AuditLeavesAlone(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld()
		w.addCopies("s", 3, 9)
		w.copies[0].stream, w.copies[0].aged = 0, true
		w.copies[1].stream = 5
		w.hook = func(_ context.Context, op string, id claims.SessionID) error {
			if op == "repair" && id == "s001" {
				return errors.New("somebody else's message")
			}
			return nil
		}
		var log bytes.Buffer
		s := w.scanner(t, Options{Logger: slog.New(slog.NewTextHandler(&log, nil))})
		for range 50 {
			s.Pass(t.Context())
			time.Sleep(time.Second)
		}
		if a, b := w.count("repair s000"), w.count("repair s001"); a != 2 || b != 1 { // once is perhaps a replica that lags
			t.Errorf("in %v: %d looks at the one that is aged, %d at the one that is broken", 50*time.Second, a, b)
		}
		if n := strings.Count(log.String(), "\n"); n != 1 || !strings.Contains(log.String(), "somebody else's") {
			t.Errorf("the log:\n%s", log.String())
		}
		w.hook = nil
		for range 15 * 60 {
			s.Pass(t.Context())
			time.Sleep(time.Second)
		}
		if a := w.count("repair s000"); a != 3 || w.copies[1].stream != 9 {
			t.Errorf("%d looks in a quarter of an hour; the broken one has %d", a, w.copies[1].stream)
		}
	})
}

// TestI25_AuditIsBounded: a page is at most what the server answers for, and a
// repair that hangs costs a fifth of the time box, and not the sessions behind it.
func TestI25_AuditIsBounded(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld()
		w.addCopies("s", 1100, 9)
		w.copies[0].stream, w.copies[700].stream = 0, 0
		w.hook = func(ctx context.Context, op string, id claims.SessionID) error {
			if op == "repair" && id == "s000" {
				<-ctx.Done()
				return ctx.Err()
			}
			return nil
		}
		s := w.scanner(t, Options{Batch: 5000})
		start := time.Now()
		r := s.Pass(t.Context()).Lanes[LaneRelay]
		if d := time.Since(start); d != time.Second || r.Skipped != 1 {
			t.Errorf("%v, %+v", d, r)
		}
		time.Sleep(time.Second)
		s.Pass(t.Context())
		if w.copies[700].stream != 9 {
			t.Error("what hangs held up who is behind it")
		}
	})
}

// TestI25_AuditGoesOnWhereItWasCut: a long log is published in parts, each as
// long as the box is, before the next page.
func TestI25_AuditGoesOnWhereItWasCut(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld()
		w.addCopies("s", 3, 9)
		w.copies[1].stream = 4
		w.hook = func(ctx context.Context, op string, _ claims.SessionID) error {
			if op == "repair" && w.copies[1].stream < 8 {
				<-ctx.Done()
				return fmt.Errorf("%w: %w", errPart, ctx.Err())
			}
			return nil
		}
		s := w.scanner(t, Options{Batch: 2})
		for i := range 5 {
			p := s.Pass(t.Context())
			if want := int64(5 + i); w.copies[1].stream != want {
				t.Errorf("pass %d: %+v, the stream has %d events, want %d", i, p.Lanes[LaneRelay], w.copies[1].stream, want)
			}
		}
	})
}

// TestI25_AuditOutages: without the stream, or the database, the audit waits and
// says so once; the lanes go on.
func TestI25_AuditOutages(t *testing.T) {
	for _, broken := range []string{"verify", "relayed"} {
		t.Run(broken, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				w := newWorld()
				w.addCopies("s", 1, 0)
				down := true
				w.hook = func(_ context.Context, op string, _ claims.SessionID) error {
					if down && op == broken {
						return errBroken
					}
					return nil
				}
				var log bytes.Buffer
				s := w.scanner(t, Options{Logger: slog.New(slog.NewTextHandler(&log, nil))})
				for i := range 5 {
					w.relays = append(w.relays, &worldSession{id: claims.SessionID(fmt.Sprint("r", i)), due: time.Now()})
					if r := s.Pass(t.Context()).Lanes[LaneRelay]; r.Done != 1 {
						t.Errorf("%+v", r)
					}
					time.Sleep(time.Second)
				}
				if n := strings.Count(log.String(), "\n"); broken == "verify" && n != 1 {
					t.Errorf("%d lines of log:\n%s", n, log.String())
				}
				down = false
				s.Pass(t.Context())
				if w.lacking() != 0 {
					t.Error("not mended when it was there again")
				}
			})
		})
	}
}

// TestAuditRemembersLittle: what is left alone is bounded.
func TestAuditRemembersLittle(t *testing.T) {
	a := audit{idle: map[claims.SessionID]rest{}}
	now := time.Now()
	for i := range 3 * auditMostIdle {
		a.broken(now, claims.SessionID(fmt.Sprint(i)))
	}
	if len(a.idle) != auditMostIdle {
		t.Errorf("%d are remembered", len(a.idle))
	}
	later := now.Add(time.Hour)
	a.begin(later)
	a.aged(later, "late")
	if len(a.idle) != 1 {
		t.Errorf("%d are remembered when their time is over", len(a.idle))
	}
}

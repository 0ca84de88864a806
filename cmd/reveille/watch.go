package main

import (
	"context"
	"encoding/json"
	"errors"
	"time"

	"reveille/bus"
	"reveille/claims"
	"reveille/cmd/internal/flags"
	"reveille/cmd/reveille/internal/follow"
)

type watchCmd struct {
	Session string `arg:"" optional:"" help:"Its id; all sessions where there is none."`
	From    *int64 `help:"First sequence that is shown; 0 shows only what comes next, and is the default without a session, 1 with one." placeholder:"SEQ"`
	JSON    bool   `name:"json" help:"Print the events as they are, one a line."`
	Live    bool   `help:"With --json, print live text too: {\"session\",\"epoch\",\"step\",\"text\"}."`
	natsFlags
}

// shower shows what comes.
type shower interface {
	event(r claims.Record) error
	live(l bus.LiveText) error
}

func (w *watchCmd) run(ctx context.Context, s streams) error {
	session, from, err := w.what()
	if err != nil {
		return err
	}
	conn, err := w.connect(ctx, s)
	if err != nil {
		return err
	}
	defer conn.Close()
	of := session
	if of == "" {
		of = "*"
	}
	h, err := w.lookUp(ctx, conn, of)
	if err != nil {
		return err
	}
	if session == "" {
		h.last = 0 // of many sessions there is no last sequence
	}
	if from == 0 {
		from = bus.FromNew
	}
	events, live := make(chan claims.Record), make(chan bus.LiveText, liveQueue)
	_, err = bus.SubscribeLive(conn, session, func(l bus.LiveText) {
		select {
		case live <- l:
		default: // the durable text comes in any case
		}
	})
	if err != nil {
		return err
	}
	if session != "" && h.last == 0 {
		s.say("nothing yet of session %s: waiting for it; Ctrl-C ends this", session)
	}
	failed := make(chan error, 1)
	go func() {
		failed <- bus.Watch(ctx, conn, session, from, func(r claims.Record) error {
			select {
			case events <- r:
				return nil
			case <-ctx.Done():
				return ctx.Err()
			}
		})
	}()
	var show shower = &lines{follow.NewPrinter(s.out, time.Local), from == bus.FromNew, session != "", h.last}
	if w.JSON {
		show = &jsonLines{s, w.Live}
	}
	for {
		select {
		case r := <-events:
			err = show.event(r)
		case l := <-live:
			err = show.live(l)
		case err = <-failed:
		case <-ctx.Done():
		}
		if ctx.Err() != nil || errors.Is(err, context.Canceled) {
			return nil // Ctrl-C is how one stops to watch
		}
		if err != nil {
			return err
		}
	}
}

func (w *watchCmd) what() (session claims.SessionID, from int64, err error) {
	if w.Session != "" {
		if session, err = parseSession(w.Session); err != nil {
			return "", 0, err
		}
		from = 1
	}
	if w.From != nil {
		from = *w.From
	}
	if from < 0 {
		return "", 0, flags.Usage("--from %d: want 0 or more", from)
	}
	if w.Live && !w.JSON {
		return "", 0, flags.Usage("--live is of --json: without it live text is shown in any case")
	}
	return session, from, nil
}

// lines shows events for people.
type lines struct {
	*follow.Printer
	fresh bool // all events are new: no live text was missed
	one   bool // session
	last  int64
}

func (l *lines) event(r claims.Record) error {
	return l.Event(r, l.fresh || l.one && r.Seq > l.last)
}

func (l *lines) live(t bus.LiveText) error { return l.Live(t.Session, t.Step, t.Text) }

// jsonLines prints what comes as it is.
type jsonLines struct {
	s        streams
	withLive bool
}

func (j *jsonLines) event(r claims.Record) error { return j.s.line(r.Line) }

func (j *jsonLines) live(l bus.LiveText) error {
	if !j.withLive {
		return nil
	}
	raw, err := claims.Marshal(l)
	if err != nil {
		return err
	}
	return j.s.line(raw)
}

func textOf(r claims.Record) string {
	var d claims.TextData
	_ = json.Unmarshal(r.Data, &d) // this program's own; what does not decode has no text
	return d.Text
}

package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"time"
	"unicode/utf8"

	"github.com/google/uuid"

	"reveille/bus"
	"reveille/claims"
	"reveille/cmd/internal/flags"
)

type wakeCmd struct {
	Session   string  `arg:"" help:"Its id."`
	Input     *string `help:"Input as JSON; - reads it from standard input." placeholder:"JSON"`
	ID        string  `name:"id" help:"Idempotency key of the input; a new one is made and printed where there is none." placeholder:"ID"`
	Steer     bool    `help:"The input joins what runs at its next step, instead of waiting until the session is idle."`
	NotBefore string  `help:"Not before this time (RFC 3339)." placeholder:"TIME"`
	Wait      bool    `help:"Print what its steps say, until they are over; exit 0 completed, 3 failed, 4 interrupted or declined, 5 quarantined. Ctrl-C stops waiting, not the session."`
	natsFlags
}

func (w *wakeCmd) run(ctx context.Context, s streams) error {
	cmd := claims.Command{Kind: claims.Wake}
	var err error
	if cmd.Session, err = parseSession(w.Session); err != nil {
		return err
	}
	switch {
	case w.Input != nil:
		if cmd.Input, err = newInput(s, *w.Input, w.ID, w.Steer); err != nil {
			return err
		}
	case w.ID != "" || w.Steer:
		return flags.Usage("--id and --steer are of an input: give --input too")
	}
	if w.NotBefore != "" {
		if cmd.NotBefore, err = time.Parse(time.RFC3339, w.NotBefore); err != nil {
			return flags.Usage("--not-before %q is no time such as %s", w.NotBefore, time.Now().Add(time.Hour).UTC().Format(time.RFC3339))
		}
	}
	conn, err := w.connect(ctx, s)
	if err != nil {
		return err
	}
	defer conn.Close()
	if w.Wait {
		return w.wait(ctx, s, conn, cmd)
	}
	return w.send(ctx, s, conn, cmd)
}

type admitCmd struct {
	Session string `arg:"" help:"Its id."`
	Input   string `help:"Input as JSON; - reads it from standard input." placeholder:"JSON" required:""`
	ID      string `name:"id" help:"Idempotency key of the input; a new one is made and printed where there is none." placeholder:"ID"`
	Steer   bool   `help:"Once a wake covers it, the input joins what runs at its next step."`
	natsFlags
}

func (a *admitCmd) run(ctx context.Context, s streams) error {
	session, err := parseSession(a.Session)
	if err != nil {
		return err
	}
	input, err := newInput(s, a.Input, a.ID, a.Steer)
	if err != nil {
		return err
	}
	conn, err := a.connect(ctx, s)
	if err != nil {
		return err
	}
	defer conn.Close()
	return a.send(ctx, s, conn, claims.Command{Kind: claims.Admit, Session: session, Input: input})
}

type interruptCmd struct {
	Session        string `arg:"" help:"Its id."`
	Reason         string `help:"Why; it is in the events." placeholder:"TEXT"`
	DiscardPending bool   `help:"Cancel all pending inputs and continuations too."`
	// No variable: the commands of steps have RV_EXECUTION in their environment, and it is their own.
	Execution string `help:"Only this execution, or one that goes on for it." placeholder:"UUID" env:"-"`
	Wait      bool   `help:"Wait until what runs is over; exit 4 interrupted, 0 completed first or nothing runs, 3 failed first, 5 quarantined."`
	natsFlags
}

func (i *interruptCmd) run(ctx context.Context, s streams) error {
	session, err := parseSession(i.Session)
	if err != nil {
		return err
	}
	conn, err := i.connect(ctx, s)
	if err != nil {
		return err
	}
	defer conn.Close()
	cmd := claims.Command{
		Kind: claims.Interrupt, Session: session, Reason: i.Reason, Discard: i.DiscardPending, Execution: claims.ExecutionID(i.Execution),
	}
	if i.Wait {
		return i.wait(ctx, s, conn, cmd)
	}
	return i.send(ctx, s, conn, cmd)
}

// send publishes a command and tells where it is. Only the id of an input goes
// to standard output, for scripts.
func (n *natsFlags) send(ctx context.Context, s streams, conn *bus.Conn, cmd claims.Command) error {
	receipt, err := n.publish(ctx, conn, cmd, uuid.NewString())
	if err != nil {
		return err
	}
	s.say("%s of session %s is published (command %d)", cmd.Kind, cmd.Session, receipt.Sequence)
	if cmd.Input != nil {
		fmt.Fprintln(s.out, cmd.Input.ID)
	}
	return nil
}

// publish publishes a command under a message id, within the timeout.
func (n *natsFlags) publish(ctx context.Context, conn *bus.Conn, cmd claims.Command, msgID string) (bus.Receipt, error) {
	bounded, cancel := context.WithTimeout(ctx, n.Timeout)
	defer cancel()
	receipt, err := bus.NewPublisher(conn).Publish(bounded, cmd, bus.Publishing{MsgID: msgID})
	var rejection *bus.Rejection
	switch {
	case err == nil:
		return receipt, nil
	case errors.As(err, &rejection):
		return receipt, flags.Usage("no worker would take this %s: %s (%s)", cmd.Kind, rejection.Detail, rejection.Reason)
	case ctx.Err() != nil:
		return receipt, stopped()
	default:
		return receipt, err
	}
}

func parseSession(s string) (claims.SessionID, error) {
	id, err := claims.ParseSession(s)
	if err != nil {
		return "", flags.Usage("%v", err)
	}
	return id, nil
}

// newInput makes an input of what --input, --id and --steer say.
func newInput(s streams, input, id string, steer bool) (*claims.Input, error) {
	raw := []byte(input)
	if input == "-" {
		var err error
		if raw, err = io.ReadAll(io.LimitReader(s.in, bus.DefaultMaxInputBytes+1)); err != nil {
			return nil, fmt.Errorf("reading the input from standard input: %w", err)
		}
		if len(raw) > bus.DefaultMaxInputBytes {
			return nil, flags.Usage("the input on standard input is longer than the %d bytes that a command may have", bus.DefaultMaxInputBytes)
		}
	}
	if err := checkJSON(raw); err != nil {
		return nil, flags.Usage("--input is not JSON: %v", err)
	}
	in := &claims.Input{ID: id, Delivery: claims.Queue, Body: bytes.TrimSpace(raw)}
	if id == "" {
		in.ID = "in_" + uuid.NewString()
	}
	if steer {
		in.Delivery = claims.Steer
	}
	return in, nil
}

// checkJSON says what is wrong with JSON that somebody typed, and where.
func checkJSON(raw []byte) error {
	if len(bytes.TrimSpace(raw)) == 0 {
		return errors.New("it is empty")
	}
	var v json.RawMessage
	err := json.Unmarshal(raw, &v)
	var syntax *json.SyntaxError
	if !errors.As(err, &syntax) {
		return err
	}
	at := raw[:min(max(0, int(syntax.Offset)-1), len(raw))] // Offset counts the byte it stumbled over
	if syntax.Offset >= int64(len(raw)) && !json.Valid(raw) && syntax.Error() == "unexpected end of JSON input" {
		at = raw
	}
	line := bytes.Count(at, []byte("\n")) + 1
	column := utf8.RuneCount(at[bytes.LastIndexByte(at, '\n')+1:]) + 1
	hint := ""
	if len(at) == 0 {
		hint = `; a text needs quotes of its own: --input '"hello"'`
	}
	return fmt.Errorf("%w at line %d, column %d%s", err, line, column, hint)
}

package crdb

import (
	"context"
	"encoding/json"
	"fmt"
	"slices"
	"strings"

	"github.com/jackc/pgx/v5"

	"reveille/claims"
	"reveille/sql"
)

// Unrelayed reads the events after the session's relay mark, oldest first, at
// most limit appends, and the mark.
func (s *Store) Unrelayed(ctx context.Context, session claims.SessionID, limit int) (relayed int64, records []claims.Record, err error) {
	type row struct {
		relayed int64
		lines   *string
	}
	rows, err := query(ctx, s, "unrelayed", sql.Unrelayed, func(r pgx.CollectableRow) (row, error) {
		var v row
		err := r.Scan(&v.relayed, &v.lines)
		return v, err
	}, string(session), int64(limit))
	if err != nil {
		return 0, nil, fmt.Errorf("session %s: %w", session, err)
	}
	for _, r := range rows {
		relayed = r.relayed
		if r.lines == nil {
			continue
		}
		if records, err = appendRecords(records, *r.lines, relayed); err != nil {
			return 0, nil, fmt.Errorf("session %s: %w", session, err)
		}
	}
	return relayed, records, nil
}

// appendRecords adds the events of one append that come after a number, which
// may stand inside it.
func appendRecords(records []claims.Record, lines string, after int64) ([]claims.Record, error) {
	for line := range strings.SplitSeq(lines, "\n") {
		rec, err := claims.ParseRecord([]byte(line))
		if err != nil {
			return nil, err
		}
		if rec.Seq > after {
			records = append(records, rec)
		}
	}
	return records, nil
}

// Replay reads the events after a number, relayed or not, oldest first, at most
// limit appends: for a stream that lost what it had (I25). What is past its
// retention is not among them, so the first may be a later one than after + 1.
func (s *Store) Replay(ctx context.Context, session claims.SessionID, after int64, limit int) (records []claims.Record, err error) {
	rows, err := query(ctx, s, "replay", sql.Replay, pgx.RowTo[string], string(session), after, int64(limit))
	if err != nil {
		return nil, fmt.Errorf("session %s: %w", session, err)
	}
	for _, lines := range rows {
		if records, err = appendRecords(records, lines, after); err != nil {
			return nil, fmt.Errorf("session %s: %w", session, err)
		}
	}
	return records, nil
}

// NoteRelayed raises the relay marks of many sessions, in one transaction. A
// mark never goes back.
func (s *Store) NoteRelayed(ctx context.Context, marks []claims.Mark) error {
	// In one order everywhere, so that two of these never wait for each other.
	marks = slices.Clone(marks)
	slices.SortFunc(marks, func(a, b claims.Mark) int { return strings.Compare(string(a.Session), string(b.Session)) })
	ids, seqs := make([]string, len(marks)), make([]int64, len(marks))
	for i, m := range marks {
		ids[i], seqs[i] = string(m.Session), m.Seq
	}
	_, err := s.exec(ctx, "note_relayed", pgx.ReadCommitted, sql.NoteRelayed, ids, seqs, s.opts.RelayGrace.Microseconds())
	return err
}

// Relayed reads a page of the sessions by id, after one of them (empty is the
// beginning), and how far their events are on the stream, as the mark says: for
// who compares the two. It is 0 where the database keeps none.
func (s *Store) Relayed(ctx context.Context, after claims.SessionID, limit int) ([]claims.Mark, error) {
	return query(ctx, s, "relayed", sql.RelayedSessions, pgx.RowToStructByPos[claims.Mark], string(after), int64(limit))
}

// CountRelayed counts the sessions that Relayed goes through.
func (s *Store) CountRelayed(ctx context.Context) (n int64, err error) {
	err = s.look(ctx, "count_relayed", func(ctx context.Context, tx pgx.Tx) error {
		return tx.QueryRow(ctx, sql.InspectRelayed).Scan(&n)
	})
	return n, err
}

// historyPage bounds one read of a session's log.
const historyPage = 64

// History reads the last n closed steps of a session, oldest first, at most
// maxBytes of their JSON; n of 0 reads nothing. It looks at the log from its
// end, so that its cost grows with n and not with the session.
func (s *Store) History(ctx context.Context, session claims.SessionID, n, maxBytes int) ([]claims.ClosedStep, error) {
	h := newHistory(n, maxBytes)
	before := int64(1) << 62
	for n > 0 && !h.full() {
		type row struct {
			seq   int64
			lines string
		}
		rows, err := query(ctx, s, "history", sql.History, func(r pgx.CollectableRow) (row, error) {
			var v row
			err := r.Scan(&v.seq, &v.lines)
			return v, err
		}, string(session), before, int64(historyPage))
		if err != nil {
			return nil, fmt.Errorf("session %s: %w", session, err)
		}
		for _, r := range rows {
			before = r.seq
			if err := h.add(r.lines); err != nil { // reading it again would not help
				return nil, fmt.Errorf("session %s: log does not decode: %w: %w", session, claims.ErrIllegal, err)
			}
		}
		if len(rows) < historyPage {
			break
		}
	}
	steps := h.steps()
	if err := s.fillInputs(ctx, session, steps); err != nil {
		return nil, err
	}
	return newest(steps, maxBytes), nil
}

// newest drops the oldest steps until the rest fits.
func newest(steps []claims.ClosedStep, maxBytes int) []claims.ClosedStep {
	total := 0
	for i := len(steps) - 1; i >= 0; i-- {
		total += sizeOf(steps[i])
		if total > maxBytes {
			return steps[i+1:]
		}
	}
	return steps
}

// sizeOf is about the size of a step's JSON.
func sizeOf(st claims.ClosedStep) int {
	n := 128 + len(st.Text) + len(st.Result)
	for _, in := range st.Inputs {
		n += 64 + len(in.ID) + len(in.Body)
	}
	return n
}

// fillInputs gives the steps of a history their inputs' bodies. One past its
// retention keeps its id and has a null body.
func (s *Store) fillInputs(ctx context.Context, session claims.SessionID, steps []claims.ClosedStep) error {
	var ids []string
	for _, st := range steps {
		ids = append(ids, inputIDs(st.Inputs)...)
	}
	if len(ids) == 0 {
		return nil
	}
	found, err := query(ctx, s, "history", sql.GetInputs, func(r pgx.CollectableRow) (claims.Input, error) {
		var in claims.Input
		var body string
		err := r.Scan(&in.ID, &in.Delivery, &body)
		in.Body = json.RawMessage(body)
		return in, err
	}, string(session), ids)
	if err != nil {
		return fmt.Errorf("session %s: %w", session, err)
	}
	byID := make(map[string]claims.Input, len(found))
	for _, in := range found {
		byID[in.ID] = in
	}
	for _, st := range steps {
		for i, in := range st.Inputs {
			if f, ok := byID[in.ID]; ok {
				st.Inputs[i] = f
			} else {
				st.Inputs[i] = claims.Input{ID: in.ID, Delivery: claims.Queue, Body: json.RawMessage("null")}
			}
		}
	}
	return nil
}

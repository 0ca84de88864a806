package crdb

import (
	"context"
	"encoding/json"
	"slices"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"

	"reveille/claims"
	"reveille/sql"
)

// retainedLater is when a session is looked at again whose oldest row is past
// its retention and must stay.
const retainedLater = 10 * time.Minute

// DueRetentions reads at most limit sessions that may keep something older than
// olderThan, those first that were looked at longest ago.
func (s *Store) DueRetentions(ctx context.Context, olderThan time.Duration, limit int) ([]claims.SessionID, error) {
	return query(ctx, s, "due_retentions", sql.DueRetentions, pgx.RowTo[claims.SessionID], allShards, olderThan.Microseconds(), int64(limit))
}

// TouchRetentions sends sessions to the back of the retention lane, for a time,
// and returns those that no other scanner has touched meanwhile.
func (s *Store) TouchRetentions(ctx context.Context, ids []claims.SessionID, olderThan, again time.Duration) ([]claims.SessionID, error) {
	return touch(ctx, s, "touch_retentions", sql.TouchRetentions, ids, itself, pgx.RowTo[claims.SessionID],
		texts(ids), olderThan.Microseconds(), again.Microseconds())
}

// DeleteExpired deletes, oldest first, at most limit appends of one session that
// are older than olderThan, with the inputs whose service or cancellation they
// tell. It never deletes an event that is not relayed, what tells of an open
// step or of an input that a continuation gives again, a pending input, or
// anything of a quarantined session. more: it stopped at limit. It moves the
// session's mark to when there will be something to do. Error: claims.ErrFenced:
// no such session.
func (s *Store) DeleteExpired(ctx context.Context, session claims.SessionID, olderThan time.Duration, limit int) (deleted int, more bool, err error) {
	err = s.session(ctx, "retention", session, &claims.Token{}, false, func(ctx context.Context, t *txn) (err error) {
		deleted, more, err = t.deleteExpired(ctx, t.now.Add(-olderThan), limit)
		return err
	})
	return deleted, more, err
}

// kept is what an append holds, for the decision of whether it goes.
type kept struct {
	last   int64
	at     time.Time
	inputs []string // that it tells the end of
}

func (t *txn) deleteExpired(ctx context.Context, before time.Time, limit int) (deleted int, more bool, err error) {
	rows, err := t.oldestEvents(ctx, limit+1)
	if err != nil {
		return 0, false, err
	}
	last, needed, err := t.needed(ctx)
	if err != nil {
		return 0, false, err
	}
	var inputs []string
	gone := 0
	for gone < min(limit, len(rows)) {
		r := rows[gone]
		if !r.at.Before(before) || r.last > last || slices.ContainsFunc(r.inputs, func(id string) bool { return slices.Contains(needed, id) }) {
			break
		}
		inputs = append(inputs, r.inputs...)
		gone++
	}
	switch {
	case gone == len(rows): // nothing is kept
		t.s.keptSince = nil
	case rows[gone].at.Before(before) && gone < limit: // past its retention, and needed
		later := before.Add(retainedLater)
		t.s.keptSince = &later
	default:
		t.s.keptSince = &rows[gone].at
	}
	if gone == 0 {
		return 0, false, nil
	}
	if _, err := t.tx.Exec(ctx, sql.DeleteEvents, string(t.id), rows[gone-1].last); err != nil {
		return 0, false, err
	}
	if len(inputs) > 0 {
		tag, err := t.tx.Exec(ctx, sql.DeleteInputs, string(t.id), inputs)
		if err != nil {
			return 0, false, err
		}
		deleted = int(tag.RowsAffected())
	}
	return gone + deleted, gone == limit && gone < len(rows), nil
}

func (t *txn) oldestEvents(ctx context.Context, limit int) ([]kept, error) {
	rows, err := t.tx.Query(ctx, sql.OldestEvents, string(t.id), int64(limit))
	if err != nil {
		return nil, err
	}
	return pgx.CollectRows(rows, func(row pgx.CollectableRow) (kept, error) {
		var k kept
		var lines string
		if err := row.Scan(&k.last, &k.at, &lines); err != nil || lines == "" {
			return k, err
		}
		for line := range strings.SplitSeq(lines, "\n") {
			r, err := claims.ParseRecord([]byte(line))
			if err != nil {
				return k, err
			}
			if r.Type != claims.InputPromoted && r.Type != claims.InputCancelled {
				continue
			}
			var d claims.InputData
			if err := json.Unmarshal(r.Data, &d); err != nil {
				return k, err
			}
			k.inputs = append(k.inputs, d.Input)
		}
		return k, nil
	})
}

// needed is up to which event the log may be deleted, and which inputs are to
// be given again.
func (t *txn) needed(ctx context.Context) (last int64, inputs []string, err error) {
	last = t.s.relayedSeq
	if t.s.quarantine != nil {
		return 0, nil, nil // an operator decides by it, and a release restores it
	}
	if t.c != nil && t.c.stepID != nil {
		open, bad := claims.DecodeStep(t.stands(), []byte(*t.c.step))
		if bad != nil {
			return 0, nil, nil // it will be quarantined
		}
		last, inputs = min(last, open.Seq-1), open.Inputs
	}
	if t.s.continuations == 0 {
		return last, inputs, nil
	}
	rows, err := t.tx.Query(ctx, sql.SessionContinuations, string(t.id))
	if err != nil {
		return 0, nil, err
	}
	var number int64
	var body string
	_, err = pgx.ForEachRow(rows, []any{&number, &body}, func() error {
		c, bad := claims.DecodeContinuation(t.id, number, t.s.epoch, []byte(body))
		if bad != nil {
			last = 0
			return nil
		}
		inputs = append(inputs, c.Inputs...)
		return nil
	})
	return last, inputs, err
}

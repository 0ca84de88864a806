package crdb_test

import (
	"context"
	"fmt"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"reveille/claims"
	"reveille/sql"
)

// row is a claim in one state, as the tables hold it.
type row struct {
	claims.State
	session, execution, step, holder, taker string
}

// insert writes the row with its session and leases.
func (w row) insert(ctx context.Context, tx pgx.Tx) error {
	expires := "INTERVAL '1 hour'"
	if !w.LeaseLive {
		expires = "INTERVAL '-1 hour'"
	}
	var step, body *string
	if w.StepOpen {
		step, body = &w.step, new("{}")
	}
	b := &pgx.Batch{}
	b.Queue(`INSERT INTO leases (holder, kind, name, version, slots, started_at, expires_at)
		VALUES ($1, 'worker', 'w', 'v', 1, statement_timestamp(), statement_timestamp() + `+expires+`),
		       ($2, 'scanner', 's', 'v', 1, statement_timestamp(), statement_timestamp() + INTERVAL '1 hour')`, w.holder, w.taker)
	b.Queue(`INSERT INTO sessions (session_id, shard, epoch, execution_id, last_seq, relayed_seq, command_seq, command_time, position, unarmed, armed,
			delayed, wakes, wakes_served, promised, continuations, takeovers, created_at, updated_at)
		VALUES ($1, 0, 1, $2, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, statement_timestamp(), statement_timestamp())`, w.session, w.execution)
	b.Queue(`INSERT INTO claims (session_id, execution_id, ran_as, holder, scanner, epoch, phase, reason, revoked, verdict, steps, step_id, step,
			acquired_at, phase_at, due_at)
		VALUES ($1, $2, $2, $3, $4, 1, $5, '', $6, '', 1, $7, $8, statement_timestamp(), statement_timestamp(), statement_timestamp())`,
		w.session, w.execution, w.holder, w.Scanner, string(w.Phase), string(w.Revoked), step, body)
	return tx.SendBatch(ctx, b).Close()
}

// claimStatement is a statement that changes a claim: whom it concerns, and when it may.
type claimStatement struct {
	name string
	text string
	args func(w row) []any
	// may: what claims.Next says of the state.
	may func(s claims.State) bool
}

func oneOf(e claims.Effect, of ...claims.Effect) bool {
	for _, x := range of {
		if e == x {
			return true
		}
	}
	return false
}

func claimStatements() []claimStatement {
	list := func(s string) []string { return []string{s} }
	out := []claimStatement{
		{
			"insert_claims", sql.InsertClaims, func(w row) []any {
				return []any{list(w.session), list(newID()), list(w.taker), []int64{2}, list(newID()), list("{}"), []time.Time{time.Now()}}
			},
			func(s claims.State) bool { return claims.Next(s, claims.OpAcquire) == claims.Allow },
		},
		{
			"claim_start_step", sql.ClaimStartStep, func(w row) []any { return []any{w.session, w.execution, newID(), "{}"} },
			func(s claims.State) bool { return claims.Next(s, claims.OpStart) == claims.Allow && !s.StepOpen },
		},
		{
			"claim_close_step", sql.ClaimCloseStep, func(w row) []any { return []any{w.session, w.execution, w.step} },
			func(s claims.State) bool { return claims.Next(s, claims.OpClose) == claims.Allow && s.StepOpen },
		},
		{
			"claim_decline", sql.ClaimDecline, func(w row) []any { return []any{w.session, w.execution, w.step, "no"} },
			func(s claims.State) bool { return claims.Next(s, claims.OpDecline) == claims.ToCancelled && s.StepOpen },
		},
		{
			"claim_cancel", sql.ClaimCancel, func(w row) []any { return []any{w.session, w.execution, "stop"} },
			func(s claims.State) bool { return claims.Next(s, claims.OpInterrupt) == claims.ToCancelling },
		},
		{
			"claim_verdict", sql.ClaimVerdict, func(w row) []any { return []any{w.session, w.execution, "interrupted", "stop"} },
			func(s claims.State) bool { return claims.Next(s, claims.OpInterrupt) == claims.RaiseVerdict },
		},
		{
			"claim_take_over", sql.ClaimTakeOver, func(w row) []any { return []any{w.session, w.execution, newID(), w.taker, int64(2), ""} },
			func(s claims.State) bool { return claims.Next(s, claims.OpScan) == claims.TakeOver },
		},
		{
			"remove_claims", sql.RemoveClaims, func(w row) []any { return []any{list(w.session), list(w.execution), list(string(w.Phase))} },
			func(s claims.State) bool {
				return oneOf(claims.Next(s, claims.OpHandOver), claims.Remove, claims.CloseAndRemove, claims.Continue)
			},
		},
		{
			"remove_expired_claim", sql.RemoveExpiredClaim, func(w row) []any { return []any{w.session, w.execution, string(w.Phase)} },
			func(s claims.State) bool {
				return oneOf(claims.Next(s, claims.OpScan), claims.Remove, claims.ToQuarantine)
			},
		},
		{
			// The end of a conversion, by the scanner that took the claim over: its own, live, running.
			"remove_recovery_claim", sql.RemoveRecoveryClaim, func(w row) []any { return []any{w.session, w.execution} },
			func(s claims.State) bool { return s.Scanner && s.Phase == claims.Running && s.Live() },
		},
	}
	for _, cause := range []claims.Cause{claims.Unknown, claims.Interrupted, claims.NeverJoined} {
		out = append(out, claimStatement{
			"claim_revoke as " + string(cause), sql.ClaimRevoke,
			func(w row) []any { return []any{w.session, w.execution, string(w.Revoked.Raise(cause)), ""} },
			func(s claims.State) bool {
				return claims.Next(s, claims.OpRevoke) == claims.MarkRevoked && s.Revoked.Raise(cause) != s.Revoked
			},
		})
	}
	return out
}

// TestStatementsHoldTheTransitions puts a claim in every state there can be and runs each statement that changes a
// claim: by its own conditions it does so exactly where claims.Next allows it. So a statement never relies on what its
// transaction read before.
func TestStatementsHoldTheTransitions(t *testing.T) {
	r := newRig(t)
	ctx := t.Context()
	for bits := range 8 {
		for _, phase := range []claims.Phase{claims.Running, claims.Cancelling, claims.Cancelled} {
			for _, revoked := range []claims.Cause{claims.None, claims.Unknown, claims.Interrupted, claims.NeverJoined} {
				s := claims.State{Phase: phase, Revoked: revoked, LeaseLive: bits&1 != 0, StepOpen: bits&2 != 0, Scanner: bits&4 != 0, Own: true}
				if phase == claims.Cancelling && !s.StepOpen {
					continue // the table refuses it
				}
				w := row{s, "s", newID(), newID(), newID(), newID()}
				tx, err := r.db.BeginTx(ctx, pgx.TxOptions{IsoLevel: pgx.Serializable})
				r.ok(err)
				r.ok(w.insert(ctx, tx))
				for _, st := range claimStatements() {
					for _, own := range []bool{true, false} {
						asked := w
						if asked.Own = own; !own {
							asked.execution = newID()
						}
						// An acquisition and a takeover make a new id; the others of nobody's id concern nothing.
						want := st.may(asked.State) && own
						sp, err := tx.Begin(ctx)
						r.ok(err)
						tag, err := sp.Exec(ctx, st.text, st.args(asked)...)
						if err != nil {
							t.Fatalf("%s: %v", st.name, err)
						}
						if got := tag.RowsAffected() == 1; got != want {
							t.Errorf("%s of %+v changes %v, want %v", st.name, asked.State, got, want)
						}
						r.ok(sp.Rollback(ctx))
					}
				}
				r.ok(tx.Rollback(ctx))
			}
		}
	}
}

// TestI2InsertStatement is insert_claims where there is no claim. That the session is ready it leaves to its transaction,
// which has read it under its lock.
func TestI2InsertStatement(t *testing.T) {
	r := newRig(t)
	for _, c := range []struct {
		name   string
		holder claims.HolderID
		want   int64
	}{
		{"live lease", r.holder, 1},
		{"expired lease", r.lease("worker", -time.Hour), 0},
		{"no lease", claims.HolderID(newID()), 0},
	} {
		n := r.exec(sql.InsertClaims, []string{c.name}, []string{newID()}, []string{string(c.holder)}, []int64{1}, []string{newID()}, []string{"{}"}, []time.Time{time.Now()})
		if n != c.want {
			t.Errorf("%s: %d rows, want %d", c.name, n, c.want)
		}
	}
}

// TestTakerNeedsALiveLease is claim_take_over's condition on its taker.
func TestTakerNeedsALiveLease(t *testing.T) {
	r := newRig(t)
	running(r)
	r.expire(r.holder)
	for i, c := range []struct {
		taker claims.HolderID
		want  int64
	}{{r.lease("scanner", -time.Hour), 0}, {claims.HolderID(newID()), 0}, {r.holder, 0}, {r.scanner, 1}} {
		if n := r.exec(sql.ClaimTakeOver, string(r.session), string(r.claim.Execution), newID(), string(c.taker), int64(2), ""); n != c.want {
			t.Errorf("case %d: %s rows, want %d", i, fmt.Sprint(n), c.want)
		}
	}
}

package recovery

import (
	"context"
	"time"

	"reveille/claims"
)

// The interfaces of what the scanner calls. All methods are safe for
// concurrent use, bounded by their context, and durable when they answer nil.
// A row that is not what it was when it was read answers claims.ErrFenced or
// claims.ErrQuarantined, and nothing of it was changed; every other error says
// nothing about the row, which may be tried again.
type (
	// ClaimStore finds expired claims and ends those that are not running.
	ClaimStore interface {
		// ExpiredClaims reads at most limit claims of dead holders, or revoked,
		// those first that were touched longest ago.
		ExpiredClaims(ctx context.Context, limit int) ([]claims.Candidate, error)
		// TouchClaims sends claims to the back of their lane, in a transaction of its
		// own, and returns those that no other scanner has touched meanwhile (I31).
		TouchClaims(ctx context.Context, cs []claims.Candidate) ([]claims.Candidate, error)
		// EndExpired ends an expired claim that is cancelling or cancelled, fenced
		// by its expiry in the same transaction (I26, I28). Repeatable with its token.
		EndExpired(ctx context.Context, c claims.Candidate, uncertainInterrupted bool, token *claims.Token) (claims.Settlement, error)
	}

	// Converter takes expired running claims over and ends them.
	Converter interface {
		// TakeOver makes an expired running claim the holder's, under a new
		// execution id (I6). Repeated with the same id it answers the same, with
		// the verdict of now.
		TakeOver(ctx context.Context, c claims.Candidate, holder claims.HolderID, as claims.ExecutionID) (claims.Claim, error)
		// Convert validates and ends a claim that was taken over, in one
		// transaction under the recovery fence; poison it quarantines (I27).
		Convert(ctx context.Context, claim claims.Claim, limits claims.Limits, token *claims.Token) (claims.Settlement, error)
		// ConversionFailed quarantines a claim that the database refuses to
		// convert, under the recovery fence (I28), where its verdict is still that
		// of claim.
		ConversionFailed(ctx context.Context, claim claims.Claim, detail string, token *claims.Token) (claims.Settlement, error)
		// RefusedCode answers the SQLSTATE with which the database refused the
		// values of a transaction (class 22 or 23), false for every other error.
		RefusedCode(err error) (code string, refused bool)
	}

	// HeldStore tells what the scanner's own lease holds (I3).
	HeldStore interface {
		Held(ctx context.Context, holder claims.HolderID) ([]claims.Notice, error)
		Revoke(ctx context.Context, claim claims.Claim, cause claims.Cause) error
	}

	// ContinuationStore is the recovery lane's.
	ContinuationStore interface {
		DueContinuations(ctx context.Context, limit int) ([]claims.DueContinuation, error)
		// TouchContinuations sends them to the back of their lane, for at least again.
		TouchContinuations(ctx context.Context, ds []claims.DueContinuation, again time.Duration) ([]claims.DueContinuation, error)
		// QuarantineContinuation quarantines the session of a poison continuation
		// where it has no claim and no quarantine, and the continuation is
		// unstarted and unchanged (I28).
		QuarantineContinuation(ctx context.Context, d claims.DueContinuation, token *claims.Token) error
	}

	// SessionStore is the ordinary lane's.
	SessionStore interface {
		DueSessions(ctx context.Context, limit int) ([]claims.DueSession, error)
		TouchSessions(ctx context.Context, ids []claims.SessionID, again time.Duration) ([]claims.SessionID, error)
		// NextDue answers in how long, by the database's clock, the next row of this
		// lane or of the recovery lane is due that waits for its time, 0 where one is
		// due and not touched, and false where none is within a while. It may miss
		// one: it only shortens a pause.
		NextDue(ctx context.Context, within time.Duration) (in time.Duration, ok bool, err error)
	}

	// RelayStore is the relay lane's.
	RelayStore interface {
		DueRelays(ctx context.Context, limit int) ([]claims.DueSession, error)
		TouchRelays(ctx context.Context, ids []claims.SessionID, again time.Duration) ([]claims.SessionID, error)
		// Relayed reads at most limit sessions by id, after one of them (empty is the
		// beginning), and how far the stream must have their events, 0 where the
		// database keeps nothing to publish again. It touches none.
		Relayed(ctx context.Context, after claims.SessionID, limit int) ([]claims.Mark, error)
	}

	// RetentionStore is the retention lane's.
	RetentionStore interface {
		// DueRetentions reads at most limit sessions that may keep something older
		// than olderThan, those first that were looked at longest ago.
		DueRetentions(ctx context.Context, olderThan time.Duration, limit int) ([]claims.SessionID, error)
		// TouchRetentions sends them to the back of their lane, for at least again.
		TouchRetentions(ctx context.Context, ids []claims.SessionID, olderThan, again time.Duration) ([]claims.SessionID, error)
		// DeleteExpired deletes at most limit rows of a session that are older than
		// olderThan, oldest first: relayed events and with them closed steps, served
		// inputs. It never deletes a session row, a pending input, or what an open
		// step, a continuation or a quarantine needs. more: there may be more of it.
		DeleteExpired(ctx context.Context, session claims.SessionID, olderThan time.Duration, limit int) (deleted int, more bool, err error)
	}

	// Pinger tells a database that is lost from a row that can't be worked on.
	Pinger interface {
		Ping(ctx context.Context) error
	}

	// Announcer publishes that a session is ready. It is a hint: repeating it
	// does no harm, losing it costs a while.
	Announcer interface {
		Announce(ctx context.Context, session claims.SessionID) error
	}

	// Relayer publishes a session's committed events in order, once (I25).
	Relayer interface {
		// RelayNow publishes all there is of one session; it returns when ctx ends.
		RelayNow(ctx context.Context, session claims.SessionID) error
		// Poke says that a session has new events. It neither waits nor fails.
		Poke(session claims.SessionID)
	}

	// Mender finds and repairs what the stream lost (I25).
	Mender interface {
		// Verify compares marks, at most 500, with what the stream ends with, by one
		// request, and returns the sessions of which it has less. It may name one
		// that is sound.
		Verify(ctx context.Context, marks []claims.Mark) (short []claims.SessionID, err error)
		// Repair publishes again what the stream lost of a session and should still
		// have by its age (all: whatever the database has), in order, each once,
		// beside whoever relays it. It goes on where the stream ends, and says how
		// many events it published, with an error too.
		Repair(ctx context.Context, session claims.SessionID, all bool) (published int64, err error)
	}
)

// Package sql holds the migrations and the statements of Reveille as files, so
// that they can be read, explained and checked as SQL. Only claims/crdb
// executes them. They run unchanged on CockroachDB v23.1 and PostgreSQL 15.
package sql

import "embed"

// Migrations are goose's, one idempotent DDL statement a file.
//
//go:embed migrations/*.sql
var Migrations embed.FS

// Statements is the folder of the statements, for the tests that hold all of
// them against what either engine refuses.
//
//go:embed statements/*.sql
var Statements embed.FS

// The statements, one a file; each says in its head what it is for.
var (
	//go:embed statements/arm_input.sql
	ArmInput string
	//go:embed statements/arm_inputs.sql
	ArmInputs string
	//go:embed statements/cancel_inputs.sql
	CancelInputs string
	//go:embed statements/cancel_pending.sql
	CancelPending string
	//go:embed statements/claim_cancel.sql
	ClaimCancel string
	//go:embed statements/claim_close_step.sql
	ClaimCloseStep string
	//go:embed statements/claim_decline.sql
	ClaimDecline string
	//go:embed statements/claim_revoke.sql
	ClaimRevoke string
	//go:embed statements/claim_start_step.sql
	ClaimStartStep string
	//go:embed statements/claim_take_over.sql
	ClaimTakeOver string
	//go:embed statements/claim_verdict.sql
	ClaimVerdict string
	//go:embed statements/close_lease.sql
	CloseLease string
	//go:embed statements/cover_inputs.sql
	CoverInputs string
	//go:embed statements/delete_continuation.sql
	DeleteContinuation string
	//go:embed statements/delete_dead_leases.sql
	DeleteDeadLeases string
	//go:embed statements/due_continuation.sql
	DueContinuation string
	//go:embed statements/due_continuations.sql
	DueContinuations string
	//go:embed statements/due_inputs.sql
	DueInputs string
	//go:embed statements/due_relays.sql
	DueRelays string
	//go:embed statements/due_sessions.sql
	DueSessions string
	//go:embed statements/find_token.sql
	FindToken string
	//go:embed statements/get_continuation.sql
	GetContinuation string
	//go:embed statements/get_input.sql
	GetInput string
	//go:embed statements/get_inputs.sql
	GetInputs string
	//go:embed statements/heartbeat.sql
	Heartbeat string
	//go:embed statements/held.sql
	Held string
	//go:embed statements/history.sql
	History string
	//go:embed statements/holder_claims.sql
	HolderClaims string
	//go:embed statements/insert_claims.sql
	InsertClaims string
	//go:embed statements/insert_continuation.sql
	InsertContinuation string
	//go:embed statements/insert_events.sql
	InsertEvents string
	//go:embed statements/insert_inputs.sql
	InsertInputs string
	//go:embed statements/insert_quarantine.sql
	InsertQuarantine string
	//go:embed statements/insert_sessions.sql
	InsertSessions string
	//go:embed statements/insert_wake.sql
	InsertWake string
	//go:embed statements/inspect_claimed.sql
	InspectClaimed string
	//go:embed statements/inspect_continuations.sql
	InspectContinuations string
	//go:embed statements/inspect_inputs.sql
	InspectInputs string
	//go:embed statements/inspect_leases.sql
	InspectLeases string
	//go:embed statements/inspect_quarantined.sql
	InspectQuarantined string
	//go:embed statements/inspect_ready.sql
	InspectReady string
	//go:embed statements/inspect_session.sql
	InspectSession string
	//go:embed statements/inspect_sessions.sql
	InspectSessions string
	//go:embed statements/inspect_wakes.sql
	InspectWakes string
	//go:embed statements/lock_lease.sql
	LockLease string
	//go:embed statements/lock_session.sql
	LockSession string
	//go:embed statements/next_continuation_due.sql
	NextContinuationDue string
	//go:embed statements/next_holder.sql
	NextHolder string
	//go:embed statements/next_input_due.sql
	NextInputDue string
	//go:embed statements/next_wake_due.sql
	NextWakeDue string
	//go:embed statements/note_relayed.sql
	NoteRelayed string
	//go:embed statements/notices.sql
	Notices string
	//go:embed statements/now.sql
	Now string
	//go:embed statements/open_lease.sql
	OpenLease string
	//go:embed statements/own_lease.sql
	OwnLease string
	//go:embed statements/pending_inputs.sql
	PendingInputs string
	//go:embed statements/quarantine_inputs.sql
	QuarantineInputs string
	//go:embed statements/quarantined.sql
	Quarantined string
	//go:embed statements/remove_claims.sql
	RemoveClaims string
	//go:embed statements/remove_expired_claim.sql
	RemoveExpiredClaim string
	//go:embed statements/remove_recovery_claim.sql
	RemoveRecoveryClaim string
	//go:embed statements/revoked_claims.sql
	RevokedClaims string
	//go:embed statements/save_sessions.sql
	SaveSessions string
	//go:embed statements/schema_version.sql
	SchemaVersion string
	//go:embed statements/session_continuations.sql
	SessionContinuations string
	//go:embed statements/take_due_wakes.sql
	TakeDueWakes string
	//go:embed statements/touch_claims.sql
	TouchClaims string
	//go:embed statements/touch_continuations.sql
	TouchContinuations string
	//go:embed statements/touch_relays.sql
	TouchRelays string
	//go:embed statements/touch_sessions.sql
	TouchSessions string
	//go:embed statements/unrelayed.sql
	Unrelayed string
)

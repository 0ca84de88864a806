SELECT session_id, execution_id::TEXT, phase, revoked, phase_at FROM claims WHERE holder = $1::UUID

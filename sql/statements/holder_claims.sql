SELECT session_id, execution_id::TEXT, phase, revoked, due_at FROM claims WHERE holder = $1::UUID ORDER BY due_at LIMIT $2::INT8

SELECT session_id, execution_id::TEXT, phase, revoked, due_at FROM claims WHERE revoked <> '' ORDER BY due_at LIMIT $1::INT8

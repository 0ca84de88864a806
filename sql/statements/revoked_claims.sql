SELECT session_id, execution_id::TEXT, phase, revoked, due_at, 0::INT8 FROM claims WHERE revoked <> '' ORDER BY due_at LIMIT $1::INT8

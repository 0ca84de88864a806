UPDATE claims SET due_at = statement_timestamp()
FROM unnest($1::TEXT[], $2::TEXT[]) AS u (session_id, execution_id)
WHERE claims.session_id = u.session_id AND claims.execution_id = u.execution_id::UUID

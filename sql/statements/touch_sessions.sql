UPDATE sessions SET ready_due_at = statement_timestamp() + $2::INT8 * INTERVAL '1 microsecond'
FROM unnest($1::TEXT[]) AS u (session_id)
WHERE sessions.session_id = u.session_id AND sessions.ready_due_at IS NOT NULL

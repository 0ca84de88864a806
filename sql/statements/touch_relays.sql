-- What another scanner touched meanwhile is not touched, and not returned (I31).
UPDATE sessions SET relay_due_at = statement_timestamp() + $2::INT8 * INTERVAL '1 microsecond'
FROM unnest($1::TEXT[]) AS u (session_id)
WHERE sessions.session_id = ANY ($1::TEXT[]) AND sessions.session_id = u.session_id AND sessions.relay_due_at <= statement_timestamp()
RETURNING sessions.session_id

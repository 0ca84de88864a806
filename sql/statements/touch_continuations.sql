UPDATE continuations SET due_at = statement_timestamp() + $3::INT8 * INTERVAL '1 microsecond'
FROM unnest($1::TEXT[], $2::INT8[]) AS u (session_id, number)
WHERE continuations.session_id = u.session_id AND continuations.number = u.number

-- What another scanner touched meanwhile is not touched, and not returned (I31).
UPDATE continuations SET due_at = statement_timestamp() + $3::INT8 * INTERVAL '1 microsecond'
FROM unnest($1::TEXT[], $2::INT8[]) AS u (session_id, number)
WHERE continuations.session_id = ANY ($1::TEXT[]) AND continuations.session_id = u.session_id AND continuations.number = u.number
  AND continuations.due_at <= statement_timestamp()
RETURNING continuations.session_id, continuations.number

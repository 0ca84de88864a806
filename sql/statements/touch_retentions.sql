-- What another scanner touched meanwhile is not touched, and not returned (I31).
UPDATE sessions SET kept_since = statement_timestamp() - $2::INT8 * INTERVAL '1 microsecond' + $3::INT8 * INTERVAL '1 microsecond'
FROM unnest($1::TEXT[]) AS u (session_id)
WHERE sessions.session_id = ANY ($1::TEXT[]) AND sessions.session_id = u.session_id
  AND sessions.kept_since <= statement_timestamp() - $2::INT8 * INTERVAL '1 microsecond'
RETURNING sessions.session_id

-- What another scanner touched meanwhile is not touched, and not returned (I31).
UPDATE claims SET due_at = statement_timestamp()
FROM unnest($1::TEXT[], $2::TEXT[], $3::TIMESTAMPTZ[]) AS u (session_id, execution_id, due_at)
WHERE claims.session_id = ANY ($1::TEXT[]) AND claims.session_id = u.session_id AND claims.execution_id = u.execution_id::UUID AND claims.due_at = u.due_at
RETURNING claims.session_id

SELECT d.session_id
FROM unnest($1::INT8[]) AS k (shard)
CROSS JOIN LATERAL (
    SELECT session_id, ready_due_at FROM sessions
    WHERE sessions.shard = k.shard AND sessions.ready_due_at IS NOT NULL AND sessions.ready_due_at <= statement_timestamp()
    ORDER BY ready_due_at LIMIT $2::INT8) AS d
ORDER BY d.ready_due_at LIMIT $2::INT8

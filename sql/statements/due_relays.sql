SELECT d.session_id
FROM unnest($1::INT8[]) AS k (shard)
CROSS JOIN LATERAL (
    SELECT session_id, relay_due_at FROM sessions
    WHERE sessions.shard = k.shard AND sessions.relay_due_at IS NOT NULL AND sessions.relay_due_at <= statement_timestamp()
    ORDER BY relay_due_at LIMIT $2::INT8) AS d
ORDER BY d.relay_due_at LIMIT $2::INT8

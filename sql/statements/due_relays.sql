-- And since when the oldest event that is not relayed is there.
SELECT d.session_id, COALESCE((
    SELECT GREATEST(0, EXTRACT(EPOCH FROM (statement_timestamp() - e.created_at)) * 1000000)::INT8
    FROM events e WHERE e.session_id = d.session_id AND e.last_seq > d.relayed_seq ORDER BY e.last_seq LIMIT 1), 0)
FROM unnest($1::INT8[]) AS k (shard)
CROSS JOIN LATERAL (
    SELECT session_id, relay_due_at, relayed_seq FROM sessions
    WHERE sessions.shard = k.shard AND sessions.relay_due_at IS NOT NULL AND sessions.relay_due_at <= statement_timestamp()
    ORDER BY relay_due_at LIMIT $2::INT8) AS d
ORDER BY d.relay_due_at LIMIT $2::INT8

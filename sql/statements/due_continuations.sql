SELECT c.session_id, c.number, c.body, COALESCE(s.epoch, 0), s.execution_id IS NULL AND s.quarantine_id IS NULL
FROM unnest($1::INT8[]) AS k (shard)
CROSS JOIN LATERAL (
    SELECT session_id, number, body, due_at FROM continuations
    WHERE continuations.shard = k.shard AND continuations.due_at <= statement_timestamp()
    ORDER BY due_at LIMIT $2::INT8) AS c
LEFT JOIN sessions s ON s.session_id = c.session_id
ORDER BY c.due_at LIMIT $2::INT8

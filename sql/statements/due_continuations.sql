SELECT c.session_id, c.number, c.body, COALESCE(s.epoch, 0),
       s.session_id IS NULL OR s.execution_id IS NULL AND s.quarantine_id IS NULL,
       EXISTS (SELECT 1 FROM continuations n WHERE n.session_id = c.session_id AND n.number > c.number AND n.lineage = c.lineage),
       GREATEST(0, EXTRACT(EPOCH FROM (statement_timestamp() - c.not_before)) * 1000000)::INT8
FROM unnest($1::INT8[]) AS k (shard)
CROSS JOIN LATERAL (
    SELECT session_id, number, lineage, body, not_before, due_at FROM continuations
    WHERE continuations.shard = k.shard AND continuations.due_at <= statement_timestamp()
    ORDER BY due_at LIMIT $2::INT8) AS c
LEFT JOIN sessions s ON s.session_id = c.session_id
ORDER BY c.due_at LIMIT $2::INT8

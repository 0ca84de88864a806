-- ready: the session is due, nobody has it, and it is not for a continuation
-- alone, which has a lane of its own. The others are only still marked.
SELECT d.session_id, d.ready_at IS NOT NULL AND d.ready_at <= statement_timestamp() AND d.ordinary,
       COALESCE(GREATEST(0, EXTRACT(EPOCH FROM (statement_timestamp() - d.ready_at)) * 1000000)::INT8, 0)
FROM unnest($1::INT8[]) AS k (shard)
CROSS JOIN LATERAL (
    SELECT session_id, ready_at, ready_due_at, armed > 0 OR delayed > 0 OR wakes > wakes_served AS ordinary FROM sessions
    WHERE sessions.shard = k.shard AND sessions.ready_due_at IS NOT NULL AND sessions.ready_due_at <= statement_timestamp()
    ORDER BY ready_due_at LIMIT $2::INT8) AS d
ORDER BY d.ready_due_at LIMIT $2::INT8

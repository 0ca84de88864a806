-- When a scanner must next look at something that waits for its time: the
-- earliest of what is or becomes due within a while, in microseconds from now. Of the
-- marks of sessions it looks at the first few of each shard, since most are of
-- sessions that are due already and were started meanwhile.
SELECT min(GREATEST(0, EXTRACT(EPOCH FROM (d.at - statement_timestamp())) * 1000000))::INT8
FROM (
    SELECT m.ready_at AS at
    FROM unnest($1::INT8[]) AS k (shard)
    CROSS JOIN LATERAL (
        SELECT ready_at, ready_due_at FROM sessions
        WHERE sessions.shard = k.shard AND sessions.ready_due_at IS NOT NULL
          AND sessions.ready_due_at <= statement_timestamp() + $2::INT8 * INTERVAL '1 microsecond'
        ORDER BY ready_due_at LIMIT $3::INT8) AS m
    WHERE m.ready_at = m.ready_due_at
    UNION ALL
    SELECT c.not_before AS at
    FROM unnest($1::INT8[]) AS k (shard)
    CROSS JOIN LATERAL (
        SELECT not_before, due_at FROM continuations
        WHERE continuations.shard = k.shard AND continuations.due_at <= statement_timestamp() + $2::INT8 * INTERVAL '1 microsecond'
        ORDER BY due_at LIMIT $3::INT8) AS c
    WHERE c.not_before = c.due_at) AS d

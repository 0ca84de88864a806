-- For people: for how long the oldest of what others see to has been due, in
-- microseconds, 0 where there is none: claims since their holder's lease
-- expired, ready sessions, continuations that nobody started, events that are
-- not on the stream. Of each shard the rows are looked at that scanners would
-- take first; what waits for a later time is behind them, an hour and more.
SELECT
    COALESCE((
        SELECT max((EXTRACT(EPOCH FROM (statement_timestamp() - l.expires_at)) * 1000000)::INT8) FROM leases l
        WHERE l.expires_at <= statement_timestamp()
          AND EXISTS (SELECT 1 FROM claims c WHERE c.holder = l.holder AND c.revoked = '')), 0),
    COALESCE((
        SELECT max((EXTRACT(EPOCH FROM (statement_timestamp() - d.ready_at)) * 1000000)::INT8)
        FROM unnest($1::INT8[]) AS k (shard)
        CROSS JOIN LATERAL (
            SELECT ready_at FROM sessions
            WHERE sessions.shard = k.shard AND sessions.ready_at <= statement_timestamp()
              AND sessions.ready_due_at IS NOT NULL AND sessions.ready_due_at <= statement_timestamp() + INTERVAL '1 hour'
            ORDER BY ready_due_at LIMIT $2::INT8) AS d), 0),
    COALESCE((
        SELECT max((EXTRACT(EPOCH FROM (statement_timestamp() - d.not_before)) * 1000000)::INT8)
        FROM unnest($1::INT8[]) AS k (shard)
        CROSS JOIN LATERAL (
            SELECT session_id, not_before FROM continuations
            WHERE continuations.shard = k.shard AND continuations.not_before <= statement_timestamp()
              AND continuations.due_at <= statement_timestamp() + INTERVAL '1 hour'
            ORDER BY due_at LIMIT $2::INT8) AS d
        JOIN sessions s ON s.session_id = d.session_id
        WHERE s.execution_id IS NULL AND s.quarantine_id IS NULL), 0),
    COALESCE((
        SELECT max((EXTRACT(EPOCH FROM (statement_timestamp() - e.created_at)) * 1000000)::INT8)
        FROM unnest($1::INT8[]) AS k (shard)
        CROSS JOIN LATERAL (
            SELECT session_id, relayed_seq FROM sessions
            WHERE sessions.shard = k.shard AND sessions.relay_due_at IS NOT NULL
            ORDER BY relay_due_at LIMIT $2::INT8) AS d
        CROSS JOIN LATERAL (
            SELECT created_at FROM events
            WHERE events.session_id = d.session_id AND events.last_seq > d.relayed_seq
            ORDER BY last_seq LIMIT 1) AS e), 0)

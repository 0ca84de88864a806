-- For people: ready sessions, those first that are so for longest. The rows are
-- of inspect_sessions; a ready session has neither claim nor quarantine.
SELECT s.session_id, s.epoch, s.last_seq, s.relayed_seq, s.armed, s.unarmed, s.delayed, s.wakes - s.wakes_served, s.continuations,
       s.ready_at, s.created_at, s.updated_at, NULL::TEXT, NULL::TIMESTAMPTZ, NULL::TEXT, FALSE,
       NULL::TEXT, NULL::TIMESTAMPTZ, statement_timestamp()
FROM unnest($1::INT8[]) AS k (shard)
CROSS JOIN LATERAL (
    SELECT session_id, ready_at FROM sessions
    WHERE sessions.shard = k.shard AND sessions.ready_due_at IS NOT NULL AND sessions.ready_at <= statement_timestamp()
      AND (sessions.ready_at, sessions.session_id) > ($2::TIMESTAMPTZ, $3::TEXT)
    ORDER BY ready_at, session_id LIMIT $4::INT8) AS d
JOIN sessions s ON s.session_id = d.session_id
ORDER BY d.ready_at, d.session_id LIMIT $4::INT8

-- For people: sessions with a claim in one of these phases, the oldest claim
-- first. It walks the claims, of which there are no more than slots. The rows
-- are of inspect_sessions.
SELECT s.session_id, s.epoch, s.last_seq, s.relayed_seq, s.armed, s.unarmed, s.delayed, s.wakes - s.wakes_served, s.continuations,
       s.ready_at, s.created_at, s.updated_at, c.phase, c.phase_at, l.name,
       COALESCE(c.revoked = '' AND l.expires_at > statement_timestamp(), FALSE),
       NULL::TEXT, NULL::TIMESTAMPTZ, statement_timestamp()
FROM claims c
JOIN sessions s ON s.session_id = c.session_id
LEFT JOIN leases l ON l.holder = c.holder
WHERE c.phase = ANY ($1::TEXT[]) AND (c.phase_at, c.session_id) > ($2::TIMESTAMPTZ, $3::TEXT)
ORDER BY c.phase_at, c.session_id LIMIT $4::INT8

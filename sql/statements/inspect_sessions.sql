-- For people: all sessions by id, a page at a time.
SELECT s.session_id, s.epoch, s.last_seq, s.relayed_seq, s.armed, s.unarmed, s.delayed, s.wakes - s.wakes_served, s.continuations,
       s.ready_at, s.created_at, s.updated_at, c.phase, c.phase_at, l.name,
       COALESCE(c.revoked = '' AND l.expires_at > statement_timestamp(), FALSE),
       q.reason, q.created_at, statement_timestamp()
FROM sessions s
LEFT JOIN claims c ON c.session_id = s.session_id
LEFT JOIN leases l ON l.holder = c.holder
LEFT JOIN quarantines q ON q.session_id = s.session_id
WHERE s.session_id > $1::TEXT
ORDER BY s.session_id LIMIT $2::INT8

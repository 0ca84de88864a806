-- For people: the columns of inspect_sessions of one session, and its claim and
-- quarantine whole.
SELECT s.session_id, s.epoch, s.last_seq, s.relayed_seq, s.armed, s.unarmed, s.delayed, s.wakes - s.wakes_served, s.continuations,
       s.ready_at, s.created_at, s.updated_at, c.phase, c.phase_at, l.name,
       COALESCE(c.revoked = '' AND l.expires_at > statement_timestamp(), FALSE),
       q.reason, q.created_at, statement_timestamp(),
       s.takeovers, c.execution_id::TEXT, c.holder::TEXT, c.scanner, c.phase_at, c.reason, c.revoked, c.verdict,
       c.steps, c.step_id::TEXT, l.expires_at, q.quarantine_id::TEXT, q.lane, q.detail, q.evidence
FROM sessions s
LEFT JOIN claims c ON c.session_id = s.session_id
LEFT JOIN leases l ON l.holder = c.holder
LEFT JOIN quarantines q ON q.session_id = s.session_id
WHERE s.session_id = $1::TEXT

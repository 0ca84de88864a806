-- For people: quarantined sessions, the oldest quarantine first. The rows are
-- of inspect_sessions; a quarantined session has no claim.
SELECT s.session_id, s.epoch, s.last_seq, s.relayed_seq, s.armed, s.unarmed, s.delayed, s.wakes - s.wakes_served, s.continuations,
       s.ready_at, s.created_at, s.updated_at, NULL::TEXT, NULL::TIMESTAMPTZ, NULL::TEXT, FALSE,
       q.reason, q.created_at, statement_timestamp()
FROM quarantines q
JOIN sessions s ON s.session_id = q.session_id
WHERE (q.created_at, q.session_id) > ($1::TIMESTAMPTZ, $2::TEXT)
ORDER BY q.created_at, q.session_id LIMIT $3::INT8

-- I2: inserts where the session has no claim and no quarantine and the
-- holder's own lease is live, in this statement, or does nothing.
INSERT INTO claims (session_id, execution_id, ran_as, holder, scanner, epoch, phase, reason,
                    revoked, verdict, steps, step_id, step, acquired_at, phase_at, due_at)
SELECT u.session_id, u.execution_id::UUID, u.execution_id::UUID, u.holder::UUID, FALSE, u.epoch,
       'running', '', '', '', 1, u.step_id::UUID, u.step, u.now, u.now, u.now
FROM unnest($1::TEXT[], $2::TEXT[], $3::TEXT[], $4::INT8[], $5::TEXT[], $6::TEXT[], $7::TIMESTAMPTZ[])
     AS u (session_id, execution_id, holder, epoch, step_id, step, now)
JOIN leases l ON l.holder = u.holder::UUID AND l.expires_at > statement_timestamp()
LEFT JOIN sessions s ON s.session_id = u.session_id
WHERE s.execution_id IS NULL AND s.quarantine_id IS NULL
ON CONFLICT (session_id) DO NOTHING

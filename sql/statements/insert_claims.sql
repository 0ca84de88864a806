-- I2: inserts where there is no claim and the holder's own lease is live, in
-- this statement, or does nothing. That the session is ready was read under its
-- lock; to read it here again would lock the index page of all new sessions.
INSERT INTO claims (session_id, execution_id, ran_as, holder, scanner, epoch, phase, reason,
                    revoked, verdict, steps, step_id, step, acquired_at, phase_at, due_at)
SELECT u.session_id, u.execution_id::UUID, u.execution_id::UUID, u.holder::UUID, FALSE, u.epoch,
       'running', '', '', '', 1, u.step_id::UUID, u.step, u.now, u.now, u.now
FROM unnest($1::TEXT[], $2::TEXT[], $3::TEXT[], $4::INT8[], $5::TEXT[], $6::TEXT[], $7::TIMESTAMPTZ[])
     AS u (session_id, execution_id, holder, epoch, step_id, step, now)
WHERE COALESCE((SELECT l.expires_at > statement_timestamp() FROM leases l WHERE l.holder = u.holder::UUID), FALSE)
ON CONFLICT (session_id) DO NOTHING

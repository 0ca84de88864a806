-- The session, locked, with its claim and whether that claim's lease is live.
-- A session without a claim must not read the claims table (see the sessions
-- migration): the CASE makes the join's key NULL, and no index is searched for
-- that. The LIMIT and the subquery keep PostgreSQL from joining the other way
-- round, over a whole index, when it has seen an empty table.
SELECT s.shard, s.epoch, s.execution_id::TEXT, s.quarantine_id::TEXT, s.last_seq, s.relayed_seq,
       s.command_seq, s.command_time, s.position, s.unarmed, s.armed, s.delayed,
       s.wakes, s.wakes_served, s.woken_at, s.promised, s.continuations, s.takeovers,
       s.ready_at, s.ready_due_at, s.relay_due_at, s.kept_since,
       c.execution_id::TEXT, c.ran_as::TEXT, c.holder::TEXT, c.scanner, c.epoch,
       c.phase, c.reason, c.revoked, c.verdict, c.steps, c.step_id::TEXT, c.step, c.phase_at,
       COALESCE((SELECT l.expires_at > statement_timestamp() FROM leases l WHERE l.holder = c.holder), FALSE)
FROM sessions s
LEFT JOIN LATERAL (
    SELECT execution_id, ran_as, holder, scanner, epoch, phase, reason, revoked, verdict, steps, step_id, step, phase_at
    FROM claims
    WHERE claims.session_id = CASE WHEN s.execution_id IS NULL THEN NULL ELSE s.session_id END
    LIMIT 1) AS c ON TRUE
WHERE s.session_id = $1::TEXT
FOR UPDATE OF s

-- A page of the claims of each of some holders, in the scanner's order, after a
-- row of theirs. The revoked have an index of their own.
SELECT c.session_id, c.execution_id::TEXT, c.phase, c.revoked, c.due_at,
       COALESCE((SELECT GREATEST(0, EXTRACT(EPOCH FROM (statement_timestamp() - l.expires_at)) * 1000000)::INT8 FROM leases l WHERE l.holder = k.holder::UUID), 0),
       k.holder
FROM unnest($1::TEXT[], $2::TIMESTAMPTZ[], $3::TEXT[]) AS k (holder, due_at, session_id)
CROSS JOIN LATERAL (
    SELECT session_id, execution_id, phase, revoked, due_at FROM claims
    WHERE claims.holder = k.holder::UUID AND claims.revoked = '' AND claims.due_at >= k.due_at
      AND (claims.due_at > k.due_at OR claims.session_id > k.session_id)
    ORDER BY due_at, session_id LIMIT $4::INT8) AS c
ORDER BY c.due_at, c.session_id

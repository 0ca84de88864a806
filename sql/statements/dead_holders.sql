-- Holders whose lease has expired and that still have claims, those first whose
-- claim was touched longest ago. It walks the leases, one a process.
SELECT l.holder::TEXT
FROM leases l
CROSS JOIN LATERAL (
    SELECT due_at FROM claims WHERE claims.holder = l.holder AND claims.revoked = '' ORDER BY due_at LIMIT 1) AS c
WHERE l.expires_at <= statement_timestamp()
ORDER BY c.due_at LIMIT $1::INT8

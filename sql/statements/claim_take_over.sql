-- I6: a new execution id and epoch, only where the claim has expired and the
-- taker's own lease is live. The mark becomes the verdict.
UPDATE claims SET execution_id = $3::UUID, holder = $4::UUID, scanner = TRUE, epoch = $5::INT8,
                  verdict = $6::TEXT, revoked = '', due_at = statement_timestamp()
WHERE session_id = $1::TEXT AND execution_id = $2::UUID AND phase = 'running'
  AND (revoked <> '' OR NOT COALESCE((SELECT l.expires_at > statement_timestamp() FROM leases l WHERE l.holder = claims.holder), FALSE))
  AND COALESCE((SELECT o.expires_at > statement_timestamp() FROM leases o WHERE o.holder = $4::UUID), FALSE)

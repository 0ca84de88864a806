-- An interrupt of a claim that a scanner is converting.
UPDATE claims SET verdict = $3::TEXT, reason = $4::TEXT
WHERE session_id = $1::TEXT AND execution_id = $2::UUID AND scanner AND phase = 'running' AND revoked = '' AND step_id IS NOT NULL
  AND COALESCE((SELECT l.expires_at > statement_timestamp() FROM leases l WHERE l.holder = claims.holder), FALSE)

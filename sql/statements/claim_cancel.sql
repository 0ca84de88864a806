UPDATE claims SET phase = 'cancelling', reason = $3::TEXT, phase_at = statement_timestamp()
WHERE session_id = $1::TEXT AND execution_id = $2::UUID AND phase = 'running' AND revoked = '' AND step_id IS NOT NULL
  AND NOT scanner
  AND COALESCE((SELECT l.expires_at > statement_timestamp() FROM leases l WHERE l.holder = claims.holder), FALSE)

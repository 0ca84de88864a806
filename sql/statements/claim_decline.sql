UPDATE claims SET phase = 'cancelled', reason = $4::TEXT, step_id = NULL, step = NULL, phase_at = statement_timestamp()
WHERE session_id = $1::TEXT AND execution_id = $2::UUID AND step_id = $3::UUID AND phase = 'running' AND revoked = ''
  AND COALESCE((SELECT l.expires_at > statement_timestamp() FROM leases l WHERE l.holder = claims.holder), FALSE)

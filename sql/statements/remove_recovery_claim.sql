-- The scanner's end of a claim that it took over: its recovery lease is live.
DELETE FROM claims
WHERE session_id = $1::TEXT AND execution_id = $2::UUID AND phase = 'running' AND scanner AND revoked = ''
  AND COALESCE((SELECT l.expires_at > statement_timestamp() FROM leases l WHERE l.holder = claims.holder), FALSE)

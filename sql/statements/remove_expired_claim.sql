-- The scanner's end of a claim that it did not take over.
DELETE FROM claims
WHERE session_id = $1::TEXT AND execution_id = $2::UUID AND phase = $3::TEXT AND $3::TEXT <> 'running'
  AND (revoked <> '' OR NOT COALESCE((SELECT l.expires_at > statement_timestamp() FROM leases l WHERE l.holder = claims.holder), FALSE))

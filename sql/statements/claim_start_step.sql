-- Starting needs a live lease (I5).
UPDATE claims SET step_id = $3::UUID, step = $4::TEXT, steps = steps + 1
WHERE session_id = $1::TEXT AND execution_id = $2::UUID AND phase = 'running' AND revoked = '' AND step_id IS NULL
  AND COALESCE((SELECT l.expires_at > statement_timestamp() FROM leases l WHERE l.holder = claims.holder), FALSE)

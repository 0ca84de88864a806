-- An interrupt of a claim that a scanner is converting.
UPDATE claims SET verdict = $3::TEXT, reason = $4::TEXT
WHERE session_id = $1::TEXT AND execution_id = $2::UUID AND scanner AND phase = 'running' AND revoked = ''

-- A mark is only raised; that is decided where the claim was read.
UPDATE claims SET revoked = $3::TEXT, reason = CASE WHEN $4::TEXT = '' THEN reason ELSE $4::TEXT END
WHERE session_id = $1::TEXT AND execution_id = $2::UUID AND revoked <> $3::TEXT

-- The owner's end of a claim: still its own, in the phase that was read.
DELETE FROM claims c
USING unnest($1::TEXT[], $2::TEXT[], $3::TEXT[]) AS u (session_id, execution_id, phase)
WHERE c.session_id = ANY ($1::TEXT[]) AND c.session_id = u.session_id AND c.execution_id = u.execution_id::UUID AND c.phase = u.phase AND c.revoked = ''

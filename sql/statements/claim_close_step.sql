-- Closing needs only that nobody took over or revoked (I5); a cancellation is never overwritten (I9).
UPDATE claims SET step_id = NULL, step = NULL
WHERE session_id = $1::TEXT AND execution_id = $2::UUID AND step_id = $3::UUID AND phase = 'running' AND revoked = ''

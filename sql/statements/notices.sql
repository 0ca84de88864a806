-- I17: by index, only the holder's claims that are not plainly running.
SELECT session_id, execution_id::TEXT, phase, revoked, phase_at FROM claims
WHERE holder = $1::UUID AND (phase <> 'running' OR revoked <> '')

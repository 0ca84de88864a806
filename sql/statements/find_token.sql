-- The events that an operation appended, if they are among the session's newest
-- appends. Asked only after a COMMIT whose outcome is unknown, which is seconds ago.
SELECT newest.lines
FROM (SELECT token, lines FROM events WHERE session_id = $1::TEXT ORDER BY last_seq DESC LIMIT 1000) AS newest
WHERE newest.token = $2::UUID

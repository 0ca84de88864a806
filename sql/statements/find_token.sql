-- Whether an operation's events are among the session's newest appends. Asked
-- only after a COMMIT whose outcome is unknown, which is seconds ago.
SELECT EXISTS (
    SELECT 1 FROM (SELECT token FROM events WHERE session_id = $1::TEXT ORDER BY last_seq DESC LIMIT 1000) AS newest
    WHERE newest.token = $2::UUID)

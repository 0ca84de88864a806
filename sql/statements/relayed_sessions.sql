-- A page of the sessions by id, with the relay's mark; 0 where nothing is kept
-- to be published again.
SELECT session_id, CASE WHEN kept_since IS NULL THEN 0 ELSE relayed_seq END FROM sessions
WHERE session_id > $1::TEXT
ORDER BY session_id LIMIT $2::INT8

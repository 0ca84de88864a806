-- A page of the sessions that have relayed events and keep some, by id, with
-- the relay's mark.
SELECT session_id, relayed_seq FROM sessions
WHERE session_id > $1::TEXT AND relayed_seq > 0 AND kept_since IS NOT NULL
ORDER BY session_id LIMIT $2::INT8

-- The log after a number, relayed or not, oldest first.
SELECT lines FROM events WHERE session_id = $1::TEXT AND last_seq > $2::INT8 ORDER BY last_seq LIMIT $3::INT8

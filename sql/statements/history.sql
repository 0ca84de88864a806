-- Newest first, a page at a time.
SELECT last_seq, lines FROM events WHERE session_id = $1::TEXT AND last_seq < $2::INT8 ORDER BY last_seq DESC LIMIT $3::INT8

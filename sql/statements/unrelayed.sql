-- The log after the relay's mark, oldest first.
SELECT s.relayed_seq, e.lines
FROM sessions s LEFT JOIN events e ON e.session_id = s.session_id AND e.last_seq > s.relayed_seq
WHERE s.session_id = $1::TEXT
ORDER BY e.last_seq
LIMIT $2::INT8

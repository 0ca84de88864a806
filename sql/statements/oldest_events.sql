-- The oldest appends of a session; the lines only of those that tell of an input.
SELECT last_seq, created_at, CASE WHEN position('"type":"input.' IN lines) > 0 THEN lines ELSE '' END
FROM events WHERE session_id = $1::TEXT ORDER BY last_seq LIMIT $2::INT8

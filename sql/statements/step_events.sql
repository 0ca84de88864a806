-- Newest first, a page at a time: the appends that tell of a step's beginning or
-- end, or of a continuation. A text that says the same is in quotes of its own,
-- which JSON escapes.
SELECT last_seq, lines FROM events
WHERE session_id = $1::TEXT AND last_seq < $2::INT8
  AND (position('"type":"step.' IN lines) > 0 OR position('"type":"continuation.' IN lines) > 0)
ORDER BY last_seq DESC LIMIT $3::INT8

-- The continuation that would start next: of those that are due, the oldest promise.
SELECT number, body FROM continuations
WHERE session_id = $1::TEXT AND not_before <= $2::TIMESTAMPTZ
ORDER BY number LIMIT 1

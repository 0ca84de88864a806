SELECT number, body FROM continuations WHERE session_id = $1::TEXT ORDER BY number

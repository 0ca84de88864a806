-- For people: the continuations of a session, in their order, as they stand.
SELECT number, not_before, body FROM continuations WHERE session_id = $1::TEXT ORDER BY number LIMIT $2::INT8

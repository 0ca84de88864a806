SELECT min(not_before) FROM continuations WHERE session_id = $1::TEXT

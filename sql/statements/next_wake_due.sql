SELECT min(not_before) FROM wakes WHERE session_id = $1::TEXT

DELETE FROM wakes WHERE session_id = $1::TEXT

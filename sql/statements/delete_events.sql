DELETE FROM events WHERE session_id = $1::TEXT AND last_seq <= $2::INT8

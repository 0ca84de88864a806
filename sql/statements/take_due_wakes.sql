DELETE FROM wakes WHERE session_id = $1::TEXT AND not_before <= $2::TIMESTAMPTZ

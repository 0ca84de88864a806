-- For people: the bare wakes of a session that wait for their time.
SELECT not_before FROM wakes WHERE session_id = $1::TEXT ORDER BY not_before LIMIT $2::INT8

SELECT min(not_before) FROM inputs WHERE session_id = $1::TEXT AND state = 'armed'

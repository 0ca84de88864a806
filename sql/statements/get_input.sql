SELECT delivery, state, body, not_before FROM inputs WHERE session_id = $1::TEXT AND input_id = $2::TEXT

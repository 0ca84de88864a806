SELECT quarantine_id::TEXT, lane, reason, evidence FROM quarantines WHERE session_id = $1::TEXT

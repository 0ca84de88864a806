UPDATE inputs SET state = 'quarantined'
WHERE session_id = $1::TEXT AND input_id = ANY ($2::TEXT[]) AND state = 'armed'

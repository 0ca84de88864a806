UPDATE inputs SET state = 'covered', step_id = $3::UUID
WHERE session_id = $1::TEXT AND input_id = ANY ($2::TEXT[]) AND state = 'armed'

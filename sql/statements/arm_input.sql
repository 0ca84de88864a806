UPDATE inputs SET state = 'armed', not_before = $3::TIMESTAMPTZ, trace = $4::TEXT
WHERE session_id = $1::TEXT AND input_id = $2::TEXT AND state = 'unarmed'

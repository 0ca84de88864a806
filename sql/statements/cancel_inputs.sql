UPDATE inputs SET state = 'cancelled'
WHERE session_id = $1::TEXT AND input_id = ANY ($2::TEXT[]) AND state IN ('unarmed', 'armed')

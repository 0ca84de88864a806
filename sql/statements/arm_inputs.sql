UPDATE inputs SET state = 'armed' WHERE session_id = $1::TEXT AND state = 'unarmed'

SELECT input_id FROM inputs WHERE session_id = $1::TEXT AND state IN ('unarmed', 'armed') ORDER BY position

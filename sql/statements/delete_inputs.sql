-- Never a pending one.
DELETE FROM inputs WHERE session_id = $1::TEXT AND input_id = ANY ($2::TEXT[]) AND state IN ('covered', 'cancelled')

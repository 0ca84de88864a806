-- The inputs that a continuation gives again, in their order.
SELECT input_id, delivery, body FROM inputs
WHERE session_id = $1::TEXT AND input_id = ANY ($2::TEXT[])
ORDER BY position

-- For people: the pending inputs of a session, in their order. A long body is
-- left out; its length is told.
SELECT input_id, state, delivery, not_before, admitted_at,
       CASE WHEN octet_length(body) <= $2::INT8 THEN body END, octet_length(body)
FROM inputs
WHERE session_id = $1::TEXT AND state IN ('unarmed', 'armed')
ORDER BY position LIMIT $3::INT8

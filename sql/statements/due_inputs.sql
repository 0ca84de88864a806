-- What of the armed, due inputs a promotion covers: all steers, the first queued
-- one. A step takes at most 256 steers, so that its events fit a message; the
-- others join at the step after.
(SELECT input_id, delivery, body, trace, admitted_at, position FROM inputs
 WHERE session_id = $1::TEXT AND state = 'armed' AND delivery = 'steer' AND not_before <= $2::TIMESTAMPTZ
 ORDER BY position LIMIT 256)
UNION ALL
(SELECT input_id, delivery, body, trace, admitted_at, position FROM inputs
 WHERE session_id = $1::TEXT AND state = 'armed' AND delivery = 'queue' AND not_before <= $2::TIMESTAMPTZ
 ORDER BY position LIMIT 1)
ORDER BY position

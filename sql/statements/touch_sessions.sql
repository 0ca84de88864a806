-- Moves the scanner's mark back, or takes it away where nothing is ready. What
-- another scanner touched meanwhile is not touched, and not returned (I31).
UPDATE sessions SET ready_due_at = CASE
    WHEN ready_at IS NULL OR NOT (armed > 0 OR delayed > 0 OR wakes > wakes_served) THEN NULL
    ELSE GREATEST(ready_at, statement_timestamp() + $2::INT8 * INTERVAL '1 microsecond') END
FROM unnest($1::TEXT[]) AS u (session_id)
WHERE sessions.session_id = ANY ($1::TEXT[]) AND sessions.session_id = u.session_id AND sessions.ready_due_at <= statement_timestamp()
RETURNING sessions.session_id

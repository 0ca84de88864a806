-- The continuation that would start next: of those that are due, the oldest
-- promise; and whether its chain has a newer one.
SELECT c.number, c.body, EXISTS (
    SELECT 1 FROM continuations n WHERE n.session_id = $1::TEXT AND n.number > c.number AND n.lineage = c.lineage)
FROM continuations c
WHERE c.session_id = $1::TEXT AND c.not_before <= $2::TIMESTAMPTZ
ORDER BY c.number LIMIT 1

SELECT c.body, EXISTS (
    SELECT 1 FROM continuations n WHERE n.session_id = $1::TEXT AND n.number > c.number AND n.lineage = c.lineage)
FROM continuations c WHERE c.session_id = $1::TEXT AND c.number = $2::INT8

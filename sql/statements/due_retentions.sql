-- Sessions that may keep something past its retention, those first that were
-- looked at longest ago.
SELECT d.session_id
FROM unnest($1::INT8[]) AS k (shard)
CROSS JOIN LATERAL (
    SELECT session_id, kept_since FROM sessions
    WHERE sessions.shard = k.shard AND sessions.kept_since IS NOT NULL
      AND sessions.kept_since <= statement_timestamp() - $2::INT8 * INTERVAL '1 microsecond'
    ORDER BY kept_since LIMIT $3::INT8) AS d
ORDER BY d.kept_since LIMIT $3::INT8

-- For people: quarantines, the oldest first, of one reason or of all ('').
SELECT session_id, quarantine_id::TEXT, lane, reason, detail, created_at, statement_timestamp()
FROM quarantines
WHERE (created_at, session_id) > ($1::TIMESTAMPTZ, $2::TEXT) AND ($3::TEXT = '' OR reason = $3::TEXT)
ORDER BY created_at, session_id LIMIT $4::INT8

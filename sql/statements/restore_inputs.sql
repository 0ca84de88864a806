-- What a quarantine had taken out of what can be promoted.
UPDATE inputs SET state = $3::TEXT
WHERE session_id = $1::TEXT AND input_id = ANY ($2::TEXT[]) AND state = 'quarantined' AND $3::TEXT IN ('armed', 'cancelled')

INSERT INTO wakes (session_id, position, not_before) VALUES ($1::TEXT, $2::INT8, $3::TIMESTAMPTZ)

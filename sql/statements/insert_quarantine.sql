INSERT INTO quarantines (session_id, quarantine_id, lane, reason, detail, evidence, created_at)
VALUES ($1::TEXT, $2::UUID, $3::TEXT, $4::TEXT, $5::TEXT, $6::TEXT, $7::TIMESTAMPTZ)

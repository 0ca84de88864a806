INSERT INTO continuations (session_id, number, shard, not_before, due_at, body)
VALUES ($1::TEXT, $2::INT8, $3::INT8, $4::TIMESTAMPTZ, $5::TIMESTAMPTZ, $6::TEXT)

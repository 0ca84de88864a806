INSERT INTO continuations (session_id, number, shard, lineage, not_before, due_at, body)
VALUES ($1::TEXT, $2::INT8, $3::INT8, $4::UUID, $5::TIMESTAMPTZ, $6::TIMESTAMPTZ, $7::TEXT)

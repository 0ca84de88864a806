INSERT INTO leases (holder, kind, name, version, slots, started_at, expires_at)
VALUES ($1::UUID, $2::TEXT, $3::TEXT, $4::TEXT, $5::INT8, statement_timestamp(), statement_timestamp() + $6::INT8 * INTERVAL '1 microsecond')
ON CONFLICT (holder) DO NOTHING

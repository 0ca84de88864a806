-- Long expired, and no claim names them.
DELETE FROM leases
WHERE expires_at < statement_timestamp() - $1::INT8 * INTERVAL '1 microsecond'
  AND NOT EXISTS (SELECT 1 FROM claims c WHERE c.holder = leases.holder)

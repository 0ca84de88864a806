-- I4: never revives an expired lease.
UPDATE leases SET expires_at = statement_timestamp() + $2::INT8 * INTERVAL '1 microsecond'
WHERE holder = $1::UUID AND expires_at > statement_timestamp()

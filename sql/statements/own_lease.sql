SELECT COALESCE((SELECT expires_at > statement_timestamp() FROM leases WHERE holder = $1::UUID), FALSE)

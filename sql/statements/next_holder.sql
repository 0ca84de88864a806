-- Walks the distinct holders of claims by their index, one a call.
SELECT c.holder::TEXT, COALESCE((SELECT l.expires_at > statement_timestamp() FROM leases l WHERE l.holder = c.holder), FALSE)
FROM claims c WHERE c.holder > $1::UUID ORDER BY c.holder LIMIT 1

-- Walks the distinct holders of claims by their index, one a call.
SELECT c.holder::TEXT, EXISTS (SELECT 1 FROM leases l WHERE l.holder = c.holder AND l.expires_at > statement_timestamp())
FROM claims c WHERE c.holder > $1::UUID ORDER BY c.holder LIMIT 1

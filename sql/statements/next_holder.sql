-- Walks the distinct holders of claims by their index, one a call; and whether
-- there is a lease of it, live or not.
SELECT c.holder::TEXT, COALESCE((SELECT TRUE FROM leases l WHERE l.holder = c.holder), FALSE)
FROM claims c WHERE c.holder > $1::UUID ORDER BY c.holder LIMIT 1

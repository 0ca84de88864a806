-- For people: the leases of workers and scanners, with how many claims each holds.
SELECT l.holder::TEXT, l.kind, l.name, l.version, l.slots, l.started_at, l.expires_at,
       (SELECT count(*) FROM claims c WHERE c.holder = l.holder), statement_timestamp()
FROM leases l
WHERE l.holder > $1::UUID
ORDER BY l.holder LIMIT $2::INT8

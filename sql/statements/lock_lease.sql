-- Whether a lease that looked expired is. The transaction's snapshot may be
-- older than a heartbeat, and its clock is not: the lock makes a heartbeat since
-- then a conflict, so that a live lease is never judged by an old row (I4).
SELECT expires_at > statement_timestamp() FROM leases WHERE holder = $1::UUID FOR UPDATE

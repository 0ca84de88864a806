-- For people: how many sessions a rebuild of the stream looks at.
SELECT count(*) FROM sessions WHERE relayed_seq > 0 AND kept_since IS NOT NULL

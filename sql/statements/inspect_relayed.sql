-- For people: how many sessions a rebuild of the stream looks at.
SELECT count(*) FROM sessions

-- For people: which engine this is, and of which version.
SELECT version()

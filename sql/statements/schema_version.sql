SELECT COALESCE(max(version_id), 0) FROM goose_db_version WHERE is_applied

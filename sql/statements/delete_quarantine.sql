-- I30: a release is fenced by the quarantine that was looked at.
DELETE FROM quarantines WHERE session_id = $1::TEXT AND quarantine_id = $2::UUID

UPDATE sessions SET relayed_seq = u.seq,
    relay_due_at = CASE WHEN sessions.last_seq <= u.seq THEN NULL ELSE statement_timestamp() + $3::INT8 * INTERVAL '1 microsecond' END
FROM unnest($1::TEXT[], $2::INT8[]) AS u (session_id, seq)
WHERE sessions.session_id = ANY ($1::TEXT[]) AND sessions.session_id = u.session_id AND sessions.relayed_seq < u.seq AND sessions.last_seq >= u.seq

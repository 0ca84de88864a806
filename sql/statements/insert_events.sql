INSERT INTO events (session_id, last_seq, first_seq, epoch, token, lines, created_at)
SELECT u.session_id, u.last_seq, u.first_seq, u.epoch, u.token::UUID, u.lines, u.now
FROM unnest($1::TEXT[], $2::INT8[], $3::INT8[], $4::INT8[], $5::TEXT[], $6::TEXT[], $7::TIMESTAMPTZ[])
     AS u (session_id, last_seq, first_seq, epoch, token, lines, now)

INSERT INTO inputs (session_id, input_id, position, delivery, state, not_before, body, trace, step_id, admitted_at)
SELECT u.session_id, u.input_id, u.position, u.delivery, u.state, u.not_before, u.body, u.trace, u.step_id::UUID, u.now
FROM unnest($1::TEXT[], $2::TEXT[], $3::INT8[], $4::TEXT[], $5::TEXT[], $6::TIMESTAMPTZ[], $7::TEXT[], $8::TEXT[], $9::TEXT[], $10::TIMESTAMPTZ[])
     AS u (session_id, input_id, position, delivery, state, not_before, body, trace, step_id, now)
ON CONFLICT (session_id, input_id) DO NOTHING

-- Writes sessions that this transaction has locked; the
-- relay's mark is not among the columns, its owner is note_relayed.
INSERT INTO sessions (session_id, shard, epoch, execution_id, quarantine_id, last_seq, relayed_seq,
                      command_seq, command_time, position, unarmed, armed, delayed, wakes, wakes_served, woken_at,
                      promised, continuations, takeovers, ready_at, ready_due_at, relay_due_at, kept_since,
                      created_at, updated_at)
SELECT u.session_id, u.shard, u.epoch, u.execution_id::UUID, u.quarantine_id::UUID, u.last_seq, 0,
       u.command_seq, u.command_time, u.position, u.unarmed, u.armed, u.delayed, u.wakes, u.wakes_served, u.woken_at,
       u.promised, u.continuations, u.takeovers, u.ready_at, u.ready_due_at, u.relay_due_at, u.kept_since,
       u.now, u.now
FROM unnest($1::TEXT[], $2::INT8[], $3::INT8[], $4::TEXT[], $5::TEXT[], $6::INT8[], $7::INT8[], $8::INT8[], $9::INT8[],
            $10::INT8[], $11::INT8[], $12::INT8[], $13::INT8[], $14::INT8[], $15::TIMESTAMPTZ[], $16::INT8[], $17::INT8[],
            $18::INT8[], $19::TIMESTAMPTZ[], $20::TIMESTAMPTZ[], $21::TIMESTAMPTZ[], $22::TIMESTAMPTZ[], $23::TIMESTAMPTZ[])
     AS u (session_id, shard, epoch, execution_id, quarantine_id, last_seq, command_seq, command_time, position,
           unarmed, armed, delayed, wakes, wakes_served, woken_at, promised, continuations, takeovers,
           ready_at, ready_due_at, relay_due_at, kept_since, now)
ON CONFLICT (session_id) DO UPDATE SET
    epoch = excluded.epoch, execution_id = excluded.execution_id, quarantine_id = excluded.quarantine_id,
    last_seq = excluded.last_seq, command_seq = excluded.command_seq, command_time = excluded.command_time,
    position = excluded.position, unarmed = excluded.unarmed, armed = excluded.armed, delayed = excluded.delayed,
    wakes = excluded.wakes, wakes_served = excluded.wakes_served, woken_at = excluded.woken_at,
    promised = excluded.promised, continuations = excluded.continuations, takeovers = excluded.takeovers,
    ready_at = excluded.ready_at, ready_due_at = excluded.ready_due_at, relay_due_at = excluded.relay_due_at,
    kept_since = excluded.kept_since,
    updated_at = excluded.updated_at

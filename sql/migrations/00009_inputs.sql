-- +goose NO TRANSACTION
-- +goose Up
CREATE TABLE IF NOT EXISTS inputs (
    session_id  TEXT        NOT NULL,
    input_id    TEXT        NOT NULL,
    position    INT8        NOT NULL,
    delivery    TEXT        NOT NULL CHECK (delivery IN ('queue', 'steer')),
    state       TEXT        NOT NULL CHECK (state IN ('unarmed', 'armed', 'covered', 'cancelled', 'quarantined')),
    not_before  TIMESTAMPTZ NOT NULL,
    body        TEXT        NOT NULL,
    trace       TEXT        NOT NULL, -- traceparent of its command
    step_id     UUID,                 -- the one that covers it (I23)
    admitted_at TIMESTAMPTZ NOT NULL,
    PRIMARY KEY (session_id, input_id)
);

-- +goose Down
DROP TABLE IF EXISTS inputs;

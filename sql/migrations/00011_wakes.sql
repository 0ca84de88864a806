-- +goose NO TRANSACTION
-- +goose Up
-- Bare wakes with a time of their own.
CREATE TABLE IF NOT EXISTS wakes (
    session_id TEXT        NOT NULL,
    position   INT8        NOT NULL,
    not_before TIMESTAMPTZ NOT NULL,
    PRIMARY KEY (session_id, position)
);

-- +goose Down
DROP TABLE IF EXISTS wakes;

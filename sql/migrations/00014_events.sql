-- +goose NO TRANSACTION
-- +goose Up
-- The log: the events of one append are one row. lines holds them as they go
-- to the stream, one JSON a line.
CREATE TABLE IF NOT EXISTS events (
    session_id TEXT        NOT NULL,
    last_seq   INT8        NOT NULL,
    first_seq  INT8        NOT NULL,
    epoch      INT8        NOT NULL,
    token      UUID        NOT NULL, -- of the operation, to find it again after an unknown COMMIT
    lines      TEXT        NOT NULL,
    created_at TIMESTAMPTZ NOT NULL,
    PRIMARY KEY (session_id, last_seq),
    CHECK (first_seq <= last_seq)
);

-- +goose Down
DROP TABLE IF EXISTS events;

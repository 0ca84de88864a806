-- +goose NO TRANSACTION
-- +goose Up
CREATE TABLE IF NOT EXISTS continuations (
    session_id TEXT        NOT NULL,
    number     INT8        NOT NULL,
    shard      INT8        NOT NULL,
    lineage    UUID        NOT NULL,
    not_before TIMESTAMPTZ NOT NULL,
    due_at     TIMESTAMPTZ NOT NULL, -- when a scanner looks at it
    body       TEXT        NOT NULL, -- JSON
    PRIMARY KEY (session_id, number)
);

-- +goose Down
DROP TABLE IF EXISTS continuations;

-- +goose NO TRANSACTION
-- +goose Up
-- One row a process. A heartbeat writes expires_at, so nothing indexes it.
CREATE TABLE IF NOT EXISTS leases (
    holder     UUID        NOT NULL PRIMARY KEY,
    kind       TEXT        NOT NULL CHECK (kind IN ('worker', 'scanner')),
    name       TEXT        NOT NULL,
    version    TEXT        NOT NULL,
    slots      INT8        NOT NULL,
    started_at TIMESTAMPTZ NOT NULL,
    expires_at TIMESTAMPTZ NOT NULL
);

-- +goose Down
DROP TABLE IF EXISTS leases;

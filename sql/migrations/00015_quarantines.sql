-- +goose NO TRANSACTION
-- +goose Up
CREATE TABLE IF NOT EXISTS quarantines (
    session_id    TEXT        NOT NULL PRIMARY KEY,
    quarantine_id UUID        NOT NULL,
    lane          TEXT        NOT NULL CHECK (lane IN ('claims', 'recovery', 'owner')),
    reason        TEXT        NOT NULL,
    detail        TEXT        NOT NULL,
    evidence      TEXT        NOT NULL, -- JSON: the claim, the continuation and the head as they were
    created_at    TIMESTAMPTZ NOT NULL
);

-- +goose Down
DROP TABLE IF EXISTS quarantines;

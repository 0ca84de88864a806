-- +goose NO TRANSACTION
-- +goose Up
-- Nothing that the session's log keeps is older; NULL: nothing is kept. It is
-- set by an append only where it is NULL, so that the hot path moves no index.
ALTER TABLE sessions ADD COLUMN IF NOT EXISTS kept_since TIMESTAMPTZ;

-- +goose Down
ALTER TABLE sessions DROP COLUMN IF EXISTS kept_since;

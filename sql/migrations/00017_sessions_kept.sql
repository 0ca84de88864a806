-- +goose NO TRANSACTION
-- +goose Up
CREATE INDEX IF NOT EXISTS sessions_kept ON sessions (shard, kept_since) WHERE kept_since IS NOT NULL;

-- +goose Down
DROP INDEX IF EXISTS sessions_kept;

-- +goose NO TRANSACTION
-- +goose Up
CREATE INDEX IF NOT EXISTS sessions_relay ON sessions (shard, relay_due_at) WHERE relay_due_at IS NOT NULL;

-- +goose Down
DROP INDEX IF EXISTS sessions_relay;

-- +goose NO TRANSACTION
-- +goose Up
CREATE INDEX IF NOT EXISTS sessions_ready ON sessions (shard, ready_due_at) WHERE ready_due_at IS NOT NULL;

-- +goose Down
DROP INDEX IF EXISTS sessions_ready;

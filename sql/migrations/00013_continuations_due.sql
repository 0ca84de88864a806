-- +goose NO TRANSACTION
-- +goose Up
CREATE INDEX IF NOT EXISTS continuations_due ON continuations (shard, due_at);

-- +goose Down
DROP INDEX IF EXISTS continuations_due;

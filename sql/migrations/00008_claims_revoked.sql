-- +goose NO TRANSACTION
-- +goose Up
CREATE INDEX IF NOT EXISTS claims_revoked ON claims (due_at) WHERE revoked <> '';

-- +goose Down
DROP INDEX IF EXISTS claims_revoked;

-- +goose NO TRANSACTION
-- +goose Up
CREATE INDEX IF NOT EXISTS claims_holder ON claims (holder, due_at);

-- +goose Down
DROP INDEX IF EXISTS claims_holder;

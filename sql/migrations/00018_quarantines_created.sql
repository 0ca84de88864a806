-- +goose NO TRANSACTION
-- +goose Up
CREATE INDEX IF NOT EXISTS quarantines_created ON quarantines (created_at, session_id);

-- +goose Down
DROP INDEX IF EXISTS quarantines_created;

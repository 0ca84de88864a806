-- +goose NO TRANSACTION
-- +goose Up
CREATE INDEX IF NOT EXISTS inputs_pending ON inputs (session_id, state, delivery, position) WHERE state IN ('unarmed', 'armed');

-- +goose Down
DROP INDEX IF EXISTS inputs_pending;

-- +goose NO TRANSACTION
-- +goose Up
-- What a heartbeat reads: the claims of a holder that are not plainly running (I17).
CREATE INDEX IF NOT EXISTS claims_notice ON claims (holder) WHERE phase <> 'running' OR revoked <> '';

-- +goose Down
DROP INDEX IF EXISTS claims_notice;

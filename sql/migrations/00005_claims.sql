-- +goose NO TRANSACTION
-- +goose Up
-- The one row that says which holder runs a session (I1). The open step is
-- here; a closed one is in the event log. A heartbeat does not write here.
CREATE TABLE IF NOT EXISTS claims (
    session_id   TEXT        NOT NULL PRIMARY KEY,
    execution_id UUID        NOT NULL,
    ran_as       UUID        NOT NULL, -- the execution its events are told of: a takeover keeps it
    holder       UUID        NOT NULL,
    scanner      BOOL        NOT NULL, -- a scanner took it over and converts it
    epoch        INT8        NOT NULL,
    phase        TEXT        NOT NULL CHECK (phase IN ('running', 'cancelling', 'cancelled')),
    reason       TEXT        NOT NULL, -- of the interrupt or the refusal
    revoked      TEXT        NOT NULL CHECK (revoked IN ('', 'unknown', 'interrupted', 'never_joined')),
    verdict      TEXT        NOT NULL CHECK (verdict IN ('', 'unknown', 'interrupted', 'never_joined')),
    steps        INT8        NOT NULL, -- started in this execution
    step_id      UUID,
    step         TEXT,                 -- JSON of the open step
    acquired_at  TIMESTAMPTZ NOT NULL,
    phase_at     TIMESTAMPTZ NOT NULL,
    due_at       TIMESTAMPTZ NOT NULL, -- the scanner's order
    CHECK ((step_id IS NULL) = (step IS NULL)),
    CHECK (phase <> 'cancelling' OR step_id IS NOT NULL)
);

-- +goose Down
DROP TABLE IF EXISTS claims;

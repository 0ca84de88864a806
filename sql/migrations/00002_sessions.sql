-- +goose NO TRANSACTION
-- +goose Up
-- One row a session, for ever: it carries the numbers that may never go back.
-- Every transaction on a session locks this row first. execution_id says
-- whether there is a claim, so that a session without one does not read the
-- claims table: on PostgreSQL such a read would lock the index page that every
-- other acquisition inserts into. The counters say the same of the other
-- tables.
CREATE TABLE IF NOT EXISTS sessions (
    session_id     TEXT        NOT NULL PRIMARY KEY,
    shard          INT8        NOT NULL,
    epoch          INT8        NOT NULL CHECK (epoch >= 0),
    execution_id   UUID,
    quarantine_id  UUID,
    last_seq       INT8        NOT NULL CHECK (last_seq >= 0),
    relayed_seq    INT8        NOT NULL CHECK (relayed_seq <= last_seq),
    command_seq    INT8        NOT NULL,
    command_time   INT8        NOT NULL, -- nanoseconds: a TIMESTAMPTZ would round (I18)
    position       INT8        NOT NULL, -- the last one given to an input or a delayed wake
    unarmed        INT8        NOT NULL CHECK (unarmed >= 0),
    armed          INT8        NOT NULL CHECK (armed >= 0),
    delayed        INT8        NOT NULL CHECK (delayed >= 0),
    wakes          INT8        NOT NULL, -- bare wakes so far
    wakes_served   INT8        NOT NULL CHECK (wakes_served <= wakes),
    woken_at       TIMESTAMPTZ,          -- the oldest bare wake that is not served
    promised       INT8        NOT NULL, -- the last number given to a continuation
    continuations  INT8        NOT NULL CHECK (continuations >= 0),
    takeovers      INT8        NOT NULL CHECK (takeovers >= 0), -- since a step ended
    ready_at       TIMESTAMPTZ,          -- when its head is due; NULL: nothing, or a claim, or quarantined
    ready_due_at   TIMESTAMPTZ,          -- when a scanner looks at it
    relay_due_at   TIMESTAMPTZ,          -- when a scanner relays it; NULL: all is relayed
    created_at     TIMESTAMPTZ NOT NULL,
    updated_at     TIMESTAMPTZ NOT NULL
);

-- +goose Down
DROP TABLE IF EXISTS sessions;

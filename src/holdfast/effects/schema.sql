-- hf_effects  the ledger: one row per attempt of an effect, written before the effect is tried.
--             The key says which calls are one effect; the newest generation of a key counts. A
--             new one comes after a failure, when the last has expired, or when something else was
--             written in between. Nothing is ever rolled back here
--
-- A call that another's row answered has a row of its own that names it in replay_of, with its
-- outcome, so that the same call id is never run later. It is no attempt. Answered by a row of the
-- same session it has that one's key and generation 0, and only its call id finds it. Answered by one
-- of another session (an earlier one of the same id, or one that it was forked from) it has a key and
-- a generation of its own session's, where later calls, forks and new sessions of the same id look.
--
-- An effect outlives its session: a retry that comes late must still find it, and a new session of
-- the same id lists it. unlinked_at says when its session was deleted; what was settled then has
-- kept what decides a retry, and lost what was said of it: arguments, error, note, late.
--
-- hf_effect_salts     what keys and digests are hashed with: the store's own salt, those that imported
--                     sessions brought, and the mark of the key that is used instead of all of them
--                     ('' if there is none). Every change adds a row, so the highest number tells
--                     whether a process knows them all
-- hf_effect_sessions  the sessions that came from another store, each with the salt it brought
-- hf_effect_origins   where a fork finds the effects from before the fork: versions first to last of
--                     a session it was forked from, the nearest at position 1, as of the fork
--
-- Life: issued, then completed, failed or unknown; unknown until somebody knows. Lock order: the
-- tree, then the effect. No foreign keys: effects and origins outlive the sessions they name.

--[both]
CREATE TABLE hf_effects (
    number INTEGER PRIMARY KEY AUTOINCREMENT,
    id TEXT NOT NULL UNIQUE,
    scope TEXT NOT NULL,
    key TEXT NOT NULL,
    generation INTEGER NOT NULL,
    call_id TEXT,
    session_number INTEGER,
    session_id TEXT,
    item_id TEXT,
    issued_version INTEGER NOT NULL,
    tool TEXT NOT NULL,
    effect TEXT NOT NULL CHECK (effect IN ('read', 'write', 'mutate')),
    is_irreversible INTEGER NOT NULL CHECK (is_irreversible IN (0, 1)),
    request_digest TEXT NOT NULL,
    idempotency_key TEXT NOT NULL,
    arguments BLOB,
    status TEXT NOT NULL CHECK (status IN ('issued', 'completed', 'failed', 'unknown')),
    reason TEXT CHECK (reason IN (
        'raised', 'not_landed', 'abandoned', 'given_up', 'timed_out', 'cancelled', 'owner_died',
        'rewound', 'verified', 'resolved', 'not_storable'
    )),
    result BLOB,
    error BLOB,
    attempt INTEGER NOT NULL,
    holder TEXT,
    fence INTEGER NOT NULL DEFAULT 1,
    lease_expires_at INTEGER,
    timeout_ms INTEGER NOT NULL,
    settle_ms INTEGER NOT NULL,
    ttl_ms INTEGER,
    replay_of TEXT,
    undoes TEXT,
    undone_by TEXT,
    decided_by TEXT,
    note BLOB,
    late BLOB,
    issued_at INTEGER NOT NULL,
    ended_at INTEGER,
    expires_at INTEGER,
    unlinked_at INTEGER
);

CREATE UNIQUE INDEX ux_effects_key ON hf_effects (key, generation) WHERE generation > 0;

CREATE INDEX ix_effects_call ON hf_effects (scope, call_id) WHERE call_id IS NOT NULL;

CREATE INDEX ix_effects_session ON hf_effects (session_number, number)
WHERE session_number IS NOT NULL;

CREATE INDEX ix_effects_unlinked ON hf_effects (session_id, number)
WHERE unlinked_at IS NOT NULL;

CREATE INDEX ix_effects_item ON hf_effects (item_id, number) WHERE item_id IS NOT NULL;

CREATE INDEX ix_effects_chain ON hf_effects (scope, number)
WHERE session_number IS NULL AND item_id IS NOT NULL;

CREATE INDEX ix_effects_open ON hf_effects (number) WHERE status = 'issued';

CREATE INDEX ix_effects_doubt ON hf_effects (number) WHERE status = 'unknown';

CREATE INDEX ix_effects_failed ON hf_effects (number) WHERE status = 'failed';

-- What was not completed is rare: of one session, and of one tool.
CREATE INDEX ix_effects_rare_session ON hf_effects (session_number, status, number)
WHERE status <> 'completed';

CREATE INDEX ix_effects_rare_tool ON hf_effects (tool, status, number)
WHERE status <> 'completed';

CREATE INDEX ix_effects_tool ON hf_effects (tool, number);

CREATE INDEX ix_effects_idempotency ON hf_effects (idempotency_key);

CREATE TABLE hf_effect_salts (
    number INTEGER PRIMARY KEY AUTOINCREMENT,
    kind TEXT NOT NULL CHECK (kind IN ('own', 'imported', 'key')),
    salt TEXT NOT NULL UNIQUE
);

CREATE TABLE hf_effect_sessions (
    session_number INTEGER PRIMARY KEY,
    salt_number INTEGER NOT NULL
);

CREATE TABLE hf_effect_origins (
    session_number INTEGER NOT NULL,
    position INTEGER NOT NULL,
    origin_id TEXT NOT NULL,
    origin_number INTEGER NOT NULL,
    first_version INTEGER NOT NULL,
    last_version INTEGER NOT NULL,
    PRIMARY KEY (session_number, position)
) WITHOUT ROWID;

CREATE INDEX ix_effect_origins_origin ON hf_effect_origins (origin_number);

--[sqlite]
INSERT INTO hf_effect_salts (kind, salt) VALUES ('own', lower(hex(randomblob(32))));

--[postgres]
INSERT INTO hf_effect_salts (kind, salt)
VALUES ('own', replace(gen_random_uuid()::text || gen_random_uuid()::text, '-', ''));

ALTER TABLE hf_effects SET (fillfactor = 80);

-- hf_effects  the ledger: one row per attempt of an effect, inserted before the attempt is made.
--             Calls with the same key are the same effect; the newest generation of a key counts. A
--             new generation follows a failure, an expiry, or another write in between. Rows are
--             never rolled back
--
-- A call that was answered by the row of another call has a row of its own, with that outcome and
-- with replay_of naming the other, so that the same call id is never run later. It is not an attempt.
-- A replay within one session has the key of the original and generation 0, and is found by its call
-- id only. A replay from another session (an earlier one of the same id, or the origin of a fork) has
-- a key and generation of its own session, where later calls, forks and new sessions of that id look.
--
-- An effect outlives its session: a late retry must still find it, and a new session of the same id
-- lists it. unlinked_at is when its session was deleted; settled effects then keep what decides a
-- retry, and lose arguments, error, note and late.
--
-- root_above is the root of its tree, for an effect of a session below that; NULL for those of a root.
--
-- approval is the decision of a person that a call was issued under: its session and version. An
-- approval is for one call and one effect: attempts under another idempotency key need another.
--
-- undone_by is the effect that undid this one, or 'world': then the store was rolled back as part of a
-- world, and what the effect had done went back with the other systems. is_outside is set for tools
-- that act on what no world rolls back.
--
-- hf_effect_salts     the salts of keys and digests: the store's own, those of imported sessions, and
--                     the mark of the key that replaces them all ('' or no row without one). Every
--                     change adds a row, so the highest number tells whether a cache is current
-- hf_effect_sessions  sessions imported from another store, each with its salt
-- hf_effect_origins   where a fork finds effects from before the fork: the versions it shares with
--                     the sessions it was forked from, the nearest at position 1
--
-- Life: issued, then completed, failed or unknown; unknown until it is verified or resolved. Lock
-- order: the tree, then the effect. No foreign keys: effects and origins outlive the sessions.

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
    root_above TEXT,
    item_id TEXT,
    approval TEXT,
    issued_version INTEGER NOT NULL,
    tool TEXT NOT NULL,
    effect TEXT NOT NULL CHECK (effect IN ('read', 'write', 'mutate')),
    is_irreversible INTEGER NOT NULL CHECK (is_irreversible IN (0, 1)),
    is_outside INTEGER NOT NULL DEFAULT 0 CHECK (is_outside IN (0, 1)),
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

-- Effects of a root alone are found by its number.
CREATE INDEX ix_effects_below ON hf_effects (root_above, status, number)
WHERE root_above IS NOT NULL AND unlinked_at IS NULL;

CREATE INDEX ix_effects_item ON hf_effects (item_id, number) WHERE item_id IS NOT NULL;

CREATE INDEX ix_effects_chain ON hf_effects (scope, number)
WHERE session_number IS NULL AND item_id IS NOT NULL;

CREATE INDEX ix_effects_approval ON hf_effects (approval) WHERE approval IS NOT NULL;

CREATE INDEX ix_effects_open ON hf_effects (number) WHERE status = 'issued';

CREATE INDEX ix_effects_doubt ON hf_effects (number) WHERE status = 'unknown';

CREATE INDEX ix_effects_failed ON hf_effects (number) WHERE status = 'failed';

-- Effects that are not completed are rare: by session, and by tool.
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

-- hf_sessions  one row per session: its identity, its parent and root, its status, its lease, and the
--              version of its newest checkpoint. Every driver raises the fence, which never goes back.
--              The head is a random number that changes with every version. While awaits_turn is 1,
--              every noun is told of the session's next turn, in the transaction that saves it.
--
-- A fork names the session and version it came from.
--
-- A session is active or waiting until it ends; an ended one may be reopened. Deleting it removes the
-- row. A large tree is cancelled or deleted in several transactions: until the last, the cancelled
-- session is `cancelling`, and deleted ones are `deleting`. Lock order: the tree, then its sessions.

--[both]
CREATE TABLE hf_sessions (
    number INTEGER PRIMARY KEY AUTOINCREMENT,
    id TEXT NOT NULL UNIQUE,
    name TEXT,
    parent_id TEXT REFERENCES hf_sessions (id),
    root_id TEXT NOT NULL,
    agent TEXT,
    user_id TEXT,
    status TEXT NOT NULL
        CHECK (status IN (
            'active', 'waiting', 'completed', 'failed', 'cancelled', 'cancelling', 'deleting'
        )),
    version INTEGER NOT NULL DEFAULT 0 CHECK (version >= 0),
    epoch INTEGER NOT NULL DEFAULT 1 CHECK (epoch >= 1),
    head INTEGER NOT NULL,
    origin_number INTEGER,
    origin_version INTEGER,
    metadata BLOB NOT NULL,
    holder TEXT,
    fence INTEGER NOT NULL DEFAULT 0,
    lease_expires_at INTEGER,
    awaits_turn INTEGER NOT NULL DEFAULT 0 CHECK (awaits_turn IN (0, 1)),
    created_at INTEGER NOT NULL,
    updated_at INTEGER NOT NULL,
    last_resumed_at INTEGER NOT NULL
);

CREATE INDEX ix_sessions_status ON hf_sessions (status, number);

CREATE INDEX ix_sessions_agent ON hf_sessions (agent, status, number);

CREATE INDEX ix_sessions_root ON hf_sessions (root_id, number);

-- Of a root alone there is nothing to look for.
CREATE INDEX ix_sessions_below ON hf_sessions ((root_id || ' ' || status), number)
WHERE parent_id IS NOT NULL;

CREATE INDEX ix_sessions_root_agent ON hf_sessions ((root_id || ' ' || agent), status, number)
WHERE agent IS NOT NULL;

CREATE INDEX ix_sessions_parent ON hf_sessions (parent_id) WHERE parent_id IS NOT NULL;

CREATE INDEX ix_sessions_origin ON hf_sessions (origin_number) WHERE origin_number IS NOT NULL;

CREATE INDEX ix_sessions_driven ON hf_sessions (number) WHERE holder IS NOT NULL;

--[postgres]
ALTER TABLE hf_sessions SET (fillfactor = 70);

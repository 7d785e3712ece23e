-- hf_state            one row per tree with shared state: the number of keys, the oldest sequence that
--                     can be read (floor), the highest version of a removed key (new keys start above
--                     it), and a version above which all changes continue, because the tree was
--                     deleted here and imported again (least_version)
-- hf_state_entries    the current value and version of each key. A deleted key stays as a tombstone
--                     (value NULL), so that its versions never repeat
-- hf_state_events     one row per change of a key, numbered by the tree's sequence. A write of the
--                     whole document is one row with the key '', and one for each key that it changed.
--                     value is the value after the change; if it is NULL and the key is not deleted,
--                     it is computed from the row at base and the arguments of the rows in between
-- hf_state_rules      the rule of a key: the JSON Schema that every value matches (sealed), and the
--                     name of its reducer. A rule stays when its key is deleted
-- hf_state_conflicts  compare-and-swap writes that were refused, the last 1,000 of each tree
--
-- No foreign keys: a tree's state is removed with its root session, by one statement per table.
-- Lock order: the tree, then everything here.

--[both]
CREATE TABLE hf_state (
    root_id TEXT PRIMARY KEY,
    keys INTEGER NOT NULL CHECK (keys >= 0),
    floor INTEGER NOT NULL DEFAULT 0 CHECK (floor >= 0),
    forgotten_version INTEGER NOT NULL DEFAULT 0,
    least_version INTEGER NOT NULL DEFAULT 0
);

CREATE TABLE hf_state_entries (
    root_id TEXT NOT NULL,
    key TEXT NOT NULL,
    version INTEGER NOT NULL CHECK (version >= 1),
    value BLOB,
    sequence INTEGER NOT NULL,
    base INTEGER NOT NULL,
    steps INTEGER NOT NULL,
    updated_by TEXT NOT NULL,
    created_at INTEGER NOT NULL,
    updated_at INTEGER NOT NULL,
    PRIMARY KEY (root_id, key)
) WITHOUT ROWID;

CREATE TABLE hf_state_events (
    root_id TEXT NOT NULL,
    sequence INTEGER NOT NULL CHECK (sequence >= 1),
    key TEXT NOT NULL,
    operation TEXT NOT NULL,
    version INTEGER NOT NULL,
    argument BLOB,
    value BLOB,
    base INTEGER NOT NULL,
    is_deleted INTEGER NOT NULL,
    session_id TEXT NOT NULL,
    item_id TEXT,
    idempotency_key TEXT,
    request_digest TEXT,
    created_at INTEGER NOT NULL,
    PRIMARY KEY (root_id, sequence, key)
) WITHOUT ROWID;

CREATE UNIQUE INDEX ix_state_events_key ON hf_state_events (root_id, key, sequence);

CREATE UNIQUE INDEX ix_state_events_idempotency ON hf_state_events (root_id, idempotency_key)
WHERE idempotency_key IS NOT NULL;

CREATE TABLE hf_state_rules (
    root_id TEXT NOT NULL,
    key TEXT NOT NULL,
    json_schema BLOB,
    reducer TEXT CHECK (reducer IN ('last', 'sum', 'min', 'max', 'append', 'add', 'merge')),
    updated_by TEXT NOT NULL,
    updated_at INTEGER NOT NULL,
    PRIMARY KEY (root_id, key),
    CHECK (json_schema IS NOT NULL OR reducer IS NOT NULL)
) WITHOUT ROWID;

CREATE TABLE hf_state_conflicts (
    root_id TEXT NOT NULL,
    number INTEGER NOT NULL,
    key TEXT NOT NULL,
    expected INTEGER NOT NULL,
    current INTEGER NOT NULL,
    attempt INTEGER NOT NULL,
    is_retried INTEGER NOT NULL,
    session_id TEXT NOT NULL,
    created_at INTEGER NOT NULL,
    PRIMARY KEY (root_id, number)
) WITHOUT ROWID;

CREATE INDEX ix_state_conflicts_time ON hf_state_conflicts (created_at, root_id, number);

--[append-only through a door] hf_state_events (root_id, sequence, key)

--[postgres]
ALTER TABLE hf_state_entries SET (fillfactor = 70);

-- hf_sessions      one row per session: who it is, where it stands in its tree, its status, its
--                  lease, and the counter of its checkpoints' versions
-- hf_epochs        where a session was rewound: an epoch begins at first_version and goes on from
--                  target_version; the versions between them stay, aside
-- hf_checkpoints   one row per version. The key is session number * 2^32 + version. Channels are
--                  named in the manifest: a small value stands there itself, any other is a line.
--                  An idempotency key stands once on each line of history; the tree's lock sees to it
-- hf_lines         a list, or a large value, that checkpoints point into. It may begin with pieces
--                  of older lines; behind them come its own items. Lines belong to no session
-- hf_items         the own items of lines, key line * 2^32 + index; a full run of 64 is packed
--                  into one row
-- hf_uses          which session's checkpoints need which line; a line without a use is removed
-- hf_pins, hf_attestations   what people and programs say about checkpoints, beside them
--
-- Lock order: the tree, then its sessions, then lines.

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
        CHECK (status IN ('active', 'waiting', 'completed', 'failed', 'cancelled')),
    version INTEGER NOT NULL DEFAULT 0 CHECK (version >= 0),
    epoch INTEGER NOT NULL DEFAULT 1 CHECK (epoch >= 1),
    head INTEGER NOT NULL,
    origin_number INTEGER,
    origin_version INTEGER,
    metadata BLOB NOT NULL,
    holder TEXT,
    fence INTEGER NOT NULL DEFAULT 0,
    lease_expires_at INTEGER,
    created_at INTEGER NOT NULL,
    updated_at INTEGER NOT NULL,
    last_resumed_at INTEGER NOT NULL
);

CREATE INDEX ix_sessions_status ON hf_sessions (status, number);

CREATE INDEX ix_sessions_agent ON hf_sessions (agent, number);

CREATE INDEX ix_sessions_root ON hf_sessions (root_id, number);

CREATE INDEX ix_sessions_parent ON hf_sessions (parent_id) WHERE parent_id IS NOT NULL;

CREATE INDEX ix_sessions_origin ON hf_sessions (origin_number) WHERE origin_number IS NOT NULL;

CREATE TABLE hf_epochs (
    session_number INTEGER NOT NULL,
    epoch INTEGER NOT NULL,
    first_version INTEGER NOT NULL,
    target_version INTEGER NOT NULL,
    PRIMARY KEY (session_number, epoch)
) WITHOUT ROWID;

CREATE TABLE hf_checkpoints (
    key INTEGER PRIMARY KEY,
    epoch INTEGER NOT NULL,
    kind TEXT NOT NULL CHECK (kind IN (
        'turn', 'iteration_start', 'iteration_end', 'tool_executed', 'llm_response',
        'approval_point', 'state_transition', 'manual_checkpoint', 'error_boundary'
    )),
    iteration INTEGER CHECK (
        (iteration IS NOT NULL) = (kind IN ('iteration_start', 'iteration_end'))
    ),
    item_id TEXT,
    idempotency_key TEXT,
    state_sequence INTEGER NOT NULL,
    manifest BLOB NOT NULL,
    data BLOB,
    metadata BLOB,
    created_at INTEGER NOT NULL
);

CREATE INDEX ix_checkpoints_kind ON hf_checkpoints (kind, created_at);

CREATE INDEX ix_checkpoints_iteration ON hf_checkpoints (key) WHERE iteration IS NOT NULL;

CREATE INDEX ix_checkpoints_idempotency ON hf_checkpoints (idempotency_key, key)
WHERE idempotency_key IS NOT NULL;

CREATE INDEX ix_checkpoints_item ON hf_checkpoints (item_id, key) WHERE item_id IS NOT NULL;

CREATE TABLE hf_lines (
    id INTEGER PRIMARY KEY AUTOINCREMENT,
    base INTEGER NOT NULL,
    pieces BLOB
);

CREATE TABLE hf_items (
    key INTEGER PRIMARY KEY,
    count INTEGER NOT NULL CHECK (count > 0),
    data BLOB NOT NULL
);

CREATE TABLE hf_uses (
    line_id INTEGER NOT NULL,
    session_number INTEGER NOT NULL,
    PRIMARY KEY (line_id, session_number)
) WITHOUT ROWID;

CREATE INDEX ix_uses_session ON hf_uses (session_number, line_id);

CREATE TABLE hf_pins (
    key INTEGER PRIMARY KEY,
    reason BLOB NOT NULL,
    created_at INTEGER NOT NULL
);

CREATE TABLE hf_attestations (
    number INTEGER PRIMARY KEY AUTOINCREMENT,
    key INTEGER NOT NULL,
    evidence BLOB NOT NULL,
    created_at INTEGER NOT NULL
);

CREATE INDEX ix_attestations_key ON hf_attestations (key);

--[sqlite]
CREATE TRIGGER hf_checkpoints_no_update BEFORE UPDATE ON hf_checkpoints
BEGIN SELECT RAISE(ABORT, 'hf_checkpoints is append-only'); END;

CREATE TRIGGER hf_checkpoints_no_delete BEFORE DELETE ON hf_checkpoints
WHEN NOT EXISTS (SELECT 1 FROM hf_doors)
BEGIN SELECT RAISE(ABORT, 'hf_checkpoints is append-only'); END;

CREATE TRIGGER hf_checkpoints_no_replace BEFORE INSERT ON hf_checkpoints
WHEN EXISTS (SELECT 1 FROM hf_checkpoints WHERE key = NEW.key)
BEGIN SELECT RAISE(ABORT, 'hf_checkpoints is append-only'); END;

CREATE TRIGGER hf_lines_no_update BEFORE UPDATE ON hf_lines
BEGIN SELECT RAISE(ABORT, 'hf_lines is append-only'); END;

CREATE TRIGGER hf_lines_no_delete BEFORE DELETE ON hf_lines
WHEN NOT EXISTS (SELECT 1 FROM hf_doors)
BEGIN SELECT RAISE(ABORT, 'hf_lines is append-only'); END;

CREATE TRIGGER hf_lines_no_replace BEFORE INSERT ON hf_lines
WHEN EXISTS (SELECT 1 FROM hf_lines WHERE id = NEW.id)
BEGIN SELECT RAISE(ABORT, 'hf_lines is append-only'); END;

CREATE TRIGGER hf_items_no_update BEFORE UPDATE ON hf_items
BEGIN SELECT RAISE(ABORT, 'hf_items is append-only'); END;

CREATE TRIGGER hf_items_no_delete BEFORE DELETE ON hf_items
WHEN NOT EXISTS (SELECT 1 FROM hf_doors)
BEGIN SELECT RAISE(ABORT, 'hf_items is append-only'); END;

CREATE TRIGGER hf_items_no_replace BEFORE INSERT ON hf_items
WHEN EXISTS (SELECT 1 FROM hf_items WHERE key = NEW.key)
BEGIN SELECT RAISE(ABORT, 'hf_items is append-only'); END;

CREATE TRIGGER hf_uses_no_update BEFORE UPDATE ON hf_uses
BEGIN SELECT RAISE(ABORT, 'hf_uses is append-only'); END;

CREATE TRIGGER hf_uses_no_delete BEFORE DELETE ON hf_uses
WHEN NOT EXISTS (SELECT 1 FROM hf_doors)
BEGIN SELECT RAISE(ABORT, 'hf_uses is append-only'); END;

--[postgres]
CREATE TRIGGER no_update BEFORE UPDATE ON hf_checkpoints
FOR EACH ROW EXECUTE FUNCTION hf_refuse_update();

CREATE TRIGGER no_delete BEFORE DELETE ON hf_checkpoints
FOR EACH ROW EXECUTE FUNCTION hf_refuse_outside();

CREATE TRIGGER no_update BEFORE UPDATE ON hf_lines
FOR EACH ROW EXECUTE FUNCTION hf_refuse_update();

CREATE TRIGGER no_delete BEFORE DELETE ON hf_lines
FOR EACH ROW EXECUTE FUNCTION hf_refuse_outside();

CREATE TRIGGER no_update BEFORE UPDATE ON hf_items
FOR EACH ROW EXECUTE FUNCTION hf_refuse_update();

CREATE TRIGGER no_delete BEFORE DELETE ON hf_items
FOR EACH ROW EXECUTE FUNCTION hf_refuse_outside();

CREATE TRIGGER no_update BEFORE UPDATE ON hf_uses
FOR EACH ROW EXECUTE FUNCTION hf_refuse_update();

CREATE TRIGGER no_delete BEFORE DELETE ON hf_uses
FOR EACH ROW EXECUTE FUNCTION hf_refuse_outside();

CREATE TRIGGER no_truncate BEFORE TRUNCATE ON hf_checkpoints
FOR EACH STATEMENT EXECUTE FUNCTION hf_refuse_update();

CREATE TRIGGER no_truncate BEFORE TRUNCATE ON hf_lines
FOR EACH STATEMENT EXECUTE FUNCTION hf_refuse_update();

CREATE TRIGGER no_truncate BEFORE TRUNCATE ON hf_items
FOR EACH STATEMENT EXECUTE FUNCTION hf_refuse_update();

CREATE TRIGGER no_truncate BEFORE TRUNCATE ON hf_uses
FOR EACH STATEMENT EXECUTE FUNCTION hf_refuse_update();

-- Items are MessagePack, often compressed already: PostgreSQL need not try again.
ALTER TABLE hf_items ALTER COLUMN data SET STORAGE EXTERNAL;

-- A single item stays in its row where it fits: beside the table it would be three rows, not one.
ALTER TABLE hf_items SET (toast_tuple_target = 8160);

ALTER TABLE hf_sessions SET (fillfactor = 70);

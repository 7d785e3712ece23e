-- hf_epochs        where a session was rewound: an epoch begins at first_version and continues from
--                  target_version; the versions between them are kept, off the path
-- hf_checkpoints   one row per version. The key is session number * 2^28 + version. The manifest maps
--                  channels to values: a small one is stored inline, any other in a line. The tree's
--                  lock makes idempotency keys unique on each path of history
-- hf_lines         a list, or a large value, that checkpoints refer to. It may begin with pieces of
--                  older lines, followed by its own items. Lines belong to no session
-- hf_items         the own items of lines, key line * 2^20 + index; a full run of 64 is packed
--                  into one row. A list that has filled a line continues in another
-- hf_uses          which session's checkpoints need which line; a line without a use is removed
-- hf_pins, hf_attestations   what people and programs say about checkpoints
--
-- A checkpoint is written once and removed only when its session is pruned or deleted.
-- Lock order: the tree, then its sessions, then lines.
--
-- Keys have 63 bits. 2^35 sessions are 54 new ones per second for 20 years; 2^28 versions of one are
-- one per second for 8 years. 2^43 lines are 13,900 per second for 20 years.
--
-- The views hf_…_view decode the keys for people; no code reads them.

--[both]
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

CREATE VIEW hf_checkpoints_view AS
SELECT s.id AS session_id, c.key / 268435456 AS session_number, c.key % 268435456 AS version,
    c.epoch, c.kind, c.iteration, c.item_id, c.idempotency_key, c.state_sequence, c.created_at,
    p.key IS NOT NULL AS is_pinned,
    (SELECT count(*) FROM hf_attestations a WHERE a.key = c.key) AS attestations
FROM hf_checkpoints c
LEFT JOIN hf_sessions s ON s.number = c.key / 268435456
LEFT JOIN hf_pins p ON p.key = c.key;

CREATE VIEW hf_items_view AS
SELECT key / 1048576 AS line_id, key % 1048576 AS first_index, count, length(data) AS bytes
FROM hf_items;

--[append-only] hf_checkpoints (key)
--[append-only] hf_lines (id)
--[append-only] hf_items (key)
--[append-only] hf_uses

--[postgres]
-- Items are MessagePack, often compressed already: PostgreSQL need not try.
ALTER TABLE hf_items ALTER COLUMN data SET STORAGE EXTERNAL;

-- A single item stays in its row if it fits: in the TOAST table it would be three rows, not one.
ALTER TABLE hf_items SET (toast_tuple_target = 8160);

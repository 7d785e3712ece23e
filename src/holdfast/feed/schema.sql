-- hf_trees   one row per session tree, named by its root. It is the lock of the tree: every write
--            to a session locks this row first, several in id order, so that composed operations
--            cannot deadlock. It also has the tree's counters. Events up to the floor were pruned;
--            the last of them in the order of hf_events had the pruned_number (on PostgreSQL, the
--            highest of their transactions is the pruned_transaction). pruned_in tells which prune
--            removed them: its number in the store (on PostgreSQL, its transaction).
-- hf_events  the feed: one row per committed change, with the next position of its tree. Because
--            the tree's row stays locked until COMMIT, positions are dense and in commit order.
--            For readers of all trees SQLite numbers them in commit order; PostgreSQL, which cannot,
--            records the transaction of each (places.py explains how they are read). Events of a
--            deleted session are kept, with empty data.
--
-- Lock order: trees by id, before anything else.

--[both]
CREATE TABLE hf_trees (
    root_id TEXT PRIMARY KEY,
    position INTEGER NOT NULL DEFAULT 0 CHECK (position >= 0),
    sequence INTEGER NOT NULL DEFAULT 0 CHECK (sequence >= 0),
    floor INTEGER NOT NULL DEFAULT 0 CHECK (floor >= 0 AND floor <= position),
    pruned_in INTEGER NOT NULL DEFAULT 0
);

CREATE INDEX ix_trees_pruned_in ON hf_trees (pruned_in) WHERE pruned_in > 0;

--[sqlite]
ALTER TABLE hf_trees ADD COLUMN pruned_number INTEGER NOT NULL DEFAULT 0;

CREATE INDEX ix_trees_pruned ON hf_trees (pruned_number) WHERE pruned_number > 0;

CREATE TABLE hf_events (
    number INTEGER PRIMARY KEY AUTOINCREMENT,
    root_id TEXT NOT NULL,
    position INTEGER NOT NULL,
    session_id TEXT NOT NULL,
    kind TEXT NOT NULL,
    data BLOB NOT NULL,
    created_at INTEGER NOT NULL,
    UNIQUE (root_id, position)
);

--[postgres]
ALTER TABLE hf_trees ADD COLUMN pruned_transaction INTEGER NOT NULL DEFAULT 0;

CREATE INDEX ix_trees_pruned ON hf_trees (pruned_transaction) WHERE pruned_transaction > 0;

CREATE TABLE hf_events (
    root_id TEXT NOT NULL,
    position INTEGER NOT NULL,
    session_id TEXT NOT NULL,
    kind TEXT NOT NULL,
    data BLOB NOT NULL,
    created_at INTEGER NOT NULL,
    transaction_id xid8 NOT NULL DEFAULT pg_current_xact_id(),
    PRIMARY KEY (root_id, position)
);

CREATE INDEX ix_events_transaction ON hf_events (transaction_id);

--[both]
-- The events of a session, to empty them when it is deleted.
CREATE INDEX ix_events_session ON hf_events (session_id, position);

--[append-only but for updates through a door] hf_events (root_id, position)

--[postgres]
ALTER TABLE hf_trees SET (fillfactor = 50);

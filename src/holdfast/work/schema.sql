-- hf_work   one row per work item: its input, its holder and its result. The number is the order of
--           submission and breaks ties of priority. A delayed item is `scheduled` and one parked for
--           a person is `review`; the API shows both as pending. Every claim raises the fence, which
--           never decreases. An attempt that drives its session keeps the fence of that session's
--           lease in driving_fence, until the next claim. A lease cannot expire before sweep_at, the
--           order in which sweeps read; a heartbeat moves that only when it is near.
--           waits_for_effect is the effect that must be resolved before an item in review is requeued. claim_id names the last claim of an item,
--           so that the claim's answer can be read again if the connection was lost; only PostgreSQL
--           needs it. first_id is the first item of a chain of redrives, NULL in that item itself;
--           the keys of an item's effects are derived from it.
-- hf_attempts   the last failed or expired attempts of an item: when, who, why. They are deleted
--           with their item, hence the foreign key.
--
-- An item with a session changes its state only under its tree's lock, except that claims lease
-- pending items without it. Lock order: the tree, then items by number, then sessions.

--[both]
CREATE TABLE hf_work (
    number INTEGER PRIMARY KEY AUTOINCREMENT,
    id TEXT NOT NULL UNIQUE,
    session_number INTEGER,
    session_id TEXT,
    root_id TEXT,
    type TEXT NOT NULL,
    queue TEXT NOT NULL,
    state TEXT NOT NULL CHECK (state IN (
        'scheduled', 'pending', 'in_progress', 'review', 'completed', 'failed', 'cancelled'
    )),
    priority INTEGER NOT NULL,
    key TEXT,
    on_crash TEXT NOT NULL CHECK (on_crash IN ('retry', 'fail', 'review')),
    holder TEXT,
    last_holder TEXT,
    fence INTEGER NOT NULL DEFAULT 0,
    driving_fence INTEGER,
    waits_for_effect TEXT,
    lease_acquired_at INTEGER,
    lease_expires_at INTEGER,
    heartbeat_at INTEGER,
    sweep_at INTEGER,
    cancel_requested INTEGER NOT NULL DEFAULT 0 CHECK (cancel_requested IN (0, 1)),
    retry_count INTEGER NOT NULL DEFAULT 0,
    max_retries INTEGER NOT NULL CHECK (max_retries >= 0),
    attempts INTEGER NOT NULL DEFAULT 0,
    failures INTEGER NOT NULL DEFAULT 0,
    rescues INTEGER NOT NULL DEFAULT 0,
    releases INTEGER NOT NULL DEFAULT 0,
    redriven_from TEXT,
    first_id TEXT,
    claim_id TEXT,
    input BLOB NOT NULL,
    output BLOB,
    error BLOB,
    progress BLOB,
    available_at INTEGER NOT NULL,
    created_at INTEGER NOT NULL,
    started_at INTEGER,
    completed_at INTEGER,
    updated_at INTEGER NOT NULL,
    CHECK (retry_count >= 0 AND retry_count <= max_retries),
    CHECK ((session_number IS NULL) = (session_id IS NULL)),
    CHECK ((session_number IS NULL) = (root_id IS NULL)),
    CHECK ((state = 'in_progress') = (holder IS NOT NULL)),
    CHECK ((state = 'in_progress') = (lease_expires_at IS NOT NULL)),
    CHECK (state <> 'in_progress' OR (sweep_at IS NOT NULL AND sweep_at <= lease_expires_at)),
    CHECK ((state IN ('completed', 'failed', 'cancelled')) = (completed_at IS NOT NULL))
);

CREATE TABLE hf_attempts (
    work_number INTEGER NOT NULL REFERENCES hf_work (number) ON DELETE CASCADE,
    attempt INTEGER NOT NULL,
    holder TEXT,
    fence INTEGER NOT NULL,
    reason TEXT NOT NULL,
    error BLOB NOT NULL,
    ended_at INTEGER NOT NULL,
    PRIMARY KEY (work_number, attempt)
) WITHOUT ROWID;

-- Ready items in the order of claims: of one queue, and of all. Every number is positive; that it
-- is asked for keeps PostgreSQL from reading all queues for a claim of one in a new database.
CREATE INDEX ix_work_ready ON hf_work (queue, priority DESC, number) WHERE state = 'pending';

CREATE INDEX ix_work_ready_all ON hf_work (priority DESC, number)
WHERE state = 'pending' AND number > 0;

CREATE INDEX ix_work_scheduled ON hf_work (available_at, number) WHERE state = 'scheduled';

CREATE INDEX ix_work_sweep ON hf_work (sweep_at, number) WHERE state = 'in_progress';

CREATE INDEX ix_work_held ON hf_work (holder, number) WHERE holder IS NOT NULL;

CREATE INDEX ix_work_waits ON hf_work (waits_for_effect) WHERE waits_for_effect IS NOT NULL;

CREATE INDEX ix_work_finished ON hf_work (completed_at, number) WHERE completed_at IS NOT NULL;

-- For listings, newest first within each state.
CREATE INDEX ix_work_state ON hf_work (state, number);

CREATE INDEX ix_work_type ON hf_work (type, state, number);

CREATE INDEX ix_work_queue ON hf_work (queue, state, number);

CREATE INDEX ix_work_session ON hf_work (session_number, state, number)
WHERE session_number IS NOT NULL;

CREATE INDEX ix_work_root ON hf_work (root_id, state, number) WHERE root_id IS NOT NULL;

CREATE UNIQUE INDEX ux_work_key ON hf_work (queue, key)
WHERE key IS NOT NULL AND state IN ('scheduled', 'pending', 'in_progress', 'review');

CREATE UNIQUE INDEX ux_work_redriven ON hf_work (redriven_from) WHERE redriven_from IS NOT NULL;

CREATE INDEX ix_work_first ON hf_work (first_id) WHERE first_id IS NOT NULL;

--[append-only but for updates] hf_work (number), skips taken keys

--[sqlite]
CREATE TRIGGER hf_work_no_update BEFORE UPDATE ON hf_work
WHEN OLD.state IN ('completed', 'failed', 'cancelled')
BEGIN SELECT RAISE(ABORT, 'a finished item of hf_work is immutable'); END;

--[postgres]
CREATE FUNCTION hf_refuse_finished() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    RAISE EXCEPTION 'a finished item of % is immutable', TG_TABLE_NAME
    USING ERRCODE = 'integrity_constraint_violation';
END
$$;

CREATE TRIGGER no_update BEFORE UPDATE ON hf_work
FOR EACH ROW WHEN (OLD.state IN ('completed', 'failed', 'cancelled'))
EXECUTE FUNCTION hf_refuse_finished();

-- Most heartbeats change no indexed column: free space on the page allows HOT updates.
ALTER TABLE hf_work SET (
    fillfactor = 75, autovacuum_vacuum_scale_factor = 0.01, autovacuum_vacuum_cost_delay = 0
);

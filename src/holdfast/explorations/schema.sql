-- hf_worlds             one row per session that a world or an exploration writes to: what was
--                       explored (settings), the rollback in progress (intent), which a
--                       process that opens the world again finishes, and how far an exploration
--                       has come, so that a list reads nothing else
-- hf_world_checkpoints  checkpoints from which another process can restore all systems of the world
-- hf_world_states       the states that an exploration saw, in order; body has the observations, and
--                       what is to be tried there
-- hf_world_steps        the log of actions: what was tried in which state, and where it led. to_id is
--                       NULL if the action was not possible; has_findings marks the steps whose body
--                       tells of a violation or a warning, so that these are found among many
-- hf_world_frontier     what the workers of an exploration have to try: one row per action in a state,
--                       added together with the work item that names it, and removed with its step.
--                       deaths counts the attempts of that item that died with this entry as the
--                       first one left
--
-- Bodies are sealed. Rows are written by the holder of the session's lease, or by a worker that holds
-- the work item whose entries they are about. Lock order: the tree, items, then everything here.

--[both]
CREATE TABLE hf_worlds (
    session_number INTEGER NOT NULL,
    settings BLOB,
    intent BLOB,
    states INTEGER NOT NULL DEFAULT 0 CHECK (states >= 0),
    steps INTEGER NOT NULL DEFAULT 0 CHECK (steps >= 0),
    violations INTEGER NOT NULL DEFAULT 0 CHECK (violations >= 0),
    PRIMARY KEY (session_number)
) WITHOUT ROWID;

CREATE INDEX ix_worlds_explored ON hf_worlds (session_number) WHERE settings IS NOT NULL;

CREATE TABLE hf_world_checkpoints (
    number INTEGER PRIMARY KEY AUTOINCREMENT,
    session_number INTEGER NOT NULL,
    id TEXT NOT NULL,
    name TEXT NOT NULL,
    body BLOB NOT NULL,
    created_at INTEGER NOT NULL
);

CREATE UNIQUE INDEX ix_world_checkpoints_id ON hf_world_checkpoints (session_number, id);

CREATE TABLE hf_world_states (
    number INTEGER PRIMARY KEY AUTOINCREMENT,
    session_number INTEGER NOT NULL,
    id TEXT NOT NULL,
    body BLOB NOT NULL
);

CREATE UNIQUE INDEX ix_world_states_id ON hf_world_states (session_number, id);

CREATE INDEX ix_world_states_order ON hf_world_states (session_number, number);

CREATE TABLE hf_world_steps (
    number INTEGER PRIMARY KEY AUTOINCREMENT,
    session_number INTEGER NOT NULL,
    from_id TEXT NOT NULL,
    candidate INTEGER NOT NULL CHECK (candidate >= 0),
    to_id TEXT,
    has_findings INTEGER NOT NULL DEFAULT 0 CHECK (has_findings IN (0, 1)),
    body BLOB NOT NULL
);

CREATE UNIQUE INDEX ix_world_steps_candidate
ON hf_world_steps (session_number, from_id, candidate);

CREATE INDEX ix_world_steps_order ON hf_world_steps (session_number, number);

CREATE INDEX ix_world_steps_findings ON hf_world_steps (session_number, number)
WHERE has_findings = 1;

CREATE TABLE hf_world_frontier (
    number INTEGER PRIMARY KEY AUTOINCREMENT,
    session_number INTEGER NOT NULL,
    from_id TEXT NOT NULL,
    candidate INTEGER NOT NULL CHECK (candidate >= 0),
    deaths INTEGER NOT NULL DEFAULT 0 CHECK (deaths >= 0)
);

CREATE UNIQUE INDEX ix_world_frontier_candidate
ON hf_world_frontier (session_number, from_id, candidate);

-- Holdfast, the ground every noun stands on.
--
-- hf_meta        facts about this store: its id, and on SQLite when the machine booted
-- hf_migrations  which migrations were applied, in order
-- hf_writers     one row per connection that writes; its batch number is raised in every write
--                transaction, so that a COMMIT without an answer can be settled afterwards
--
-- A section begins with a line naming the databases it is for; a statement ends with `;` and an
-- empty line.

--[both]
CREATE TABLE hf_meta (
    name TEXT PRIMARY KEY,
    value TEXT NOT NULL
);

CREATE TABLE hf_migrations (
    version INTEGER PRIMARY KEY,
    name TEXT NOT NULL,
    applied_at INTEGER NOT NULL
);

--[sqlite]
CREATE TABLE hf_writers (
    id TEXT PRIMARY KEY,
    batch INTEGER NOT NULL,
    updated_at INTEGER NOT NULL
);

--[postgres]
-- The row is updated in every transaction: room on its page keeps these updates in place.
CREATE TABLE hf_writers (
    id TEXT PRIMARY KEY,
    batch BIGINT NOT NULL,
    updated_at BIGINT NOT NULL
) WITH (fillfactor = 20, autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 1000);

-- Statement time as integer milliseconds. It is STABLE, so that it can bound an index scan; a test
-- clock overrides it for one transaction.
CREATE FUNCTION hf_now() RETURNS BIGINT LANGUAGE sql STABLE PARALLEL SAFE AS $$
    SELECT coalesce(
        nullif(current_setting('holdfast.now_ms', true), '')::bigint,
        (extract(epoch FROM statement_timestamp()) * 1000)::bigint
    )
$$;

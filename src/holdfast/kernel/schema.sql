-- The tables of the kernel. Each noun has its own schema.sql beside its code; together, in the order
-- of the store's list of nouns, they are format 1.
--
-- hf_meta        facts about this store: its id, and on SQLite when the machine booted
-- hf_migrations  which migrations were applied, in order
-- hf_writers     one row per connection that writes; its batch number is incremented in every write
--                transaction, so that a COMMIT without an answer can be settled afterwards
-- hf_doors       empty except inside operations that may remove history or pack items: they insert a
--                row, delete, and remove the row before COMMIT, so that no other transaction sees it
--
-- Times are milliseconds since 1970, UTC. BLOBs are MessagePack with a checksum, encrypted if the store
-- has a cipher. Row numbers are never reused.
--
-- There are foreign keys only where rows are created and removed together: a session's parent, and the
-- attempts of a work item. Elsewhere there are none, on purpose: effects, spend and events outlive the
-- session they name, and lines belong to many. Each noun removes its rows in the transaction that
-- deletes the session, under the tree's lock, which also prevents new rows; a foreign key would look
-- up and lock the session's row once more for every row written.
--
-- A section begins with a line naming the databases it is for; a statement ends with `;` and an
-- empty line. A line `--[append-only] table (key)` stands for triggers that refuse to update,
-- delete or replace its rows, except for deletion through a door. A row whose key, or any other unique
-- key, is taken is refused whatever the statement says about conflicts; or with `skips taken keys`
-- not inserted, where statements of ours say ON CONFLICT DO NOTHING.

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

CREATE TABLE hf_doors (
    name TEXT PRIMARY KEY
);

CREATE TABLE hf_writers (
    id TEXT PRIMARY KEY,
    batch INTEGER NOT NULL,
    updated_at INTEGER NOT NULL
);

--[postgres]
-- The row is updated in every transaction: room on its page keeps these updates in place.
ALTER TABLE hf_writers SET (
    fillfactor = 20, autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 1000
);

-- Statement time as integer milliseconds. It is STABLE, so that it can bound an index scan; a test
-- clock overrides it for one transaction.
CREATE FUNCTION hf_now() RETURNS BIGINT LANGUAGE sql STABLE PARALLEL SAFE AS $$
    SELECT coalesce(
        nullif(current_setting('holdfast.now_ms', true), '')::bigint,
        (extract(epoch FROM statement_timestamp()) * 1000)::bigint
    )
$$;

CREATE FUNCTION hf_refuse_always() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    RAISE EXCEPTION '% is append-only', TG_TABLE_NAME
    USING ERRCODE = 'integrity_constraint_violation';
END
$$;

CREATE FUNCTION hf_refuse_outside() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    IF EXISTS (SELECT 1 FROM hf_doors) THEN
        RETURN coalesce(NEW, OLD);
    END IF;
    RAISE EXCEPTION '% is append-only', TG_TABLE_NAME
    USING ERRCODE = 'integrity_constraint_violation';
END
$$;

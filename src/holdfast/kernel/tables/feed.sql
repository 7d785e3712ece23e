-- hf_trees   one row per session tree, named by its root. It is the lock of the tree: every write
--            that touches a session locks this row first, several in id order, so that composed
--            operations cannot deadlock. It also counts the tree's positions and sequences.
-- hf_events  the feed: one row per committed change, with the next position of its tree. Because
--            the tree's row stays locked until COMMIT, positions are dense and in commit order.
--            Events of a deleted session stay, with empty data.
-- hf_doors   empty but inside the operations that may remove history or pack items: they open their
--            door, delete, and close it again before COMMIT, so that nobody else ever sees it open.

--[both]
CREATE TABLE hf_trees (
    root_id TEXT PRIMARY KEY,
    position INTEGER NOT NULL DEFAULT 0 CHECK (position >= 0),
    sequence INTEGER NOT NULL DEFAULT 0 CHECK (sequence >= 0)
);

CREATE TABLE hf_events (
    root_id TEXT NOT NULL,
    position INTEGER NOT NULL,
    session_id TEXT NOT NULL,
    kind TEXT NOT NULL,
    data BLOB NOT NULL,
    created_at INTEGER NOT NULL,
    PRIMARY KEY (root_id, position)
) WITHOUT ROWID;

CREATE TABLE hf_doors (
    name TEXT PRIMARY KEY
);

--[sqlite]
CREATE TRIGGER hf_events_no_update BEFORE UPDATE ON hf_events
WHEN NOT EXISTS (SELECT 1 FROM hf_doors)
BEGIN SELECT RAISE(ABORT, 'hf_events is append-only'); END;

CREATE TRIGGER hf_events_no_delete BEFORE DELETE ON hf_events
WHEN NOT EXISTS (SELECT 1 FROM hf_doors)
BEGIN SELECT RAISE(ABORT, 'hf_events is append-only'); END;

CREATE TRIGGER hf_events_no_replace BEFORE INSERT ON hf_events
WHEN EXISTS (SELECT 1 FROM hf_events WHERE root_id = NEW.root_id AND position = NEW.position)
BEGIN SELECT RAISE(ABORT, 'hf_events is append-only'); END;

--[postgres]
CREATE FUNCTION hf_refuse_update() RETURNS trigger LANGUAGE plpgsql AS $$
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

CREATE TRIGGER no_update BEFORE UPDATE ON hf_events
FOR EACH ROW EXECUTE FUNCTION hf_refuse_outside();

CREATE TRIGGER no_delete BEFORE DELETE ON hf_events
FOR EACH ROW EXECUTE FUNCTION hf_refuse_outside();

CREATE TRIGGER no_truncate BEFORE TRUNCATE ON hf_events
FOR EACH STATEMENT EXECUTE FUNCTION hf_refuse_update();

ALTER TABLE hf_trees SET (fillfactor = 50);

-- hf_tokens      who may use a server of this store: a name, what it permits, the tree it is limited to,
--                and the SHA-256 of its secret, which is stored nowhere. A revoked or expired token is
--                refused; its row goes a month later, and one of a deleted tree at once
-- hf_audit       what was decided by people and administrators, numbered without holes. Each digest is
--                over the record and the digest before it, so that a change shows. Ids only: no
--                payloads, no secrets
-- hf_audit_head  the last number and digest, in one row; it is locked for every new record
--
-- Lock order: the tree, then tokens, then the audit's head, which is last of all.

--[both]
CREATE TABLE hf_tokens (
    number INTEGER PRIMARY KEY AUTOINCREMENT,
    id TEXT NOT NULL UNIQUE,
    name TEXT NOT NULL,
    digest TEXT NOT NULL UNIQUE,
    permission TEXT NOT NULL CHECK (permission IN ('read', 'write', 'approve', 'admin')),
    root_id TEXT,
    created_by TEXT,
    created_at INTEGER NOT NULL,
    expires_at INTEGER,
    revoked_at INTEGER
);

CREATE UNIQUE INDEX ix_tokens_name ON hf_tokens (name) WHERE revoked_at IS NULL;

CREATE INDEX ix_tokens_root ON hf_tokens (root_id) WHERE root_id IS NOT NULL;

CREATE TABLE hf_audit (
    number INTEGER PRIMARY KEY,
    actor TEXT NOT NULL,
    token_id TEXT,
    action TEXT NOT NULL,
    subject TEXT,
    reason TEXT,
    count INTEGER NOT NULL CHECK (count >= 1),
    created_at INTEGER NOT NULL,
    digest TEXT NOT NULL
);

CREATE TABLE hf_audit_head (
    id INTEGER PRIMARY KEY CHECK (id = 1),
    number INTEGER NOT NULL,
    digest TEXT NOT NULL
);

--[append-only] hf_audit (number)

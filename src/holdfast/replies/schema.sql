-- hf_replies  the outcome of a request, by who asked (scope) and under which key, so that a request
--             that is repeated is answered and not run again. A lane, which sends one request at a
--             time, has one row with the key '': the outcome of its last request, by its number.
--             Number 0 is a request that has not succeeded yet. A lane's row stays, without the
--             outcome, when the session that the request was about is deleted.
--
-- Kept for 24 hours. Lock order: the tree of the session, then the reply.

--[both]
CREATE TABLE hf_replies (
    scope TEXT NOT NULL,
    key TEXT NOT NULL,
    number INTEGER NOT NULL CHECK (number >= 0),
    digest TEXT NOT NULL,
    outcome BLOB,
    session_id TEXT,
    created_at INTEGER NOT NULL,
    PRIMARY KEY (scope, key),
    CHECK (number > 0 OR outcome IS NULL),
    CHECK (key = '' OR number = 0 OR (number = 1 AND outcome IS NOT NULL))
) WITHOUT ROWID;

CREATE INDEX ix_replies_created ON hf_replies (created_at);

CREATE INDEX ix_replies_session ON hf_replies (session_id) WHERE session_id IS NOT NULL;

--[postgres]
ALTER TABLE hf_replies SET (fillfactor = 70);

-- hf_asks       one row per request to another agent. It is written before the request is sent, so no
--               answer can precede it; its number is the order of dispatch. The work of the peer is a
--               session with the same id. An ask without a session was made by another caller.
--               It is open until it has an answer, which is stored once: whatever comes later is kept
--               in `late` and changes nothing. pause_number is the pause that collects the answer,
--               NULL until the session pauses. route is NULL if the row itself is the delivery: a
--               work item. Otherwise it names the transport and the agent whose instances send what
--               concerns the ask, and remote_store is the store at the other end, once it is known.
--               An ask that came from another store has the id it has there in origin_id; it is
--               answered here like any other, and its answer is sent back. heard is the number of
--               the last progress that came through the transport. cancel_key is a secret of a call
--               that a transport carries: its request has the digest, its cancel the key itself.
-- hf_pauses     one row per pause of a session; `generation` counts them. While it is `waiting`, it
--               counts the asks that are open and those answered `ok`; need is how many of the latter
--               it waits for, NULL for all. The answer that meets the need makes it `ready`, once, and
--               submits the work item that resumes the session. It is `resumed` when that item drives
--               the session; it is `closed` by the next turn, the next pause, the end of the session
--               or the end of that item.
-- hf_outbox     messages to be sent through a transport: one row per message, written with what it
--               tells, and removed when the other end has confirmed it. Until then it is due again
--               at due_at; a sender that takes it puts that off, so that no other sends it too, and
--               is recognised by `attempts`. A request has its body in its ask.
-- hf_artifacts  named outputs of a session, numbered by version. item_id and fence are the attempt
--               that made it: another attempt that makes it again, before a turn was saved, replaces
--               it.
--
-- asked_version and made_version are the newest version of the session at that moment. What a rewind
-- leaves behind is_abandoned: it does not go out with the session's answer.
--
-- All of them change only under the lock of their tree. Rows of sessions that were deleted are removed.

--[both]
CREATE TABLE hf_asks (
    number INTEGER PRIMARY KEY AUTOINCREMENT,
    id TEXT NOT NULL UNIQUE,
    session_number INTEGER,
    session_id TEXT,
    root_id TEXT NOT NULL,
    agent TEXT NOT NULL,
    user_id TEXT,
    route TEXT,
    remote_store TEXT,
    origin_id TEXT,
    cancel_key TEXT,
    asked_version INTEGER NOT NULL DEFAULT 0,
    is_abandoned INTEGER NOT NULL DEFAULT 0 CHECK (is_abandoned IN (0, 1)),
    heard INTEGER NOT NULL DEFAULT 0,
    state TEXT NOT NULL CHECK (state IN ('open', 'ok', 'error', 'timeout', 'cancelled')),
    pause_number INTEGER,
    timeout_ms INTEGER CHECK (timeout_ms >= 0),
    deadline_at INTEGER,
    input BLOB NOT NULL,
    correlation BLOB NOT NULL,
    progress BLOB,
    answer BLOB,
    late BLOB,
    created_at INTEGER NOT NULL,
    answered_at INTEGER,
    late_at INTEGER,
    closed_at INTEGER,
    CHECK ((session_number IS NULL) = (session_id IS NULL)),
    CHECK (remote_store IS NULL OR route IS NOT NULL),
    CHECK (origin_id IS NULL OR remote_store IS NOT NULL),
    CHECK ((state = 'open') = (answered_at IS NULL)),
    CHECK ((state = 'open') = (answer IS NULL)),
    CHECK (state <> 'open' OR closed_at IS NULL)
);

CREATE INDEX ix_asks_session ON hf_asks (session_number, number) WHERE session_number IS NOT NULL;

-- For listings, in the order of dispatch within each state.
CREATE INDEX ix_asks_state ON hf_asks (state, number);

CREATE INDEX ix_asks_root ON hf_asks (root_id, state, number);

CREATE INDEX ix_asks_root_agent ON hf_asks ((root_id || ' ' || agent), state, number);

CREATE INDEX ix_asks_agent ON hf_asks (agent, state, number);

CREATE INDEX ix_asks_due ON hf_asks (deadline_at, number)
WHERE state = 'open' AND deadline_at IS NOT NULL;

CREATE INDEX ix_asks_closed ON hf_asks (closed_at, number) WHERE closed_at IS NOT NULL;

CREATE TABLE hf_pauses (
    number INTEGER PRIMARY KEY AUTOINCREMENT,
    id TEXT NOT NULL UNIQUE,
    session_number INTEGER NOT NULL,
    session_id TEXT NOT NULL,
    root_id TEXT NOT NULL,
    generation INTEGER NOT NULL CHECK (generation >= 1),
    agent TEXT NOT NULL,
    reason TEXT NOT NULL CHECK (reason IN ('peers', 'approval', 'time')),
    state TEXT NOT NULL
        CHECK (state IN ('waiting', 'ready', 'resumed', 'closed', 'cancelled')),
    need INTEGER,
    keeps_rest INTEGER NOT NULL CHECK (keeps_rest IN (0, 1)),
    open_asks INTEGER NOT NULL CHECK (open_asks >= 0),
    ok_asks INTEGER NOT NULL CHECK (ok_asks >= 0),
    wakes_at INTEGER,
    context BLOB NOT NULL,
    question BLOB,
    decision BLOB,
    created_at INTEGER NOT NULL,
    ready_at INTEGER,
    closed_at INTEGER,
    UNIQUE (session_number, generation),
    CHECK ((state IN ('closed', 'cancelled')) = (closed_at IS NOT NULL))
);

-- A session has one pause at a time.
CREATE UNIQUE INDEX ux_pauses_session ON hf_pauses (session_number)
WHERE state IN ('waiting', 'ready', 'resumed');

CREATE INDEX ix_pauses_state ON hf_pauses (state, number);

CREATE INDEX ix_pauses_root ON hf_pauses (root_id, state, number);

CREATE INDEX ix_pauses_root_agent
ON hf_pauses ((root_id || ' ' || agent), reason, state, number);

CREATE INDEX ix_pauses_root_reason ON hf_pauses ((root_id || ' ' || reason), state, number);

CREATE INDEX ix_pauses_agent ON hf_pauses (agent, state, number);

CREATE INDEX ix_pauses_agent_reason ON hf_pauses ((agent || ' ' || reason), state, number);

CREATE INDEX ix_pauses_reason ON hf_pauses (reason, state, number);

CREATE INDEX ix_pauses_closed ON hf_pauses (closed_at, number) WHERE closed_at IS NOT NULL;

CREATE TABLE hf_outbox (
    number INTEGER PRIMARY KEY AUTOINCREMENT,
    kind TEXT NOT NULL CHECK (kind IN ('request', 'answer', 'progress', 'cancel')),
    ask_id TEXT NOT NULL,
    route TEXT NOT NULL,
    address TEXT NOT NULL,
    body BLOB,
    attempts INTEGER NOT NULL DEFAULT 0,
    due_at INTEGER NOT NULL,
    created_at INTEGER NOT NULL
);

CREATE INDEX ix_outbox_due ON hf_outbox (route, due_at, number);

CREATE INDEX ix_outbox_ask ON hf_outbox (ask_id);

CREATE INDEX ix_outbox_created ON hf_outbox (created_at);

CREATE TABLE hf_artifacts (
    number INTEGER PRIMARY KEY AUTOINCREMENT,
    session_number INTEGER NOT NULL,
    session_id TEXT NOT NULL,
    name TEXT NOT NULL,
    version INTEGER NOT NULL CHECK (version >= 1),
    media_type TEXT NOT NULL,
    uri TEXT,
    data BLOB,
    is_returned INTEGER NOT NULL CHECK (is_returned IN (0, 1)),
    item_id TEXT,
    fence INTEGER,
    made_version INTEGER NOT NULL DEFAULT 0,
    is_abandoned INTEGER NOT NULL DEFAULT 0 CHECK (is_abandoned IN (0, 1)),
    created_at INTEGER NOT NULL,
    UNIQUE (session_number, name, version),
    CHECK ((uri IS NULL) <> (data IS NULL))
);

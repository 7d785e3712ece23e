-- hf_spend         the cost of model calls: one row per attempt, inserted before the request with
--                  the model's estimate (open), and updated with the outcome. An attempt whose
--                  process died keeps its estimate (uncertain). Every row counts
-- hf_spend_totals  running totals of a session ('session ' and its number) and of a tree ('tree '
--                  and its root's id), updated in the transaction that changes an attempt
--
-- Amounts are whole billionths of a US dollar, so that sums are exact; NULL if the price is unknown.
-- Spend outlives its session, without its details.
--
-- Sums by session, model and day read every attempt, from indexes that have all that is summed.
--
-- Life: open, then settled, failed or uncertain. Lock order: the tree, then its attempts and totals.

--[both]
CREATE TABLE hf_spend (
    number INTEGER PRIMARY KEY AUTOINCREMENT,
    id TEXT NOT NULL UNIQUE,
    session_number INTEGER NOT NULL,
    session_id TEXT NOT NULL,
    root_id TEXT NOT NULL,
    model TEXT NOT NULL,
    source TEXT NOT NULL,
    state TEXT NOT NULL CHECK (state IN ('open', 'settled', 'failed', 'uncertain')),
    input_tokens INTEGER NOT NULL CHECK (input_tokens >= 0),
    output_tokens INTEGER NOT NULL CHECK (output_tokens >= 0),
    nano_usd INTEGER CHECK (nano_usd >= 0),
    details BLOB,
    created_at INTEGER NOT NULL,
    updated_at INTEGER NOT NULL
);

CREATE INDEX ix_spend_session ON hf_spend (session_number, state, number);

CREATE INDEX ix_spend_session_id
ON hf_spend (session_id, state, number, input_tokens, output_tokens, nano_usd);

CREATE INDEX ix_spend_root ON hf_spend (root_id, number);

CREATE INDEX ix_spend_sums
ON hf_spend ((created_at / 86400000), model, state, input_tokens, output_tokens, nano_usd);

CREATE INDEX ix_spend_rare ON hf_spend (state, number) WHERE state <> 'settled';

CREATE TABLE hf_spend_totals (
    scope TEXT NOT NULL,
    model TEXT NOT NULL,
    source TEXT NOT NULL,
    state TEXT NOT NULL,
    attempts INTEGER NOT NULL,
    input_tokens INTEGER NOT NULL,
    output_tokens INTEGER NOT NULL,
    nano_usd INTEGER NOT NULL,
    unpriced INTEGER NOT NULL,
    PRIMARY KEY (scope, model, source, state)
) WITHOUT ROWID;

"""What stores hold, read in full, so that two moments or two databases can be compared."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import holdfast
from holdfast.kernel.operation import rows

TABLES = (
    "hf_trees", "hf_events", "hf_sessions", "hf_epochs", "hf_checkpoints", "hf_lines", "hf_items",
    "hf_uses", "hf_pins", "hf_attestations", "hf_doors", "hf_state", "hf_state_entries",
    "hf_state_events", "hf_state_rules",
)  # fmt: skip


def everything(store: holdfast.Store) -> dict[str, list[Any]]:
    """Every row of every table that sessions live in, as it is stored."""

    def read(tx: holdfast.Transaction) -> holdfast.Op[dict[str, list[Any]]]:
        found = {}
        for table in TABLES:
            all_rows = yield from rows(f"SELECT * FROM {table}")
            found[table] = sorted(map(repr, all_rows))
        return found

    return store.run(read)


def contents(store: holdfast.Store, *ids: str) -> dict[str, Any]:
    """What can be seen of sessions, without what belongs to one database alone."""
    seen: dict[str, Any] = {}
    for info in store.sessions(limit=1_000):
        if ids and info.id not in ids:
            continue
        session = store.find_session(info.id)
        fields = asdict(info)
        for name in ("number", "holder", "lease_expires_at"):
            del fields[name]
        history = session.history(limit=10_000)
        seen[info.id] = {
            "info": fields,
            "versions": [asdict(session.at(found.version)) for found in history],
            "resume_point": asdict(session.resume_point()),
            "latest": session.latest(),
        }
    return seen


def sound(store: holdfast.Store) -> None:
    """Every line has a use, every use a line and a session, every item a line; no door is open."""

    def read(tx: holdfast.Transaction) -> holdfast.Op[None]:
        for problem in (
            "SELECT id FROM hf_lines WHERE id NOT IN (SELECT line_id FROM hf_uses)",
            "SELECT line_id FROM hf_uses WHERE line_id NOT IN (SELECT id FROM hf_lines)",
            "SELECT line_id FROM hf_uses WHERE session_number NOT IN "
            "(SELECT number FROM hf_sessions)",
            "SELECT first_index FROM hf_items_view WHERE line_id NOT IN (SELECT id FROM hf_lines)",
            "SELECT version FROM hf_checkpoints_view WHERE session_id IS NULL",
            "SELECT name FROM hf_doors",
        ):
            assert (yield from rows(problem)) == [], problem

    store.run(read)
    for info in store.sessions(limit=1_000):
        session = store.find_session(info.id)
        for found in session.history(limit=10_000):
            session.at(found.version)

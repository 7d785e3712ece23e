"""Listings of the ledger, each along an index."""

from __future__ import annotations

import functools
from collections.abc import Sequence

from ..kernel.sql import merged
from ..records import EffectStatus
from ..sessions.rows import IS_OF_TREE, SESSIONS_OF_TREE
from .statements import OF_SESSION, SELECT_EFFECTS

LIST_EFFECTS = f"{SELECT_EFFECTS} WHERE number > :after"
OF_SESSION_AMONG_FEW = """(coalesce(session_number, 0) = :number
    OR coalesce(session_id, '') = :session_id AND unlinked_at IS NOT NULL)"""
# Replays of an attempt share its idempotency key.
OF_KEY = """idempotency_key IN (
    SELECT k.idempotency_key FROM hf_effects k
    WHERE k.key IN (CAST(:key AS TEXT), 'once:' || :key) AND k.generation > 0
    UNION ALL SELECT CAST(:key AS TEXT)
) AND (key IN (:key, 'once:' || :key) OR idempotency_key = :key)"""


@functools.cache
def page_of(columns: Sequence[str], status: EffectStatus | None) -> str:
    """Return the SQL of a listing, in which each part uses the most selective index."""
    conditions = {name: f"{name} = :{name}" for name in columns}
    if status is not None:
        # A literal, because a partial index is not used for a parameter.
        rare = "" if status == "completed" else " AND status <> 'completed'"
        conditions["status"] = f"status = '{status}'{rare}"
    leading = next((each for each in ("key", "item_id") if each in columns), None)
    if leading is not None:
        return merged([" AND ".join([LIST_EFFECTS, *_few(leading, columns, status)])])
    if "root_id" in columns:
        conditions["root_id"] = f"session_number IN {SESSIONS_OF_TREE}"
        if "tool" in columns:
            # A tree is small; the index of a tool is not to be used.
            conditions["tool"] = "coalesce(tool, '') = :tool"
    parts = [[each] for each in OF_SESSION] if conditions.pop("session_id", None) else [[]]
    return merged([" AND ".join([LIST_EFFECTS, *part, *conditions.values()]) for part in parts])


def _few(leading: str, columns: Sequence[str], status: EffectStatus | None) -> list[str]:
    """Return the conditions of a listing by a key or an item, which has few effects.

    coalesce() keeps the planner on their indexes.
    """
    conditions = {
        "key": OF_KEY if leading == "key" else "",
        "item_id": "coalesce(item_id, '') = :item_id",
        "session_id": OF_SESSION_AMONG_FEW,
        "root_id": IS_OF_TREE.format(number="session_number"),
        "tool": "coalesce(tool, '') = :tool",
    }
    if leading == "item_id":
        conditions["item_id"] = "item_id = :item_id AND item_id IS NOT NULL"
    further = [] if status is None else [f"coalesce(status, '') = '{status}'"]
    return [*(conditions[each] for each in columns if each in conditions), *further]

"""Listings of the ledger, each along an index."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

from ..errors import SessionNotFound
from ..kernel.operation import Op, Row, listed
from ..kernel.sql import along, is_also, merged, paged, united
from ..records import EFFECT_STATUSES, EffectStatus
from ..sessions.rows import IS_OF_TREE, read_place
from .statements import OF_SESSION, SELECT_EFFECTS

AFTER = "number > :after"
LIST_EFFECTS = f"{SELECT_EFFECTS} WHERE {AFTER}"
OF_SESSION_AMONG_FEW = """(coalesce(session_number, 0) = :number
    OR coalesce(session_id, '') = :session_id AND unlinked_at IS NOT NULL)"""
IS_BELOW = "root_above IS NOT NULL AND unlinked_at IS NULL"
# Replays of an attempt share its idempotency key.
OF_KEY = """idempotency_key IN (
    SELECT k.idempotency_key FROM hf_effects k
    WHERE k.key IN (CAST(:key AS TEXT), 'once:' || :key) AND k.generation > 0
    UNION ALL SELECT CAST(:key AS TEXT)
) AND (key IN (:key, 'once:' || :key) OR idempotency_key = :key)"""


def list_rows(given: Mapping[str, Any], after: int, limit: int) -> Op[Sequence[Row]]:
    """Return a page of effects, oldest first; none of a session or tree that is gone."""
    page = page_of(tuple(given), given.get("status"))
    owner_id = given.get("session_id", given.get("root_id"))
    number = None
    if owner_id is not None:
        try:
            owner = yield from read_place(owner_id)
        except SessionNotFound:
            return []
        if "session_id" not in given and owner["root_id"] != owner_id:
            return []
        number = owner["number"]
    return (yield from listed(page, **given, number=number, after=after, limit=limit))


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
    if "session_id" in columns:
        if conditions.pop("root_id", None):
            conditions["root_id"] = IS_OF_TREE.format(number="session_number")
        del conditions["session_id"]
        parts = [[LIST_EFFECTS, each, *conditions.values()] for each in OF_SESSION]
        return merged([" AND ".join(part) for part in parts])
    if "root_id" in columns:
        return _page_of_tree(columns, status)
    return merged([" AND ".join([LIST_EFFECTS, *conditions.values()])])


def _page_of_tree(columns: Sequence[str], status: EffectStatus | None) -> str:
    """Return the SQL for the effects of a root, and of all sessions below it."""
    tool = [is_also("tool")] if "tool" in columns else []
    leading = {"session_number": ":number"}
    which = ["session_number IS NOT NULL", along(leading, AFTER), *tool]
    if status == "completed":
        which.append("coalesce(status = 'completed', false)")
    elif status is not None:
        leading = {}
        which = [AFTER, OF_SESSION[0], f"status = '{status}' AND status <> 'completed'", *tool]
    pages = [paged(f"{SELECT_EFFECTS} WHERE {' AND '.join(which)}", leading=leading)]
    for each in EFFECT_STATUSES if status is None else (status,):
        leading = {"root_above": ":root_id", "status": f"'{each}'"}
        which = [IS_BELOW, along(leading, AFTER), *tool]
        pages.append(paged(f"{SELECT_EFFECTS} WHERE {' AND '.join(which)}", leading=leading))
    return united(pages)


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

"""Forgetting old history of shared state, so that what is left reads as before."""

from __future__ import annotations

from typing import Any

from ..kernel.append_only import through_door
from ..kernel.flow import Flow, perform
from ..kernel.operation import Lock, Op, Query, Runtime, operation, rows
from ..sessions import SessionHandle
from .read import LAST, require_reached

ROWS_PER_PASS = 500
KEY_MS = 7 * 24 * 3600 * 1000

KEYED = "(e.request_digest IS NOT NULL AND e.created_at > :now - :key_ms)"
RAISE_FLOOR = "UPDATE hf_state SET floor = :floor WHERE root_id = :root_id AND floor < :floor"
# Of each key stays what its value at the floor is made of, and what was asked under an idempotency
# key in the last week: it must not be done again. A document's own row goes.
FORGET_EVENTS = f"""
DELETE FROM hf_state_events WHERE root_id = :root_id AND (sequence, key) IN (
    SELECT e.sequence, e.key FROM hf_state_events e
    WHERE e.root_id = :root_id AND e.sequence < :at AND NOT {KEYED} AND (
        e.key = '' OR e.sequence < (
            SELECT last.base FROM hf_state_events last
            WHERE last.root_id = :root_id AND last.key = e.key
                AND last.sequence = {LAST.format(key="e.key")}
        )
    )
    ORDER BY e.sequence LIMIT :limit
) RETURNING sequence
"""  # noqa: S608
FORGET_TOMBSTONES = f"""
DELETE FROM hf_state_entries WHERE root_id = :root_id AND key IN (
    SELECT t.key FROM hf_state_entries t
    WHERE t.root_id = :root_id AND t.value IS NULL AND t.sequence <= :at AND NOT EXISTS (
        SELECT 1 FROM hf_state_events e
        WHERE e.root_id = t.root_id AND e.key = t.key AND {KEYED}
    )
    ORDER BY t.key LIMIT :limit
) RETURNING key, version
"""  # noqa: S608
FORGET_KEY = (
    "DELETE FROM hf_state_events WHERE root_id = :root_id AND key = :key RETURNING sequence"
)
REMEMBER_VERSION = """
UPDATE hf_state SET forgotten_version = CASE
    WHEN forgotten_version > :version THEN forgotten_version ELSE :version END
WHERE root_id = :root_id
"""


def compact(session: SessionHandle[Any], before: int) -> Flow[int]:
    """Remove what lies before a sequence, a bounded number of rows in each transaction."""
    ops = Compaction(session.runtime, session.root_id)
    removed, count = 0, -1
    yield from perform(Compaction.raise_floor, ops, before)
    while count:
        count = yield from perform(Compaction.forget, ops, before)
        removed += count
    return removed


class Compaction:
    """Removes the history of one tree's state."""

    def __init__(self, runtime: Runtime, root_id: str) -> None:
        self.runtime = runtime
        self._root_id = root_id

    @operation
    def raise_floor(self, floor: int) -> Op[None]:
        """Say first that older history cannot be read, so that nobody reads a half of it."""
        yield Lock(self._root_id)
        yield from require_reached(self._root_id, floor)
        yield from rows(RAISE_FLOOR, root_id=self._root_id, floor=floor)

    @operation
    def forget(self, floor: int) -> Op[int]:
        """Remove some rows; 0 if there are none left."""
        root = {"root_id": self._root_id}
        bounds = {**root, "at": floor, "limit": ROWS_PER_PASS, "key_ms": KEY_MS}
        yield Lock(self._root_id)
        door = f"state of {self._root_id}"
        [found] = yield from through_door(door, Query(FORGET_EVENTS, bounds))
        removed = len(found)
        gone = yield from rows(FORGET_TOMBSTONES, **bounds)
        if gone:
            keys = [Query(FORGET_KEY, {**root, "key": row["key"]}) for row in gone]
            answers = yield from through_door(door, *keys)
            removed += sum(map(len, answers)) + len(gone)
            version = max(row["version"] for row in gone)
            yield from rows(REMEMBER_VERSION, **root, version=version)
        return removed

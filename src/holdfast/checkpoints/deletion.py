"""Removal of all checkpoints of sessions, a bounded number of rows at a time.

Versions are removed first, then the items of lines that nothing else uses, then the lines: stopping
in between takes nothing from other sessions.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..kernel.append_only import through_door
from ..kernel.operation import Op, Query, Runtime, batch
from ..kernel.sql import among, given, given_keys, one_of
from ..sessions.rows import AMONG_NUMBERS, GIVEN_NUMBERS
from .keys import ITEMS, VERSIONS
from .removal import cut_tails

GIVEN_LINES = given_keys("lines", "INTEGER")
AMONG_LINES = among("lines", "INTEGER")
# The keys in the ranges of given sessions or lines.
IN_RANGES = one_of(
    """
    SELECT kept.key FROM {owners} AS owner
    JOIN {table} AS kept ON kept.key >= owner.given_key * {keys}
        AND kept.key < (owner.given_key + 1) * {keys}
    LIMIT :limit
    """
)
REMOVE_RANGES = "DELETE FROM {table} WHERE key {ranges} RETURNING key"
REMOVE_FROM_RANGES = {
    table: REMOVE_RANGES.format(
        table=table, ranges=IN_RANGES.format(table=table, owners=owners, keys=keys)
    )
    for table, owners, keys in (
        ("hf_checkpoints", GIVEN_NUMBERS, VERSIONS),
        ("hf_pins", GIVEN_NUMBERS, VERSIONS),
        ("hf_attestations", GIVEN_NUMBERS, VERSIONS),
        ("hf_items", GIVEN_LINES, ITEMS),
    )
}
REMOVE_EPOCHS = f"DELETE FROM hf_epochs WHERE session_number {AMONG_NUMBERS}"  # noqa: S608
LIST_LINES = f"""
SELECT DISTINCT line_id FROM (
    SELECT line_id FROM hf_uses WHERE session_number {AMONG_NUMBERS} /*pg OFFSET 0 */
) AS used
ORDER BY line_id LIMIT :limit
"""  # noqa: S608
# Lines are locked first, so that of two sessions releasing one, the second sees the first.
LOCK_LINES = f"""
SELECT id FROM hf_lines WHERE id {AMONG_LINES} ORDER BY id /*pg FOR UPDATE */
"""  # noqa: S608
LIST_SHARED = f"""
SELECT DISTINCT line_id FROM hf_uses
WHERE line_id {AMONG_LINES} AND NOT session_number {AMONG_NUMBERS}
"""  # noqa: S608
REMOVE_USES = f"""
DELETE FROM hf_uses WHERE line_id {AMONG_LINES} AND session_number {AMONG_NUMBERS}
"""  # noqa: S608
# A line whose items are not all removed yet stays, with its uses, for the next pass.
IS_EMPTY = f"""NOT EXISTS (
    SELECT 1 FROM hf_items WHERE key >= {{line}} * {ITEMS} AND key < ({{line}} + 1) * {ITEMS}
)"""  # noqa: S608
REMOVE_LAST_USES = f"{REMOVE_USES} AND {IS_EMPTY.format(line='line_id')}"
REMOVE_LINES = f"""
DELETE FROM hf_lines WHERE id {AMONG_LINES} AND {IS_EMPTY.format(line="id")}
"""  # noqa: S608
REMOVE_VERSIONS = [
    *(REMOVE_FROM_RANGES[table] for table in ("hf_checkpoints", "hf_pins", "hf_attestations")),
    REMOVE_EPOCHS,
]


def remove_sessions(runtime: Runtime, numbers: Sequence[int], limit: int) -> Op[int]:
    """Remove up to `limit` rows of each table: versions, then the lines that only they use.

    Returns the number of one table; fewer than the limit means that none is left.
    """
    ours = {"numbers": given(numbers), "limit": limit}
    door = f"delete {numbers[0]}"
    removals = (Query(removal, ours) for removal in REMOVE_VERSIONS)
    *removed, found = yield from through_door(door, *removals, Query(LIST_LINES, ours))
    count = max(map(len, removed))
    if count == limit or not found:
        return count
    line_ids = [row["line_id"] for row in found]
    return max(len(line_ids), (yield from _release(runtime, numbers, line_ids, limit)))


def _release(
    runtime: Runtime, numbers: Sequence[int], line_ids: Sequence[int], limit: int
) -> Op[int]:
    """Release lines; those that nothing else uses are removed after all of their items."""
    used = {"numbers": given(numbers), "lines": given(line_ids)}
    _, found = yield from batch(Query(LOCK_LINES, used), Query(LIST_SHARED, used))
    shared = [row["line_id"] for row in found]
    own = {**used, "lines": given(set(line_ids).difference(shared)), "limit": limit}
    removed, *_ = yield from through_door(
        f"delete {numbers[0]}",
        Query(REMOVE_FROM_RANGES["hf_items"], own),
        Query(REMOVE_LAST_USES, own),
        Query(REMOVE_LINES, own),
        *(Query(REMOVE_USES, {**used, "lines": given(shared)}) for _ in shared[:1]),
    )
    yield from cut_tails(runtime, shared)
    return len(removed)

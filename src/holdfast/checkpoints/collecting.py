"""Removing history, and the lines that nothing needs any more.

Two operations may remove checkpoints: pruning and deleting a session. They open a door that the
append-only triggers look for, and close it before COMMIT. A line goes when its last use goes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ..codec import Codec
from ..feed import through_door
from ..kernel.operation import Op, Query, rows
from . import manifest as manifests
from .branching import lines_of
from .lines import SHIFT
from .manifest import checkpoint_context

REMOVE_ALL = (
    "DELETE FROM hf_checkpoints WHERE key >= :low AND key < :high",
    "DELETE FROM hf_pins WHERE key >= :low AND key < :high",
    "DELETE FROM hf_attestations WHERE key >= :low AND key < :high",
    "DELETE FROM hf_epochs WHERE session_number = :number",
)
REMOVE_ONE = "DELETE FROM hf_checkpoints WHERE key = :key"
USES = "SELECT line_id FROM hf_uses WHERE session_number = :number ORDER BY line_id"
# The line is locked first, so that of two sessions that let go of it the second sees the first.
RELEASE = (
    "SELECT id FROM hf_lines WHERE id = :line_id /*pg FOR UPDATE */",
    "DELETE FROM hf_uses WHERE line_id = :line_id AND session_number = :number",
    """
    DELETE FROM hf_items WHERE key >= :low AND key < :high
        AND NOT EXISTS (SELECT 1 FROM hf_uses WHERE line_id = :line_id)
    """,
    """
    DELETE FROM hf_lines WHERE id = :line_id
        AND NOT EXISTS (SELECT 1 FROM hf_uses WHERE line_id = :line_id)
    """,
)
LINES_PER_BATCH = 100
MANIFESTS = """
SELECT key, manifest FROM hf_checkpoints WHERE key >= :low AND key < :high ORDER BY key
"""
# Everything that retention must keep is excluded here, in one place.
PRUNABLE = """
SELECT key FROM hf_checkpoints c
WHERE key >= :low AND key < :high AND kind <> 'approval_point'
    AND key < (
        SELECT min(key) FROM (
            SELECT key FROM hf_checkpoints WHERE key >= :low AND key < :high
            ORDER BY key DESC LIMIT :keep
        ) AS newest
    )
    AND (idempotency_key IS NULL OR created_at <= :now - :key_ms)
    AND NOT EXISTS (SELECT 1 FROM hf_pins p WHERE p.key = c.key)
    AND NOT EXISTS (SELECT 1 FROM hf_attestations a WHERE a.key = c.key)
    AND NOT EXISTS (
        SELECT 1 FROM hf_sessions f
        WHERE f.origin_number = :number AND f.origin_version = c.key - :low
    )
ORDER BY key LIMIT :limit
"""


def _bounds(number: int) -> dict[str, int]:
    return {"number": number, "low": number * SHIFT, "high": (number + 1) * SHIFT}


def remove_all(number: int) -> Op[None]:
    """Remove every checkpoint of a session, what was said of them, and the lines they used."""
    removals = (Query(statement, _bounds(number)) for statement in REMOVE_ALL)
    yield from through_door(f"delete {number}", *removals)
    used = yield from rows(USES, number=number)
    yield from release(number, [row["line_id"] for row in used])


def remove_versions(codec: Codec, number: int, keys: Sequence[int]) -> Op[None]:
    """Remove some checkpoints of a session, and the lines that only they used."""
    removals = (Query(REMOVE_ONE, {"key": key}) for key in keys)
    yield from through_door(f"prune {number}", *removals)
    needed: set[int] = set()
    for row in (yield from rows(MANIFESTS, **_bounds(number))):
        context = checkpoint_context(number, row["key"] % SHIFT, "manifest")
        needed |= yield from lines_of(codec, manifests.unpack(codec, row["manifest"], context))
    used = {row["line_id"] for row in (yield from rows(USES, number=number))}
    yield from release(number, sorted(used - needed))


def prunable(number: int, keep: int, key_ms: int, limit: int) -> Op[list[int]]:
    """Return the keys of versions that retention may remove, oldest first."""
    found = yield from rows(PRUNABLE, **_bounds(number), keep=keep, key_ms=key_ms, limit=limit)
    return [row["key"] for row in found]


def release(number: int, line_ids: Sequence[int]) -> Op[None]:
    """Take back a session's uses of lines; what nobody uses any more is removed."""
    for start in range(0, len(line_ids), LINES_PER_BATCH):
        removals = _releases(number, line_ids[start : start + LINES_PER_BATCH])
        yield from through_door(f"release {number}", *removals)


def _releases(number: int, line_ids: Iterable[int]) -> list[Query]:
    return [
        Query(
            statement,
            {
                "line_id": line_id,
                "number": number,
                "low": line_id * SHIFT,
                "high": (line_id + 1) * SHIFT,
            },
        )
        for line_id in line_ids
        for statement in RELEASE
    ]

"""Removing history, and the lines that nothing needs any more.

Two operations may remove checkpoints: pruning and deleting a session. They open a door that the
append-only triggers look for, and close it before COMMIT. A line goes when its last use goes; of
one that stays, what lies beyond the longest reference goes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import chain

from ..codec import Codec
from ..errors import CorruptRecord
from ..kernel.append_only import through_door
from ..kernel.operation import Lock, Op, Query, Row, batch, rows
from ..sessions.rows import ANY
from . import manifest as manifests
from .lines import RUN_ITEMS, SHIFT, Piece, Ref, pieces_of, written_until
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
USERS = f"""
SELECT s.number, s.root_id FROM hf_uses u JOIN {ANY} ON s.number = u.session_number
WHERE u.line_id = :line_id
"""  # noqa: S608
TAIL = """
SELECT key FROM hf_items WHERE key >= :run AND key < :high AND key + count > :low
ORDER BY key LIMIT 1
"""
CUT = "DELETE FROM hf_items WHERE key >= :low AND key < :high"
KEEP = "INSERT INTO hf_items (key, count, data) VALUES (:key, :count, :data)"
LINES_PER_BATCH = 100
MANIFESTS_PER_PAGE = 500
MANIFESTS = """
SELECT key, manifest FROM hf_checkpoints WHERE key > :after AND key < :high
ORDER BY key LIMIT :limit
"""
# Everything that retention must keep is excluded here, in one place.
PRUNABLE = f"""
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
        SELECT 1 FROM {ANY} WHERE s.origin_number = :number AND s.origin_version = c.key - :low
    )
ORDER BY key LIMIT :limit
"""  # noqa: S608


@dataclass(slots=True)
class Needs:
    """Which lines checkpoints need, with their pieces, and up to which own item each."""

    ends: dict[int, int] = field(default_factory=dict)
    pieces: dict[int, list[Piece]] = field(default_factory=dict)

    def add(self, pieces: Iterable[Piece]) -> None:
        """Need what lies in some pieces."""
        for line_id, start, length in pieces:
            self.ends[line_id] = max(self.ends.get(line_id, 0), start + length)


def read_needs(codec: Codec, numbers: Iterable[int]) -> Op[Needs]:
    """Read every manifest of some sessions once, to know what of which line they need."""
    needs = Needs()
    for number in numbers:
        bounds = {"high": (number + 1) * SHIFT, "limit": MANIFESTS_PER_PAGE}
        after = number * SHIFT
        while page := (yield from rows(MANIFESTS, **bounds, after=after)):
            for row in page:
                context = checkpoint_context(number, row["key"] % SHIFT, "manifest")
                yield from _need(codec, needs, manifests.unpack(codec, row["manifest"], context))
            after = page[-1]["key"]
    return needs


def _need(codec: Codec, needs: Needs, manifest: manifests.Manifest) -> Op[None]:
    for entry in manifest.values():
        match entry:
            case manifests.Stored(line_id):
                needs.add([Piece(line_id, 0, 1)])
            case Ref():
                if entry.base and entry.line_id not in needs.pieces:
                    whole = Ref(entry.line_id, entry.base, entry.base)
                    pieces = yield from pieces_of(codec, whole)
                    needs.pieces[entry.line_id] = pieces
                    needs.add(pieces)
                needs.add([Piece(entry.line_id, entry.skip, entry.length - entry.base)])
            case manifests.Inline():
                pass


def _bounds(number: int) -> dict[str, int]:
    return {"number": number, "low": number * SHIFT, "high": (number + 1) * SHIFT}


def remove_all(codec: Codec, number: int) -> Op[None]:
    """Remove every checkpoint of a session, what was said of them, and the lines they used."""
    removals = (Query(statement, _bounds(number)) for statement in REMOVE_ALL)
    yield from through_door(f"delete {number}", *removals)
    used = yield from rows(USES, number=number)
    line_ids = [row["line_id"] for row in used]
    yield from release(number, line_ids)
    yield from _cut_tails(codec, line_ids)


def remove_versions(codec: Codec, number: int, keys: Sequence[int]) -> Op[None]:
    """Remove some checkpoints of a session, and the lines that only they used."""
    removals = (Query(REMOVE_ONE, {"key": key}) for key in keys)
    yield from through_door(f"prune {number}", *removals)
    ends = (yield from read_needs(codec, [number])).ends
    used = {row["line_id"] for row in (yield from rows(USES, number=number))}
    yield from release(number, sorted(used - ends.keys()))
    tails = yield from _each(TAIL, [_tail(line_id, end) for line_id, end in ends.items()])
    yield from _cut_tails(codec, [row["key"] // SHIFT for row in tails])


def prunable(number: int, keep: int, key_ms: int, limit: int) -> Op[list[int]]:
    """Return the keys of versions that retention may remove, oldest first."""
    found = yield from rows(PRUNABLE, **_bounds(number), keep=keep, key_ms=key_ms, limit=limit)
    return [row["key"] for row in found]


def release(number: int, line_ids: Sequence[int]) -> Op[None]:
    """Take back a session's uses of lines; what nobody uses any more is removed."""
    for start in range(0, len(line_ids), LINES_PER_BATCH):
        removals = _releases(number, line_ids[start : start + LINES_PER_BATCH])
        yield from through_door(f"release {number}", *removals)


def _cut_tails(codec: Codec, line_ids: Sequence[int]) -> Op[None]:
    """Remove what lies beyond the longest reference of any checkpoint to these lines."""
    users: dict[int, str] = {}
    while True:
        found = yield from _each(USERS, [{"line_id": line_id} for line_id in line_ids])
        if users == (users := {row["number"]: row["root_id"] for row in found}):
            break
        # Who locks the trees of all that refer to a line keeps new references away.
        for root_id in sorted(set(users.values())):
            yield Lock(root_id)
    try:
        ends = (yield from read_needs(codec, users)).ends
        cuts: list[Query] = []
        for line_id in line_ids:
            if line_id in ends:
                cuts += yield from _cut(codec, line_id, ends[line_id])
    except CorruptRecord:
        return  # What cannot be read may refer to anything.
    if cuts:
        yield from through_door(f"cut {line_ids[0]}", *cuts)


def _cut(codec: Codec, line_id: int, end: int) -> Op[list[Query]]:
    """Return what removes all of a line from an end on; a packed run is written out up to it."""
    instead = yield from written_until(codec, line_id, end)
    low, high = (line_id * SHIFT + end, (line_id + 1) * SHIFT)
    if instead is None:
        return [Query(CUT, {"low": low, "high": high})]
    low, high = instead.replaced or (low, high)
    kept = ({"key": key, "count": count, "data": data} for key, count, data in instead.rows)
    return [Query(CUT, {"low": low, "high": high}), *(Query(KEEP, row) for row in kept)]


def _tail(line_id: int, end: int) -> dict[str, int]:
    run = line_id * SHIFT + end // RUN_ITEMS * RUN_ITEMS
    return {"run": run, "low": line_id * SHIFT + end, "high": (line_id + 1) * SHIFT}


def _each(sql: str, asked: Sequence[dict[str, int]]) -> Op[list[Row]]:
    """Return the rows of a statement for many parameters."""
    found: list[Row] = []
    for start in range(0, len(asked), LINES_PER_BATCH):
        some = asked[start : start + LINES_PER_BATCH]
        found += chain.from_iterable((yield from batch(*(Query(sql, each) for each in some))))
    return found


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

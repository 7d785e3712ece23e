"""Removing old history of shared state; the rest stays readable."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import asdict

from ..clock import iso
from ..errors import Compacted, SessionNotFound
from ..feed.events import TREE_SEQUENCE, emit
from ..kernel.append_only import through_door
from ..kernel.files import Archive, archived
from ..kernel.flow import Flow, invoke, let_others_write, perform
from ..kernel.nouns import Retention
from ..kernel.operation import (
    Lock,
    Op,
    Query,
    Row,
    Runtime,
    large_query,
    operation,
    rows,
    whole_query,
)
from ..records import Pruned
from ..sessions.retention import OPEN_TREE
from .read import LAST, events, require_reached
from .records import StateEvent

ROWS_PER_PASS = 500
TREES_PER_PAGE = 100
KEY_MS = 7 * 24 * 3600 * 1000

KEYED = "(e.request_digest IS NOT NULL AND e.created_at > :now - :key_ms)"
# A tree without history above its floor may still have rows that idempotency keys retain.
LIST_ENDED_STATES = f"""
SELECT s.root_id, s.floor, {TREE_SEQUENCE.format(root_id="s.root_id")} AS sequence FROM hf_state s
WHERE s.root_id > :after AND NOT {OPEN_TREE.format(root_id="s.root_id")} AND EXISTS (
    SELECT 1 FROM hf_state_events e WHERE e.root_id = s.root_id AND (
        (e.sequence > s.floor AND e.created_at <= :now - :history_ms)
        OR (e.sequence < s.floor AND e.request_digest IS NOT NULL AND NOT {KEYED})
    )
)
ORDER BY s.root_id LIMIT :limit
"""  # noqa: S608
FIRST_RECENT = """
SELECT min(sequence) AS sequence FROM hf_state_events
WHERE root_id = :root_id AND sequence > :floor AND created_at > :now - :history_ms
"""
READ_IS_OPEN = f"SELECT {OPEN_TREE.format(root_id=':root_id')} AS is_open"
RAISE_FLOOR = """
UPDATE hf_state SET floor = :floor WHERE root_id = :root_id AND floor < :floor RETURNING floor
"""
# A pass looks at the next rows, whether they go or stay: those that stay are not looked at again.
NEXT_OLD_EVENTS = """
SELECT sequence, key FROM hf_state_events
WHERE root_id = :root_id AND (sequence, key) > (:sequence, :key) AND sequence < :at
ORDER BY sequence, key LIMIT :limit
"""
# For each key, the events that its value at the floor is computed from stay, and those with an
# idempotency key of the last week, which must not be repeated. The row of a document write goes.
REMOVE_OLD_EVENTS = f"""
DELETE FROM hf_state_events WHERE root_id = :root_id AND (sequence, key) IN (
    SELECT e.sequence, e.key FROM hf_state_events e
    WHERE e.root_id = :root_id AND (e.sequence, e.key) > (:sequence, :key)
        AND (e.sequence, e.key) <= (:last_sequence, :last_key) AND NOT {KEYED} AND (
        e.key = '' OR e.sequence < (
            SELECT last.base FROM hf_state_events last
            WHERE last.root_id = :root_id AND last.key = e.key
                AND last.sequence = {LAST.format(key="e.key")}
        )
    )
) RETURNING sequence
"""  # noqa: S608
REMOVE_TOMBSTONES = f"""
DELETE FROM hf_state_entries WHERE root_id = :root_id AND key IN (
    SELECT t.key FROM hf_state_entries t
    WHERE t.root_id = :root_id AND t.value IS NULL AND t.sequence <= :at AND NOT EXISTS (
        SELECT 1 FROM hf_state_events e
        WHERE e.root_id = t.root_id AND e.key = t.key AND {KEYED}
    )
    ORDER BY t.key LIMIT :limit
) RETURNING key, version
"""  # noqa: S608
REMOVE_KEY = (
    "DELETE FROM hf_state_events WHERE root_id = :root_id AND key = :key RETURNING sequence"
)
KEEP_VERSION = """
UPDATE hf_state SET forgotten_version = CASE
    WHEN forgotten_version > :version THEN forgotten_version ELSE :version END
WHERE root_id = :root_id
"""


def compact(runtime: Runtime, root_id: str, before: int, *, only_ended: bool = False) -> Flow[int]:
    """Remove history before a sequence, a bounded number of rows per transaction."""
    ops = Compaction(runtime, root_id)
    removed = 0
    if not (yield from perform(Compaction.raise_floor, ops, before, only_ended)):
        return 0
    after: tuple[int, str] | None = (0, "")
    while after is not None:
        count, after = yield from perform(Compaction.remove_events, ops, before, after)
        yield from let_others_write(runtime)
        removed += count
    while count := (yield from perform(Compaction.remove_tombstones, ops, before)):
        removed += count
    return removed


def prune_histories(runtime: Runtime, retention: Retention) -> Flow[Pruned]:
    """Remove old history of shared state from trees that have ended."""
    pruned, after = Pruned(), ""
    if retention.history_ms is None or retention.session is not None:
        return pruned
    ended = EndedStates(runtime, retention.history_ms)
    while page := (yield from perform(EndedStates.page, ended, after)):
        for row in page:
            # A root that was deleted meanwhile has no history left.
            with suppress(SessionNotFound):
                pruned += yield from _prune_history(ended, retention, row)
        after = page[-1]["root_id"]
    return pruned


def _prune_history(ended: EndedStates, retention: Retention, row: Row) -> Flow[Pruned]:
    count = 0
    until = yield from perform(EndedStates.old_until, ended, row)
    if retention.archive is not None:
        count = yield from _archive(ended, retention.archive, row, until)
    removed = yield from compact(ended.runtime, row["root_id"], until, only_ended=True)
    return Pruned(state_changes=removed, archived=count)


def _archive(ended: EndedStates, archive: Archive, row: Row, until: int) -> Flow[int]:
    count, after = 0, row["floor"]
    while after < until:
        try:
            found = yield from perform(EndedStates.events, ended, row["root_id"], after, until)
        except Compacted:
            # A concurrent prune was faster, and has archived them.
            break
        yield from invoke(archive.append, [_line(ended.runtime, row, each) for each in found])
        count, after = count + len(found), found[-1].sequence
    return count


def _line(runtime: Runtime, row: Row, event: StateEvent) -> str:
    fields = {**asdict(event), "deleted": list(event.deleted), "created_at": iso(event.created_at)}
    return archived(runtime.codec, "state_change", {"root_id": row["root_id"], **fields})


class EndedStates:
    """Finds old history in trees that have ended."""

    def __init__(self, runtime: Runtime, history_ms: int) -> None:
        self.runtime = runtime
        self._history = {"history_ms": history_ms}

    @whole_query
    def page(self, after: str) -> Op[list[Row]]:
        """Return the next trees that may have old history."""
        wanted = {**self._history, "key_ms": KEY_MS, "after": after, "limit": TREES_PER_PAGE}
        return (yield from rows(LIST_ENDED_STATES, **wanted))

    @whole_query
    def old_until(self, row: Row) -> Op[int]:
        """Return the last sequence up to which every change is old."""
        wanted = {"root_id": row["root_id"], "floor": row["floor"], **self._history}
        [found] = yield from rows(FIRST_RECENT, **wanted)
        return int(row["sequence"] if found["sequence"] is None else found["sequence"] - 1)

    @large_query
    def events(self, root_id: str, after: int, until: int) -> Op[list[StateEvent]]:
        """Return the next changes up to a sequence."""
        limit = min(ROWS_PER_PASS, until - after)
        return (yield from events(self.runtime.codec, root_id, after, limit))


class Compaction:
    """Removes the history of one tree's state."""

    def __init__(self, runtime: Runtime, root_id: str) -> None:
        self.runtime = runtime
        self._root_id = root_id

    @operation
    def raise_floor(self, floor: int, only_ended: bool) -> Op[bool]:
        """Make older history unreadable first, so that no reader sees it half removed.

        With `only_ended`, return False for a tree that was reopened meanwhile, which keeps it;
        and there is no event, as that of a tree which has ended would be pruned like the others.
        """
        yield Lock(self._root_id)
        yield from require_reached(self._root_id, floor)
        if only_ended:
            [tree] = yield from rows(READ_IS_OPEN, root_id=self._root_id)
            if tree["is_open"]:
                return False
        raised = yield from rows(RAISE_FLOOR, root_id=self._root_id, floor=floor)
        if raised and not only_ended:
            where = (self.runtime.codec, self._root_id, self._root_id)
            yield from emit(*where, "state_compacted", {"before": floor})
        return True

    @operation
    def remove_events(
        self, floor: int, after: tuple[int, str]
    ) -> Op[tuple[int, tuple[int, str] | None]]:
        """Remove some events after a place; return how many, and the next place, or None."""
        yield Lock(self._root_id)
        place = {"sequence": after[0], "key": after[1]}
        bounds = {"root_id": self._root_id, "at": floor, **place}
        found = yield from rows(NEXT_OLD_EVENTS, **bounds, limit=ROWS_PER_PASS)
        if not found:
            return 0, None
        last = (found[-1]["sequence"], found[-1]["key"])
        given = {**bounds, "last_sequence": last[0], "last_key": last[1], "key_ms": KEY_MS}
        [removed] = yield from self._through_door(Query(REMOVE_OLD_EVENTS, given))
        return len(removed), last if len(found) == ROWS_PER_PASS else None

    @operation
    def remove_tombstones(self, floor: int) -> Op[int]:
        """Remove some deleted keys; return how many rows, 0 if none are left."""
        yield Lock(self._root_id)
        root = {"root_id": self._root_id}
        bounds = {**root, "at": floor, "limit": ROWS_PER_PASS, "key_ms": KEY_MS}
        gone = yield from rows(REMOVE_TOMBSTONES, **bounds)
        if not gone:
            return 0
        keys = [Query(REMOVE_KEY, {**root, "key": row["key"]}) for row in gone]
        answers = yield from self._through_door(*keys)
        version = max(row["version"] for row in gone)
        yield from rows(KEEP_VERSION, **root, version=version)
        return sum(map(len, answers)) + len(gone)

    def _through_door(self, *queries: Query) -> Op[list[list[Row]]]:
        return (yield from through_door(f"state of {self._root_id}", *queries))

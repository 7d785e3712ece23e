"""The watchdog: leases that ran out, items whose time has come, finished items that are old."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import Any

from ..errors import CorruptRecord, StoreBusy
from ..feed import emit, through_door
from ..kernel.flow import Flow, perform
from ..kernel.handle import Runtime
from ..kernel.operation import Lock, Op, Query, Row, one, operation, query, rows
from ..records import Swept
from .finishing import EXPIRED, Endings, expiring
from .items import COLUMNS, Item
from .submitting import ring

SWEPT_MAX = 1_000
PROMOTED_PER_PASS = 1_000
ITEMS_PER_PASS = 500

FIND_EXPIRED = f"""
SELECT {COLUMNS} FROM hf_work WHERE state = 'in_progress' AND lease_expires_at <= :now
ORDER BY number LIMIT :limit
"""  # noqa: S608
PROMOTE = """
UPDATE hf_work SET state = 'pending', updated_at = :now
WHERE number IN (
    /*pg SELECT unnest(ARRAY( */
    WITH due AS MATERIALIZED (
        SELECT number FROM hf_work WHERE state = 'scheduled' AND available_at <= :now
        ORDER BY available_at, number LIMIT :limit /*pg FOR NO KEY UPDATE SKIP LOCKED */
    )
    SELECT number FROM due
    /*pg )) */
)
RETURNING queue
"""
NEXT_DUE = """
SELECT available_at, :now AS now FROM hf_work WHERE state = 'scheduled'
ORDER BY available_at, number LIMIT 1
"""
OLD = """
SELECT number, root_id, session_id FROM hf_work
WHERE completed_at IS NOT NULL AND completed_at < :now - :age_ms
ORDER BY completed_at, number LIMIT :limit
"""
REMOVE = "DELETE FROM hf_work WHERE number = :number AND completed_at IS NOT NULL RETURNING number"


class Watchdog:
    """The transactions of a sweep."""

    def __init__(self, runtime: Runtime) -> None:
        self.runtime = runtime
        self.endings = Endings(runtime)

    @query
    def expired(self, limit: int) -> Op[list[Row]]:
        """Return items whose lease ran out."""
        return (yield from rows(FIND_EXPIRED, limit=limit))

    @operation
    def take(self, found: Sequence[Row], is_recorded: bool) -> Op[list[str]]:
        """End the attempts of items of one tree whose lease is still over; return their states."""
        items: list[Item[Any]] = [Item(self.runtime, row) for row in found]
        ended = [(item, expiring(item, is_recorded=is_recorded)) for item in items]
        answers = yield from self.endings.finish(ended, EXPIRED)
        return [answer["state"] for answer in answers if answer is not None]

    @operation
    def promote(self, limit: int) -> Op[tuple[int, int | None]]:
        """Make due items ready; return how many, and the milliseconds until the next is due."""
        found = yield from rows(PROMOTE, limit=limit)
        yield from ring(self.runtime.signals, {row["queue"] for row in found})
        upcoming = yield from one(NEXT_DUE)
        due_ms = None if upcoming is None else max(0, upcoming["available_at"] - upcoming["now"])
        return len(found), due_ms

    @query
    def old(self, age_ms: int) -> Op[list[Row]]:
        """Return finished items that retention may remove, the oldest first."""
        return (yield from rows(OLD, age_ms=age_ms, limit=ITEMS_PER_PASS))

    @operation
    def remove(self, found: Sequence[Row]) -> Op[int]:
        """Remove finished items of one tree, or of none, and tell its feed."""
        root_id, session_id = found[0]["root_id"], found[0]["session_id"]
        if root_id is not None:
            yield Lock(root_id)
        numbers = [row["number"] for row in found]
        removals = (Query(REMOVE, {"number": number}) for number in numbers)
        answers = yield from through_door(f"work {numbers[0]}", *removals)
        count = sum(map(len, answers))
        if count and root_id is not None:
            data = {"count": count}
            yield from emit(self.runtime.codec, root_id, session_id, "work_pruned", data)
        return count


def sweep(runtime: Runtime, limit: int) -> Flow[Swept]:
    """Requeue or end items whose lease ran out, one tree at a time; then promote what is due."""
    watchdog = Watchdog(runtime)
    found = yield from perform(Watchdog.expired, watchdog, limit)
    counts: dict[str, int] = {}
    for rows_of_tree in by_tree(found):
        for state in (yield from _take(watchdog, rows_of_tree)):
            counts[state] = counts.get(state, 0) + 1
    promoted, due_ms = yield from perform(Watchdog.promote, watchdog, PROMOTED_PER_PASS)
    return Swept(
        requeued=counts.get("scheduled", 0) + counts.get("pending", 0),
        failed=counts.get("failed", 0),
        cancelled=counts.get("cancelled", 0),
        parked=counts.get("review", 0),
        promoted=promoted,
        has_more=len(found) == limit or promoted == PROMOTED_PER_PASS,
        next_due_ms=due_ms,
    )


def _take(watchdog: Watchdog, found: Sequence[Row]) -> Flow[list[str]]:
    try:
        return (yield from perform(Watchdog.take, watchdog, found, True))
    except StoreBusy:
        # Somebody has this tree for long; the others need not wait for it.
        return []
    except CorruptRecord:
        # A session whose newest record is damaged cannot take another; its items still end.
        return (yield from perform(Watchdog.take, watchdog, found, False))


def prune(watchdog: Watchdog, age_ms: int) -> Flow[int]:
    """Remove items that were finished longer ago, a bounded number in each transaction."""
    count = 0
    while found := (yield from perform(Watchdog.old, watchdog, age_ms)):
        removed = 0
        for rows_of_tree in by_tree(found):
            removed += yield from perform(Watchdog.remove, watchdog, rows_of_tree)
        if not removed:
            break
        count += removed
    return count


def by_tree(found: Sequence[Row]) -> list[list[Row]]:
    """Return rows in groups that one transaction can take: those of one tree, or of none."""

    def tree(row: Row) -> str:
        return row["root_id"] or ""

    return [list(group) for _, group in groupby(sorted(found, key=tree), key=tree)]

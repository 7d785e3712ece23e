"""The watchdog: leases that ran out, and items whose time has come."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..errors import CorruptRecord, StoreBusy
from ..feed import by_tree
from ..kernel.flow import Flow, perform
from ..kernel.operation import Op, Row, Runtime, one, operation, query, rows
from ..records import Swept
from .items import COLUMNS, Item
from .submission import ring
from .transitions import EXPIRED, Endings, expiring

SWEPT_MAX = 1_000
PROMOTED_PER_PASS = 1_000

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

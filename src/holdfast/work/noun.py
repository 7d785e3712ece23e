"""The lifecycle of work items: swept, pruned, and bound to their sessions and effects."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from ..effects.noun import OF_OLD_CHAINS, prune_effects
from ..errors import CorruptRecord, StoreBusy
from ..feed import by_tree, emit
from ..kernel.append_only import through_door
from ..kernel.flow import Flow, perform
from ..kernel.nouns import Noun, Retention
from ..kernel.operation import Lock, Op, Query, Row, Runtime, one, operation, query, rows
from ..kernel.sql import given, given_keys
from ..leases import EARLIER_BOOT
from ..records import Pruned, SessionRef, Swept
from ..sessions.rows import AMONG_NUMBERS, GIVEN_NUMBERS, numbers_of
from . import transitions
from .claims import NEXT_DUE, heartbeat
from .items import LOCK_HELD, SELECT_ITEMS, Item
from .portable import WorkPortable
from .submission import ring
from .transitions import Transition

SWEPT_MAX = 1_000
PROMOTED_PER_PASS = 1_000
REMOVED_PER_PASS = 500
# No limit: all items of a session.
ITEMS_MAX = 2**53

OF_SESSIONS = f"session_number {AMONG_NUMBERS}"
# With an OFFSET, PostgreSQL looks for each session's in the index, however many it expects.
OF_EACH_SESSION = f"""{GIVEN_NUMBERS} AS given CROSS JOIN /*pg LATERAL (SELECT * FROM */
    hf_work AS w INDEXED BY ix_work_session /*pg WHERE {{which}} OFFSET 0) AS w */
WHERE {{which}}"""  # noqa: S608
IN_STATE = "w.session_number = given_key AND w.session_number IS NOT NULL AND w.state {states}"
LIVE = "IN ('scheduled', 'pending', 'in_progress', 'review')"
LIVE_OF_SESSIONS = f"""
{SELECT_ITEMS} WHERE number IN (
    /*pg SELECT unnest(ARRAY( */
    SELECT w.number FROM {OF_EACH_SESSION.format(which=IN_STATE.format(states=LIVE))} LIMIT :limit
    /*pg )) */
) AND coalesce(state, '') {LIVE}
ORDER BY number /*pg FOR NO KEY UPDATE */
"""  # noqa: S608
RUNNING_OF_SESSIONS = f"""
SELECT w.session_number
FROM {OF_EACH_SESSION.format(which=IN_STATE.format(states="= 'in_progress'"))}
    AND w.lease_expires_at > :now
"""  # noqa: S608
WAITING_FOR_EFFECT = f"""
{SELECT_ITEMS} WHERE waits_for_effect = :effect_id AND waits_for_effect IS NOT NULL
    AND coalesce(state, '') = 'review'
ORDER BY number
"""
FENCE_ITEMS = f"""
UPDATE hf_work SET lease_expires_at = :now, sweep_at = :now, fence = fence + 1
WHERE state = 'in_progress' AND lease_expires_at > :now AND {EARLIER_BOOT}
RETURNING id
"""  # noqa: S608
FIND_EXPIRED = f"""
{SELECT_ITEMS} INDEXED BY ix_work_sweep
WHERE state = 'in_progress' AND sweep_at <= :now AND lease_expires_at <= :now
ORDER BY sweep_at, number LIMIT :limit
"""
PROMOTE = """
UPDATE hf_work SET state = 'pending', updated_at = :now
WHERE number IN (
    /*pg SELECT unnest(ARRAY( */
    WITH due AS MATERIALIZED (
        SELECT number FROM hf_work INDEXED BY ix_work_scheduled
        WHERE state = 'scheduled' AND available_at <= :now
        ORDER BY available_at, number LIMIT :limit /*pg FOR NO KEY UPDATE SKIP LOCKED */
    )
    SELECT number FROM due
    /*pg )) */
)
RETURNING queue
"""
NEXT_PROMOTED = """
SELECT available_at, :now AS now FROM hf_work INDEXED BY ix_work_scheduled
WHERE state = 'scheduled' ORDER BY available_at, number LIMIT 1
"""
FIND_OLD = """
SELECT number, root_id, session_id FROM hf_work
WHERE completed_at IS NOT NULL AND completed_at < :now - :age_ms
ORDER BY completed_at, number LIMIT :limit
"""
REMOVE_FINISHED = """
DELETE FROM hf_work WHERE number = :number AND completed_at IS NOT NULL RETURNING number
"""
REMOVE_OF_SESSIONS = f"""
DELETE FROM hf_work WHERE number IN (
    SELECT number FROM hf_work WHERE {OF_SESSIONS} LIMIT :limit
) RETURNING number
"""  # noqa: S608
# In the order of its index, so that PostgreSQL does not look for them among all items.
REMOVE_OF_QUEUE = """
DELETE FROM hf_work WHERE number IN (
    SELECT number FROM hf_work WHERE queue = :queue ORDER BY state, number LIMIT :limit
) RETURNING number
"""
# With an OFFSET, PostgreSQL looks for each in the index, and does not read all items for a page.
USED_QUEUES = f"""
SELECT given_key AS queue FROM {given_keys("queues")} AS given
WHERE EXISTS (SELECT 1 FROM hf_work w WHERE w.queue = given_key LIMIT 1 OFFSET 0)
ORDER BY given_key
"""  # noqa: S608
EFFECTS_OF_NO_ITEM = f"""{OF_OLD_CHAINS} AND NOT EXISTS (
        SELECT 1 FROM hf_work w WHERE w.id = item_id LIMIT 1 OFFSET 0
    ) AND NOT EXISTS (
        SELECT 1 FROM hf_work w WHERE w.first_id = substr(scope, 6) LIMIT 1 OFFSET 0
    )"""  # noqa: S608


class WorkNoun(Noun):
    """Work items: they are cancelled and deleted with their session, and may wait for an effect."""

    portable = WorkPortable()
    name = "work item"
    guard = LOCK_HELD
    fencing = FENCE_ITEMS
    leased = "hf_work WHERE state = 'in_progress'"
    leased_to = "worker"
    advice = "A running worker requeues them, and so does `holdfast work sweep`."
    any_record = "SELECT 1 AS found FROM hf_work LIMIT 1"
    due = NEXT_DUE

    def renew(self, held: Mapping[int, int], lease_seconds: float) -> Op[dict[int, Row]]:
        """Renew the leases of running items."""
        return (yield from heartbeat(held, lease_seconds))

    def holds(self, runtime: Runtime, sessions: Sequence[SessionRef]) -> Op[dict[int, str]]:
        """Return the sessions with a running item, which must not be removed."""
        found = yield from rows(RUNNING_OF_SESSIONS, numbers=numbers_of(sessions))
        return {row["session_number"]: "has a running work item" for row in found}

    def cancel(self, runtime: Runtime, sessions: Sequence[SessionRef], limit: int) -> Op[int]:
        """Cancel the items of sessions, and fence their holders."""
        found = yield from rows(LIVE_OF_SESSIONS, numbers=numbers_of(sessions), limit=limit)
        change = Transition("cancelled", "session cancelled", fences=1, is_followed=False)
        yield from _finish(runtime, found, change, transitions.FINISH_LIVE)
        return len(found)

    def remove(self, runtime: Runtime, sessions: Sequence[SessionRef], limit: int) -> Op[int]:
        """Remove the items of sessions."""
        removal = Query(REMOVE_OF_SESSIONS, {"numbers": numbers_of(sessions), "limit": limit})
        [removed] = yield from through_door(f"work of {sessions[0].number}", removal)
        return len(removed)

    def rewind(
        self, runtime: Runtime, session: SessionRef, version: int, keeping: str | None
    ) -> Op[None]:
        """Fence the holders of a session's items and requeue these, without using up a retry.

        The item `keeping`, which rewinds its own session, keeps running.
        """
        here = numbers_of([session])
        found = yield from rows(LIVE_OF_SESSIONS, numbers=here, limit=ITEMS_MAX)
        running = [row for row in found if row["state"] == "in_progress" and row["id"] != keeping]
        change = Transition("pending", "session rewound", fences=1, releases=1)
        yield from _finish(runtime, running, change, transitions.FINISH_HELD)

    def settled(self, runtime: Runtime, effect_id: str) -> Op[None]:
        """Requeue the items that waited for an effect to be resolved."""
        found = yield from rows(WAITING_FOR_EFFECT, effect_id=effect_id)
        yield from _finish(runtime, found, transitions.RESOLVED, transitions.FINISH_IDLE)

    def sweep(self, runtime: Runtime, limit: int) -> Flow[Swept]:
        """Requeue or end items whose lease expired, one tree at a time; then promote due ones."""
        found = yield from perform(find_expired, runtime, limit)
        counts: Counter[str] = Counter()
        for rows_of_tree in by_tree(found):
            counts.update((yield from _sweep_tree(runtime, rows_of_tree)))
        promoted, due_ms = yield from perform(promote, runtime, PROMOTED_PER_PASS)
        return Swept(
            requeued=counts["scheduled"] + counts["pending"],
            failed=counts["failed"],
            cancelled=counts["cancelled"],
            parked=counts["review"],
            promoted=promoted,
            has_more=len(found) == limit or promoted == PROMOTED_PER_PASS,
            next_due_ms=due_ms,
        )

    def prune(self, runtime: Runtime, retention: Retention) -> Flow[Pruned]:
        """Remove old finished items, and then effects that only they could look up."""
        if retention.session is not None:
            return Pruned()
        count = 0
        while found := (yield from perform(find_old, runtime, retention.work_ms)):
            removed = 0
            for rows_of_tree in by_tree(found):
                removed += yield from perform(remove_finished, runtime, rows_of_tree)
            if not removed:
                break
            count += removed
        pruned = yield from prune_effects(runtime.codec, retention, EFFECTS_OF_NO_ITEM)
        return Pruned(items=count) + pruned


def _finish(runtime: Runtime, found: Sequence[Row], change: Transition, statement: str) -> Op[None]:
    if found:
        ended = [(Item[Any](runtime, row), change) for row in found]
        yield from transitions.finish(ended, statement)


def used_queues(queues: Sequence[str]) -> Query:
    """Return the query for those of some queues that have items."""
    return Query(USED_QUEUES, {"queues": given(queues)})


def remove_queue(queue: str, limit: int) -> Op[int]:
    """Remove items of a queue that a noun reserved, also running ones: their holders are fenced."""
    removal = Query(REMOVE_OF_QUEUE, {"queue": queue, "limit": limit})
    [removed] = yield from through_door(f"queue {queue}", removal)
    return len(removed)


@query
def find_expired(_: Runtime, limit: int) -> Op[list[Row]]:
    """Return items whose lease expired."""
    return (yield from rows(FIND_EXPIRED, limit=limit))


@operation
def finish_expired(runtime: Runtime, found: Sequence[Row], is_recorded: bool) -> Op[list[str]]:
    """End the attempts of items of one tree whose lease is still expired; return their states."""
    items: list[Item[Any]] = [Item(runtime, row) for row in found]
    ended = [(item, transitions.expired(item, is_recorded=is_recorded)) for item in items]
    answers = yield from transitions.finish(ended, transitions.FINISH_EXPIRED)
    return [answer["state"] for answer in answers if answer is not None]


def _sweep_tree(runtime: Runtime, found: Sequence[Row]) -> Flow[list[str]]:
    try:
        return (yield from perform(finish_expired, runtime, found, True))
    except StoreBusy:
        # The tree has been locked for long; the others need not wait for it.
        return []
    except CorruptRecord:
        # A session whose newest record is damaged takes no further record; its items still end.
        return (yield from perform(finish_expired, runtime, found, False))


@operation
def promote(runtime: Runtime, limit: int) -> Op[tuple[int, int | None]]:
    """Make due items ready; return how many, and the milliseconds until the next is due."""
    found = yield from rows(PROMOTE, limit=limit)
    yield from ring(runtime.signals, {row["queue"] for row in found})
    upcoming = yield from one(NEXT_PROMOTED)
    due_ms = None if upcoming is None else max(0, upcoming["available_at"] - upcoming["now"])
    return len(found), due_ms


@query
def find_old(_: Runtime, age_ms: int) -> Op[list[Row]]:
    """Return finished items that retention may remove, oldest first."""
    return (yield from rows(FIND_OLD, age_ms=age_ms, limit=REMOVED_PER_PASS))


@operation
def remove_finished(runtime: Runtime, found: Sequence[Row]) -> Op[int]:
    """Remove finished items of one tree, or of none, and record that in its feed."""
    root_id, session_id = found[0]["root_id"], found[0]["session_id"]
    if root_id is not None:
        yield Lock(root_id)
    numbers = [row["number"] for row in found]
    removals = (Query(REMOVE_FINISHED, {"number": number}) for number in numbers)
    count = sum(map(len, (yield from through_door(f"work {numbers[0]}", *removals))))
    if count and root_id is not None:
        yield from emit(runtime.codec, root_id, session_id, "work_pruned", {"count": count})
    return count

"""Work items in the life of a store: they follow their sessions, and the effects they wait for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ..kernel.append_only import through_door
from ..kernel.flow import Flow
from ..kernel.nouns import Noun, Retention
from ..kernel.operation import Op, Query, Row, Runtime, rows
from ..leases import EARLIER_BOOT
from ..records import Pruned, SessionRef, Swept
from ..sessions.rows import numbers_of
from .claims import heartbeat
from .items import COLUMNS, HOLD, Item
from .portable import WorkPortable
from .retention import prune
from .sweeping import sweep
from .transitions import HELD, IDLE, LIVE, RESOLVED, Ending, Endings

LIVE_OF_SESSIONS = f"""
SELECT {COLUMNS} FROM hf_work
WHERE session_number IN (
        SELECT CAST(key AS INTEGER) FROM json_each(CAST(:numbers AS TEXT) /*pg ::json */)
    )
    AND state IN ('scheduled', 'pending', 'in_progress', 'review')
ORDER BY number /*pg FOR NO KEY UPDATE */
"""  # noqa: S608
RUNNING_OF_SESSIONS = """
SELECT session_number FROM hf_work
WHERE session_number IN (
        SELECT CAST(key AS INTEGER) FROM json_each(CAST(:numbers AS TEXT) /*pg ::json */)
    )
    AND state = 'in_progress' AND lease_expires_at > :now
"""
AWAITING = f"""
SELECT {COLUMNS} FROM hf_work WHERE state = 'review' AND waits_for_effect = :effect_id
ORDER BY number
"""  # noqa: S608
FENCE = f"""
UPDATE hf_work SET lease_expires_at = :now, fence = fence + 1
WHERE state = 'in_progress' AND lease_expires_at > :now AND {EARLIER_BOOT}
RETURNING id
"""  # noqa: S608
REMOVE_OF_SESSION = "DELETE FROM hf_work WHERE session_number = :number"


class WorkNoun(Noun):
    """Work items follow the sessions they belong to, and the effects they wait for."""

    portable = WorkPortable()
    name = "work item"
    guard = HOLD
    fencing = FENCE
    leased = "hf_work WHERE state = 'in_progress'"
    leased_to = "worker"
    advice = "A running worker requeues them, and so does `holdfast work sweep`."
    any_record = "SELECT 1 AS found FROM hf_work LIMIT 1"

    def renew(self, held: Mapping[int, int], lease_seconds: float) -> Op[dict[int, Row]]:
        """Prolong the leases of running items."""
        return (yield from heartbeat(held, lease_seconds))

    def holds(self, runtime: Runtime, sessions: Sequence[SessionRef]) -> Op[dict[int, str]]:
        """An item that runs keeps its session."""
        found = yield from rows(RUNNING_OF_SESSIONS, numbers=numbers_of(sessions))
        return {row["session_number"]: "has an item that runs now" for row in found}

    def cancel(self, runtime: Runtime, sessions: Sequence[SessionRef]) -> Op[None]:
        """Cancel the items of sessions; whoever runs one is fenced."""
        found = yield from rows(LIVE_OF_SESSIONS, numbers=numbers_of(sessions))
        ending = Ending("cancelled", "session cancelled", fences=1)
        yield from _end(runtime, found, ending, LIVE)

    def remove(self, runtime: Runtime, sessions: Sequence[SessionRef]) -> Op[None]:
        """Remove the items of sessions."""
        removals = (Query(REMOVE_OF_SESSION, {"number": each.number}) for each in sessions)
        yield from through_door(f"work of {sessions[0].number}", *removals)

    def rewind(self, runtime: Runtime, session: SessionRef, keeping: str | None) -> Op[None]:
        """Fence whoever runs an item of a session, and make it ready again; no retry is spent.

        The item `keeping`, which rewinds its own session, runs on.
        """
        found = yield from rows(LIVE_OF_SESSIONS, numbers=numbers_of([session]))
        running = [row for row in found if row["state"] == "in_progress" and row["id"] != keeping]
        ending = Ending("pending", "session rewound", fences=1, releases=1)
        yield from _end(runtime, running, ending, HELD)

    def settled(self, runtime: Runtime, effect_id: str) -> Op[None]:
        """Make items ready that waited for an effect to be resolved."""
        found = yield from rows(AWAITING, effect_id=effect_id)
        yield from _end(runtime, found, RESOLVED, IDLE)

    def sweep(self, runtime: Runtime, limit: int) -> Flow[Swept]:
        """Requeue or end items whose lease ran out, and promote what is due."""
        return (yield from sweep(runtime, limit))

    def prune(self, runtime: Runtime, retention: Retention) -> Flow[Pruned]:
        """Remove finished items that are old, and then effects that only they could ask for."""
        return (yield from prune(runtime, retention)) if retention.session is None else Pruned()


def _end(runtime: Runtime, found: Sequence[Row], ending: Ending, statement: str) -> Op[None]:
    if found:
        ended = [(Item[Any](runtime, row), ending) for row in found]
        yield from Endings(runtime).finish(ended, statement)

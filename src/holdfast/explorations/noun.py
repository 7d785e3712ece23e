"""The lifecycle of worlds and explorations."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

from ..formatting import plural
from ..kernel.flow import Flow, perform
from ..kernel.nouns import Noun, Retention
from ..kernel.operation import Op, Query, Runtime, batch, defer, operation, rows
from ..records import Finding, Pruned, SessionRef
from ..sessions.rows import ALL_SESSIONS, AMONG_NUMBERS, numbers_of
from ..work.noun import remove_queue, used_queues
from .portable import ExplorationsPortable
from .rows import queues_of

REMOVED_PER_PASS = 500

NUMBERED = ("hf_world_frontier", "hf_world_steps", "hf_world_states", "hf_world_checkpoints")
REMOVE_ROWS = [
    f"""
    DELETE FROM {table} WHERE number IN (
        SELECT number FROM {table} WHERE session_number {AMONG_NUMBERS} LIMIT :limit
    ) RETURNING number
    """  # noqa: S608
    for table in NUMBERED
]
REMOVE_WORLDS = f"DELETE FROM hf_worlds WHERE session_number {AMONG_NUMBERS}"  # noqa: S608
ENDED_LONG_AGO = f"""
SELECT s.number FROM {ALL_SESSIONS} JOIN hf_worlds w ON w.session_number = s.number
WHERE s.status IN ('completed', 'failed', 'cancelled') AND s.updated_at < :now - :age_ms
"""  # noqa: S608
FORGET_ROWS = [
    f"""
    DELETE FROM {table} WHERE number IN (
        SELECT number FROM {table} WHERE session_number IN ({ENDED_LONG_AGO}) LIMIT :limit
    ) RETURNING number
    """  # noqa: S608
    for table in NUMBERED
]
LOST_ROWS = " UNION ".join(
    f"""
    SELECT session_number FROM {table} t
    WHERE NOT EXISTS (SELECT 1 FROM {ALL_SESSIONS} WHERE s.number = t.session_number)
    """  # noqa: S608
    for table in ("hf_worlds", *NUMBERED)
)
LOST_STATES = """
SELECT DISTINCT e.session_number FROM hf_world_steps e WHERE NOT EXISTS (
    SELECT 1 FROM hf_world_states a WHERE a.session_number = e.session_number AND a.id = e.from_id
) OR (e.to_id IS NOT NULL AND NOT EXISTS (
    SELECT 1 FROM hf_world_states b WHERE b.session_number = e.session_number AND b.id = e.to_id
)) ORDER BY 1 LIMIT 10
"""
UNFINISHED = f"""
SELECT s.id FROM {ALL_SESSIONS} JOIN hf_worlds w ON w.session_number = s.number
WHERE w.intent IS NOT NULL AND NOT (s.holder IS NOT NULL AND s.lease_expires_at > :now)
ORDER BY s.number LIMIT 10
"""  # noqa: S608
COUNT_ROWS = """
SELECT (SELECT count(*) FROM hf_worlds) AS worlds,
    (SELECT count(*) FROM hf_world_states) AS states
"""


class ExplorationsNoun(Noun):
    """Worlds and explorations: they belong to a session, and are removed with it."""

    portable = ExplorationsPortable()
    any_record = "SELECT 1 AS found FROM hf_worlds LIMIT 1"

    def remove(self, runtime: Runtime, sessions: Sequence[SessionRef], limit: int) -> Op[int]:
        """Remove the rows of sessions, and the work items of workers that were killed."""
        here = {"numbers": numbers_of(sessions), "limit": limit}
        queues = used_queues([name for each in sessions for name in queues_of(each.number)])
        *removed, used = yield from batch(*(Query(each, here) for each in REMOVE_ROWS), queues)
        count = max(map(len, removed))
        for row in used:
            count = max(count, (yield from remove_queue(row["queue"], limit)))
        if count < limit:
            yield from defer(REMOVE_WORLDS, **here)
        return count

    def prune(self, runtime: Runtime, retention: Retention) -> Flow[Pruned]:
        """Remove the graphs of explorations that ended long ago; their settings and totals stay."""
        count = 0
        if retention.session is None and retention.history_ms is not None:
            while removed := (yield from perform(forget_rows, runtime, retention.history_ms)):
                count += removed
        return Pruned(others=Counter({"row of explorations": count} if count else {}))

    def checks(self) -> dict[str, Callable[[], Op[list[Finding]]]]:
        """Look for steps without their states, and for rollbacks that nobody finished."""
        return {"worlds": check_worlds}


@operation
def forget_rows(_: Runtime, age_ms: int) -> Op[int]:
    """Remove some rows of explorations that ended long ago, and return how many."""
    for forget in FORGET_ROWS:
        removed = yield from rows(forget, age_ms=age_ms, limit=REMOVED_PER_PASS)
        if removed:
            return len(removed)
    return 0


def check_worlds() -> Op[list[Finding]]:
    """Look for steps without their states, and for rollbacks that nobody finished."""
    lost = (yield from rows(LOST_ROWS)) or (yield from rows(LOST_STATES))
    if lost:
        numbers = ", ".join(str(row["session_number"]) for row in lost[:10])
        message = f"Explorations of sessions with these numbers lack rows: {numbers}."
        advice = "Rows were changed by hand: restore a backup, or delete these sessions."
        return [Finding("worlds", "problem", message, advice)]
    if unfinished := (yield from rows(UNFINISHED)):
        ids = ", ".join(row["id"] for row in unfinished)
        message = f"A rollback was not finished in these worlds: {ids}."
        advice = "Open the world again with this store and id to finish it."
        return [Finding("worlds", "warning", message, advice)]
    [row] = yield from rows(COUNT_ROWS)
    worlds, states = plural(row["worlds"], "world"), plural(row["states"], "explored state")
    return [Finding("worlds", "ok", f"{worlds}, {states}.")]

"""Claiming what is ready and keeping it: no tree is locked and no event written."""

from __future__ import annotations

import functools
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from ..arguments import require_limit, require_text, shown
from ..errors import InvalidArgument
from ..kernel.operation import Op, Query, Row, batch, decide, fresh_id, one, rows
from ..leases import lease_milliseconds
from .driving import renew_driven
from .items import COLUMNS

CLAIM_MAX = 1_000
QUEUES_MAX = 50
HELD_MAX = 10_000

# PostgreSQL might run a plain subquery once per row, and take any LIMIT for a tenth of the table;
# an array is made once and taken to be short, so that the rows are found by their numbers. What it
# found is locked and in this state: to say so again would let it read all that are, where it takes
# them for few.
CLAIM = f"""
UPDATE hf_work SET
    state = 'in_progress', holder = :holder, last_holder = :holder, fence = fence + 1,
    attempts = attempts + 1, driving_fence = NULL,
    lease_acquired_at = :now, lease_expires_at = :now + :lease_ms, heartbeat_at = :now,
    started_at = coalesce(started_at, :now), error = NULL, progress = NULL, updated_at = :now
    /*pg , claim_id = :claim_id */
WHERE number IN (
    /*pg SELECT unnest(ARRAY( */
    WITH next AS MATERIALIZED ({{ready}}) SELECT number FROM next
    /*pg )) */
)
RETURNING {COLUMNS}
"""  # noqa: S608
CLAIMED = f"SELECT {COLUMNS} FROM hf_work WHERE state = 'in_progress' AND claim_id = :claim_id"  # noqa: S608
READY = """
SELECT number, priority FROM hf_work WHERE state = 'pending' AND queue = :queue{index}
ORDER BY priority DESC, number LIMIT :limit /*pg FOR NO KEY UPDATE SKIP LOCKED */
"""
# One look into the index per queue, whatever lies in it.
READY_QUEUES = """
WITH RECURSIVE queues (queue) AS (
    SELECT min(queue) FROM hf_work WHERE state = 'pending'
    UNION ALL
    SELECT (SELECT min(w.queue) FROM hf_work w WHERE w.state = 'pending' AND w.queue > q.queue)
    FROM queues q WHERE q.queue IS NOT NULL
)
SELECT first.queue FROM (
    SELECT q.queue, (
        SELECT max(w.priority) FROM hf_work w WHERE w.state = 'pending' AND w.queue = q.queue
    ) AS priority, (
        SELECT w.number FROM hf_work w WHERE w.state = 'pending' AND w.queue = q.queue
        ORDER BY w.priority DESC, w.number LIMIT 1
    ) AS number
    FROM queues q WHERE q.queue IS NOT NULL
) AS first
ORDER BY first.priority DESC, first.number LIMIT :limit
"""
IS_READY = "EXISTS (SELECT 1 FROM hf_work WHERE state = 'pending' AND queue = :queue{index})"
LOOK_FOR_WORK = """
SELECT {ready} AS is_ready, :now AS now,
    (SELECT min(available_at) FROM hf_work WHERE state = 'scheduled') AS due_at
"""
NOT_ENDED = """
SELECT number FROM hf_work
WHERE number = :number AND state IN ('scheduled', 'pending', 'in_progress')
"""
# Rows are locked by number, as everybody does who locks several: so no two wait for each other.
HEARTBEAT = """
UPDATE hf_work SET
    heartbeat_at = :now,
    lease_expires_at = CASE
        WHEN lease_expires_at > :now + :lease_ms THEN lease_expires_at ELSE :now + :lease_ms END
WHERE number IN (
    /*pg SELECT unnest(ARRAY( */
    WITH held AS MATERIALIZED (
        SELECT w.number FROM json_each(CAST(:held AS TEXT) /*pg ::json */) h
        JOIN hf_work w ON w.number = CAST(h.key AS INTEGER)
        WHERE w.state = 'in_progress' AND w.fence = CAST(CAST(h.value AS TEXT) AS INTEGER)
        ORDER BY w.number /*pg FOR NO KEY UPDATE OF w */
    )
    SELECT number FROM held
    /*pg )) */
)
RETURNING number, lease_expires_at, heartbeat_at, cancel_requested, session_number, driving_fence
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Beat:
    """What a heartbeat brought back: the lease's new end, or that it is lost, and cancellation."""

    id: str
    is_lost: bool
    cancel_requested: bool
    lease_expires_at: int | None


@dataclass(frozen=True, slots=True)
class Claim:
    """Who wants how many items of which queues, and for how long."""

    holder: str
    limit: int
    queues: Sequence[str]
    lease_seconds: float

    def take(self) -> Op[list[Row]]:
        """Lease the items: on PostgreSQL in one round trip, if the call begins with it."""
        claim_id = yield from fresh_id()
        again = Query(CLAIMED, {"claim_id": claim_id})
        [taken] = yield from decide(self.query(claim_id), again=again)
        return in_order(taken)

    def query(self, claim_id: str) -> Query:
        """Return the statement that leases them: the highest priority first, then the oldest."""
        given: dict[str, object] = {
            "holder": self.holder,
            "limit": self.limit,
            "lease_ms": lease_milliseconds(self.lease_seconds),
            "claim_id": claim_id,
        }
        named = {f"queue{index}": name for index, name in enumerate(self.queues)}
        return Query(_claim_of(len(self.queues)), given | named)


def claim(
    holder: str, limit: int, queues: Sequence[str] | str | None, lease_seconds: float
) -> Op[list[Row]]:
    """Lease up to `limit` items to a holder: the highest priority first, then the oldest."""
    require_text("holder", holder)
    require_limit(limit, CLAIM_MAX)
    lease_milliseconds(lease_seconds)
    if queues is None:
        # A queue whose best item is not among the best of `limit` queues cannot be served now.
        found = yield from rows(READY_QUEUES, limit=min(limit, QUEUES_MAX))
        names = [row["queue"] for row in found]
    else:
        names = require_queues(queues)
    if not names:
        return []
    return (yield from Claim(holder, limit, names, lease_seconds).take())


def in_order(taken: Sequence[Row]) -> list[Row]:
    """Return what was claimed in the order in which it is to be done."""
    return sorted(taken, key=lambda row: (-row["priority"], row["number"]))


def require_queues(queues: Sequence[str] | str) -> list[str]:
    """Return the names of queues, each once."""
    names = [queues] if isinstance(queues, str) else queues
    if not isinstance(names, list | tuple | set | frozenset) or not 0 < len(names) <= QUEUES_MAX:
        raise InvalidArgument(f"queues must be 1 to {QUEUES_MAX} names, not {shown(queues)}")
    return sorted({require_text("queue", name) for name in names})


@functools.cache
def _claim_of(count: int) -> str:
    """Return the statement that claims from so many queues at once."""
    ready = READY.format(index=0)
    if count > 1:
        parts = (f"SELECT * FROM ({READY.format(index=i)}) AS q{i}" for i in range(count))  # noqa: S608
        ready = f"""
        SELECT number FROM ({" UNION ALL ".join(parts)}) AS ready
        ORDER BY priority DESC, number LIMIT :limit
        """  # noqa: S608
    return CLAIM.format(ready=ready)


def heartbeat(held: Mapping[int, int], lease_seconds: float) -> Op[dict[int, Row]]:
    """Prolong leases, given as number and fence; those missing from the answer are lost."""
    lease_ms = lease_milliseconds(lease_seconds)
    if len(held) > HELD_MAX:
        raise InvalidArgument(f"at most {HELD_MAX} leases are renewed at once, not {len(held)}")
    if not held:
        return {}
    found = yield from rows(HEARTBEAT, held=json.dumps(held), lease_ms=lease_ms)
    yield from renew_driven(found, lease_ms)
    return {row["number"]: row for row in found}


def look_for_work(queues: Sequence[str]) -> Op[tuple[bool, float | None]]:
    """Return whether something is ready, and in how many seconds something is due."""
    named = {f"queue{index}": name for index, name in enumerate(queues)}
    found = yield from one(_look_at(len(queues)), **named)
    assert found is not None
    due_at = found["due_at"]
    return bool(found["is_ready"]), None if due_at is None else (due_at - found["now"]) / 1000


@functools.cache
def _look_at(count: int) -> str:
    ready = " OR ".join(IS_READY.format(index=index) for index in range(count))
    return LOOK_FOR_WORK.format(ready=ready)


def not_ended(numbers: Iterable[int]) -> Op[set[int]]:
    """Return those of some items that have not ended and wait for no person."""
    found = yield from batch(*(Query(NOT_ENDED, {"number": number}) for number in numbers))
    return {row["number"] for answer in found for row in answer}

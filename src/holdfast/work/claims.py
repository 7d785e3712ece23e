"""Leases of work items and of the sessions that they drive: claims and heartbeats.

A claim or a heartbeat locks no tree and writes no event.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ..arguments import require_limit, require_text, shown
from ..checkpoints.write import record_status
from ..dataclass import dataclass
from ..errors import InvalidArgument
from ..kernel.operation import (
    Decide,
    FreshId,
    Op,
    Query,
    Row,
    Runtime,
    batch,
    defer,
    one,
    query,
    rows,
)
from ..kernel.sql import among, given
from ..leases import lease_milliseconds
from ..sessions.access import lock_and_read_with, require_open, require_writable
from ..sessions.rows import (
    AWAITS_TURN,
    LEASE_SESSION_TO_ITEM,
    LEASE_SESSIONS_TO_ITEMS,
    LEASED_TO_ITEM,
    NEXT_FENCE,
    RELEASE_DRIVEN_SESSION,
    RENEW_SESSION,
    RowChange,
)
from ..wire import travels
from .items import ITEM_COLUMNS, SELECT_ITEMS, Item

CLAIM_MAX = 1_000
QUEUES_MAX = 50
HELD_MAX = 10_000

# PostgreSQL might run a plain subquery once per row, and estimates a LIMIT as a tenth of the table.
# An array is built once and estimated as short, so the rows are found by number. The condition on
# the state is not repeated, or the planner could scan all rows of that state.
CLAIM = f"""
UPDATE hf_work SET
    state = 'in_progress', holder = :holder, last_holder = :holder, fence = fence + 1,
    attempts = attempts + 1, driving_fence = {{driving_fence}},
    lease_acquired_at = :now, lease_expires_at = :now + :lease_ms, heartbeat_at = :now,
    sweep_at = :now + :lease_ms,
    started_at = coalesce(started_at, :now), error = NULL, progress = NULL, updated_at = :now
    /*pg , claim_id = :claim_id */
WHERE number IN (
    /*pg SELECT unnest(ARRAY( */
    WITH next AS MATERIALIZED ({{ready}}) SELECT number FROM next
    /*pg )) */
)
RETURNING {ITEM_COLUMNS}
"""  # noqa: S608
READ_CLAIMED = f"{SELECT_ITEMS} WHERE state = 'in_progress' AND claim_id = :claim_id"
READY = """
SELECT number, priority FROM hf_work {of_queue}
ORDER BY priority DESC, number LIMIT :limit /*pg FOR NO KEY UPDATE SKIP LOCKED */
"""
OF_QUEUE = "WHERE state = 'pending' AND queue = :queue{index}"
# Queues of which only their noun claims, by name: a claim of all queues leaves them out.
RESERVED = "holdfast/"
OF_ALL_QUEUES = f"""INDEXED BY ix_work_ready_all WHERE state = 'pending' AND number > 0
    AND substr(queue, 1, {len(RESERVED)}) <> '{RESERVED}'"""
IS_READY = "EXISTS (SELECT 1 FROM hf_work WHERE state = 'pending' AND queue = :queue{index})"
FIND_READY = """
SELECT {ready} AS is_ready, :now AS now{due}
"""
NEXT_DUE = """
SELECT min(available_at) FROM hf_work INDEXED BY ix_work_scheduled WHERE state = 'scheduled'
"""
NOT_ENDED = """
SELECT number FROM hf_work
WHERE number = :number AND state IN ('scheduled', 'pending', 'in_progress')
"""
CLAIM_ITEM = CLAIM.format(
    ready="SELECT number FROM hf_work WHERE id = :id AND state = 'pending'", driving_fence="NULL"
)
# With a heartbeat each third of a lease, two of three change no indexed column.
RENEWED = """heartbeat_at = :now,
    lease_expires_at = CASE
        WHEN lease_expires_at > :now + :lease_ms THEN lease_expires_at ELSE :now + :lease_ms END,
    sweep_at = CASE
        WHEN sweep_at > :now + :lease_ms / 4 THEN sweep_at
        WHEN lease_expires_at > :now + :lease_ms THEN lease_expires_at ELSE :now + :lease_ms END"""
# Rows are locked by number, as everywhere, so that no two transactions deadlock. What is asked of
# the state does not lead away from the numbers: else SQLite would read all that run.
HEARTBEAT = f"""
UPDATE hf_work SET {RENEWED}
WHERE number IN (
    /*pg SELECT unnest(ARRAY( */
    WITH held AS MATERIALIZED (
        SELECT w.number FROM json_each(CAST(:held AS TEXT) /*pg ::json */) h
        JOIN hf_work w ON w.number = CAST(h.key AS INTEGER)
        WHERE coalesce(w.state, '') = 'in_progress'
            AND w.fence = CAST(CAST(h.value AS TEXT) AS INTEGER)
        ORDER BY w.number /*pg FOR NO KEY UPDATE OF w */
    )
    SELECT number FROM held
    /*pg )) */
)
RETURNING number, lease_expires_at, heartbeat_at, cancel_requested, session_number, driving_fence
"""  # noqa: S608
READ_DRIVING = "SELECT driving_fence FROM hf_work WHERE number = :number"
DRIVER = "'work item ' || w.id || ', fence ' || w.fence"
OF_ITEM = {
    "holder": f"SELECT {DRIVER} FROM hf_work w WHERE w.number = :item_number",  # noqa: S608
    "expires_at": "SELECT w.lease_expires_at FROM hf_work w WHERE w.number = :item_number",
}
LEASE_SESSION = LEASE_SESSION_TO_ITEM.format(**OF_ITEM)
LEASED = LEASED_TO_ITEM.format(**OF_ITEM)
LEASE_SESSIONS = LEASE_SESSIONS_TO_ITEMS.format(
    items=f"""
    SELECT w.session_number, {DRIVER} AS holder, w.lease_expires_at AS expires_at
    FROM hf_work w WHERE w.number {among("items", "INTEGER")}
    """  # noqa: S608
)
SET_DRIVING = """
UPDATE hf_work SET driving_fence = CAST(:fence AS INTEGER)
WHERE number = :number AND state = 'in_progress'
"""


@travels
@dataclass(frozen=True, slots=True, kw_only=True)
class Beat:
    """The answer to a heartbeat: whether the lease is lost, or the holder should stop."""

    id: str
    is_lost: bool
    cancel_requested: bool
    lease_expires_at: int | None


@travels
@dataclass(frozen=True, slots=True)
class Claim:
    """A request for leases on items: for whom, how many, from which queues, for how long."""

    holder: str
    limit: int
    queues: Sequence[str]
    lease_ms: int
    drives: bool = False
    """Whether the caller leases the sessions of the items in the same transaction."""

    def take(self) -> Op[list[Row]]:
        """Lease the items, in one round trip on PostgreSQL if the call starts with it."""
        claim_id = yield FreshId()
        again = Query(READ_CLAIMED, {"claim_id": claim_id})
        [taken] = yield Decide([self.query(claim_id)], again=again)
        return in_order(taken)

    def query(self, claim_id: str) -> Query:
        """Return the statement that leases them, highest priority first, then oldest."""
        given: dict[str, object] = {f"queue{i}": name for i, name in enumerate(self.queues)}
        given |= {"holder": self.holder, "limit": self.limit}
        given |= {"lease_ms": self.lease_ms, "claim_id": claim_id}
        return Query(_claim_of(len(self.queues), self.drives), given)


def claim(
    holder: str, limit: int, queues: Sequence[str] | str | None, lease_seconds: float
) -> Op[list[Row]]:
    """Lease up to `limit` items to a holder, highest priority first, then oldest."""
    require_text("holder", holder)
    require_limit(limit, CLAIM_MAX)
    lease_ms = lease_milliseconds(lease_seconds)
    names = [] if queues is None else require_queues(queues)
    return (yield from Claim(holder, limit, names, lease_ms).take())


def claim_item(id: str, claim: Claim) -> Op[Row | None]:
    """Lease one item, if it is ready."""
    given = {"holder": claim.holder, "lease_ms": claim.lease_ms, "claim_id": (yield FreshId())}
    return (yield from one(CLAIM_ITEM, id=id, **given))


def in_order(taken: Sequence[Row]) -> list[Row]:
    """Return claimed items in the order to run them."""
    return sorted(taken, key=lambda row: (-row["priority"], row["number"]))


def require_queues(queues: Sequence[str] | str) -> list[str]:
    """Return the distinct names of queues, sorted."""
    names = [queues] if isinstance(queues, str) else queues
    if not isinstance(names, list | tuple | set | frozenset) or not 0 < len(names) <= QUEUES_MAX:
        raise InvalidArgument(f"queues must be 1 to {QUEUES_MAX} names, not {shown(queues)}")
    return sorted({require_text("queue", name) for name in names})


@functools.cache
def _claim_of(count: int, drives: bool = False) -> str:
    """Return the statement that claims from this many queues at once; 0 means from all.

    One that `drives` notes the fences that the leases of the sessions will have.
    """
    names = [OF_QUEUE.format(index=index) for index in range(count)] or [OF_ALL_QUEUES]
    [ready, *_] = queues = [READY.format(of_queue=name) for name in names]
    if count > 1:
        parts = (f"SELECT * FROM ({each}) AS q{index}" for index, each in enumerate(queues))  # noqa: S608
        ready = f"""
        SELECT number FROM ({" UNION ALL ".join(parts)}) AS ready
        ORDER BY priority DESC, number LIMIT :limit
        """  # noqa: S608
    fence = NEXT_FENCE.format(number="hf_work.session_number") if drives else "NULL"
    return CLAIM.format(ready=ready, driving_fence=fence)


@query
def find_ready(runtime: Runtime, queues: Sequence[str]) -> Op[tuple[bool, float | None]]:
    """Return whether an item is ready, and in how many seconds something of any noun is due."""
    named = {f"queue{index}": name for index, name in enumerate(queues)}
    dues = tuple(noun.due for noun in runtime.nouns if noun.due)
    found = yield from one(_find_ready_in(len(queues), dues), **named)
    assert found is not None
    times = [found[f"due{index}"] for index in range(len(dues))]
    due_at = min((each for each in times if each is not None), default=None)
    return bool(found["is_ready"]), None if due_at is None else (due_at - found["now"]) / 1000


@functools.cache
def _find_ready_in(count: int, dues: Sequence[str]) -> str:
    ready = " OR ".join(IS_READY.format(index=index) for index in range(count))
    due = "".join(f", ({each}) AS due{index}" for index, each in enumerate(dues))
    return FIND_READY.format(ready=ready, due=due)


@query
def not_ended(_: object, numbers: Iterable[int]) -> Op[set[int]]:
    """Return which of these items have not ended and are not parked for review."""
    found = yield from batch(*(Query(NOT_ENDED, {"number": number}) for number in numbers))
    return {row["number"] for answer in found for row in answer}


def heartbeat(held: Mapping[int, int], lease_seconds: float) -> Op[dict[int, Row]]:
    """Renew leases, given as number and fence; those missing from the answer are lost."""
    lease_ms = lease_milliseconds(lease_seconds)
    if len(held) > HELD_MAX:
        raise InvalidArgument(f"at most {HELD_MAX} leases can be renewed at once, not {len(held)}")
    if not held:
        return {}
    found = yield from rows(HEARTBEAT, held=json.dumps(held), lease_ms=lease_ms)
    yield from renew_sessions(found, lease_ms)
    return {row["number"]: row for row in found}


def beat(item: Item[Any], row: Row | None) -> Beat:
    """Return the answer to an item's heartbeat; without a row its lease is lost."""
    return Beat(
        id=item.id,
        is_lost=row is None,
        cancel_requested=row is not None and bool(row["cancel_requested"]),
        lease_expires_at=None if row is None else row["lease_expires_at"],
    )


def drive(item: Item[Any]) -> Op[int]:
    """Lease the item's session to its attempt, and return the lease's fence.

    A waiting session becomes active. Raises SessionBusy while another holder drives it.
    """
    return (yield from drive_with(item))[0].fence


@dataclass(frozen=True, slots=True)
class Driven:
    """A session that an attempt drives: its fence, and its row before that."""

    fence: int
    row: Row


def drive_with(item: Item[Any], *beside: Query) -> Op[tuple[Driven, list[list[Row]]]]:
    """Do the same, and run queries in the round trip that reads the session, before it changes."""
    place = item._place(guard=item._guard())
    if place is None:
        raise InvalidArgument(f"work item {item.id} has no session to drive")
    looks = Query(READ_DRIVING, {"number": item.number})
    found, held, *answers = yield from lock_and_read_with(item.runtime, place, looks, *beside)
    session = require_open(place, found)
    if held and held[0]["driving_fence"] == session["fence"] and session["holder"]:
        return Driven(int(session["fence"]), session), answers
    require_writable(item.runtime, place, found)
    return (yield from take_session(item, session)), answers


def take_session(item: Item[Any], session: Row) -> Op[Driven]:
    """Lease a session to an attempt, which holds its item; the session may be written."""
    if session["status"] == "active":
        yield from lease_sessions([(item, session)])
        return Driven(session["fence"] + 1, session)
    place = item._place()
    assert place is not None
    change = RowChange(f"{LEASED}, {AWAITS_TURN}", {"item_number": item.number})
    yield from record_status(item.runtime, place, "waiting", "active", session, change)
    yield from _note_driving(item, session["fence"] + 1)
    return Driven(session["fence"] + 1, session)


def lease_sessions(driven: Sequence[tuple[Item[Any], Row]]) -> Op[None]:
    """Lease active sessions to attempts, which hold their items."""
    if len(driven) == 1:
        [(item, session)] = driven
        yield from defer(LEASE_SESSION, number=session["number"], item_number=item.number)
    elif driven:
        yield from defer(LEASE_SESSIONS, items=given(item.number for item, _ in driven))
    for item, session in driven:
        yield from _note_driving(item, session["fence"] + 1)


def _note_driving(item: Item[Any], fence: int | None) -> Op[None]:
    """Note the fence of the session's lease in the item, unless its claim has done so."""
    if item.driving_fence != fence:
        yield from defer(SET_DRIVING, number=item.number, fence=fence)


def claimed_only(item: Item[Any]) -> Op[None]:
    """Forget the fence that a claim has noted, because the session was not leased."""
    yield from _note_driving(item, None)


def renew_sessions(items: Iterable[Row], lease_ms: int) -> Op[None]:
    """Renew the leases of the sessions that the attempts of these items drive."""
    yield from _each_driven(RENEW_SESSION, items, lease_ms=lease_ms)


def release_sessions(items: Iterable[Row]) -> Op[None]:
    """Release the sessions that ended attempts drove, and fence their late writes."""
    yield from _each_driven(RELEASE_DRIVEN_SESSION, items)


def _each_driven(statement: str, items: Iterable[Row], **given: int) -> Op[None]:
    """Run a statement for every driven session, ordered by number."""
    driven = {(row["session_number"], row["driving_fence"]) for row in items}
    for number, fence in sorted(pair for pair in driven if None not in pair):
        yield from defer(statement, number=number, fence=fence, **given)

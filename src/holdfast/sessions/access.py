"""Who may write to an open session: its driver, or anybody while it has none."""

from __future__ import annotations

from collections.abc import Collection

from ..clock import iso
from ..dataclass import dataclass
from ..errors import LeaseLost, SessionBusy, SessionEnded, SessionNotFound
from ..kernel.operation import Lock, Op, Query, Row, Runtime, batch
from ..kernel.sql import given
from ..leases import Guard, Keeper
from ..wire import travels
from .rows import AMONG_NUMBERS

LOCK_SESSION = """
SELECT number, agent, user_id, version, epoch, head, origin_number, status, holder, fence,
    awaits_turn, lease_expires_at, lease_expires_at > :now AS is_leased
FROM hf_sessions WHERE number = :number /*pg FOR NO KEY UPDATE */
"""
# For a transaction that has the lock of the tree: only a late renewal can change the row, and its
# holder is fenced by whoever takes the lease.
LOOK_AT_SESSION = LOCK_SESSION.replace("/*pg FOR NO KEY UPDATE */", "")
LOOK_AT_SESSIONS = LOOK_AT_SESSION.replace("= :number", f"{AMONG_NUMBERS}")
# The statuses of sessions that are ended in several transactions; they cannot be reopened.
CLOSING = frozenset({"cancelling", "deleting"})
# The same rule as `require_writable`, as a condition of statements.
MAY_WRITE_SESSION = """s.status IN ('active', 'waiting')
    AND CASE WHEN CAST({fence} AS INTEGER) IS NULL
        THEN s.holder IS NULL OR s.lease_expires_at <= :now
        ELSE s.fence = CAST({fence} AS INTEGER) AND s.holder IS NOT NULL END"""
# Moves a session's head; the statements after it write only if it was moved.
ADVANCE_SESSION = f"""
UPDATE hf_sessions AS s SET
    version = version + 1, epoch = epoch + :epochs, head = :head, updated_at = :now{{also}}
WHERE s.number = :number AND s.head = :old_head
    AND (CAST(:expected AS INTEGER) IS NULL OR s.version = :expected)
    AND (s.awaits_turn = 0 OR :is_turn = 0) AND ({{unless}})
    AND {MAY_WRITE_SESSION.format(fence=":fence")}
RETURNING {{returned}}
"""  # noqa: S608


@travels
@dataclass(frozen=True, slots=True)
class Place:
    """The session to write to, and the lease to write with."""

    session_id: str
    number: int
    root_id: str
    """Empty for a deleted session of which the tree is not known."""
    fence: int | None
    guard: Guard | None = None


def look_at(numbers: Collection[int]) -> Query:
    """Return the query for the rows of sessions whose trees are locked."""
    if len(numbers) == 1:
        return Query(LOOK_AT_SESSION, {"number": min(numbers)})
    return Query(LOOK_AT_SESSIONS, {"numbers": given(numbers)})


def lock_and_read(runtime: Runtime, place: Place) -> Op[list[Row]]:
    """Lock the tree and return the session's row. Raises LeaseLost."""
    return (yield from lock_and_read_with(runtime, place))[0]


def lock_and_read_with(runtime: Runtime, place: Place, *beside: Query) -> Op[list[list[Row]]]:
    """Do the same, and run other queries in the same round trip; return the rows of each."""
    keeper = Keeper.of(runtime)
    read = Query(LOCK_SESSION, {"number": place.number})
    # Whether the tree is there is seen by its session.
    lock = Lock(place.root_id, is_asked=False)
    _, *answers = yield from batch(lock, *keeper.looks(place.guard), read, *beside)
    return keeper.require(place.guard, answers)


def ended(id: str, status: str) -> SessionEnded:
    """Return the error for a session that has ended or is being ended."""
    advice = "open it with reopen=True to continue"
    if status == "cancelling":
        advice = "to cancel it again finishes that"
    elif status == "deleting":
        advice = "to delete it again, by force, finishes that"
    return SessionEnded(f"session {id} is {status}; {advice}", session_id=id, status=status)


def require_open(place: Place, found: list[Row]) -> Row:
    """Return the row of a session that exists and has not ended, or raise."""
    if not found:
        raise SessionNotFound(f"there is no session {place.session_id!r}", id=place.session_id)
    row = found[0]
    if row["status"] not in {"active", "waiting"}:
        raise ended(place.session_id, row["status"])
    return row


def require_writable(runtime: Runtime, place: Place, found: list[Row]) -> Row:
    """Return the session's row, or raise if this handle may not write."""
    # An old fence is reported first: whoever took the lease over may also have ended the session.
    if found and place.fence not in {None, found[0]["fence"]}:
        require_fence(place, found[0])
    row = require_open(place, found)
    if place.fence is None and row["holder"] is not None and row["is_leased"]:
        until = iso(row["lease_expires_at"])
        why = (
            f"is driven by {row['holder']!r}; only the driver may write, until its lease expires "
            f"(at {until} unless renewed)"
        )
        driven = Guard("session", place.session_id, place.number, row["fence"])
        if Keeper.of(runtime).is_kept(driven):
            why = "is driven by this process; write through the handle that drive() returned"
        raise SessionBusy(
            f"session {place.session_id} {why}",
            session_id=place.session_id,
            holder=row["holder"],
            expires_at=row["lease_expires_at"],
        )
    require_fence(place, row)
    return row


def require_fence(place: Place, row: Row) -> None:
    """Raise LeaseLost if this handle drove the session and no longer does."""
    if place.fence is None or (row["fence"] == place.fence and row["holder"] is not None):
        return
    why = f"is old, the current one is {row['fence']}"
    if row["fence"] == place.fence:
        why = "was released"
    raise LeaseLost(
        f"session {place.session_id}: this driver's fence {place.fence} {why}; stop, nothing was "
        "written",
        session_id=place.session_id,
        fence=place.fence,
        current_fence=row["fence"],
    )

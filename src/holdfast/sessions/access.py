"""Who may write to a session: while it is open, its driver, or anybody while nobody drives it."""

from __future__ import annotations

from dataclasses import dataclass

from ..errors import LeaseLost, SessionBusy, SessionEnded, SessionNotFound
from ..kernel.handle import PerStore, Runtime
from ..kernel.operation import Lock, Op, Query, Row, batch
from ..leases import Guard

LOOK = """
SELECT number, version, epoch, head, origin_number, salt, status, holder, fence, lease_expires_at,
    lease_expires_at > :now AS is_leased
FROM hf_sessions WHERE number = :number /*pg FOR NO KEY UPDATE */
"""
# The same rule as `require_writable`, for the statements that decide by themselves.
MAY_WRITE = """s.status IN ('active', 'waiting')
    AND CASE WHEN CAST({fence} AS INTEGER) IS NULL
        THEN s.holder IS NULL OR s.lease_expires_at <= :now
        ELSE s.fence = CAST({fence} AS INTEGER) AND s.holder IS NOT NULL END"""
# Moves a session's head; what follows the head is written only if it was moved.
ADVANCE = f"""
UPDATE hf_sessions AS s SET
    version = version + 1, epoch = epoch + :epochs, head = :head, updated_at = :now
WHERE s.number = :number AND s.head = :old_head
    AND (CAST(:expected AS INTEGER) IS NULL OR s.version = :expected)
    AND ({{unless}}) AND {MAY_WRITE.format(fence=":fence")}
RETURNING version
"""  # noqa: S608


class Driven(PerStore, dict[int, int]):
    """The sessions that handles of this store drive, by number, with their fences."""

    def __init__(self, runtime: Runtime) -> None:
        dict.__init__(self)


@dataclass(frozen=True, slots=True)
class Place:
    """The session that is written to, and by whom."""

    session_id: str
    number: int
    root_id: str
    fence: int | None
    guard: Guard | None = None
    driven_fence: int | None = None
    """The fence under which another handle of the same store drives the session."""

    def guards(self) -> list[Query]:
        """Return the looks that must find something for this write to be allowed."""
        return [] if self.guard is None else [self.guard.look]

    def require_guards(self, answers: list[list[Row]]) -> list[list[Row]]:
        """Raise LeaseLost if a look found nothing; return the answers behind the looks."""
        if self.guard is None:
            return answers
        self.guard.require(answers[0])
        return answers[1:]


def lock_and_look(place: Place) -> Op[list[Row]]:
    """Lock the tree and return the session's row; a handle that lost its lease goes no further."""
    look = Query(LOOK, {"number": place.number})
    _, *answers = yield from batch(Lock(place.root_id), *place.guards(), look)
    return place.require_guards(answers)[0]


def require_open(place: Place, found: list[Row]) -> Row:
    """Return the row of a session that exists and has not ended, or raise."""
    if not found:
        raise SessionNotFound(f"there is no session {place.session_id!r}", id=place.session_id)
    row = found[0]
    if row["status"] not in {"active", "waiting"}:
        raise SessionEnded(
            f"session {place.session_id} is {row['status']}; open it with reopen=True to go on",
            session_id=place.session_id,
            status=row["status"],
        )
    return row


def require_writable(place: Place, found: list[Row]) -> Row:
    """Return the session's row, or raise what keeps this handle from writing."""
    # An old fence is told first: who took the lease away may have ended the session as well.
    if found and place.fence not in {None, found[0]["fence"]}:
        require_fence(place, found[0])
    row = require_open(place, found)
    if place.fence is None and row["holder"] is not None and row["is_leased"]:
        why = f"is driven by {row['holder']!r}; only its driver may write while the lease lives"
        if row["fence"] == place.driven_fence:
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
    """Raise LeaseLost if this handle drove the session once and does no longer."""
    if place.fence is None or (row["fence"] == place.fence and row["holder"] is not None):
        return
    why = f"is old, the current one is {row['fence']}"
    if row["fence"] == place.fence:
        why = "was given back"
    raise LeaseLost(
        f"session {place.session_id}: this driver's fence {place.fence} {why}; stop, nothing was "
        "written",
        session_id=place.session_id,
        fence=place.fence,
        current_fence=row["fence"],
    )

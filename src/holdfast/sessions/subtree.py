"""A session and all its descendants, for cancellation and deletion."""

from __future__ import annotations

from collections.abc import Sequence

from ..formatting import plural
from ..kernel.operation import Op, Query, defer, rows
from ..records import Finding, SessionRef
from .rows import AMONG_NUMBERS, child_of, numbers_of, ref_of

_BELOW = f"""
WITH RECURSIVE below (number, id, root_id) AS (
    SELECT s.number, s.id, s.root_id FROM hf_sessions s WHERE s.id = :id
    UNION ALL SELECT s.number, s.id, s.root_id
    FROM hf_sessions s JOIN below ON {child_of("below.id")}
)
SELECT number, id, root_id FROM below
"""  # noqa: S608
# Without an order both databases stop as soon as they have found enough.
LIST_SOME_BELOW = f"{_BELOW} LIMIT :limit"
LIST_BELOW = f"{_BELOW} WHERE number > :after ORDER BY number LIMIT :limit"
LIST_TREE = """
SELECT number, id, root_id FROM hf_sessions WHERE root_id = :id AND number > :after
ORDER BY number LIMIT :limit
"""
READ_STATUSES = f"""
SELECT number, id, root_id, status FROM hf_sessions WHERE number {AMONG_NUMBERS} ORDER BY number
"""  # noqa: S608
SET_STATUSES = f"""
UPDATE hf_sessions SET status = :status, updated_at = :now, holder = NULL,
    lease_expires_at = NULL, fence = fence + 1
WHERE number {AMONG_NUMBERS} AND status <> 'deleting'
"""  # noqa: S608
REMOVE_SESSIONS = f"DELETE FROM hf_sessions WHERE number {AMONG_NUMBERS}"  # noqa: S608
LIST_UNFINISHED = """
SELECT s.id, s.status FROM hf_sessions s WHERE s.status IN ('cancelling', 'deleting')
    AND NOT EXISTS (
        SELECT 1 FROM hf_sessions p WHERE p.id = s.parent_id AND p.status = s.status
    )
ORDER BY s.number LIMIT :limit
"""
SHOWN_MAX = 10


def list_some(session: SessionRef, limit: int) -> Op[list[SessionRef]]:
    """Return up to `limit` of a session and its descendants, in the order of creation."""
    found = yield from rows(LIST_SOME_BELOW, id=session.id, limit=limit)
    return sorted(map(ref_of, found), key=lambda each: each.number)


def list_members(session: SessionRef, after: int, limit: int) -> Op[list[SessionRef]]:
    """Return a page of a session and its descendants, parents before children."""
    listing = LIST_TREE if session.id == session.root_id else LIST_BELOW
    return [
        ref_of(row) for row in (yield from rows(listing, id=session.id, after=after, limit=limit))
    ]


def statuses_of(sessions: Sequence[SessionRef]) -> Query:
    """Return the query for the statuses of sessions that exist, in the order of creation."""
    return Query(READ_STATUSES, {"numbers": numbers_of(sessions)})


def release_as(sessions: Sequence[SessionRef], status: str) -> Op[None]:
    """Set the status of sessions that are not `deleting`, and fence their drivers."""
    yield from defer(SET_STATUSES, numbers=numbers_of(sessions), status=status)


def remove_rows(sessions: Sequence[SessionRef]) -> Op[None]:
    """Remove the rows of sessions; nothing else of them is left."""
    yield from defer(REMOVE_SESSIONS, numbers=numbers_of(sessions))


def check_unfinished() -> Op[list[Finding]]:
    """Look for unfinished cancellations and deletions."""
    found = []
    for row in (yield from rows(LIST_UNFINISHED, limit=SHOWN_MAX + 1)):
        verb, force = ("delete", " --force") if row["status"] == "deleting" else ("cancel", "")
        message = f"Session {row['id']!r} and its descendants are still {row['status']}."
        command = f"`holdfast sessions {verb} {row['id']}{force}`"
        advice = f"If the process that began this is gone, {command} finishes it."
        found.append(Finding("sessions", "warning", message, advice))
    if len(found) > SHOWN_MAX:
        message = f"More than {plural(SHOWN_MAX, 'session')} are being cancelled or deleted."
        found[-1:] = [Finding("sessions", "warning", message)]
    return found or [Finding("sessions", "ok", "No cancellation or deletion is unfinished.")]

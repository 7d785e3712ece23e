"""The rows of sessions: how they are created, read and changed.

Statements of other nouns use the fragments of this module: only this package names the table.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ..codec import Codec
from ..dataclass import dataclass
from ..errors import SessionNotFound
from ..kernel.nouns import find_row
from ..kernel.operation import Op, Row, listed, one, rows
from ..kernel.sql import along, among, given, given_keys, is_also, merged, pair
from ..leases import EARLIER_BOOT, LeasedTable
from ..records import STATUSES, SessionInfo, SessionRef

# Fragments: one session, one whose head was just moved to `head`, and all.
ONE_SESSION = "hf_sessions s WHERE s.number = :number"
SESSION_AT_HEAD = f"{ONE_SESSION} AND s.head = :head"
ALL_SESSIONS = "hf_sessions s"

# Fragments: the number of a session that was just created; the fence of its next lease, and the
# status of one.
NUMBER_OF_SESSION = "(SELECT s.number FROM hf_sessions s WHERE s.id = {id})"
NEXT_FENCE = "(SELECT s.fence + 1 FROM hf_sessions s WHERE s.number = {number})"
STATUS_OF_SESSION = "(SELECT s.status FROM hf_sessions s WHERE s.number = {number})"

# Fragment: the root that a session is below; NULL if it is a root itself.
ROOT_ABOVE = """(
    SELECT s.root_id FROM hf_sessions s WHERE s.number = {number} AND s.parent_id IS NOT NULL
)"""

# Fragment: whether a session is of a tree, for few of them.
IS_OF_TREE = "(SELECT s.root_id FROM hf_sessions s WHERE s.number = {number}) = :root_id"

# Fragment: the numbers of sessions, as `numbers_of` packs them into one parameter.
GIVEN_NUMBERS = given_keys("numbers", "INTEGER")
AMONG_NUMBERS = among("numbers", "INTEGER")

SESSION_COLUMNS = """number, id, name, parent_id, root_id, agent, user_id, status, version, epoch,
    origin_version, metadata, holder, lease_expires_at,
    holder IS NOT NULL AND lease_expires_at > :now AS is_driven,
    created_at, updated_at, last_resumed_at"""
READ_SESSION = f"SELECT {SESSION_COLUMNS} FROM hf_sessions WHERE id = :id"  # noqa: S608
READ_PLACE = "SELECT s.id, s.number, s.root_id, s.name, s.status FROM hf_sessions s"
READ_PLACE_BY_ID = f"{READ_PLACE} WHERE s.id = :id"
READ_PLACE_BY_NUMBER = f"{READ_PLACE} WHERE s.number = :number"
LIST_SESSIONS = f"SELECT {SESSION_COLUMNS} FROM hf_sessions WHERE"  # noqa: S608
BEGIN_AT = f"{LIST_SESSIONS} id >= :id ORDER BY id LIMIT :limit"
LIST_CHILDREN = f"SELECT {SESSION_COLUMNS} FROM hf_sessions WHERE parent_id = :id ORDER BY number"  # noqa: S608
COUNT_CHILDREN = f"""
SELECT p.given_key AS id, (
    SELECT count(*) FROM (
        SELECT 1 FROM hf_sessions c WHERE c.parent_id = p.given_key LIMIT :limit
    ) AS counted
) AS children
FROM {given_keys("ids")} AS p
"""  # noqa: S608


def child_of(parent: str) -> str:
    """Return the condition for the children of a session in a recursive query.

    PostgreSQL expects as many of each as sessions have on average. If few sessions have most of the
    children, it would read the whole table; it cannot do that for a range.
    """
    equal = f"s.parent_id = {parent}"
    return f"/*sqlite*/ {equal} /*end*/ /*pg s.parent_id BETWEEN {parent} AND {parent} */"


LIST_DESCENDANTS = f"""
WITH RECURSIVE below (member) AS (
    SELECT CAST(:id AS TEXT) /*pg COLLATE "C" */
    UNION SELECT s.id FROM hf_sessions s JOIN below ON {child_of("below.member")}
)
SELECT {SESSION_COLUMNS} FROM hf_sessions WHERE id IN (SELECT member FROM below) ORDER BY number
"""  # noqa: S608
CREATE_SESSION = f"""
INSERT INTO hf_sessions (
    id, name, parent_id, root_id, agent, user_id, status, head, metadata,
    created_at, updated_at, last_resumed_at
) VALUES (
    :id, :name, :parent_id, :root_id, :agent, :user_id, 'active', :head, :metadata,
    :now, :now, :now
) ON CONFLICT (id) DO NOTHING RETURNING {SESSION_COLUMNS}
"""  # noqa: S608
RESUME_SESSION = f"""
UPDATE hf_sessions SET
    last_resumed_at = :now, updated_at = :now,
    name = coalesce(CAST(:name AS TEXT), name),
    agent = coalesce(CAST(:agent AS TEXT), agent),
    user_id = coalesce(CAST(:user_id AS TEXT), user_id),
    metadata = coalesce(CAST(:metadata AS BLOB), metadata),
    status = CASE WHEN status = 'waiting' THEN 'waiting' ELSE 'active' END
WHERE id = :id RETURNING {SESSION_COLUMNS}
"""  # noqa: S608
COPY_SESSION = """
INSERT INTO hf_sessions (
    id, name, parent_id, root_id, agent, user_id, status, version, head, origin_number,
    origin_version, metadata, created_at, updated_at, last_resumed_at
)
SELECT CAST(:id AS TEXT), CAST(:name AS TEXT), parent_id, CAST(:root_id AS TEXT), agent, user_id,
    'active', CAST(:version AS INTEGER), CAST(:head AS INTEGER), CAST(:owner AS INTEGER),
    CAST(:version AS INTEGER), CAST(:metadata AS BLOB), :now, :now, :now
FROM hf_sessions s WHERE number = :number AND status <> 'deleting' AND NOT EXISTS (
    SELECT 1 FROM hf_sessions p
    WHERE p.id = s.parent_id AND p.status IN ('cancelling', 'deleting')
)
ON CONFLICT (id) DO NOTHING RETURNING number
"""
# Fragments: how a status changes and the lease is released, and how a work item takes the lease. It
# expires with the item's own.
RELEASED = """status = :status, holder = NULL, lease_expires_at = NULL, fence = fence + :raised,
    awaits_turn = 0"""
LEASED_TO_ITEM = """holder = ({holder}), fence = fence + 1, status = 'active',
    lease_expires_at = ({expires_at})"""
LIST_DRIVEN = f"""
SELECT number FROM hf_sessions
WHERE number {AMONG_NUMBERS} AND holder IS NOT NULL AND lease_expires_at > :now
"""  # noqa: S608
FIND_DRIVEN = """
SELECT id, holder FROM hf_sessions
WHERE holder IS NOT NULL AND lease_expires_at > :now ORDER BY number LIMIT 1
"""
SET_LABELS = """
UPDATE hf_sessions SET name = CAST(:name AS TEXT), agent = CAST(:agent AS TEXT),
    user_id = CAST(:user_id AS TEXT), metadata = :metadata, updated_at = :now
WHERE number = :number
"""

SESSION_LEASES = LeasedTable("hf_sessions", "session")
# The holder of an expired lease could still renew it, and write into the new epoch.
FENCE_EXPIRED_SESSION = """
UPDATE hf_sessions SET holder = NULL, lease_expires_at = NULL, fence = fence + 1
WHERE number = :number AND holder IS NOT NULL
"""
# The separator between an instance's name and its boot in a holder.
BOOT_MARK = " @ "
FENCE_INSTANCE_SESSION = f"""
UPDATE hf_sessions SET holder = NULL, lease_expires_at = NULL
WHERE number = :number AND {EARLIER_BOOT}
"""  # noqa: S608
LEASE_SESSION_TO_ITEM = f"""
UPDATE hf_sessions SET {LEASED_TO_ITEM}, updated_at = :now WHERE number = :number
"""  # noqa: S608
LEASE_SESSIONS_TO_ITEMS = """
UPDATE hf_sessions SET holder = i.holder, fence = hf_sessions.fence + 1, status = 'active',
    lease_expires_at = i.expires_at, updated_at = :now
FROM ({items}) AS i WHERE hf_sessions.number = i.session_number
"""
RENEW_SESSION = """
UPDATE hf_sessions SET lease_expires_at = CASE
    WHEN lease_expires_at > :now + :lease_ms THEN lease_expires_at ELSE :now + :lease_ms END
WHERE number = :number AND fence = :fence AND holder IS NOT NULL RETURNING number
"""
RELEASE_DRIVEN_SESSION = """
UPDATE hf_sessions SET holder = NULL, lease_expires_at = NULL, fence = fence + 1
WHERE number = :number AND fence = :fence
"""


@dataclass(frozen=True, slots=True)
class RowChange:
    """What else changes in a session's row, in the statement that moves its head."""

    assignments: str
    parameters: Mapping[str, object]


# Fragment: what led to a pause is over with the first turn after it.
AWAITS_TURN = "awaits_turn = 1"
AWAIT_TURN = f"UPDATE hf_sessions SET {AWAITS_TURN} WHERE number = :number"  # noqa: S608
ACTIVATED = RowChange(f"status = 'active', {AWAITS_TURN}", {})
TURN_TOLD = RowChange("awaits_turn = 0", {})


def released(status: str, *, raises_fence: bool) -> RowChange:
    """Return the change to another status, which releases the session's lease."""
    return RowChange(RELEASED, {"status": status, "raised": int(raises_fence)})


def numbers_of(sessions: Sequence[SessionRef]) -> str:
    """Return the numbers of sessions as one parameter, for `GIVEN_NUMBERS`."""
    return given(each.number for each in sessions)


def ref_of(row: Row) -> SessionRef:
    """Return the reference to the session of a row."""
    return SessionRef(row["id"], row["number"], row["root_id"])


def info(codec: Codec, row: Row) -> SessionInfo:
    """Return a row as a record."""
    fields = dict(row)
    fields["user"] = fields.pop("user_id")
    fields["is_driven"] = bool(row["is_driven"])
    fields["metadata"] = codec.unpack(row["metadata"], context=("hf_sessions", row["id"]))
    return SessionInfo(**fields)


def read_place(id: str, *, what: str = "session") -> Op[Row]:
    """Return a session's ids, name and status, or raise SessionNotFound."""
    row = yield from one(READ_PLACE_BY_ID, id=id)
    if row is None:
        raise SessionNotFound(f"there is no {what} {id!r}", id=id)
    return row


def place_of_number(number: int | None) -> Op[Row | None]:
    """Return the same by number; None if the session was deleted."""
    if number is None:
        return None
    return (yield from one(READ_PLACE_BY_NUMBER, number=number))


def find_place(id: str) -> Op[Row | None]:
    """Return the same by id, number or unique id prefix, or None."""
    return (yield from find_row("session", READ_PLACE, id))


def begin_with(prefix: str, limit: int) -> Op[list[Row]]:
    """Return the sessions whose ids begin with a text, by id."""
    # Ids are ordered by bytes, so those with a common prefix are adjacent.
    found = yield from rows(BEGIN_AT, id=prefix, limit=limit)
    return [row for row in found if row["id"].startswith(prefix)]


def count_children(ids: Iterable[str], at_most: int) -> Op[dict[str, int]]:
    """Return how many children each of some sessions has, counted up to one more than a limit."""
    found = yield from rows(COUNT_CHILDREN, ids=given(ids), limit=at_most + 1)
    return {row["id"]: row["children"] for row in found}


def list_rows(
    given: Mapping[str, Any], start: int, limit: int, *, newest_first: bool
) -> Op[Sequence[Row]]:
    """Return a page of sessions in the order of their creation, or against it."""
    page = page_of(tuple(given), newest_first)
    return (yield from listed(page, **given, start=start, limit=limit))


@functools.cache
def page_of(columns: Sequence[str], newest_first: bool) -> str:
    """Return the query of a listing by these columns, along the most selective index."""
    # One bound alone: with two, SQLite would read along the numbers and not along a filter's index.
    order = "number DESC" if newest_first else "number"
    start = "number < :start" if newest_first else "number > :start"
    base = f"{LIST_SESSIONS} {start}"
    if "root_id" in columns:
        return _page_of_tree(columns, start, order)
    branches = [" AND ".join([base, *(f"{each} = :{each}" for each in columns)])]
    if "agent" in columns and "status" not in columns:
        branches = [f"{branches[0]} AND status = '{status}'" for status in STATUSES]
    return merged(branches, order)


def _page_of_tree(columns: Sequence[str], start: str, order: str) -> str:
    leading = {"root_id": ":root_id"}
    if "agent" in columns:
        statuses = [":status"] if "status" in columns else [f"'{each}'" for each in STATUSES]
        parts = [{**pair("root_id", "agent"), "status": each} for each in statuses]
        base = f"{LIST_SESSIONS} agent IS NOT NULL AND {is_also('agent')}"
        return merged([f"{base} AND {along(each, start)}" for each in parts], order, parts[0])
    if "status" not in columns:
        return merged([f"{LIST_SESSIONS} {along(leading, start)}"], order, leading)
    leading = pair("root_id", "status")
    root = f"id = :root_id AND parent_id IS NULL AND {is_also('status')} AND {start}"
    branches = [root, f"parent_id IS NOT NULL AND {along(leading, start)}"]
    return merged([f"{LIST_SESSIONS} {each}" for each in branches], order, leading)


def require_root(root_id: str) -> Op[None]:
    """Raise SessionNotFound if a tree's root was deleted: its parts are gone, not empty."""
    if (yield from one(READ_SESSION, id=root_id)) is None:
        raise SessionNotFound(f"there is no session {root_id!r}", id=root_id)

"""Sessions in export files, and the choice of trees to export."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from itertools import islice

from ..arguments import require_new_id, shown
from ..clock import random_id
from ..dataclass import dataclass
from ..errors import InvalidArgument, SessionNotFound
from ..feed.portable import emit_each
from ..kernel.inserts import Insert
from ..kernel.kept import Kept, kept
from ..kernel.operation import Op, Row, fresh_id, one, rows
from ..kernel.owned_rows import ROWS_PER_PAGE, OwnedRows, read_each
from ..kernel.portable import (
    METADATA,
    Count,
    Export,
    Fence,
    Import,
    Name,
    Portable,
    Positive,
    Record,
    Sealed,
    Seen,
    Small,
    Time,
    Version,
)
from ..records import Status


class SessionRecord(Record, frozen=True, kw_only=True, tag="session"):
    """A session, with a number local to the file; parents and origins come before it."""

    sealed = Sealed(lambda row, name: ("hf_sessions", row["id"]), metadata=METADATA)
    counted = "sessions"

    number: Positive
    id: Name
    name: Name | None = None
    parent_id: Name | None = None
    root_id: Name
    agent: Name | None = None
    user_id: Name | None = None
    status: Status
    version: Small
    epoch: Version = 1
    fence: Fence = 0
    origin_number: Count | None = None
    origin_version: Version | None = None
    metadata: bytes
    created_at: Time
    updated_at: Time
    last_resumed_at: Time

    def problem(self, seen: Seen) -> str | None:
        """Check that its tree, its parent and its origin precede it."""
        require_new_id("id", self.id)
        numbers = seen.of(_Sessions).numbers
        parent = seen.sessions.get(numbers.get(self.parent_id or "", 0))
        root_id = self.id if self.parent_id is None else parent and parent.root_id
        if not seen.is_new(self):
            return f"session {self.id!r} comes twice"
        if self.root_id != root_id or root_id not in seen.trees:
            return f"session {self.id!r} has a parent or root that is not before it"
        if not self._is_forked(seen):
            return f"session {self.id!r} has an origin that is not before it"
        if self.number in seen.sessions:
            return f"session {self.id!r} has the number of another"
        numbers[self.id] = self.number
        seen.add_session(self)
        return None

    def _is_forked(self, seen: Seen) -> bool:
        """Whether a fork's origin is valid: seen or deleted, with a possible version."""
        number, version = self.origin_number, self.origin_version
        if number is None or version is None:
            return number is version is None
        origin = seen.sessions.get(number)
        highest = self.version if origin is None else min(self.version, origin.version)
        return version <= highest and (origin is not None or number == 0)

    def add(self, into: Import) -> Op[None]:
        """Add the session, without a driver."""
        origin = self.origin_number
        if origin is not None:
            origin = yield from into.number(origin)
        sessions = into.of(_Sessions)
        if not sessions.random:
            sessions.random = random_id((yield from fresh_id()))

        def note(found: list[Row]) -> None:
            if not found:
                raise _already_there(self.id)
            into.sessions[self.number] = found[0]["number"]

        head = sessions.random ^ self.number
        changes = {"head": head, "origin_number": origin, "fence": into.raised(self.fence)}
        # What else is in the file may have to know of its next turn.
        changes["awaits_turn"] = 1
        into.insert(ADD_SESSION, self.row(into.codec, **changes), then=note)
        sessions.of_trees[self.root_id] = sessions.of_trees.get(self.root_id, 0) + 1


@dataclass(slots=True)
class _Sessions:
    numbers: Kept[str, int] = kept(int)
    of_trees: Kept[str, int] = kept(int)
    random: int = 0
    """Makes the heads of this import differ from all others."""


READ_ROOT = "SELECT root_id FROM hf_sessions WHERE id = :id"
LIST_ROOTS = """
SELECT root_id, count(*) AS sessions FROM hf_sessions WHERE root_id > :root_id
GROUP BY root_id ORDER BY root_id LIMIT :limit
"""
LIST_FORKS = """
SELECT s.origin_number, s.number, s.root_id, o.root_id AS origin_root_id
FROM hf_sessions s JOIN hf_sessions o ON o.number = s.origin_number
WHERE (s.origin_number, s.number) > (:origin_number, :number) AND s.origin_number IS NOT NULL
ORDER BY s.origin_number, s.number LIMIT :limit
"""
LIST_ORIGIN_ROOTS = """
SELECT DISTINCT o.root_id FROM hf_sessions s JOIN hf_sessions o ON o.number = s.origin_number
WHERE s.root_id = :root_id
"""
MEMBERS = OwnedRows(
    "root_id, number, id", "hf_sessions", "root_id = {owner}", {"number": 0}, owner="TEXT"
)
FIND_SESSION = "SELECT number, id FROM hf_sessions WHERE id = :id"
SESSIONS_BY_ID = OwnedRows("id, root_id", "hf_sessions", "id = {owner}", {"id": ""}, owner="TEXT")
SESSION_NUMBERS = OwnedRows("number, root_id", "hf_sessions", "number = {owner}", {"number": 0})
SESSIONS = OwnedRows(SessionRecord.selected(), "hf_sessions", "number = {owner}", {"number": 0})
ADD_SESSION = Insert(
    "hf_sessions",
    SessionRecord.columns("head", "awaits_turn", without=["number"]),
    "ON CONFLICT (id) DO NOTHING RETURNING id, number",
    key="id",
)


class SessionsPortable(Portable):
    """A session is exported without its lease."""

    records = (SessionRecord,)

    def export(self, out: Export) -> Op[None]:
        """Write the sessions; origins that are not exported were deleted."""

        def write(row: Row) -> None:
            origin = row["origin_number"]
            origin = None if origin is None else out.known(origin)
            out.write(SessionRecord.of(out.codec, row, origin_number=origin))

        yield from read_each(SESSIONS, out.sessions, write)

    def links(self, link: Callable[[str, Hashable], None]) -> Op[None]:
        """Link trees with those they were forked from, because they share history."""
        behind = {"origin_number": 0, "number": 0}
        while page := (yield from rows(LIST_FORKS, **behind, limit=ROWS_PER_PAGE)):
            for row in page:
                if row["root_id"] != row["origin_root_id"]:
                    link(row["root_id"], row["origin_root_id"])
            behind = {name: page[-1][name] for name in behind}

    def require_absent(self, seen: Seen, label: str, *, is_trusted: bool) -> Op[None]:
        """Refuse to overwrite a session."""
        existing = yield from first_existing(each.id for each in seen.sessions.values())
        if existing is not None:
            raise _already_there(existing)

    def finish(self, into: Import) -> Op[None]:
        """Emit an event to every tree, with the count and the source of its sessions."""
        counts = iter(into.of(_Sessions).of_trees.items())
        while some := dict(islice(counts, ROWS_PER_PAGE)):
            events = {
                root_id: {"sessions": count, "source": into.label}
                for root_id, count in some.items()
            }
            yield from emit_each(into, "session_imported", events)
            yield from into.flush()


def list_trees(take: Callable[[str, int], object]) -> Op[None]:
    """Pass the root and the number of sessions of every tree to `take`."""
    root_id = ""
    while page := (yield from rows(LIST_ROOTS, root_id=root_id, limit=ROWS_PER_PAGE)):
        for row in page:
            take(row["root_id"], row["sessions"])
        root_id = page[-1]["root_id"]


def trees_of(ids: Sequence[str]) -> Op[list[str]]:
    """Return the roots of the trees of some sessions, and of those they were forked from."""
    found: set[str] = set()
    waiting: list[str] = []
    for id in ids:
        row = yield from one(READ_ROOT, id=id)
        if row is None:
            raise SessionNotFound(f"there is no session {id!r}", id=id)
        waiting.append(row["root_id"])
    while waiting:
        root_id = waiting.pop()
        if root_id not in found:
            found.add(root_id)
            waiting += [
                row["root_id"] for row in (yield from rows(LIST_ORIGIN_ROOTS, root_id=root_id))
            ]
    return sorted(found)


def read_members(root_ids: Iterable[str]) -> Op[tuple[list[str], Kept[int, str]]]:
    """Return the trees that exist, and the ids of all their sessions by number."""
    members: Kept[int, str] = Kept(str)
    there: dict[str, None] = {}

    def note(row: Row) -> None:
        members[row["number"]] = row["id"]
        there[row["root_id"]] = None

    yield from read_each(MEMBERS, root_ids, note)
    # Numbers are in the order of creation, so parents and origins come first.
    return list(there), members


def read_roots(by: OwnedRows, sessions: Iterable[int | str]) -> Op[dict[int | str, str]]:
    """Return the roots of those sessions that exist, by number or by id."""
    roots: dict[int | str, str] = {}
    [key] = by.names
    yield from read_each(by, sessions, lambda row: roots.update({row[key]: row["root_id"]}))
    return roots


def first_existing(ids: Iterable[str]) -> Op[str | None]:
    """Return the first of these sessions that the store has."""
    found: list[str] = []
    yield from read_each(SESSIONS_BY_ID, ids, lambda row: found.append(row["id"]))
    return found[0] if found else None


def find_number(id: str) -> Op[int | None]:
    """Return the number of a session, if there is one."""
    row = yield from one(FIND_SESSION, id=id)
    return None if row is None else int(row["number"])


def _already_there(id: str) -> InvalidArgument:
    return InvalidArgument(
        f"session {shown(id)} exists already; nothing was imported", session_id=id
    )

"""Sessions in export files, and which of them an export has to write."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from ..arguments import require_text, shown
from ..clock import random_id
from ..errors import InvalidArgument, SessionNotFound
from ..feed import emit
from ..kernel.operation import Op, Row, fresh_id, one, rows
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
    read_each,
)
from ..records import Status


class SessionRecord(Record, frozen=True, kw_only=True, tag="session"):
    """A session, by a number of this file; parents and origins come before it."""

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
        """Check that its tree, its parent and its origin came before it."""
        require_text("id", self.id)
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
        """Whether a fork's origin is here or gone, and a session without one has none at all."""
        number, version = self.origin_number, self.origin_version
        if number is None or version is None:
            return number is version is None
        origin = seen.sessions.get(number)
        highest = self.version if origin is None else min(self.version, origin.version)
        return version <= highest and (origin is not None or number == 0)

    def add(self, into: Import) -> Op[None]:
        """Add the session; nobody drives it."""
        origin = self.origin_number
        if origin is not None:
            origin = yield from into.number(origin)
        head = random_id((yield from fresh_id()))

        def note(found: list[Row]) -> None:
            if not found:
                raise _already_there(self.id)
            into.sessions[self.number] = found[0]["number"]

        changes = {"head": head, "origin_number": origin, "fence": into.raised(self.fence)}
        into.later(ADD_SESSION, self.row(into.codec, **changes), then=note)
        into.of(_Sessions).of_trees[self.root_id] += 1


@dataclass(slots=True)
class _Sessions:
    numbers: dict[str, int] = field(default_factory=dict)
    of_trees: Counter[str] = field(default_factory=Counter)


READ_ROOT = "SELECT root_id FROM hf_sessions WHERE id = :id"
LIST_ROOTS = "SELECT DISTINCT root_id FROM hf_sessions"
LIST_ORIGIN_ROOTS = """
SELECT DISTINCT o.root_id FROM hf_sessions s JOIN hf_sessions o ON o.number = s.origin_number
WHERE s.root_id = :root_id
"""
LIST_MEMBERS = """
SELECT number, id FROM hf_sessions WHERE root_id = :root_id AND number > :number
ORDER BY number LIMIT :limit
"""
FIND_SESSION = "SELECT number, id FROM hf_sessions WHERE id = :id"
FIND_SESSION_NUMBER = "SELECT number FROM hf_sessions WHERE number = :number"
READ_SESSION_RECORD = f"SELECT {SessionRecord.selected()} FROM hf_sessions WHERE number = :number"  # noqa: S608
ADD_SESSION = f"""
INSERT INTO hf_sessions {SessionRecord.inserted("number", head=":head")}
ON CONFLICT (id) DO NOTHING RETURNING number
"""


class SessionsPortable(Portable):
    """A session travels without its lease."""

    records = (SessionRecord,)

    def export(self, out: Export) -> Op[None]:
        """Write the sessions; origins that are not among them were deleted."""

        def write(row: Row) -> None:
            origin = row["origin_number"]
            origin = None if origin is None else out.known(origin)
            out.write(SessionRecord.of(out.codec, row, origin_number=origin))

        yield from read_each(
            READ_SESSION_RECORD, ({"number": number} for number in out.sessions), write
        )

    def require_absent(self, seen: Seen, label: str, *, is_trusted: bool) -> Op[None]:
        """Refuse to write over a session."""
        existing = yield from first_existing(seen.of(_Sessions).numbers)
        if existing is not None:
            raise _already_there(existing)

    def finish(self, into: Import) -> Op[None]:
        """Tell the feed of every tree that sessions came, and from where."""
        for root_id, count in sorted(into.of(_Sessions).of_trees.items()):
            data = {"sessions": count, "source": into.label}
            yield from emit(into.codec, root_id, root_id, "session_imported", data)


def choose_trees(ids: Sequence[str] | None) -> Op[tuple[list[str], dict[int, str]]]:
    """Return the trees of some sessions, or all, and those that they were forked from.

    The ids of roots, and the ids of all sessions by their numbers.
    """
    found: set[str] = set()
    waiting: list[str] = []
    if ids is None:
        found = {row["root_id"] for row in (yield from rows(LIST_ROOTS))}
    for id in ids or ():
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
    members: dict[int, str] = {}
    roots = ({"root_id": root_id} for root_id in sorted(found))
    yield from read_each(
        LIST_MEMBERS, roots, lambda row: members.update({row["number"]: row["id"]})
    )
    # In the order of their creation parents and origins come first.
    return sorted(found), dict(sorted(members.items()))


def first_existing(ids: Iterable[str]) -> Op[str | None]:
    """Return the first of some sessions that the store has."""
    found: list[str] = []
    yield from read_each(
        FIND_SESSION, ({"id": id} for id in ids), lambda row: found.append(row["id"])
    )
    return found[0] if found else None


def find_number(id: str) -> Op[int | None]:
    """Return the number of a session, if there is one."""
    row = yield from one(FIND_SESSION, id=id)
    return None if row is None else int(row["number"])


def _already_there(id: str) -> InvalidArgument:
    return InvalidArgument(
        f"there is a session {shown(id)} already; nothing was imported", session_id=id
    )

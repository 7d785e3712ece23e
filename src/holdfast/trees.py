"""Cancelling and deleting a session with everything below it, in passes of bounded size.

What fits into one pass is one transaction. A larger tree takes several, and others write in
between; whoever calls again goes on where a pass was killed. What is to be deleted is first closed,
parents before their children, so that nothing new begins there and nobody gets a child any more;
then it is removed, children first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from .checkpoints.needs import Foreseen, foreseeing
from .checkpoints.write import record_status
from .errors import SessionBusy
from .feed import emit, empty_events, read_position, sessions_told_of
from .kernel.flow import Flow, invoke, perform
from .kernel.operation import Lock, Op, Row, operation, query, rows, together
from .records import SessionRef
from .sessions.access import Place
from .sessions.handle import SessionHandle
from .sessions.rows import given, ref_of
from .sessions.subtree import (
    LIST_DELETING,
    list_members,
    list_some,
    read_statuses,
    set_statuses,
)

SESSIONS_PER_PASS = 50
SESSIONS_CLOSED_PER_PASS = 1_000
SESSIONS_PER_PAGE = 10_000
ROWS_PER_PASS = 1_000
EVENTS_PER_PASS = 5_000

OPEN = frozenset({"active", "waiting"})
Progress = Callable[[int, int], None]


def cancel(session: SessionHandle[Any], progress: Progress | None) -> Flow[list[str]]:
    """Cancel a session and everything below it; return the ids of those that had not ended."""
    tree = Tree.of(session)
    cancelled = yield from perform(Tree.cancel_at_once, tree)
    if cancelled is not None:
        return cancelled
    below: list[str] = []
    done = total = 0
    after = session.number
    # Those that are started meanwhile come last.
    while members := (yield from _members(tree, after)):
        total += len(members)
        for some in _parts(members, SESSIONS_PER_PASS):
            below += yield from _cancel(tree, some)
            done += len(some)
            yield from _tell(progress, done, total)
        after = members[-1].number
    return [*(yield from _cancel(tree, [tree.top])), *below]


def _members(tree: Tree, after: int) -> Flow[list[SessionRef]]:
    members: list[SessionRef] = []
    while page := (yield from perform(Tree.page, tree, after)):
        members += page
        after = page[-1].number
    return members


def _cancel(tree: Tree, some: Sequence[SessionRef]) -> Flow[list[str]]:
    while (found := (yield from perform(Tree.cancel_some, tree, some))) is None:
        pass
    return found


def delete(
    session: SessionHandle[Any], *, force: bool, progress: Progress | None
) -> Flow[list[str]]:
    """Delete a session and everything below it; return their ids."""
    try:
        return (yield from _delete(Tree.of(session), force, progress))
    finally:
        Foreseen.of(session.runtime).forget()


def _delete(tree: Tree, force: bool, progress: Progress | None) -> Flow[list[str]]:
    deleted = yield from foreseeing(tree.runtime, Tree.delete_at_once, tree, force)
    if deleted is not None:
        return deleted
    members = yield from _close(tree, force)
    after: int | None = 0
    while after is not None:
        after = yield from perform(Tree.empty_events, tree, after)
    removed = 0
    for some in _parts(members[::-1], SESSIONS_PER_PASS):
        while not (yield from foreseeing(tree.runtime, Tree.remove_some, tree, some)):
            pass
        removed += len(some)
        yield from _tell(progress, removed, len(members))
    return [each.id for each in members]


def _close(tree: Tree, force: bool) -> Flow[list[SessionRef]]:
    """Close a session and everything below it, and return all of them."""
    members = yield from _members(tree, 0)
    if not force:
        # All of them are looked at before the first is changed, and each again when it is.
        for some in _parts(members, SESSIONS_CLOSED_PER_PASS):
            yield from perform(Tree.look, tree, some)
    closed = 0
    while closed < len(members):
        for some in _parts(members[closed:], SESSIONS_CLOSED_PER_PASS):
            while not (yield from perform(Tree.close, tree, some, force)):
                pass
        closed = len(members)
        members += yield from _members(tree, members[-1].number)
    return members


def _parts(members: Sequence[SessionRef], size: int) -> Iterator[Sequence[SessionRef]]:
    return (members[start : start + size] for start in range(0, len(members), size))


def _tell(progress: Progress | None, done: int, total: int) -> Flow[None]:
    if progress is not None:
        yield from invoke(progress, done, total)


class Tree(SessionHandle[Any]):
    """A session with everything below it, and the transactions that cancel or delete it."""

    @classmethod
    def of(cls, session: SessionHandle[Any]) -> Tree:
        """Return the tree below a session; the session's lease counts until the first change."""
        place = (session.id, session.number, session.root_id)
        return cls(session.runtime, *place, fence=session.fence, guard=session.guard)

    @property
    def top(self) -> SessionRef:
        """The session itself."""
        return SessionRef(self.id, self.number, self.root_id)

    @query
    def page(self, after: int) -> Op[list[SessionRef]]:
        """Return the next members, parents before their children."""
        return (yield from list_members(self.top, after, SESSIONS_PER_PAGE))

    @operation
    def cancel_at_once(self) -> Op[list[str] | None]:
        """Cancel a small tree; of a large one its top is marked, and None returned."""
        yield from self._lock()
        row = yield from self._row()
        members = yield from list_some(self.top, SESSIONS_PER_PASS + 1)
        if len(members) <= SESSIONS_PER_PASS:
            cancelled = yield from self._cancel(members)
            if cancelled is not None:
                return cancelled
        if row["status"] in OPEN:
            yield from self._change_status([row], "cancelling")
        return None

    @operation
    def cancel_some(self, some: Sequence[SessionRef]) -> Op[list[str] | None]:
        """Cancel sessions and what belongs to them; None if that is too much for one pass."""
        yield Lock(self.root_id)
        yield from self._row()
        return (yield from self._cancel(some))

    def cancel_whole(self) -> Op[None]:
        """Cancel all of it within one transaction."""
        yield Lock(self.root_id)
        yield from self._row()
        after = 0
        while page := (yield from list_members(self.top, after, SESSIONS_PER_PASS)):
            while (yield from self._cancel(page)) is None:
                pass
            after = page[-1].number

    def _cancel(self, some: Sequence[SessionRef]) -> Op[list[str] | None]:
        if not (yield from self._cancel_rows(some)):
            return None
        found = [
            row
            for row in (yield from read_statuses(some))
            if row["status"] in OPEN or row["status"] == "cancelling"
        ]
        if found:
            yield from self._change_status(found, "cancelled")
        return [row["id"] for row in found]

    def _cancel_rows(self, some: Sequence[SessionRef]) -> Op[bool]:
        limit = ROWS_PER_PASS
        for noun in reversed(self.runtime.nouns):
            limit -= yield from noun.cancel(self.runtime, some, limit)
            if limit <= 0:
                return False
        return True

    def _change_status(self, found: Sequence[Row], status: str) -> Op[None]:
        members = [SessionRef(row["id"], row["number"], self.root_id) for row in found]
        # The leases are taken away first: the records are then nobody's to refuse.
        yield from set_statuses(members, "active", fences=True)
        yield from together(
            record_status(
                self.runtime,
                Place(row["id"], row["number"], self.root_id, None),
                row["status"],
                status,
            )
            for row in found
        )
        yield from set_statuses(members, status, fences=False)

    @operation
    def delete_at_once(self, force: bool) -> Op[list[str] | None]:
        """Delete a small tree; None if there is more to do than fits into one pass."""
        yield from self._lock()
        yield from self._row()
        members = yield from list_some(self.top, SESSIONS_PER_PASS + 1)
        position = yield from read_position(self.root_id)
        if len(members) > SESSIONS_PER_PASS or position > EVENTS_PER_PASS:
            return None
        if not force:
            yield from self._require_free(members)
        ids = [each.id for each in members]
        yield from empty_events(self.runtime.codec, self.root_id, 0, position, ids)
        if not (yield from self._remove(members)):
            yield from set_statuses(members, "deleting", fences=True)
            return None
        return ids

    @query
    def look(self, some: Sequence[SessionRef]) -> Op[None]:
        """Refuse to delete sessions that something runs for, or that are active below the top."""
        yield from self._require_free(some)

    @operation
    def close(self, some: Sequence[SessionRef], force: bool) -> Op[bool]:
        """Have sessions refuse everything but their deletion; say whether all of it has stopped."""
        yield Lock(self.root_id)
        yield from self._row()
        if not force:
            yield from self._require_free(some)
        yield from set_statuses(some, "deleting", fences=True)
        return (yield from self._cancel_rows(some))

    @operation
    def empty_events(self, after: int) -> Op[int | None]:
        """Empty the next events of sessions that are deleted; None behind the last."""
        yield Lock(self.root_id)
        yield from self._row()
        position = yield from read_position(self.root_id)
        last = min(after + EVENTS_PER_PASS, position)
        ids = yield from sessions_told_of(self.root_id, after, last)
        deleting = [row["id"] for row in (yield from rows(LIST_DELETING, ids=given(ids)))]
        if deleting:
            yield from empty_events(self.runtime.codec, self.root_id, after, last, deleting)
        return last if last < position else None

    @operation
    def remove_some(self, some: Sequence[SessionRef]) -> Op[bool]:
        """Remove closed sessions, and say whether nothing of them is left."""
        yield Lock(self.root_id)
        yield from self._row()
        present = [ref_of(row) for row in (yield from read_statuses(some))]
        return not present or (yield from self._remove(present))

    def _remove(self, some: Sequence[SessionRef]) -> Op[bool]:
        limit = ROWS_PER_PASS
        for noun in reversed(self.runtime.nouns):
            limit -= yield from noun.remove(self.runtime, some, limit)
            if limit <= 0:
                return False
        told = {"sessions": len(some)}
        yield from emit(self.runtime.codec, self.root_id, self.id, "session_deleted", told)
        return True

    def _require_free(self, some: Sequence[SessionRef]) -> Op[None]:
        held: dict[int, str] = {}
        for noun in self.runtime.nouns:
            held = {**(yield from noun.holds(self.runtime, some)), **held}
        for row in (yield from read_statuses(some)):
            if row["status"] in OPEN and row["id"] != self.id:
                held.setdefault(row["number"], f"is {row['status']}")
            if row["number"] in held:
                raise SessionBusy(
                    f"session {row['id']} {held[row['number']]}; end it first, or delete with "
                    "force=True",
                    session_id=row["id"],
                )

"""Cancelling and deleting a session with everything below it, in passes of bounded size.

A small tree takes one transaction. A larger one takes several, with other writers in between; after
a crash, a second call continues. Sessions to be deleted are first closed, parents before children,
so that nothing new starts and no children are added; then they are removed, children first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from .access import record
from .checkpoints.needs import NeedsCache, perform_reading_ahead
from .checkpoints.write import record_status
from .errors import SessionBusy
from .feed import emit, empty_events, read_position, sessions_of_events
from .kernel.flow import Flow, invoke, let_others_write, perform
from .kernel.operation import Lock, Op, Row, operation, query, rows, together
from .kernel.sql import given
from .records import SessionRef
from .sessions.access import Place
from .sessions.handle import SessionHandle
from .sessions.rows import ref_of
from .sessions.subtree import (
    LIST_DELETING,
    list_members,
    list_some,
    read_statuses,
    set_statuses,
)
from .wire import travels

# Up to this many take one transaction; more take several, so that others can write in between. On
# SQLite a writer waits for a whole pass: these take a few milliseconds, and half of that if there
# is one.
SESSIONS_AT_ONCE = 50
SESSIONS_PER_PASS = 8
SESSIONS_CLOSED_PER_PASS = 100
SESSIONS_PER_PAGE = 10_000
ROWS_PER_PASS = 1_000
EVENTS_PER_PASS = 250

OPEN = frozenset({"active", "waiting"})
Progress = Callable[[int, int], None]


def cancel(session: SessionHandle[Any], progress: Progress | None) -> Flow[list[str]]:
    """Cancel a session and everything below it; return the ids of those that were open."""
    tree = Tree.of(session)
    cancelled = yield from perform(Tree.cancel_at_once, tree)
    if cancelled is not None:
        return cancelled
    below: list[str] = []
    done = total = 0
    after = session.number
    # Sessions that are started meanwhile have higher numbers and come last.
    while members := (yield from _members(tree, after)):
        total += len(members)
        for some in _passes(tree, members):
            below += yield from _cancel(tree, some)
            done += len(some)
            yield from _report(progress, done, total)
        after = members[-1].number
    return [*(yield from _cancel(tree, [tree.top])), *below]


def _members(tree: Tree, after: int) -> Flow[list[SessionRef]]:
    members: list[SessionRef] = []
    while page := (yield from perform(Tree.page, tree, after)):
        members += page
        after = page[-1].number
    return members


def _cancel(tree: Tree, some: Sequence[SessionRef]) -> Flow[list[str]]:
    found = None
    while found is None:
        found = yield from perform(Tree.cancel_some, tree, some)
        yield from let_others_write(tree.runtime)
    return found


def delete(
    session: SessionHandle[Any], *, force: bool, progress: Progress | None
) -> Flow[list[str]]:
    """Delete a session and everything below it; return their ids."""
    try:
        return (yield from _delete(Tree.of(session), force, progress))
    finally:
        NeedsCache.of(session.runtime).clear()


def _delete(tree: Tree, force: bool, progress: Progress | None) -> Flow[list[str]]:
    deleted = yield from perform_reading_ahead(tree.runtime, Tree.delete_at_once, tree, force)
    if deleted is not None:
        return deleted
    members = yield from _close(tree, force)
    after: int | None = 0
    while after is not None:
        after = yield from perform(Tree.empty_events, tree, after)
        yield from let_others_write(tree.runtime)
    removed = 0
    for some in _passes(tree, members[::-1]):
        is_removed = False
        while not is_removed:
            is_removed = yield from perform_reading_ahead(
                tree.runtime, Tree.remove_some, tree, some
            )
            yield from let_others_write(tree.runtime)
        removed += len(some)
        yield from _report(progress, removed, len(members))
    return [each.id for each in members]


def _close(tree: Tree, force: bool) -> Flow[list[SessionRef]]:
    """Close a session and everything below it; return all of them."""
    members = yield from _members(tree, 0)
    if not force:
        # All are checked before the first is changed, and each again when it is.
        for some in _parts(members, SESSIONS_CLOSED_PER_PASS):
            yield from perform(Tree.check, tree, some)
    closed = 0
    while closed < len(members):
        for some in _parts(members[closed:], SESSIONS_CLOSED_PER_PASS):
            is_closed = False
            while not is_closed:
                is_closed = yield from perform(Tree.close, tree, some, force)
                yield from let_others_write(tree.runtime)
        closed = len(members)
        members += yield from _members(tree, members[-1].number)
    return members


def _all_of(top: SessionRef) -> Op[list[SessionRef]]:
    """Return a session and everything below it, parents before children."""
    members: list[SessionRef] = []
    after = 0
    while page := (yield from list_members(top, after, SESSIONS_PER_PAGE)):
        members += page
        if len(page) < SESSIONS_PER_PAGE:
            break
        after = page[-1].number
    return members


def _parts(members: Sequence[SessionRef], size: int) -> Iterator[Sequence[SessionRef]]:
    return (members[start : start + size] for start in range(0, len(members), size))


def _passes(tree: Tree, members: Sequence[SessionRef]) -> Iterator[Sequence[SessionRef]]:
    start = 0
    while start < len(members):
        is_shared = tree.runtime.driver.keeps_others_waiting
        size = max(1, SESSIONS_PER_PASS // 2) if is_shared else SESSIONS_PER_PASS
        yield members[start : start + size]
        start += size


def _report(progress: Progress | None, done: int, total: int) -> Flow[None]:
    if progress is not None:
        yield from invoke(progress, done, total)


@travels
class Tree(SessionHandle[Any]):
    """A session with everything below it, and the transactions that cancel or delete it."""

    @classmethod
    def of(cls, session: SessionHandle[Any]) -> Tree:
        """Return the tree of a session; the session's lease is required until the first change."""
        place = (session.id, session.number, session.root_id)
        return cls(session.runtime, *place, fence=session.fence, guard=session.guard)

    @property
    def top(self) -> SessionRef:
        """The session itself."""
        return SessionRef(self.id, self.number, self.root_id)

    @query
    def page(self, after: int) -> Op[list[SessionRef]]:
        """Return the next members, parents before children."""
        return (yield from list_members(self.top, after, SESSIONS_PER_PAGE))

    @operation
    def cancel_at_once(self) -> Op[list[str] | None]:
        """Cancel a small tree; mark the top of a large one as `cancelling` and return None."""
        yield from self._lock()
        row = yield from self._row()
        members = yield from list_some(self.top, SESSIONS_AT_ONCE + 1)
        if len(members) <= SESSIONS_AT_ONCE:
            cancelled = yield from self._cancel(members)
            if cancelled is not None:
                return cancelled
        if row["status"] in OPEN:
            yield from self._change_status([row], "cancelling")
        return None

    @operation
    def cancel_some(self, some: Sequence[SessionRef]) -> Op[list[str] | None]:
        """Cancel sessions and what belongs to them; None if another pass is needed."""
        yield Lock(self.root_id)
        yield from self._row()
        return (yield from self._cancel(some))

    def cancel_whole(self) -> Op[None]:
        """Cancel all of it within the current transaction."""
        yield Lock(self.root_id)
        yield from self._row()
        yield from self.cancel_each([self.top])

    def cancel_each(self, tops: Sequence[SessionRef]) -> Op[None]:
        """Cancel some sessions of the tree, which is locked, with everything below them."""
        members = [each for some in (yield from together(map(_all_of, tops))) for each in some]
        for some in _parts(members, SESSIONS_AT_ONCE):
            while (yield from self._cancel(some)) is None:
                pass

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
        # The leases are removed first, so that no lease refuses the records.
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
        """Delete a small tree; None if one pass is not enough."""
        yield from self._lock()
        row = yield from self._row()
        members = yield from list_some(self.top, SESSIONS_AT_ONCE + 1)
        position = yield from read_position(self.root_id)
        if len(members) > SESSIONS_AT_ONCE or position > EVENTS_PER_PASS:
            return None
        if not force:
            yield from self._require_free(members)
        ids = [each.id for each in members]
        yield from empty_events(self.runtime.codec, self.root_id, 0, position, ids)
        is_removed = yield from self._remove(members)
        if not is_removed:
            yield from set_statuses(members, "deleting", fences=True)
        yield from self._audit(row, force)
        return ids if is_removed else None

    @query
    def check(self, some: Sequence[SessionRef]) -> Op[None]:
        """Raise SessionBusy if a session is in use, or open below the top."""
        yield from self._require_free(some)

    @operation
    def close(self, some: Sequence[SessionRef], force: bool) -> Op[bool]:
        """Make sessions refuse everything but deletion; False if another pass is needed."""
        yield Lock(self.root_id)
        row = yield from self._row()
        if not force:
            yield from self._require_free(some)
        yield from set_statuses(some, "deleting", fences=True)
        is_stopped = yield from self._cancel_rows(some)
        yield from self._audit(row, force)
        return is_stopped

    def _audit(self, row: Row, force: bool) -> Op[None]:
        """Write down that the session is deleted, in the first transaction that changes it."""
        if row["status"] != "deleting":
            reason = "forced" if force else None
            yield from record(self.runtime.actor, "session_deleted", self.id, reason)

    @operation
    def empty_events(self, after: int) -> Op[int | None]:
        """Empty the next events of deleted sessions; return the position, None at the end."""
        yield Lock(self.root_id)
        yield from self._row()
        position = yield from read_position(self.root_id)
        last = min(after + EVENTS_PER_PASS, position)
        ids = yield from sessions_of_events(self.root_id, after, last)
        deleting = [row["id"] for row in (yield from rows(LIST_DELETING, ids=given(ids)))]
        if deleting:
            yield from empty_events(self.runtime.codec, self.root_id, after, last, deleting)
        return last if last < position else None

    @operation
    def remove_some(self, some: Sequence[SessionRef]) -> Op[bool]:
        """Remove closed sessions; False if another pass is needed."""
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
        data = {"sessions": len(some)}
        yield from emit(self.runtime.codec, self.root_id, self.id, "session_deleted", data)
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

"""Cancelling and deleting a session with everything below it, in passes of bounded size.

A small tree takes one transaction. A larger one takes several, with other writers in between; after
a crash, a second call continues. Sessions to be deleted are first closed, parents before children,
so that nothing new starts and no children are added; then they are removed, children first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

from .access import record
from .checkpoints.needs import NeedsCache, perform_reading_ahead
from .checkpoints.write import record_status
from .errors import SessionBusy
from .feed import emit, empty_events, positions_of, some_positions_of, without_data
from .kernel.flow import Flow, invoke, let_others_write, perform
from .kernel.operation import (
    Lock,
    Op,
    Query,
    Row,
    batch,
    large_query,
    operation,
    query,
    together,
)
from .records import SessionRef
from .sessions.access import Place, look_at
from .sessions.handle import SessionHandle
from .sessions.rows import READ_SESSION, ref_of, released
from .sessions.subtree import (
    list_members,
    list_some,
    release_as,
    remove_rows,
    statuses_of,
)
from .wire import travels

# Up to this many take one transaction; more take several, so that others can write in between. A
# writer (on PostgreSQL, one of the same tree) waits for a whole pass: these take two milliseconds,
# and half of that if there may be one.
SESSIONS_AT_ONCE = 50
SESSIONS_PER_PASS = 6
SESSIONS_CLOSED_PER_PASS = 100
SESSIONS_PER_PAGE = 10_000
SESSIONS_READ_AT_ONCE = 1_000
# Of each table.
ROWS_PER_PASS = 250
EVENTS_PER_PASS = 50

OPEN = frozenset({"active", "waiting"})
Progress = Callable[[int, int], None]
T = TypeVar("T")


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
    for some in _parts(members, SESSIONS_READ_AT_ONCE):
        positions = yield from perform(Tree.positions_of_events, tree, some)
        for each in _parts(positions, EVENTS_PER_PASS):
            yield from perform(Tree.empty_events, tree, each)
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


def _parts(members: Sequence[T], size: int) -> Iterator[Sequence[T]]:
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
        yield from self._row()
        members = yield from list_some(self.top, SESSIONS_AT_ONCE + 1)
        if len(members) <= SESSIONS_AT_ONCE:
            cancelled = yield from self._cancel(members)
            if cancelled is not None:
                return cancelled
        yield from self._change_status([self.top], OPEN, "cancelling")
        return None

    def _locked(self, *beside: Query) -> Op[tuple[Row, list[list[Row]]]]:
        """Lock the tree; return the session's row, and the rows of other queries."""
        read = Query(READ_SESSION, {"id": self.id})
        _, found, *others = yield from batch(Lock(self.root_id), read, *beside)
        return self._found(found), others

    @operation
    def cancel_some(self, some: Sequence[SessionRef]) -> Op[list[str] | None]:
        """Cancel sessions and what belongs to them; None if another pass is needed."""
        yield from self._locked()
        return (yield from self._cancel(some))

    def cancel_whole(self) -> Op[None]:
        """Cancel all of it within the current transaction."""
        yield from self._locked()
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
        return (yield from self._change_status(some, OPEN | {"cancelling"}, "cancelled"))

    def _cancel_rows(self, some: Sequence[SessionRef]) -> Op[bool]:
        limit = ROWS_PER_PASS
        for noun in reversed(self.runtime.nouns):
            limit -= yield from noun.cancel(self.runtime, some, limit)
            if limit <= 0:
                return False
        return True

    def _change_status(
        self, some: Sequence[SessionRef], before: frozenset[str], status: str
    ) -> Op[list[str]]:
        """Change the status of sessions, if it was one of `before`, and return their ids."""
        refs = {each.number: each for each in some}
        [present] = yield from batch(look_at(refs))
        found = {row["number"]: row for row in present if row["status"] in before}
        refusing = [
            refs[number]
            for number, row in found.items()
            if row["holder"] is not None or row["status"] not in OPEN
        ]
        if refusing:
            # A lease would refuse the record, and so would a session that is being cancelled.
            yield from release_as(refusing, "active")
        changed = [refs[number] for number in sorted(found)]
        yield from together(self._record(each, found[each.number], status) for each in changed)
        return [each.id for each in changed]

    def _record(self, session: SessionRef, row: Row, status: str) -> Op[None]:
        place = Place(session.id, session.number, self.root_id, None)
        released_row = {**row, "status": "active", "holder": None}
        change = released(status, raises_fence=True)
        yield from record_status(self.runtime, place, row["status"], status, released_row, change)

    @operation
    def delete_at_once(self, force: bool) -> Op[list[str] | None]:
        """Delete a small tree; None if one pass is not enough."""
        yield from self._lock()
        row = yield from self._row()
        members = yield from list_some(self.top, SESSIONS_AT_ONCE + 1)
        if len(members) > SESSIONS_AT_ONCE:
            return None
        ids = [each.id for each in members]
        positions = yield from some_positions_of(self.root_id, ids, EVENTS_PER_PASS)
        if positions is None:
            return None
        if not force:
            yield from self._require_free(members)
        yield from empty_events(self.runtime.codec, self.root_id, positions)
        # The same order as in several transactions: all stop, and whoever waits for them is told.
        stopping = self._cancel_rows(members)
        is_stopped = yield from without_data(self.runtime.codec, self.root_id, ids, stopping)
        is_removed = is_stopped and (yield from self._remove(members))
        if not is_removed:
            yield from release_as(members, "deleting")
        yield from self._audit(row, force)
        return ids if is_removed else None

    @query
    def check(self, some: Sequence[SessionRef]) -> Op[None]:
        """Raise SessionBusy if a session is in use, or open below the top."""
        yield from self._require_free(some)

    @operation
    def close(self, some: Sequence[SessionRef], force: bool) -> Op[bool]:
        """Make sessions refuse everything but deletion; False if another pass is needed."""
        row, _ = yield from self._locked()
        if not force:
            yield from self._require_free(some)
        yield from release_as(some, "deleting")
        is_stopped = yield from self._cancel_rows(some)
        yield from self._audit(row, force)
        return is_stopped

    def _audit(self, row: Row, force: bool) -> Op[None]:
        """Write down that the session is deleted, in the first transaction that changes it."""
        if row["status"] != "deleting":
            reason = "forced" if force else None
            yield from record(self.runtime.actor, "session_deleted", self.id, reason)

    @large_query
    def positions_of_events(self, some: Sequence[SessionRef]) -> Op[list[int]]:
        """Return the positions of the events of closed sessions, which get no others."""
        return (yield from positions_of(self.root_id, [each.id for each in some]))

    @operation
    def empty_events(self, positions: Sequence[int]) -> Op[None]:
        """Empty events of deleted sessions."""
        yield from self._locked()
        yield from empty_events(self.runtime.codec, self.root_id, positions)

    @operation
    def remove_some(self, some: Sequence[SessionRef]) -> Op[bool]:
        """Remove closed sessions; False if another pass is needed."""
        _, [found] = yield from self._locked(statuses_of(some))
        present = [ref_of(row) for row in found]
        return not present or (yield from self._remove(present))

    def _remove(self, some: Sequence[SessionRef]) -> Op[bool]:
        nouns = reversed(self.runtime.nouns)
        counts = yield from together(
            noun.remove(self.runtime, some, ROWS_PER_PASS) for noun in nouns
        )
        if max(counts) >= ROWS_PER_PASS:
            return False
        yield from remove_rows(some)
        data = {"sessions": len(some)}
        yield from emit(self.runtime.codec, self.root_id, self.id, "session_deleted", data)
        return True

    def _require_free(self, some: Sequence[SessionRef]) -> Op[None]:
        held: dict[int, str] = {}
        reasons = yield from together(noun.holds(self.runtime, some) for noun in self.runtime.nouns)
        for each in reversed(reasons):
            held.update(each)
        for row in (yield from batch(statuses_of(some)))[0]:
            if row["status"] in OPEN and row["id"] != self.id:
                held.setdefault(row["number"], f"is {row['status']}")
            if row["number"] in held:
                raise SessionBusy(
                    f"session {row['id']} {held[row['number']]}; end it first, or delete with "
                    "force=True",
                    session_id=row["id"],
                )

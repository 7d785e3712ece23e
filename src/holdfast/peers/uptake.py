"""A turn of a service: it completes items, claims others and drives their sessions, in one commit.

A claim locks no tree, so this waits for none. An item whose tree is locked at that moment is
completed in another commit, which may wait; a session whose tree is locked is left to the handler,
which drives it in a separate commit.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

from ..dataclass import dataclass
from ..kernel.operation import FreshId, Op, Row, Runtime, TryLock, batch, operation, together
from ..sessions.access import look_at
from ..sessions.handle import SessionHandle
from ..trees import OPEN
from ..work.claims import Claim, claimed_only, in_order, lease_sessions, take_session
from ..work.items import Item
from ..work.transitions import Finished, ends_of
from .asks import REQUEST, RESUME, asks_look
from .pauses import receive, resume, resuming
from .records import PeerRequest, Resumption


@dataclass(frozen=True, slots=True)
class TakenUp:
    """What an attempt starts with: the fence of its session's lease, and the handler's argument."""

    fence: int
    given: PeerRequest[Any] | Resumption[Any]


Taken: TypeAlias = tuple[list[Row], dict[int, TakenUp]]
Ended: TypeAlias = dict[int, Row | None]


@operation
def serve_turn(runtime: Runtime, ended: Finished, claim: Claim | None) -> Op[tuple[Ended, Taken]]:
    """End attempts whose trees are free, claim other items, and drive the sessions of those.

    Returns the row of each ended attempt by its place in `ended`, or None if its lease is lost;
    then the claimed rows, and what was taken up by item number.
    """
    claiming = [] if claim is None else [claim.query((yield FreshId()))]
    trees = {item.root_id for item, _ in ended if item.root_id is not None}
    # A claim waits for no row, so it may come before the ends of items whose trees are locked.
    free, claimed = yield TryLock(sorted(trees), claiming)
    rows = in_order(claimed[0]) if claimed else []
    ready = [index for index, (item, _) in enumerate(ended) if item.root_id in {None, *free}]
    ends = yield from ends_of([ended[index] for index in ready])
    uptake = Uptake(runtime, claim, rows)
    if trees.isdisjoint(uptake.trees):
        # Neither can change what the other has read.
        free, answers = yield TryLock(uptake.trees, [*ends.queries, *uptake.looks])
        count = len(ends.queries)
        parts: list[Op[Any]] = [
            ends.conclude(answers[:count]),
            uptake.drive(free, answers[count:]),
        ]
        found, taken = yield from together(parts)
    else:
        found = yield from ends.conclude((yield from batch(*ends.queries)))
        free, answers = yield TryLock(uptake.trees, uptake.looks)
        taken = yield from uptake.drive(free, answers)
    return dict(zip(ready, found, strict=True)), taken


class Uptake:
    """Items that were just claimed, and what must be read to drive their sessions."""

    def __init__(self, runtime: Runtime, claim: Claim | None, rows: list[Row]) -> None:
        lease_seconds = None if claim is None else claim.lease_ms / 1000
        self._rows = rows
        self._items = [Item[Any](runtime, row, lease_seconds) for row in rows]
        self._wanted = [
            item
            for item in self._items
            if item.type in {REQUEST, RESUME} and item.root_id is not None
        ]
        self.trees = sorted({item.root_id for item in self._wanted if item.root_id is not None})
        self._asked = [
            item.session_id for item in self._wanted if item.type == REQUEST and item.session_id
        ]
        self._resumed = {
            item.number: resuming(item.session_number or 0, item.input["pause"])
            for item in self._wanted
            if item.type == RESUME
        }
        numbers = {item.session_number or 0 for item in self._wanted}
        self.looks = [look for some in self._resumed.values() for look in some]
        if numbers:
            self.looks = [look_at(numbers), *asks_look(self._asked), *self.looks]

    def drive(self, free: Sequence[str], answers: Sequence[list[Row]]) -> Op[Taken]:
        """Lease the sessions whose trees are free; `answers` are the rows of the looks."""
        taken: dict[int, TakenUp] = {}
        if self._wanted:
            looked = self._looked(answers)
            # If two items have the same session, such as one submitted by hand, the first drives.
            first = {item.session_number: item for item in reversed(self._wanted)}
            firsts = [item for item in self._wanted if first[item.session_number] is item]
            taking = [item for item in firsts if item.root_id in free and looked.is_simple(item)]
            active = [(item, looked.session(item)) for item in taking]
            yield from lease_sessions([each for each in active if each[1]["status"] == "active"])
            driven = yield from together(_take_up(item, looked) for item in taking)
            taken = {item.number: each for item, each in zip(taking, driven, strict=True)}
        for item in self._items:
            if item.number not in taken:
                yield from claimed_only(item)
        fences = {number: each.fence for number, each in taken.items()}
        rows = [{**row, "driving_fence": fences.get(row["number"])} for row in self._rows]
        return rows, taken

    def _looked(self, answers: Sequence[list[Row]]) -> Looked:
        found = iter(answers)
        sessions = {row["number"]: row for row in next(found)}
        asks = {row["id"]: row for row in next(found)} if self._asked else {}
        rest = {number: [next(found) for _ in some] for number, some in self._resumed.items()}
        return Looked(sessions, asks, rest)


@dataclass(frozen=True, slots=True)
class Looked:
    """What was read for claimed items: sessions by number, requests by id, and resumptions."""

    sessions: dict[int, Row]
    asks: dict[str, Row]
    resuming: dict[int, list[list[Row]]]

    def session(self, item: Item[Any]) -> Row:
        """Return the row of an item's session."""
        return self.sessions[item.session_number or 0]

    def of(self, item: Item[Any]) -> list[list[Row]]:
        """Return the rows that `receive` or `resume` needs."""
        if item.type == RESUME:
            return self.resuming[item.number]
        ask = self.asks.get(item.session_id or "")
        return [[] if ask is None or ask["root_id"] != item.root_id else [ask]]

    def is_simple(self, item: Item[Any]) -> bool:
        """Whether an item's session is open and not being driven, and there is what it serves."""
        session, found = self.sessions.get(item.session_number or 0), self.of(item)[0]
        if session is None or session["status"] not in OPEN:
            return False
        if not found or found[0].get("is_superseded"):
            return False
        return session["holder"] is None or not session["is_leased"]


def _take_up(item: Item[Any], looked: Looked) -> Op[TakenUp]:
    """Drive the session of an item whose tree is locked; an active one has just been leased."""
    place, row = item._place(), looked.session(item)
    assert place is not None
    fence = row["fence"] + 1
    if row["status"] == "waiting":
        yield from take_session(item, row)
    where = (place.session_id, place.number, place.root_id)
    session: SessionHandle[Any] = SessionHandle(item.runtime, *where, fence=fence)
    if item.type == RESUME:
        given = yield from resume(session, row, item.input["pause"], looked.of(item))
        return TakenUp(fence, given)
    return TakenUp(fence, receive(session, item.type, row, looked.of(item)))

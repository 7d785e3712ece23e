"""How a service takes up work: it claims items and drives their sessions, in one commit.

A claim locks no tree, so this waits for none: a session whose tree is locked at that moment is left
to the handler, which drives it in a separate commit.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

from ..dataclass import dataclass
from ..kernel.operation import Op, Query, Row, Runtime, TryLock, operation, together
from ..sessions.access import LOOK_AT_SESSION
from ..sessions.handle import SessionHandle
from ..trees import OPEN
from ..work.claims import Claim, take_session
from ..work.items import Item
from .asks import REQUEST, RESUME
from .pauses import receive, receiving, resume, resuming
from .records import PeerRequest, Resumption


@dataclass(frozen=True, slots=True)
class TakenUp:
    """What an attempt starts with: the fence of its session's lease, and the handler's argument."""

    fence: int
    given: PeerRequest[Any] | Resumption[Any]


Claimed: TypeAlias = tuple[list[Row], dict[int, TakenUp]]


@operation
def claim_and_take_up(runtime: Runtime, claim: Claim) -> Op[Claimed]:
    """Lease items and the sessions of those whose trees are free; return both, by item number."""
    rows = yield from claim.take()
    items = [Item[Any](runtime, row, claim.lease_ms / 1000) for row in rows]
    items = [each for each in items if each.type in {REQUEST, RESUME} and each.root_id is not None]
    if not items:
        return rows, {}
    looks = {item.number: _looks(item) for item in items}
    trees = sorted({item.root_id for item in items if item.root_id is not None})
    free, answers = yield TryLock(trees, [each for some in looks.values() for each in some])
    found = iter(answers)
    looked = {number: [next(found) for _ in some] for number, some in looks.items()}
    # If two items have the same session, such as one left behind by a pause, the first drives it.
    first = {item.session_number: item for item in reversed(items)}
    firsts = [item for item in items if first[item.session_number] is item]
    taking = [item for item in firsts if item.root_id in free]
    taken = yield from together(_take_up(item, *looked[item.number]) for item in taking)
    pairs = zip(taking, taken, strict=True)
    return rows, {item.number: each for item, each in pairs if each is not None}


def _looks(item: Item[Any]) -> list[Query]:
    """Return the queries whose rows `_take_up` needs."""
    assert item.session_id is not None
    assert item.session_number is not None
    given = (
        resuming(item.session_number, item.input["pause"])
        if item.type == RESUME
        else receiving(item.session_id)
    )
    return [Query(LOOK_AT_SESSION, {"number": item.session_number}), *given]


def _take_up(item: Item[Any], sessions: list[Row], *looked: list[Row]) -> Op[TakenUp | None]:
    """Drive the session of an item whose tree is locked; None if the simple case does not apply."""
    place = item._place()
    assert place is not None
    if not _is_free(sessions) or not looked[0]:
        return None
    driven = yield from take_session(item, sessions[0])
    where = (place.session_id, place.number, place.root_id)
    session: SessionHandle[Any] = SessionHandle(item.runtime, *where, fence=driven.fence)
    if item.type == RESUME:
        resumption = yield from resume(session, item.input["pause"], driven.version, looked)
        return TakenUp(driven.fence, resumption)
    return TakenUp(driven.fence, receive(session, item.type, looked))


def _is_free(sessions: Sequence[Row]) -> bool:
    """Whether a session is open and not being driven."""
    if not sessions or sessions[0]["status"] not in OPEN:
        return False
    return sessions[0]["holder"] is None or not sessions[0]["is_leased"]

"""The end of a peer call: its answer is stored once, and a peer that is no longer needed stops."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from ..feed import emit
from ..kernel.operation import AfterCommit, Op, Query, Row, Runtime, batch, one, rows, together
from ..sessions.rows import READ_PLACE_BY_ID, ref_of
from ..trees import OPEN, Tree
from ..work import transitions
from ..work.items import READ_ITEM, Item
from ..work.transitions import Transition
from .asks import SELECT_ASKS
from .outbox import post_answer, withdraw_request
from .records import Artifact, pack_answer

SETTLED_COLUMNS = """id, session_number, session_id, root_id, agent, route, remote_store,
    origin_id, state, pause_number"""
# A caller that is not a session does not collect answers: its call is closed with the answer.
# `coalesce` keeps the planner on the id: in a new database, PostgreSQL would read all calls of
# that state.
SETTLE = f"""
UPDATE hf_asks SET state = :status, answer = CAST(:answer AS BLOB), answered_at = :now,
    closed_at = CASE WHEN session_number IS NULL THEN :now END
WHERE id = :id AND coalesce(state, '') = 'open' {{also}} RETURNING {SETTLED_COLUMNS}
"""  # noqa: S608
SETTLE_OPEN = SETTLE.format(also="")
SETTLE_DUE = SETTLE.format(also="AND deadline_at <= :now")
OPEN_OF_PAUSE = f"""
{SELECT_ASKS} WHERE session_number = :session_number AND pause_number = :number
    AND coalesce(state, '') = 'open' ORDER BY number
"""
IDLE = frozenset({"scheduled", "pending", "review"})
TIMED_OUT = "The peer did not answer before its deadline."
CANCELLED = "The call was cancelled"
WITH_ASKER = f"{CANCELLED} with the session that asked."
WITH_PEER = f"{CANCELLED} with the session that served it."
BY_ASKER = f"{CANCELLED} by the store that asked."
NOT_NEEDED = f"{CANCELLED} because the pause that waited for it needs no more answers."
NOT_AWAITED = f"{CANCELLED} because the session that asked no longer waits for it."


def settle(
    runtime: Runtime,
    ask: Row,
    status: str,
    result: Any,
    artifacts: Sequence[Artifact] = (),
    statement: str = SETTLE_OPEN,
    *,
    tells_peer: bool = True,
) -> Op[Row | None]:
    """Store the answer of a call whose tree is locked; None if it has one, or is not due yet.

    If another store asked, a transport carries the answer there. Unless the answer came from the
    peer itself, a peer at another store is told to stop.
    """
    settling = settlement(runtime, ask, status, result, artifacts, statement)
    settled = yield from one(settling.sql, **settling.parameters)
    if settled is not None:
        yield from tell(runtime, settled, status, result, artifacts, tells_peer=tells_peer)
    return settled


def settlement(
    runtime: Runtime,
    ask: Row,
    status: str,
    result: Any,
    artifacts: Sequence[Artifact],
    statement: str = SETTLE_OPEN,
) -> Query:
    """Return the statement that stores the answer of a call."""
    id = ask["id"]
    packed = pack_answer(runtime.codec, id, "answer", status, result, artifacts)
    return Query(statement, {"id": id, "status": status, "answer": packed})


def tell(
    runtime: Runtime,
    settled: Row,
    status: str,
    result: Any,
    artifacts: Sequence[Artifact],
    *,
    tells_peer: bool = True,
) -> Op[None]:
    """Report a stored answer: to the feed, to waiters, and to the store that asked."""
    id, asker_id = settled["id"], settled["session_id"] or settled["id"]
    data = {"ask": id, "agent": settled["agent"], "status": status}
    yield from emit(runtime.codec, settled["root_id"], asker_id, "peer_answered", data)
    if settled["session_number"] is None:
        yield AfterCommit(lambda: runtime.signals.ring(answer_topic(id)))
    if settled["origin_id"] is not None:
        yield from post_answer(runtime, settled, status, result, artifacts)
    elif settled["route"] is not None:
        yield from withdraw_request(runtime, settled, tells_peer=tells_peer)


def answer_topic(ask_id: str) -> str:
    """Return the signal topic on which the answer to a call without a session is announced."""
    return f"answer:{ask_id}"


def by_hand(runtime: Runtime) -> str:
    """Return that somebody cancelled a call, and with which token."""
    actor = runtime.actor
    return f"{CANCELLED} by hand{f', with token {actor.name}' if actor.token_id else ''}."


def cancel_asks(runtime: Runtime, asks: Iterable[Row], why: str) -> Op[None]:
    """Settle calls as cancelled, and stop their peers; no pause counts them."""
    settled = yield from together(settle(runtime, ask, "cancelled", why) for ask in asks)
    yield from stop_peers(runtime, [row for row in settled if row is not None])


def cancel_rest(runtime: Runtime, pause: Row, why: str) -> Op[None]:
    """Cancel the calls of a pause that are still open."""
    place = {"session_number": pause["session_number"], "number": pause["number"]}
    yield from cancel_asks(runtime, (yield from rows(OPEN_OF_PAUSE, **place)), why)


def stop_peers(runtime: Runtime, asks: Sequence[Row]) -> Op[None]:
    """Cancel the sessions that serve calls, and everything below them, unless they have ended.

    The calls are of one tree, which is locked.
    """
    if not asks:
        return
    found = yield from batch(*(Query(READ_PLACE_BY_ID, {"id": ask["id"]}) for ask in asks))
    serving = [row for rows in found for row in serving_of(asks[0], rows)]
    tops = [ref_of(row) for row in serving if row["status"] in OPEN]
    if tops:
        top = tops[0]
        yield from Tree(runtime, top.id, top.number, top.root_id).cancel_each(tops)


def serving_of(ask: Row, found: Sequence[Row]) -> list[Row]:
    """Return those of some rows, found by the id of a call, that are of its tree."""
    return [row for row in found if row["root_id"] == ask["root_id"]]


def withdraw_item(runtime: Runtime, id: str, *, fences: bool = False) -> Op[bool]:
    """Cancel a work item, but not its session; False if it has ended, or is not there.

    A running item is cancelled only with `fences`: its holder can write nothing more.
    """
    return (yield from withdraw(runtime, (yield from rows(READ_ITEM, id=id)), fences=fences))


def withdraw(runtime: Runtime, found: Sequence[Row], *, fences: bool = False) -> Op[bool]:
    """Do the same with the row of the item, if it was found."""
    if not found or found[0]["state"] not in (IDLE | {"in_progress"} if fences else IDLE):
        return False
    change = Transition("cancelled", "withdrawn", fences=int(fences), is_followed=False)
    statement = transitions.FINISH_LIVE if fences else transitions.FINISH_IDLE
    yield from transitions.finish([(Item[Any](runtime, found[0]), change)], statement)
    return True

"""Answers: each is stored once, counted once, and makes the session ready once, in one commit."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..access import record
from ..arguments import require_one_of, require_text, require_text_or_none
from ..checkpoints.write import end_session, write
from ..errors import Conflict, InvalidArgument, NotFound
from ..feed import emit
from ..kernel.operation import Lock, Op, Row, Runtime, one, operation, query, rows
from ..records import EndedItem, SessionRef
from ..sessions.access import LOCK_SESSION, Place
from ..sessions.rows import READ_PLACE_BY_ID
from ..trees import OPEN
from .artifacts import check_artifact, outgoing
from .asks import READ_ASK, RESUME, SELECT_ASKS, delivery_id, read_ask
from .pauses import READ_PAUSE, close_open, count_answer, make_ready
from .records import Artifact, Receipt, pack_answer, pause_context
from .settlement import (
    CANCELLED,
    SETTLE_DUE,
    TIMED_OUT,
    settle,
    stop_peer,
    withdraw_item,
)

ANSWERED_BY_PEERS = ("ok", "error", "cancelled")
UNANSWERED = "The session ended without an answer."

KEEP_LATE = """
UPDATE hf_asks SET late = CAST(:late AS BLOB), late_at = :now
WHERE id = :id AND state IN ('timeout', 'cancelled') AND late IS NULL RETURNING id
"""
FIND_DUE = f"""
{SELECT_ASKS} INDEXED BY ix_asks_due
WHERE state = 'open' AND deadline_at IS NOT NULL AND deadline_at <= :now
ORDER BY deadline_at, number LIMIT :limit
"""
NEXT_DUE = """
SELECT min(deadline_at) FROM hf_asks INDEXED BY ix_asks_due
WHERE state = 'open' AND deadline_at IS NOT NULL
"""
READ_NEXT_DUE = f"SELECT ({NEXT_DUE}) AS deadline_at, :now AS now"
DUE_OF_SESSION = f"""
{SELECT_ASKS} WHERE session_number = :session_number AND coalesce(state, '') = 'open'
    AND deadline_at <= :now ORDER BY deadline_at, number
"""


def answer(
    runtime: Runtime,
    id: str,
    result: Any,
    status: str,
    artifacts: Sequence[Artifact],
    *,
    tells_peer: bool = True,
) -> Op[Receipt]:
    """Store the answer to a call; "late" after a timeout or a cancellation, else "duplicate".

    A peer at another store that has not answered itself is told to stop.
    """
    require_one_of("status", status, ANSWERED_BY_PEERS)
    given = require_artifacts(artifacts)
    # Checked before anything is locked.
    require_text("ask_id", id)
    pack_answer(runtime.codec, id, "answer", status, result, given)
    ask = yield from read_ask(id, locks=True)
    if ask["state"] != "open":
        return (yield from _keep_late(runtime, ask, status, result, given))
    yield from _settle_with_artifacts(runtime, ask, status, result, given, tells_peer=tells_peer)
    # A peer that has not begun need not begin.
    if (yield from withdraw_item(runtime, delivery_id(id))):
        yield from stop_peer(runtime, id)
    return "counted"


def require_artifacts(artifacts: object) -> list[Artifact]:
    """Return artifacts that can be sent."""
    if not isinstance(artifacts, list | tuple):
        raise InvalidArgument(f"artifacts must be a list, not {type(artifacts).__name__}")
    for each in artifacts:
        if not isinstance(each, Artifact):
            raise InvalidArgument(f"an artifact is an Artifact, not {type(each).__name__}")
        check_artifact(each)
    return list(artifacts)


def _settle_with_artifacts(
    runtime: Runtime,
    ask: Row,
    status: str,
    result: Any,
    given: Sequence[Artifact],
    *,
    tells_peer: bool = True,
) -> Op[None]:
    """Settle a call with what its session made, and count it."""
    session = yield from one(READ_PLACE_BY_ID, id=ask["id"])
    made = [] if session is None else (yield from outgoing(runtime.codec, session["number"]))
    whole = [*made, *given]
    settled = yield from settle(runtime, ask, status, result, whole, tells_peer=tells_peer)
    if settled is not None:
        yield from count_answer(runtime, settled)


def _keep_late(
    runtime: Runtime, ask: Row, status: str, result: Any, given: Sequence[Artifact]
) -> Op[Receipt]:
    late = pack_answer(runtime.codec, ask["id"], "late", status, result, given)
    if (yield from one(KEEP_LATE, id=ask["id"], late=late)) is None:
        return "duplicate"
    data = {"ask": ask["id"], "agent": ask["agent"], "status": status}
    asker_id = ask["session_id"] or ask["id"]
    yield from emit(runtime.codec, ask["root_id"], asker_id, "peer_answered_late", data)
    return "late"


def cancel_call(runtime: Runtime, id: str) -> Op[bool]:
    """Cancel one call and its peer; False if it had its answer."""
    ask = yield from read_ask(id, locks=True)
    settled = yield from settle(runtime, ask, "cancelled", CANCELLED)
    if settled is None:
        return False
    yield from stop_peer(runtime, id)
    yield from count_answer(runtime, settled)
    return True


@query
def find_due(_: Runtime, limit: int) -> Op[tuple[list[Row], int | None]]:
    """Return calls whose deadline has passed, oldest first, and when the next one is due, in ms."""
    found = yield from rows(FIND_DUE, limit=limit)
    [upcoming] = yield from rows(READ_NEXT_DUE)
    at = upcoming["deadline_at"]
    return found, None if at is None else max(0, at - upcoming["now"])


@operation
def expire(runtime: Runtime, found: Sequence[Row]) -> Op[int]:
    """Time out the calls of one tree whose deadline has still passed; return how many."""
    yield Lock(found[0]["root_id"])
    return (yield from expire_locked(runtime, found))


def expire_locked(runtime: Runtime, found: Sequence[Row]) -> Op[int]:
    """Time out calls of a tree that is locked."""
    count = 0
    for ask in found:
        settled = yield from settle(runtime, ask, "timeout", TIMED_OUT, statement=SETTLE_DUE)
        if settled is not None:
            count += 1
            yield from stop_peer(runtime, ask["id"])
            yield from count_answer(runtime, settled)
    return count


def expire_own(runtime: Runtime, session_number: int) -> Op[None]:
    """Time out the calls of a session, whose tree is locked, that are due."""
    found = yield from rows(DUE_OF_SESSION, session_number=session_number)
    yield from expire_locked(runtime, found)


def answer_served(runtime: Runtime, session: SessionRef, status: str, result: Any) -> Op[None]:
    """Answer the call that a session serves, if it has no answer yet."""
    ask = yield from one(READ_ASK, id=session.id)
    if ask is not None and ask["state"] == "open":
        yield from _settle_with_artifacts(runtime, ask, status, result, ())


def follow_item(runtime: Runtime, item: EndedItem) -> Op[None]:
    """End the session of an item that has ended, and answer the call that it serves.

    The output of a completed item is the answer. A session that serves no call is left open when
    its item is completed.
    """
    here = item.session
    if item.type == RESUME and item.status == "completed":
        yield from close_open(runtime, here)
    session = yield from one(LOCK_SESSION, number=here.number)
    if session is None or session["status"] not in OPEN:
        return
    is_served = (yield from one(READ_ASK, id=here.id)) is not None
    if item.status == "completed" and not is_served:
        return
    result: Any = item.error
    if item.output is not None:
        result = runtime.codec.decode(item.output)
    status = {"completed": "ok", "failed": "error", "cancelled": "cancelled"}[item.status]
    yield from answer_served(runtime, here, status, result)
    yield from end_session(runtime, _place(here, session), session["status"], item.status)


def _place(session: SessionRef, row: Row) -> Place:
    """Return a session as a place that the store itself may write, whoever drives it."""
    is_driven = row["holder"] is not None and row["is_leased"]
    return Place(session.id, session.number, session.root_id, row["fence"] if is_driven else None)


def decide(
    runtime: Runtime, pause_id: str, *, is_approved: bool, by: str, note: str | None
) -> Op[None]:
    """Approve or reject what a session waits for, once; the same decision again does nothing."""
    require_text("pause_id", pause_id)
    require_text("by", by)
    require_text_or_none("note", note, 1_000)
    decided = {"is_approved": is_approved, "by": by, "note": note}
    decision = runtime.codec.pack(decided, context=pause_context(pause_id, "decision"))
    pause = yield from one(READ_PAUSE, id=pause_id)
    if pause is not None:
        yield Lock(pause["root_id"])
        pause = yield from one(READ_PAUSE, id=pause_id)
    if pause is None:
        raise NotFound(f"there is no pause {pause_id!r}", id=pause_id)
    if pause["reason"] != "approval":
        raise InvalidArgument(f"pause {pause_id} waits for {pause['reason']}, not for an approval")
    if (yield from make_ready(runtime, pause, decision)) is None:
        if _is_decided(runtime, pause, is_approved):
            return
        raise Conflict(
            f"pause {pause_id} is {pause['state']}; it no longer waits for a decision",
            id=pause_id,
            state=pause["state"],
        )
    here = SessionRef(pause["session_id"], pause["session_number"], pause["root_id"])
    [session] = yield from rows(LOCK_SESSION, number=here.number)
    told = {"pause": pause_id, "decision": "approve" if is_approved else "reject"}
    evidence = {**told, "by": by, "note": note}
    yield from write(runtime, _place(here, session), "approval_point", {}, evidence)
    yield from record(
        runtime.actor, "approved" if is_approved else "rejected", pause_id, f"by {by}"
    )


def _is_decided(runtime: Runtime, pause: Row, is_approved: bool) -> bool:
    if pause["decision"] is None:
        return False
    context = pause_context(pause["id"], "decision")
    stored = runtime.codec.unpack(pause["decision"], context=context)
    return bool(stored["is_approved"]) is is_approved

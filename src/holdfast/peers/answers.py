"""Answers: each is stored once, counted once, and makes the session ready once, in one commit."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from ..access import record
from ..arguments import require_one_of, require_text, require_text_or_none
from ..checkpoints.write import ending, write
from ..errors import Conflict, CorruptRecord, InvalidArgument, LimitExceeded, NotFound
from ..feed import emit
from ..kernel.nouns import Noun
from ..kernel.operation import (
    Lock,
    Op,
    Query,
    Row,
    Runtime,
    batch,
    defer,
    one,
    operation,
    query,
    rows,
    together,
)
from ..records import EndedItem, SessionRef
from ..sessions.access import LOCK_SESSION, Place
from ..sessions.rows import AMONG_NUMBERS, READ_PLACE_BY_ID, numbers_of
from ..trees import OPEN
from ..work.items import READ_ITEM
from .artifacts import (
    ASKS_OF_SESSION,
    LIST_ARTIFACTS,
    check_artifact,
    outgoing,
    outgoing_looks,
)
from .asks import (
    READ_SERVED_ASK,
    REQUEST,
    RESUME,
    SELECT_ASKS,
    SERVED,
    delivery_id,
    read_ask,
)
from .pauses import OPEN_PAUSE, READ_PAUSE, close, count, counting, make_ready, resumption_id
from .records import Artifact, Receipt, pack_answer, pause_context
from .settlement import (
    NOT_AWAITED,
    SETTLE_DUE,
    SETTLED_COLUMNS,
    TIMED_OUT,
    cancel_asks,
    serving_of,
    settle,
    settlement,
    stop_peers,
    tell,
    withdraw,
)

ANSWERED_BY_PEERS = ("ok", "error", "cancelled")
UNANSWERED = "The session ended without an answer."

KEEP_LATE = """
UPDATE hf_asks SET late = CAST(:late AS BLOB), late_at = :now
WHERE id = :id AND coalesce(state, '') IN ('timeout', 'cancelled') AND late IS NULL RETURNING id
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
# The call that a session serves, and whether the session itself has made, asked or paused.
HAS_ARTIFACTS = "EXISTS (SELECT 1 FROM hf_artifacts f WHERE f.session_number = :session_number)"
READ_SERVED = f"""
SELECT {SETTLED_COLUMNS}, {HAS_ARTIFACTS} AS has_artifacts,
    EXISTS (SELECT 1 FROM hf_asks a WHERE a.session_number = :session_number)
    OR EXISTS (
        SELECT 1 FROM hf_pauses p WHERE p.session_number = :session_number
            AND p.state IN ('waiting', 'ready', 'resumed')
    ) AS has_paused
FROM hf_asks WHERE {SERVED}
"""  # noqa: S608
READ_RESUMED_SERVED = f"""
SELECT {SETTLED_COLUMNS}, {HAS_ARTIFACTS} AS has_artifacts FROM hf_asks WHERE {SERVED}
"""  # noqa: S608
# Nothing collects the answers of a session that has ended or was rewound.
CLOSE_ANSWERED = f"""
UPDATE hf_asks SET closed_at = :now
WHERE session_number {AMONG_NUMBERS} AND state <> 'open' AND closed_at IS NULL
"""  # noqa: S608
READ_NEXT_DUE = f"SELECT ({NEXT_DUE}) AS deadline_at, :now AS now"
READ_LEFT = """
SELECT deadline_at - :now AS left_ms FROM hf_asks
WHERE id = :id AND coalesce(state, '') = 'open' AND deadline_at IS NOT NULL
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

    If the answer did not come from the peer itself, a peer at another store is told to stop.
    """
    require_one_of("status", status, ANSWERED_BY_PEERS)
    given = require_artifacts(artifacts)
    # Checked before anything is locked.
    require_text("ask_id", id)
    pack_answer(runtime.codec, id, "answer", status, result, given)
    ask = yield from read_ask(id, locks=True)
    if ask["state"] != "open":
        return (yield from _keep_late(runtime, ask, status, result, given))
    item, served = yield from batch(
        Query(READ_ITEM, {"id": delivery_id(id)}), Query(READ_PLACE_BY_ID, {"id": id})
    )
    looked: Sequence[list[Row]] = [[], []]
    for session in serving_of(ask, served):
        looked = yield from batch(*outgoing_looks(session["number"]))
    whole = _accompanying(runtime, ask, status, result, looked, given)
    yield from _settle_made(runtime, ask, status, result, whole, tells_peer=tells_peer)
    # A peer that has not begun need not begin.
    if (yield from withdraw(runtime, serving_of(ask, item))):
        yield from stop_peers(runtime, [ask])
    return "counted"


def require_artifacts(artifacts: object) -> list[Artifact]:
    """Return artifacts, after checking that they can be sent."""
    if not isinstance(artifacts, list | tuple):
        raise InvalidArgument(f"artifacts must be a list, not {type(artifacts).__name__}")
    for each in artifacts:
        if not isinstance(each, Artifact):
            raise InvalidArgument(
                f"artifacts must be a list of Artifact, not of {type(each).__name__}"
            )
        check_artifact(each)
    return list(artifacts)


def _accompanying(
    runtime: Runtime,
    ask: Row,
    status: str,
    result: Any,
    made: Sequence[list[Row]],
    given: Sequence[Artifact] = (),
) -> list[Artifact]:
    """Return the artifacts that go out with an answer: those of its session, and those given.

    If the former are damaged or too large, an answer that is not `ok` goes without them, so that
    every call can end.
    """
    try:
        whole = [*outgoing(runtime.codec, *made), *given]
        if status != "ok":
            pack_answer(runtime.codec, ask["id"], "answer", status, result, whole)
    except (CorruptRecord, LimitExceeded):
        if status == "ok":
            raise
        return list(given)
    return whole


def _answer_looks(session: SessionRef) -> list[Query]:
    """Return the queries whose rows `_settle_served` needs."""
    served = {"id": session.id, "root_id": session.root_id}
    return [Query(READ_SERVED_ASK, served), *outgoing_looks(session.number)]


def _settle_made(
    runtime: Runtime,
    ask: Row,
    status: str,
    result: Any,
    artifacts: Sequence[Artifact],
    *,
    tells_peer: bool = True,
) -> Op[None]:
    """Settle an open call, which was read with its tree locked, and count its answer."""
    given = (status, result, artifacts)
    settling = settlement(runtime, ask, *given)
    [settled, *counted] = yield from batch(settling, *counting(ask, status))
    if settled:
        yield from tell(runtime, settled[0], *given, tells_peer=tells_peer)
        yield from count(runtime, counted)


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


def cancel_call(runtime: Runtime, id: str, why: str) -> Op[bool]:
    """Cancel one call and its peer; False if it already had its answer."""
    ask = yield from read_ask(id, locks=True)
    settled = yield from settle(runtime, ask, "cancelled", why)
    if settled is None:
        return False
    yield from stop_peers(runtime, [settled])
    yield from _count_settled(runtime, settled)
    return True


def _count_settled(runtime: Runtime, settled: Row) -> Op[None]:
    """Count an answer that was stored."""
    statements = counting(settled, settled["state"])
    if statements:
        yield from count(runtime, (yield from batch(*statements)))


@query
def find_due(_: Runtime, limit: int) -> Op[tuple[list[Row], int | None]]:
    """Return calls past their deadline, oldest first, and when the next one is due, in ms."""
    found = yield from rows(FIND_DUE, limit=limit)
    [upcoming] = yield from rows(READ_NEXT_DUE)
    at = upcoming["deadline_at"]
    return found, None if at is None else max(0, at - upcoming["now"])


@operation
def expire(runtime: Runtime, found: Sequence[Row]) -> Op[int]:
    """Time out the calls of one tree that are still past their deadline; return how many."""
    yield Lock(found[0]["root_id"])
    return (yield from expire_locked(runtime, found))


@query
def seconds_left(_: Runtime, id: str) -> Op[float | None]:
    """Return how long until the deadline of a call; None if it is over or has no deadline."""
    found = yield from one(READ_LEFT, id=id)
    return None if found is None else found["left_ms"] / 1000


@operation
def expire_call(runtime: Runtime, id: str) -> Op[int]:
    """Time out one call if it is past its deadline; return how many that were."""
    return (yield from expire_locked(runtime, [(yield from read_ask(id, locks=True))]))


def expire_locked(runtime: Runtime, found: Sequence[Row]) -> Op[int]:
    """Time out calls of a tree that is already locked."""
    number = 0
    for ask in found:
        settled = yield from settle(runtime, ask, "timeout", TIMED_OUT, statement=SETTLE_DUE)
        if settled is not None:
            number += 1
            yield from stop_peers(runtime, [settled])
            yield from _count_settled(runtime, settled)
    return number


def answer_served(runtime: Runtime, session: SessionRef, status: str, result: Any) -> Op[None]:
    """Answer the call that a session serves, if it has no answer yet."""
    looked = yield from batch(*_answer_looks(session))
    yield from _settle_served(runtime, looked, status, result)


def _settle_served(
    runtime: Runtime, looked: Sequence[list[Row]], status: str, result: Any
) -> Op[None]:
    """Do the same with rows that were read with the tree locked."""
    asks, *made = looked
    for ask in asks:
        if ask["state"] == "open":
            artifacts = _accompanying(runtime, ask, status, result, made)
            yield from _settle_made(runtime, ask, status, result, artifacts)


def following(item: EndedItem) -> list[Query]:
    """Return the queries whose rows `follow_item` needs.

    A session seldom has artifacts, and one that has only been asked seldom has paused; whether it
    has is read with the call.
    """
    here = item.session
    session = Query(LOCK_SESSION, {"number": here.number})
    served = {"id": here.id, "root_id": here.root_id, "session_number": here.number}
    if item.type == REQUEST:
        return [session, Query(READ_SERVED, served)]
    return [session, Query(READ_RESUMED_SERVED, served), *_paused_looks(here)]


def _paused_looks(session: SessionRef) -> list[Query]:
    """Return the queries for a session's open pause and its calls."""
    of_session = {"session_number": session.number}
    return [Query(OPEN_PAUSE, of_session), Query(ASKS_OF_SESSION, of_session)]


def follow_item(
    runtime: Runtime,
    noun: Noun,
    item: EndedItem,
    looked: Sequence[list[Row]],
    driving_fence: int | None,
) -> Op[bool]:
    """End the session of an item that has ended, and answer the call that it serves.

    The output of a completed item is the answer. A session that serves no call is left open when
    its item is completed: then it returns False. `looked` are the rows of `following`, read when
    the item has ended. All nouns are told of the session's end but `noun`, whose part is done here.
    """
    here = item.session
    [sessions, serving, *made] = looked
    if item.type == REQUEST:
        has_paused = not serving or serving[0]["has_paused"]
        made = (yield from batch(*_paused_looks(here))) if has_paused else [[], []]
    [paused, asks] = made
    if item.type == RESUME and not _may_end(item, paused):
        return False
    artifacts: list[Row] = []
    if serving and serving[0]["has_artifacts"]:
        artifacts = yield from rows(LIST_ARTIFACTS, session_number=here.number)
    is_open = bool(sessions) and sessions[0]["status"] in OPEN
    is_ending = is_open and (item.status != "completed" or bool(serving))
    if is_ending or (item.type == RESUME and item.status == "completed"):
        for pause in paused:
            yield from close(runtime, pause, item_id=item.id)
    if not is_ending:
        return False
    [session] = sessions
    result: Any = item.error
    if item.output is not None:
        result = runtime.codec.decode(item.output)
    status = {"completed": "ok", "failed": "error", "cancelled": "cancelled"}[item.status]
    is_driven = driving_fence == session["fence"]
    end = (_place(here, session), session["status"], item.status, session)
    closed = {pause["number"] for pause in paused}
    left = [ask for ask in asks if ask["closed_at"] is None and ask["pause_number"] not in closed]
    yield from together(
        [
            _settle_served(runtime, [serving, artifacts, asks], status, result),
            *ending(runtime, *end, raises_fence=is_driven, but=noun),
            leave_asks(runtime, here, left),
        ]
    )
    return True


def _may_end(item: EndedItem, paused: Sequence[Row]) -> bool:
    """Whether the end of a resume item concerns its session; not if that has paused again since.

    Raises InvalidArgument if it is completed and nobody was given the answers.
    """
    for pause in paused:
        if resumption_id(pause) != item.id:
            return False
        if item.status == "completed" and pause["state"] != "resumed":
            raise InvalidArgument(
                f"work item {item.id} has not resumed session {item.session.id}: resume it"
                " before it is completed, or fail it"
            )
    return True


def leave_asks(runtime: Runtime, session: SessionRef, left: Sequence[Row]) -> Op[None]:
    """Close calls that a session no longer waits for; the open ones are cancelled first."""
    yield from cancel_asks(runtime, [ask for ask in left if ask["state"] == "open"], NOT_AWAITED)
    if left:
        yield from defer(CLOSE_ANSWERED, numbers=numbers_of([session]))


def _place(session: SessionRef, row: Row) -> Place:
    """Return a session as a place that the store itself may write to, whoever drives it."""
    is_driven = row["holder"] is not None and row["is_leased"]
    return Place(session.id, session.number, session.root_id, row["fence"] if is_driven else None)


def decide(
    runtime: Runtime, pause_id: str, *, is_approved: bool, by: str, note: str | None
) -> Op[None]:
    """Approve or reject what a session waits for, once; the same decision again does nothing."""
    require_text("pause_id", pause_id)
    require_text("by", by)
    require_text_or_none("note", note, 1_000)
    note = runtime.redactor.redact(note)
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
    session = yield from rows(LOCK_SESSION, number=pause["session_number"])
    status = session[0]["status"] if session else None
    if (yield from make_ready(runtime, pause, status, decision)) is None:
        made = _decision(runtime, pause)
        if made is not None and bool(made["is_approved"]) is is_approved:
            return
        why = f"is {pause['state']}; it no longer waits for a decision"
        if made is not None:
            why = f"was {_word(made['is_approved'])} by {made['by']}; a decision is not changed"
        raise Conflict(f"pause {pause_id} {why}", id=pause_id, state=pause["state"])
    here = SessionRef(pause["session_id"], pause["session_number"], pause["root_id"])
    told = {"pause": pause_id, "decision": "approve" if is_approved else "reject"}
    evidence = {**told, "by": by, "note": note}
    yield from write(runtime, _place(here, session[0]), "approval_point", {}, evidence)
    yield from record(runtime.actor, _word(is_approved), pause_id, f"by {by}")


def _decision(runtime: Runtime, pause: Row) -> dict[str, Any] | None:
    if pause["decision"] is None:
        return None
    context = pause_context(pause["id"], "decision")
    stored: dict[str, Any] = runtime.codec.unpack(pause["decision"], context=context)
    return stored


def _word(is_approved: bool) -> Literal["approved", "rejected"]:
    return "approved" if is_approved else "rejected"

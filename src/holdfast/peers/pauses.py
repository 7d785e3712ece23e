"""Pauses: a session lets go of everything while it waits, and is resumed once.

Whatever ends the wait (the last answer, a timeout, a decision) makes the pause `ready` and submits
the work item that resumes the session, in one transaction under the lock of the tree. A sleep
submits that item at once, to become due at its end.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ..arguments import require_whole, shown
from ..checkpoints.handle import CheckpointOps
from ..checkpoints.write import record_status, write
from ..codec import Codec
from ..errors import InvalidArgument
from ..feed import emit
from ..kernel.operation import AfterCommit, Op, Row, Runtime, fresh_id, one, rows
from ..sessions.access import (
    LOCK_SESSION,
    Place,
    lock_and_read,
    require_writable,
)
from ..sessions.handle import SessionHandle
from ..sessions.rows import ACTIVATE_SESSION, SET_SESSION_STATUS
from ..trees import OPEN
from ..work import transitions
from ..work.items import LEASE_SECONDS, READ_ITEM, Item, Submission
from ..work.submission import submit_all
from ..work.transitions import Transition
from .artifacts import artifacts_of
from .asks import READ_ASK, REQUEST, RESUME, SELECT_ASKS, queue_of, require_active
from .records import (
    Answer,
    Answered,
    Artifact,
    Parked,
    PeerRequest,
    Resumption,
    answer_of,
    ask_context,
    decision_of,
    opened,
    pause_context,
)
from .settlement import cancel_rest, withdraw_item

PAUSE_COLUMNS = """number, id, session_number, session_id, root_id, generation, agent, reason,
    state, need, keeps_rest, open_asks, ok_asks, wakes_at, resumed_version, context, question,
    decision, created_at, ready_at, closed_at"""
SELECT_PAUSES = f"SELECT {PAUSE_COLUMNS} FROM hf_pauses"  # noqa: S608
READ_PAUSE = f"{SELECT_PAUSES} WHERE id = :id"
OPEN_PAUSE = f"""
{SELECT_PAUSES} WHERE session_number = :session_number
    AND state IN ('waiting', 'ready', 'resumed')
"""
UNCOLLECTED = f"""
{SELECT_ASKS} WHERE session_number = :session_number AND pause_number IS NULL AND closed_at IS NULL
ORDER BY number
"""
COLLECTED = f"""
{SELECT_ASKS} WHERE session_number = :session_number AND pause_number = :number ORDER BY number
"""
ADD_PAUSE = f"""
INSERT INTO hf_pauses (
    id, session_number, session_id, root_id, generation, agent, reason, state, need, keeps_rest,
    open_asks, ok_asks, wakes_at, resumed_version, context, question, created_at
)
SELECT CAST(:id AS TEXT), CAST(:session_number AS INTEGER), CAST(:session_id AS TEXT),
    CAST(:root_id AS TEXT), 1 + coalesce(max(p.generation), 0), CAST(:agent AS TEXT),
    CAST(:reason AS TEXT), CAST(:state AS TEXT), CAST(:need AS INTEGER),
    CAST(:keeps_rest AS INTEGER), CAST(:open_asks AS INTEGER), CAST(:ok_asks AS INTEGER),
    CAST(:wakes_at AS INTEGER), CAST(:resumed_version AS INTEGER), CAST(:context AS BLOB),
    CAST(:question AS BLOB), :now
FROM hf_pauses p WHERE p.session_number = :session_number
RETURNING {PAUSE_COLUMNS}
"""  # noqa: S608
# An ask whose deadline has passed is answered by then, at the latest when the session pauses.
COUNT_UNCOLLECTED = """
SELECT coalesce(sum(CASE WHEN state = 'open' AND (deadline_at IS NULL OR deadline_at > :now)
        THEN 1 ELSE 0 END), 0) AS open_asks,
    coalesce(sum(CASE WHEN state = 'ok' THEN 1 ELSE 0 END), 0) AS ok_asks
FROM hf_asks
WHERE session_number = :session_number AND pause_number IS NULL AND closed_at IS NULL
"""
COLLECT = """
UPDATE hf_asks SET pause_number = :number
WHERE session_number = :session_number AND pause_number IS NULL AND closed_at IS NULL
"""
KEEP_REST = """
UPDATE hf_asks SET pause_number = NULL
WHERE session_number = :session_number AND pause_number = :number AND state = 'open'
"""
COUNT_ANSWER = f"""
UPDATE hf_pauses SET open_asks = open_asks - 1, ok_asks = ok_asks + :ok
WHERE number = :number AND state = 'waiting' RETURNING {PAUSE_COLUMNS}
"""  # noqa: S608
MAKE_READY = f"""
UPDATE hf_pauses SET state = 'ready', ready_at = :now, decision = CAST(:decision AS BLOB)
WHERE number = :number AND state = 'waiting' RETURNING {PAUSE_COLUMNS}
"""  # noqa: S608
MARK_RESUMED = f"""
UPDATE hf_pauses SET state = 'resumed', ready_at = coalesce(ready_at, :now),
    resumed_version = coalesce(resumed_version, :version)
WHERE number = :number AND state IN ('waiting', 'ready', 'resumed') RETURNING {PAUSE_COLUMNS}
"""  # noqa: S608
# A pause that waited for nothing more is closed; one that still waited is cancelled.
CLOSE = """
UPDATE hf_pauses SET closed_at = :now,
    state = CASE WHEN state = 'waiting' THEN 'cancelled' ELSE 'closed' END
WHERE number = :number AND state IN ('waiting', 'ready', 'resumed')
"""
CLOSE_ASKS = """
UPDATE hf_asks SET closed_at = :now
WHERE session_number = :session_number AND pause_number = :number AND state <> 'open'
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wish:
    """What a session pauses for, checked and encoded."""

    reason: str
    context: bytes
    need: int | None = None
    keeps_rest: bool = False
    question: bytes | None = None
    wakes_at: int | None = None


def require_need(need: object) -> int | None:
    """Return how many answers `ok` are needed; None for an answer to every ask."""
    if need in ("all", "any"):
        return None if need == "all" else 1
    if type(need) is not int:
        raise InvalidArgument(f'need must be "all", "any" or a number, not {shown(need)}')
    return require_whole("need", need, 1)


def is_met(need: int | None, open_asks: int, ok_asks: int) -> bool:
    """Whether a pause is over: enough answers are `ok`, or too few can still become it."""
    if need is None:
        return open_asks == 0
    return ok_asks >= need or ok_asks + open_asks < need


def begin_pause(session: SessionHandle[Any], wish: Wish) -> Op[Parked | Answered]:
    """Park a session that may be written, or return the answers if they meet its need already."""
    runtime, place = session.runtime, session._place
    row = require_writable(runtime, place, (yield from lock_and_read(runtime, place)))
    require_active(row, session.id)
    agent = yield from _require_agent(session)
    asks = []
    if wish.reason == "peers":
        asks = yield from rows(UNCOLLECTED, session_number=session.number)
    states = [ask["state"] for ask in asks]
    counts = {"open_asks": states.count("open"), "ok_asks": states.count("ok")}
    if wish.need is not None and wish.need > len(asks):
        raise InvalidArgument(f"need is {wish.need}, but there are only {len(asks)} asks")
    yield from close_open(runtime, session)
    is_over = wish.reason == "peers" and is_met(wish.need, **counts)
    pause_id = yield from fresh_id()
    [added] = yield from rows(
        ADD_PAUSE,
        id=pause_id,
        session_number=session.number,
        session_id=session.id,
        root_id=session.root_id,
        agent=agent,
        reason=wish.reason,
        state="resumed" if is_over else "waiting",
        need=wish.need,
        keeps_rest=int(wish.keeps_rest),
        **counts,
        wakes_at=wish.wakes_at,
        resumed_version=row["version"] if is_over else None,
        **_sealed(runtime.codec, pause_id, wish),
    )
    if asks:
        given = {"number": added["number"], "session_number": session.number}
        yield from rows(COLLECT, **given)
    if is_over:
        yield from _leave_rest(runtime, added)
        answers, artifacts = yield from collected(runtime.codec, added)
        return Answered(pause_id=pause_id, answers=answers, artifacts=artifacts)
    yield from _park(session, row, added, wish)
    return Parked(pause_id=pause_id, session_id=session.id, generation=added["generation"])


def _require_agent(session: SessionHandle[Any]) -> Op[str]:
    """Return the agent whose instances can resume a session."""
    agent: str | None = (yield from session._row())["agent"]
    if agent is None:
        raise InvalidArgument(
            f"session {session.id} has no agent, so nobody could resume it; start it with "
            "store.session(…, agent=…)"
        )
    return agent


def _sealed(codec: Codec, id: str, wish: Wish) -> dict[str, bytes | None]:
    bodies = {"context": wish.context, "question": wish.question}
    return {
        part: None if body is None else codec.seal(body, context=pause_context(id, part))
        for part, body in bodies.items()
    }


def _park(session: SessionHandle[Any], row: Row, added: Row, wish: Wish) -> Op[None]:
    """Set the session waiting, release its lease, and complete the work item that drove it."""
    runtime, place = session.runtime, session._place
    told = {"pause": added["id"], "reason": added["reason"]}
    if wish.question is not None:
        asked = {"pause": added["id"], "question": runtime.codec.decode(wish.question)}
        yield from write(runtime, place, "approval_point", {}, asked)
    yield from record_status(runtime, place, row["status"], "waiting", **told)
    yield from _complete_item(session, added["id"])
    yield from rows(SET_SESSION_STATUS, number=session.number, status="waiting", raised=0)
    if wish.wakes_at is not None:
        yield from _submit_resumption(runtime, added, available_at=wish.wakes_at)


def _complete_item(session: SessionHandle[Any], pause_id: str) -> Op[None]:
    """Complete the item that drives a session, so that no retry repeats what led to the pause."""
    runtime, guard = session.runtime, session.guard
    if guard is None or guard.noun != "work item":
        return
    row = yield from one(READ_ITEM, id=guard.id)
    if row is None:
        raise guard.lost()
    item: Item[Any] = Item(runtime, {**row, "fence": guard.fence}, LEASE_SECONDS)
    body = runtime.codec.encode({"paused": pause_id})
    change = Transition("completed", "session paused", body, is_followed=False)
    [done] = yield from transitions.finish([(item, change)])
    if done is None:
        raise (yield from transitions.lost(item))
    if isinstance(session.item, Item):
        held = session.item
        yield AfterCommit(lambda: held._take(done))


def count_answer(runtime: Runtime, ask: Row) -> Op[None]:
    """Count an answer in the pause that waits for it; the one that meets its need ends it."""
    if ask["pause_number"] is None:
        return
    is_ok = int(ask["state"] == "ok")
    found = yield from one(COUNT_ANSWER, number=ask["pause_number"], ok=is_ok)
    if found is not None and is_met(found["need"], found["open_asks"], found["ok_asks"]):
        yield from make_ready(runtime, found)


def make_ready(runtime: Runtime, pause: Row, decision: bytes | None = None) -> Op[Row | None]:
    """End the wait of a pause, once, and submit the item that resumes its session."""
    session = yield from one(LOCK_SESSION, number=pause["session_number"])
    if session is None or session["status"] not in OPEN:
        # It is being cancelled or deleted, and will not go on.
        return None
    ready = yield from one(MAKE_READY, number=pause["number"], decision=decision)
    if ready is None:
        return None
    yield from _leave_rest(runtime, ready)
    yield from _submit_resumption(runtime, ready)
    data = {"pause": ready["id"], "reason": ready["reason"]}
    yield from emit(runtime.codec, ready["root_id"], ready["session_id"], "pause_ready", data)
    return ready


def _leave_rest(runtime: Runtime, pause: Row) -> Op[None]:
    """Cancel the asks that are still open, or keep them for the next pause."""
    if not pause["keeps_rest"]:
        yield from cancel_rest(runtime, pause)
        return
    given = {"number": pause["number"], "session_number": pause["session_number"]}
    yield from rows(KEEP_REST, **given)


def _submit_resumption(
    runtime: Runtime, pause: Row, *, available_at: int | None = None
) -> Op[None]:
    place = Place(pause["session_id"], pause["session_number"], pause["root_id"], None)
    item = Submission(
        RESUME,
        {"pause": pause["id"]},
        queue=queue_of(pause["agent"]),
        available_at=available_at,
        id=resumption_id(pause),
    )
    yield from submit_all(runtime, [item], default=place)


def resumption_id(pause: Row) -> str:
    """Return the id of the item that resumes from a pause."""
    return f"resume {pause['id']}"


def close_open(runtime: Runtime, session: Any) -> Op[Row | None]:
    """Close the pause of a session and the asks it collected; return it as it was.

    Its calls that are still open are cancelled, and nothing resumes from it any more.
    """
    found = yield from one(OPEN_PAUSE, session_number=session.number)
    if found is None:
        return None
    given = {"number": found["number"], "session_number": found["session_number"]}
    yield from rows(CLOSE, number=found["number"])
    if found["state"] == "waiting":
        yield from cancel_rest(runtime, found)
    yield from rows(CLOSE_ASKS, **given)
    if found["state"] in {"waiting", "ready"}:
        yield from withdraw_item(runtime, resumption_id(found))
    return found


def collected(codec: Codec, pause: Row) -> Op[tuple[tuple[Answer, ...], tuple[Artifact, ...]]]:
    """Return the answers of a pause in the order of dispatch, and all artifacts so far."""
    given = {"number": pause["number"], "session_number": pause["session_number"]}
    found = yield from rows(COLLECTED, **given)
    answers = tuple(each for row in found if (each := answer_of(codec, row)) is not None)
    own = yield from artifacts_of(codec, pause["session_number"])
    return answers, (*own, *(each for answer in answers for each in answer.artifacts))


def resume(session: SessionHandle[Any], pause_id: str) -> Op[Resumption[Any]]:
    """Return the resumption of a session that was just leased by the item of a pause."""
    row = yield from one(READ_PAUSE, id=pause_id)
    if row is None or row["session_number"] != session.number:
        raise InvalidArgument(f"there is no pause {shown(pause_id)} of session {session.id}")
    [now] = yield from rows(LOCK_SESSION, number=session.number)
    resumed = yield from one(MARK_RESUMED, number=row["number"], version=now["version"])
    return (yield from resumption_of(session, resumed or row))


def take_over(session: SessionHandle[Any]) -> Op[Resumption[Any] | None]:
    """Resume a session from its pause in place of the pause's item; None while it waits."""
    runtime, place = session.runtime, session._place
    row = require_writable(runtime, place, (yield from lock_and_read(runtime, place)))
    found = yield from one(OPEN_PAUSE, session_number=session.number)
    if found is None or found["state"] == "waiting":
        return None
    if row["status"] == "waiting":
        yield from record_status(runtime, place, "waiting", "active", pause=found["id"])
        yield from rows(ACTIVATE_SESSION, number=session.number)
        yield from withdraw_item(runtime, resumption_id(found))
    return (yield from resume(session, found["id"]))


def resumption_of(session: SessionHandle[Any], pause: Row) -> Op[Resumption[Any]]:
    """Return the resumption of a session after a pause."""
    runtime, pause_id = session.runtime, pause["id"]
    is_consumed = pause["state"] in {"closed", "cancelled"}
    if pause["state"] == "resumed":
        is_consumed = yield from _has_turn_since(session, pause["resumed_version"])
    answers, artifacts = yield from collected(runtime.codec, pause)
    return Resumption(
        session=session,
        pause_id=pause_id,
        generation=pause["generation"],
        reason=pause["reason"],
        context=opened(runtime.codec, pause["context"], pause_context(pause_id, "context")),
        answers=answers,
        artifacts=artifacts,
        decision=decision_of(runtime.codec, pause),
        is_consumed=is_consumed,
    )


def receive(session: SessionHandle[Any], type: str) -> Op[PeerRequest[Any]]:
    """Return the request that a session serves, which was just leased by its item."""
    ask = yield from one(READ_ASK, id=session.id)
    if ask is None or type != REQUEST:
        raise InvalidArgument(f"session {session.id} serves no request")
    user = (yield from session._row())["user_id"]
    codec = session.runtime.codec
    return PeerRequest(
        session=session,
        ask_id=session.id,
        agent=ask["agent"],
        user=user,
        input=opened(codec, ask["input"], ask_context(session.id, "input")),
    )


def _has_turn_since(session: SessionHandle[Any], version: int) -> Op[bool]:
    where = (session.id, session.number, session.root_id)
    history: CheckpointOps[Any] = CheckpointOps(session.runtime, *where)
    if version == 0:
        found: Sequence[Any] = yield from CheckpointOps.history(history, kind="turn", limit=1)
    else:
        found = yield from CheckpointOps.history(history, kind="turn", after=version, limit=1)
    return bool(found)

"""Pauses: a session holds nothing while it waits, and is resumed once.

Whatever ends the wait (the last answer, a timeout, a decision) makes the pause `ready` and submits
the work item that resumes the session, in one transaction under the lock of the tree. A sleep
submits that item at once, to become due at its end.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from operator import itemgetter
from typing import Any, TypeAlias

from ..arguments import require_whole, shown
from ..checkpoints.write import record_status, write
from ..codec import Codec
from ..dataclass import dataclass
from ..errors import InvalidArgument, WorkFailed
from ..feed import emit
from ..formatting import plural
from ..kernel.operation import (
    AfterCommit,
    Op,
    Query,
    Row,
    Runtime,
    batch,
    defer,
    fresh_id,
    one,
    rows,
    together,
)
from ..sessions.access import (
    Place,
    lock_and_read,
    lock_and_read_with,
    require_writable,
)
from ..sessions.handle import SessionHandle
from ..sessions.rows import ACTIVATED, AWAIT_TURN, STATUS_OF_SESSION, released
from ..trees import OPEN
from ..work import transitions
from ..work.items import LEASE_SECONDS, READ_ITEM, Item, Submission
from ..work.submission import submit_all
from ..work.transitions import Transition
from .artifacts import LIST_ARTIFACTS, artifact_of
from .asks import (
    ASK_COLUMNS,
    READ_SERVED_ASK,
    REQUEST,
    RESUME,
    SELECT_ANSWERS,
    Draft,
    asks_of,
    known_look,
    queue_of,
    require_active,
)
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
from .settlement import NOT_AWAITED, NOT_NEEDED, cancel_rest, withdraw_item

PAUSE_COLUMNS = """number, id, session_number, session_id, root_id, generation, agent, reason,
    state, need, keeps_rest, open_asks, ok_asks, wakes_at, context, question, decision,
    created_at, ready_at, closed_at"""
# What is needed to count answers and to resume, without what the session has stored.
COUNTED_COLUMNS = """number, id, session_number, session_id, root_id, generation, agent, reason,
    state, need, keeps_rest, open_asks, ok_asks"""
SELECT_PAUSES = f"SELECT {PAUSE_COLUMNS} FROM hf_pauses"  # noqa: S608
READ_PAUSE = f"{SELECT_PAUSES} WHERE id = :id"
# A session seldom has artifacts; whether it has is read with the pause. SQLite uses the index of
# open pauses only if its condition is repeated as it stands there.
READ_RESUMED = f"""
SELECT {PAUSE_COLUMNS}, EXISTS (
    SELECT 1 FROM hf_artifacts f WHERE f.session_number = hf_pauses.session_number
) AS has_artifacts, EXISTS (
    SELECT 1 FROM hf_pauses p WHERE p.session_number = hf_pauses.session_number
        AND p.state IN ('waiting', 'ready', 'resumed') AND p.state <> 'resumed'
        AND p.number <> hf_pauses.number
) AS is_superseded
FROM hf_pauses WHERE id = :id
"""  # noqa: S608
OPEN_PAUSE = f"""
{SELECT_PAUSES} WHERE session_number = :session_number
    AND state IN ('waiting', 'ready', 'resumed')
"""
LAST_PAUSE = f"""
{SELECT_PAUSES} WHERE session_number = :session_number ORDER BY generation DESC LIMIT 1
"""
# All calls of an active session that are open are among them.
UNCOLLECTED = f"""
SELECT {ASK_COLUMNS}, state = 'open' AND deadline_at <= :now AS is_due FROM hf_asks
WHERE session_number = :session_number AND pause_number IS NULL AND closed_at IS NULL
ORDER BY number
"""  # noqa: S608
COLLECTED = f"""
{SELECT_ANSWERS} WHERE session_number = :session_number AND pause_number = :number ORDER BY number
"""
COLLECTED_BY = f"""
{SELECT_ANSWERS} WHERE session_number = :session_number
    AND pause_number = (SELECT p.number FROM hf_pauses p WHERE p.id = :pause_id) ORDER BY number
"""  # noqa: S608
ADD_PAUSE = f"""
INSERT INTO hf_pauses (
    id, session_number, session_id, root_id, generation, agent, reason, state, need, keeps_rest,
    open_asks, ok_asks, wakes_at, context, question, created_at
)
SELECT CAST(:id AS TEXT), CAST(:session_number AS INTEGER), CAST(:session_id AS TEXT),
    CAST(:root_id AS TEXT), 1 + coalesce(max(p.generation), 0), CAST(:agent AS TEXT),
    CAST(:reason AS TEXT), CAST(:state AS TEXT), CAST(:need AS INTEGER),
    CAST(:keeps_rest AS INTEGER), CAST(:open_asks AS INTEGER), CAST(:ok_asks AS INTEGER),
    CAST(:wakes_at AS INTEGER), CAST(:context AS BLOB), CAST(:question AS BLOB), :now
FROM hf_pauses p WHERE p.session_number = :session_number
RETURNING {COUNTED_COLUMNS}
"""  # noqa: S608
# An ask past its deadline has been answered by then, at the latest when the session pauses.
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
# Only if the statement before it has stored the answer: in a group of items that end together,
# another may have cancelled the call meanwhile.
COUNT_ANSWER = f"""
UPDATE hf_pauses SET open_asks = open_asks - 1, ok_asks = ok_asks + :ok
WHERE number = :number AND state = 'waiting' AND EXISTS (
    SELECT 1 FROM hf_asks a WHERE a.id = :id AND coalesce(a.state, '') = :status
) RETURNING {COUNTED_COLUMNS}, {STATUS_OF_SESSION.format(number="session_number")} AS session_status
"""  # noqa: S608
MAKE_READY = f"""
UPDATE hf_pauses SET state = 'ready', ready_at = :now, decision = CAST(:decision AS BLOB)
WHERE number = :number AND state = 'waiting' RETURNING {COUNTED_COLUMNS}
"""  # noqa: S608
MARK_RESUMED = """
UPDATE hf_pauses SET state = 'resumed', ready_at = coalesce(ready_at, :now)
WHERE number = :number AND state IN ('waiting', 'ready', 'resumed')
"""
# A pause that was no longer waiting is closed; one that still was, or was rewound, is cancelled.
CLOSE = """
UPDATE hf_pauses SET closed_at = :now,
    state = CASE WHEN state = 'waiting' OR :is_rewound = 1 THEN 'cancelled' ELSE 'closed' END
WHERE number = :number AND state IN ('waiting', 'ready', 'resumed')
"""
CLOSE_ASKS = """
UPDATE hf_asks SET closed_at = :now
WHERE session_number = :session_number AND pause_number = :number AND state <> 'open'
"""
# PostgreSQL can do both in one statement.
CLOSE_WITH_ASKS = f"WITH asked AS ({CLOSE_ASKS}) {CLOSE}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Wish:
    """What a session pauses for, validated and encoded."""

    reason: str
    context: bytes
    need: int | None = None
    keeps_rest: bool = False
    question: bytes | None = None
    wakes_at: int | None = None


def require_need(need: object) -> int | None:
    """Return how many `ok` answers are needed; None for an answer to every ask."""
    if need in ("all", "any"):
        return None if need == "all" else 1
    if type(need) is not int:
        raise InvalidArgument(f'need must be "all", "any" or a number, not {shown(need)}')
    return require_whole("need", need, 1)


def is_met(need: int | None, open_asks: int, ok_asks: int) -> bool:
    """Whether a pause is over: enough answers are `ok`, or there can no longer be enough."""
    if need is None:
        return open_asks == 0
    return ok_asks >= need or ok_asks + open_asks < need


Expire: TypeAlias = Callable[[Runtime, Sequence[Row]], Op[int]]


def begin_pause(
    session: SessionHandle[Any],
    wish: Wish,
    expire: Expire | None = None,
    drafts: Sequence[Draft] = (),
) -> Op[Parked | Answered]:
    """Park a session that may be written, or return the answers if they already meet its need.

    The calls of `drafts` are made first. With `expire`, calls past their deadline are timed out
    first.
    """
    runtime, place = session.runtime, session._place
    of_session = {"session_number": session.number}
    looks = [Query(OPEN_PAUSE, of_session)]
    if expire is not None:
        looks += [Query(UNCOLLECTED, of_session), *known_look(drafts)]
    found, paused, *asked = yield from lock_and_read_with(runtime, place, *looks)
    row = require_writable(runtime, place, found)
    require_active(row, session.id)
    agent = _require_agent(session.id, row)
    asks: list[Row] = asked[0] if asked else []
    known: list[Row] = asked[1] if drafts else []
    is_due = any(ask["is_due"] for ask in asks) or any(each.timeout_ms == 0 for each in drafts)
    if expire is not None and (is_due or known):
        asks = yield from _asked_and_expired(session, row, drafts, known, expire)
        drafts = ()
    states = [ask["state"] for ask in asks] + ["open"] * len(drafts)
    counts = {"open_asks": states.count("open"), "ok_asks": states.count("ok")}
    if wish.need is not None and wish.need > len(states):
        raise InvalidArgument(
            f"need is {wish.need}, but the pause is for {plural(len(states), 'ask')}"
        )
    for before in paused:
        yield from close(runtime, before, item_id=_driving_item(session))
    is_over = wish.reason == "peers" and is_met(wish.need, **counts)
    pause_id = yield from fresh_id()
    adding = {
        **of_session,
        "id": pause_id,
        "session_id": session.id,
        "root_id": session.root_id,
        "agent": agent,
        "reason": wish.reason,
        "state": "resumed" if is_over else "waiting",
        "need": wish.need,
        "keeps_rest": int(wish.keeps_rest),
        **counts,
        "wakes_at": wish.wakes_at,
        **_sealed(runtime.codec, pause_id, wish),
    }
    if is_over:
        yield from together(asks_of(session, row, drafts, known))
        added = yield from _add_pause(adding, collects=True)
        yield from defer(AWAIT_TURN, number=session.number)
        yield from _leave_rest(runtime, added)
        answers, artifacts = yield from collected(runtime.codec, added)
        return Answered(pause_id=pause_id, answers=answers, artifacts=artifacts)
    # The calls name the pause, which is added before them.
    asking = asks_of(session, row, drafts, known, pause_id)
    parts = [_add_pause(adding, collects=bool(asks)), *asking]
    added = yield from _park(session, row, adding, wish, parts)
    return Parked(pause_id=pause_id, session_id=session.id, generation=added["generation"])


def _asked_and_expired(
    session: SessionHandle[Any],
    row: Row,
    drafts: Sequence[Draft],
    known: Sequence[Row],
    expire: Expire,
) -> Op[list[Row]]:
    """Make calls, time out those past their deadline, and return all that are not collected."""
    of_session = {"session_number": session.number}
    yield from together(asks_of(session, row, drafts, known))
    asks = yield from rows(UNCOLLECTED, **of_session)
    due = [ask for ask in asks if ask["is_due"]]
    if not due:
        return asks
    yield from expire(session.runtime, sorted(due, key=itemgetter("deadline_at", "number")))
    return (yield from rows(UNCOLLECTED, **of_session))


def _add_pause(adding: Row, *, collects: bool) -> Op[Row]:
    """Add a pause; it collects the calls made before that no other pause has collected."""
    [added] = yield from rows(ADD_PAUSE, **adding)
    if collects:
        given = {"number": added["number"], "session_number": added["session_number"]}
        yield from defer(COLLECT, **given)
    return added


def _require_agent(id: str, row: Row) -> str:
    """Return the agent whose instances can resume a session."""
    agent: str | None = row["agent"]
    if agent is None:
        raise InvalidArgument(
            f"session {id} has no agent, so nobody could resume it; start it with the name of one"
        )
    return agent


def _sealed(codec: Codec, id: str, wish: Wish) -> dict[str, bytes | None]:
    bodies = {"context": wish.context, "question": wish.question}
    return {
        part: None if body is None else codec.seal(body, context=pause_context(id, part))
        for part, body in bodies.items()
    }


def _park(
    session: SessionHandle[Any], row: Row, adding: Row, wish: Wish, parts: Sequence[Op[Row]]
) -> Op[Row]:
    """Set the session waiting, release its lease, and complete the work item that drove it.

    Of the `parts` that are written with it, the first adds the pause.
    """
    runtime = session.runtime
    # The lease was checked when the session was read.
    place = replace(session._place, guard=None)
    told = {"pause": adding["id"], "reason": adding["reason"]}
    change = released("waiting", raises_fence=_driving_item(session) is not None)
    if wish.question is not None:
        asked = {"pause": adding["id"], "question": runtime.codec.decode(wish.question)}
        yield from write(runtime, place, "approval_point", {}, asked, locked=row)
        [row] = yield from lock_and_read(runtime, place)
    whole: list[Op[Any]] = [
        *parts,
        record_status(runtime, place, row["status"], "waiting", row, change, **told),
        _complete_item(session, adding["id"]),
    ]
    added: Row = (yield from together(whole))[0]
    if wish.wakes_at is not None:
        yield from _submit_resumption(runtime, added, available_at=wish.wakes_at)
    return added


def _driving_item(session: SessionHandle[Any]) -> str | None:
    """Return the id of the work item under whose lease a session is written."""
    guard = session.guard
    return guard.id if guard is not None and guard.noun == "work item" else None


def _complete_item(session: SessionHandle[Any], pause_id: str) -> Op[None]:
    """Complete the item that drives a session, so that no retry repeats what led to the pause."""
    runtime, guard = session.runtime, session.guard
    if guard is None or _driving_item(session) is None:
        return
    held = session.item if isinstance(session.item, Item) else None
    if held is not None and (held.id, held.fence) == (guard.id, guard.fence):
        row: Row | None = held._row()
    else:
        row = yield from one(READ_ITEM, id=guard.id)
    if row is None:
        raise guard.lost()
    item: Item[Any] = Item(runtime, {**row, "fence": guard.fence}, LEASE_SECONDS)
    body = runtime.codec.encode({"paused": pause_id})
    change = Transition("completed", "session paused", body, is_followed=False, keeps_session=True)
    [done] = yield from transitions.finish([(item, change)], transitions.FINISH_HELD)
    if done is None:
        raise (yield from transitions.lost(item))
    if held is not None:
        yield AfterCommit(lambda: held._take(done))


def counting(ask: Row, status: str) -> list[Query]:
    """Return the statements that count the answer of a call in the pause that waits for it.

    They follow the one that stores the answer, and their rows are for `count`.
    """
    if ask["pause_number"] is None:
        return []
    given = {"number": ask["pause_number"], "ok": int(status == "ok")}
    return [Query(COUNT_ANSWER, {**given, "id": ask["id"], "status": status})]


def count(runtime: Runtime, counted: Sequence[list[Row]]) -> Op[None]:
    """End the wait of a pause whose need is met by the answer that was counted."""
    for pause in (row for found in counted for row in found):
        if is_met(pause["need"], pause["open_asks"], pause["ok_asks"]):
            yield from make_ready(runtime, pause, pause["session_status"])


def make_ready(
    runtime: Runtime, pause: Row, session_status: str | None, decision: bytes | None = None
) -> Op[Row | None]:
    """End the wait of a pause, once, and submit the item that resumes its session.

    The pause and the status of its session were read with the tree locked.
    """
    if session_status not in OPEN or pause["state"] != "waiting":
        # The session is being cancelled or deleted and will not resume, or it has already resumed.
        return None
    # Of two answers in one transaction only the first makes it ready; both find the same item.
    ready, _ = yield from together(
        (
            one(MAKE_READY, number=pause["number"], decision=decision),
            _submit_resumption(runtime, pause),
        )
    )
    if ready is None:
        return None
    if ready["open_asks"]:
        yield from _leave_rest(runtime, ready)
    data = {"pause": ready["id"], "reason": ready["reason"]}
    yield from emit(runtime.codec, ready["root_id"], ready["session_id"], "pause_ready", data)
    return ready


def _leave_rest(runtime: Runtime, pause: Row) -> Op[None]:
    """Cancel the asks that are still open, or keep them for the next pause."""
    if not pause["keeps_rest"]:
        yield from cancel_rest(runtime, pause, NOT_NEEDED)
        return
    given = {"number": pause["number"], "session_number": pause["session_number"]}
    yield from defer(KEEP_REST, **given)


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
    yield from submit_all(runtime, [item], default=place, is_checked=True)


def resumption_id(pause: Row) -> str:
    """Return the id of the item that resumes a session after a pause."""
    return f"resume {pause['id']}"


def close(
    runtime: Runtime, pause: Row, *, item_id: str | None = None, fences: bool = False
) -> Op[None]:
    """Close a pause that was read with its tree locked, and the asks it collected.

    Its calls that are still open are cancelled, and so is the item that would resume from it, even
    a running one if it `fences`. The item `item_id`, for which this is done, goes on.
    """
    given = {"number": pause["number"], "session_number": pause["session_number"]}
    if runtime.driver.dialect == "postgres" and pause["state"] != "waiting":
        yield from defer(CLOSE_WITH_ASKS, **given, is_rewound=int(fences))
    else:
        yield from defer(CLOSE, number=pause["number"], is_rewound=int(fences))
        if pause["state"] == "waiting":
            yield from cancel_rest(runtime, pause, NOT_AWAITED)
        yield from defer(CLOSE_ASKS, **given)
    if item_id != resumption_id(pause):
        yield from withdraw_item(runtime, resumption_id(pause), fences=fences)


def collected(codec: Codec, pause: Row) -> Op[tuple[tuple[Answer, ...], tuple[Artifact, ...]]]:
    """Return the answers of a pause in the order of dispatch, and all artifacts so far."""
    number = {"session_number": pause["session_number"]}
    given = {**number, "number": pause["number"]}
    found = yield from batch(Query(COLLECTED, given), Query(LIST_ARTIFACTS, number))
    return _came(codec, *found)


def _came(
    codec: Codec, asks: Sequence[Row], made: Sequence[Row]
) -> tuple[tuple[Answer, ...], tuple[Artifact, ...]]:
    """Return answers and artifacts from the rows of calls and of a session's own artifacts."""
    answers = tuple(each for row in asks if (each := answer_of(codec, row)) is not None)
    own = [artifact_of(codec, row) for row in made]
    return answers, (*own, *(each for answer in answers for each in answer.artifacts))


def resuming(session_number: int, pause_id: str) -> list[Query]:
    """Return the queries whose rows `resume` needs."""
    given = {"session_number": session_number, "pause_id": pause_id}
    return [Query(READ_RESUMED, {"id": pause_id}), Query(COLLECTED_BY, given)]


def resume(
    session: SessionHandle[Any], before: Row, pause_id: str, looked: Sequence[list[Row]]
) -> Op[Resumption[Any]]:
    """Return the resumption of a session that was just leased by the item of a pause.

    `before` is the session's row before that, and `looked` are the rows of `resuming`.
    """
    [paused, asks] = looked
    if not paused or paused[0]["session_number"] != session.number:
        raise InvalidArgument(f"there is no pause {shown(pause_id)} of session {session.id}")
    [pause] = paused
    if pause["is_superseded"]:
        raise WorkFailed(
            f"session {session.id} has paused again since pause {pause_id}, and waits; "
            "that pause resumes no more"
        )
    made: list[Row] = []
    if pause["has_artifacts"]:
        made = yield from rows(LIST_ARTIFACTS, session_number=session.number)
    is_consumed = pause["state"] in {"closed", "cancelled"}
    if not is_consumed and pause["state"] != "resumed":
        yield from defer(MARK_RESUMED, number=pause["number"])
        if before["status"] != "waiting":
            # Otherwise its row has changed with its status.
            yield from defer(AWAIT_TURN, number=session.number)
    return resumption_of(session, pause, asks, made, is_consumed=is_consumed)


def take_over(session: SessionHandle[Any]) -> Op[Resumption[Any] | None]:
    """Resume a session after its pause, instead of the pause's item; None while it waits."""
    runtime, place = session.runtime, session._place
    row = require_writable(runtime, place, (yield from lock_and_read(runtime, place)))
    found = yield from one(LAST_PAUSE, session_number=session.number)
    if found is None or found["state"] in {"waiting", "cancelled"}:
        return None
    if row["status"] == "waiting":
        told = {"pause": found["id"]}
        yield from record_status(runtime, place, "waiting", "active", row, ACTIVATED, **told)
    item_id = resumption_id(found)
    if found["state"] in {"ready", "resumed"} and getattr(session.item, "id", None) != item_id:
        # Also one that runs, and has not resumed the session yet: its failure would end it.
        yield from withdraw_item(runtime, item_id, fences=True)
    looked = yield from batch(*resuming(session.number, found["id"]))
    return (yield from resume(session, row, found["id"], looked))


def resumption_of(
    session: Any, pause: Row, asks: Sequence[Row], made: Sequence[Row], *, is_consumed: bool
) -> Resumption[Any]:
    """Return the resumption of a session after a pause."""
    codec, pause_id = session.runtime.codec, pause["id"]
    answers, artifacts = _came(codec, asks, made)
    return Resumption(
        session=session,
        pause_id=pause_id,
        generation=pause["generation"],
        reason=pause["reason"],
        context=opened(codec, pause["context"], pause_context(pause_id, "context")),
        answers=answers,
        artifacts=artifacts,
        decision=decision_of(codec, pause),
        is_consumed=is_consumed,
    )


def receiving(session_id: str | None, root_id: str | None) -> list[Query]:
    """Return the queries whose rows `receive` needs."""
    return [Query(READ_SERVED_ASK, {"id": session_id, "root_id": root_id})]


def receive(
    session: SessionHandle[Any], type: str, row: Row, looked: Sequence[list[Row]]
) -> PeerRequest[Any]:
    """Return the request that a session serves, which was just leased by its item.

    `row` is the session's, and `looked` are the rows of `receiving`.
    """
    [asks] = looked
    if not asks or type != REQUEST:
        raise InvalidArgument(f"session {session.id} does not serve a request")
    codec = session.runtime.codec
    return PeerRequest(
        session=session,
        ask_id=session.id,
        agent=asks[0]["agent"],
        user=row["user_id"],
        input=opened(codec, asks[0]["input"], ask_context(session.id, "input")),
    )

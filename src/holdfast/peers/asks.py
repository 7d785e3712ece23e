"""Asking a peer: the call, the session of the peer and its work item, in one commit.

Nothing is sent before that commit, so no answer can precede its row. The work item is the delivery:
any instance of the peer claims it from the queue of its agent. If a transport carries the request,
a row of the outbox stands in their place, and session and item are made where it is delivered.
"""

from __future__ import annotations

import functools
import hashlib
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Concatenate, Literal, ParamSpec, TypeAlias, TypeVar

from ..arguments import require_seconds, require_text, shown
from ..codec import digest
from ..errors import AskNotFound, InvalidArgument, RequestMismatch, SessionWaiting
from ..feed import emit
from ..kernel.flow import refuse_steps
from ..kernel.operation import Handle, Lock, Op, Row, Runtime, fresh_id, one, operation, rows
from ..sessions.access import Place
from ..sessions.creation import insert_session
from ..sessions.handle import SessionHandle
from ..sessions.rows import READ_PLACE_BY_ID
from ..state.requests import Ordinals
from ..work.items import Submission
from ..work.submission import submit_all
from .outbox import agent_address, post, route_of, store_address
from .records import ask_context, opened

P = ParamSpec("P")
R_co = TypeVar("R_co", covariant=True)
Timeout: TypeAlias = float | Literal["never"]

# The id of its work item is a little longer.
ID_CHARACTERS_MAX = 200
ASK_SECONDS = 300.0
ASK_SECONDS_MAX = 366 * 24 * 3600
# The work item that delivers a request, and the one that resumes a session.
REQUEST, RESUME = "request", "resume"

ASK_COLUMNS = """number, id, session_number, session_id, root_id, agent, user_id, route,
    remote_store, origin_id, heard, state, pause_number, timeout_ms, deadline_at, input,
    correlation, progress, answer, late, created_at, answered_at, late_at, closed_at"""
SELECT_ASKS = f"SELECT {ASK_COLUMNS} FROM hf_asks"  # noqa: S608
READ_ASK = f"{SELECT_ASKS} WHERE id = :id"
ADD_ASK = f"""
INSERT INTO hf_asks (
    id, session_number, session_id, root_id, agent, user_id, route, remote_store, origin_id, state,
    timeout_ms, deadline_at, input, correlation, created_at
) VALUES (
    :id, :session_number, :session_id, :root_id, :agent, :user_id, :route, :remote_store,
    :origin_id, 'open', CAST(:timeout_ms AS INTEGER),
    :now + CAST(:timeout_ms AS INTEGER), CAST(:input AS BLOB), CAST(:correlation AS BLOB), :now
) RETURNING {ASK_COLUMNS}
"""  # noqa: S608
# An ask that is repeated belongs to the next pause again.
COLLECT_AGAIN = f"""
UPDATE hf_asks SET pause_number = NULL, closed_at = NULL WHERE id = :id RETURNING {ASK_COLUMNS}
"""  # noqa: S608
SET_PROGRESS = f"""
UPDATE hf_asks SET progress = CAST(:progress AS BLOB), deadline_at = :now + timeout_ms
WHERE id = :id AND state = 'open' RETURNING {ASK_COLUMNS}
"""  # noqa: S608


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a call comes from that another store has made, and who sends its answer."""

    store_id: str
    ask_id: str
    route: str


class asking(operation[P, R_co]):  # noqa: N801 - it is used as a decorator
    """An operation that asks; inside a work item its `id` is derived from the item and the request.

    So an attempt that is repeated makes no call twice. Inside `store.run` it is not derived,
    because the function may run more than once.
    """

    def __init__(self, function: Callable[Concatenate[Any, P], Op[R_co]]) -> None:
        super().__init__(function)
        begin = self._start

        @functools.wraps(function)
        def start(handle: Handle[Any], *args: Any, **kwargs: Any) -> Any:
            item = getattr(handle, "item", None)
            is_composed = handle.runtime.run_flow is refuse_steps
            if item is not None and not is_composed and kwargs.get("id") is None:
                kwargs["id"] = derived_id(handle.runtime, item, args, kwargs)
            return begin(handle, *args, **kwargs)

        self._start = start


def derived_id(runtime: Runtime, item: Any, args: Any, kwargs: Mapping[str, Any]) -> str:
    """Return an id that equal calls of every attempt at an item share, the n-th with the n-th."""
    key = Ordinals.of(runtime).key(item, "ask", args, kwargs)
    return str(uuid.UUID(bytes=hashlib.sha256(key.encode()).digest()[:16], version=5))


def chosen_id(label: str, id: str | None) -> Op[str]:
    """Return the id that was given for a call, or a new one."""
    fresh = yield from fresh_id()
    return fresh if id is None else require_text(label, id, ID_CHARACTERS_MAX)


def queue_of(agent: str) -> str:
    """Return the queue from which the instances of an agent claim."""
    return f"agent:{agent}"


def delivery_id(ask_id: str) -> str:
    """Return the id of the item that delivers a request."""
    return f"request {ask_id}"


def require_timeout(timeout_seconds: object) -> int | None:
    """Return a timeout in milliseconds; None for "never", which must be explicit."""
    if timeout_seconds == "never":
        return None
    return require_seconds("timeout_seconds", timeout_seconds, ASK_SECONDS_MAX)


def require_active(session: Row, id: str) -> None:
    """Raise SessionWaiting if a session waits: it can ask and pause only after it resumes."""
    if session["status"] == "waiting":
        raise SessionWaiting(
            f"session {id} waits; it can ask or pause again once it has been resumed",
            session_id=id,
        )


def add_ask(
    runtime: Runtime,
    asker: SessionHandle[Any] | None,
    *,
    id: str,
    agent: str,
    input: Any,
    correlation: Any = None,
    timeout_ms: int | None = None,
    user: str | None = None,
    root_id: str,
    sender: str | None = None,
    origin: Origin | None = None,
) -> Op[Row]:
    """Write a call, and the peer's session and work item or a message; the tree is locked.

    An id that is known returns the call as it is, or raises RequestMismatch.
    """
    codec = runtime.codec
    bodies = {
        "input": codec.encode(input, name="input"),
        "correlation": codec.encode(correlation, name="correlation"),
    }
    known = yield from one(READ_ASK, id=id)
    if known is not None:
        return (yield from _again(runtime, known, asker, agent, input, user))
    route = None if origin is None else origin.route
    if origin is None and runtime.transport is not None:
        route = route_of(runtime.transport, sender)
    [row] = yield from rows(
        ADD_ASK,
        id=id,
        session_number=None if asker is None else asker.number,
        session_id=None if asker is None else asker.id,
        root_id=root_id,
        agent=agent,
        user_id=user,
        route=route,
        remote_store=None if origin is None else origin.store_id,
        origin_id=None if origin is None else origin.ask_id,
        timeout_ms=timeout_ms,
        **{part: codec.seal(body, context=ask_context(id, part)) for part, body in bodies.items()},
    )
    if origin is None and route is not None:
        if (yield from one(READ_PLACE_BY_ID, id=id)) is not None:
            raise _taken(id)
        yield from post(runtime, "request", id, route, agent_address(agent))
    else:
        yield from insert_delivery(runtime, row)
    data = {"ask": id, "agent": agent, "deadline_at": row["deadline_at"]}
    yield from emit(codec, root_id, row["session_id"] or id, "peer_asked", data)
    return row


def insert_delivery(runtime: Runtime, ask: Row) -> Op[None]:
    """Create the session that serves a call, and the work item that delivers the request to it."""
    codec, id = runtime.codec, ask["id"]
    given = {"id": id, "name": None, "agent": ask["agent"], "user_id": ask["user_id"]}
    metadata = None
    if ask["origin_id"] is not None:
        asked = {"asked_by": {"store": ask["remote_store"], "ask": ask["origin_id"]}}
        metadata = codec.pack(asked, context=("hf_sessions", id))
    given |= {"metadata": metadata}
    child = yield from insert_session(codec, given, ask["session_id"], ask["root_id"])
    if child is None:
        raise _taken(id)
    place = Place(id, child["number"], ask["root_id"], None)
    delivery = Submission(REQUEST, {"ask": id}, queue=queue_of(ask["agent"]), id=delivery_id(id))
    yield from submit_all(runtime, [delivery], default=place)


def _taken(id: str) -> InvalidArgument:
    return InvalidArgument(f"there is a session {shown(id)} already; ask with another id")


def _again(
    runtime: Runtime,
    known: Row,
    asker: SessionHandle[Any] | None,
    agent: str,
    input: Any,
    user: str | None,
) -> Op[Row]:
    """Return a call that is made again; its answer belongs to the next pause."""
    stored = opened(runtime.codec, known["input"], ask_context(known["id"], "input"))
    is_same = known["agent"] == agent and digest(stored) == digest(input)
    # The user of a session's asks is the session's own, and who reconnects need not name it.
    is_same &= asker is not None or user in {None, known["user_id"]}
    if not is_same or known["session_number"] != (None if asker is None else asker.number):
        raise RequestMismatch(
            f"ask {known['id']} was made by another session or for another user, to another agent "
            "or with another input; use a new id for a new ask",
            id=known["id"],
        )
    if asker is None:
        return known
    [row] = yield from rows(COLLECT_AGAIN, id=known["id"])
    return row


def set_progress(runtime: Runtime, id: str, note: Any) -> Op[bool]:
    """Record a peer's progress and restart its timeout; False if the call is over."""
    codec = runtime.codec
    require_text("ask_id", id)
    redacted = runtime.redactor.redact(note)
    body = codec.pack(redacted, context=ask_context(id, "progress"), name="progress")
    found = yield from read_ask(id, locks=True)
    changed = yield from one(SET_PROGRESS, id=id, progress=body)
    if changed is None:
        return False
    if found["origin_id"] is not None:
        address = store_address(found["remote_store"])
        told = {"note": redacted}
        yield from post(runtime, "progress", found["origin_id"], found["route"], address, told)
    data = {"ask": id, "agent": found["agent"], "note": redacted}
    yield from emit(codec, found["root_id"], found["session_id"] or id, "peer_progressed", data)
    return True


def read_ask(id: str, *, locks: bool = False) -> Op[Row]:
    """Return the row of a call, with its tree locked if asked for, or raise AskNotFound."""
    row = yield from one(READ_ASK, id=require_text("ask_id", id))
    if row is not None and locks:
        yield Lock(row["root_id"])
        row = yield from one(READ_ASK, id=id)
    if row is None:
        raise AskNotFound(f"there is no ask {id!r}", id=id)
    return row

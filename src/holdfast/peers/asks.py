"""Asking a peer: the call, the session of the peer and its work item, in one commit.

Nothing is sent before that commit, so no answer can precede its row. The work item is the delivery:
any instance of the peer claims it from the queue of its agent. If a transport carries the request,
a row of the outbox takes their place, and session and item are created where it is delivered.
"""

from __future__ import annotations

import functools
import hashlib
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Concatenate, Literal, ParamSpec, TypeAlias, TypeVar

from ..arguments import require_new_id, require_seconds, require_text, shown
from ..clock import random_id
from ..codec import Codec, digest
from ..dataclass import dataclass
from ..errors import AskNotFound, InvalidArgument, LimitExceeded, RequestMismatch, SessionWaiting
from ..feed import create_tree, emit, event
from ..kernel.flow import refuse_steps
from ..kernel.operation import (
    Emit,
    FreshId,
    Handle,
    Lock,
    Op,
    Query,
    Row,
    Runtime,
    batch,
    decide,
    fresh_id,
    one,
    operation,
    rows,
    together,
)
from ..kernel.sql import among, given
from ..sessions.access import Place
from ..sessions.creation import new_session, require_parent
from ..sessions.handle import SessionHandle
from ..sessions.rows import READ_PLACE_BY_ID
from ..state.requests import Ordinals
from ..wire import travels
from ..work.items import Submission
from ..work.submission import new_item, ring, submit_all
from .outbox import agent_address, post, route_of, store_address
from .records import ask_context, opened

P = ParamSpec("P")
R_co = TypeVar("R_co", covariant=True)
Timeout: TypeAlias = float | Literal["never"]

# The id of its work item is a little longer.
ID_CHARACTERS_MAX = 200
AGENT_CHARACTERS_MAX = 200
ASKS_MAX = 10_000
ASK_SECONDS = 300.0
ASK_SECONDS_MAX = 366 * 24 * 3600
# The work item that delivers a request, and the one that resumes a session.
REQUEST, RESUME = "request", "resume"

ASK_COLUMNS = """number, id, session_number, session_id, root_id, agent, user_id, route,
    remote_store, origin_id, cancel_key, heard, state, pause_number, timeout_ms, deadline_at, input,
    correlation, progress, answer, late, created_at, answered_at, late_at, closed_at"""
SELECT_ASKS = f"SELECT {ASK_COLUMNS} FROM hf_asks"  # noqa: S608
# What an answer is made of, and whether it was collected.
SELECT_ANSWERS = """
SELECT number, id, agent, state, pause_number, correlation, answer, answered_at, closed_at
FROM hf_asks"""
READ_ASK = f"{SELECT_ASKS} WHERE id = :id"
# A session serves the call of its own id and tree: a call from elsewhere may have any id.
SERVED = "id = :id AND root_id = :root_id"
READ_SERVED_ASK = f"{SELECT_ASKS} WHERE {SERVED}"
READ_ASKS = f"{SELECT_ASKS} WHERE id {among('ids')}"
ADD_ASK = f"""
INSERT INTO hf_asks (
    id, session_number, session_id, root_id, agent, user_id, route, remote_store, origin_id,
    cancel_key, asked_version, state, pause_number, timeout_ms, deadline_at, input, correlation,
    created_at
) VALUES (
    :id, :session_number, :session_id, :root_id, :agent, :user_id, :route, :remote_store,
    :origin_id, :cancel_key, :asked_version, 'open',
    (SELECT p.number FROM hf_pauses p WHERE p.id = :pause_id), CAST(:timeout_ms AS INTEGER),
    :now + CAST(:timeout_ms AS INTEGER), CAST(:input AS BLOB), CAST(:correlation AS BLOB), :now
) RETURNING {ASK_COLUMNS}
"""  # noqa: S608
# A repeated ask belongs to the next pause again.
COLLECT_AGAIN = f"""
UPDATE hf_asks SET pause_number = NULL, closed_at = NULL, asked_version = :version,
    is_abandoned = 0
WHERE id = :id RETURNING {ASK_COLUMNS}
"""  # noqa: S608
SET_PROGRESS = f"""
UPDATE hf_asks SET progress = CAST(:progress AS BLOB), deadline_at = :now + timeout_ms
WHERE id = :id AND coalesce(state, '') = 'open' RETURNING {ASK_COLUMNS}
"""  # noqa: S608


@dataclass(frozen=True, slots=True)
class Origin:
    """The origin of a call that was made by another store, and the route of its answer."""

    store_id: str
    ask_id: str
    route: str


@travels
@dataclass(frozen=True, slots=True)
class Ask:
    """One of several calls to make at once; its fields are the arguments of `session.ask`."""

    agent: str
    input: Any = None
    timeout_seconds: Timeout = ASK_SECONDS
    correlation: Any = None
    id: str | None = None


@dataclass(frozen=True, slots=True)
class Draft:
    """A call that was checked and encoded, before anything is locked."""

    ask: Ask
    id: str
    timeout_ms: int | None
    input: bytes
    correlation: bytes


def known_look(drafts: Sequence[Draft]) -> list[Query]:
    """Return the query for those of some calls that were made before; none for no calls."""
    return asks_look([draft.id for draft in drafts])


def asks_look(ids: Sequence[str]) -> list[Query]:
    """Return the query for the calls with these ids; none for none."""
    if len(ids) == 1:
        return [Query(READ_ASK, {"id": ids[0]})]
    return [Query(READ_ASKS, {"ids": given(ids)})] if ids else []


def drafted(runtime: Runtime, ask: Ask, label: str = "id") -> Op[Draft]:
    """Return a call as it will be written; raises an error if it cannot be made."""
    encode = runtime.codec.encode
    require_text("agent", ask.agent, AGENT_CHARACTERS_MAX)
    return Draft(
        ask,
        (yield from chosen_id(label, ask.id)),
        require_timeout(ask.timeout_seconds),
        encode(ask.input, name="input"),
        encode(ask.correlation, name="correlation"),
    )


def drafted_all(runtime: Runtime, asks: object) -> Op[list[Draft]]:
    """Return several calls as they will be written."""
    drafts = []
    for ask in require_asks(asks):
        drafts.append((yield from drafted(runtime, ask)))
    return drafts


def lock_new_tree(draft: Draft) -> Op[list[Row]]:
    """Create and lock the tree of a call without a session; return the call if it is known.

    A call with a new id is not looked up; its tree is locked in the round trip that writes it.
    """
    yield from create_tree(draft.id)
    if draft.ask.id is None:
        return []
    _, known = yield from batch(Lock(draft.id), *known_look([draft]))
    return known


class asking(operation[P, R_co]):  # noqa: N801 - it is used as a decorator
    """An operation that asks; inside a work item its `id` is derived from the item and the request.

    So a repeated attempt makes no call twice. Inside `store.run` it is not derived, because the
    function may run more than once.
    """

    def __init__(self, function: Callable[Concatenate[Any, P], Op[R_co]]) -> None:
        super().__init__(function)
        begin = self._start

        @functools.wraps(function)
        def start(handle: Handle[Any], *args: Any, **kwargs: Any) -> Any:
            if derives_ids(handle):
                self._derive(handle, args, kwargs)
            return begin(handle, *args, **kwargs)

        self._start = start

    def _derive(self, handle: Any, args: Any, kwargs: dict[str, Any]) -> None:
        if kwargs.get("id") is None:
            kwargs["id"] = derived_id(handle.runtime, handle.item, args, kwargs)


class pausing(asking[P, R_co]):  # noqa: N801 - it is used as a decorator
    """An operation that makes the calls of its `asks`, with the ids of individual asks."""

    def _derive(self, handle: Any, args: Any, kwargs: dict[str, Any]) -> None:
        if kwargs.get("asks"):
            kwargs["asks"] = with_ids(handle, kwargs["asks"])


def derives_ids(handle: Any) -> bool:
    """Whether a session makes its calls for a work item, and not inside `store.run`."""
    is_composed = handle.runtime.run_flow is refuse_steps
    return getattr(handle, "item", None) is not None and not is_composed


def with_ids(session: Any, asks: Sequence[Ask]) -> list[Ask]:
    """Return asks, with derived ids for those that have none."""
    named = []
    for ask in require_asks(asks):
        if ask.id is None:
            args, given = _arguments(ask)
            id = derived_id(session.runtime, session.item, args, given)
            named.append(replace(ask, id=id))
        else:
            named.append(ask)
    return named


def _arguments(ask: Ask) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments of the equivalent call of `session.ask`."""
    args = (ask.agent,) if ask.input is None else (ask.agent, ask.input)
    given = {"timeout_seconds": ask.timeout_seconds, "correlation": ask.correlation}
    usual = {"timeout_seconds": ASK_SECONDS, "correlation": None}
    return args, {name: value for name, value in given.items() if value != usual[name]}


def require_asks(asks: object) -> list[Ask]:
    """Return calls as a list, after checking their types and ids."""
    if not isinstance(asks, list | tuple):
        raise InvalidArgument(f"asks must be a list of Ask, not {type(asks).__name__}")
    if len(asks) > ASKS_MAX:
        raise LimitExceeded(
            f"one commit takes at most {ASKS_MAX:,} asks, not {len(asks):,}",
            limit=ASKS_MAX,
            actual=len(asks),
        )
    for ask in asks:
        if not isinstance(ask, Ask):
            raise InvalidArgument(f"asks must be a list of Ask, not of {type(ask).__name__}")
    ids = [ask.id for ask in asks if ask.id is not None]
    if len(set(ids)) < len(ids):
        raise InvalidArgument("two asks have the same id")
    return list(asks)


def derived_id(runtime: Runtime, item: Any, args: Any, kwargs: Mapping[str, Any]) -> str:
    """Return an id that is the same for the n-th equal call in every attempt at an item."""
    key = Ordinals.of(runtime).key(item, "ask", args, kwargs)
    return str(uuid.UUID(bytes=hashlib.sha256(key.encode()).digest()[:16], version=5))


def chosen_id(label: str, id: str | None) -> Op[str]:
    """Return the id that was given for a call, or a new one."""
    fresh = yield from fresh_id()
    return fresh if id is None else require_new_id(label, id, ID_CHARACTERS_MAX)


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
    draft: Draft,
    known: Sequence[Row],
    *,
    user: str | None = None,
    root_id: str,
    sender: str | None = None,
    version: int = 0,
    pause_id: str | None = None,
    origin: Origin | None = None,
) -> Op[Row]:
    """Write a call, with the peer's session and work item or with a message.

    The tree is locked, and the asker was read and is open. `known` is what `known_look` found: an
    equal call with the same id is returned as it is; for a different one RequestMismatch is raised.
    A pause that was added before collects the call.
    """
    codec, ask, id = runtime.codec, draft.ask, draft.id
    for before in known:
        if before["id"] == id:
            return (yield from _again(runtime, before, asker, ask, user, version))
    route = None if origin is None else origin.route
    if origin is None and runtime.transport is not None:
        route = route_of(runtime.transport, sender)
    given = _row_of_ask(codec, draft, user, root_id)
    given |= {"route": route, "asked_version": version, "pause_id": pause_id}
    if asker is not None:
        given |= {"session_number": asker.number, "session_id": asker.id}
    if origin is not None:
        given |= {"remote_store": origin.store_id, "origin_id": origin.ask_id}
    adding = Query(ADD_ASK, given)
    locks = [Lock(root_id)] if asker is None else []
    if origin is None and route is not None:
        given["cancel_key"] = f"{random_id((yield FreshId())):x}{random_id((yield FreshId())):x}"
        look = Query(READ_PLACE_BY_ID, {"id": id})
        *_, [row], taken = yield from batch(*locks, adding, look)
        if taken:
            raise _taken(id)
        yield from post(runtime, "request", id, route, agent_address(ask.agent))
    else:
        [row] = yield from _deliver(runtime, given, *locks, adding)
    yield _asked(codec, row)
    return row


def request_at_once(runtime: Runtime, draft: Draft, user: str | None) -> Op[Row]:
    """Write a call with a new id and no deadline, without an asker, in one round trip."""
    codec, id = runtime.codec, draft.id
    given = _row_of_ask(codec, draft, user, id)
    creation, created = yield from _new_session(codec, given)
    adding, submitted = new_item(codec, delivery_id(id), *_delivery(given))
    emits = [created, submitted, _asked(codec, {**given, "deadline_at": None})]
    *_, [row] = yield from decide(
        Lock(id, is_new=True),
        creation,
        adding,
        Query(ADD_ASK, given),
        emits=emits,
        again=Query(READ_ASK, {"id": id}),
    )
    yield from ring(runtime.signals, {queue_of(draft.ask.agent)})
    return row


def _row_of_ask(codec: Codec, draft: Draft, user: str | None, root_id: str) -> Row:
    """Return the values of a call that nobody asked yet and that no transport carries."""
    id = draft.id
    absent = ("session_number", "session_id", "route", "remote_store", "origin_id", "cancel_key")
    return {
        **dict.fromkeys((*absent, "pause_id")),
        "id": id,
        "root_id": root_id,
        "agent": draft.ask.agent,
        "user_id": user,
        "asked_version": 0,
        "timeout_ms": draft.timeout_ms,
        "input": codec.seal(draft.input, context=ask_context(id, "input")),
        "correlation": codec.seal(draft.correlation, context=ask_context(id, "correlation")),
    }


def _asked(codec: Codec, row: Row) -> Emit:
    """Return the event of a call."""
    data = {"ask": row["id"], "agent": row["agent"], "deadline_at": row["deadline_at"]}
    return event(codec, row["root_id"], row["session_id"] or row["id"], "peer_asked", data)


def asks_of(
    asker: SessionHandle[Any],
    row: Row,
    drafts: Sequence[Draft],
    known: Sequence[Row],
    pause_id: str | None = None,
) -> list[Op[Row]]:
    """Return the operations that write the calls of a session, to be run together.

    `row` is the session's and `known` what `known_look` found, read with the tree locked.
    """
    given: dict[str, Any] = {"user": row["user_id"], "sender": row["agent"]}
    given |= {"root_id": asker.root_id, "version": row["version"], "pause_id": pause_id}
    return [add_ask(asker.runtime, asker, draft, known, **given) for draft in drafts]


def insert_delivery(runtime: Runtime, ask: Row) -> Op[None]:
    """Create the session that serves a call, and the work item that delivers the request to it.

    Raises SessionNotFound or SessionEnded if the asker can no longer have children.
    """
    yield from require_parent(ask["session_id"])
    yield from _deliver(runtime, ask)


def _deliver(runtime: Runtime, ask: Row, *before: Query | Lock) -> Op[list[Row]]:
    """Create the session of a peer, and submit the work item that delivers the request to it.

    Returns the rows of the last statement that runs `before`, in the same round trip.
    """
    delivery, place = _delivery(ask)
    parts: list[Op[list[Row]]] = [
        _create_session(runtime, ask, *before),
        submit_all(runtime, [delivery], default=place, is_checked=True),
    ]
    return (yield from together(parts))[0]


def _delivery(ask: Row) -> tuple[Submission, Place]:
    """Return the work item that delivers a request, and where it belongs."""
    id, queue = ask["id"], queue_of(ask["agent"])
    item = Submission(REQUEST, {"ask": id}, queue=queue, id=delivery_id(id))
    return item, Place(id, 0, ask["root_id"], None)


def _create_session(runtime: Runtime, ask: Row, *before: Query | Lock) -> Op[list[Row]]:
    """Create the session of a peer; return the rows of the last statement `before`."""
    creation, created = yield from _new_session(runtime.codec, ask)
    *found, child = yield from batch(*before, creation)
    if not child:
        raise _taken(ask["id"])
    yield created
    return found[-1] if found else []


def _new_session(codec: Codec, ask: Row) -> Op[tuple[Query, Emit]]:
    """Return the statement that creates the session of a peer, and its event."""
    id = ask["id"]
    given = {"id": id, "name": None, "agent": ask["agent"], "user_id": ask["user_id"]}
    metadata = None
    if ask["origin_id"] is not None:
        asked = {"asked_by": {"store": ask["remote_store"], "ask": ask["origin_id"]}}
        metadata = codec.pack(asked, context=("hf_sessions", id))
    given |= {"metadata": metadata}
    return (yield from new_session(codec, given, ask["session_id"], ask["root_id"]))


def _taken(id: str) -> InvalidArgument:
    return InvalidArgument(f"there is already a session {shown(id)}; ask with another id")


def _again(
    runtime: Runtime,
    known: Row,
    asker: SessionHandle[Any] | None,
    ask: Ask,
    user: str | None,
    version: int,
) -> Op[Row]:
    """Return a call that is repeated; its answer belongs to the next pause."""
    stored = opened(runtime.codec, known["input"], ask_context(known["id"], "input"))
    is_same = known["agent"] == ask.agent and digest(stored) == digest(ask.input)
    # The user of a session's asks is the session's own; a caller that reconnects need not name it.
    is_same &= asker is not None or user in {None, known["user_id"]}
    if not is_same or known["session_number"] != (None if asker is None else asker.number):
        raise RequestMismatch(
            f"ask {known['id']} was made by another session or for another user, to another agent "
            "or with another input; use a new id for a new ask",
            id=known["id"],
        )
    if asker is None:
        return known
    [row] = yield from rows(COLLECT_AGAIN, id=known["id"], version=version)
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
    yield from report_progress(runtime, found, redacted, found["agent"])
    return True


def report_progress(runtime: Runtime, ask: Row, note: Any, agent: str) -> Op[None]:
    """Report the note of a call's peer, or of a peer of that: to the feed, and to who waits.

    That may be the store from which the root of the tree was asked; to it, the note of a peer that
    it did not ask itself names the peer.
    """
    data = {"ask": ask["id"], "agent": agent, "note": note}
    asker_id, root_id = ask["session_id"] or ask["id"], ask["root_id"]
    yield from emit(runtime.codec, root_id, asker_id, "peer_progressed", data)
    served = yield from one(READ_SERVED_ASK, id=root_id, root_id=root_id)
    if served is None or served["origin_id"] is None or served["state"] != "open":
        return
    told = {"note": note} if served["id"] == ask["id"] else {"note": note, "agent": agent}
    address = store_address(served["remote_store"])
    yield from post(runtime, "progress", served["origin_id"], served["route"], address, told)


def read_ask(id: str, *, locks: bool = False) -> Op[Row]:
    """Return the row of a call, with its tree locked if asked for, or raise AskNotFound."""
    row = yield from one(READ_ASK, id=require_text("ask_id", id))
    if row is not None and locks:
        yield Lock(row["root_id"])
        row = yield from one(READ_ASK, id=id)
    if row is None:
        raise unknown_call(id)
    return row


def unknown_call(id: str) -> AskNotFound:
    """Return the error for a call or a request that is not there, or must not be seen."""
    return AskNotFound(f"there is no request or peer call {id!r}", id=id)

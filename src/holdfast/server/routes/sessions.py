"""Sessions: start, find, change and end them."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec

from ...answers.problems import Refusal
from ...answers.records import struct
from ...answers.shapes import SESSION
from ...errors import Forbidden, SessionNotFound
from ...kernel.operation import Op
from ...records import SessionInfo, Status
from .. import pages
from ..access import root_of
from ..endpoints import Endpoints
from ..messages import Answer, Call
from ..replay import HEADER, transact
from .keys import Version

routes = Endpoints()

Json = Any
Name = Annotated[str, msgspec.Meta(min_length=1, max_length=256)]
CLOSED = ("session_closed", "session_busy")
NO_PLACE = "the token is limited to one tree: name a parent in it"


class SessionsQuery(pages.PageQuery):
    """Which sessions to list."""

    status: Status | None = None
    agent: Name | None = None
    root: Name | None = None


class SessionBody(msgspec.Struct, forbid_unknown_fields=True):
    """A session to start or resume."""

    id: Name | None = None
    name: Name | None = None
    parent: Name | None = None
    agent: Name | None = None
    user: Name | None = None
    metadata: dict[str, Json] | None = None
    reopen: bool = False


class SessionChange(msgspec.Struct, forbid_unknown_fields=True):
    """Changes to a session; omitted fields are left as they are."""

    name: Name | None = None
    agent: Name | None = None
    user: Name | None = None
    metadata: dict[str, Json] | None = None
    reopen: bool = False


class EndBody(msgspec.Struct, forbid_unknown_fields=True):
    """How a session ends."""

    status: Literal["completed", "failed", "cancelled"] = "completed"


class ForkBody(msgspec.Struct, forbid_unknown_fields=True):
    """Where a fork begins."""

    version: Version
    id: Name | None = None
    name: Name | None = None
    state: Literal["copy"] | None = None


class DeleteQuery(msgspec.Struct, forbid_unknown_fields=True):
    """Whether running sessions are deleted too."""

    force: bool = False


SessionsShape = struct(
    "SessionsShape",
    "A page of sessions in the order of their creation.",
    sessions=SESSION.many,
    next_cursor=str | None,
)


class IdsShape(msgspec.Struct):
    """The affected sessions."""

    session_ids: list[str]


@routes.add("GET", "/sessions", "read", query=SessionsQuery, answers={200: SessionsShape})
async def list_sessions(call: Call) -> Answer:
    """List sessions in the order of their creation."""
    query, limit = call.query, pages.limit_of(call)
    found = await call.store.sessions(
        status=query.status,
        agent=query.agent,
        root=root_of(call, query.root),
        after=pages.place_of(call) or 0,
        limit=limit,
    )
    return pages.page(call, found, limit, "number", SessionsShape, SESSION)


@routes.add(
    "POST",
    "/sessions",
    "write",
    body=SessionBody,
    takes=(HEADER,),
    answers={200: SESSION.type, 201: SESSION.type},
    problems=("session_not_found", "idempotency_key_reused", *CLOSED),
    example={"name": "research", "agent": "planner"},
)
async def start_session(call: Call) -> Answer:
    """Start a session, or resume one that exists."""
    given = msgspec.structs.asdict(call.body)
    root_id = call.token.root_id
    if root_id is not None:
        await _require_place_in_tree(call)

    def start(tx: Any) -> Op[SessionInfo]:
        session = yield from tx.session(**given)
        if root_id not in {None, session.root_id}:
            raise Forbidden(NO_PLACE)
        info: SessionInfo = yield from session.info()
        return info

    def shape(info: SessionInfo) -> Answer:
        is_new = info.version == 0 and info.created_at == info.last_resumed_at
        headers = {"location": call.address("sessions", info.id)}
        return Answer(201 if is_new else 200, SESSION(info), headers)

    return await transact(call, start, shape)


async def _require_place_in_tree(call: Call) -> None:
    """Refuse a limited token anything outside its tree, without revealing what else exists."""
    body, sessions = call.body, call.context.sessions
    if body.parent is not None:
        await sessions.find(body.parent, call.token)
    elif body.id is None:
        raise Forbidden(NO_PLACE)
    else:
        try:
            await sessions.find(body.id, call.token)
        except SessionNotFound:
            raise Forbidden(NO_PLACE) from None


@routes.add("GET", "/sessions/{id}", "read", answers={200: SESSION.type})
async def get_session(call: Call) -> Answer:
    """Read what is stored about a session."""
    return Answer(200, SESSION(await call.session.info()))


@routes.add(
    "PATCH",
    "/sessions/{id}",
    "write",
    body=SessionChange,
    takes=(HEADER,),
    answers={200: SESSION.type},
    problems=("idempotency_key_reused", *CLOSED),
    example={"name": "research, second part"},
)
async def change_session(call: Call) -> Answer:
    """Change what is stored about a session, or reopen it."""
    given = msgspec.structs.asdict(call.body)

    def change(tx: Any) -> Op[SessionInfo]:
        session = yield from tx.session(call.session.id, **given)
        info: SessionInfo = yield from session.info()
        return info

    return await transact(call, change, lambda info: Answer(200, SESSION(info)))


@routes.add(
    "DELETE",
    "/sessions/{id}",
    "admin",
    query=DeleteQuery,
    answers={200: IdsShape},
    problems=("refused", *CLOSED),
)
async def delete_session(call: Call) -> Answer:
    """Delete a session and everything below it."""
    return Answer(200, IdsShape(await call.acting.delete(force=call.query.force)))


@routes.add("POST", "/sessions/{id}/cancel", "write", answers={200: IdsShape}, problems=CLOSED)
async def cancel_session(call: Call) -> Answer:
    """Cancel a session and everything below it."""
    return Answer(200, IdsShape(await call.session.cancel()))


@routes.add(
    "POST",
    "/sessions/{id}/end",
    "write",
    body=EndBody,
    answers={200: SESSION.type},
    problems=CLOSED,
    example={"status": "completed"},
)
async def end_session(call: Call) -> Answer:
    """End a session."""
    await call.session.end(call.body.status)
    return Answer(200, SESSION(await call.session.info()))


@routes.add(
    "POST",
    "/sessions/{id}/fork",
    "write",
    body=ForkBody,
    takes=(HEADER,),
    answers={201: SESSION.type},
    problems=("checkpoint_not_found", "history_compacted", "idempotency_key_reused", *CLOSED),
    example={"version": 3, "name": "another answer"},
)
async def fork_session(call: Call) -> Answer:
    """Start a session that shares this one's history up to a version."""
    given = msgspec.structs.asdict(call.body)
    if call.token.root_id == call.session.id:
        raise Refusal("forbidden", "a fork of a root is a new tree, which the token does not reach")

    def fork(tx: Any) -> Op[SessionInfo]:
        forked = yield from tx.within(call.session).fork(**given)
        info: SessionInfo = yield from forked.info()
        return info

    return await transact(call, fork, lambda info: Answer(201, SESSION(info)))

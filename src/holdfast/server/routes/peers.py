"""Peers: ask agents, answer for them, and decide what sessions wait for."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec

from ...answers.records import struct
from ...answers.shapes import PAUSE, PEER_CALL
from ...errors import NotFound
from ...leases import uptime_seconds
from ...mesh import Mesh
from ...peers import Artifact, Pause, PeerCall
from ...peers.asks import ASK_SECONDS_MAX
from ...peers.records import AskState, PauseReason, PauseState, Receipt
from .. import pages
from ..endpoints import Endpoints
from ..messages import Answer, Call

routes = Endpoints()

Json = Any
Name = Annotated[str, msgspec.Meta(min_length=1, max_length=200)]
# How often a waiting request checks whether the server is stopping.
LOOK_SECONDS = 1.0
Wait = Annotated[
    float,
    msgspec.Meta(ge=0, description="How long to wait for the answer; capped at the limit."),
]
Timeout = Annotated[float, msgspec.Meta(ge=0, le=ASK_SECONDS_MAX)]
FILTERS = frozenset({"agent", "reason", "state"})
PAUSE_PATH, ASK_PATH = "/pauses/{id}", "/asks/{id}"


class PausesQuery(pages.PageQuery):
    """Which pauses to list."""

    agent: Name | None = None
    reason: PauseReason | None = None
    state: PauseState | None = None


class AsksQuery(pages.PageQuery):
    """Which calls to list."""

    agent: Name | None = None
    state: AskState | None = None


class WaitQuery(msgspec.Struct, forbid_unknown_fields=True):
    """How long to wait."""

    wait_seconds: Wait = 0


class DecideBody(msgspec.Struct, forbid_unknown_fields=True):
    """The reason for a decision; the token's name is recorded as the decider."""

    note: Annotated[str, msgspec.Meta(max_length=1_000)] | None = None


class ArtifactBody(msgspec.Struct, forbid_unknown_fields=True):
    """A named output that accompanies an answer: its data, or its URI."""

    name: Name
    media_type: Name = "application/json"
    data: Json = None
    uri: str | None = None


class AnswerBody(msgspec.Struct, forbid_unknown_fields=True):
    """The answer of a peer."""

    result: Json = None
    status: Literal["ok", "error", "cancelled"] = "ok"
    artifacts: list[ArtifactBody] = []


class ProgressBody(msgspec.Struct, forbid_unknown_fields=True):
    """A peer's progress."""

    note: Json


class RequestBody(msgspec.Struct, forbid_unknown_fields=True):
    """A request to an agent."""

    input: Json = None
    request_id: Name | None = None
    user: Name | None = None
    timeout_seconds: Timeout | Literal["never"] = "never"


PausesShape = struct(
    "PausesShape", "A page of pauses, oldest first.", pauses=PAUSE.many, next_cursor=str | None
)
AsksShape = struct(
    "AsksShape",
    "A page of calls in the order of dispatch.",
    asks=PEER_CALL.many,
    next_cursor=str | None,
)
SessionPausesShape = struct(
    "SessionPausesShape", "The pauses of a session, oldest first.", pauses=PAUSE.many
)
SessionAsksShape = struct(
    "SessionAsksShape", "The calls of a session in the order of dispatch.", asks=PEER_CALL.many
)


class ReceiptShape(msgspec.Struct):
    """Whether the answer counted; a late one is stored and changes nothing."""

    id: str
    receipt: Receipt


class ChangedShape(msgspec.Struct):
    """Whether anything was changed: false if the call already had its answer."""

    id: str
    changed: bool


@routes.add("GET", "/pauses", "read", query=PausesQuery, answers={200: PausesShape})
async def list_pauses(call: Call) -> Answer:
    """List the pauses of all sessions, oldest first; to a token for one tree, those of its tree."""
    return await _listed(call, call.store.pauses, PAUSE, PausesShape)


@routes.add("GET", "/sessions/{id}/pauses", "read", answers={200: SessionPausesShape})
async def list_session_pauses(call: Call) -> Answer:
    """List the pauses of one session, oldest first."""
    return Answer(200, SessionPausesShape(list(map(PAUSE, await call.session.pauses()))))


@routes.add("GET", PAUSE_PATH, "read", answers={200: PAUSE.type}, problems=("not_found",))
async def get_pause(call: Call) -> Answer:
    """Read one pause: what the session waits for, and what was decided."""
    return Answer(200, PAUSE(await reached_pause(call)))


@routes.add(
    "POST", f"{PAUSE_PATH}/approve", "approve", body=DecideBody, answers={200: PAUSE.type},
    problems=("not_found", "refused"), example={"note": "within budget"}, is_store_wide=True,
)  # fmt: skip
async def approve_pause(call: Call) -> Answer:
    """Approve what a session waits for, which then resumes; the token's name is recorded."""
    return await _decided(call, call.acting_store.approve)


@routes.add(
    "POST", f"{PAUSE_PATH}/reject", "approve", body=DecideBody, answers={200: PAUSE.type},
    problems=("not_found", "refused"), example={"note": "too dear"}, is_store_wide=True,
)  # fmt: skip
async def reject_pause(call: Call) -> Answer:
    """Reject what a session waits for, which then resumes; the token's name is recorded."""
    return await _decided(call, call.acting_store.reject)


@routes.add("GET", "/asks", "read", query=AsksQuery, answers={200: AsksShape})
async def list_asks(call: Call) -> Answer:
    """List calls to agents in the order of dispatch; to a token for one tree, those of its tree."""
    return await _listed(call, call.store.asks, PEER_CALL, AsksShape)


@routes.add("GET", "/sessions/{id}/asks", "read", answers={200: SessionAsksShape})
async def list_session_asks(call: Call) -> Answer:
    """List the calls that one session made, in the order of dispatch."""
    return Answer(200, SessionAsksShape(list(map(PEER_CALL, await call.session.asks()))))


@routes.add("GET", ASK_PATH, "read", answers={200: PEER_CALL.type}, problems=("not_found",))
async def get_ask(call: Call) -> Answer:
    """Read one call with its progress and its answer."""
    return Answer(200, PEER_CALL(await _reached_ask(call)))


@routes.add(
    "POST", f"{ASK_PATH}/answer", "write", body=AnswerBody, answers={200: ReceiptShape},
    problems=("not_found", "refused"),
    example={"result": {"cents": 900}, "artifacts": [{"name": "offer", "data": [1, 2]}]},
)  # fmt: skip
async def answer_ask(call: Call) -> Answer:
    """Answer a call on behalf of the peer; an answer that is sent again changes nothing."""
    id, body = (await _reached_ask(call)).id, call.body
    artifacts = [Artifact(**msgspec.structs.asdict(each)) for each in body.artifacts]
    given: dict[str, Any] = {"status": body.status, "artifacts": artifacts}
    return Answer(200, ReceiptShape(id, await call.store.answer(id, body.result, **given)))


@routes.add(
    "POST", f"{ASK_PATH}/progress", "write", body=ProgressBody, answers={200: ChangedShape},
    problems=("not_found",), example={"note": "half of it"},
)  # fmt: skip
async def progress_ask(call: Call) -> Answer:
    """Report a peer's progress, and restart its timeout."""
    id = (await _reached_ask(call)).id
    return Answer(200, ChangedShape(id, await call.store.progress(id, call.body.note)))


@routes.add(
    "POST", f"{ASK_PATH}/cancel", "write", answers={200: ChangedShape}, problems=("not_found",)
)  # fmt: skip
async def cancel_ask(call: Call) -> Answer:
    """Cancel a call and its peer; a session that waited for it resumes."""
    id = (await _reached_ask(call)).id
    return Answer(200, ChangedShape(id, await call.store.cancel_ask(id)))


@routes.add(
    "POST", "/agents/{name}/requests", "write", query=WaitQuery, body=RequestBody,
    answers={200: PEER_CALL.type, 202: PEER_CALL.type}, problems=("request_mismatch",),
    example={"input": {"trip": "Oslo"}, "request_id": "r-1", "user": "ann"}, is_store_wide=True,
)  # fmt: skip
async def request_agent(call: Call) -> Answer:
    """Ask an agent; 202 if there is no answer yet. The same `request_id` is the same request,
    so a caller that reconnects gets its answer, and nothing runs twice.
    """
    given = msgspec.structs.asdict(call.body)
    asked = await call.store.request(call.path["name"], given.pop("input"), **given)
    found = await _waited(call, asked)
    headers = {"location": call.address("requests", found.id)}
    return Answer(202 if found.state == "open" else 200, PEER_CALL(found), headers)


@routes.add("GET", "/requests/{id}", "read", query=WaitQuery, answers={200: PEER_CALL.type},
            problems=("not_found",))  # fmt: skip
async def get_request(call: Call) -> Answer:
    """Read a request to an agent, or wait for its answer."""
    found = await _reached_ask(call)
    if found.session_id is not None:
        raise NotFound(f"there is no request {found.id!r}", id=found.id)
    return Answer(200, PEER_CALL(await _waited(call, found)))


async def _listed(call: Call, read: Any, shown: Any, page: Any) -> Answer:
    """Return a page of calls or pauses, filtered by what the query gives."""
    wanted, limit = msgspec.structs.asdict(call.query), pages.limit_of(call)
    given = {name: value for name, value in wanted.items() if name in FILTERS}
    root = call.token.root_id
    found = await read(**given, root=root, after=pages.place_of(call) or 0, limit=limit)
    return pages.page(call, found, limit, "number", page, shown)


async def _decided(call: Call, decide: Any) -> Answer:
    """Decide what the session of a pause waits for, on behalf of the token."""
    pause = await reached_pause(call)
    await decide(pause.id, by=call.token.name, note=call.body.note)
    return Answer(200, PAUSE(await call.store.get_pause(pause.id)))


async def _waited(call: Call, asked: PeerCall) -> PeerCall:
    """Return a call once it has its answer, or as it is when the time is up."""
    context, mesh = call.context, Mesh(call.store)
    wait_seconds = min(call.query.wait_seconds, context.options.limits.wait_seconds)
    ends_at = uptime_seconds() + wait_seconds
    if asked.state != "open" or not wait_seconds:
        return asked
    with context.usage.following(call.token), context.metrics.waiting():
        while asked.state == "open" and not context.is_stopping:
            left = ends_at - uptime_seconds()
            if left <= 0:
                break
            asked = await mesh.wait(asked.id, wait_seconds=min(left, LOOK_SECONDS))
    return asked


async def _reached_ask(call: Call) -> PeerCall:
    """Return the call that the path names, if the token reaches its tree."""
    found: PeerCall = await _reached(call, call.store.peer_call, "request or peer call")
    return found


async def reached_pause(call: Call) -> Pause:
    """Return the pause that the path names, if the token reaches its tree."""
    found: Pause = await _reached(call, call.store.get_pause, "pause")
    return found


async def _reached(call: Call, read: Any, what: str) -> Any:
    id = call.path["id"]
    found = await read(id)
    if call.token.root_id not in {None, found.root_id}:
        raise NotFound(f"there is no {what} {id!r}", id=id)
    return found

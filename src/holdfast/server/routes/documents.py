"""The whole shared state as one document."""

from __future__ import annotations

from typing import Any

import msgspec

from ...answers.problems import Refusal
from ...answers.shapes import StateShape, state_shape
from ...kernel.operation import Lock, Op
from ...state.records import StateSnapshot
from ..endpoints import MERGE_PATCH, Endpoints
from ..json_patch import MEDIA as JSON_PATCH
from ..json_patch import Patch, patched
from ..messages import Answer, Call
from ..preconditions import NAMES, condition_of, is_current, optional, required, state_tag
from ..replay import HEADER, write
from .keys import NO_CACHE, WRITES, KeyQuery

routes = Endpoints()

STATE = "/sessions/{id}/state"
STRATEGY = "x-merge-strategy"
Json = Any


class InitialBody(msgspec.Struct, forbid_unknown_fields=True):
    """The first document of a state without keys."""

    initial_state: dict[str, Json] = {}


class DocumentBody(msgspec.Struct, forbid_unknown_fields=True):
    """The new document of the state."""

    state: dict[str, Json]


@routes.add(
    "GET",
    STATE,
    "read",
    query=KeyQuery,
    takes=("if-none-match",),
    answers={200: StateShape, 304: None},
    problems=("history_compacted", "sequence_in_future"),
)
async def get_state(call: Call) -> Answer:
    """Read all keys at one moment, now or at a sequence."""
    at = call.query.at_sequence
    if at is None and call.headers.get("if-none-match") is not None:
        version = await call.session.state.version()
        if is_current(call.headers, version, whole=True):
            return Answer(304, headers=_headers(version))
    snapshot = await call.session.state.snapshot(at)
    return await _answer(call, snapshot, sequence=at)


@routes.add(
    "POST",
    STATE,
    "write",
    body=InitialBody,
    takes=(HEADER,),
    answers={201: StateShape},
    problems=("version_conflict", *WRITES),
    example={"initial_state": {"tasks_completed": 0, "findings": []}},
)
async def initialize_state(call: Call) -> Answer:
    """Set the first document of a state without keys."""
    document, created_at = call.body.initial_state, await _created_at(call)
    return await write(
        call,
        lambda session: session.state.initialize(document),
        lambda snapshot: _shaped(snapshot, created_at, status=201),
    )


@routes.add(
    "PUT",
    STATE,
    "write",
    body=DocumentBody,
    takes=(*NAMES, HEADER),
    answers={200: StateShape},
    problems=("version_conflict", "precondition_required", *WRITES),
    example={"state": {"tasks_completed": 4, "findings": ["finding1"]}},
)
async def replace_state(call: Call) -> Answer:
    """Replace the whole document; the precondition names the version of the whole state."""
    version = required(condition_of(call.headers, whole=True))
    document, created_at = call.body.state, await _created_at(call)
    return await write(
        call,
        lambda session: session.state.replace(document, if_version=version),
        lambda snapshot: _shaped(snapshot, created_at),
    )


@routes.add(
    "PATCH",
    STATE,
    "write",
    body=dict[str, Json],
    media=MERGE_PATCH,
    other_bodies={JSON_PATCH: (Patch, [{"op": "add", "path": "/findings/-", "value": "new"}])},
    takes=(*NAMES, STRATEGY, HEADER),
    answers={200: StateShape},
    problems=("version_conflict", "type_mismatch", "patch_conflict", *WRITES),
    example={"findings": {"$append": ["new"]}, "counters.processed": {"$increment": 1}},
)
async def patch_state(call: Call) -> Answer:
    """Merge into the whole document on the server; null deletes a key.

    `$append`, `$increment`, `$set` and `$delete` as the whole value of a key operate on it. A JSON
    Patch (RFC 6902) is applied to the document, whose members are the keys.
    """
    version = optional(condition_of(call.headers, whole=True))
    if isinstance(call.body, list):
        return await _patched(call, version)
    strategy = (call.headers.get(STRATEGY) or "deep").lower()
    if strategy not in {"deep", "shallow"}:
        raise Refusal(
            "invalid_request", "X-Merge-Strategy must be deep or shallow", pointer=STRATEGY
        )
    patch, created_at = call.body, await _created_at(call)

    def change(session: Any) -> Any:
        how = {"deep": strategy == "deep", "operators": True}
        return session.state.patch(patch, if_version=version, **how)

    return await write(call, change, lambda snapshot: _shaped(snapshot, created_at))


async def _patched(call: Call, version: int | None) -> Answer:
    """Apply a JSON Patch to the document."""
    created_at = await _created_at(call)

    def change(session: Any) -> Op[StateSnapshot]:
        # The read and the write are in one transaction.
        yield Lock(session.root_id)
        before: StateSnapshot = yield from session.state.snapshot()
        document: Any = before.document
        if version in {None, before.version}:
            document = patched(dict(document), call.body)
            if not isinstance(document, dict):
                raise Refusal("invalid_request", "the whole state must be an object")
        after: StateSnapshot = yield from session.state.replace(document, if_version=version)
        return after

    return await write(
        call, change, lambda snapshot: _shaped(snapshot, created_at), is_composed=True
    )


async def _answer(call: Call, snapshot: StateSnapshot, *, sequence: int | None) -> Answer:
    return _shaped(snapshot, await _created_at(call), sequence=sequence)


def _shaped(
    snapshot: StateSnapshot, created_at: int, *, status: int = 200, sequence: int | None = None
) -> Answer:
    body = state_shape(snapshot, created_at, sequence=sequence)
    return Answer(status, body, _headers(snapshot.version))


def _headers(version: int) -> dict[str, str]:
    return {"etag": state_tag(version), "cache-control": NO_CACHE}


async def _created_at(call: Call) -> int:
    return await call.context.sessions.created_at(call.session.root_id)

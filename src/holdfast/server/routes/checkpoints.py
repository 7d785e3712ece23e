"""Versions of a session: save, list, read, compare and rewind."""

from __future__ import annotations

from types import GenericAlias
from typing import Annotated, Any

import msgspec

from ...answers.problems import Refusal
from ...answers.records import struct
from ...answers.shapes import CHECKPOINT, EFFECT, LOADED
from ...effects.undo import Rewound
from ...records import Effect, Kind
from .. import pages
from ..access import require_decider
from ..endpoints import Endpoints
from ..messages import Answer, Call
from ..replay import HEADER, write
from .sessions import CLOSED

routes = Endpoints()

Json = Any
CHECKPOINTS = "/sessions/{id}/checkpoints"
Number = Annotated[int, msgspec.Meta(ge=1, le=2**31 - 1)]


class CheckpointsQuery(pages.PageQuery):
    """Which versions to list."""

    kind: Kind | None = None


class LoadQuery(msgspec.Struct, forbid_unknown_fields=True):
    """How much of each list to return."""

    last: Number | None = None


class DiffQuery(msgspec.Struct, forbid_unknown_fields=True):
    """The two versions to compare."""

    a: Number
    b: Number


class AppendPart(msgspec.Struct, forbid_unknown_fields=True):
    """The items to append to a list channel."""

    channel: Annotated[str, msgspec.Meta(min_length=1, max_length=256)]
    items: list[Json]


class SaveBody(msgspec.Struct, forbid_unknown_fields=True):
    """A new version: channels to set, or a list channel to append to."""

    channels: dict[str, Json] = {}
    append: AppendPart | None = None
    kind: Kind = "turn"
    data: Json = None
    metadata: dict[str, Json] | None = None
    expected_version: Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)] | None = None
    key: Annotated[str, msgspec.Meta(min_length=1, max_length=256)] | None = None


class RewindBody(msgspec.Struct, forbid_unknown_fields=True):
    """The version to continue from."""

    version: Number


CheckpointsShape = struct(
    "CheckpointsShape",
    "A page of versions, newest first.",
    checkpoints=CHECKPOINT.many,
    next_cursor=str | None,
)


NotUndone = struct(
    "NotUndone",
    "An effect that was not undone, and why.",
    effect=EFFECT.type,
    reason=str,
)


RewoundShape = struct(
    "RewoundShape",
    "The record of a rewind, and the effects that it did not undo.",
    checkpoint=CHECKPOINT.type,
    undone=EFFECT.many,
    irreversible=EFFECT.many,
    not_undone=GenericAlias(list, NotUndone),
    in_flight=EFFECT.many,
    given_up=EFFECT.many,
)


class DiffShape(msgspec.Struct):
    """The channels that differ."""

    channels: list[dict[str, Json]]


@routes.add("GET", CHECKPOINTS, "read", query=CheckpointsQuery, answers={200: CheckpointsShape})
async def list_checkpoints(call: Call) -> Answer:
    """List versions without their channels, newest first."""
    limit = pages.limit_of(call)
    found = await call.session.history(
        kind=call.query.kind, before=pages.place_of(call), limit=limit
    )
    return pages.page(call, found, limit, "version", CheckpointsShape, CHECKPOINT)


@routes.add(
    "POST",
    CHECKPOINTS,
    "write",
    body=SaveBody,
    is_session_checked=True,
    takes=(HEADER,),
    answers={201: CHECKPOINT.type},
    problems=("version_conflict", "request_mismatch", "idempotency_key_reused", *CLOSED),
    example={"append": {"channel": "messages", "items": [{"role": "user", "text": "hello"}]}},
)
async def save_checkpoint(call: Call) -> Answer:
    """Save the next version: the named channels are set, the others carry over."""
    body: SaveBody = call.body
    if body.append is not None and body.channels:
        raise Refusal("invalid_request", "give channels or append, not both", pointer="/append")
    require_decider(call.token, body.kind, body.data)
    rest = {
        "kind": body.kind,
        "data": body.data,
        "metadata": body.metadata,
        "expected_version": body.expected_version,
        "key": body.key,
    }

    def change(session: Any) -> Any:
        if body.append is not None:
            return session.append(body.append.channel, body.append.items, **rest)
        return session.save(body.channels, **rest)

    return await write(call, change, lambda saved: Answer(201, CHECKPOINT(saved)))


@routes.add(
    "GET",
    f"{CHECKPOINTS}/{{version}}",
    "read",
    query=LoadQuery,
    answers={200: LOADED.type},
    problems=("checkpoint_not_found",),
)
async def get_checkpoint(call: Call) -> Answer:
    """Read a version with its channels; `latest` is the newest."""
    given, last = call.path["version"], call.query.last
    if given == "latest":
        loaded = await call.session.latest(last=last)
    elif given.isascii() and given.isdecimal() and 0 < int(given[:11]) < 2**31:
        loaded = await call.session.at(int(given), last=last)
    else:
        loaded = None
    if loaded is None:
        raise Refusal("checkpoint_not_found", f"there is no version {given!r}")
    return Answer(200, LOADED(loaded))


@routes.add(
    "GET",
    "/sessions/{id}/diff",
    "read",
    query=DiffQuery,
    answers={200: DiffShape},
    problems=("checkpoint_not_found",),
)
async def diff_checkpoints(call: Call) -> Answer:
    """Compare the channels of two versions."""
    found = await call.session.diff(call.query.a, call.query.b)
    return Answer(200, DiffShape(found.to_dict()["channels"]))


@routes.add(
    "POST",
    "/sessions/{id}/rewind",
    "write",
    body=RewindBody,
    answers={200: RewoundShape},
    problems=("checkpoint_not_found", *CLOSED),
    example={"version": 3},
)
async def rewind_session(call: Call) -> Answer:
    """Continue from an older version; effects that were not undone are listed."""
    rewound: Rewound = await call.acting.rewind(call.body.version)

    def told(effects: tuple[Effect, ...]) -> list[Any]:
        return list(map(EFFECT, effects))

    body = RewoundShape(
        checkpoint=CHECKPOINT(rewound),
        undone=told(rewound.undone),
        irreversible=told(rewound.irreversible),
        not_undone=[NotUndone(EFFECT(effect), why) for effect, why in rewound.not_undone],
        in_flight=told(rewound.in_flight),
        given_up=told(rewound.given_up),
    )
    return Answer(200, body)

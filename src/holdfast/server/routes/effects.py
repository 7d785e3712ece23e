"""The ledger of effects: list effects, and resolve those in doubt."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec

from ...answers.records import struct
from ...answers.shapes import EFFECT
from ...effects.tools import Landed, NotLanded
from ...errors import NotFound, SessionNotFound
from ...records import Effect, EffectStatus
from .. import pages
from ..access import tree_of
from ..endpoints import Endpoints
from ..messages import Answer, Call

routes = Endpoints()

Json = Any
Name = Annotated[str, msgspec.Meta(min_length=1, max_length=256)]


class EffectsQuery(pages.PageQuery):
    """Which effects to list."""

    session: Name | None = None
    item: Name | None = None
    key: Annotated[str, msgspec.Meta(min_length=1, max_length=1_000)] | None = None
    tool: Name | None = None
    status: EffectStatus | None = None


class ResolveBody(msgspec.Struct, forbid_unknown_fields=True):
    """The outcome of an effect in doubt."""

    verdict: Literal["landed", "not_landed"]
    result: Json = None
    note: str | None = None


EffectsShape = struct(
    "EffectsShape",
    "A page of the ledger, oldest first.",
    effects=EFFECT.many,
    next_cursor=str | None,
)


@routes.add("GET", "/effects", "read", query=EffectsQuery, answers={200: EffectsShape},
            problems=("session_not_found",))  # fmt: skip
async def list_effects(call: Call) -> Answer:
    """List effects, oldest first; a token for one tree is shown those of its tree."""
    query, limit = call.query, pages.limit_of(call)
    root = await tree_of(call, query.session)
    found = await call.store.effects(
        session=query.session,
        # Those of a session include what an earlier one with its id has left to it.
        root=root if query.session is None else None,
        item=query.item,
        key=query.key,
        tool=query.tool,
        status=query.status,
        after=pages.place_of(call) or 0,
        limit=limit,
    )
    return pages.page(call, found, limit, "number", EffectsShape, EFFECT)


@routes.add("GET", "/effects/{id}", "read", answers={200: EFFECT.type}, problems=("not_found",))
async def get_effect(call: Call) -> Answer:
    """Read one effect."""
    return Answer(200, EFFECT(await reached_effect(call)))


@routes.add(
    "POST",
    "/effects/{id}/resolve",
    "write",
    body=ResolveBody,
    answers={200: EFFECT.type},
    problems=("not_found", "in_progress", "refused"),
    example={"verdict": "landed", "result": {"id": "ch_1"}, "note": "seen in the dashboard"},
)
async def resolve_effect(call: Call) -> Answer:
    """Resolve an effect in doubt; the token's name is recorded."""
    await reached_effect(call)
    body: ResolveBody = call.body
    verdict = Landed(body.result) if body.verdict == "landed" else NotLanded()
    store, by = call.acting_store, call.token.name
    resolved = await store.resolve(call.path["id"], verdict, by=by, note=body.note)
    return Answer(200, EFFECT(resolved))


async def reached_effect(call: Call) -> Effect:
    """Return the effect that the path names, if the token reaches its session."""
    effect: Effect = await call.store.effect(call.path["id"])
    if call.token.root_id is not None:
        try:
            await call.context.sessions.find(effect.session_id or "", call.token)
        except SessionNotFound:
            raise NotFound(f"there is no effect {call.path['id']!r}") from None
    return effect

"""The ledger of effects: those of a session, one with its attempts, and those in doubt."""

from __future__ import annotations

from typing import Annotated, Literal
from urllib.parse import quote

import msgspec

from ....answers.shapes import EFFECT
from ....effects.tools import Landed, NotLanded
from ....records import Effect, EffectStatus
from ...messages import Answer, Call
from ...pages import next_cursor, place_of
from ...routes.effects import EffectsShape, reached_effect
from ..forms import Around, Form, json_field
from ..templates import Commands, api_path
from ..views import ListQuery, PageQuery, Pages, View, page_size, see_other
from .session import session_view

routes = Pages()
NOTE_CHARACTERS_MAX = 2_000


class EffectsQuery(ListQuery):
    """Which effects to list."""

    status: EffectStatus | Literal[""] = ""


class EffectQuery(PageQuery):
    """Whether the tool has just checked and could not tell."""

    verified: Literal["", "unknown"] = ""


class ResolveForm(Form):
    """The outcome of an effect, and how it is known."""

    subject = "result"

    verdict: Literal["landed", "not_landed"]
    note: Annotated[str, msgspec.Meta(min_length=1, max_length=NOTE_CHARACTERS_MAX)]
    result: str = ""


@routes.page("/sessions/{id}/effects", EffectsQuery)
async def session_effects_page(call: Call) -> View:
    """Show the effects of a session, oldest first."""
    limit, status, id = page_size(call), call.query.status or None, call.session.id
    found = await call.store.effects(
        session=id, status=status, after=place_of(call) or 0, limit=limit
    )
    cursor = next_cursor(found, limit, "number")
    view = await session_view(
        call,
        "effects",
        data=EffectsShape(list(map(EFFECT, found)), cursor),
        words=("effects", "list"),
        effects=found,
        is_of_all=False,
        query=call.query,
        next_cursor=cursor,
    )
    path = api_path("/effects", session=id, status=status)
    view.commands = Commands.of(path, "effects", "list", session=id, status=status)
    return view


@routes.page("/in-doubt", ListQuery, is_store_wide=True)
async def in_doubt_page(call: Call) -> View:
    """Show the effects whose outcome is unknown, oldest first."""
    limit = page_size(call)
    found = await call.store.effects(status="unknown", after=place_of(call) or 0, limit=limit)
    cursor = next_cursor(found, limit, "number")
    path = api_path("/effects", status="unknown")
    return View(
        template="in_doubt.html",
        title="In doubt",
        data=EffectsShape(list(map(EFFECT, found)), cursor),
        commands=Commands.of(path, "effects", "list", status="unknown"),
        given={"effects": found, "is_of_all": True},
        next_cursor=cursor,
        live=("live",),
    )


@routes.page("/effects/{id}", EffectQuery)
async def effect_page(call: Call) -> View:
    """Show an effect with all its attempts; one in doubt can be decided."""
    effect = await reached_effect(call)
    attempts = await call.store.attempts(effect.id)
    live: tuple[str, ...] | None = ("live",)
    if effect.session_id is not None:
        live = ("sessions", effect.session_id, "live")
    elif call.token.root_id is not None:
        live = None
    return View(
        template="effect.html",
        title=f"{effect.tool} - effect {effect.number}",
        data={"effect": EFFECT(effect), "attempts": list(map(EFFECT, attempts))},
        commands=Commands.of(
            f"/effects/{quote(effect.id, safe='')}", "effects", "show", str(effect.number)
        ),
        given={
            "effect": effect,
            "attempts": attempts,
            "is_of_all": False,
            "can_verify": _can_verify(call, effect),
            "is_still_unknown": call.query.verified == "unknown" and effect.status == "unknown",
        },
        live=live,
    )


EFFECT_PAGE = Around(effect_page, lambda _: EffectQuery())


@routes.form("/effects/{id}/resolve", ResolveForm, on=EFFECT_PAGE)
async def resolve_form(call: Call) -> Answer:
    """Resolve an effect in doubt; who decided, and why, is recorded."""
    effect, body = await reached_effect(call), call.body
    verdict = (
        Landed(json_field(call, body.result, "result")) if body.verdict == "landed" else NotLanded()
    )
    await call.acting_store.resolve(effect.id, verdict, by=call.token.name, note=body.note)
    return see_other(f"{call.context.options.base_path}/ui/effects/{quote(effect.id, safe='')}")


@routes.form("/effects/{id}/verify", Form, on=EFFECT_PAGE)
async def verify_form(call: Call) -> Answer:
    """Let the tool's own hook check whether an effect in doubt happened."""
    effect = await reached_effect(call)
    tools = list(call.context.options.tools.values())
    verified = await call.acting_store.verify(effect.id, tools)
    place = f"{call.context.options.base_path}/ui/effects/{quote(effect.id, safe='')}"
    return see_other(f"{place}?verified=unknown" if verified.status == "unknown" else place)


def _can_verify(call: Call, effect: Effect) -> bool:
    tool = call.context.options.tools.get(effect.tool)
    return effect.status == "unknown" and tool is not None and tool.verify is not None

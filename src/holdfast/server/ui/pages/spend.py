"""Money spent on models."""

from __future__ import annotations

from dataclasses import asdict
from decimal import Decimal
from typing import Any, Literal

from ...messages import Call
from ...pages import name_of, next_cursor
from ...routes.spend import GROUP, SpendShape
from ..templates import Commands, api_path
from ..views import ListQuery, Pages, View, page_size
from .session import session_view

routes = Pages()


class SpendQuery(ListQuery):
    """How to group spend."""

    by: Literal["model", "session", "day"] = "model"


@routes.page("/spend", SpendQuery, is_store_wide=True)
async def spend_page(call: Call) -> View:
    """Show what all sessions spent, by model, session or day."""
    by, limit = call.query.by, page_size(call)
    found = await call.store.spending(by, after=name_of(call), limit=limit)
    cursor = next_cursor(found, limit, "name")
    return View(
        template="spend.html",
        title="Spend",
        data=SpendShape(list(map(GROUP, found)), cursor),
        commands=Commands.of(api_path("/spend", by=by), "spend", "sums", by=by),
        given={"groups": found, "by": by, **_sums(found)},
        next_cursor=cursor,
        live=("live",),
    )


@routes.page("/sessions/{id}/spend")
async def session_spend_page(call: Call) -> View:
    """Show what a session spent, alone and with its tree, by model and source."""
    alone, tree = await call.session.spent(), await call.session.spent(tree=True)
    told: dict[str, Any] = {"session": asdict(alone), "tree": asdict(tree)}
    view = await session_view(
        call, "spend", data=told, words=("spend", "sums"), alone=alone, tree=tree, **_sums(alone.by)
    )
    id = call.session.id
    view.commands = Commands.of(api_path("/spend", session=id), "spend", "sums", session=id)
    return view


def _sums(found: Any) -> dict[str, Any]:
    usd = [each.usd for each in found]
    return {"total": sum(usd, Decimal(0)), "most": max(usd, default=Decimal(0))}

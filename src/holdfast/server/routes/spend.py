"""Money spent on models."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec

from ...answers.records import Shape, struct
from ...spend.ledger import SpendGroup
from .. import pages
from ..access import tree_of
from ..endpoints import Endpoints
from ..messages import Answer, Call

routes = Endpoints()

Name = Annotated[str, msgspec.Meta(min_length=1, max_length=256)]
GROUP = Shape("SpendGroup", SpendGroup)


class SpendQuery(msgspec.Struct, forbid_unknown_fields=True):
    """How to group spend, and whose to include."""

    by: Literal["session", "model", "day"] = "model"
    session: Name | None = None
    limit: pages.Limit = pages.PAGE
    cursor: pages.Cursor | None = None


SpendShape = struct(
    "SpendShape",
    "A page of totals of spend, in US dollars, in the order of their names.",
    groups=GROUP.many,
    next_cursor=str | None,
)


@routes.add("GET", "/spend", "read", query=SpendQuery, answers={200: SpendShape},
            problems=("session_not_found",))  # fmt: skip
async def get_spend(call: Call) -> Answer:
    """Total spend by session, model or day; for a token for one tree, that of its tree."""
    session, limit, after = call.query.session, pages.limit_of(call), pages.name_of(call)
    given: dict[str, Any] = {"session": session, "root": await tree_of(call, session)}
    found = await call.store.spending(call.query.by, **given, after=after, limit=limit)
    return pages.page(call, found, limit, "name", SpendShape, GROUP)

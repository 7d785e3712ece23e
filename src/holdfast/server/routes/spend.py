"""Money spent on models."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from ...answers.records import Shape, struct
from ...spend.ledger import SpendGroup
from .. import pages
from ..access import require_named_session
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


SpendShape = struct(
    "SpendShape",
    "Totals of spend, in US dollars.",
    groups=GROUP.many,
)


@routes.add("GET", "/spend", "read", query=SpendQuery, answers={200: SpendShape},
            problems=("session_not_found",))  # fmt: skip
async def get_spend(call: Call) -> Answer:
    """Total spend by session, model or day."""
    session = await require_named_session(call, call.query.session)
    limit = pages.limit_of(call)
    found = await call.store.spending(call.query.by, session=session, limit=limit)
    return Answer(200, SpendShape(list(map(GROUP, found))))

"""The list of sessions."""

from __future__ import annotations

from typing import Any, Literal

from ....answers.shapes import SESSION
from ....records import Status
from ...messages import Call
from ...pages import next_cursor, place_of
from ...routes.sessions import SessionsShape
from ..templates import Commands, api_path
from ..views import ListQuery, Pages, View, page_size

routes = Pages()


class SessionsQuery(ListQuery):
    """Which sessions."""

    status: Status | Literal[""] = ""
    agent: str = ""


@routes.page("/sessions", SessionsQuery)
async def sessions_page(call: Call) -> View:
    """Show sessions, the newest first."""
    query, limit, root = call.query, page_size(call), call.token.root_id
    given: dict[str, Any] = {"status": query.status or None, "agent": query.agent or None}
    found = await call.store.sessions(
        **given, root=root, before=place_of(call), limit=limit, newest_first=True
    )
    cursor = next_cursor(found, limit, "number")
    return View(
        template="sessions.html",
        title="Sessions",
        data=SessionsShape(list(map(SESSION, found)), cursor),
        commands=Commands.of(api_path("/sessions", **given), "sessions", "list", **given),
        given={"sessions": found, "query": query},
        next_cursor=cursor,
        live=("live",) if root is None else ("sessions", root, "live"),
    )

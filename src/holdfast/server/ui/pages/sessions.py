"""The list of sessions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any, Literal

from ....answers.shapes import SESSION
from ....records import SessionInfo, Status
from ...messages import Call
from ...pages import next_cursor, place_of
from ..templates import Commands, api_path
from ..views import ListQuery, Pages, View, page_size

routes = Pages()
CHILDREN_COUNTED = 100


class SessionsQuery(ListQuery):
    """Which sessions to list."""

    status: Status | Literal[""] = ""
    agent: str = ""


async def session_rows(
    call: Call, found: Sequence[SessionInfo], *, has_children: bool = True
) -> dict[str, Any]:
    """Return what a list of sessions shows: beside each its children, and what it cost."""
    children = None
    if has_children:
        children = await call.store.child_counts(found, at_most=CHILDREN_COUNTED)
    return {
        "sessions": found,
        "children": children,
        "costs": await call.store.costs(found),
        "children_counted": CHILDREN_COUNTED,
    }


@routes.page("/sessions", SessionsQuery)
async def sessions_page(call: Call) -> View:
    """Show sessions, newest first."""
    query, limit, root = call.query, page_size(call), call.token.root_id
    given: dict[str, Any] = {"status": query.status or None, "agent": query.agent or None}
    found = await call.store.sessions(
        **given, root=root, before=place_of(call), limit=limit, newest_first=True
    )
    cursor, shown = next_cursor(found, limit, "number"), await session_rows(call, found)
    return View(
        template="sessions.html",
        title="Sessions",
        data={
            "sessions": list(map(SESSION, found)),
            "children": shown["children"],
            "children_counted": CHILDREN_COUNTED,
            "costs": {id: asdict(each) for id, each in shown["costs"].items()},
            "next_cursor": cursor,
        },
        commands=Commands.of(api_path("/sessions", **given), "sessions", "list", **given),
        given={**shown, "query": query},
        next_cursor=cursor,
        live=("live",) if root is None else ("sessions", root, "live"),
    )

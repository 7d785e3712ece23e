"""Searching by an id, the beginning of an id, or a number."""

from __future__ import annotations

import contextlib
from collections.abc import Awaitable, Callable
from typing import Any
from urllib.parse import quote

from ....answers.shapes import SESSION
from ....errors import InvalidArgument, NotFound
from ....explorations import Explorations
from ....kernel.operation import Async
from ....records import SessionInfo
from ...messages import Answer, Call
from ..templates import Commands
from ..views import PageQuery, Pages, View, see_other
from .sessions import session_rows

routes = Pages()
SHOWN = 20
TEXT_MAX = 512


class SearchQuery(PageQuery):
    """What to look for."""

    q: str = ""


@routes.page("/search", SearchQuery)
async def search_page(call: Call) -> View | Answer:
    """Show what has this id, prefix of an id or number; redirect if there is only one match."""
    text = call.query.q.strip()[:TEXT_MAX]
    sessions = await _sessions(call, text) if text else []
    places = [("sessions", each.id) for each in sessions]
    others: list[tuple[str, str, tuple[str, ...]]] = []
    if text:
        keys = await _keys(call, text)
        others += [("key", key, ("sessions", id, "state", key)) for id, key in keys]
        if call.token.root_id is None:
            others += await _others(call, text)
    found = [*places, *(place for _, _, place in others)]
    if len(found) == 1 and call.query.format == "html":
        return see_other(_link(call, found[0]))
    return View(
        template="search.html",
        title="Search",
        data={
            "sessions": list(map(SESSION, sessions)),
            "others": [{"kind": kind, "name": name} for kind, name, _ in others],
        },
        commands=Commands("/sessions", "sessions list"),
        given={**await session_rows(call, sessions), "others": others, "text": text},
    )


async def _sessions(call: Call, text: str) -> list[SessionInfo]:
    try:
        found = await call.store.search_sessions(text, limit=SHOWN)
    except InvalidArgument:
        return []
    return [each for each in found if call.token.root_id in {None, each.root_id}]


async def _keys(call: Call, text: str) -> list[tuple[str, str]]:
    """Return keys of a tree, if the text is a session's id and a prefix of keys."""
    id, _, prefix = text.partition(" ")
    try:
        session = await call.store.find_session(id)
        if not prefix or call.token.root_id not in {None, session.root_id}:
            return []
        found = await session.state.entries(prefix=prefix, limit=SHOWN)
    except (NotFound, InvalidArgument):
        return []
    return [(session.id, each.key) for each in found]


async def _others(call: Call, text: str) -> list[tuple[str, str, tuple[str, ...]]]:
    """Return other things that have this id, prefix of an id, or number."""
    store = call.store
    wanted: dict[str, tuple[str, Callable[[str], Awaitable[Any]]]] = {
        "effect": ("effects", store.find_effect),
        "work item": ("work", store.work.find),
        "pause": ("pauses", store.find_pause),
    }
    found: list[tuple[str, str, tuple[str, ...]]] = []
    with contextlib.suppress(NotFound, InvalidArgument):
        explorations: Explorations[Async] = Explorations(store.runtime)
        explored = await explorations.get(await store.find_session(text))
        found.append(("exploration", explored.id, ("explorations", explored.id)))
    for kind, (part, find) in wanted.items():
        try:
            each = await find(text)
        except (NotFound, InvalidArgument):
            continue
        name = getattr(each, "tool", None) or getattr(each, "type", None) or each.session_id
        found.append((kind, f"{name}, {kind} {each.number}", (part, each.id)))
    return found


def _link(call: Call, parts: tuple[str, ...]) -> str:
    path = "/".join(quote(part, safe="") for part in parts)
    return f"{call.context.options.base_path}/ui/{path}"

"""One session: its facts, its tree, and its conversation."""

from __future__ import annotations

from typing import Annotated, Any
from urllib.parse import quote

import msgspec

from ....answers.shapes import SESSION
from ....records import SessionInfo
from ...messages import Call
from ..conversation import Message, conversation_of, message_of
from ..templates import Commands, api_path
from ..views import PageQuery, Pages, View

routes = Pages()
TREE_MAX = 200
MESSAGES = 50
MESSAGES_MAX = 1_000
Version = Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)]


class TranscriptQuery(PageQuery):
    """Which conversation to show, and how much of it."""

    version: Version = 0
    channel: str = ""
    last: Annotated[int, msgspec.Meta(ge=1, le=MESSAGES_MAX)] = MESSAGES


async def session_view(
    call: Call,
    tab: str,
    *,
    data: Any,
    path: str = "",
    words: tuple[str, ...],
    status: int = 200,
    **given: Any,
) -> View:
    """Return a page of a session, under its name and with its tabs."""
    info: SessionInfo = await call.session.info()
    name = info.name or info.id
    live = ("sessions", info.id, "live")
    return View(
        template=f"session/{tab}.html",
        title=name if tab == "summary" else f"{given.get('key') or tab} - {name}",
        data=data(info) if callable(data) else data,
        commands=Commands.of(f"/sessions/{quote(info.id, safe='')}{path}", *words),
        given={"info": info, "name": name, "tab": tab, **given},
        live=live,
        next_cursor=given.get("next_cursor"),
        status=status,
    )


@routes.page("/sessions/{id}")
async def session_page(call: Call) -> View:
    """Show a session and its tree."""
    root_id = call.session.root_id
    members = await call.store.sessions(root=root_id, limit=TREE_MAX + 1)
    spent = await call.session.spent(tree=True)
    doubtful = await call.session.unresolved()
    pauses = await call.session.pauses(last=1)
    waits = [each for each in pauses if each.state == "waiting"]

    def data(info: SessionInfo) -> Any:
        return {"session": SESSION(info), "tree": list(map(SESSION, members[:TREE_MAX]))}

    return await session_view(
        call,
        "summary",
        data=data,
        words=("sessions", "show", call.session.id),
        tree=_nested(members[:TREE_MAX], root_id),
        is_cut=len(members) > TREE_MAX,
        spent=spent,
        doubtful=doubtful,
        pause=waits[0] if waits else None,
    )


def _nested(members: list[SessionInfo], root_id: str) -> list[tuple[SessionInfo, int]]:
    """Return the sessions of a tree, each below its parent, with its depth."""
    below: dict[str | None, list[SessionInfo]] = {}
    for each in members:
        below.setdefault(None if each.id == root_id else each.parent_id, []).append(each)
    found: list[tuple[SessionInfo, int]] = []
    waiting = [(each, 0) for each in reversed(below.get(None, []))]
    while waiting:
        info, depth = waiting.pop()
        found.append((info, depth))
        waiting += [(each, depth + 1) for each in reversed(below.get(info.id, []))]
    return found


@routes.page("/sessions/{id}/transcript", TranscriptQuery)
async def transcript_page(call: Call) -> View:
    """Show the conversation that a version holds."""
    query, session = call.query, call.session
    loaded: Any = (
        await session.at(query.version, last=query.last)
        if query.version
        else await session.latest(last=query.last)
    )
    channels = {} if loaded is None else loaded.channels
    channel = query.channel or conversation_of(channels)
    items = channels.get(channel)
    items = items if isinstance(items, list) else []
    left_out = 0 if loaded is None else loaded.left_out.get(channel, 0)
    messages: list[Message] = [message_of(each) for each in items]
    more = {"version": query.version or None, "channel": query.channel}
    last = min(query.last * 4, MESSAGES_MAX)
    version = str(query.version or "latest")
    return await session_view(
        call,
        "transcript",
        data={"channel": channel, "left_out": left_out, "messages": items},
        path=api_path(f"/checkpoints/{version}", last=query.last) if loaded else "",
        words=("checkpoints", "show", session.id, *([version] if query.version else [])),
        messages=list(enumerate(messages, left_out)),
        channel=channel,
        left_out=left_out,
        version=None if loaded is None else loaded.version,
        more={**more, "last": last} if left_out and last > query.last else None,
    )

"""The log of events, of all trees or of one session; filtered, paged, exported."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any
from urllib.parse import quote

from ....answers.problems import Refusal, code_of
from ....errors import Compacted, InvalidArgument, SessionNotFound
from ....records import EVENT_KINDS, Event
from ....store import AsyncStore
from ...frames import event_message
from ...messages import Answer, Call, encode
from ..templates import Commands, api_path
from ..views import HEADERS, ListQuery, PageQuery, Pages, View, page_size

routes = Pages()
EVENTS_PER_READ = 500
# How many events a page examines to find those that match.
LOOKED_AT_MAX = 2_000
EXPORTED_MAX = 10_000
JSON_LINES = "application/x-ndjson"


class EventsQuery(ListQuery):
    """Which events: of one session, of kinds that begin with a text."""

    session: str = ""
    kind: str = ""


class ExportQuery(PageQuery):
    """Which events."""

    session: str = ""
    kind: str = ""


@routes.page("/events", EventsQuery, filters=("session",), is_store_wide=True)
async def events_page(call: Call) -> View:
    """Show events, newest first."""
    query, limit, found, looked_at = call.query, page_size(call), [], 0
    last: Event | None = None
    async for event in _newest_first(call):
        looked_at += 1
        last = event
        if _matches(query, event):
            found.append(event)
        if len(found) == limit or looked_at == LOOKED_AT_MAX:
            break
    else:
        last = None
    asked = {"session": query.session or None, "kind": query.kind or None}
    cursor = None if last is None else f"{last.position} {last.root_id}"
    return View(
        template="events.html",
        title="Events",
        data={"events": [event_message(each) for each in found], "next_cursor": cursor},
        commands=_commands(query),
        given={
            "events": found,
            "query": query,
            "asked": asked,
            "exported": EXPORTED_MAX,
            "looked_at": looked_at if len(found) < limit and last is not None else 0,
        },
        next_cursor=cursor,
        live=("live",),
    )


def _commands(query: EventsQuery) -> Commands:
    """Return how to get the same events without a browser; over the API, those of the tree."""
    path = f"/sessions/{quote(query.session, safe='')}/feed" if query.session else "/feed"
    kinds = tuple(each for each in EVENT_KINDS if query.kind and each.startswith(query.kind))
    path = api_path(path, kinds=",".join(kinds))
    if query.kind and not kinds:
        return Commands(api_path("/ui/events", kind=query.kind, format="json"))
    if not query.session:
        return Commands.of(path, "feed", "export", "-", all=True, kind=kinds)
    words = ("feed", "export", "-", query.session)
    return Commands.of(path, *words, own=True, kind=kinds)


@routes.page("/events/export", ExportQuery, is_store_wide=True)
async def export_page(call: Call) -> Answer:
    """Send the newest matching events, one JSON object per line, newest first."""
    lines, looked_at = [], 0
    async for event in _newest_first(call):
        looked_at += 1
        if _matches(call.query, event):
            lines.append(encode(event_message(event)) + b"\n")
        if EXPORTED_MAX in {len(lines), looked_at // 10}:
            break
    name = {"content-disposition": 'attachment; filename="events.jsonl"'}
    return Answer(200, b"".join(lines), {**HEADERS, **name}, content_type=JSON_LINES)


def _matches(query: Any, event: Event) -> bool:
    return event.kind.startswith(query.kind) and query.session in {"", event.session_id}


async def _newest_first(call: Call) -> AsyncIterator[Event]:
    """Yield events before the request's place, of all trees or of a session's own."""
    place, root_id = place_in_all(call), None
    is_filtered = call.query.session or call.query.kind or not hasattr(call.query, "limit")
    count = EVENTS_PER_READ if is_filtered else page_size(call) + 1
    if call.query.session:
        try:
            root_id = (await call.store.find_session(call.query.session)).root_id
        except (SessionNotFound, InvalidArgument) as error:
            raise Refusal(code_of(error), str(error), pointer="session") from None
    while True:
        if root_id is None:
            found = await call.store.latest_events(before=place, limit=count)
        else:
            if place is None:
                place = (root_id, await call.context.sessions.position(root_id) + 1)
            found = await events_up_to(call.store, root_id, place[1] - 1, count)
            found.reverse()
        for event in found:
            yield event
        if not found:
            return
        place = (found[-1].root_id, found[-1].position)


def place_in_all(call: Call) -> tuple[str, int] | None:
    """Return the place in a list of all trees that the request's cursor encodes."""
    cursor = getattr(call.query, "cursor", None)
    if cursor is None:
        return None
    position, _, root_id = cursor.partition(" ")
    if not (position.isascii() and position.isdecimal() and int(position[:17]) > 0 and root_id):
        raise Refusal(
            "invalid_request", "the cursor does not belong to this list", pointer="cursor"
        )
    return root_id, int(position[:17])


async def events_up_to(store: AsyncStore, root_id: str, last: int, count: int) -> list[Event]:
    """Return the events of a tree up to a position, oldest first, as far as they are kept."""
    after = max(last - count, 0)
    if last == after:
        return []
    try:
        return await store.events(root_id, after=after, limit=last - after)
    except Compacted as error:
        kept: int = error.oldest
        if kept >= last:
            return []
        return await store.events(root_id, after=kept, limit=last - kept)

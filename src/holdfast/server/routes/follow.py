"""Following changes: of the shared state, of one tree, of everything."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator
from typing import Annotated, Any

import msgspec

from ...answers.problems import Refusal
from ...feed.follow import EVENTS_PER_READ
from ...records import Event
from ...store import AsyncStore
from .. import pages
from ..channels import Source
from ..endpoints import Endpoints
from ..frames import DEFAULT_KINDS, STATE_KINDS, EventFrames, Frames, StateFrames, event_messages
from ..messages import Answer, Call
from ..stream import Alone, Following
from .keys import Version

routes = Endpoints()

LAST_EVENT = "last-event-id"
Json = Any
Kinds = Annotated[
    str | None, msgspec.Meta(description="Which messages to send, separated by commas.")
]
Values = Annotated[bool, msgspec.Meta(description="Whether messages include values.")]


class StateStreamQuery(msgspec.Struct, forbid_unknown_fields=True):
    """Where to begin, and what to send."""

    after_sequence: Version | None = None
    kinds: Kinds = None
    values: Values = True


class FeedQuery(msgspec.Struct, forbid_unknown_fields=True):
    """Where to begin, and how much."""

    after: Version | None = None
    limit: pages.Limit = pages.PAGE
    kinds: Kinds = None
    values: Values = True


class AllFeedQuery(msgspec.Struct, forbid_unknown_fields=True):
    """Where to begin, and how much."""

    cursor: pages.Cursor | None = None
    limit: pages.Limit = pages.PAGE
    kinds: Kinds = None
    values: Values = True


class FeedShape(msgspec.Struct):
    """A page of a tree's events, oldest first; `next_after` is where to continue."""

    events: list[dict[str, Json]]
    next_after: int
    has_more: bool


class AllFeedShape(msgspec.Struct):
    """A page of all trees' events; `next_cursor` is where to continue."""

    events: list[dict[str, Json]]
    next_cursor: str | None
    has_more: bool


@routes.add(
    "GET",
    "/sessions/{id}/state/stream",
    "read",
    query=StateStreamQuery,
    takes=(LAST_EVENT,),
    answers={200: None},
    problems=("history_compacted", "sequence_in_future"),
    is_followed=True,
)
async def follow_state(call: Call) -> Following:
    """Follow the shared state, as server-sent events or over a WebSocket."""
    after = _last_event(call, call.query.after_sequence)
    root_id, state = call.session.root_id, call.session.state
    if after is not None and not call.is_websocket:
        # A place that cannot be followed from is refused before the stream begins.
        await state.events(after=after, limit=1)

    async def page(place: int) -> list[Frames[Any]]:
        found = await state.changes(after=place, limit=EVENTS_PER_READ)
        return [StateFrames(each, root_id) for each in found]

    async def later(place: int) -> AsyncGenerator[Frames[Any], None]:
        async with contextlib.aclosing(state.watch_changes(after=place)) as changes:
            async for change in changes:
                yield StateFrames(change, root_id)

    source = Source(f"state {root_id}", state.version, page, later)
    kinds = _kinds(call.query.kinds, STATE_KINDS) or DEFAULT_KINDS
    follower = call.context.hub.subscribe(source, after)
    return Following(follower, kinds, call.query.values)


@routes.add(
    "GET",
    "/sessions/{id}/feed",
    "read",
    query=FeedQuery,
    takes=(LAST_EVENT,),
    answers={200: FeedShape},
    problems=("history_compacted",),
    is_followed=True,
)
async def tree_feed(call: Call) -> Answer | Following:
    """Read the events of the session's tree, or follow them (Accept: text/event-stream)."""
    root_id, store = call.session.root_id, call.store
    after, kinds = _last_event(call, call.query.after), _kinds(call.query.kinds, None)
    if not call.wants_events:
        limit = pages.limit_of(call)
        found = await store.events(root_id, after=after or 0, limit=limit + 1)
        page_of_events = found[:limit]
        shown = event_messages(page_of_events, kinds, values=call.query.values)
        reached = page_of_events[-1].position if page_of_events else after or 0
        return Answer(200, FeedShape(shown, reached, len(found) > limit))
    if after is not None and not call.is_websocket:
        await store.events(root_id, after=after, limit=1)

    async def page(place: int) -> list[Frames[Any]]:
        found = await store.events(root_id, after=place, limit=EVENTS_PER_READ)
        return [EventFrames(each, str(each.position)) for each in found]

    async def later(place: int) -> AsyncGenerator[Frames[Any], None]:
        following: Any = store.follow(root_id, after=place)
        async with contextlib.aclosing(following) as events:
            async for event in events:
                yield EventFrames(event, str(event.position))

    async def head() -> int:
        return await call.context.sessions.position(root_id)

    source = Source(f"feed {root_id}", head, page, later)
    follower = call.context.hub.subscribe(source, after)
    return Following(follower, kinds, call.query.values)


@routes.add(
    "GET",
    "/feed",
    "read",
    query=AllFeedQuery,
    takes=(LAST_EVENT,),
    answers={200: AllFeedShape},
    is_followed=True,
    is_store_wide=True,
)
async def all_feeds(call: Call) -> Answer | Following:
    """Read the events of all trees, or follow them; the events of each tree are in order."""
    cursor = call.headers.get(LAST_EVENT) or call.query.cursor
    kinds = _kinds(call.query.kinds, None)
    if call.wants_events:
        await _require_cursor(call.store, cursor)
        follower = Alone(_all_frames(call.store, cursor), cursor or "")
        return Following(follower, kinds, call.query.values)
    limit, found = pages.limit_of(call), []
    reading: Any = call.store.follow_all(after=cursor, wait=False)
    async with contextlib.aclosing(reading) as events:
        async for event in events:
            found.append(event)
            if len(found) > limit:
                break
    page = found[:limit]
    shown = event_messages(page, kinds, values=call.query.values)
    after = page[-1].cursor if page else cursor
    return Answer(200, AllFeedShape(shown, after, len(found) > limit))


async def _all_frames(store: Any, cursor: str | None) -> AsyncGenerator[Frames[Event], None]:
    async with contextlib.aclosing(store.follow_all(after=cursor)) as events:
        async for event in events:
            yield EventFrames(event, event.cursor)


async def _require_cursor(store: AsyncStore, cursor: str | None) -> None:
    """Refuse a cursor of another store before anything is sent."""
    reading: Any = store.follow_all(after=cursor, wait=False)
    async with contextlib.aclosing(reading) as events:
        async for _ in events:
            return


def _last_event(call: Call, after: int | None) -> int | None:
    """Return where to continue: after the last event the client has seen, or as the query says."""
    seen = call.headers.get(LAST_EVENT)
    if seen is None or seen == "":
        return after
    if not seen.isdecimal() or len(seen) > 16:
        raise Refusal(
            "invalid_request", "Last-Event-ID is not an id of this feed", pointer=LAST_EVENT
        )
    return int(seen)


def _kinds(given: str | None, known: tuple[str, ...] | None) -> frozenset[str] | None:
    if given is None:
        return None
    kinds = frozenset(each.strip() for each in given.split(","))
    if known is not None and not kinds <= set(known):
        names = ", ".join(known)
        raise Refusal("invalid_request", f"kinds must be among {names}", pointer="kinds")
    return kinds

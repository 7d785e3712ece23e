"""Following the feeds of all trees: each event once, each tree in order.

There is no order between trees. A cursor is a place in the feeds of one store on one server.
"""

from __future__ import annotations

import base64
from collections.abc import Callable
from dataclasses import fields
from functools import partial

import msgspec
from xxhash import xxh3_64_hexdigest

from ..arguments import require_text, shown
from ..errors import InvalidArgument
from ..kernel.flow import Flow, Stream, perform
from ..kernel.operation import Handle, Op, Runtime, one, query
from ..kernel.schema import read_store_id
from ..kernel.signals import EVERY_TREE
from ..kernel.url import PostgresTarget
from ..records import FollowedEvent
from ..wire import travels
from .events import event_of
from .follow import EVENTS_PER_READ, Page, follow
from .places import READ_SERVER, Found, HorizonPlace, Place, RowPlace

CURSOR_CHARACTERS_MAX = 10_000_000
_ROW_CURSOR = msgspec.json.Decoder(tuple[str, RowPlace]).decode
_HORIZON_CURSOR = msgspec.json.Decoder(tuple[str, HorizonPlace]).decode


@travels
class AllTreesReader(Handle):
    """Reads the feeds of all trees."""

    @query
    def begin(self, after: str | None) -> Op[tuple[str, Place]]:
        """Return the identity of this store on its server, and the place of a cursor."""
        target = self.runtime.target
        origin = yield from read_store_id()
        is_postgres = isinstance(target, PostgresTarget)
        if isinstance(target, PostgresTarget):
            server = yield from one(READ_SERVER, schema=target.schema)
            assert server is not None
            origin = f"{origin} {server['server']} {server['events']}"
        # Short enough for the reason with which a WebSocket is closed.
        origin = xxh3_64_hexdigest(origin.encode())
        if after is None:
            return origin, HorizonPlace() if is_postgres else RowPlace()
        place = _place(after, origin, _HORIZON_CURSOR if is_postgres else _ROW_CURSOR)
        yield from place.require_readable()
        return origin, place

    @query
    def end(self) -> Op[str]:
        """Return the cursor behind what is committed."""
        origin, start = yield from AllTreesReader.begin(self, None)
        return _encoded(origin, (yield from start.end()))

    @query
    def read(self, origin: str, place: Place) -> Op[tuple[list[FollowedEvent], Place, bool]]:
        """Return what comes after a place, the place behind it, and whether that is the end."""
        found = yield from place.read(EVENTS_PER_READ)
        codec = self.runtime.codec
        events = [
            event_of(codec, row, FollowedEvent, _cursor=partial(_cursor, origin, found, number))
            for number, row in enumerate(found.rows, 1)
        ]
        return events, found.after, found.is_end


def follow_all(
    runtime: Runtime, after: str | None, poll_seconds: float, *, wait: bool
) -> Stream[FollowedEvent]:
    """Yield the events of all trees after a cursor, for ever or to the end."""
    if after is not None:
        require_text("after", after, CURSOR_CHARACTERS_MAX)
    reader = AllTreesReader(runtime)
    origin, begin = yield from perform(AllTreesReader.begin, reader, after)

    def read(place: Place) -> Flow[Page[Place, FollowedEvent]]:
        events, behind, is_end = yield from perform(AllTreesReader.read, reader, origin, place)
        return Page(events, behind, is_end=is_end)

    yield from follow(runtime, EVERY_TREE, EVERY_TREE, read, begin, poll_seconds, wait=wait)


def _cursor(origin: str, found: Found, count: int) -> str:
    """Return the cursor after the first `count` of the events read."""
    place = found.after if count == len(found.rows) else found.start.behind(found.rows[:count])
    return _encoded(origin, place)


def _encoded(origin: str, place: Place) -> str:
    known = {each.name: (getattr(place, each.name), each.default) for each in fields(place)}
    told = {name: value for name, (value, default) in known.items() if value != default}
    return base64.urlsafe_b64encode(msgspec.json.encode((origin, told))).decode()


def _place(cursor: str, origin: str, decode: Callable[[bytes], tuple[str, Place]]) -> Place:
    try:
        known, place = decode(base64.urlsafe_b64decode(cursor))
    except (ValueError, msgspec.MsgspecError, RecursionError):
        message = f"after must be a cursor of follow_all, not {shown(cursor)}"
        raise InvalidArgument(message) from None
    if known != origin:
        raise InvalidArgument(
            "after is a cursor of another store, or of this one on another server; start without "
            "a cursor"
        )
    return place

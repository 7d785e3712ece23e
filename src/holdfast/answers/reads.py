"""Reads that are the same in every interface."""

from __future__ import annotations

from ..kernel.operation import Async
from ..state import State
from .shapes import EventsShape, event_shape


async def events_page(state: State[Async], since: int, limit: int) -> EventsShape:
    """Return mutations after a sequence, oldest first."""
    found = await state.events(after=since, limit=limit)
    has_more = len(found) == limit and await state.version() > found[-1].sequence
    return EventsShape(list(map(event_shape, found)), has_more)

"""The shared state as a log of mutations: append one, read them in order."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec

from ...answers.problems import Refusal
from ...answers.reads import events_page
from ...answers.shapes import AppendedShape, EventsShape
from ...clock import iso
from ...state.records import Entry, StateSnapshot
from ..endpoints import Endpoints
from ..messages import Answer, Call
from ..replay import HEADER, write
from .keys import WRITES, Version

routes = Endpoints()

EVENTS = "/sessions/{id}/state/events"
Json = Any


class EventsQuery(msgspec.Struct, forbid_unknown_fields=True):
    """Which part of the log to read."""

    since: Version = 0
    limit: Annotated[int, msgspec.Meta(ge=1)] = 100


class _Event(msgspec.Struct, tag_field="type", forbid_unknown_fields=True, kw_only=True):
    actor: str | None = None
    """The session that makes the change; only the session of the path is allowed."""


class _KeyEvent(_Event):
    key: str


class SetEvent(_KeyEvent, tag="set"):
    """Set a key."""

    value: Json


class DeleteEvent(_KeyEvent, tag="delete"):
    """Delete a key."""


class PatchEvent(_KeyEvent, tag="patch"):
    """Merge into the object of a key."""

    patch: dict[str, Json]


class IncrementEvent(_KeyEvent, tag="increment"):
    """Add to a number."""

    delta: int | float = 1


class CounterAddEvent(_KeyEvent, tag="counter_add"):
    """Add to a counter that several sessions share."""

    value: int | float


class AppendEvent(_KeyEvent, tag="append"):
    """Append to a list."""

    items: list[Json]


class SetAddEvent(_KeyEvent, tag="set_add"):
    """Add a member to a set."""

    item: Json


class SetRemoveEvent(_KeyEvent, tag="set_remove"):
    """Remove a member from a set."""

    item: Json


class InitEvent(_Event, tag="init"):
    """Set the first document of a state without keys."""

    payload: dict[str, Json]


class FullReplaceEvent(_Event, tag="full_replace"):
    """Replace the whole document unconditionally."""

    payload: dict[str, Json]


EventBody = (
    SetEvent
    | DeleteEvent
    | PatchEvent
    | IncrementEvent
    | CounterAddEvent
    | AppendEvent
    | SetAddEvent
    | SetRemoveEvent
    | InitEvent
    | FullReplaceEvent
)


@routes.add(
    "POST",
    EVENTS,
    "write",
    body=EventBody,
    takes=(HEADER,),
    answers={201: AppendedShape},
    problems=("version_conflict", "type_mismatch", "key_not_found", *WRITES),
    example={"type": "set", "key": "tasks_completed", "value": 5},
)
async def append_event(call: Call) -> Answer:
    """Append one mutation; it applies to the current state."""
    event = call.body
    if event.actor not in {None, call.session.id}:
        raise Refusal("forbidden", f"{call.session.id!r} cannot write for {event.actor!r}")
    return await write(call, lambda session: _applied(session.state, event), _appended)


@routes.add(
    "GET",
    EVENTS,
    "read",
    query=EventsQuery,
    answers={200: EventsShape},
    problems=("history_compacted", "sequence_in_future"),
)
async def list_events(call: Call) -> Answer:
    """Read mutations after a sequence, oldest first."""
    limit = min(call.query.limit, call.context.options.limits.page)
    return Answer(200, await events_page(call.session.state, call.query.since, limit))


def _applied(state: Any, event: Any) -> Any:
    """Apply the change that an event describes."""
    match event:
        case SetEvent():
            return state.set(event.key, event.value)
        case DeleteEvent():
            return state.delete(event.key)
        case PatchEvent():
            return state.merge(event.key, event.patch)
        case IncrementEvent():
            return state.increment(event.key, event.delta)
        case CounterAddEvent():
            return state.increment(event.key, event.value)
        case AppendEvent():
            return state.append(event.key, event.items)
        case SetAddEvent():
            return state.add(event.key, event.item)
        case SetRemoveEvent():
            return state.remove(event.key, event.item)
        case InitEvent():
            return state.initialize(event.payload)
        case _:
            return state.replace(event.payload)


def _appended(done: Entry | StateSnapshot) -> Answer:
    if isinstance(done, StateSnapshot):
        sequence, at = done.version, max(done.times.values(), default=0)
    else:
        sequence, at = done.sequence, done.updated_at
    return Answer(201, AppendedShape(sequence, sequence, iso(at)))

"""The events of a tree as lanes, the tree at any moment, and two moments compared."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import msgspec

from ....checkpoints.diff import Diff, compare
from ....errors import Compacted
from ....records import Event
from ...frames import event_message
from ...messages import Call
from ..templates import api_path
from ..views import ROWS, ROWS_MAX, PageQuery, Pages, View
from .events import events_up_to
from .session import session_view

routes = Pages()
EVENTS = 200
LANES_MAX = 40
# How far to search for the sequence of the shared state if no event nearby has it.
LOOK_EVENTS, LOOKS = 1_000, 3
# Of two moments, so many keys are read alone; where more were changed, the whole state is.
BETWEEN_MAX, KEYS_MAX = 500, 20
Position = Annotated[int, msgspec.Meta(ge=1, le=2**53)]
Look = Literal["checkpoint", "state", "effect", "doubt", "session", "other"]


class TimelineQuery(PageQuery):
    """The moment to show, and the last event to draw."""

    at: Position | None = None
    until: Position | None = None


class MomentsQuery(PageQuery):
    """The two moments to compare."""

    a: Position
    b: Position


@dataclass(frozen=True, slots=True)
class Mark:
    """An event, and where and how it is drawn."""

    event: Event
    lane: int
    percent: float
    look: Look
    words: str


@dataclass(frozen=True, slots=True)
class Moment:
    """A tree as it was after an event."""

    event: Event
    sequence: int | None
    """Of the shared state; None if no event nearby has it."""
    versions: dict[str, int]
    """Of the sessions that are drawn."""


@routes.page("/sessions/{id}/timeline", TimelineQuery)
async def timeline_page(call: Call) -> View:
    """Show the events of a tree, a lane for each session, and the tree at one of them."""
    newest = await call.context.sessions.position(call.session.root_id)
    until = min(call.query.until or newest, newest)
    events = await _window(call, until)
    at = min(max(call.query.at or until, events[0].position), until) if events else 0
    lanes = list(dict.fromkeys(each.session_id for each in events))
    drawn = _marks(events, lanes)
    moment = await _moment(call, events, at) if events else None
    given: dict[str, Any] = {"entries": None, "is_more": False}
    if moment is not None:
        given = await _state(call, moment)
    return await session_view(
        call,
        "timeline",
        data={
            "newest": newest,
            "at": at,
            "state_sequence": None if moment is None else moment.sequence,
            "versions": {} if moment is None else moment.versions,
            "events": [event_message(each) for each in events],
        },
        path=api_path("/feed", after=max(until - EVENTS, 0), limit=EVENTS),
        words=("feed", "export", "-", call.session.root_id),
        drawn=drawn,
        marks_at=next((each for each in drawn if each.event.position == at), None),
        lanes=lanes[:LANES_MAX],
        lanes_left_out=max(len(lanes) - LANES_MAX, 0),
        moment=moment,
        at=at,
        first=events[0].position if events else 0,
        until=until,
        newest=newest,
        step=EVENTS,
        **given,
    )


async def _window(call: Call, until: int, count: int = EVENTS) -> list[Event]:
    return await events_up_to(call.store, call.session.root_id, until, count)


def _marks(events: Sequence[Event], lanes: Sequence[str]) -> list[Mark]:
    rows = {id: min(row, LANES_MAX - 1) for row, id in enumerate(lanes)}
    wide = max(len(events) - 1, 1)
    return [
        Mark(each, rows[each.session_id], 1 + 98 * place / wide, _look(each.kind), words_of(each))
        for place, each in enumerate(events)
    ]


def _look(kind: str) -> Look:
    if kind == "checkpoint_saved":
        return "checkpoint"
    if kind == "effect_unknown":
        return "doubt"
    for start, look in (("state_", "state"), ("effect_", "effect"), ("session_", "session")):
        if kind.startswith(start):
            return look  # type: ignore[return-value]
    return "other"


def words_of(event: Event) -> str:
    """Return a short description of an event."""
    data = event.data if isinstance(event.data, dict) else {}
    what = event.kind.replace("_", " ")
    match event.kind:
        case "checkpoint_saved":
            about = f"version {data.get('version', '?')}"
        case "state_changed":
            about = f"{data.get('operation', '')} {data.get('key') or 'the document'}"
            about += f" ({data['reason']})" if data.get("reason") else ""
        case "session_status_changed":
            about = f"to {data.get('to', '?')}"
        case _:
            about = str(data.get("tool") or data.get("agent") or data.get("type") or "")
    return f"{what}: {about}" if about else what


async def _moment(call: Call, events: Sequence[Event], at: int) -> Moment:
    """Return the tree as it was after the event at a position."""
    before = [each for each in events if each.position <= at]
    after = [each for each in events if each.position > at]
    sequence = await _sequence(call, before, after)
    versions: dict[str, int] = {}
    for event in reversed(after):
        if event.kind == "checkpoint_saved" and "version" in event.data:
            versions[event.session_id] = event.data["version"] - 1
    for event in before:
        if event.kind == "checkpoint_saved" and "version" in event.data:
            versions[event.session_id] = event.data["version"]
    return Moment(before[-1], sequence, {id: n for id, n in versions.items() if n})


async def _sequence(call: Call, before: Sequence[Event], after: Sequence[Event]) -> int | None:
    """Return the sequence of the shared state between two series of events."""
    if not await call.session.state.version():
        return 0
    for _ in range(LOOKS):
        for event in reversed(before):
            if (found := await _told(call, event)) is not None:
                return found
        # The next mutation is based on the state that we are looking for.
        for event in after:
            if event.kind == "state_changed" and "sequence" in event.data:
                return int(event.data["sequence"]) - 1
        first = before[0].position
        if first == 1:
            return 0
        before, after = await _window(call, first - 1, LOOK_EVENTS), ()
        if not before:
            break
    return None


async def _told(call: Call, event: Event) -> int | None:
    """Return the sequence in an event: that of a mutation, or the one saved with a version."""
    if event.kind == "state_changed":
        sequence: int | None = event.data.get("sequence")
        return sequence
    version = event.data.get("version") if event.kind == "checkpoint_saved" else None
    if version is None:
        return None
    session = await call.store.find_session(event.session_id)
    for each in await session.history(before=version + 1, limit=1):
        if each.version == version:
            return each.state_sequence
    return None


async def _state(call: Call, moment: Moment) -> dict[str, Any]:
    """Return the shared state at a moment, as its rows are shown; None if it is not known."""
    if moment.sequence is None:
        return {"entries": None, "is_more": False}
    try:
        entries = await call.session.state.entries(
            limit=ROWS + 1, values=True, at_sequence=moment.sequence
        )
    except Compacted:
        return {"entries": None, "is_more": False}
    return {"entries": entries[:ROWS], "is_more": len(entries) > ROWS}


@routes.page("/sessions/{id}/moments", MomentsQuery)
async def moments_page(call: Call) -> View:
    """Show what differs between a tree at two moments: its shared state, and its versions."""
    a, b = await _found(call, call.query.a), await _found(call, call.query.b)
    diff = await _diff(call, a, b)
    known = sorted({*a.versions, *b.versions})
    versions = {id: (a.versions.get(id), b.versions.get(id)) for id in known}
    changed = {id: each for id, each in versions.items() if each[0] != each[1]}
    sequences = {"before": a.sequence, "after": b.sequence}
    return await session_view(
        call,
        "moments",
        data={
            "a": event_message(a.event),
            "b": event_message(b.event),
            "state": None if diff is None else diff.to_dict()["channels"],
            "state_sequences": sequences,
            "versions": {id: {"a": one, "b": other} for id, (one, other) in changed.items()},
        },
        path=api_path("/feed", after=a.event.position - 1, limit=EVENTS),
        words=("feed", "export", "-", call.session.root_id),
        a=a,
        b=b,
        diff=diff,
        versions=changed,
        shown=ROWS_MAX,
        most=ROWS_MAX,
        words_of=words_of,
    )


async def _found(call: Call, position: int) -> Moment:
    newest = await call.context.sessions.position(call.session.root_id)
    position = min(position, newest)
    events = await _window(call, min(position + EVENTS // 2, newest))
    if not events or events[0].position > position:
        raise Compacted(f"the events up to position {position} have been pruned", oldest=position)
    return await _moment(call, events, position)


async def _diff(call: Call, a: Moment, b: Moment) -> Diff | None:
    """Return what differs in the shared state; None if it is not known at one of them."""
    if a.sequence is None or b.sequence is None:
        return None
    state = call.session.state
    try:
        keys = await _changed(call, *sorted((a.sequence, b.sequence)))
        if keys is None:
            old, new = await state.snapshot(a.sequence), await state.snapshot(b.sequence)
            return compare(old.document, new.document)
        before, after = [await _values(call, keys, each.sequence) for each in (a, b)]
    except Compacted:
        return None
    return compare(before, after)


async def _changed(call: Call, low: int, high: int) -> list[str] | None:
    """Return the keys that mutations between two sequences name; None if these are too many."""
    if low == high:
        return []
    events = await call.session.state.events(after=low, limit=BETWEEN_MAX)
    keys = {each.key for each in events if each.sequence <= high}
    is_whole = bool(events) and events[-1].sequence >= high
    if not is_whole or None in keys or len(keys) > KEYS_MAX:
        return None
    return sorted(keys)


async def _values(call: Call, keys: Sequence[str], sequence: int | None) -> dict[str, Any]:
    """Return the values that keys had at a sequence."""
    found = {key: await call.session.state.entry(key, at_sequence=sequence) for key in keys}
    return {key: each.value for key, each in found.items() if each and not each.is_deleted}

"""The messages sent to followers: each change is encoded once for all of them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final, Generic, TypeVar

from websockets.frames import Frame, Opcode

from ..answers.shapes import mutation_shape
from ..clock import iso
from ..records import Event
from ..state.records import Entry, StateChange
from .messages import encode

# The ASGI extension that writes packed frames, and is told the place of a follower.
PACKED: Final = "holdfast.packed"
VALUE_BYTES_MAX = 8_192
VALUES = ("value", "patch", "event", "data")
STATE_KINDS = ("state_key_updated", "state_key_deleted", "state_updated", "state_event")
# By default, followers get messages about keys and documents; the log is sent on request.
DEFAULT_KINDS = frozenset(STATE_KINDS[:3])

T = TypeVar("T")


@dataclass(frozen=True)
class Frames(Generic[T]):
    """The messages of one change; they share one place, after which a follower continues."""

    item: T
    place: str

    def of(self, kinds: frozenset[str] | None, *, values: bool) -> list[tuple[str, str]]:
        """Return the messages that a follower wants, with their kinds."""
        found = self._whole if values else self._brief
        return [each for each in found if kinds is None or each[0] in kinds]

    def packed(self, kinds: frozenset[str] | None, *, values: bool) -> bytes:
        """Return them as WebSocket frames, built once for all followers that want the same."""
        wanted = (kinds, values)
        found = self._packed.get(wanted)
        if found is None:
            texts = (text.encode() for _, text in self.of(kinds, values=values))
            frames = (Frame(Opcode.TEXT, text).serialize(mask=False) for text in texts)
            found = self._packed[wanted] = b"".join(frames)
        return found

    @cached_property
    def _packed(self) -> dict[tuple[frozenset[str] | None, bool], bytes]:
        return {}

    @cached_property
    def size(self) -> int:
        """The length of the messages in characters, with all values."""
        return sum(len(text) for _, text in self._whole)

    @cached_property
    def _whole(self) -> list[tuple[str, str]]:
        return [(each["type"], encode(each).decode()) for each in self._told()]

    @cached_property
    def _brief(self) -> list[tuple[str, str]]:
        return [(each["type"], encode(_without_values(each)).decode()) for each in self._told()]

    def _told(self) -> Iterator[dict[str, Any]]:
        raise NotImplementedError


class StateFrames(Frames[StateChange]):
    """A change to the shared state."""

    def __init__(self, change: StateChange, root_id: str) -> None:
        super().__init__(change, str(change.event.sequence))
        object.__setattr__(self, "root_id", root_id)

    root_id: str

    def _told(self) -> Iterator[dict[str, Any]]:
        event = self.item.event
        place = {"root_session_id": self.root_id, "sequence": event.sequence}
        when = {"timestamp": iso(event.created_at)}
        by = event.updated_by
        if event.key is None:
            patch = {
                each.key: None if each.is_deleted else each.value for each in self.item.entries
            }
            yield {
                "type": "state_updated",
                **place,
                "version": event.sequence,
                "changed_by": by,
                "patch": patch,
                **when,
            }
        for entry in self.item.entries:
            yield _key_message(entry, place, when)
        mutation = mutation_shape(event)
        yield {"type": "state_event", **place, "event": mutation, "session_id": by, **when}


def _without_values(message: dict[str, Any]) -> dict[str, Any]:
    return {name: each for name, each in message.items() if name not in VALUES}


def _key_message(entry: Entry, place: dict[str, Any], when: dict[str, str]) -> dict[str, Any]:
    by = entry.updated_by
    if entry.is_deleted:
        told = {"key": entry.key, "version": entry.version, "deleted_by": by, "changed_by": by}
        return {"type": "state_key_deleted", **place, **told, **when}
    message: dict[str, Any] = {
        "type": "state_key_updated",
        **place,
        "key": entry.key,
        "version": entry.version,
        "updated_by": by,
        "changed_by": by,
        **when,
    }
    if len(encode(entry.value)) <= VALUE_BYTES_MAX:
        message["value"] = entry.value
    else:
        message["value_omitted"] = True
    return message


def event_message(event: Event) -> dict[str, Any]:
    """Return an event of a feed as a response shows it."""
    return {
        "type": event.kind,
        "root_session_id": event.root_id,
        "position": event.position,
        "session_id": event.session_id,
        "data": event.data,
        "timestamp": iso(event.created_at),
    }


def event_messages(
    events: Iterable[Event], kinds: frozenset[str] | None, *, values: bool
) -> list[dict[str, Any]]:
    """Return the wanted events of a page."""
    wanted = [event_message(each) for each in events if kinds is None or each.kind in kinds]
    return wanted if values else [_without_values(each) for each in wanted]


class EventFrames(Frames[Event]):
    """An event of a tree's feed, or of all feeds."""

    def _told(self) -> Iterator[dict[str, Any]]:
        yield event_message(self.item)

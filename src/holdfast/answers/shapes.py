"""The JSON shapes of responses: records of the store, with times in ISO 8601."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from ..clock import iso
from ..peers import Answer, Artifact, Decision, Pause, PeerCall
from ..records import Checkpoint, Effect, LoadedCheckpoint, SessionInfo
from ..state.records import Entry, StateEvent, StateSnapshot
from ..work.items import Item
from .records import Shape

Json = Any
CHECKPOINT = Shape("Checkpoint", Checkpoint)
LOADED = Shape("LoadedCheckpoint", LoadedCheckpoint)
EFFECT = Shape("Effect", Effect)
SESSION = Shape("Session", SessionInfo, more={"activity": (str, lambda info: info.activity)})
ITEM = Shape(
    "WorkItem",
    Item,
    names=Item.__annotations__,
    leave_out=("driving_fence", "session_number", "stored_state", "is_held", "lease_seconds"),
    more={
        "status": (str, lambda item: item.status),
        "waits_for": (str | None, lambda item: item.waits_for),
        "input": (Any, lambda item: item.input),
        "output": (Any, lambda item: item.output),
        "error": (Any, lambda item: item.error),
        "last_progress": (Any, lambda item: item.last_progress),
    },
)
ARTIFACT = Shape("Artifact", Artifact, leave_out=("returned",))
ANSWER = Shape(
    "PeerAnswer",
    Answer,
    leave_out=("artifacts",),
    more={"artifacts": (ARTIFACT.many, lambda answer: list(map(ARTIFACT, answer.artifacts)))},
)
PEER_CALL = Shape(
    "PeerCall",
    PeerCall,
    leave_out=("answer", "late", "open_effects"),
    more={
        "answer": ANSWER.optional("answer"),
        "late": ANSWER.optional("late"),
        "open_effects": (
            EFFECT.many | None,
            lambda call: (
                None if call.open_effects is None else list(map(EFFECT, call.open_effects))
            ),
        ),
    },
)
DECISION = Shape("Decision", Decision)
PAUSE = Shape(
    "Pause", Pause, leave_out=("decision",), more={"decision": DECISION.optional("decision")}
)


class KeyShape(msgspec.Struct, omit_defaults=True):
    """One key of the shared state."""

    key: str
    value: Json
    version: int
    updated_at: str
    updated_by: str
    changed_by: str
    sequence: int
    created: bool = False


class KeyListed(msgspec.Struct, omit_defaults=True):
    """One key of a list; its value is included only on request."""

    key: str
    version: int
    updated_at: str
    updated_by: str
    sequence: int
    value: Json | msgspec.UnsetType = msgspec.UNSET


class KeysShape(msgspec.Struct):
    """A page of keys, sorted."""

    keys: list[KeyListed]
    next_cursor: str | None


class OperatedShape(KeyShape):
    """One key after an operation; an increment includes the previous number, or null if none."""

    previous: int | float | msgspec.UnsetType | None = msgspec.UNSET


class KeyInState(msgspec.Struct):
    """One key in the whole state."""

    value: Json
    version: int
    updated_at: str
    updated_by: str


class StateShape(msgspec.Struct, omit_defaults=True):
    """The whole state at one moment."""

    root_session_id: str
    keys: dict[str, KeyInState]
    state: dict[str, Json]
    version: int
    global_version: int
    last_sequence: int
    created_at: str
    updated_at: str
    materialized_at: str
    sequence: int | None = None


class BatchResult(msgspec.Struct):
    """What one operation of a batch did."""

    key: str
    status: str
    version: int


class BatchShape(msgspec.Struct):
    """What a batch did."""

    applied: bool
    results: list[BatchResult]


class AppendedShape(msgspec.Struct):
    """The event that a mutation was recorded as."""

    event_id: int
    sequence_number: int
    timestamp: str


class EventsShape(msgspec.Struct):
    """A page of mutations, oldest first."""

    events: list[dict[str, Json]]
    has_more: bool


class VersionShape(msgspec.Struct, omit_defaults=True):
    """A key as one change left it."""

    key: str
    value: Json
    version: int
    sequence: int
    updated_at: str
    updated_by: str
    operation: str
    deleted: bool = False
    idempotency_key: str | None = None


class HistoryShape(msgspec.Struct):
    """A page of a key's changes, newest first."""

    history: list[VersionShape]
    next_cursor: str | None


def key_shape(entry: Entry) -> KeyShape:
    """Return a key as a response shows it."""
    return KeyShape(
        entry.key,
        entry.value,
        entry.version,
        iso(entry.updated_at),
        entry.updated_by,
        entry.updated_by,
        entry.sequence,
        entry.is_created,
    )


def operated_shape(entry: Entry, *, is_increment: bool) -> OperatedShape:
    """Return a key as the response to an operation shows it."""
    previous = entry.previous if is_increment else msgspec.UNSET
    return OperatedShape(**msgspec.structs.asdict(key_shape(entry)), previous=previous)


def listed_shape(entry: Entry, *, values: bool) -> KeyListed:
    """Return a key as a list shows it."""
    value = entry.value if values else msgspec.UNSET
    place = (iso(entry.updated_at), entry.updated_by, entry.sequence)
    return KeyListed(entry.key, entry.version, *place, value)


def version_shape(entry: Entry) -> VersionShape:
    """Return a key as a change left it."""
    return VersionShape(
        entry.key,
        entry.value,
        entry.version,
        entry.sequence,
        iso(entry.updated_at),
        entry.updated_by,
        entry.operation or "",
        entry.is_deleted,
        entry.idempotency_key,
    )


def key_in_state(snapshot: StateSnapshot, key: str) -> KeyInState:
    """Return a key as the whole state shows it."""
    return KeyInState(
        snapshot.document[key],
        snapshot.versions[key],
        iso(snapshot.times[key]),
        snapshot.writers[key],
    )


def state_shape(
    snapshot: StateSnapshot, created_at: int, *, sequence: int | None = None
) -> StateShape:
    """Return the whole state as a response shows it."""
    updated_at = iso(max(snapshot.times.values(), default=created_at))
    keys = {key: key_in_state(snapshot, key) for key in snapshot.document}
    version = snapshot.version
    return StateShape(
        root_session_id=snapshot.root_id,
        keys=keys,
        state=snapshot.document,
        version=version,
        global_version=version,
        last_sequence=version,
        created_at=iso(created_at),
        updated_at=updated_at,
        materialized_at=updated_at,
        sequence=sequence,
    )


# The names of an operation and of its argument in events.
EVENT_TYPES: Mapping[str, tuple[str, str]] = {
    "set": ("set", "value"),
    "merge": ("patch", "patch"),
    "increment": ("increment", "delta"),
    "append": ("append", "items"),
    "add": ("set_add", "item"),
    "remove": ("set_remove", "item"),
    "min": ("min", "value"),
    "max": ("max", "value"),
    "init": ("init", "payload"),
    "full_replace": ("full_replace", "payload"),
    "patch": ("patch", "patch"),
    "restore": ("restore", "payload"),
}


def mutation_shape(event: StateEvent) -> dict[str, Json]:
    """Return a mutation as it was requested."""
    told, argument = EVENT_TYPES.get(event.operation, (event.operation, None))
    shape: dict[str, Json] = {"type": told, "key": event.key}
    if argument is not None:
        shape[argument] = event.value
    if event.deleted:
        shape["deleted"] = list(event.deleted)
    return shape


def event_shape(event: StateEvent) -> dict[str, Json]:
    """Return a mutation with its place in the history."""
    shape = {
        "event_id": event.sequence,
        "seq": event.sequence,
        **mutation_shape(event),
        "session_id": event.updated_by,
        "timestamp": iso(event.created_at),
    }
    if event.version is not None:
        shape["version"] = event.version
    if event.idempotency_key is not None:
        shape["idempotency_key"] = event.idempotency_key
    return shape


def batch_shape(entries: Iterable[Entry]) -> BatchShape:
    """Return what a batch did."""
    return BatchShape(True, [BatchResult(e.key, "success", e.version) for e in entries])

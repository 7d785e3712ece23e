"""The tools: shared state, and the session's own effects, checkpoints, pauses and answer."""

from __future__ import annotations

import hashlib
from typing import Annotated, Any, Literal

import msgspec

from ..answers.problems import Refusal
from ..answers.reads import events_page
from ..answers.records import struct
from ..answers.shapes import (
    CHECKPOINT,
    EFFECT,
    ITEM,
    LOADED,
    PAUSE,
    SESSION,
    KeyInState,
    key_in_state,
)
from ..clock import iso
from ..codec import from_json
from ..errors import InvalidValue, KeyNotFound, VersionConflict
from ..peers.records import Receipt
from ..records import EffectStatus, Kind, Status
from ..state.records import Entry
from ..work.items import WorkStatus
from .caller import Caller
from .table import Arguments, Tools, WriteArguments

tools = Tools()

PAGE, PAGE_MAX = 100, 1_000
Json = Any
Key = Annotated[
    str,
    msgspec.Meta(
        min_length=1,
        max_length=256,
        description="The name of the key. Dots are part of the name; they do not address a path.",
    ),
]
JsonText = Annotated[str, msgspec.Meta(description="JSON text; a string must include its quotes.")]
JsonList = Annotated[str, msgspec.Meta(description="A JSON array of items, as text.")]
JsonObject = Annotated[str, msgspec.Meta(description="A JSON object, as text.")]
Seen = Annotated[
    int,
    msgspec.Meta(ge=1, le=2**53, description="Delete only if the key is still at this version."),
]
Version = Annotated[int, msgspec.Meta(ge=1, le=2**53, description="The number of the version.")]
Before = Annotated[
    int, msgspec.Meta(ge=1, le=2**53, description="The `next_before` of the previous page.")
]
Expected = Annotated[
    int,
    msgspec.Meta(
        ge=0,
        le=2**53,
        description="Write only if the key is still at this version; 0: only if it does not exist.",
    ),
]
StateVersion = Annotated[
    int, msgspec.Meta(ge=0, le=2**53, description="Write only if `global_version` is still this.")
]
Items = Annotated[
    int,
    msgspec.Meta(
        ge=1, le=2**31 - 1, description="Return only this many items from the end of each list."
    ),
]
Limit = Annotated[int, msgspec.Meta(ge=1, le=PAGE_MAX, description="Return at most this many.")]
Sequence = Annotated[
    int,
    msgspec.Meta(
        ge=0, le=2**53, description="The last sequence you have seen; 0 to start at the beginning."
    ),
]
After = Annotated[
    int,
    msgspec.Meta(
        ge=0, le=2**53, description="The `next_after` of the previous page; 0 for the first page."
    ),
]


class GetArguments(Arguments, kw_only=True):
    """The key to read, or none for all keys."""

    key: Key | None = None


class SetArguments(WriteArguments, kw_only=True):
    """A key and its new value."""

    key: Key
    value: JsonText
    version: Expected | None = None


class DeleteArguments(WriteArguments, kw_only=True):
    """The key to delete."""

    key: Key
    version: Seen | None = None


class IncrementArguments(WriteArguments, kw_only=True):
    """A key and the number to add."""

    key: Key
    delta: int | float = 1


class AppendArguments(WriteArguments, kw_only=True):
    """A key and the items to append."""

    key: Key
    items: JsonList


class PatchArguments(WriteArguments, kw_only=True):
    """The object to merge."""

    patch: JsonObject
    version: StateVersion | None = None


class ChangesArguments(Arguments, kw_only=True):
    """Where to continue, and how many changes to return."""

    since_sequence: Sequence = 0
    limit: Limit = PAGE


class EffectsArguments(Arguments, kw_only=True):
    """Which effects to list."""

    status: EffectStatus | None = None
    after: After = 0
    limit: Limit = PAGE


class CheckpointsArguments(Arguments, kw_only=True):
    """Which versions to list."""

    kind: Kind | None = None
    before: Before | None = None
    limit: Limit = PAGE


class CheckpointArguments(Arguments, kw_only=True):
    """Which version to read, and how much of it."""

    version: Version | None = None
    last: Items | None = None


class SessionsArguments(Arguments, kw_only=True):
    """Which sessions to list."""

    status: Status | None = None
    after: After = 0
    limit: Limit = PAGE


class WorkArguments(Arguments, kw_only=True):
    """Which work items to list."""

    status: WorkStatus | None = None
    before: Before | None = None
    limit: Limit = PAGE


class AnswerArguments(Arguments, kw_only=True):
    """The answer to the request that this session serves."""

    result: JsonText
    status: Literal["ok", "error"] = "ok"


class OneKey(KeyInState):
    """One key."""

    key: str


class AllKeys(msgspec.Struct):
    """All keys at one moment."""

    root_session_id: str
    keys: dict[str, KeyInState]
    global_version: int


class SetResult(msgspec.Struct):
    """The new version of the key."""

    key: str
    version: int
    sequence: int
    conditional: bool
    """Whether `version` was given; if not, any existing value was overwritten."""


class DeleteResult(msgspec.Struct):
    """Whether the key existed."""

    key: str
    deleted: bool
    version: int | None = None


class IncrementResult(msgspec.Struct):
    """The new value of the number."""

    key: str
    value: int | float
    version: int
    sequence: int


class AppendResult(msgspec.Struct):
    """The new length of the array."""

    key: str
    length: int
    version: int
    sequence: int


class PatchResult(msgspec.Struct):
    """The new versions of the keys in the patch, and the keys that it deleted."""

    root_session_id: str
    global_version: int
    versions: dict[str, int]
    deleted: list[str]


class ChangesResult(msgspec.Struct):
    """Changes, oldest first; pass `last_sequence` as `since_sequence` to continue."""

    events: list[dict[str, Json]]
    has_more: bool
    last_sequence: int


EffectsResult = struct(
    "EffectsResult",
    "Effects, oldest first; pass `next_after` as `after` to get the next page.",
    effects=EFFECT.many,
    next_after=int | None,
)
PausesResult = struct("PausesResult", "Pauses, oldest first.", pauses=PAUSE.many)


class AnswerResult(msgspec.Struct):
    """Whether the answer counted: a `duplicate` or `late` one changes nothing."""

    ask_id: str
    receipt: Receipt


CheckpointsResult = struct(
    "CheckpointsResult",
    "Versions, newest first; pass `next_before` as `before` to get the next page.",
    checkpoints=CHECKPOINT.many,
    next_before=int | None,
)


SessionsResult = struct(
    "SessionsResult",
    "Sessions, oldest first; pass `next_after` as `after` to get the next page.",
    sessions=SESSION.many,
    next_after=int | None,
)
WorkResult = struct(
    "WorkResult",
    "Work items, newest first; pass `next_before` as `before` to get the next page.",
    items=ITEM.many,
    next_before=int | None,
)


@tools.add("Read shared state", "read", takes=GetArguments, gives=OneKey | AllKeys)
async def state_get(caller: Caller, given: GetArguments) -> OneKey | AllKeys:
    """Read the state that all agents of this session's tree share: one key with its version, or
    every key if `key` is omitted. State is durable and is kept until the session tree is deleted.
    """
    return await read_state(caller, given.key)


@tools.add(
    "Set a key of shared state",
    "write",
    takes=SetArguments,
    gives=SetResult,
    is_destructive=True,
)
async def state_set(caller: Caller, given: SetArguments) -> SetResult:
    """Set a key of the shared state to a JSON value. Pass the `version` that you read, so that no
    other agent's change is lost: if the key has changed since, the call fails with
    `version_conflict`, which includes the current version and value, and you decide again. Without
    `version`, any existing value is overwritten.
    """
    value = _parsed(caller, "value", given.value)
    entry: Entry = await caller.session.state.set(
        given.key, value, if_version=given.version, idempotency_key=_idempotency_key(caller, given)
    )
    return SetResult(entry.key, entry.version, entry.sequence, given.version is not None)


@tools.add(
    "Delete a key of shared state",
    "write",
    takes=DeleteArguments,
    gives=DeleteResult,
    is_destructive=True,
)
async def state_delete(caller: Caller, given: DeleteArguments) -> DeleteResult:
    """Delete a key of the shared state; with `version`, only if the key is still at that version.
    `deleted` is false if the key does not exist.
    """
    try:
        entry: Entry = await caller.session.state.delete(
            given.key,
            if_version=given.version,
            idempotency_key=_idempotency_key(caller, given),
        )
    except KeyNotFound:
        return DeleteResult(given.key, deleted=False)
    except VersionConflict as conflict:
        # A missing key is reported as such, whatever version was expected.
        if conflict.current_version == 0:
            return DeleteResult(given.key, deleted=False)
        raise
    return DeleteResult(entry.key, deleted=True, version=entry.version)


@tools.add(
    "Add to a number in shared state",
    "write",
    takes=IncrementArguments,
    gives=IncrementResult,
    is_idempotent=False,
)
async def state_increment(caller: Caller, given: IncrementArguments) -> IncrementResult:
    """Add to a number in the shared state; a missing key starts at 0. Concurrent increments by
    several agents all count. Pass an `idempotency_key` if you may have to retry the call.
    """
    entry: Entry = await caller.session.state.increment(
        given.key, given.delta, idempotency_key=_idempotency_key(caller, given)
    )
    return IncrementResult(entry.key, entry.value, entry.version, entry.sequence)


@tools.add(
    "Append to an array in shared state",
    "write",
    takes=AppendArguments,
    gives=AppendResult,
    is_idempotent=False,
)
async def state_append(caller: Caller, given: AppendArguments) -> AppendResult:
    """Append items to an array in the shared state; a missing key starts as an empty array.
    Concurrent appends by several agents are all kept. Pass an `idempotency_key` if you may have to
    retry the call.
    """
    items = _parsed(caller, "items", given.items)
    entry: Entry = await caller.session.state.append(
        given.key, items, idempotency_key=_idempotency_key(caller, given)
    )
    return AppendResult(entry.key, len(entry.value), entry.version, entry.sequence)


@tools.add(
    "Merge into shared state",
    "write",
    takes=PatchArguments,
    gives=PatchResult,
    is_destructive=True,
    is_idempotent=False,
)
async def state_patch(caller: Caller, given: PatchArguments) -> PatchResult:
    """Merge an object into the whole shared state in one transaction (JSON Merge Patch, RFC 7396):
    null deletes a key, objects are merged, other values are set. If the whole value of a key is
    {"$append": [...]}, {"$increment": n}, {"$set": value} or {"$delete": true}, that operation is
    applied to the key instead.
    """
    patch = _parsed(caller, "patch", given.patch)
    after = await caller.session.state.patch(
        patch,
        if_version=given.version,
        operators=True,
        idempotency_key=_idempotency_key(caller, given),
    )
    versions = {key: after.versions[key] for key in patch if key in after.versions}
    deleted = [key for key in patch if key not in after.versions]
    return PatchResult(after.root_id, after.version, versions, deleted)


@tools.add("Read changes of shared state", "read", takes=ChangesArguments, gives=ChangesResult)
async def state_changes(caller: Caller, given: ChangesArguments) -> ChangesResult:
    """Read the changes made to the shared state after a sequence, and by whom, oldest first. If you
    continue from `last_sequence`, you get every change exactly once.
    """
    page = await events_page(caller.session.state, given.since_sequence, given.limit)
    last = page.events[-1]["seq"] if page.events else given.since_sequence
    return ChangesResult(page.events, page.has_more, last)


@tools.add("List this session's effects", "read", takes=EffectsArguments, gives=EffectsResult)
async def effects_list(caller: Caller, given: EffectsArguments) -> Any:
    """List the side effects (tool calls) of your own session from its ledger, oldest first: what
    was called and with which outcome. `unknown` means that it may or may not have happened.
    """
    found = await caller.store.effects(
        session=caller.session, status=given.status, after=given.after, limit=given.limit
    )
    following = found[-1].number if len(found) == given.limit else None
    return EffectsResult(list(map(EFFECT, found)), following)


@tools.add(
    "List this session's checkpoints",
    "read",
    takes=CheckpointsArguments,
    gives=CheckpointsResult,
)
async def checkpoints_list(caller: Caller, given: CheckpointsArguments) -> Any:
    """List the checkpoints of your own session without their content, newest first."""
    found = await caller.session.history(kind=given.kind, before=given.before, limit=given.limit)
    following = found[-1].version if len(found) == given.limit else None
    return CheckpointsResult(list(map(CHECKPOINT, found)), following)


@tools.add("Read a checkpoint", "read", takes=CheckpointArguments, gives=LOADED.type)
async def checkpoint_get(caller: Caller, given: CheckpointArguments) -> Any:
    """Read one checkpoint of your own session with its channels; by default the newest."""
    if given.version is not None:
        return LOADED(await caller.session.at(given.version, last=given.last))
    loaded = await caller.session.latest(last=given.last)
    if loaded is None:
        raise Refusal("checkpoint_not_found", "the session has no checkpoints yet")
    return LOADED(loaded)


@tools.add("List the sessions of this tree", "read", takes=SessionsArguments, gives=SessionsResult)
async def sessions_list(caller: Caller, given: SessionsArguments) -> Any:
    """List the sessions of your own session's tree, oldest first: who else works on the same task,
    the parent of each, and its status.
    """
    found = await caller.store.sessions(
        root=caller.session, status=given.status, after=given.after, limit=given.limit
    )
    following = found[-1].number if len(found) == given.limit else None
    return SessionsResult(list(map(SESSION, found)), following)


@tools.add("List the work items of this tree", "read", takes=WorkArguments, gives=WorkResult)
async def work_list(caller: Caller, given: WorkArguments) -> Any:
    """List the work items of your own session's tree, newest first: what was submitted, what is
    running, and the result of what has ended.
    """
    found = await caller.store.work.list(
        root=caller.session, status=given.status, before=given.before, limit=given.limit
    )
    following = found[-1].number if len(found) == given.limit else None
    return WorkResult(list(map(ITEM, found)), following)


@tools.add("List this session's pauses", "read", takes=Arguments, gives=PausesResult)
async def pauses_list(caller: Caller, given: Arguments) -> Any:
    """List the pauses of your own session, oldest first: what it is waiting for, or has waited for.
    No tool can approve anything; that decision is left to people.
    """
    return PausesResult(list(map(PAUSE, await caller.session.pauses())))


@tools.add(
    "Answer the request of another agent",
    "write",
    takes=AnswerArguments,
    gives=AnswerResult,
)
async def answer(caller: Caller, given: AnswerArguments) -> AnswerResult:
    """Answer the request that another agent made of your own session. Only the first answer counts:
    a repeated one, or one sent after the other agent has stopped waiting, changes nothing.
    """
    result = _parsed(caller, "result", given.result)
    id = caller.session.id
    return AnswerResult(id, await caller.store.answer(id, result, status=given.status))


async def read_state(caller: Caller, key: str | None) -> OneKey | AllKeys:
    """Return one key, or all of them as of one moment."""
    state = caller.session.state
    if key is None:
        snapshot = await state.snapshot()
        keys = {each: key_in_state(snapshot, each) for each in snapshot.document}
        return AllKeys(snapshot.root_id, keys, snapshot.version)
    entry: Entry | None = await state.entry(key)
    if entry is None:
        raise KeyNotFound(f"there is no key {key!r}", key=key)
    return OneKey(entry.value, entry.version, iso(entry.updated_at), entry.updated_by, entry.key)


def _parsed(caller: Caller, name: Literal["value", "items", "patch", "result"], text: str) -> Json:
    try:
        return from_json(text, caller.store.runtime.codec.limits, name=name)
    except InvalidValue as error:
        hint = ' A string must include its quotes, as in "\\"done\\"".'
        raise Refusal("invalid_request", f"{error}{hint}", pointer=name) from None


def _idempotency_key(caller: Caller, given: WriteArguments) -> str | None:
    """Return the key that is stored for a request; it includes the session, so no two collide."""
    if given.idempotency_key is None:
        return None
    scoped = f"{caller.session.id}\0{given.idempotency_key}"
    return f"mcp {hashlib.sha256(scoped.encode()).hexdigest()}"

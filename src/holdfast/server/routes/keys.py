"""One key of the shared state, and several at once."""

from __future__ import annotations

from collections.abc import Callable
from email.utils import formatdate
from functools import partial
from typing import Annotated, Any, Literal

import msgspec

from ...answers.problems import Refusal
from ...answers.shapes import (
    BatchShape,
    HistoryShape,
    KeyShape,
    KeysShape,
    OperatedShape,
    batch_shape,
    key_shape,
    listed_shape,
    operated_shape,
    version_shape,
)
from ...errors import KeyNotFound, VersionConflict
from ...kernel.operation import Lock, Op
from ...state.records import Entry
from .. import pages
from ..endpoints import MERGE_PATCH, Endpoints
from ..json_patch import MEDIA as JSON_PATCH
from ..json_patch import MISSING, Patch, patched
from ..messages import Answer, Call
from ..preconditions import NAMES, condition_of, is_current, key_tag, optional, required
from ..replay import HEADER, write

routes = Endpoints()

KEY = "/sessions/{id}/state/keys/{key}"
NO_CACHE = "no-cache, no-transform"
WRITES = ("session_closed", "request_mismatch", "idempotency_key_reused", "precondition_invalid")

Version = Annotated[int, msgspec.Meta(ge=0, le=2**53)]
Json = Any


class KeyQuery(msgspec.Struct, forbid_unknown_fields=True):
    """At which sequence to read a key."""

    at_sequence: Version | None = None


class KeysQuery(msgspec.Struct, forbid_unknown_fields=True):
    """Which keys to list, and whether to include their values."""

    prefix: Annotated[str, msgspec.Meta(description="Only keys that begin with this.")] = ""
    include: Annotated[
        Literal["value"] | None, msgspec.Meta(description="`value` includes the values.")
    ] = None
    updated_by: Annotated[
        str | None, msgspec.Meta(description="Only keys that this session wrote last.")
    ] = None
    since: Annotated[
        int, msgspec.Meta(ge=0, le=2**53, description="Only keys changed after this sequence.")
    ] = 0
    limit: pages.Limit = pages.PAGE
    cursor: pages.Cursor | None = None


class HistoryQuery(msgspec.Struct, forbid_unknown_fields=True):
    """Which part of a key's history to read."""

    after_sequence: Version = 0
    limit: pages.Limit = pages.PAGE
    cursor: pages.Cursor | None = None


class PutBody(msgspec.Struct, forbid_unknown_fields=True):
    """The new value of a key."""

    value: Json


class Increment(msgspec.Struct, tag="increment", tag_field="operation", forbid_unknown_fields=True):
    """Add to a number; a missing key starts at 0."""

    delta: int | float = 1


class Append(msgspec.Struct, tag="append", tag_field="operation", forbid_unknown_fields=True):
    """Append to a list; a missing key starts empty."""

    items: list[Json]


class Merge(msgspec.Struct, tag="merge", tag_field="operation", forbid_unknown_fields=True):
    """Merge into an object (RFC 7396)."""

    patch: dict[str, Json]


class Add(msgspec.Struct, tag="add", tag_field="operation", forbid_unknown_fields=True):
    """Add a member to a set."""

    item: Json


class Remove(msgspec.Struct, tag="remove", tag_field="operation", forbid_unknown_fields=True):
    """Remove a member from a set."""

    item: Json


class Reduce(msgspec.Struct, tag="reduce", tag_field="operation", forbid_unknown_fields=True):
    """Change the key by its reducer."""

    value: Json


Operation = Increment | Append | Merge | Add | Remove | Reduce


class _BatchOperation(msgspec.Struct, tag_field="op", forbid_unknown_fields=True, kw_only=True):
    key: str
    if_match: Version | None = None


class BatchSet(_BatchOperation, tag="set"):
    """Set a key."""

    value: Json


class BatchDelete(_BatchOperation, tag="delete"):
    """Delete a key."""


class BatchIncrement(_BatchOperation, tag="increment"):
    """Add to a number."""

    delta: int | float = 1


class BatchAppend(_BatchOperation, tag="append"):
    """Append to a list."""

    items: list[Json]


class BatchMerge(_BatchOperation, tag="merge"):
    """Merge into an object."""

    patch: dict[str, Json]


class BatchAdd(_BatchOperation, tag="add"):
    """Add a member to a set."""

    item: Json


class BatchRemove(_BatchOperation, tag="remove"):
    """Remove a member from a set."""

    item: Json


class BatchReduce(_BatchOperation, tag="reduce"):
    """Change the key by its reducer."""

    value: Json


class BatchBody(msgspec.Struct, forbid_unknown_fields=True):
    """Operations that are applied in order, all of them or none."""

    operations: Annotated[
        list[
            BatchSet
            | BatchDelete
            | BatchIncrement
            | BatchAppend
            | BatchMerge
            | BatchAdd
            | BatchRemove
            | BatchReduce
        ],
        msgspec.Meta(min_length=1),
    ]


@routes.add(
    "GET",
    "/sessions/{id}/state/keys",
    "read",
    query=KeysQuery,
    answers={200: KeysShape},
    problems=("history_compacted", "sequence_in_future"),
)
async def list_keys(call: Call) -> Answer:
    """List the keys, sorted; with `include=value` also their values. All pages of a list show the
    state at the moment of the first one.
    """
    limit, values = pages.limit_of(call), call.query.include == "value"
    at, after = pages.moment_of(call)
    if at is None:
        at = await call.session.state.version()
    found = await call.session.state.entries(
        prefix=call.query.prefix,
        after=after,
        updated_by=call.query.updated_by,
        since=call.query.since,
        at_sequence=at,
        limit=limit,
        values=values,
    )
    cursor = pages.next_cursor(found, limit, "key", at)
    shown = [listed_shape(each, values=values) for each in found]
    return pages.paged(call, KeysShape(shown, cursor), cursor)


@routes.add(
    "GET",
    KEY,
    "read",
    query=KeyQuery,
    is_session_checked=True,
    takes=("if-none-match",),
    answers={200: KeyShape, 304: None},
    problems=("key_not_found", "history_compacted", "sequence_in_future"),
)
async def get_key(call: Call) -> Answer:
    """Read one key, now or as it was at a sequence."""
    key, at = call.path["key"], call.query.at_sequence
    entry: Entry | None
    if at is None:
        entry = await call.session.state._entry_of_session(key)
    else:
        session = await call.context.sessions.find(call.path["id"], call.token)
        entry = await session.state.entry(key, at_sequence=at)
    if entry is None:
        raise KeyNotFound(f"there is no key {key!r}", key=key)
    headers = {
        "etag": key_tag(entry.version),
        "cache-control": NO_CACHE,
        "last-modified": formatdate(entry.updated_at / 1000, usegmt=True),
    }
    if is_current(call.headers, entry.version):
        return Answer(304, headers=headers)
    return Answer(200, key_shape(entry), headers)


@routes.add(
    "PUT",
    KEY,
    "write",
    body=PutBody,
    is_session_checked=True,
    takes=(*NAMES, HEADER),
    answers={200: KeyShape},
    problems=("version_conflict", "precondition_required", *WRITES),
    example={"value": 4},
)
async def put_key(call: Call) -> Answer:
    """Set one key; the precondition names the version to replace, or `*` for any."""
    version = required(condition_of(call.headers))
    key, value = call.path["key"], call.body.value
    return await write(
        call,
        lambda session: session.state.set(key, value, if_version=version),
        lambda entry: _written(call, entry),
    )


@routes.add(
    "PATCH",
    KEY,
    "write",
    body=dict[str, Json],
    media=MERGE_PATCH,
    other_bodies={JSON_PATCH: (Patch, [{"op": "add", "path": "/steps/-", "value": "publish"}])},
    takes=(*NAMES, HEADER),
    answers={200: KeyShape},
    problems=(
        "version_conflict", "precondition_required", "type_mismatch", "patch_conflict", *WRITES,
    ),
    example={"mode": "parallel", "draft": None},
)  # fmt: skip
async def patch_key(call: Call) -> Answer:
    """Merge into the object of one key (RFC 7396), or apply a JSON Patch (RFC 6902) to its
    value.
    """
    version = required(condition_of(call.headers))
    if isinstance(call.body, dict):
        return await _operate(call, Merge(call.body), version)
    key = call.path["key"]

    def change(session: Any) -> Op[Entry]:
        # The read and the write are in one transaction.
        yield Lock(session.root_id)
        before: Entry | None = yield from session.state.entry(key)
        stands = 0 if before is None else before.version
        value = None
        if version in {None, stands}:
            value = patched(MISSING if before is None else before.value, call.body)
            if value is MISSING:
                raise Refusal("invalid_request", "a patch cannot remove a key; use DELETE")
        entry: Entry = yield from session.state.set(key, value, if_version=version)
        return entry

    return await write(call, change, lambda entry: _written(call, entry), is_composed=True)


@routes.add(
    "DELETE",
    KEY,
    "write",
    is_session_checked=True,
    takes=(*NAMES, HEADER),
    answers={204: None},
    problems=("version_conflict", "key_not_found", *WRITES),
)
async def delete_key(call: Call) -> Answer:
    """Delete one key; its versions continue if it is created again."""
    version = optional(condition_of(call.headers))
    key = call.path["key"]
    if version == 0:
        raise Refusal("precondition_invalid", "a key that must not exist cannot be deleted")
    try:
        return await write(
            call,
            lambda session: session.state.delete(key, if_version=version),
            lambda entry: Answer(204),
        )
    except VersionConflict as conflict:
        # A missing key is reported as such, whatever was expected (RFC 9110, 13.2.1).
        if conflict.current_version == 0:
            raise KeyNotFound(f"there is no key {key!r}", key=key) from None
        raise


@routes.add(
    "POST",
    f"{KEY}/ops",
    "write",
    body=Operation,
    is_session_checked=True,
    takes=(*NAMES, HEADER),
    answers={200: OperatedShape},
    problems=("version_conflict", "type_mismatch", "not_found", *WRITES),
    example={"operation": "increment", "delta": 1},
)
async def operate(call: Call) -> Answer:
    """Change one key atomically on the server; no version is needed."""
    shape = partial(operated_shape, is_increment=isinstance(call.body, Increment))
    return await _operate(call, call.body, optional(condition_of(call.headers)), shape)


@routes.add(
    "POST",
    "/sessions/{id}/state/batch",
    "write",
    body=BatchBody,
    is_session_checked=True,
    takes=(HEADER,),
    answers={200: BatchShape},
    problems=("version_conflict", "type_mismatch", "key_not_found", "not_found", *WRITES),
    example={
        "operations": [
            {"op": "set", "key": "tasks_completed", "value": 5, "if_match": 3},
            {"op": "set", "key": "new_key", "value": "hello"},
            {"op": "delete", "key": "temp_key", "if_match": 1},
        ]
    },
)
async def batch(call: Call) -> Answer:
    """Apply operations in order, all of them or none."""
    operations = [_operation(each) for each in call.body.operations]
    return await write(
        call,
        lambda session: session.state.batch(operations),
        lambda entries: Answer(200, batch_shape(entries)),
    )


@routes.add(
    "GET",
    f"{KEY}/history",
    "read",
    query=HistoryQuery,
    answers={200: HistoryShape},
)
async def key_history(call: Call) -> Answer:
    """Read the value after each change of a key, newest first."""
    limit, before = pages.limit_of(call), pages.place_of(call)
    after = call.query.after_sequence
    found = await call.session.state.history(
        call.path["key"], after=after, before=before, limit=limit
    )
    return pages.page(call, found, limit, "sequence", HistoryShape, version_shape)


async def _operate(
    call: Call,
    operation: Operation,
    version: int | None,
    shape: Callable[[Entry], KeyShape] = key_shape,
) -> Answer:
    name = type(operation).__name__.lower()
    [argument] = (getattr(operation, field) for field in operation.__struct_fields__)
    key = call.path["key"]
    unchanged = None if version is None else {key: version}

    def change(session: Any) -> Any:
        return getattr(session.state, name)(key, argument, if_unchanged=unchanged)

    return await write(call, change, lambda entry: _written(call, entry, shape))


def _written(call: Call, entry: Entry, shape: Callable[[Entry], KeyShape] = key_shape) -> Answer:
    headers = {"etag": key_tag(entry.version), "cache-control": NO_CACHE}
    if entry.is_created:
        headers["location"] = call.instance.removesuffix("/ops")
    return Answer(200, shape(entry), headers)


def _operation(given: Any) -> dict[str, Any]:
    """Return an operation of a batch in the form that `state.batch` takes."""
    plain: dict[str, Any] = msgspec.to_builtins(given)
    plain["if_version"] = plain.pop("if_match")
    return plain

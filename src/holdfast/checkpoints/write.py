"""Writing one checkpoint: the head is compared and moved, and everything else follows it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

from ..arguments import require_one_of, require_text, shown
from ..codec import Codec
from ..errors import CorruptRecord, InvalidArgument, VersionConflict
from ..feed import emit, event
from ..feed.events import SEQUENCE
from ..kernel.append_only import CLOSE, open_door
from ..kernel.operation import AfterCommit, Lock, Op, Query, Row, Runtime, decide, fresh_id, one
from ..leases import Keeper
from ..records import KINDS, Checkpoint, Kind, random_id
from ..sessions import access
from ..sessions.access import Place, lock_and_look, require_fence, require_writable
from ..sessions.rows import AT_HEAD
from . import manifest as manifests
from .changes import Change, is_simple, make_plan
from .heads import Head, Heads
from .lines import SHIFT
from .manifest import checkpoint_context
from .read import keyed, naming

# Unless a version was written under this key already; a fork's may have been written in its origin.
ADVANCE = access.ADVANCE.format(
    unless="""CAST(:unless_key AS TEXT) IS NULL OR (s.origin_number IS NULL AND NOT EXISTS (
        SELECT 1 FROM hf_checkpoints c WHERE c.idempotency_key = :unless_key
            AND c.key > s.number * 4294967296 AND c.key < (s.number + 1) * 4294967296
    ))"""
)
OPEN_PACKING = open_door("'pack ' || s.number", AT_HEAD)
UNPACK = f"""
DELETE FROM hf_items WHERE key >= :low AND key < :high AND EXISTS (SELECT 1 FROM {AT_HEAD})
"""  # noqa: S608
ADD_ITEM = f"""
INSERT INTO hf_items (key, count, data)
SELECT CAST(:key AS INTEGER), CAST(:count AS INTEGER), CAST(:data AS BLOB) FROM {AT_HEAD}
"""  # noqa: S608
USE = f"""
INSERT INTO hf_uses (line_id, session_number)
SELECT CAST(:line_id AS INTEGER), s.number FROM {AT_HEAD}
"""  # noqa: S608
ADD_CHECKPOINT = f"""
INSERT INTO hf_checkpoints (
    key, epoch, kind, iteration, item_id, idempotency_key, state_sequence, manifest, data, metadata,
    created_at
)
SELECT s.number * 4294967296 + s.version, s.epoch, CAST(:kind AS TEXT),
    CAST(:iteration AS INTEGER), CAST(:item_id AS TEXT), CAST(:idempotency_key AS TEXT),
    {SEQUENCE.format(root_id="s.root_id")}, CAST(:manifest AS BLOB),
    CAST(:data AS BLOB), CAST(:metadata AS BLOB), :now
FROM {AT_HEAD}
RETURNING epoch, state_sequence, created_at
"""  # noqa: S608
ADDED = "SELECT epoch, state_sequence, created_at FROM hf_checkpoints WHERE key = :key"
ITERATIONS = ("iteration_start", "iteration_end")
MANIFEST = "SELECT manifest FROM hf_checkpoints WHERE key = :key"


@dataclass(frozen=True, slots=True)
class Draft:
    """A checkpoint before it has a version."""

    kind: Kind
    changes: Mapping[str, Change]
    data: bytes | None
    metadata: bytes | None
    iteration: int | None = None
    item_id: str | None = None
    expected_version: int | None = None
    key: str | None = None
    opens_epoch: bool = False


def draft(
    codec: Codec,
    kind: str,
    changes: Mapping[str, Change],
    data: Any,
    metadata: Mapping[str, Any] | None,
    item: object,
    expected_version: int | None,
    key: object = None,
) -> Draft:
    """Check and encode a checkpoint's own parts."""
    # Most checkpoints have few of these parts, and most calls come from the middle of a loop.
    if kind not in KINDS:
        require_one_of("kind", kind, KINDS)
    if expected_version is not None and not _is_whole(expected_version):
        raise InvalidArgument(f"expected_version must be a version, not {shown(expected_version)}")
    return Draft(
        kind=cast("Kind", kind),
        changes=changes,
        data=None if data is None else codec.encode(data, name="data"),
        metadata=None if metadata is None else encode_metadata(codec, metadata),
        iteration=_iteration(kind, data) if kind in ITERATIONS else None,
        item_id=None if item is None else id_of_item(item),
        expected_version=expected_version,
        key=None if key is None else require_text("key", key),
    )


def id_of_item(item: object) -> str | None:
    """Return the id of a work item, given as itself or by its id."""
    item_id = getattr(item, "id", item)
    if item_id is None:
        return None
    return require_text("item", item_id)


def encode_metadata(codec: Codec, metadata: Mapping[str, Any]) -> bytes:
    """Return metadata as a body; it must be a dict."""
    if type(metadata) is not dict:
        raise InvalidArgument(f"metadata must be a dict, not {type(metadata).__name__}")
    return codec.encode(metadata, name="metadata")


def _iteration(kind: str, data: Any) -> int:
    iteration = data.get("iteration", 0) if isinstance(data, dict) else 0
    if not _is_whole(iteration) or iteration < 1:
        raise InvalidArgument(f'{kind} needs data {{"iteration": N}} with N from 1 up')
    return int(iteration)


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < SHIFT


def write(runtime: Runtime, place: Place, wanted: Draft) -> Op[Checkpoint]:
    """Write the next version of a session, all of it or nothing; once for each key."""
    head = Heads.of(runtime).get(place.number)
    if head is not None and is_simple(head, wanted.changes):
        written = yield from write_after(runtime, place, wanted, head, unless_key=wanted.key)
        if written is not None:
            return written
    # What was remembered is old, or the write is not allowed; now the tree is locked.
    found = yield from lock_and_look(runtime, place)
    if wanted.key is not None and found:
        require_fence(place, found[0])
        earlier = yield from keyed(runtime.codec, place.number, place.session_id, wanted.key)
        if earlier is not None:
            return earlier
    head = yield from current_head(runtime, place, wanted, found)
    written = yield from write_after(runtime, place, wanted, head)
    assert written is not None
    return written


def current_head(runtime: Runtime, place: Place, wanted: Draft, found: list[Row]) -> Op[Head]:
    """Return the head of a session whose tree is locked, or say why it cannot be written."""
    row = require_writable(runtime, place, found)
    if wanted.expected_version not in {None, row["version"]}:
        raise VersionConflict(
            f"session {place.session_id} is at version {row['version']}, "
            f"not {wanted.expected_version}; load it and decide again",
            session_id=place.session_id,
            current_version=row["version"],
            expected_version=wanted.expected_version,
        )
    known = Heads.of(runtime).get(place.number)
    if known is not None and known.id == row["head"]:
        return known
    with naming(place.session_id, row["version"]):
        manifest = yield from read_manifest(runtime.codec, place.number, row["version"])
    return Head(row["head"], row["version"], manifest)


def record_status(runtime: Runtime, place: Place, before: str, after: str) -> Op[None]:
    """Write a change of status into the session's history and into the feed."""
    data = {"from": before, "to": after}
    ready = draft(runtime.codec, "state_transition", {}, data, None, None, None)
    yield from write(runtime, place, ready)
    yield from emit(runtime.codec, place.root_id, place.session_id, "session_status_changed", data)


def read_manifest(codec: Codec, number: int, version: int) -> Op[dict[str, manifests.Entry]]:
    """Return the manifest of a session's version; a session without versions has none."""
    if version == 0:
        return {}
    row = yield from one(MANIFEST, key=number * SHIFT + version)
    if row is None:
        raise CorruptRecord(
            f"session number {number} has lost its version {version}, which is the newest"
        )
    context = checkpoint_context(number, version, "manifest")
    return manifests.unpack(codec, row["manifest"], context)


def write_after(
    runtime: Runtime,
    place: Place,
    wanted: Draft,
    head: Head,
    *,
    unless_key: str | None = None,
) -> Op[Checkpoint | None]:
    """Write the version after a head; None when the head has moved or may not be moved.

    It is not moved either while `unless_key` may be that of a version already written.
    """
    codec = runtime.codec
    plan = yield from make_plan(codec, head, wanted.changes)
    version = head.version + 1
    new_head = random_id((yield from fresh_id()))
    here = {"number": place.number, "head": new_head}
    advance = {
        **here,
        "old_head": head.id,
        "expected": wanted.expected_version,
        "unless_key": unless_key,
        "fence": place.fence,
        "epochs": int(wanted.opens_epoch),
    }
    queries = [Query(ADVANCE, advance)]
    for written in plan.writes:
        if written.replaced is not None:
            low, high = written.replaced
            queries += [
                Query(OPEN_PACKING, here),
                Query(UNPACK, {**here, "low": low, "high": high}),
                Query(CLOSE, {"name": f"pack {place.number}"}),
            ]
        queries += [
            Query(ADD_ITEM, {**here, "key": key, "count": count, "data": data})
            for key, count, data in written.rows
        ]
    queries += [Query(USE, {**here, "line_id": line_id}) for line_id in plan.opened]
    context = checkpoint_context(place.number, version, "manifest")
    row = {
        **here,
        "kind": wanted.kind,
        "iteration": wanted.iteration,
        "item_id": wanted.item_id,
        "idempotency_key": wanted.key,
        "manifest": manifests.pack(codec, plan.manifest, context),
        "data": None,
        "metadata": None,
    }
    for part, body in (("data", wanted.data), ("metadata", wanted.metadata)):
        if body is not None:
            context = checkpoint_context(place.number, version, part)
            row[part] = codec.seal(body, context=context)
    queries.append(Query(ADD_CHECKPOINT, row))
    told = {"version": version, "kind": wanted.kind}
    looks = []
    if place.guard is not None:
        keeper = Keeper.of(runtime)
        keeper.require_known(place.guard)
        looks = keeper.looks(place.guard)
    answers = yield from decide(
        Lock(place.root_id),
        *looks,
        *queries,
        emits=[event(codec, place.root_id, place.session_id, "checkpoint_saved", told)],
        again=Query(ADDED, {"key": place.number * SHIFT + version}),
    )
    if not answers[-1]:
        return None
    heads = Heads.of(runtime)
    yield AfterCommit(
        lambda: heads.put(place.number, Head(new_head, version, plan.manifest, plan.remember()))
    )
    return Checkpoint(
        session_id=place.session_id,
        version=version,
        kind=wanted.kind,
        data=None if wanted.data is None else codec.decode(wanted.data),
        metadata=None if wanted.metadata is None else codec.decode(wanted.metadata),
        item_id=wanted.item_id,
        idempotency_key=wanted.key,
        **answers[-1][0],
    )

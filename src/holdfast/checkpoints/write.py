"""Writes of checkpoints: a compare-and-set of the session's head, on which all else depends."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any, cast

from ..arguments import id_of_item, require_one_of, require_text, shown
from ..clock import random_id
from ..dataclass import dataclass
from ..errors import CorruptRecord, InvalidArgument, LimitExceeded, VersionConflict
from ..feed import emit, event
from ..feed.events import TREE_SEQUENCE
from ..kernel.append_only import CLOSE_DOOR, open_door
from ..kernel.nouns import Noun
from ..kernel.operation import (
    AfterCommit,
    C,
    Decide,
    FreshId,
    Lock,
    Op,
    Query,
    Row,
    Runtime,
    deciding,
    one,
    operation,
    rows,
    together,
)
from ..leases import Keeper
from ..records import KINDS, Checkpoint, Kind, SessionRef
from ..sessions import access
from ..sessions.access import Place, lock_and_read, require_fence, require_writable
from ..sessions.rows import SESSION_AT_HEAD, TURN_TOLD, RowChange, released
from . import lines
from .changes import ChannelChange, ChannelPlan, Extend, Head, Heads, change_to, is_simple
from .keys import VERSIONS
from .lines import Manifest
from .read import CheckpointReads, find, keyed, naming, require_version

# Unless a version was written with this key; a fork's may have been written in its origin.
UNLESS_WRITTEN = f"""CAST(:unless_key AS TEXT) IS NULL OR (s.origin_number IS NULL AND NOT EXISTS (
        SELECT 1 FROM hf_checkpoints c WHERE c.idempotency_key = :unless_key
            AND c.key > s.number * {VERSIONS} AND c.key < (s.number + 1) * {VERSIONS}
    ))"""  # noqa: S608
OPEN_PACKING = open_door("'pack ' || s.number", SESSION_AT_HEAD)
REMOVE_PACKED = f"""
DELETE FROM hf_items WHERE key >= :low AND key < :high AND EXISTS (SELECT 1 FROM {SESSION_AT_HEAD})
"""  # noqa: S608
ADD_ITEMS = f"""
INSERT INTO hf_items (key, count, data)
SELECT CAST(:key AS INTEGER), CAST(:count AS INTEGER), CAST(:data AS BLOB) FROM {SESSION_AT_HEAD}
"""  # noqa: S608
USE_OPENED_LINE = f"""
INSERT INTO hf_uses (line_id, session_number)
SELECT CAST(:line_id AS INTEGER), s.number FROM {SESSION_AT_HEAD}
"""  # noqa: S608
INSERT_CHECKPOINT = """
INSERT INTO hf_checkpoints (
    key, epoch, kind, iteration, item_id, idempotency_key, state_sequence, manifest, data, metadata,
    created_at
)
"""
ADD_CHECKPOINT_OF = f"""{INSERT_CHECKPOINT}
SELECT s.number * {VERSIONS} + s.version, s.epoch, CAST(:kind AS TEXT),
    CAST(:iteration AS INTEGER), CAST(:item_id AS TEXT), CAST(:idempotency_key AS TEXT),
    {TREE_SEQUENCE.format(root_id="s.root_id")}, CAST(:manifest AS BLOB),
    CAST(:data AS BLOB), CAST(:metadata AS BLOB), :now
FROM {{moved}}
RETURNING epoch, state_sequence, created_at
"""  # noqa: S608
ADD_CHECKPOINT = ADD_CHECKPOINT_OF.format(moved=SESSION_AT_HEAD)
# PostgreSQL can move the head and add the checkpoint in one statement.
MOVE_AND_ADD = f"""
WITH s AS ({{move}}) {ADD_CHECKPOINT_OF.format(moved="s")}
"""
READ_ADDED = "SELECT epoch, state_sequence, created_at FROM hf_checkpoints WHERE key = :key"
READ_MANIFEST = "SELECT key, manifest FROM hf_checkpoints WHERE key = :key"
SET_PIN = """
INSERT INTO hf_pins (key, reason, created_at) VALUES (:key, :reason, :now)
ON CONFLICT (key) DO UPDATE SET reason = excluded.reason
"""
REMOVE_PIN = "DELETE FROM hf_pins WHERE key = :key"
ATTEST = "INSERT INTO hf_attestations (key, evidence, created_at) VALUES (:key, :evidence, :now)"
REASON_CHARACTERS_MAX = 1_000
ONLY_HEAD = RowChange("", {})
ITERATIONS = frozenset({"iteration_start", "iteration_end"})


@dataclass(frozen=True, slots=True)
class Draft:
    """A checkpoint before it has a version."""

    kind: Kind
    changes: Mapping[str, ChannelChange]
    data: bytes | None
    metadata: bytes | None = None
    iteration: int | None = None
    item_id: str | None = None
    expected_version: int | None = None
    key: str | None = None
    opens_epoch: bool = False


class CheckpointOps(CheckpointReads[C]):
    """The operations of a session on its checkpoints."""

    @deciding
    def save(
        self,
        channels: Mapping[str, Any] | None = None,
        /,
        *,
        kind: Kind = "turn",
        data: Any = None,
        item: object = None,
        metadata: dict[str, Any] | None = None,
        expected_version: int | None = None,
        key: str | None = None,
        **named: Any,
    ) -> Op[Checkpoint]:
        """Save channels as the next version; those not named carry over. A full list costs only
        its change. A repeated `key` returns the first checkpoint and adds nothing. Raises
        VersionConflict, SessionBusy, LeaseLost or SessionEnded.
        """
        if channels is not None and not isinstance(channels, Mapping):
            raise InvalidArgument(f"channels must be a dict, not {type(channels).__name__}")
        codec, head = self.runtime.codec, Heads.of(self.runtime).get(self.number)
        wanted = {**(channels or {}), **named}
        changes = {name: change_to(codec, head, name, value) for name, value in wanted.items()}
        given = (data, metadata, item, expected_version, key)
        return (yield from write(self.runtime, self._place, kind, changes, *given))

    @deciding
    def append(
        self,
        channel: str,
        items: Sequence[Any],
        *,
        kind: Kind = "turn",
        data: Any = None,
        item: object = None,
        metadata: dict[str, Any] | None = None,
        expected_version: int | None = None,
        key: str | None = None,
    ) -> Op[Checkpoint]:
        """Append items to a list channel as the next version; the list's length does not matter.

        A repeated `key` returns the first checkpoint and adds nothing.
        """
        require_text("channel", channel)
        if not isinstance(items, list):
            raise InvalidArgument(
                f"append takes a list of items, not {type(items).__name__}; wrap a single one: "
                f"append({shown(channel)}, [item])"
            )
        forms: list[bytes] = []
        bodies = self.runtime.codec.encode_each(items, name=channel, forms=forms)
        changes = {channel: Extend(bodies, forms)}
        given = (data, metadata, item, expected_version, key)
        return (yield from write(self.runtime, self._place, kind, changes, *given))

    @deciding
    def record(
        self,
        kind: Kind,
        data: Any = None,
        *,
        item: object = None,
        metadata: dict[str, Any] | None = None,
        expected_version: int | None = None,
        key: str | None = None,
    ) -> Op[Checkpoint]:
        """Write evidence as the next version: `data`, with the channels unchanged.

        A repeated `key` returns the first checkpoint and adds nothing.
        """
        given = (data, metadata, item, expected_version, key)
        return (yield from write(self.runtime, self._place, kind, {}, *given))

    @operation
    def pin(self, version: int, reason: str) -> Op[None]:
        """Keep a version from being pruned; a second pin replaces the reason."""
        if not isinstance(reason, str) or not reason.strip():
            raise InvalidArgument("a pin needs a reason")
        if len(reason) > REASON_CHARACTERS_MAX or not reason.isprintable():
            raise InvalidArgument(
                f"a pin's reason is at most {REASON_CHARACTERS_MAX} printable characters"
            )
        reason = self.runtime.redactor.redact(reason)
        key = yield from self._own_key(version)
        sealed = self.runtime.codec.pack(reason, context=("hf_pins", str(key)))
        yield from rows(SET_PIN, key=key, reason=sealed)
        yield from self._emit("checkpoint_pinned", version=version, reason=reason)

    @operation
    def unpin(self, version: int) -> Op[None]:
        """Let a version be pruned again."""
        key = yield from self._own_key(version)
        yield from rows(REMOVE_PIN, key=key)
        yield from self._emit("checkpoint_unpinned", version=version)

    @operation
    def attest(self, version: int, evidence: Any) -> Op[None]:
        """Record that a version was verified, and how; empty evidence is refused."""
        if not evidence:
            raise InvalidArgument("evidence is empty, so it attests nothing")
        body = self.runtime.codec.encode(evidence, name="evidence")
        key = yield from self._own_key(version)
        sealed = self.runtime.codec.seal(body, context=("hf_attestations", str(key)))
        yield from rows(ATTEST, key=key, evidence=sealed)
        yield from self._emit("checkpoint_attested", version=version)

    def _emit(self, kind: str, **data: Any) -> Op[None]:
        yield from emit(self.runtime.codec, self.root_id, self.id, kind, data)

    def _own_key(self, version: int) -> Op[int]:
        """Lock the tree and return the key of one of the session's own versions."""
        require_version(version)
        yield from self._lock()
        key = self.number * VERSIONS + version
        if (yield from find(self.number, self.id, version))["key"] != key:
            raise InvalidArgument(
                f"version {version} belongs to the session that this one was forked from"
            )
        return key


def write(
    runtime: Runtime,
    place: Place,
    kind: str,
    changes: Mapping[str, ChannelChange],
    data: Any,
    metadata: Mapping[str, Any] | None = None,
    item: object = None,
    expected_version: int | None = None,
    key: str | None = None,
    locked: Row | None = None,
    also: RowChange = ONLY_HEAD,
) -> Op[Checkpoint]:
    """Write the next version of a session, all or nothing; once per key.

    `locked` is the session's row, if this transaction has just read it with its tree locked; `also`
    is what else changes in that row.
    """
    codec = runtime.codec
    if kind not in KINDS:
        require_one_of("kind", kind, KINDS)
    if expected_version is not None and not _is_whole(expected_version):
        raise InvalidArgument(f"expected_version must be a version, not {shown(expected_version)}")
    if metadata is not None and type(metadata) is not dict:
        raise InvalidArgument(f"metadata must be a dict, not {type(metadata).__name__}")
    wanted = Draft(
        kind=cast("Kind", kind),
        changes=changes,
        data=None if data is None else codec.encode(data, name="data"),
        metadata=None if metadata is None else codec.encode(metadata, name="metadata"),
        iteration=_iteration(kind, data) if kind in ITERATIONS else None,
        item_id=None if item is None else id_of_item(item),
        expected_version=expected_version,
        key=None if key is None else require_text("key", key),
    )
    head = Heads.of(runtime).get(place.number)
    if locked is not None and (head is None or head.id != locked["head"]):
        head = yield from _current_head(runtime, place, expected_version, [locked])
    if head is not None and is_simple(head, changes):
        how: dict[str, Any] = {"unless_key": key, "also": also, "has_begun": locked is not None}
        written = yield from write_after(runtime, place, wanted, head, **how)
        if written is not None:
            return written
    # The remembered head is stale, or the write is not allowed: find out with the tree locked.
    found = yield from lock_and_read(runtime, place)
    if key is not None and found:
        require_fence(place, found[0])
        earlier = yield from keyed(codec, place.number, place.session_id, key)
        if earlier is not None:
            return earlier
    head = yield from _current_head(runtime, place, expected_version, found)
    if kind == "turn" and found[0]["awaits_turn"]:
        also = TURN_TOLD
        here = SessionRef(place.session_id, place.number, place.root_id)
        for noun in reversed(runtime.nouns):
            yield from noun.turn_saved(runtime, here)
    written = yield from write_after(runtime, place, wanted, head, also=also, has_begun=True)
    assert written is not None
    return written


def _iteration(kind: str, data: Any) -> int:
    iteration = data.get("iteration", 0) if isinstance(data, dict) else 0
    if not _is_whole(iteration) or iteration < 1:
        raise InvalidArgument(f'{kind} needs data {{"iteration": N}} with N from 1 up')
    return int(iteration)


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < VERSIONS


def _current_head(
    runtime: Runtime, place: Place, expected_version: int | None, found: list[Row]
) -> Op[Head]:
    """Return the head of a session whose tree is locked, or raise if it may not be written."""
    row = require_writable(runtime, place, found)
    version = row["version"]
    if expected_version not in {None, version}:
        raise VersionConflict(
            f"session {place.session_id} is at version {version}, "
            f"not {expected_version}; load it and decide again",
            session_id=place.session_id,
            current_version=version,
            expected_version=expected_version,
        )
    known = Heads.of(runtime).get(place.number)
    if known is not None and known.id == row["head"]:
        return known
    manifest: Manifest = {}
    with naming(place.session_id, version):
        if version > 0:
            newest = yield from one(READ_MANIFEST, key=place.number * VERSIONS + version)
            if newest is None:
                raise CorruptRecord(
                    f"session number {place.number} has lost its version {version}, which is the "
                    "newest"
                )
            manifest = lines.manifest_of(runtime.codec, newest)
    return Head(row["head"], version, manifest)


def end_session(runtime: Runtime, place: Place, before: str, status: str) -> Op[None]:
    """End a session whose tree is locked, release its lease, and tell every noun."""
    yield from together(ending(runtime, place, before, status))


def ending(
    runtime: Runtime,
    place: Place,
    before: str,
    status: str,
    locked: Row | None = None,
    *,
    raises_fence: bool = False,
    but: Noun | None = None,
) -> list[Op[None]]:
    """Return the parts of the end of a session, which run side by side.

    Every noun is told `but` one that does its part by itself.
    """
    here = SessionRef(place.session_id, place.number, place.root_id)
    told = (
        noun.ended(runtime, here, status) for noun in reversed(runtime.nouns) if noun is not but
    )
    change = released(status, raises_fence=raises_fence)
    return [record_status(runtime, place, before, status, locked, change), *told]


def record_status(
    runtime: Runtime,
    place: Place,
    before: str,
    after: str,
    locked: Row | None = None,
    also: RowChange = ONLY_HEAD,
    **more: Any,
) -> Op[None]:
    """Record a change of status in the session's history and in the feed; `also` makes it."""
    data = {"from": before, "to": after, **more}
    yield from write(runtime, place, "state_transition", {}, data, locked=locked, also=also)
    yield from emit(runtime.codec, place.root_id, place.session_id, "session_status_changed", data)


@functools.cache
def _advance_head(assignments: str, *, adds: bool = False) -> str:
    """Return the statement that moves a session's head, with other assignments to its row.

    One that `adds` the checkpoint too is for PostgreSQL.
    """
    also = f", {assignments}" if assignments else ""
    returned = "number, version, epoch, root_id" if adds else "version"
    move = access.ADVANCE_SESSION.format(unless=UNLESS_WRITTEN, also=also, returned=returned)
    return MOVE_AND_ADD.format(move=move) if adds else move


def write_after(
    runtime: Runtime,
    place: Place,
    wanted: Draft,
    head: Head,
    *,
    unless_key: str | None = None,
    also: RowChange = ONLY_HEAD,
    has_begun: bool = False,
) -> Op[Checkpoint | None]:
    """Write the version after a head; None if the head has moved or may not be moved.

    It is not moved either if a version may have been written with `unless_key`. `has_begun` says
    that this transaction has run statements before.
    """
    codec = runtime.codec
    plan = ChannelPlan(codec, head.id, dict(head.manifest), dict(head.lists))
    yield from plan.add(wanted.changes)
    version = head.version + 1
    if version == VERSIONS:
        raise _too_many_versions(place.session_id)
    key = place.number * VERSIONS + version
    new_head = random_id((yield FreshId()))
    here = {"number": place.number, "head": new_head}
    advance = {
        **also.parameters,
        **here,
        "old_head": head.id,
        "expected": wanted.expected_version,
        "unless_key": unless_key,
        "fence": place.fence,
        "epochs": int(wanted.opens_epoch),
        "is_turn": int(wanted.kind == "turn" and also is not TURN_TOLD),
    }
    row: dict[str, object] = {
        **here,
        "kind": wanted.kind,
        "iteration": wanted.iteration,
        "item_id": wanted.item_id,
        "idempotency_key": wanted.key,
    }
    manifest = lines.write_manifest(codec, plan.manifest)
    bodies = (("manifest", manifest), ("data", wanted.data), ("metadata", wanted.metadata))
    for part, body in bodies:
        row[part] = body and codec.seal(body, context=lines.checkpoint_context(key, part))
    looks = []
    if place.guard is not None:
        keeper = Keeper.of(runtime)
        keeper.require_known(place.guard)
        looks = keeper.looks(place.guard)
    items = _item_queries(plan, here)
    # A call in one round trip extends its last statement, which must not change two tables then.
    if has_begun and not items and runtime.driver.dialect == "postgres":
        writes = [Query(_advance_head(also.assignments, adds=True), {**advance, **row})]
    else:
        move = Query(_advance_head(also.assignments), advance)
        writes = [move, *items, Query(ADD_CHECKPOINT, row)]
    told = {"version": version, "kind": wanted.kind}
    answers = yield Decide(
        # Whether the tree is there is seen by its session.
        [Lock(place.root_id, is_asked=False), *looks, *writes],
        emits=[event(codec, place.root_id, place.session_id, "checkpoint_saved", told)],
        again=Query(READ_ADDED, {"key": key}),
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


def _too_many_versions(session_id: str) -> LimitExceeded:
    return LimitExceeded(
        f"session {session_id} has had {VERSIONS - 1:,} versions, which is the maximum; "
        "continue in a new session",
        session_id=session_id,
    )


def _item_queries(plan: ChannelPlan, here: Mapping[str, object]) -> list[Query]:
    """Return the statements that write a plan's items and register its new lines."""
    queries = []
    for written in plan.writes:
        if written.replaced is not None:
            low, high = written.replaced
            queries += [
                Query(OPEN_PACKING, here),
                Query(REMOVE_PACKED, {**here, "low": low, "high": high}),
                Query(CLOSE_DOOR, {"name": f"pack {here['number']}"}),
            ]
        queries += [
            Query(ADD_ITEMS, {**here, "key": key, "count": count, "data": data})
            for key, count, data in written.rows
        ]
    return queries + [
        Query(USE_OPENED_LINE, {**here, "line_id": line_id}) for line_id in plan.opened
    ]

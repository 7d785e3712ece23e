"""Forks and rewinds: a session that continues from an older version, its own or another's."""

from __future__ import annotations

from ..codec import Codec
from ..feed import emit
from ..kernel.operation import Lock, Op, Query, Row, Runtime, batch, rows
from ..records import Checkpoint
from ..sessions.access import LOOK_AT_SESSION, Place, lock_and_read, require_writable
from ..sessions.rows import place_of_number
from . import lines
from .changes import Head
from .keys import VERSIONS
from .lines import Manifest, Ref
from .read import find, naming
from .write import INSERT_CHECKPOINT, Draft, write_after

USE_LINE = """
INSERT INTO hf_uses (line_id, session_number) VALUES (:line_id, :number) ON CONFLICT DO NOTHING
"""
COPY_CHECKPOINT = f"""{INSERT_CHECKPOINT}
SELECT CAST(:key AS INTEGER), 1, kind, iteration, item_id, idempotency_key, state_sequence,
    CAST(:manifest AS BLOB), CAST(:data AS BLOB), CAST(:metadata AS BLOB), created_at
FROM hf_checkpoints WHERE key = :source
"""  # noqa: S608
ADD_EPOCH = """
INSERT INTO hf_epochs (session_number, epoch, first_version, target_version)
VALUES (:number, :epoch, :first_version, :target_version)
"""


def copy_fork_point(codec: Codec, row: Row, number: int) -> Op[None]:
    """Copy a version's row as the first of a new session; its lines are shared, not copied."""
    key = number * VERSIONS + row["key"] % VERSIONS
    manifest = lines.manifest_of(codec, row)
    moved = {channel: lines.closed(entry) for channel, entry in manifest.items()}
    bodies = {"manifest": lines.write_manifest(codec, moved)}
    for part in ("data", "metadata"):
        if row[part] is not None:
            bodies[part] = codec.unseal(
                row[part], context=lines.checkpoint_context(row["key"], part)
            )
    copy = {"data": None, "metadata": None, "key": key, "source": row["key"]}
    for part, body in bodies.items():
        copy[part] = codec.seal(body, context=lines.checkpoint_context(key, part))
    yield from rows(COPY_CHECKPOINT, **copy)
    yield from share_lines(codec, manifest, number)


def share_lines(codec: Codec, manifest: Manifest, number: int) -> Op[None]:
    """Register a session's use of every line of a manifest, those of pieces included."""
    used = lines.line_ids(manifest)
    for entry in manifest.values():
        if isinstance(entry, Ref):
            used |= {piece.line_id for piece in (yield from lines.pieces_of(codec, entry))}
    uses = ({"line_id": line_id, "number": number} for line_id in sorted(used))
    yield from batch(*(Query(USE_LINE, each) for each in uses))


def find_and_hold(number: int, session_id: str, version: int) -> Op[Row]:
    """Return the row of a version, with the tree of its origin locked if it is another's."""
    row = yield from find(number, session_id, version)
    if row["key"] // VERSIONS != number:
        origin = yield from place_of_number(row["key"] // VERSIONS)
        if origin is not None:
            yield Lock(origin["root_id"])
        row = yield from find(number, session_id, version)
    return row


def require_rewindable(runtime: Runtime, place: Place, version: int) -> Op[None]:
    """Raise if a session cannot be written to, or has no such version to continue from."""
    require_writable(runtime, place, (yield from rows(LOOK_AT_SESSION, number=place.number)))
    row = yield from find(place.number, place.session_id, version)
    _manifest(runtime, place, version, row)


def _manifest(runtime: Runtime, place: Place, version: int, row: Row) -> Manifest:
    with naming(place.session_id, version):
        return lines.manifest_of(runtime.codec, row)


def write_rewind(runtime: Runtime, place: Place, version: int) -> Op[Checkpoint]:
    """Continue from an older version in a new epoch; later versions are kept, off the path.

    Version numbers keep increasing: the rewind itself is a `state_transition` checkpoint.
    """
    data = runtime.codec.encode({"rewound_to": version})
    wanted = Draft("state_transition", {}, data, opens_epoch=True)
    # The newest version is not read, so that a session can be rewound past a damaged one.
    now = require_writable(runtime, place, (yield from lock_and_read(runtime, place)))
    row = yield from find_and_hold(place.number, place.session_id, version)
    manifest = _manifest(runtime, place, version, row)
    moved = {channel: lines.closed(entry) for channel, entry in manifest.items()}
    target = Head(now["head"], now["version"], moved)
    checkpoint = yield from write_after(runtime, place, wanted, target)
    assert checkpoint is not None
    if row["key"] // VERSIONS != place.number:
        yield from share_lines(runtime.codec, manifest, place.number)
    yield from rows(
        ADD_EPOCH,
        number=place.number,
        epoch=checkpoint.epoch,
        first_version=checkpoint.version,
        target_version=version,
    )
    told = {"version": checkpoint.version, "target": version, "epoch": checkpoint.epoch}
    yield from emit(runtime.codec, place.root_id, place.session_id, "session_rewound", told)
    return checkpoint

"""Other lines of history: forks, which are sessions of their own, and rewinds, which are epochs."""

from __future__ import annotations

from ..codec import Codec
from ..feed import emit
from ..kernel.operation import C, Lock, Op, Query, Row, batch, rows
from ..records import Checkpoint
from ..sessions.access import lock_and_look, require_writable
from ..sessions.rows import place_of_number
from . import manifest as manifests
from .handle import CheckpointOps, require_version
from .heads import Head
from .lines import SHIFT, Ref, pieces_of
from .manifest import Manifest, checkpoint_context
from .read import find, naming
from .write import Draft, write_after

COPY_CHECKPOINT = """
INSERT INTO hf_checkpoints (
    key, epoch, kind, iteration, item_id, idempotency_key, state_sequence, manifest, data, metadata,
    created_at
)
SELECT CAST(:key AS INTEGER), 1, kind, iteration, item_id, idempotency_key, state_sequence,
    CAST(:manifest AS BLOB), CAST(:data AS BLOB), CAST(:metadata AS BLOB), created_at
FROM hf_checkpoints WHERE key = :source
"""
USE = """
INSERT INTO hf_uses (line_id, session_number) VALUES (:line_id, :number) ON CONFLICT DO NOTHING
"""
OPEN_EPOCH = """
INSERT INTO hf_epochs (session_number, epoch, first_version, target_version)
VALUES (:number, :epoch, :first_version, :target_version)
"""


def copy_fork_point(codec: Codec, owner: int, row: Row, number: int) -> Op[None]:
    """Copy a version's row as the first of a new session; its lines are shared, not copied."""
    version = row["key"] % SHIFT

    def moved(part: str) -> bytes | None:
        if row[part] is None:
            return None
        body = codec.unseal(row[part], context=checkpoint_context(owner, version, part))
        return codec.seal(body, context=checkpoint_context(number, version, part))

    manifest = read_row(codec, owner, row)
    context = checkpoint_context(number, version, "manifest")
    copy = {
        "key": number * SHIFT + version,
        "source": row["key"],
        "manifest": manifests.pack(codec, manifests.closed(manifest), context),
        "data": moved("data"),
        "metadata": moved("metadata"),
    }
    yield from rows(COPY_CHECKPOINT, **copy)
    yield from share(codec, manifest, number)


def share(codec: Codec, manifest: Manifest, number: int) -> Op[None]:
    """Note that a session needs every line of a manifest, which may be another's."""
    used = yield from lines_of(codec, manifest)
    yield from batch(
        *(Query(USE, {"line_id": line_id, "number": number}) for line_id in sorted(used))
    )


def find_and_hold(number: int, session_id: str, version: int) -> Op[tuple[int, Row]]:
    """Return the row of a version; one of an origin in another tree cannot go from now on."""
    owner, row = yield from find(number, session_id, version)
    if owner != number:
        origin = yield from place_of_number(owner)
        if origin is not None:
            yield Lock(origin["root_id"])
        owner, row = yield from find(number, session_id, version)
    return owner, row


def read_row(codec: Codec, owner: int, row: Row) -> dict[str, manifests.Entry]:
    """Return the manifest that a row holds."""
    context = checkpoint_context(owner, row["key"] % SHIFT, "manifest")
    return manifests.unpack(codec, row["manifest"], context)


def lines_of(codec: Codec, manifest: Manifest) -> Op[set[int]]:
    """Return every line that a manifest needs, those of its lists' pieces included."""
    used = manifests.line_ids(manifest)
    for entry in manifest.values():
        if isinstance(entry, Ref):
            used |= {piece.line_id for piece in (yield from pieces_of(codec, entry))}
    return used


class RewindOps(CheckpointOps[C]):
    """Going back inside a session."""

    def _go_back(self, version: int) -> Op[Checkpoint]:
        """Go on from an older version, in a new epoch; what came after it stays, aside.

        Versions go on counting: the rewind itself is a `state_transition` record.
        """
        require_version(version)
        place = self._place()
        data = self.runtime.codec.encode({"rewound_to": version})
        wanted = Draft("state_transition", {}, data, None, opens_epoch=True)
        # The newest version itself is not read: a damaged one is left behind in this way.
        found = yield from lock_and_look(self.runtime, place)
        now = require_writable(self.runtime, place, found)
        owner, row = yield from find_and_hold(self.number, self.id, version)
        with naming(self.id, version):
            manifest = read_row(self.runtime.codec, owner, row)
        target = Head(now["head"], now["version"], manifests.closed(manifest))
        checkpoint = yield from write_after(self.runtime, place, wanted, target)
        assert checkpoint is not None
        if owner != self.number:
            yield from share(self.runtime.codec, manifest, self.number)
        yield from rows(
            OPEN_EPOCH,
            number=self.number,
            epoch=checkpoint.epoch,
            first_version=checkpoint.version,
            target_version=version,
        )
        told = {"version": checkpoint.version, "target": version, "epoch": checkpoint.epoch}
        yield from emit(self.runtime.codec, self.root_id, self.id, "session_rewound", told)
        return checkpoint

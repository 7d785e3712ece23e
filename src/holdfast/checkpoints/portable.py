"""Checkpoints and their lines in export files; each item is written once."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Annotated, NamedTuple

import msgspec

from ..arguments import require_text, too_large
from ..codec import Codec
from ..dataclass import dataclass
from ..errors import CorruptRecord
from ..kernel import portable
from ..kernel.inserts import Insert
from ..kernel.kept import Kept, kept
from ..kernel.operation import Op, Row
from ..kernel.owned_rows import OwnedRows, read_each
from ..records import Kind
from . import lines as stored
from .keys import ITEMS, VERSIONS, in_range
from .lines import PIECES_MAX, RUN_BYTES_MAX, RUN_ITEMS, Inline, Manifest, Piece, Stored
from .needs import LineNeeds
from .write import ITERATIONS

# The overhead of a packed run.
RUN_BYTES_MORE = 65_536
LIST_ITEMS_MAX = PIECES_MAX * ITEMS
UNREADABLE = "has channels that cannot be read"
LACKING = "lacks items"


class LineRecord(portable.Record, frozen=True, tag="line"):
    """A line, with a number local to the file, and the pieces it begins with.

    The line id 0 in a piece is the line itself.
    """

    id: portable.Positive
    pieces: Annotated[
        list[tuple[portable.Count, portable.Small, portable.Version]],
        msgspec.Meta(max_length=PIECES_MAX),
    ]

    def problem(self, seen: portable.Seen) -> str | None:
        """Check that the lines of its pieces precede it; their items may follow."""
        lines = seen.of(_Seen).lines
        if self.id in lines:
            return f"line {self.id} comes twice"
        base, needed = sum(length for _, _, length in self.pieces), 0
        if base > LIST_ITEMS_MAX:
            return f"line {self.id} begins with too many items"
        for line_id, start, length in self.pieces:
            if not line_id:
                needed = max(needed, start + length)
                continue
            other = lines.get(line_id)
            if other is None:
                return f"line {self.id} begins with items that are missing"
            lines[line_id] = other._replace(needed=max(other.needed, start + length))
        pieces = frozenset(line_id for line_id, _, _ in self.pieces if line_id)
        lines[self.id] = _Line(base, needed, pieces)
        return None

    def add(self, into: portable.Import) -> Op[None]:
        """Open a line; its number is known once it is written."""
        arrived = into.of(_Arrived)
        pieces = []
        for source, start, length in self.pieces:
            line_id = (yield from arrived.line(into, source)) if source else 0
            pieces.append(Piece(line_id, start, length))

        def note(found: list[Row]) -> None:
            line_id = arrived.lines[self.id] = found[0]["id"]
            if pieces:
                arrived.pieces[line_id] = frozenset(each.line_id or line_id for each in pieces)

        into.insert(ADD_LINE, stored.line_row(into.codec, pieces), then=note)


class ItemsRecord(portable.Record, frozen=True, tag="items"):
    """The next items of a line: one as it is, or several as a list."""

    sealed = portable.Sealed(lambda row, name: stored.item_context(row["key"]), data=None)

    line_id: portable.Positive
    index: portable.Small
    count: portable.Version
    data: bytes

    def problem(self, seen: portable.Seen) -> str | None:
        """Check that they are the next, and each a value that the store would accept."""
        codec, lines = seen.codec, seen.of(_Seen).lines
        line = lines.get(self.line_id)
        if line is None or self.index != line.end:
            return f"item {self.index} is out of order"
        if self.index + self.count > ITEMS:
            return f"line {self.line_id} has too many items of its own"
        bodies = [self.data]
        if self.count > 1:
            bodies = codec.split(self.data) if self.count <= RUN_ITEMS else []
            if len(bodies) != self.count or codec.join(bodies) != self.data:
                return f"item {self.index} does not hold the items it says"
            if len(self.data) > RUN_BYTES_MAX + RUN_BYTES_MORE:
                return f"item {self.index} is a run that is too large"
        for body in bodies:
            codec.admit(body, name="item")
        lines[self.line_id] = line._replace(end=line.end + self.count)
        return None

    def add(self, into: portable.Import) -> Op[None]:
        """Add the items to their line."""
        line_id = yield from into.of(_Arrived).line(into, self.line_id)
        into.insert(ADD_ITEMS, self.row(into.codec, key=line_id * ITEMS + self.index))


class EpochRecord(portable.Record, frozen=True, tag="epoch"):
    """A rewind of a session: the epoch that it began, its first version and its target."""

    session_number: portable.Positive
    epoch: portable.Version
    first_version: portable.Version
    target_version: portable.Version

    def problem(self, seen: portable.Seen) -> str | None:
        """Check that epochs are in order, lead back, and precede all versions."""
        number, session = self.session_number, seen.sessions.get(self.session_number)
        if session is None or number in seen.of(_Seen).versions:
            return f"epoch {self.epoch} of session {number} is out of order"
        epochs = seen.of(_Seen).epochs.get(number, [])
        last = epochs[-1] if epochs else (self.epoch - 1, 0)
        is_next = self.epoch == last[0] + 1 > 1 and last[1] < self.first_version
        if not is_next or not self.target_version < self.first_version <= session.version:
            return f"session {session.id!r} has an epoch that begins nowhere"
        epochs.append((self.epoch, self.first_version))
        seen.of(_Seen).epochs[number] = epochs
        return None

    def add(self, into: portable.Import) -> Op[None]:
        """Add the epoch."""
        number = yield from into.number(self.session_number)
        into.insert(ADD_EPOCH, self.row(into.codec, session_number=number))


class _VersionRecord(portable.Record, frozen=True):
    """A record that belongs to one version of a session."""

    session_number: portable.Positive
    version: portable.Version

    @property
    def label(self) -> str:
        """Name the version."""
        return f"{self.__struct_config__.tag} {self.version}"

    def problem(self, seen: portable.Seen) -> str | None:
        """Check that the session has or had this version."""
        session = seen.sessions.get(self.session_number)
        if session is None or self.version > session.version:
            return f"version {self.version} is referred to and does not exist"
        return None

    def _key(self, into: portable.Import) -> Op[int]:
        return (yield from into.number(self.session_number)) * VERSIONS + self.version


class CheckpointRecord(_VersionRecord, frozen=True, kw_only=True, tag="checkpoint"):
    """One version of a session; its manifest names lines of this file."""

    sealed = portable.Sealed(
        lambda row, name: stored.checkpoint_context(row["key"], name),
        manifest=None,
        data=portable.ANY,
        metadata=portable.METADATA,
    )
    counted = "checkpoints"

    epoch: portable.Version
    kind: Kind
    iteration: portable.Count | None = None
    item_id: portable.Name | None = None
    idempotency_key: portable.Text | None = None
    state_sequence: portable.Count
    manifest: bytes
    data: bytes | None = None
    metadata: bytes | None = None
    created_at: portable.Time

    def problem(self, seen: portable.Seen) -> str | None:
        """Check the order of versions, the epoch, the iteration, and that all items are there."""
        checkpoints, session = seen.of(_Seen), seen.sessions.get(self.session_number)
        last = checkpoints.versions.get(self.session_number, 0)
        if session is None or not last < self.version <= session.version:
            return f"checkpoint {self.version} is out of order"
        epochs = checkpoints.epochs.get(self.session_number, [])
        begun = [epoch for epoch, first in epochs if first <= self.version]
        epoch = max(begun, default=session.epoch - len(epochs))
        # The first version of a fork is a copy.
        if self.epoch != epoch and self.version != session.origin_version:
            return f"checkpoint {self.version} has the wrong epoch"
        iteration = None
        if self.kind in ITERATIONS and self.data is not None:
            data = seen.codec.decode(self.data)
            iteration = data.get("iteration") if type(data) is dict else None
        if iteration != self.iteration or (self.kind in ITERATIONS) == (iteration is None):
            return f"checkpoint {self.version} has the wrong iteration"
        if problem := checkpoints.problem_of(seen.codec, self.manifest):
            return f"checkpoint {self.version} of {session.id!r} {problem}"
        checkpoints.versions[self.session_number] = self.version
        return None

    def add(self, into: portable.Import) -> Op[None]:
        """Add the version, and register the lines that its session uses."""
        codec, arrived = into.codec, into.of(_Arrived)
        key = yield from self._key(into)
        manifest = stored.read_manifest(codec, self.manifest)
        moved = {channel: arrived.moved(entry) for channel, entry in manifest.items()}
        body = stored.write_manifest(codec, moved)
        into.insert(ADD_CHECKPOINT, self.row(codec, key=key, manifest=body))
        for line_id in sorted(arrived.newly_used(key // VERSIONS, moved)):
            into.insert(ADD_USE, {"line_id": line_id, "session_number": key // VERSIONS})


class PinRecord(_VersionRecord, frozen=True, tag="pin"):
    """A pin of a version."""

    reason: portable.Text
    created_at: portable.Time

    def problem(self, seen: portable.Seen) -> str | None:
        """Check also that it is not repeated."""
        pinned = seen.of(_Seen).pinned
        if self.version <= pinned.get(self.session_number, 0):
            id = seen.sessions[self.session_number].id
            return f"the pin of version {self.version} of {id!r} comes twice"
        problem = super().problem(seen)
        pinned[self.session_number] = self.version
        return problem

    def add(self, into: portable.Import) -> Op[None]:
        """Add the pin."""
        key = yield from self._key(into)
        reason = into.codec.pack(self.reason, context=_pin(key))
        into.insert(ADD_PIN, self.row(into.codec, key=key, reason=reason))


class AttestationRecord(_VersionRecord, frozen=True, tag="attestation"):
    """An attestation of a version."""

    sealed = portable.Sealed(
        lambda row, name: ("hf_attestations", str(row["key"])), evidence=portable.ANY
    )

    evidence: bytes
    created_at: portable.Time

    def add(self, into: portable.Import) -> Op[None]:
        """Add the attestation."""
        key = yield from self._key(into)
        into.insert(ADD_ATTESTATION, self.row(into.codec, key=key))


class _Line(NamedTuple):
    """A line as seen so far, and up to which of its own items it is needed."""

    base: int
    needed: int = 0
    pieces: frozenset[int] = frozenset()
    end: int = 0
    is_used: bool = False


@dataclass(slots=True)
class _Seen:
    """What was seen of a file's checkpoints."""

    lines: Kept[int, _Line] = kept(_Line)
    epochs: Kept[int, list[tuple[int, int]]] = kept(list[tuple[int, int]])
    """The epochs that rewinds began, by session, each with its first version."""
    versions: Kept[int, int] = kept(int)
    pinned: Kept[int, int] = kept(int)

    def problem_of(self, codec: Codec, body: bytes) -> str | None:
        """Return what is wrong with a manifest."""
        if len(body) > codec.limits.value_bytes:
            raise too_large("channels", len(body), codec.limits.value_bytes, "value_bytes")
        try:
            manifest = stored.read_manifest(codec, body)
            if stored.write_manifest(codec, manifest) != body:
                return UNREADABLE
        except (AttributeError, TypeError, ValueError, CorruptRecord):
            return UNREADABLE
        for channel, entry in manifest.items():
            require_text("channel", channel)
            if isinstance(entry, Inline):
                codec.admit(entry.body, name=channel)
                if len(entry.body) > stored.INLINE_BYTES_MAX:
                    return UNREADABLE
                continue
            line = self.lines.get(entry.line_id)
            if line is None or not self._holds(line, entry):
                return LACKING
            for line_id in (entry.line_id, *line.pieces):
                if not self.lines[line_id].is_used:
                    self.lines[line_id] = self.lines[line_id]._replace(is_used=True)
        return None

    def _holds(self, line: _Line, entry: Stored | stored.Ref) -> bool:
        if isinstance(entry, Stored):
            return line.end > 0
        is_possible = 0 <= entry.base <= entry.length and entry.skip >= 0
        return is_possible and line.base == entry.base and line.end >= entry.own_end


@dataclass(slots=True)
class _Arrived:
    """The state of importing checkpoints: new line numbers by those in the file."""

    lines: Kept[int, int] = kept(int)
    pieces: Kept[int, frozenset[int]] = kept(frozenset[int])
    """The lines that a line has pieces of."""
    _number: int = 0
    _used: frozenset[int] = frozenset()

    def line(self, into: portable.Import, source: int) -> Op[int]:
        """Return the new number of a line."""
        found = self.lines.get(source)
        if found is None:
            yield from into.flush()
            found = self.lines[source]
        return found

    def moved(self, entry: stored.Entry) -> stored.Entry:
        """Return an entry with its line's new number."""
        if isinstance(entry, Inline):
            return entry
        return replace(entry, line_id=self.lines[entry.line_id])

    def newly_used(self, number: int, manifest: Manifest) -> frozenset[int]:
        """Return the lines that a version uses and the one before it in the session did not."""
        before = self._used if number == self._number else frozenset()
        lines = frozenset(stored.line_ids(manifest))
        used = lines.union(*(self.pieces.get(line_id, ()) for line_id in lines))
        self._number, self._used = number, used
        return used - before


LINE_ITEMS = OwnedRows("key, count, data", "hf_items", in_range(ITEMS), {"key": -1})
EPOCHS = OwnedRows(
    "session_number, epoch, first_version, target_version",
    "hf_epochs",
    "session_number = {owner}",
    {"epoch": 0},
)
# The rows of versions, in the order of the file.
OF_VERSIONS: tuple[tuple[type[_VersionRecord], OwnedRows], ...] = (
    (
        CheckpointRecord,
        OwnedRows(
            f"key, {CheckpointRecord.selected('session_number', 'version')}",
            "hf_checkpoints",
            in_range(VERSIONS),
            {"key": 0},
        ),
    ),
    (
        PinRecord,
        OwnedRows("key, reason, created_at", "hf_pins", in_range(VERSIONS), {"key": 0}),
    ),
    (
        AttestationRecord,
        OwnedRows(
            "number, key, evidence, created_at",
            "hf_attestations",
            in_range(VERSIONS),
            {"number": 0},
        ),
    ),
)
ADD_LINE = Insert("hf_lines", ("base", "pieces"), "RETURNING id")
ADD_ITEMS = Insert("hf_items", ("key", "count", "data"))
ADD_EPOCH = Insert("hf_epochs", EpochRecord.columns())
ADD_CHECKPOINT = Insert(
    "hf_checkpoints", CheckpointRecord.columns("key", without=["session_number", "version"])
)
ADD_USE = Insert("hf_uses", ("line_id", "session_number"), "ON CONFLICT DO NOTHING")
ADD_PIN = Insert("hf_pins", ("key", "reason", "created_at"))
ADD_ATTESTATION = Insert("hf_attestations", ("key", "evidence", "created_at"))


class CheckpointsPortable(portable.Portable):
    """Versions are exported with the lines they share, up to the last item that any needs."""

    records = (
        LineRecord,
        ItemsRecord,
        EpochRecord,
        CheckpointRecord,
        PinRecord,
        AttestationRecord,
    )

    def export(self, out: portable.Export) -> Op[None]:
        """Write lines, items, epochs, versions, pins and attestations."""
        codec = out.codec
        needs = LineNeeds(Kept(int), Kept(list[Piece]), Kept(int))
        yield from needs.read(codec, out.sessions)
        for line_id in needs.ends:
            pieces = needs.pieces.get(line_id, [])
            out.write(LineRecord(line_id, [_plain(line_id, piece) for piece in pieces]))
        yield from _write_items(needs, out)
        yield from read_each(EPOCHS, out.sessions, EpochRecord.to(out))

        def write(kind: type[_VersionRecord], row: Row) -> None:
            number, version = divmod(row["key"], VERSIONS)
            if kind is PinRecord:
                row["reason"] = codec.unpack(row["reason"], context=_pin(row["key"]))
            out.write(kind.of(codec, row, session_number=number, version=version))

        for kind, owned in OF_VERSIONS:
            yield from read_each(owned, out.sessions, partial(write, kind))

    def problem_at_end(self, seen: portable.Seen) -> str | None:
        """Check that every line is used and complete, and that epochs match."""
        checkpoints = seen.of(_Seen)
        for number, epochs in checkpoints.epochs.items():
            if epochs[-1][0] != seen.sessions[number].epoch:
                return f"session {seen.sessions[number].id!r} has an epoch that begins nowhere"
        for line_id, line in checkpoints.lines.items():
            if line.end < line.needed:
                return f"line {line_id} lacks items between {line.end} and {line.needed}"
            if not line.is_used:
                return f"line {line_id} is used by no checkpoint"
        return None


def _pin(key: int) -> tuple[str, ...]:
    return "hf_pins", str(key)


def _write_items(needs: LineNeeds, out: portable.Export) -> Op[None]:
    """Write the items of lines up to the last needed one, splitting a packed run if necessary."""
    written: Kept[int, int] = Kept(int)

    def write(row: Row) -> None:
        line_id, index = divmod(row["key"], ITEMS)
        end = needs.ends[line_id]
        if index == written.get(line_id, 0):
            record = ItemsRecord.of(out.codec, row, line_id=line_id, index=index)
            written[line_id] = min(index + record.count, end)
            if index + record.count <= end:
                out.write(record)
                return
            for place, body in enumerate(out.codec.split(record.data)[: end - index], index):
                out.write(ItemsRecord(line_id, place, 1, body))

    yield from read_each(LINE_ITEMS, needs.ends, write)
    for line_id, end in needs.ends.items():
        if written.get(line_id, 0) < end:
            raise stored.lacking(line_id, written.get(line_id, 0), end)


def _plain(line_id: int, piece: Piece) -> tuple[int, int, int]:
    """Return a piece for the file, where 0 is the line itself."""
    return 0 if piece.line_id == line_id else piece.line_id, piece.start, piece.length

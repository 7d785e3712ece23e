"""Lines and manifests: how channels are stored, so that a turn costs only what it adds.

A line is a list, stored as a piece table: it begins with pieces of older lines, fixed when it is
opened, followed by its own items. A checkpoint sees the first `length` items of a line; only the
head of the session that opened a line appends to it. Own items are single rows until a run of 64 is
full, which is then packed into one row. A manifest maps the channels of a checkpoint to lines.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any, NamedTuple, TypeAlias

from ..codec import Codec, Raw
from ..dataclass import dataclass
from ..errors import CorruptRecord
from ..kernel.operation import Op, Query, Row, batch, one
from .keys import ITEMS, VERSIONS

RUN_ITEMS = 64
RUN_BYTES_MAX = 524_288
PIECES_MAX = 64
INLINE_BYTES_MAX = 128

ADD_LINE = "INSERT INTO hf_lines (base, pieces) VALUES (:base, CAST(:pieces AS BLOB)) RETURNING id"
READ_PIECES = "SELECT pieces FROM hf_lines WHERE id = :line_id"
READ_RANGE = """
SELECT key, count, data FROM hf_items WHERE key >= :low AND key < :high ORDER BY key
"""

_INLINE, _VALUE, _OPEN, _CLOSED = range(4)


class Piece(NamedTuple):
    """A run of another line's own items."""

    line_id: int
    start: int
    length: int


@dataclass(frozen=True, slots=True)
class Inline:
    """A small value, stored as a body in the manifest itself."""

    body: bytes


@dataclass(frozen=True, slots=True)
class Stored:
    """A value that is the only item of a line."""

    line_id: int


@dataclass(frozen=True, slots=True)
class Ref:
    """A list as a checkpoint sees it: the first `length` items of a line.

    Below `base` the items come from pieces; the item `base + n` is the line's own `skip + n`.
    """

    line_id: int
    length: int
    base: int = 0
    skip: int = 0
    is_open: bool = True

    @property
    def own_end(self) -> int:
        """The index of the line's next own item."""
        return self.skip + self.length - self.base


Entry: TypeAlias = Inline | Stored | Ref
Manifest: TypeAlias = Mapping[str, Entry]


def item_context(key: int) -> tuple[str, str]:
    """Return the context that an item's record is bound to."""
    return "hf_items", str(key)


def checkpoint_context(key: int, part: str) -> tuple[str, ...]:
    """Return the context that a part of a checkpoint is bound to."""
    number, version = divmod(key, VERSIONS)
    return "hf_checkpoints", str(number), str(version), part


def write_manifest(codec: Codec, manifest: Manifest) -> bytes:
    """Return a manifest as a body; inline values were checked before."""
    fields: dict[str, list[Any]] = {}
    for channel, entry in manifest.items():
        if isinstance(entry, Ref):
            fields[channel] = [_OPEN if entry.is_open else _CLOSED, entry.line_id, entry.length]
            if entry.base:
                fields[channel] += [entry.base, entry.skip]
        elif isinstance(entry, Stored):
            fields[channel] = [_VALUE, entry.line_id]
        else:
            fields[channel] = [_INLINE, Raw(entry.body)]
    return codec.compose(fields, name="channels")


def read_manifest(codec: Codec, body: bytes) -> dict[str, Entry]:
    """Return the manifest of a body."""
    return {channel: _entry(codec, fields) for channel, fields in codec.decode(body).items()}


def manifest_of(codec: Codec, row: Row) -> dict[str, Entry]:
    """Return the manifest of a checkpoint's row."""
    context = checkpoint_context(row["key"], "manifest")
    return read_manifest(codec, codec.unseal(row["manifest"], context=context))


def _entry(codec: Codec, fields: list[Any]) -> Entry:
    match fields:
        case [0, value]:
            return Inline(codec.encode_decoded(value))
        case [_, *numbers] if any(type(number) is not int for number in numbers):
            pass
        case [1, line_id]:
            return Stored(line_id)
        case [(2 | 3) as mark, line_id, length]:
            return Ref(line_id, length, is_open=mark == _OPEN)
        case [(2 | 3) as mark, line_id, length, base, skip]:
            return Ref(line_id, length, base, skip, is_open=mark == _OPEN)
    raise CorruptRecord("a manifest has an entry of a kind that this Holdfast does not know")


def closed(entry: Entry) -> Entry:
    """Return an entry for another head, which must open its own line to append."""
    return replace(entry, is_open=False) if isinstance(entry, Ref) else entry


def line_ids(manifest: Manifest) -> set[int]:
    """Return the lines that a manifest names, without the lines of their pieces."""
    return {entry.line_id for entry in manifest.values() if not isinstance(entry, Inline)}


def list_header(count: int) -> bytes:
    """Return the MessagePack header of a list, before the bodies of its items."""
    if count < 16:
        return bytes([0x90 | count])
    if count < 2**16:
        return b"\xdc" + count.to_bytes(2)
    return b"\xdd" + count.to_bytes(4)


def open_line(codec: Codec, pieces: Sequence[Piece]) -> Op[int]:
    """Open a new line that begins with pieces of others."""
    row = yield from one(ADD_LINE, **line_row(codec, pieces))
    assert row is not None
    return int(row["id"])


def line_row(codec: Codec, pieces: Sequence[Piece]) -> Row:
    """Return the row of a line that begins with pieces of others."""
    sealed = codec.pack([list(piece) for piece in pieces]) if pieces else None
    return {"base": sum(piece.length for piece in pieces), "pieces": sealed}


def pieces_of(codec: Codec, ref: Ref) -> Op[list[Piece]]:
    """Return the pieces that make up a list."""
    pieces: list[Piece] = []
    if ref.base:
        row = yield from one(READ_PIECES, line_id=ref.line_id)
        if row is None or row["pieces"] is None:
            raise CorruptRecord(f"line {ref.line_id} has lost its pieces", line_id=ref.line_id)
        pieces = [
            # 0 is the line itself, whose id was not known when its pieces were written.
            Piece(line_id or ref.line_id, start, count)
            for line_id, start, count in codec.unpack(row["pieces"])
        ]
    own = ref.length - ref.base
    return pieces + ([Piece(ref.line_id, ref.skip, own)] if own else [])


def cut(pieces: Iterable[Piece], start: int, end: int) -> list[Piece]:
    """Return the pieces of the items from `start` to `end`."""
    found = []
    for line_id, first, count in pieces:
        low, high = max(0, start), min(count, end)
        if low < high:
            found.append(Piece(line_id, first + low, high - low))
        start, end = start - count, end - count
    return found


def bodies_of(codec: Codec, pieces: Sequence[Piece]) -> Op[list[bytes]]:
    """Return the bodies of the items of these pieces, in order."""
    return (yield from _read(codec, pieces, _bodies))


def values_of(codec: Codec, pieces: Sequence[Piece]) -> Op[list[Any]]:
    """Return the items of these pieces, in order."""
    return (yield from _read(codec, pieces, _values))


def _read(
    codec: Codec, pieces: Sequence[Piece], items_of: Callable[[Codec, Piece, Row], list[Any]]
) -> Op[list[Any]]:
    items: list[Any] = []
    answers = (yield from batch(*map(_range, pieces))) if pieces else []
    for piece, rows in zip(pieces, answers, strict=True):
        found: list[Any] = []
        for row in rows:
            found += items_of(codec, piece, row)
        items += _within(piece, rows, found)
    return items


def _bodies(codec: Codec, _: Piece, row: Row) -> list[bytes]:
    body = codec.unseal(row["data"], context=item_context(row["key"]))
    return [body] if row["count"] == 1 else codec.split(body)


def _values(codec: Codec, piece: Piece, row: Row) -> list[Any]:
    """Return the items of a row, with None in place of those before the piece."""
    index, count = row["key"] % ITEMS, row["count"]
    if index + count <= piece.start:
        return [None] * count
    context = item_context(row["key"])
    if count == 1:
        return [codec.unpack(row["data"], context=context)]
    low, high = max(0, piece.start - index), piece.start + piece.length - index
    if low == 0 and high >= count:
        values: list[Any] = codec.unpack(row["data"], context=context)
        return values
    return [None] * low + codec.unpack_items(row["data"], low, high, context=context)


def _range(piece: Piece) -> Query:
    # The first item may be in the middle of a packed run.
    low = piece.start // RUN_ITEMS * RUN_ITEMS
    line = piece.line_id * ITEMS
    return Query(READ_RANGE, {"low": line + low, "high": line + piece.start + piece.length})


def _within(piece: Piece, rows: list[Row], found: list[Any]) -> list[Any]:
    """Return the piece's items of the rows found; raise if some are missing."""
    first = rows[0]["key"] % ITEMS if rows else piece.start
    is_dense = all(
        before["key"] + before["count"] == after["key"] for before, after in pairwise(rows)
    )
    wanted = found[piece.start - first : piece.start - first + piece.length]
    if first > piece.start or not is_dense or len(wanted) != piece.length:
        raise lacking(piece.line_id, piece.start, piece.start + piece.length)
    return wanted


def lacking(line_id: int, start: int, end: int) -> CorruptRecord:
    """Return the error for a line with missing items."""
    return CorruptRecord(f"line {line_id} lacks items between {start} and {end}", line_id=line_id)


@dataclass(frozen=True, slots=True)
class LineRows:
    """New rows of a line, and the range of keys of the rows that they replace."""

    rows: list[tuple[int, int, bytes]]
    replaced: tuple[int, int] | None = None


def write_items(
    codec: Codec, line_id: int, start: int, tail: Sequence[bytes], new: Sequence[bytes]
) -> LineRows:
    """Return the rows that append items at an index; `tail` are the items since the last full run.

    Runs begin at multiples of 64. A full one becomes one row that replaces its single rows.
    """
    first, line = start - len(tail), line_id * ITEMS
    pending = [*tail, *new]
    rows: list[tuple[int, int, bytes]] = []
    replaced = None
    taken = 0
    while taken < len(pending):
        index = first + taken
        run = pending[taken : taken + RUN_ITEMS - index % RUN_ITEMS]
        taken += len(run)
        if len(run) == RUN_ITEMS and sum(map(len, run)) <= RUN_BYTES_MAX:
            if index < start:
                replaced = (line + index, line + start)
            sealed = codec.seal(codec.join(run), context=("hf_items", str(line + index)))
            rows.append((line + index, RUN_ITEMS, sealed))
            continue
        for key, body in enumerate(run, line + index):
            if key >= line + start:
                rows.append((key, 1, codec.seal(body, context=("hf_items", str(key)))))
    return LineRows(rows, replaced)


def cut_run(codec: Codec, line_id: int, end: int) -> Op[LineRows | None]:
    """Return the rows that replace a packed run which extends beyond `end`, or None."""
    for row in (yield from batch(_range(Piece(line_id, end, 0))))[0]:
        index = row["key"] % ITEMS
        if index + row["count"] > end:
            body = codec.unseal(row["data"], context=item_context(row["key"]))
            kept = write_items(codec, line_id, index, [], codec.split(body)[: end - index])
            return LineRows(kept.rows, (row["key"], (line_id + 1) * ITEMS))
    return None

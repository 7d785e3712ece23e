"""Lines: where lists and large values lie, so that a turn costs what it adds.

A line has pieces of older lines, fixed when it is opened, and behind them its own items. A place
in a list is (line, length); only the head of the session that opened a line appends to it. Own
items are single rows until a run of 64 is full; then it becomes one row.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

from ..codec import Codec
from ..errors import CorruptRecord
from ..kernel.operation import Op, Query, Row, batch, one

RUN_ITEMS = 64
RUN_BYTES_MAX = 524_288
PIECES_MAX = 64
SHIFT = 2**32

OPEN = "INSERT INTO hf_lines (base, pieces) VALUES (:base, CAST(:pieces AS BLOB)) RETURNING id"
PIECES = "SELECT pieces FROM hf_lines WHERE id = :line_id"
RANGE = """
SELECT key, count, data FROM hf_items WHERE key >= :low AND key < :high ORDER BY key
"""


class Piece(NamedTuple):
    """A run of another line's own items."""

    line_id: int
    start: int
    length: int


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
        """The index that the line's next own item gets."""
        return self.skip + self.length - self.base

    def closed(self) -> Ref:
        """Return the same list for another head, which must open a line of its own."""
        return Ref(self.line_id, self.length, self.base, self.skip, is_open=False)


def item_context(key: int) -> tuple[str, str]:
    """Return the place that an item's record is bound to."""
    return "hf_items", str(key)


def list_header(count: int) -> bytes:
    """Return the MessagePack header of a list, before the bodies of its items."""
    if count < 16:
        return bytes([0x90 | count])
    if count < 2**16:
        return b"\xdc" + count.to_bytes(2)
    return b"\xdd" + count.to_bytes(4)


def open_line(codec: Codec, pieces: Sequence[Piece]) -> Op[int]:
    """Open a new line that begins with pieces of others."""
    base = sum(piece.length for piece in pieces)
    sealed = codec.pack([list(piece) for piece in pieces]) if pieces else None
    row = yield from one(OPEN, base=base, pieces=sealed)
    assert row is not None
    return int(row["id"])


def pieces_of(codec: Codec, ref: Ref) -> Op[list[Piece]]:
    """Return where every item of a list lies, as runs of lines' own items."""
    pieces: list[Piece] = []
    if ref.base:
        row = yield from one(PIECES, line_id=ref.line_id)
        if row is None or row["pieces"] is None:
            raise CorruptRecord(f"line {ref.line_id} has lost its pieces", line_id=ref.line_id)
        pieces = [
            # A line's pieces may name the line itself: its id was not known when they were written.
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
    """Return the bodies of the items that lie in these pieces, in order."""
    if not pieces:
        return []
    answers = yield from batch(*(_range(piece) for piece in pieces))
    bodies: list[bytes] = []
    for piece, rows in zip(pieces, answers, strict=True):
        bodies += _trim(codec, piece, rows)
    return bodies


def values_of(codec: Codec, pieces: Sequence[Piece]) -> Op[list[Any]]:
    """Return the items that lie in these pieces, in order."""
    if not pieces:
        return []
    answers = yield from batch(*(_range(piece) for piece in pieces))
    values: list[Any] = []
    for piece, rows in zip(pieces, answers, strict=True):
        found: list[Any] = []
        for row in rows:
            found += _values(codec, piece, row)
        values += _within(piece, rows, found)
    return values


def _values(codec: Codec, piece: Piece, row: Row) -> list[Any]:
    """Return the items of a row; in place of those before the piece stands None."""
    index, count = row["key"] % SHIFT, row["count"]
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
    # A run of 64 may hold the first item in its middle.
    low = piece.start // RUN_ITEMS * RUN_ITEMS
    line = piece.line_id * SHIFT
    return Query(RANGE, {"low": line + low, "high": line + piece.start + piece.length})


def _trim(codec: Codec, piece: Piece, rows: list[Row]) -> list[bytes]:
    found: list[bytes] = []
    for row in rows:
        body = codec.unseal(row["data"], context=item_context(row["key"]))
        found += [body] if row["count"] == 1 else codec.split(body)
    return _within(piece, rows, found)


def _within(piece: Piece, rows: list[Row], found: list[Any]) -> list[Any]:
    """Cut off what a packed run holds around the piece; refuse a line with a hole."""
    first = rows[0]["key"] % SHIFT if rows else piece.start
    is_dense = all(
        before["key"] + before["count"] == after["key"] for before, after in pairwise(rows)
    )
    wanted = found[piece.start - first : piece.start - first + piece.length]
    if first > piece.start or not is_dense or len(wanted) != piece.length:
        raise CorruptRecord(
            f"line {piece.line_id} lacks items between {piece.start} and "
            f"{piece.start + piece.length}",
            line_id=piece.line_id,
        )
    return wanted


@dataclass(frozen=True, slots=True)
class Write:
    """Rows of a line to be written: new ones, and a run of single ones that they replace."""

    rows: list[tuple[int, int, bytes]]
    replaced: tuple[int, int] | None = None


def write_items(
    codec: Codec, line_id: int, start: int, tail: Sequence[bytes], new: Sequence[bytes]
) -> Write:
    """Return the rows that append items at an index; `tail` are those since the last full run.

    Runs begin at multiples of 64. A full one becomes one row, in place of its single rows.
    """
    first, line = start - len(tail), line_id * SHIFT
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
    return Write(rows, replaced)


def written_until(codec: Codec, line_id: int, end: int) -> Op[Write | None]:
    """Return what takes the place of a run that reaches beyond an end; None if there is none."""
    for row in (yield from batch(_range(Piece(line_id, end, 0))))[0]:
        index = row["key"] % SHIFT
        if index + row["count"] > end:
            body = codec.unseal(row["data"], context=item_context(row["key"]))
            kept = codec.split(body)[: end - index]
            return Write(
                write_items(codec, line_id, index, [], kept).rows,
                (row["key"], (line_id + 1) * SHIFT),
            )
    return None

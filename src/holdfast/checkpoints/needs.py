"""Which parts of lines checkpoints need, read from manifests; for long sessions in advance."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, MutableMapping, Sequence
from dataclasses import field
from itertools import chain
from typing import ParamSpec, TypeVar

from ..codec import Codec
from ..dataclass import dataclass
from ..errors import CorruptRecord
from ..kernel.flow import Flow, perform
from ..kernel.operation import (
    Op,
    PerStore,
    Query,
    Row,
    Runtime,
    batch,
    large_query,
    operation,
    rows,
)
from ..kernel.owned_rows import OwnedRows, read_each
from .keys import VERSIONS, in_range
from .lines import Manifest, Piece, Ref, Stored, manifest_of, pieces_of

P = ParamSpec("P")
T = TypeVar("T")

MANIFESTS_PER_PAGE = 500
# At most this many versions are read while trees are locked.
VERSIONS_AT_ONCE = 1_000
QUERIES_PER_BATCH = 100

LIST_MANIFESTS = """
SELECT key, manifest FROM hf_checkpoints WHERE key > :after AND key < :high
ORDER BY key LIMIT :limit
"""
MANIFESTS = OwnedRows("key, manifest", "hf_checkpoints", in_range(VERSIONS), {"key": 0})
COUNT_VERSIONS = """
SELECT count(*) AS count FROM hf_checkpoints WHERE key > :after AND key <= :newest
"""


@dataclass(slots=True)
class LineNeeds:
    """Which lines checkpoints need, each with its pieces and up to which of its own items."""

    ends: MutableMapping[int, int] = field(default_factory=dict)
    pieces: MutableMapping[int, list[Piece]] = field(default_factory=dict)

    _bases: MutableMapping[int, int] = field(default_factory=dict)
    """Lines that begin with pieces which are not known yet, and with how many items."""

    def add(self, codec: Codec, manifest: Manifest) -> Op[None]:
        """Add what a manifest refers to."""
        self.note(manifest)
        yield from self.read_pieces(codec)

    def note(self, manifest: Manifest) -> None:
        """Add what a manifest refers to, except pieces that are not known yet."""
        for entry in manifest.values():
            if isinstance(entry, Stored):
                self._add([Piece(entry.line_id, 0, 1)])
            elif isinstance(entry, Ref):
                if entry.base and entry.line_id not in self.pieces:
                    self._bases[entry.line_id] = entry.base
                self._add([Piece(entry.line_id, entry.skip, entry.length - entry.base)])

    def read_pieces(self, codec: Codec) -> Op[None]:
        """Add the pieces that lines begin with."""
        for line_id, base in self._bases.items():
            self.pieces[line_id] = yield from pieces_of(codec, Ref(line_id, base, base))
            self._add(self.pieces[line_id])
        self._bases.clear()

    def read(self, codec: Codec, numbers: Iterable[int]) -> Op[None]:
        """Add the needs of sessions, reading every manifest once."""
        yield from read_each(MANIFESTS, numbers, lambda row: self.note(manifest_of(codec, row)))
        yield from self.read_pieces(codec)

    def include(self, other: LineNeeds) -> None:
        """Add the needs of others."""
        self._add(Piece(line_id, 0, end) for line_id, end in other.ends.items())

    def _add(self, pieces: Iterable[Piece]) -> None:
        for line_id, start, length in pieces:
            self.ends[line_id] = max(self.ends.get(line_id, 0), start + length)


def read_behind(codec: Codec, after: int, needs_of: Callable[[int], LineNeeds]) -> Op[int]:
    """Add each manifest of a session after a key to `needs_of(key)`; return the last key."""
    bounds = {"high": (after // VERSIONS + 1) * VERSIONS, "limit": MANIFESTS_PER_PAGE}
    while page := (yield from rows(LIST_MANIFESTS, **bounds, after=after)):
        for row in page:
            yield from needs_of(row["key"]).add(codec, manifest_of(codec, row))
        after = page[-1]["key"]
    return after


def each_row(sql: str, asked: Sequence[dict[str, int]]) -> Op[list[Row]]:
    """Return the rows of a statement for each set of parameters."""
    found: list[Row] = []
    for start in range(0, len(asked), QUERIES_PER_BATCH):
        some = asked[start : start + QUERIES_PER_BATCH]
        found += chain.from_iterable((yield from batch(*(Query(sql, each) for each in some))))
    return found


class MustReadAhead(Exception):
    """A transaction needs to know the needs of long sessions, to be read first without locks."""

    def __init__(self, numbers: Sequence[int]) -> None:
        super().__init__(f"sessions {numbers} have many versions")
        self.numbers = numbers


@dataclass(frozen=True, slots=True)
class NeedsUpTo:
    """What a session needed up to a version."""

    needs: LineNeeds | None
    """None if a version is damaged."""
    newest: int
    count: int


class NeedsCache(PerStore):
    """The needs of long sessions, read ahead of the transaction that uses them."""

    def __init__(self, _: Runtime) -> None:
        self._read: dict[int, NeedsUpTo] = {}

    def put(self, number: int, read: NeedsUpTo) -> None:
        """Remember what a session needs."""
        self._read[number] = read

    def clear(self) -> None:
        """Forget everything."""
        self._read = {}

    def ends(
        self, codec: Codec, versions: Mapping[int, int], known: Mapping[int, LineNeeds]
    ) -> Op[Mapping[int, int]]:
        """Return up to which item sessions need which lines.

        `versions` maps sessions to how many versions they may have, `known` some to their needs.
        For a session read ahead only new versions are read, or all if some were removed. Raises
        MustReadAhead or CorruptRecord.
        """
        versions = {number: versions[number] for number in versions.keys() - known.keys()}
        read = {number: self._read[number] for number in versions if number in self._read}
        asked = [{"after": each * VERSIONS, "newest": read[each].newest} for each in read]
        counts = yield from each_row(COUNT_VERSIONS, asked)
        for number, row in zip(tuple(read), counts, strict=True):
            if read[number].count != row["count"]:
                del read[number]
        unread = [number for number in versions if number not in read]
        if sum(versions[number] for number in unread) > VERSIONS_AT_ONCE:
            raise MustReadAhead(unread)
        needs = LineNeeds()
        yield from needs.read(codec, unread)
        for each in read.values():
            if each.needs is None:
                raise CorruptRecord("a version is damaged")
            needs.include(each.needs)
            yield from read_behind(codec, each.newest, lambda _: needs)
        for more in known.values():
            needs.include(more)
        return needs.ends


def perform_reading_ahead(
    runtime: Runtime, op: operation[P, T], instance: object, /, *args: P.args, **kwargs: P.kwargs
) -> Flow[T]:
    """Perform an operation; if it raises MustReadAhead, read those needs and retry."""
    while True:
        try:
            return (yield from perform(op, instance, *args, **kwargs))
        except MustReadAhead as unread:
            numbers = unread.numbers
        for number in numbers:
            read = yield from perform(read_ahead, runtime, number)
            NeedsCache.of(runtime).put(number, read)


@large_query
def read_ahead(runtime: Runtime, number: int) -> Op[NeedsUpTo]:
    """Return what a session needs, without locks."""
    needs, keys = LineNeeds(), [number * VERSIONS]

    def noted(key: int) -> LineNeeds:
        keys.append(key)
        return needs

    try:
        yield from read_behind(runtime.codec, keys[0], noted)
    except CorruptRecord:
        return NeedsUpTo(None, keys[-1], len(keys) - 1)
    return NeedsUpTo(needs, keys[-1], len(keys) - 1)

"""What checkpoints need of lines: read from their manifests, of long sessions ahead of time."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import ParamSpec, TypeVar

from ..codec import Codec
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
from .keys import VERSIONS
from .lines import Manifest, Piece, Ref, Stored, manifest_of, pieces_of

P = ParamSpec("P")
T = TypeVar("T")

MANIFESTS_PER_PAGE = 500
# So many versions are read while others wait for the trees.
VERSIONS_AT_ONCE = 1_000
QUERIES_PER_BATCH = 100

LIST_MANIFESTS = """
SELECT key, manifest FROM hf_checkpoints WHERE key > :after AND key < :high
ORDER BY key LIMIT :limit
"""
COUNT_VERSIONS = """
SELECT count(*) AS count FROM hf_checkpoints WHERE key > :after AND key <= :newest
"""


@dataclass(slots=True)
class LineNeeds:
    """Which lines checkpoints need, with their pieces, and up to which own item each."""

    ends: dict[int, int] = field(default_factory=dict)
    pieces: dict[int, list[Piece]] = field(default_factory=dict)

    def add(self, codec: Codec, manifest: Manifest) -> Op[None]:
        """Need what a manifest refers to."""
        for entry in manifest.values():
            if isinstance(entry, Stored):
                self._add([Piece(entry.line_id, 0, 1)])
            elif isinstance(entry, Ref):
                if entry.base and entry.line_id not in self.pieces:
                    whole = Ref(entry.line_id, entry.base, entry.base)
                    self.pieces[entry.line_id] = yield from pieces_of(codec, whole)
                    self._add(self.pieces[entry.line_id])
                self._add([Piece(entry.line_id, entry.skip, entry.length - entry.base)])

    def include(self, other: LineNeeds) -> None:
        """Need what others need, too."""
        self._add(Piece(line_id, 0, end) for line_id, end in other.ends.items())

    def _add(self, pieces: Iterable[Piece]) -> None:
        for line_id, start, length in pieces:
            self.ends[line_id] = max(self.ends.get(line_id, 0), start + length)


def read_needs(codec: Codec, numbers: Iterable[int]) -> Op[LineNeeds]:
    """Read every manifest of some sessions once, to know what of which line they need."""
    needs = LineNeeds()
    for number in numbers:
        yield from read_behind(codec, number * VERSIONS, lambda _: needs)
    return needs


def read_behind(codec: Codec, after: int, needs_of: Callable[[int], LineNeeds]) -> Op[int]:
    """Read the manifests of a session behind a key, each as a need, and return the last key."""
    bounds = {"high": (after // VERSIONS + 1) * VERSIONS, "limit": MANIFESTS_PER_PAGE}
    while page := (yield from rows(LIST_MANIFESTS, **bounds, after=after)):
        for row in page:
            yield from needs_of(row["key"]).add(codec, manifest_of(codec, row))
        after = page[-1]["key"]
    return after


def each_row(sql: str, asked: Sequence[dict[str, int]]) -> Op[list[Row]]:
    """Return the rows of a statement for many parameters."""
    found: list[Row] = []
    for start in range(0, len(asked), QUERIES_PER_BATCH):
        some = asked[start : start + QUERIES_PER_BATCH]
        found += chain.from_iterable((yield from batch(*(Query(sql, each) for each in some))))
    return found


class Unread(Exception):
    """A transaction has to know what long sessions need; they are read first, without locks."""

    def __init__(self, numbers: Sequence[int]) -> None:
        super().__init__(f"sessions {numbers} have many versions")
        self.numbers = numbers


@dataclass(frozen=True, slots=True)
class Read:
    """What a session needed up to a version."""

    needs: LineNeeds | None
    """None if a version cannot be read."""
    newest: int
    count: int


class Foreseen(PerStore):
    """What long sessions need, as it was read ahead of the transaction that has to know it."""

    def __init__(self, _: Runtime) -> None:
        self._read: dict[int, Read] = {}

    def note(self, number: int, read: Read) -> None:
        """Remember what a session needs."""
        self._read[number] = read

    def forget(self) -> None:
        """Begin anew."""
        self._read = {}

    def ends(
        self, codec: Codec, versions: Mapping[int, int], known: Mapping[int, LineNeeds]
    ) -> Op[Mapping[int, int]]:
        """Return up to which item sessions need which lines.

        The sessions are given with how many versions they may have, and what some of them are
        known to need. Raises Unread, or CorruptRecord. Of those that were read ahead, new versions
        are read; where some have gone, all are.
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
            raise Unread(unread)
        needs = yield from read_needs(codec, unread)
        for each in read.values():
            if each.needs is None:
                raise CorruptRecord("a version cannot be read")
            needs.include(each.needs)
            yield from read_behind(codec, each.newest, lambda _: needs)
        for more in known.values():
            needs.include(more)
        return needs.ends


def foreseeing(
    runtime: Runtime, op: operation[P, T], instance: object, /, *args: P.args, **kwargs: P.kwargs
) -> Flow[T]:
    """Perform an operation; what it finds to be too much to read is read, and it begins again."""
    while True:
        try:
            return (yield from perform(op, instance, *args, **kwargs))
        except Unread as unread:
            numbers = unread.numbers
        for number in numbers:
            read = yield from perform(read_ahead, runtime, number)
            Foreseen.of(runtime).note(number, read)


@large_query
def read_ahead(runtime: Runtime, number: int) -> Op[Read]:
    """Read what a session needs; nobody waits meanwhile."""
    needs, keys = LineNeeds(), [number * VERSIONS]

    def noted(key: int) -> LineNeeds:
        keys.append(key)
        return needs

    try:
        yield from read_behind(runtime.codec, keys[0], noted)
    except CorruptRecord:
        return Read(None, keys[-1], len(keys) - 1)
    return Read(needs, keys[-1], len(keys) - 1)

"""Exports and imports: all nouns in turn for each group of trees.

An import is checked whole first, and is all of it or nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec

from ..codec import Codec
from ..errors import CorruptRecord, InvalidArgument
from ..feed.portable import read_positions
from ..kernel.nouns import Noun
from ..kernel.operation import Op, Runtime, operation, query, whole_query
from ..kernel.portable import Export, Import, Record, Seen, SeenFile
from ..sessions.portable import read_members
from .file import ExportWriter, Format, GroupRecord, Source


class Exporter:
    """Writes what all nouns have of some trees to a file."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime

    @whole_query
    def write(self, writer: ExportWriter, group: Sequence[str]) -> Op[dict[str, int]]:
        """Write a group of trees, except those deleted since they were chosen.

        Returns the position of each tree.
        """
        writer.begin_again()
        root_ids, sessions = yield from read_members(group)
        out = Export(self._runtime.codec, writer.write, root_ids, sessions)
        for noun in self._runtime.nouns:
            yield from noun.portable.export(out)
        return (yield from read_positions(root_ids))

    @whole_query
    def left_behind(self) -> Op[dict[str, int]]:
        """Count what an export of all sessions leaves behind, by name."""
        found: dict[str, int] = {}
        for noun in self._runtime.nouns:
            found |= yield from noun.portable.left_behind()
        return {name: count for name, count in found.items() if count}


def check(
    nouns: Sequence[Noun], codec: Codec, source: Source, *, is_trusted: bool = False
) -> Iterator[Seen]:
    """Check everything that a source yields, and yield what was seen of each group of trees.

    CorruptRecord: it is not in order. LimitExceeded: it has a value that this store would not take.
    InvalidArgument: it has something that counts beyond its own sessions, and is not trusted.
    """
    whole = SeenFile()
    seen = Seen(codec, whole)
    for record in source.records():
        if isinstance(record, GroupRecord):
            _check_end(nouns, source, seen, is_trusted=is_trusted)
            yield seen
            seen = Seen(codec, whole)
            continue
        try:
            problem = _unprintable(record) or _misshapen(codec, record) or record.problem(seen)
        except (CorruptRecord, AttributeError, TypeError) as error:
            problem = str(error)
        if problem:
            raise _disorder(source, problem)
    _check_end(nouns, source, seen, is_trusted=is_trusted)
    yield seen


def _check_end(nouns: Sequence[Noun], source: Source, seen: Seen, *, is_trusted: bool) -> None:
    """Check that a group is complete, and repeats nothing of those before it."""
    for noun in nouns:
        if problem := noun.portable.problem_at_end(seen):
            raise _disorder(source, problem)
    if problem := seen.repeated():
        raise _disorder(source, problem)
    if seen.beyond and not is_trusted:
        raise InvalidArgument(
            f"{source.label} has {seen.beyond}, which applies beyond its own sessions; "
            "nothing was imported. If you trust its source, import it with "
            "store_keys=True (--store-keys)"
        )


def _disorder(source: Source, problem: str) -> CorruptRecord:
    return CorruptRecord(f"the sessions of {source.label} are not in order: {problem}")


def _unprintable(record: Record) -> str | None:
    for place, text in enumerate(msgspec.structs.astuple(record)):
        if type(text) is str and not text.isprintable():
            name = record.__struct_fields__[place]
            return f"{name} {text!r} has characters that cannot be printed"
    return None


def _misshapen(codec: Codec, record: Record) -> str | None:
    """Return which value of a record is not what its field asks for."""
    for name, wanted in record.sealed.values.items():
        body = getattr(record, name)
        if wanted is not None and body is not None:
            value = codec.admit(body, name=name)
            if not isinstance(value, wanted.type):
                return f"{record.label} has {wanted.problem}"
    return None


class Importer:
    """Writes what a source yields."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime

    @query
    def require_absent(self, seen: Seen, label: str, is_trusted: bool) -> Op[None]:
        """Raise InvalidArgument if something of it is in the store already."""
        for noun in self._runtime.nouns:
            yield from noun.portable.require_absent(seen, label, is_trusted=is_trusted)

    @operation
    def write(self, source: Source) -> Op[dict[str, int]]:
        """Write every record in one transaction; the source is read again if it is re-run."""
        format = Format(self._runtime.nouns)
        ranks = {kind: rank for rank, kind in enumerate(format.kinds)}
        into, counts = Import(self._runtime, source.label, ranks), format.counts()
        for record in source.records():
            if isinstance(record, GroupRecord):
                yield from into.end_group()
                continue
            yield from into.add(record)
            if record.counted:
                counts[record.counted] += 1
        yield from into.end_group()
        return counts

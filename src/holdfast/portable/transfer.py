"""Exports and imports: all nouns in turn, checked whole first, all of it or nothing."""

from __future__ import annotations

from collections.abc import Sequence

from ..codec import Codec
from ..errors import CorruptRecord, InvalidArgument
from ..feed.portable import read_positions
from ..kernel.nouns import Noun
from ..kernel.operation import Op, Runtime, large_query, operation, query
from ..kernel.portable import Export, Import, Record, Seen
from ..kernel.schema import read_store_id
from ..sessions.portable import choose_trees
from .file import ExportWriter, Format, Source


class Exporter:
    """Writes what all nouns have of some trees to a file."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime

    @large_query
    def write(self, writer: ExportWriter, ids: Sequence[str] | None) -> Op[dict[str, int]]:
        """Write the trees of these sessions, or of all, and the trees they were forked from.

        Return the position that each tree was at.
        """
        writer.begin((yield from read_store_id()))
        root_ids, sessions = yield from choose_trees(ids)
        out = Export(self._runtime.codec, writer.write, root_ids, sessions)
        for noun in self._runtime.nouns:
            yield from noun.portable.export(out)
        return (yield from read_positions(root_ids))


def check(nouns: Sequence[Noun], codec: Codec, source: Source, *, is_trusted: bool = False) -> Seen:
    """Look at everything that a source yields, and return what was seen.

    CorruptRecord: it is not in order. LimitExceeded: it has a value that this store would not take.
    InvalidArgument: it has something that counts beyond its own sessions, and is not trusted.
    """
    seen = Seen(codec)
    for record in source.records():
        try:
            problem = _unprintable(record) or _misshapen(codec, record) or record.problem(seen)
        except (CorruptRecord, AttributeError, TypeError) as error:
            problem = str(error)
        if problem:
            raise _disorder(source, problem)
    for noun in nouns:
        if problem := noun.portable.problem_at_end(seen):
            raise _disorder(source, problem)
    if seen.beyond and not is_trusted:
        raise InvalidArgument(
            f"{source.label} has {seen.beyond}, which counts beyond the sessions that are in "
            "it; nothing was imported. If you trust where it comes from, import it with "
            "store_keys=True (--store-keys)"
        )
    return seen


def _disorder(source: Source, problem: str) -> CorruptRecord:
    return CorruptRecord(f"the sessions of {source.label} are not in order: {problem}")


def _unprintable(record: Record) -> str | None:
    for name in record.__struct_fields__:
        text = getattr(record, name)
        if type(text) is str and not text.isprintable():
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
        into = Import(self._runtime, source.label)
        counts = Format(self._runtime.nouns).counts()
        for record in source.records():
            yield from record.add(into)
            if record.counted:
                counts[record.counted] += 1
            if into.is_full:
                yield from into.flush()
        yield from into.flush()
        for noun in self._runtime.nouns:
            yield from noun.portable.finish(into)
        return counts

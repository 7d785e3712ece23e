"""Export files as nouns see them: one record per row, all checked before any row is written.

A noun exports its rows of some trees as records. Each kind of record defines how it is checked and
how it is added to a store. Text ids stay the same; numbers are assigned anew by each store.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import field
from itertools import chain
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, NamedTuple, TypeAlias, TypeVar

import msgspec
from msgspec import Meta

from ..clock import TIME_MS_MAX
from ..dataclass import dataclass
from ..errors import InvalidArgument
from .inserts import Insert
from .kept import Kept, KeptSet, kept, kept_set
from .operation import Op, Query, Row, batch

if TYPE_CHECKING:
    from typing import Self

    from ..codec import Codec
    from .driver import DialectName
    from .operation import Runtime

T = TypeVar("T")
Note: TypeAlias = Callable[[list[Row]], "Op[None] | None"]
"""Called with the rows returned for an inserted row; may return an operation to run."""

ROWS_PER_BATCH = 1_000
BYTES_PER_BATCH = 2**22
FENCE_STEP = 2**32
# So many of what an export leaves behind are counted, of each kind.
LEFT_MAX = 1_000
# The number that stands for a deleted session, in a store and in a file.
GONE, GONE_IN_FILE = -1, 0


class Value(NamedTuple):
    """The type that a sealed field must hold, and the message if it does not."""

    type: type = object
    problem: str = ""


ANY = Value()
METADATA = Value(dict, "metadata that is not an object")
ERROR = Value(str, "an error that is not text")


class Sealed:
    """The sealed columns of a kind of row, and the context that each is bound to."""

    def __init__(
        self, context: Callable[[Row, str], tuple[str, ...]], /, **values: Value | None
    ) -> None:
        self.context = context
        self.values = values
        """What each must hold; None if the record checks it itself."""


class Record(msgspec.Struct, array_like=True, frozen=True, tag_field="record"):
    """A row in an export file: its tag, then its fields in order, named like the columns."""

    sealed: ClassVar[Sealed] = Sealed(lambda row, name: ())
    counted: ClassVar[str] = ""
    """The name under which exports and imports count these, if they do."""

    def problem(self, seen: Seen) -> str | None:
        """Return what is wrong with it at this place in the file, or None."""
        return None

    def add(self, into: Import) -> Op[None]:
        """Write it to the store, now or in a later batch."""
        yield from ()

    @property
    def label(self) -> str:
        """Its name in messages."""
        return f"{self.__struct_config__.tag} {getattr(self, 'id', None)!r}"

    @classmethod
    def selected(cls, *without: str) -> str:
        """Return its columns for a SELECT."""
        return ", ".join(name for name in cls.__struct_fields__ if name not in without)

    @classmethod
    def columns(cls, *more: str, without: Sequence[str] = ()) -> tuple[str, ...]:
        """Return its columns for an INSERT, followed by others."""
        return (*(name for name in cls.__struct_fields__ if name not in without), *more)

    @classmethod
    def of(cls, codec: Codec, row: Row, **changes: Any) -> Self:
        """Return a row as a record, with its sealed columns opened."""
        fields = {name: row[name] for name in cls.__struct_fields__ if name not in changes}
        for name in cls.sealed.values:
            if fields[name] is not None:
                fields[name] = codec.unseal(fields[name], context=cls.sealed.context(row, name))
        return cls(**fields, **changes)

    @classmethod
    def to(cls, out: Export) -> Callable[[Row], None]:
        """Return a function that writes a row as a record."""
        return lambda row: out.write(cls.of(out.codec, row))

    def row(self, codec: Codec, **changes: Any) -> Row:
        """Return it as a row, with its columns sealed for their new place."""
        row = msgspec.structs.asdict(self)
        row.update(changes)
        for name in self.sealed.values:
            if row[name] is not None:
                row[name] = codec.seal(row[name], context=self.sealed.context(row, name))
        return row


@dataclass(frozen=True, slots=True)
class Export:
    """The trees of an export, and the function that writes a record."""

    codec: Codec
    write: Callable[[Record], None]
    root_ids: Sequence[str]
    sessions: Mapping[int, str]
    """The ids of the sessions by number, in the order of numbers: parents and origins first."""

    def known(self, number: int) -> int:
        """Return a session's number, or GONE_IN_FILE if it was deleted."""
        return number if number in self.sessions else GONE_IN_FILE


@dataclass(slots=True)
class _Memory:
    """What nouns remember while they process a file."""

    _kept: dict[type, Any] = field(default_factory=dict, init=False)

    def of(self, kind: type[T]) -> T:
        """Return one noun's memory, created on first use."""
        found: T = self._kept[kind] if kind in self._kept else self._kept.setdefault(kind, kind())
        return found

    def forget(self) -> None:
        """Forget everything."""
        self._kept.clear()


@dataclass(slots=True)
class SeenFile(_Memory):
    """What nouns remember of all groups of a file."""

    ids: KeptSet[tuple[str, str]] = kept_set()
    """The tags and ids of the records of all groups."""


class SeenSession(NamedTuple):
    """A session of a file that is being checked."""

    id: str
    root_id: str
    version: int
    epoch: int
    origin_version: int | None


@dataclass(slots=True)
class Seen(_Memory):
    """What was seen of a group of trees so far, by all nouns.

    A record may only refer to earlier ones of its group.
    """

    codec: Codec
    whole: SeenFile = field(default_factory=SeenFile)
    """What was seen of the whole file so far."""
    trees: Kept[str, int] = kept(int)
    """The trees, each with the position its feed has reached."""
    sessions: Kept[int, SeenSession] = kept(SeenSession)
    ids: KeptSet[tuple[str, str]] = kept_set()
    """The tags and ids of the records."""
    beyond: str = ""
    """The first thing found whose effect reaches beyond the sessions of the group."""

    def has(self, tag: str, id: str) -> bool:
        """Whether a record of this kind and id was seen."""
        return (tag, id) in self.ids

    def is_new(self, record: Any) -> bool:
        """Note a record; return whether none of this kind and id was seen before."""
        return self.ids.add((record.__struct_config__.tag, record.id))

    def is_placed(self, record: Any) -> bool:
        """Whether the session that a record names was seen, and belongs to the tree it names."""
        session = self.sessions.get(record.session_number)
        named = (record.session_id, record.root_id)
        return session is not None and (session.id, session.root_id) == named

    def add_session(self, record: Any) -> None:
        """Note a session, so that later records can refer to it by number."""
        names = SeenSession._fields
        self.sessions[record.number] = SeenSession(*(getattr(record, name) for name in names))

    def counts_beyond(self, what: str) -> None:
        """Note something whose effect reaches beyond the sessions of the group."""
        self.beyond = self.beyond or what

    def repeated(self) -> str | None:
        """Add its ids to those of the whole file; return what is wrong if one was there already."""
        trees = (("tree", root_id) for root_id in self.trees)
        found = self.whole.ids.add_all(chain(trees, self.ids))
        return None if found is None else f"{found[0]} {found[1]!r} comes twice"


@dataclass(slots=True)
class _Waiting:
    """Pending rows of one table, or one pending statement."""

    what: Insert | Query
    rows: list[Row] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    notes: list[Note | None] = field(default_factory=list)

    def query(self, dialect: DialectName) -> Query:
        """Return the query to run."""
        if isinstance(self.what, Query):
            return self.what
        return self.what.query(dialect, self.rows)

    def answers(self, returned: list[Row]) -> Sequence[list[Row]]:
        """Return the rows returned for each problem and note."""
        if isinstance(self.what, Query):
            return [returned]
        return self.what.answers(self.rows, returned)


def _new_numbers() -> Kept[int, int]:
    numbers: Kept[int, int] = Kept(int)
    numbers[GONE_IN_FILE] = GONE
    return numbers


@dataclass(slots=True)
class Import(_Memory):
    """The state of an import: the new numbers of sessions, and the pending rows and statements.

    They are written in the order of the kinds of records, and of the records of each kind. At the
    end of each group of trees everything that was remembered of it is forgotten.
    """

    runtime: Runtime
    label: str
    """The file's origin, for messages and events."""
    ranks: Mapping[type[Record], int]
    """The position of each kind of record in the order of writing."""
    sessions: Kept[int, int] = field(default_factory=_new_numbers)
    """The new numbers of sessions by those in the file."""
    groups: int = 0
    """The number of groups written."""
    _rank: int = 0
    _waiting: dict[int, list[_Waiting]] = field(default_factory=dict)
    _rows: int = 0
    _bytes: int = 0

    @property
    def codec(self) -> Codec:
        """The store's codec."""
        return self.runtime.codec

    def add(self, record: Record) -> Op[None]:
        """Write a record, now or in a later batch."""
        self._rank = self.ranks[type(record)]
        for name in record.sealed.values:
            self._bytes += len(getattr(record, name) or b"")
        yield from record.add(self)
        if self._rows >= ROWS_PER_BATCH or self._bytes >= BYTES_PER_BATCH:
            yield from self.flush()

    def end_group(self) -> Op[None]:
        """Write what is pending and what depends on the whole group; forget the group."""
        yield from self.flush()
        for noun in self.runtime.nouns:
            yield from noun.portable.finish(self)
        yield from self.flush()
        self.forget()
        self.sessions = _new_numbers()
        self.groups += 1

    def insert(self, insert: Insert, row: Row, problem: str = "", then: Note | None = None) -> None:
        """Add a row to the pending batch; with a problem, its statement must return a row."""
        of_kind = self._waiting.setdefault(self._rank, [])
        for together in of_kind:
            if together.what is insert:
                break
        else:
            together = _Waiting(insert)
            of_kind.append(together)
        together.rows.append(row)
        together.problems.append(problem)
        together.notes.append(then)
        self._rows += 1

    def later(self, sql: str, parameters: Mapping[str, object]) -> None:
        """Add a statement to the pending batch."""
        waiting = _Waiting(Query(sql, parameters), problems=[""], notes=[None])
        self._waiting.setdefault(self._rank, []).append(waiting)
        self._rows += 1

    def raised(self, fence: int) -> int:
        """Return a fence higher than any that a holder in the source store can have."""
        return min(fence + FENCE_STEP, 2**63 - 1)

    def number(self, source: int) -> Op[int]:
        """Return the new number of a session of the file."""
        found = self.sessions.get(source)
        if found is None:
            yield from self.flush()
            found = self.sessions[source]
        return found

    def flush(self) -> Op[None]:
        """Write the pending rows and run the pending statements."""
        waiting = [each for _, some in sorted(self._waiting.items()) for each in some]
        self._waiting, self._rows, self._bytes = {}, 0, 0
        if not waiting:
            return
        dialect = self.runtime.driver.dialect
        found = yield from batch(*(each.query(dialect) for each in waiting))
        for each, returned in zip(waiting, found, strict=True):
            answers = each.answers(returned)
            for answer, problem, then in zip(answers, each.problems, each.notes, strict=True):
                if problem and not answer:
                    raise InvalidArgument(f"{problem}; nothing was imported")
                more = None if then is None else then(answer)
                if more is not None:
                    yield from more


class Portable:
    """A noun's part in export files; a noun without one is not exported."""

    records: Sequence[type[Record]] = ()

    def links(self, link: Callable[[str, Hashable], None]) -> Op[None]:
        """Call `link` for trees that share something and must be exported in one group.

        A tree is linked with another, or both are linked with the same third thing.
        """
        yield from ()

    def export(self, out: Export) -> Op[None]:
        """Write the records of a group of trees, from one snapshot."""
        yield from ()

    def left_behind(self) -> Op[dict[str, int]]:
        """Count by name what belongs to no session, and is in no export; at most LEFT_MAX each."""
        yield from ()
        return {}

    def problem_at_end(self, seen: Seen) -> str | None:
        """Return what is wrong with a group as a whole, or None."""
        return None

    def require_absent(self, seen: Seen, label: str, *, is_trusted: bool) -> Op[None]:
        """Raise InvalidArgument if the import would overwrite something in the store."""
        yield from ()

    def finish(self, into: Import) -> Op[None]:
        """Write what depends on all added records of a group."""
        yield from ()


Count = Annotated[int, Meta(ge=0, le=2**53)]
Fence = Annotated[int, Meta(ge=0, le=2**62)]
Positive = Annotated[int, Meta(ge=1, le=2**53)]
Number = Annotated[int, Meta(ge=-(2**53), le=2**53)]
# Versions and indexes, as many as the keys of checkpoints have room for.
Small = Annotated[int, Meta(ge=0, lt=2**28)]
Version = Annotated[int, Meta(ge=1, lt=2**28)]
Flag = Annotated[int, Meta(ge=0, le=1)]
Time = Annotated[int, Meta(ge=0, le=TIME_MS_MAX)]
Name = Annotated[str, Meta(min_length=1, max_length=256)]
Text = Annotated[str, Meta(min_length=1, max_length=1_000)]

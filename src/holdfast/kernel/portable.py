"""Export files as nouns see them: one record per row, checked whole before any row is written.

A noun writes its rows of some trees as records. Each kind of record says how it is checked and how
it is added to a store. Text ids travel unchanged; the numbers that each store gives are looked up.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, NamedTuple, TypeVar

import msgspec
from msgspec import Meta

from ..errors import InvalidArgument
from .operation import Lock, Op, Query, Row, batch, rows

if TYPE_CHECKING:
    from typing import Self

    from ..codec import Codec
    from .operation import Runtime

T = TypeVar("T")

OWNERS_PER_BATCH = 32
ROWS_OF_EACH = 16
ROWS_PER_PAGE = 500
QUERIES_PER_BATCH = 200
BYTES_PER_BATCH = 2**22
FENCE_STEP = 2**32
# The number of a session that was deleted, here and in a file: no session's.
GONE, GONE_IN_FILE = -1, 0


class Value(NamedTuple):
    """What a sealed field has to hold, and what is said of one that does not."""

    type: type = object
    problem: str = ""


ANY = Value()
METADATA = Value(dict, "metadata that is no object")
ERROR = Value(str, "an error that is no text")


class Sealed:
    """The columns of a kind of row that are sealed, and the place that each is bound to."""

    def __init__(
        self, context: Callable[[Row, str], tuple[str, ...]], **values: Value | None
    ) -> None:
        self.context = context
        self.values = values
        """What they have to hold; None: the record itself looks at it."""


class Record(msgspec.Struct, array_like=True, frozen=True, tag_field="record"):
    """A row as it travels: its tag, then its fields in order, named like the columns."""

    sealed: ClassVar[Sealed] = Sealed(lambda row, name: ())
    counted: ClassVar[str] = ""
    """What exports and imports call the number of these, if they count them."""

    def problem(self, seen: Seen) -> str | None:
        """Return what is wrong with it in this place of a file, or None."""
        return None

    def add(self, into: Import) -> Op[None]:
        """Write it to the store, now or with those that follow."""
        yield from ()

    @property
    def label(self) -> str:
        """What messages call it."""
        return f"{self.__struct_config__.tag} {getattr(self, 'id', None)!r}"

    @classmethod
    def selected(cls, *without: str) -> str:
        """Return its columns as a SELECT has them."""
        return ", ".join(name for name in cls.__struct_fields__ if name not in without)

    @classmethod
    def inserted(cls, *without: str, **special: str) -> str:
        """Return its columns and their parameters, or special expressions, as an INSERT has."""
        names = (name for name in cls.__struct_fields__ if name not in without)
        values = {**{name: f":{name}" for name in names}, **special}
        return f"({', '.join(values)}) VALUES ({', '.join(values.values())})"

    @classmethod
    def of(cls, codec: Codec, row: Row, **changes: Any) -> Self:
        """Return a row as a record, with what is sealed in it opened."""
        fields = {name: row[name] for name in cls.__struct_fields__ if name not in changes}
        for name in cls.sealed.values:
            if fields[name] is not None:
                fields[name] = codec.unseal(fields[name], context=cls.sealed.context(row, name))
        return cls(**fields, **changes)

    @classmethod
    def to(cls, out: Export) -> Callable[[Row], None]:
        """Return what writes a row as a record."""
        return lambda row: out.write(cls.of(out.codec, row))

    def row(self, codec: Codec, **changes: Any) -> Row:
        """Return it as a row, with its values sealed in their new place."""
        row = {name: getattr(self, name) for name in self.__struct_fields__} | changes
        for name in self.sealed.values:
            if row[name] is not None:
                row[name] = codec.seal(row[name], context=self.sealed.context(row, name))
        return row


@dataclass(frozen=True, slots=True)
class Export:
    """What an export writes, and where to."""

    codec: Codec
    write: Callable[[Record], None]
    root_ids: Sequence[str]
    sessions: Mapping[int, str]
    """The ids of the sessions by number: parents and origins come first."""

    def known(self, number: int) -> int:
        """Return a session's number, if it is written and not deleted."""
        return number if number in self.sessions else GONE_IN_FILE


def read_each(
    sql: str,
    owners: Iterable[Mapping[str, object]],
    take: Callable[[Row], object],
    after: Sequence[str] = ("number",),
) -> Op[None]:
    """Hand over the rows of each owner in turn: those of many in one round trip, or in pages.

    `after` are the columns that a statement is ordered by; it returns what lies behind them.
    """
    waiting = ({**dict.fromkeys(after, 0), **owner} for owner in owners)
    while some := list(islice(waiting, OWNERS_PER_BATCH)):
        answers = yield from batch(*(Query(sql, {**each, "limit": ROWS_OF_EACH}) for each in some))
        for parameters, found in zip(some, answers, strict=True):
            page, limit = found, ROWS_OF_EACH
            while True:
                for row in page:
                    take(row)
                if len(page) < limit:
                    break
                behind, limit = {name: page[-1][name] for name in after}, ROWS_PER_PAGE
                page = yield from rows(sql, **{**parameters, **behind, "limit": limit})


@dataclass(slots=True)
class _Memory:
    """What the nouns remember while they go through a file."""

    _kept: dict[type, Any] = field(default_factory=dict, init=False)

    def of(self, kind: type[T]) -> T:
        """Return what one noun remembers; nothing, at first."""
        found: T = self._kept[kind] if kind in self._kept else self._kept.setdefault(kind, kind())
        return found


@dataclass(frozen=True, slots=True)
class SeenSession:
    """A session of a file that is being checked."""

    id: str
    root_id: str
    version: int
    epoch: int
    origin_version: int | None


@dataclass(slots=True)
class Seen(_Memory):
    """What was seen of a file so far, by all nouns. A record may only name what came before it."""

    codec: Codec
    trees: dict[str, int] = field(default_factory=dict)
    """The trees, each with the position that its feed has come to."""
    sessions: dict[int, SeenSession] = field(default_factory=dict)
    ids: dict[str, set[str]] = field(default_factory=dict)
    """The ids that came, by the tag of the record."""
    beyond: str = ""
    """What counts beyond the sessions that are in the file, the first of it."""

    def has(self, tag: str, id: str) -> bool:
        """Whether a record of this kind and id came before."""
        return id in self.ids.get(tag, ())

    def is_new(self, record: Any) -> bool:
        """Whether no record of this kind and id came before; from now on, one did."""
        ids = self.ids.setdefault(record.__struct_config__.tag, set())
        known = len(ids)
        ids.add(record.id)
        return len(ids) > known

    def is_placed(self, record: Any) -> bool:
        """Whether the session and the tree that a record names came before it, and are one's."""
        session = self.sessions.get(record.session_number)
        named = (record.session_id, record.root_id)
        return session is not None and (session.id, session.root_id) == named

    def add_session(self, record: Any) -> None:
        """Remember a session, so that others can name it by its number."""
        names = SeenSession.__slots__
        self.sessions[record.number] = SeenSession(*(getattr(record, name) for name in names))

    def counts_beyond(self, what: str) -> None:
        """Note something that reaches further than the sessions of the file."""
        self.beyond = self.beyond or what


@dataclass(slots=True)
class Import(_Memory):
    """What an import knows while it writes: which numbers sessions got, and what waits."""

    runtime: Runtime
    label: str
    """Where the file comes from."""
    sessions: dict[int, int] = field(default_factory=lambda: {GONE_IN_FILE: GONE})
    _waiting: list[tuple[Query | Lock, str, Callable[[list[Row]], None] | None]] = field(
        default_factory=list
    )
    _bytes: int = 0

    @property
    def codec(self) -> Codec:
        """What seals the store's values."""
        return self.runtime.codec

    def later(
        self,
        sql: str,
        parameters: Mapping[str, object],
        problem: str = "",
        then: Callable[[list[Row]], None] | None = None,
    ) -> None:
        """Run a statement with those that follow; with a problem, it must return a row."""
        self._waiting.append((Query(sql, parameters), problem, then))
        self._bytes += sum(len(each) for each in parameters.values() if type(each) is bytes)

    def lock(self, root_id: str) -> None:
        """Lock a tree, in the same order."""
        self._waiting.append((Lock(root_id), "", None))

    def raised(self, fence: int) -> int:
        """Return a fence that nobody has who held one where the file comes from."""
        return min(fence + FENCE_STEP, 2**63 - 1)

    def number(self, source: int) -> Op[int]:
        """Return the number that a session of the file got."""
        if source not in self.sessions:
            yield from self.flush()
        return self.sessions[source]

    @property
    def is_full(self) -> bool:
        """Whether so much waits that it is time to write it."""
        return len(self._waiting) >= QUERIES_PER_BATCH or self._bytes >= BYTES_PER_BATCH

    def flush(self) -> Op[None]:
        """Run what waits."""
        waiting, self._waiting, self._bytes = self._waiting, [], 0
        answers = (yield from batch(*(command for command, _, _ in waiting))) if waiting else []
        for (_, problem, then), found in zip(waiting, answers, strict=True):
            if problem and not found:
                raise InvalidArgument(f"{problem}; nothing was imported")
            if then is not None:
                then(found)


class Portable:
    """A noun's part in export files. What has none stays where it is."""

    records: Sequence[type[Record]] = ()

    def export(self, out: Export) -> Op[None]:
        """Write what belongs to some trees, from one snapshot."""
        yield from ()

    def problem_at_end(self, seen: Seen) -> str | None:
        """Return what is missing now that a whole file was seen."""
        return None

    def require_absent(self, seen: Seen, label: str, *, is_trusted: bool) -> Op[None]:
        """Raise InvalidArgument if the store has something that the file would write over."""
        yield from ()

    def finish(self, into: Import) -> Op[None]:
        """Write what follows from all that was added."""
        yield from ()


# The end of the year 9999, the last that ISO-8601 can name.
TIME_MS_MAX = 253_402_300_799_999

Count = Annotated[int, Meta(ge=0, le=2**53)]
Fence = Annotated[int, Meta(ge=0, le=2**62)]
Positive = Annotated[int, Meta(ge=1, le=2**53)]
Number = Annotated[int, Meta(ge=-(2**53), le=2**53)]
# Versions, and what is counted like them: the keys of checkpoints have no room for more.
Small = Annotated[int, Meta(ge=0, lt=2**28)]
Version = Annotated[int, Meta(ge=1, lt=2**28)]
Flag = Annotated[int, Meta(ge=0, le=1)]
Time = Annotated[int, Meta(ge=0, le=TIME_MS_MAX)]
Name = Annotated[str, Meta(min_length=1, max_length=256)]
Text = Annotated[str, Meta(min_length=1, max_length=1_000)]

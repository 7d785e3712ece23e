"""Handles, and operations: every change or read of the store, written once as a generator.

An operation knows no driver, no thread and no `await`. It yields commands (a `Query`, a `Lock`,
a `Batch` of them, a `Decide`, a `Deferred`, an `Emit`, an `AfterCommit`, a `FreshId`) and a driver
answers them inside one transaction. The colour of its handle decides what a call returns: with
`Sync` the result, with `Async` an awaitable, and with `Tx`, inside `store.run`, a generator to
`yield from`.
"""

from __future__ import annotations

import functools
from collections.abc import Awaitable, Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import field, replace
from types import MethodType
from typing import (
    TYPE_CHECKING,
    Any,
    ClassVar,
    Concatenate,
    Final,
    Generic,
    Literal,
    ParamSpec,
    TypeAlias,
    TypeVar,
    cast,
    overload,
)

import msgspec

from ..dataclass import dataclass
from ..records import LOCAL, Actor
from ..wire import travels

if TYPE_CHECKING:
    from typing import Self

    import typing_extensions

    from ..codec import Codec
    from ..redaction import Redaction
    from .driver import Driver, Settings
    from .flow import Flow, Stream
    from .nouns import Noun
    from .signals import Signals
    from .url import Target


class Sync:
    """The colour of handles whose calls return their results."""


class Async:
    """The colour of handles whose calls return awaitables."""


class Tx:
    """The colour of handles inside `store.run`, whose calls are generators to `yield from`."""


if TYPE_CHECKING:
    C = typing_extensions.TypeVar("C", bound=Sync | Async | Tx, default=Sync)
else:
    C = TypeVar("C", bound=Sync | Async | Tx)


@travels
@dataclass(frozen=True, slots=True, kw_only=True)
class Runtime:
    """What every handle of one open store shares."""

    driver: Driver
    codec: Codec
    redactor: Redaction
    target: Target
    settings: Settings
    start: Callable[[Call[Any]], Any]
    """Runs a call, in the colour of the handles."""
    run_flow: Callable[[Flow[Any]], Any]
    """Runs a flow, in the colour of the handles."""
    run_stream: Callable[[Stream[Any]], Any]
    """Runs a stream, as an iterator."""
    is_async: bool
    actor: Actor = LOCAL
    """In whose name the handles are used."""
    transport: str | None = None
    """What carries requests to peers; None for the database itself."""
    states: dict[type, Any] = field(default_factory=dict)
    """The in-memory state of nouns, by class; see `PerStore`."""

    @property
    def nouns(self) -> Sequence[Noun]:
        """The nouns of the store, in dependency order."""
        return self.settings.nouns

    @property
    def signals(self) -> Signals:
        """The wake-ups of this store."""
        return self.driver.signals

    @property
    def is_remote(self) -> bool:
        """Whether operations are run by a server."""
        return self.driver.dialect == "remote"

    def _to_wire(self) -> tuple[()]:
        """Return nothing: at the other end there is one too."""
        return ()

    @classmethod
    def _from_wire(cls, runtime: Runtime) -> Runtime:
        """Return the one of the other end."""
        return runtime

    def run(self, call: Call[Any]) -> Any:
        """Run a call on this thread, whatever the colour; for background threads."""
        return self.driver.twin().run(call)

    def checked(self, check: Callable[[], None]) -> Runtime:
        """Return a runtime that calls `check` before every call; if it raises, nothing runs."""
        start = self.start

        def start_checked(call: Call[Any]) -> Any:
            check()
            return start(call)

        return replace(self, start=start_checked)


class PerStore:
    """In-memory state of a noun for one open store, created on first use."""

    def __init__(self, runtime: Runtime) -> None:
        raise NotImplementedError

    def _to_wire(self) -> tuple[()]:
        """Return nothing: at the other end there is one too."""
        return ()

    @classmethod
    def _from_wire(cls, runtime: Runtime) -> Any:
        """Return the one of the other end."""
        return cls.of(runtime)

    @classmethod
    def of(cls, runtime: Runtime) -> Self:
        """Return the instance of this store."""
        found: Self | None = runtime.states.get(cls)
        # If two threads create one each, both get the one stored first.
        return found if found is not None else runtime.states.setdefault(cls, cls(runtime))


class Handle(Generic[C]):
    """One object of a store, in one colour; subclasses add the ids of what they stand for."""

    runtime: Runtime

    def __init__(self, runtime: Runtime) -> None:
        self.runtime = runtime

    def _to_wire(self) -> tuple[Any, ...]:
        """Return what names it to a server, or to a client."""
        return ()

    @classmethod
    def _from_wire(cls, runtime: Runtime, *_: Any, **__: Any) -> Any:
        """Return a handle of what was named."""
        return cls(runtime)

    def _take_answer(self, result: Any, row: Any) -> None:
        """Take over what a call at a server has changed; `row` is the new row of an item."""


P = ParamSpec("P")
R = TypeVar("R")
R_co = TypeVar("R_co", covariant=True)

Row: TypeAlias = dict[str, Any]
Mode: TypeAlias = Literal["write", "read", "read_large"]


class Query(msgspec.Struct):
    """One statement and its named parameters."""

    sql: str
    parameters: Mapping[str, object]
    must_find: bool = False
    """In a `Decide`: the last statement must not run unless this one returns a row."""
    is_listing: bool = False
    """Whether the best plan depends on the parameters: PostgreSQL then plans it each time."""
    each: Sequence[Mapping[str, object]] = ()
    """SQLite only: run it once for each of these instead of `parameters`, and return all rows."""


class Lock(msgspec.Struct):
    """Locks a session tree until the transaction ends; answered with its row, or nothing.

    Locking a tree twice costs no second statement. Trees are waited for only in id order, so that
    transactions cannot deadlock: one out of order is locked with NOWAIT, and if it is not free the
    call is run again with all its trees locked first.
    """

    root_id: str
    is_asked: bool = True
    """Whether the answer matters; if not, a database that is locked as a whole runs nothing."""
    is_new: bool = False
    """Whether its id is new: then the tree is created, which locks it."""


class Batch(msgspec.Struct):
    """Several statements, run in order, that do not depend on each other's answers.

    Answered with a list of rows for each. On PostgreSQL a batch costs one round trip.
    """

    commands: Sequence[Query | Lock]


class Decide(msgspec.Struct):
    """A batch whose last statement decides: if it returns a row, the call's work is done.

    Answered like a batch; `emits` are emitted if there is a row. If there is none, the statements
    must not have changed anything, and the call finds out why and continues another way.

    A `deciding` operation that begins with a `Decide` costs one round trip on PostgreSQL, COMMIT
    included. If there was no row, it is run again and its `Decide` is answered without a query.
    `again` re-reads the last statement's rows if they were lost with the connection; it may be
    left out if they are not needed.
    """

    commands: Sequence[Query | Lock]
    emits: Sequence[Emit] = ()
    again: Query | None = None


class Deferred(msgspec.Struct):
    """Statements whose rows are not needed: they are sent with the next one, or with COMMIT.

    Statements still run in the order in which they were yielded; on PostgreSQL these cost no round
    trip of their own. `emits` are emitted as if they had been yielded.
    """

    queries: Sequence[Query]
    emits: Sequence[Emit] = ()


class TryLock(msgspec.Struct):
    """Locks those of some session trees that nobody holds now, and runs other statements after it.

    Answered with the `root_id`s of the trees that are locked, and with a list of rows for each of
    the other statements, which must not wait for any tree themselves.
    """

    root_ids: Sequence[str]
    beside: Sequence[Query] = ()


class Emit(msgspec.Struct):
    """One event of a session tree, written to its feed just before COMMIT."""

    root_id: str
    session_id: str
    kind: str
    data: bytes
    is_counted: bool = False
    """Whether the operation has advanced the tree's position for it already."""


class AfterCommit(msgspec.Struct):
    """A function to call once the transaction is durable; it must neither raise nor block."""

    function: Callable[[], None]


class FreshId(msgspec.Struct):
    """Asks for a new sortable id; a re-run of the same call receives the same one."""


# The commands that are one statement, and all that ask; a union would be made anew for every test.
SINGLE: Final = (Query, Lock)
ASKING: Final = (Query, Lock, TryLock, Batch, Decide)
Asking: TypeAlias = Query | Lock | TryLock | Batch | Decide
Command: TypeAlias = Asking | Deferred | Emit | AfterCommit | FreshId
Op: TypeAlias = Generator[Command, Any, R]


def rows(sql: str, **parameters: object) -> Op[list[Row]]:
    """Run one statement and return its rows."""
    found: list[Row] = yield Query(sql, parameters)
    return found


def listed(sql: str, **parameters: object) -> Op[list[Row]]:
    """Run the statement of a listing, which PostgreSQL plans for these parameters."""
    found: list[Row] = yield Query(sql, parameters, is_listing=True)
    return found


def one(sql: str, **parameters: object) -> Op[Row | None]:
    """Run one statement and return its first row, or None."""
    found = yield Query(sql, parameters)
    return found[0] if found else None


def defer(sql: str, **parameters: object) -> Op[None]:
    """Run one statement, whose rows are not needed, together with the next."""
    yield Deferred([Query(sql, parameters)])


def batch(*commands: Query | Lock) -> Op[list[list[Row]]]:
    """Run several statements in one round trip and return the rows of each."""
    found: list[list[Row]] = yield Batch(commands)
    return found


def decide(
    *commands: Query | Lock, emits: Sequence[Emit] = (), again: Query | None = None
) -> Op[list[list[Row]]]:
    """Run a batch whose last statement decides the call, and return the rows of each."""
    found: list[list[Row]] = yield Decide(commands, emits, again)
    return found


def together(ops: Iterable[Op[R]]) -> Op[list[R]]:
    """Run independent parts of one operation side by side, batching their queries.

    Their events are emitted at the end, in the order of the parts. None may use `must_find` or
    `TryLock`.
    """
    parts = list(ops)
    results: dict[int, R] = {}
    told: list[list[Emit]] = [[] for _ in parts]
    answered: list[tuple[int, Any]] = [(place, None) for place in range(len(parts))]
    while answered:
        asked: list[tuple[int, Asking]] = []
        commands: list[Query | Lock] = []
        for place, answered_with in answered:
            send, answer = parts[place].send, answered_with
            while True:
                try:
                    command = send(answer)
                except StopIteration as stop:
                    results[place] = stop.value
                    break
                if isinstance(command, ASKING):
                    asked.append((place, command))
                    commands += _commands(command)
                    break
                answer = None
                if isinstance(command, Emit):
                    told[place].append(command)
                else:
                    answer = yield command
        # A batch may be empty, and its part goes on all the same.
        found = iter((yield Batch(commands)) if commands else ())
        answered = [(place, _answer(question, found, told[place])) for place, question in asked]
    for emits in told:
        yield from emits
    return [results[place] for place in range(len(parts))]


def _commands(question: Asking) -> Sequence[Query | Lock]:
    assert not isinstance(question, TryLock)
    return (question,) if isinstance(question, SINGLE) else question.commands


def _answer(question: Asking, found: Iterator[list[Row]], told: list[Emit]) -> Any:
    """Return the answer to one of several questions that were asked at once."""
    if isinstance(question, SINGLE):
        return next(found)
    answer = [next(found) for _ in _commands(question)]
    if isinstance(question, Decide) and answer[-1]:
        told += question.emits
    return answer


def fresh_id() -> Op[str]:
    """Return a new id; a re-run of the call gets the same one."""
    id: str = yield FreshId()
    return id


class Definition(Generic[R_co]):
    """An operation's generator function and how to run it."""

    mode: ClassVar[Mode] = "write"
    decides: ClassVar[bool] = False
    """Whether the call ends with a `Decide` that returned a row."""
    is_marked: ClassVar[bool] = True
    """Whether the call leaves a mark by which a COMMIT without an answer can be settled."""
    is_patient: ClassVar[bool] = False
    """Whether the call waits for a slow statement as long as its server answers others."""
    function: Callable[..., Op[R_co]]
    __qualname__: str


class Call(msgspec.Struct, Generic[R_co], eq=False):
    """An operation with its arguments, which can be named, traced and re-run."""

    operation: Definition[R_co]
    instance: object
    arguments: tuple[Any, ...] = ()
    keywords: Mapping[str, Any] = {}
    ids: list[str] = []
    """The ids that earlier runs were given; a re-run gets the same ones."""

    @property
    def name(self) -> str:
        """The operation's qualified name, as traces show it."""
        return self.operation.__qualname__

    def __repr__(self) -> str:
        return f"<Call {self.name}>"

    def begin(self) -> Op[R_co]:
        """Return a new generator for one run."""
        return self.operation.function(self.instance, *self.arguments, **self.keywords)


class operation(Definition[R_co], Generic[P, R_co]):  # noqa: N801 - it is used as a decorator
    """A method written as a generator that writes; one call is one transaction."""

    def __init__(self, function: Callable[Concatenate[Any, P], Op[R_co]]) -> None:
        self.function = function
        functools.update_wrapper(cast("Any", self), function)
        self.__qualname__ = function.__qualname__

        @functools.wraps(function)
        def start(handle: Handle[Any], *args: Any, **kwargs: Any) -> Any:
            return handle.runtime.start(Call(self, handle, args, kwargs))

        self._start = start

    def __call__(self, instance: object, /, *args: P.args, **kwargs: P.kwargs) -> Op[R_co]:
        """Return the bare generator, for `yield from` inside another operation."""
        return self.function(instance, *args, **kwargs)

    @overload
    def __get__(self, instance: None, owner: type) -> operation[P, R_co]: ...
    @overload
    def __get__(self, instance: Handle[Sync], owner: type) -> Callable[P, R_co]: ...
    @overload
    def __get__(self, instance: Handle[Async], owner: type) -> Callable[P, Awaitable[R_co]]: ...
    @overload
    def __get__(self, instance: Handle[Tx], owner: type) -> Callable[P, Op[R_co]]: ...
    def __get__(self, instance: Any, owner: type) -> Any:
        """Bind to a handle, whose colour decides what a call returns."""
        return self if instance is None else MethodType(self._start, instance)


class deciding(operation[P, R_co]):  # noqa: N801 - it is used as a decorator
    """An operation that writes nothing after a `Decide` that found a row."""

    decides = True


class unmarked(operation[P, R_co]):  # noqa: N801 - it is used as a decorator
    """An idempotent operation that may run before the tables exist."""

    is_marked = False


class query(operation[P, R_co]):  # noqa: N801 - it is used as a decorator
    """A method written as a generator that reads one consistent snapshot."""

    mode = "read"


class large_query(operation[P, R_co]):  # noqa: N801 - it is used as a decorator
    """A query with a possibly large result; an async SQLite store runs it in a reader thread."""

    mode = "read_large"


class whole_query(large_query[P, R_co]):  # noqa: N801 - it is used as a decorator
    """A query that reads everything there is, however long that takes."""

    is_patient = True


@query
def read(_: object, statement: Query) -> Op[list[Row]]:
    """Return the rows of one statement."""
    found: list[Row] = yield statement
    return found

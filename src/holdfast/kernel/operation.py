"""Handles, and operations: every change or read of the store, written once as a generator.

An operation knows no driver, no thread and no `await`. It yields commands (a `Query`, a `Lock`,
a `Batch` of them, a `Decide`, an `Emit`, an `AfterCommit`, a `FreshId`) and a driver answers them
inside one transaction. The colour of the handle it is bound to decides what a call gives: `Sync`
the result, `Async` an awaitable of it, and `Tx`, inside `store.run`, the generator to `yield from`.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Awaitable, Callable, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MethodType
from typing import (
    TYPE_CHECKING,
    Any,
    ClassVar,
    Concatenate,
    Generic,
    Literal,
    ParamSpec,
    TypeAlias,
    TypeVar,
    cast,
    overload,
)

from ..errors import OperationNotRun, StoreReadOnly

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Runtime:
    """What every handle of one open store needs; handles share it and copy nothing from it."""

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
    states: dict[type, Any] = field(default_factory=dict)
    """What nouns keep in memory for this store, by class; see `PerStore`."""

    @property
    def nouns(self) -> Sequence[Noun]:
        """Everything that the store keeps, each after what it stands on."""
        return self.settings.nouns

    @property
    def signals(self) -> Signals:
        """The wake-ups of this store."""
        return self.driver.signals

    def run(self, call: Call[Any]) -> Any:
        """Run a call on this thread, whatever the colour: for threads of our own."""
        return self.driver.twin().run(call)

    def checked(self, check: Callable[[], None]) -> Runtime:
        """Return a runtime that calls `check` before every call; if it raises, nothing is run."""
        start = self.start

        def start_checked(call: Call[Any]) -> Any:
            check()
            return start(call)

        return replace(self, start=start_checked)


class PerStore:
    """What a noun keeps in memory for one open store; made when it is first asked for."""

    def __init__(self, runtime: Runtime) -> None:
        raise NotImplementedError

    @classmethod
    def of(cls, runtime: Runtime) -> Self:
        """Return the one of this store."""
        found: Self | None = runtime.states.get(cls)
        # Two threads may make one each; both get the first that was stored.
        return found if found is not None else runtime.states.setdefault(cls, cls(runtime))


class Handle(Generic[C]):
    """One object of a store, in one colour: it has its runtime and names what it stands for."""

    runtime: Runtime

    def __init__(self, runtime: Runtime) -> None:
        self.runtime = runtime


P = ParamSpec("P")
R = TypeVar("R")
R_co = TypeVar("R_co", covariant=True)

Row: TypeAlias = dict[str, Any]
Mode: TypeAlias = Literal["write", "read", "read_large"]


@dataclass(slots=True)
class Query:
    """One statement and its named parameters."""

    sql: str
    parameters: Mapping[str, object]
    must_find: bool = False
    """In a `Decide`: without a row of it the last statement must not be run."""
    is_listing: bool = False
    """Whether the best plan depends on how frequent the values are that are asked for."""


@dataclass(slots=True)
class Lock:
    """Locks a session tree until the transaction ends; answered with its row, or nothing.

    A tree that the transaction holds already costs no statement. The first is waited for; a
    further one is waited for only in id order, so that no two transactions can deadlock: out of
    order it must be free at once, or the call is run again with all its trees locked first.
    """

    root_id: str


@dataclass(slots=True)
class Batch:
    """Several statements, run in order, whose texts do not depend on each other's answers.

    It is answered with a list of their rows. On PostgreSQL a batch costs one round trip.
    """

    commands: Sequence[Query | Lock]


@dataclass(slots=True)
class Decide:
    """A batch whose last statement decides: with a row of it, the call has done its work.

    It is answered like a batch; `emits` are emitted if there is a row. Without one, none of the
    statements may have changed anything, and the call goes on to look why, and to do it otherwise.

    A `deciding` operation that begins with it costs one round trip on PostgreSQL, COMMIT included.
    Should there be no row, it is run again and told so unasked. `again` reads the last statement's
    rows if they were lost with the connection; leave it out where they do not matter.
    """

    commands: Sequence[Query | Lock]
    emits: Sequence[Emit] = ()
    again: Query | None = None


@dataclass(slots=True)
class Emit:
    """One event of a session tree, written to its feed just before COMMIT."""

    root_id: str
    session_id: str
    kind: str
    data: bytes


@dataclass(slots=True)
class AfterCommit:
    """A function to call once the transaction is durable; it must not raise or block."""

    function: Callable[[], None]


@dataclass(slots=True)
class FreshId:
    """Asks for a new sortable id; a re-run of the same call receives the same one."""


Command: TypeAlias = Query | Lock | Batch | Decide | Emit | AfterCommit | FreshId
Op: TypeAlias = Generator[Command, Any, R]


def rows(sql: str, **parameters: object) -> Op[list[Row]]:
    """Run one statement and return its rows."""
    found: list[Row] = yield Query(sql, parameters)
    return found


def listed(sql: str, **parameters: object) -> Op[list[Row]]:
    """Run the statement of a listing, which PostgreSQL plans for these very values."""
    found: list[Row] = yield Query(sql, parameters, is_listing=True)
    return found


def one(sql: str, **parameters: object) -> Op[Row | None]:
    """Run one statement and return its first row, or None."""
    found = yield Query(sql, parameters)
    return found[0] if found else None


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
    """Run parts of one operation that need nothing of each other, side by side.

    What they ask next is one batch. Their events are emitted in their order, at the end. None may
    ask for what must be found.
    """
    running = dict(enumerate(ops))
    answers: dict[int, Any] = dict.fromkeys(running)
    results: dict[int, R] = {}
    told: dict[int, list[Emit]] = {place: [] for place in running}
    while running:
        asked: dict[int, Query | Lock | Batch | Decide] = {}
        for place, op in list(running.items()):
            try:
                asked[place] = yield from _next_question(op, answers[place], told[place])
            except _Ended as ended:
                results[place] = ended.result
                del running[place]
        if not asked:
            break
        commands = {place: _commands(question) for place, question in asked.items()}
        found = iter((yield from batch(*(each for some in commands.values() for each in some))))
        for place, question in asked.items():
            answer = [next(found) for _ in commands[place]]
            if isinstance(question, Decide) and answer[-1]:
                told[place] += question.emits
            answers[place] = answer[0] if isinstance(question, Query | Lock) else answer
    for emits in told.values():
        yield from emits
    return [results[place] for place in sorted(results)]


class _Ended(Exception):
    """An operation has come to its end."""

    def __init__(self, result: Any) -> None:
        self.result = result


def _next_question(op: Op[Any], answer: Any, told: list[Emit]) -> Op[Query | Lock | Batch | Decide]:
    """Pass on what an operation yields until it asks for rows. Raises _Ended at its end."""
    while True:
        try:
            command = op.send(answer)
        except StopIteration as stop:
            raise _Ended(stop.value) from None
        if isinstance(command, Query | Lock | Batch | Decide):
            return command
        answer = None
        if isinstance(command, Emit):
            told.append(command)
        else:
            answer = yield command


def _commands(question: Query | Lock | Batch | Decide) -> Sequence[Query | Lock]:
    return [question] if isinstance(question, Query | Lock) else question.commands


def fresh_id() -> Op[str]:
    """Return a new id, the same one when this call is re-run."""
    id: str = yield FreshId()
    return id


class Definition(Generic[R_co]):
    """What an operation is: its generator function, and how that is to be run."""

    mode: ClassVar[Mode] = "write"
    decides: ClassVar[bool] = False
    """Whether a `Decide` that finds a row is the last that a call does."""
    is_marked: ClassVar[bool] = True
    """Whether a COMMIT without an answer can be settled by the mark that a call leaves."""
    function: Callable[..., Op[R_co]]
    __qualname__: str


@dataclass(slots=True, eq=False, repr=False)
class Call(Generic[R_co]):
    """An operation with its arguments: it can be named, traced and run again from the start."""

    operation: Definition[R_co]
    instance: object
    arguments: tuple[Any, ...] = ()
    keywords: Mapping[str, Any] = field(default_factory=dict)
    ids: list[str] = field(default_factory=list)
    """The ids that its runs have asked for: a further run receives the same ones."""

    @property
    def name(self) -> str:
        """The operation's qualified name, as traces show it."""
        return self.operation.__qualname__

    def begin(self) -> Op[R_co]:
        """Return a new generator for one run."""
        return self.operation.function(self.instance, *self.arguments, **self.keywords)


class Composition:
    """The operations created inside one `store.run`, so that a forgotten one is noticed."""

    def __init__(self, *, is_read_only: bool = False) -> None:
        self._is_read_only = is_read_only
        self._created: list[tuple[str, Op[Any]]] = []

    def add(self, call: Call[R]) -> Op[R]:
        """Create an operation's generator and remember it. Raises StoreReadOnly if it may not."""
        if self._is_read_only and call.operation.mode == "write":
            raise StoreReadOnly(operation=call.name)
        generator = call.begin()
        self._created.append((call.name, generator))
        return generator

    def check(self) -> None:
        """Raise OperationNotRun if an operation was created and never yielded from."""
        for name, generator in self._created:
            if inspect.getgeneratorstate(generator) == inspect.GEN_CREATED:
                raise OperationNotRun(
                    f"{name} was called inside store.run without `yield from`; nothing was written",
                    operation=name,
                )


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
    """An operation that may be run where there are no tables yet; running it again does no harm."""

    is_marked = False


class query(operation[P, R_co]):  # noqa: N801 - it is used as a decorator
    """A method written as a generator that reads one consistent snapshot."""

    mode = "read"


class large_query(operation[P, R_co]):  # noqa: N801 - it is used as a decorator
    """A query that may return much: an async SQLite store runs it in a reader thread."""

    mode = "read_large"

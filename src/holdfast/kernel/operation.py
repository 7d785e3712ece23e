"""Handles, and operations: every change or read of the store, written once as a generator.

An operation knows no driver, no thread and no `await`. It yields commands (a `Query`, a `Lock`,
a `Batch` of them, a `Decide`, an `Emit`, an `AfterCommit`, a `FreshId`) and a driver answers them
inside one transaction. The colour of the handle it is bound to decides what a call gives: `Sync`
the result, `Async` an awaitable of it, and `Tx`, inside `store.run`, the generator to `yield from`.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Awaitable, Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field, replace
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

from ..errors import InvalidArgument, OperationNotRun, StoreReadOnly

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
    start_flow: Callable[[Flow[Any]], Any] | None
    """Runs a flow; None where that cannot be, inside a transaction."""
    start_stream: Callable[[Stream[Any]], Any] | None
    """Runs a stream, as an iterator; None inside a transaction."""
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

    def run_flow(self, steps: Flow[Any]) -> Any:
        """Run a flow, in the colour of the handles."""
        if self.start_flow is None:
            raise InvalidArgument("what waits between transactions cannot be part of one")
        return self.start_flow(steps)

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


def fresh_id() -> Op[str]:
    """Return a new id, the same one when this call is re-run."""
    id: str = yield FreshId()
    return id


class Call(Generic[R_co]):
    """An operation with its arguments: it can be named, traced and run again from the start."""

    __slots__ = (
        "_arguments",
        "_instance",
        "_keywords",
        "_operation",
        "decides",
        "ids",
        "is_marked",
        "mode",
        "name",
    )

    def __init__(
        self,
        called: operation[..., R_co],
        instance: object,
        arguments: tuple[Any, ...] = (),
        keywords: Mapping[str, Any] | None = None,
    ) -> None:
        self._operation = called
        self._instance = instance
        self._arguments = arguments
        self._keywords = keywords or {}
        self.name: str = called.__qualname__
        """The operation's qualified name, as traces show it."""
        self.is_marked = called.is_marked
        """Whether a COMMIT without an answer can be settled by the mark that the call leaves."""
        self.mode: Mode = called.mode
        """Whether the call writes, reads, or reads much."""
        self.decides = called.decides
        """Whether a `Decide` that finds a row is the last that the call does."""
        self.ids: list[str] = []

    def begin(self) -> Op[R_co]:
        """Return a new generator for one run."""
        return self._operation.function(self._instance, *self._arguments, **self._keywords)


class Composition:
    """The operations created inside one `store.run`, so that a forgotten one is noticed."""

    def __init__(self, *, is_read_only: bool = False) -> None:
        self._is_read_only = is_read_only
        self._created: list[tuple[str, Op[Any]]] = []

    def add(self, call: Call[R]) -> Op[R]:
        """Create an operation's generator and remember it. Raises StoreReadOnly if it may not."""
        if self._is_read_only and call.mode == "write":
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


class operation(Generic[P, R_co]):  # noqa: N801 - it is used as a decorator
    """A method written as a generator that writes; one call is one transaction."""

    mode: ClassVar[Mode] = "write"
    decides: ClassVar[bool] = False
    is_marked: ClassVar[bool] = True

    def __init__(self, function: Callable[Concatenate[Any, P], Op[R_co]]) -> None:
        self.function: Callable[..., Op[R_co]] = function
        self.__qualname__ = function.__qualname__
        functools.update_wrapper(cast("Any", self), function)

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
        """Bind to an instance, whose colour decides what a call returns."""
        return self if instance is None else BoundOperation(self, instance)


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


class BoundOperation:
    """An operation of one instance; looks like a method to help(), inspect and editors."""

    def __init__(self, bound: operation[..., Any], instance: Any) -> None:
        self._operation = bound
        self.__self__ = instance
        self.__doc__ = bound.__doc__

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the operation in the colour of its instance."""
        return self.__self__.runtime.start(Call(self._operation, self.__self__, args, kwargs))

    def __getattr__(self, name: str) -> Any:
        if name in {"__name__", "__qualname__", "__module__"}:
            return getattr(self._operation, name)
        if name == "__signature__":
            return signature_of(self._operation)
        raise AttributeError(name)

    def __repr__(self) -> str:
        return f"<{type(self._operation).__name__} {self._operation.__qualname__}>"


def signature_of(bound: operation[..., Any]) -> inspect.Signature:
    """Return an operation's signature as its callers see it: without self, with its result."""
    signature = inspect.signature(bound.function)
    return signature.replace(parameters=list(signature.parameters.values())[1:])

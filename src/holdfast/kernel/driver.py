"""Drivers: the interface of an open database, and how a driver executes a call.

There are four: SQLite and PostgreSQL, sync and async; on PostgreSQL also one that joins the
caller's transaction. `opening` creates them, for reading or for writing; nothing is changed on
them afterwards.

A call runs in one transaction and is retried if the database asks for it; its result is returned
once it is durable. A call that only reads sees one snapshot. A driver opened for reading refuses
calls that write (StoreReadOnly) before their generator runs.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable, Collection, Sequence
from dataclasses import field
from functools import partial
from pathlib import Path
from threading import get_ident
from typing import (
    TYPE_CHECKING,
    Any,
    ClassVar,
    Generic,
    Literal,
    Protocol,
    TypeAlias,
    TypeVar,
    overload,
)

import msgspec

from ..clock import Clock
from ..dataclass import dataclass
from ..errors import HoldfastError, StoreClosed, StoreForked, StoreReentered
from .operation import (
    SINGLE,
    AfterCommit,
    Asking,
    Batch,
    Call,
    Decide,
    Deferred,
    Emit,
    FreshId,
    Lock,
    Op,
    Query,
    Row,
    TryLock,
)
from .signals import TREE_TOPIC, Signals

if TYPE_CHECKING:
    from .nouns import Noun

R = TypeVar("R")
T = TypeVar("T")

# How long maintenance lets others write between its transactions where it cannot know whether they
# do: enough for a call of two transactions.
REST_SECONDS = 0.002
log = logging.getLogger("holdfast.kernel")

DialectName = Literal["sqlite", "postgres", "remote"]
Durability = Literal["full", "normal"]
StoreMode = Literal["write", "read"]
Progress: TypeAlias = Callable[[int, int], None]
Boundary = Literal["begin", "statement", "commit", "request"]


@dataclass(frozen=True, slots=True)
class Point:
    """A possible crash point: before or after one statement, BEGIN, COMMIT or request."""

    boundary: Boundary
    moment: Literal["before", "after"]
    call: str
    sql: str


@dataclass(frozen=True, slots=True)
class Trace:
    """The cost of one call: its statements, without BEGIN and COMMIT, and its attempts."""

    call: str
    statements: int
    attempts: int
    error: str | None


@dataclass(slots=True)
class Hooks:
    """Callbacks for tests, which kill processes and count statements; None in production."""

    probe: Callable[[Point], None] | None = None
    trace: Callable[[Trace], None] | None = None

    def report(self, execution: Execution[Any], attempts: int, error: BaseException | None) -> None:
        """Call `trace` with the cost of a call."""
        if self.trace is not None:
            name = None if error is None else type(error).__name__
            self.trace(Trace(execution.call.name, execution.statements, attempts, name))


class Events(Protocol):
    """Writes events to their feeds."""

    def __call__(self, emits: Sequence[Emit], *, at_once: bool = False) -> list[Query]:
        """Return the statements; with `at_once`, one of them may change two tables."""
        ...


@dataclass(frozen=True, slots=True)
class Services:
    """What higher layers provide to the kernel: the statements of trees and feed, and new ids."""

    lock: Callable[[str, bool], Query]
    """Returns the statement that locks a tree; the flag allows it to wait."""
    create: Callable[[str], Query]
    """Returns the statement that creates a tree with a new id, and locks it thereby."""
    lock_free: Callable[[Sequence[str]], Query]
    """Returns the statement that locks those of some trees that are free, and returns them."""
    events: Events
    """Returns the statements that append events to their feeds."""
    events_if_done: Callable[[Sequence[Emit]], Query]
    """The same as CTEs that follow `WITH done AS (…)` and write only if `done` has a row."""
    new_id: Callable[[], str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """The options of a driver."""

    services: Services
    nouns: Sequence[Noun]
    """In dependency order."""
    clock: Clock
    is_clock_virtual: bool = False
    durability: Durability = "full"
    mode: StoreMode = "write"
    busy_timeout_seconds: float = 10.0
    hooks: Hooks = field(default_factory=Hooks)


# The answer to a `Lock` of a tree that the transaction has locked already.
HELD: list[Row] = [{}]


class Asked(msgspec.Struct):
    """The queries of one command, and the answers so far."""

    command: Asking
    slots: list[Query | None]
    """One query per part; None for a tree that is locked already."""
    queries: list[Query]
    """The deferred statements that run before it, then its own."""
    deferred: int = 0
    """How many of them were deferred."""
    answers: list[list[Row]] = []

    def rest(self) -> list[Query]:
        """Return the remaining queries; none if a `must_find` query returned no row."""
        rest = self.queries[len(self.answers) :]
        if rest and not all(
            found
            for query, found in zip(self.queries, self.answers, strict=False)
            if query.must_find
        ):
            self.answers += [[] for _ in rest]
            return []
        return rest


class Execution(Generic[R]):
    """One attempt at a call; `advance` answers its current queries and runs it to the next.

    The first `advance` is made on the caller's thread: arguments are validated and values encoded
    before any lock is taken.
    """

    result: R
    is_lock_immediate = False
    """Whether the current queries lock a tree with NOWAIT."""
    _last_locked = ""
    _fresh_ids = 0

    def __init__(
        self,
        call: Call[R],
        services: Services,
        lock_first: Collection[str] = (),
        *,
        is_refused: bool = False,
        has_all: bool = False,
    ) -> None:
        """With `is_refused`, an initial `Decide` is answered with no rows, without a query.

        With `has_all`, the transaction has locked the whole database.
        """
        self.call = call
        self.queries: list[Query] = []
        self.statements = 0
        self.locked: set[str] = set()
        self.created: set[str] = set()
        """The locked trees that are new: nobody else can wait for them."""
        self.emits: list[Emit] = []
        self.deferred: list[Query] = []
        """The statements that are sent with the next ones, or at the end."""
        self.hooks: list[Callable[[], None]] = []
        self._services = services
        self._is_refused = is_refused
        self._has_all = has_all
        self._asked: Asked | None = None
        self._generator = self._locked_first(lock_first) if lock_first else call.begin()

    def advance(self, answers: Sequence[list[Row]] = ()) -> None:
        """Answer the current queries and run to the next ones; at the end there are none."""
        answer: Any = None
        if (asked := self._asked) is not None:
            asked.answers += answers
            self.queries = asked.rest() if len(asked.answers) < len(asked.queries) else []
            if not self.queries:
                answer = self._answer(asked)
        send = self._generator.send
        while not self.queries:
            try:
                command = send(answer)
            except StopIteration as stop:
                self.result = stop.value
                return
            answer = None
            if isinstance(command, Emit):
                self._emit(command)
            elif isinstance(command, Deferred):
                self.deferred += command.queries
                for event in command.emits:
                    self._emit(event)
            elif isinstance(command, AfterCommit):
                self.hooks.append(command.function)
            elif isinstance(command, FreshId):
                ids = self.call.ids
                if self._fresh_ids == len(ids):
                    ids.append(self._services.new_id())
                answer = ids[self._fresh_ids]
                self._fresh_ids += 1
            else:
                answer = self._ask(command)
        self.statements += len(self.queries)

    def _ask(self, command: Asking) -> Any:
        """Set the queries of a command; return its answer if it needs none."""
        if self._is_refused:
            # Only the first command of the call can be the refused one.
            self._is_refused = False
            if isinstance(command, Decide):
                return [[] for _ in command.commands]
        self.is_lock_immediate = False
        # None for a tree that is locked already.
        slots: list[Query | None]
        if isinstance(command, TryLock):
            wanted = [each for each in command.root_ids if each not in self.locked]
            slots = [self._services.lock_free(wanted) if wanted else None, *command.beside]
        else:
            parts = [command] if isinstance(command, SINGLE) else command.commands
            slots = [self._lock(each) if isinstance(each, Lock) else each for each in parts]
        queries = [query for query in slots if query is not None]
        if not queries:
            # It needs no answer of the database, so what was deferred waits on.
            return self._answer(Asked(command, slots, queries))
        deferred = len(self.deferred)
        if deferred:
            queries, self.deferred = [*self.deferred, *queries], []
        self._asked = Asked(command, slots, queries, deferred)
        if isinstance(command, Decide):
            # The `must_find` queries run first, the rest only if they return rows.
            first = None
            for number, query in enumerate(queries, 1):
                if query.must_find:
                    first = number
            queries = queries[:first]
        self.queries = queries
        return None

    def _answer(self, asked: Asked) -> Any:
        """Return the answer to a command; a `Decide` that returned a row emits its events."""
        command, answers, self._asked = asked.command, asked.answers, None
        if asked.deferred:
            answers = answers[asked.deferred :]
        if len(answers) < len(asked.slots):
            found = iter(answers)
            answers = [HELD if query is None else next(found) for query in asked.slots]
        if isinstance(command, Batch):
            return answers
        if isinstance(command, SINGLE):
            return answers[0]
        if isinstance(command, TryLock):
            free, *beside = answers
            if free is not HELD:
                self.locked.update(row["root_id"] for row in free)
                self._last_locked = max([self._last_locked, *(row["root_id"] for row in free)])
            return [each for each in command.root_ids if each in self.locked], beside
        if answers[-1] and command.emits:
            locks = zip(command.commands, answers, strict=True)
            gone = {each.root_id for each, rows in locks if isinstance(each, Lock) and not rows}
            for event in command.emits:
                if event.root_id not in gone:
                    self._emit(event)
        return answers

    @property
    def decide(self) -> Decide | None:
        """The `Decide` that the current queries belong to, if any."""
        command = None if self._asked is None else self._asked.command
        return command if isinstance(command, Decide) else None

    @property
    def is_begun(self) -> bool:
        """Whether something else is to be written with the current command."""
        return bool(self.emits) or (self._asked is not None and self._asked.deferred > 0)

    def whole(self) -> list[Query]:
        """Return all queries of a `Decide`, to be sent and answered at once."""
        assert self._asked is not None
        self.statements += len(self._asked.queries) - len(self.queries)
        self.queries = self._asked.queries
        return self.queries

    def fail(self, error: BaseException) -> None:
        """Throw a query's error into the generator, for its traceback; it cannot continue."""
        with contextlib.suppress(Exception):
            self._generator.throw(error)
            self._generator.close()

    def closing(self, *, at_once: bool = False) -> list[Query]:
        """Return the statements that are left, and those that write the emitted events.

        With `at_once`, one statement may change two tables.
        """
        queries, self.deferred = self.deferred, []
        if self.emits:
            queries = [*queries, *self._services.events(self.emits, at_once=at_once)]
        self.statements += len(queries)
        return queries

    def finish(self, signals: Signals) -> None:
        """Call the after-commit hooks and wake waiters for changes of the trees.

        The change is durable, so errors are only logged.
        """
        for root_id in {event.root_id for event in self.emits}:
            self.hooks.append(partial(signals.ring, TREE_TOPIC + root_id))
        for hook in self.hooks:
            try:
                hook()
            except Exception:
                log.exception("after-commit hook of %s failed", self.call.name)

    def _locked_first(self, root_ids: Collection[str]) -> Op[R]:
        for root_id in sorted(root_ids):
            yield Lock(root_id)
        return (yield from self.call.begin())

    def _lock(self, lock: Lock) -> Query | None:
        root_id = lock.root_id
        if lock.is_new:
            self.locked.add(root_id)
            self.created.add(root_id)
            return self._services.create(root_id)
        if root_id in self.locked:
            return None
        if self._has_all and not lock.is_asked:
            self.locked.add(root_id)
            return None
        may_wait = root_id > self._last_locked
        self._last_locked = max(self._last_locked, root_id)
        self.is_lock_immediate |= not may_wait
        self.locked.add(root_id)
        return self._services.lock(root_id, may_wait)

    def _emit(self, event: Emit) -> None:
        if event.root_id not in self.locked:
            raise HoldfastError(
                f"{self.call.name} emits an event of tree {event.root_id!r} without locking it"
            )
        self.emits.append(event)


class Runner(Protocol):
    """Runs calls on this thread."""

    def run(self, call: Call[R]) -> R:
        """Run a call in one transaction and return its result once it is durable."""
        ...


class Driver:
    """The common part of sync and async drivers; none of it is async, some of it blocks."""

    dialect: ClassVar[DialectName]
    is_joined: ClassVar[bool] = False
    """Whether calls run inside a transaction of the caller's."""
    settings: Settings
    signals: Signals
    """Wakes waiters when something may have changed, in this process or another."""

    @property
    def mode(self) -> StoreMode:
        """Whether calls that write are allowed."""
        return self.settings.mode

    @property
    def is_inside(self) -> bool:
        """Whether this thread is inside a call."""
        raise NotImplementedError

    def run(self, call: Call[Any]) -> Any:
        """Run a call: return its result, or an awaitable of it."""
        raise NotImplementedError

    def twin(self) -> SyncDriver:
        """Return a sync driver on the same store, for background threads; a joined one refuses."""
        raise NotImplementedError

    def require_own(self, what: str) -> None:
        """Refuse a joined driver, which cannot `what`, and a closed or inherited one."""
        self.twin().require_usable()

    def require_outside(self) -> None:
        """Raise StoreReentered on a thread that is inside a call."""
        if self.is_inside:
            raise _reentered()

    @property
    def keeps_others_waiting(self) -> bool:
        """Whether others may be waiting for transactions of maintenance; only SQLite can tell."""
        return True

    def rest_seconds(self) -> float:
        """Return how long to let others write after a transaction of maintenance."""
        return REST_SECONDS

    def copy_to(self, path: Path, progress: Progress | None) -> None:
        """Copy one snapshot of the store into a new SQLite file; blocks."""
        raise NotImplementedError

    def vacuum(self) -> None:
        """Reclaim the space of removed rows; blocks. Refused if opened for reading."""
        raise NotImplementedError

    def close(self) -> Any:
        """Finish what is in progress and close the database, or return an awaitable that does.

        Does nothing the second time, or in a forked child.
        """
        raise NotImplementedError


class SyncDriver(Driver):
    """Runs calls on the caller's thread, one at a time on each thread.

    The function of `store.run`, a hook, a signal handler or `__del__` may run while its thread is
    inside a call and holds the writer, a connection or a lock. A nested call would deadlock or
    change data that the outer call is working on, so it is refused.
    """

    def __init__(self, settings: Settings, signals: Signals, name: str) -> None:
        self.settings = settings
        self.signals = signals
        self.is_closed = False
        self._name = name
        self._pid = os.getpid()
        self._inside: dict[int, object] = {}

    @overload
    def run(self, call: Call[R]) -> R: ...
    @overload
    def run(self, call: T, execute: Callable[[T], R]) -> R: ...
    def run(self, call: Any, execute: Callable[[Any], Any] | None = None) -> Any:
        """Run a call in one transaction and return its result once it is durable.

        With `execute`, run that instead, with the same protection against reentry.
        """
        if execute is None and (self.is_closed or self._pid != os.getpid()):
            self.require_usable()
        thread, inside = get_ident(), self._inside
        if thread in inside:
            raise _reentered()
        # Python handles signals neither between the test and the entry nor before its removal.
        try:
            inside[thread] = call
            return self._execute(call) if execute is None else execute(call)
        finally:
            inside.pop(thread, None)

    def _execute(self, call: Call[R]) -> R:
        raise NotImplementedError

    def close(self) -> None:
        """Finish what is in progress and close the database."""
        raise NotImplementedError

    def twin(self) -> SyncDriver:
        """Return itself."""
        return self

    def require_usable(self) -> None:
        """Refuse a closed store, or one inherited by a forked child."""
        if self._pid != os.getpid():
            raise StoreForked(
                f"process {os.getpid()} inherited {self._name} by fork; open the store again in it"
            )
        if self.is_closed:
            raise StoreClosed(f"{self._name} is closed; open it again")

    @property
    def is_inherited(self) -> bool:
        """Whether this process is a forked child of the one that opened the store."""
        return self._pid != os.getpid()

    @property
    def is_inside(self) -> bool:
        """Whether this thread is inside a call."""
        return get_ident() in self._inside


class AsyncDriver(Driver):
    """Runs calls in the event loop it was created in; the rest is done by its sync twin."""

    def __init__(self, twin: SyncDriver) -> None:
        self.settings = twin.settings
        self.signals = twin.signals
        self._twin = twin

    async def run(self, call: Call[R]) -> R:
        """Run a call in one transaction and return its result once it is durable."""
        raise NotImplementedError

    async def close(self) -> None:
        """Finish what is in progress and close the database."""
        raise NotImplementedError

    def twin(self) -> SyncDriver:
        """Return the sync driver on the same store."""
        return self._twin

    @property
    def is_inside(self) -> bool:
        """Whether this thread is inside a call of the sync twin."""
        return self._twin.is_inside

    @property
    def keeps_others_waiting(self) -> bool:
        """Whether others have to wait for a transaction of maintenance, and do."""
        return self._twin.keeps_others_waiting

    def rest_seconds(self) -> float:
        """Return how long to let others write after a transaction of maintenance."""
        return self._twin.rest_seconds()

    def copy_to(self, path: Path, progress: Progress | None) -> None:
        """Copy one snapshot of the store into a new SQLite file; blocks."""
        self._twin.copy_to(path, progress)

    def vacuum(self) -> None:
        """Reclaim the space of removed rows; blocks."""
        self._twin.vacuum()


def _reentered() -> StoreReentered:
    return StoreReentered(
        "this thread is inside a call of this store; nothing was done. Use tx inside store.run; "
        "call the store later, not from a hook, a signal handler or __del__"
    )

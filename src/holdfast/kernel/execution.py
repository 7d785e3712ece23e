"""One run of a call, driven by a driver: queries go out, everything else is kept for the end."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from threading import get_ident
from typing import Any, Generic, Literal, TypeVar

from ..errors import HoldfastError, StoreReentered
from .operation import (
    AfterCommit,
    Batch,
    Call,
    Decide,
    Emit,
    FreshId,
    Lock,
    Op,
    Query,
    Row,
)

R = TypeVar("R")
T = TypeVar("T")
log = logging.getLogger("holdfast.kernel")

Boundary = Literal["begin", "statement", "commit"]


@dataclass(frozen=True, slots=True)
class Point:
    """A place where a process can die: before or after one statement, BEGIN or COMMIT."""

    boundary: Boundary
    moment: Literal["before", "after"]
    call: str
    sql: str


@dataclass(frozen=True, slots=True)
class Trace:
    """What one call cost: its statements without BEGIN and COMMIT, and how often it ran."""

    call: str
    statements: int
    attempts: int
    error: str | None


@dataclass(slots=True)
class Hooks:
    """What watches a driver. Tests kill and count here; in production all are None."""

    probe: Callable[[Point], None] | None = None
    trace: Callable[[Trace], None] | None = None

    def tell(self, attempt: Execution[Any], attempts: int, error: BaseException | None) -> None:
        """Call `trace` with what a call cost."""
        if self.trace is not None:
            name = None if error is None else type(error).__name__
            self.trace(Trace(attempt.call.name, attempt.statements, attempts, name))


@dataclass(frozen=True, slots=True)
class Services:
    """What the layers above lend to the kernel: the statements of trees and feed, and new ids."""

    lock: Callable[[str, bool], Query]
    """The statement that locks a tree; the flag says whether it may wait."""
    events: Callable[[Sequence[Emit]], list[Query]]
    events_if_done: Callable[[Sequence[Emit]], Query]
    """The same as further parts of a statement WITH done AS (…): written if that has a row."""
    new_id: Callable[[], str]


# What a command is answered that locks a tree which the transaction holds already.
HELD: list[Row] = [{}]


class Execution(Generic[R]):
    """Runs a call's generator as far as its next queries; the first are reached at construction.

    So arguments are validated and values encoded on the caller's thread, before any lock is held.
    """

    result: R

    def __init__(self, call: Call[R], services: Services, lock_first: Collection[str] = ()) -> None:
        self.call = call
        self._services = services
        self._lock_first = lock_first
        self.restart()

    def restart(self, *, is_refused: bool = False) -> None:
        """Begin again; what the earlier run emitted is forgotten.

        With `is_refused`, the first `Decide` is known to find nothing and is answered so.
        """
        self._is_refused = is_refused
        self.decide: Decide | None = None
        self._answered: list[list[Row]] = []
        self._held_back: list[Query] = []
        self.locked: set[str] = set()
        self._last_locked = ""
        self.is_lock_immediate = False
        self.queries: list[Query] = []
        self.statements = 0
        self.emits: list[Emit] = []
        self.hooks: list[Callable[[], None]] = []
        self._id_count = 0
        self._slots: list[int] | None = None
        self._generator = self._body() if self._lock_first else self.call.begin()
        self.reply([])

    def reply(self, answers: list[list[Row]]) -> None:
        """Answer the current queries and go on to the next; there are none at the end."""
        if self._held_back or self._answered:
            collected = self._collect(answers)
            if collected is None:
                return
            answers = collected
        answer: Any = self._answer(answers) if answers else None
        if self.decide is not None:
            self._decided(self.decide, answer)
        self.queries = []
        try:
            while not self.queries:
                command = self._generator.send(answer)
                self._slots = None
                self.is_lock_immediate = False
                answer = None
                if isinstance(command, FreshId):
                    answer = self._fresh_id()
                elif isinstance(command, AfterCommit):
                    self.hooks.append(command.function)
                elif isinstance(command, Emit):
                    self._emit(command)
                else:
                    answer = self._begin(command)
            self.statements += len(self.queries)
        except StopIteration as stop:
            self.queries = []
            self.result = stop.value

    def _begin(self, command: Query | Lock | Batch | Decide) -> Any:
        """Set the queries that a command asks; return its answer if it asks none."""
        # Only the very first that is asked is the one that was refused.
        is_refused, self._is_refused = self._is_refused, False
        match command:
            case Query():
                self.queries = [command]
            case Lock():
                self.queries = self._lock(command)
                return HELD
            case Batch(commands):
                self._ask(commands)
                return self._answer([]) if not self.queries else None
            case Decide(commands) if is_refused:
                return [[] for _ in commands]
            case Decide(commands):
                self.decide = command
                self._ask(commands)
                self._hold_back()
        return None

    def _ask(self, commands: Sequence[Query | Lock]) -> None:
        self._slots, self.queries = [], []
        for command in commands:
            asked = self._lock(command) if isinstance(command, Lock) else [command]
            self._slots.append(len(asked))
            self.queries += asked

    def _hold_back(self) -> None:
        """Ask what must be found first, and the rest only if it is."""
        first = 0
        for number, query in enumerate(self.queries, 1):
            if query.must_find:
                first = number
        if first:
            self.queries, self._held_back = self.queries[:first], self.queries[first:]

    def whole(self) -> list[Query]:
        """Return all queries of a `Decide`, to be asked and answered at once."""
        self.statements += len(self._held_back)
        self.queries, self._held_back = [*self.queries, *self._held_back], []
        return self.queries

    def _collect(self, answers: list[list[Row]]) -> list[list[Row]] | None:
        """Return all answers to a command, or None if the rest of it is to be asked now."""
        if self._held_back:
            held_back, self._held_back = self._held_back, []
            asked = zip(self.queries, answers, strict=True)
            if all(found for query, found in asked if query.must_find):
                self._answered = answers
                self.queries = held_back
                self.statements += len(held_back)
                return None
            return [*answers, *([] for _ in held_back)]
        answered, self._answered = self._answered, []
        return [*answered, *answers] if answered else answers

    def _answer(self, answers: list[list[Row]]) -> Any:
        """Give each command its rows; a tree that was held already has no query of its own."""
        if self._slots is None:
            return answers[0] if answers else HELD
        remaining = iter(answers)
        return [next(remaining) if asked else HELD for asked in self._slots]

    def _decided(self, decide: Decide, answers: list[list[Row]]) -> None:
        """Emit the events of a `Decide` that found a row, but for those of trees that are gone."""
        self.decide = None
        if answers[-1]:
            gone = {
                command.root_id
                for command, found in zip(decide.commands, answers, strict=True)
                if isinstance(command, Lock) and not found
            }
            for event in decide.emits:
                if event.root_id not in gone:
                    self._emit(event)

    def fail(self, error: BaseException) -> None:
        """Show the generator why its query failed, for the traceback; it cannot go on."""
        with contextlib.suppress(Exception):
            self._generator.throw(error)
            self._generator.close()

    def closing(self) -> list[Query]:
        """Return the statements that write the emitted events; they need no answers."""
        if not self.emits:
            return []
        queries = self._services.events(self.emits)
        self.statements += len(queries)
        return queries

    def run_hooks(self) -> None:
        """Call the after-commit hooks. The change is durable, so a failing hook is only logged."""
        for hook in self.hooks:
            try:
                hook()
            except Exception:
                log.exception("after-commit hook of %s failed", self.call.name)

    def _body(self) -> Op[R]:
        for root_id in sorted(self._lock_first):
            yield Lock(root_id)
        return (yield from self.call.begin())

    def _lock(self, lock: Lock) -> list[Query]:
        if lock.root_id in self.locked:
            return []
        may_wait = not self.locked or lock.root_id > self._last_locked
        self.is_lock_immediate |= not may_wait
        self.locked.add(lock.root_id)
        self._last_locked = max(self._last_locked, lock.root_id)
        return [self._services.lock(lock.root_id, may_wait)]

    def _emit(self, event: Emit) -> None:
        if event.root_id not in self.locked:
            raise HoldfastError(
                f"{self.call.name} emits an event of tree {event.root_id!r} without locking it"
            )
        self.emits.append(event)

    def _fresh_id(self) -> str:
        if self._id_count == len(self.call.ids):
            self.call.ids.append(self._services.new_id())
        self._id_count += 1
        return self.call.ids[self._id_count - 1]


class Entrance:
    """Knows which threads are inside a call."""

    def __init__(self) -> None:
        self._inside: dict[int, Any] = {}

    def run(self, function: Callable[[T], R], argument: T) -> R:
        """Call a function while this thread counts as inside. Raises StoreReentered if it is."""
        thread, inside = get_ident(), self._inside
        if thread in inside:
            raise _error()
        # Python looks for signals neither between the test and the entry nor before its removal.
        try:
            inside[thread] = argument
            return function(argument)
        finally:
            inside.pop(thread, None)

    @property
    def is_inside(self) -> bool:
        """Whether this thread is inside a call."""
        return get_ident() in self._inside

    def require_outside(self) -> None:
        """Raise StoreReentered on a thread that is inside a call."""
        if self.is_inside:
            raise _error()


def _error() -> StoreReentered:
    return StoreReentered(
        "this thread is inside a call of this store; a function of store.run uses its tx, a hook, "
        "a signal handler or __del__ leaves the call to another moment; nothing was done"
    )

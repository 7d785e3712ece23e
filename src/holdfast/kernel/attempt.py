"""One run of a call, driven by a driver: queries go out, everything else is kept for the end."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Literal, TypeVar

from ..errors import HoldfastError
from .operation import AfterCommit, Batch, Call, Command, Emit, FreshId, Lock, Op, Query, Row

R = TypeVar("R")
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


@dataclass(frozen=True, slots=True)
class Services:
    """What the layers above lend to the kernel: the statements of trees and feed, and new ids."""

    lock: Callable[[str, bool], Query]
    """The statement that locks a tree; the flag says whether it may wait."""
    events: Callable[[Sequence[Emit]], list[Query]]
    new_id: Callable[[], str]


# What a command is answered that locks a tree which the transaction holds already.
HELD: list[Row] = [{}]


class Attempt(Generic[R]):
    """Runs a call's generator as far as its next queries; the first are reached at construction.

    So arguments are validated and values encoded on the caller's thread, before any lock is held.
    """

    result: R

    def __init__(self, call: Call[R], services: Services, lock_first: Collection[str] = ()) -> None:
        self.call = call
        self._services = services
        self._lock_first = lock_first
        self.restart()

    def restart(self) -> None:
        """Begin again; what the earlier run emitted is forgotten."""
        self.locked: list[str] = []
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
        answer = self._answer(answers) if answers else None
        try:
            while True:
                command = self._generator.send(answer)
                self._slots = None
                self.is_lock_immediate = False
                match command:
                    case Query():
                        self.queries = [command]
                    case Lock():
                        self.queries = self._lock(command)
                    case Batch(commands):
                        asked = [self._lock(c) if isinstance(c, Lock) else [c] for c in commands]
                        self._slots = [len(queries) for queries in asked]
                        self.queries = [query for queries in asked for query in queries]
                    case _:
                        answer = self._serve(command)
                        continue
                if self.queries:
                    self.statements += len(self.queries)
                    return
                answer = self._answer([])
        except StopIteration as stop:
            self.queries = []
            self.result = stop.value

    def _answer(self, answers: list[list[Row]]) -> Any:
        """Give each command its rows; a tree that was held already has no query of its own."""
        if self._slots is None:
            return answers[0] if answers else HELD
        remaining = iter(answers)
        return [next(remaining) if asked else HELD for asked in self._slots]

    def _serve(self, command: Command) -> Any:
        """Answer a command that needs no statement now."""
        match command:
            case Emit():
                self._emit(command)
            case AfterCommit(function):
                self.hooks.append(function)
            case FreshId():
                return self._fresh_id()
        return None

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
        may_wait = all(lock.root_id > locked for locked in self.locked)
        self.is_lock_immediate |= not may_wait
        self.locked.append(lock.root_id)
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

"""The operations inside one `store.run`: each of them is run, and run whole."""

from __future__ import annotations

import functools
import inspect
import re
from typing import Any

from ..errors import OperationNotRun, StoreReadOnly
from .operation import (
    SINGLE,
    AfterCommit,
    Batch,
    Call,
    Command,
    Decide,
    Deferred,
    Emit,
    FreshId,
    Op,
    Query,
    R,
    Row,
    TryLock,
)

CHANGES = re.compile(r"\b(INSERT|UPDATE|DELETE)\b")
LOCKS = re.compile(r"\bFOR (NO KEY )?UPDATE\b")


_ANSWERED = (*SINGLE, TryLock, Batch, Decide, FreshId)


class Composition:
    """Remembers the operations of one transaction, and which of them failed half-way."""

    def __init__(self, *, is_read_only: bool = False) -> None:
        self._is_read_only = is_read_only
        self._created: list[tuple[str, Op[Any]]] = []
        self._failed_halfway: BaseException | None = None

    def add(self, call: Call[R]) -> Op[R]:
        """Create and remember an operation's generator. Raises StoreReadOnly if it writes."""
        if self._is_read_only and call.operation.mode == "write":
            raise StoreReadOnly(operation=call.name)
        generator = self._watched(call)
        self._created.append((call.name, generator))
        return generator

    def check(self) -> None:
        """Raise if an operation was not run to its end, or has failed after it had written.

        A caller that caught the error cannot keep the other half; the transaction is rolled back.
        """
        for name, generator in self._created:
            state = inspect.getgeneratorstate(generator)
            if state == inspect.GEN_CREATED:
                raise OperationNotRun(
                    f"{name} was called inside store.run without `yield from`; nothing was written",
                    operation=name,
                )
            if state == inspect.GEN_SUSPENDED:
                raise _not_run_to_its_end(name)
        if self._failed_halfway is not None:
            raise self._failed_halfway

    def _watched(self, call: Call[R]) -> Op[R]:
        """Run an operation; note an error that it raises after it has written something."""
        body = call.begin()
        answer: Any = None
        has_written = False
        while True:
            try:
                command = body.send(answer)
            except StopIteration as stop:
                result: R = stop.value
                return result
            except BaseException as error:
                if has_written:
                    error.add_note(
                        f"{call.name} had written a part of it, so the function of store.run "
                        "cannot go on after this error: the whole transaction is rolled back."
                    )
                    self._failed_halfway = error
                raise
            try:
                answer = yield command
            except BaseException as error:
                # Whoever stops an operation here may have run the command.
                self._failed_halfway = _not_run_to_its_end(call.name)
                body.throw(error)
                raise
            if answer is None and isinstance(command, _ANSWERED):
                # A loop over the operation passes its commands on, but not their answers.
                raise _not_run_to_its_end(call.name)
            has_written = has_written or _has_changed(command, answer)


def _not_run_to_its_end(name: str) -> OperationNotRun:
    return OperationNotRun(
        f"{name} was begun inside store.run and not run to its end; use `yield from`. Nothing was "
        "written",
        operation=name,
    )


def _has_changed(command: Command, answer: Any) -> bool:
    """Whether a command has changed something, or will have when the transaction ends."""
    if isinstance(command, Emit | Deferred | AfterCommit):
        return True
    if isinstance(command, Decide):
        # If its last statement returns no row, none of them has changed anything.
        return bool(answer[-1]) and any(map(_may_change, command.commands))
    if isinstance(command, Batch):
        return any(map(_changed, command.commands, answer))
    return isinstance(command, SINGLE) and _changed(command, answer)


def _may_change(command: object) -> bool:
    return isinstance(command, Query) and _is_change(command.sql)


def _changed(command: object, found: list[Row]) -> bool:
    if not (isinstance(command, Query) and _is_change(command.sql)):
        return False
    return bool(found) or "RETURNING" not in command.sql


@functools.lru_cache(1_000)
def _is_change(sql: str) -> bool:
    return CHANGES.search(LOCKS.sub("", sql)) is not None

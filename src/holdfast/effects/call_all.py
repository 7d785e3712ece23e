"""Several calls of one turn: one commit for their intents, and as few as can be for outcomes.

Each call has its own row and its own lease, and is known or in doubt by itself. The tools run one
after the other, in the order of the calls. The outcome of one that has returned waits for the next
ones, but not for long: until it is written, a crash leaves that call in doubt.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from ..errors import HoldfastError, LeaseLost, SessionBusy, SessionEnded, StoreError
from ..kernel.flow import Flow, Perform, is_async, needs_async_store, perform, perform_to_the_end
from ..kernel.operation import Call
from ..leases import Kept, uptime_seconds
from .calls import INTERRUPTS, Calling, Result, finish
from .ledger import Ledger
from .rows import Outcome, Ticket
from .tools import Tool

# After these no other call of the session can be made either.
STOPS = (LeaseLost, SessionBusy, SessionEnded, StoreError)
# An outcome is written once it has waited this long for others to be written with it.
GATHER_SECONDS = 0.05

Answer: TypeAlias = Result[Any] | Exception
Told: TypeAlias = Callable[[int, Answer], Flow[None]]
"""Is told each answer when it is there; what it raises ends the calls that have not begun."""


@dataclass(frozen=True, slots=True)
class ToolUse:
    """One of several calls: a tool, its arguments, and the id that the model gave the call."""

    tool: Tool[..., Any]
    arguments: Mapping[str, Any]
    call_id: str | None = None


def call_all(
    callings: Sequence[Calling], told: Told | None = None, *, gathers: bool = True
) -> Flow[list[Answer]]:
    """Return the result of each call, or what it raised.

    Unless it `gathers` outcomes, each is recorded before it is told.
    """
    if not callings:
        return []
    calls = _Calls(callings, gathers)
    answers: list[Answer] = []
    try:
        yield from calls.issue()
        for index in range(len(callings)):
            answer: Answer
            try:
                answer = yield from calls.run(index)
            except STOPS:
                raise
            except Exception as error:
                answer = error
            answers.append(answer)
            if told is not None:
                yield from told(index, answer)
            if calls.is_due():
                yield from calls.record()
        yield from calls.record()
    except (Exception, *INTERRUPTS):
        yield from calls.let_go()
        raise
    return [calls.lost.get(index, answer) for index, answer in enumerate(answers)]


class _Calls:
    """The calls that are issued and have not begun, and the outcomes that are not recorded."""

    def __init__(self, callings: Sequence[Calling], gathers: bool) -> None:
        self._callings = callings
        self._gathers = gathers
        self._ledger = callings[0].ledger
        self._issued: dict[int, tuple[Ticket, Kept]] = {}
        self._returned: list[tuple[int, Ticket, Outcome, Kept]] = []
        self._since = 0.0
        self._issue: Call[list[Ticket | None]] | None = None
        self.lost: dict[int, LeaseLost] = {}
        """The calls that another took over before their outcome was recorded."""

    def issue(self) -> Flow[None]:
        """Make the intents durable; reads have none, and what is known already is left alone."""
        for calling in self._callings:
            for function in (calling.tool.function, calling.tool.verify):
                if function is not None and is_async(function) and not self._is_async:
                    raise needs_async_store(function)
        acting = [n for n, each in enumerate(self._callings) if each.tool.effect != "read"]
        if len(acting) < 2:
            return
        place = self._callings[0].place
        requests = [self._callings[n].request for n in acting]
        asked_at = uptime_seconds()
        self._issue = Call(Ledger.take_all, self._ledger, (place, requests))
        tickets: list[Ticket | None] = yield Perform(self._issue)
        for index, ticket in zip(acting, tickets, strict=True):
            if ticket is not None:
                self._issued[index] = ticket, self._callings[index].keep(ticket, asked_at)
        self._issue = None

    def run(self, index: int) -> Flow[Result[Any]]:
        """Run one call, or find out what is known of it."""
        calling = self._callings[index]
        if index not in self._issued:
            # It may be equal to one before it, whose outcome it would wait for.
            yield from self.record()
            return (yield from calling.run())

        def gather(ticket: Ticket, outcome: Outcome, kept: Kept) -> None:
            if not self._returned:
                self._since = uptime_seconds()
            self._returned.append((index, ticket, outcome, kept))

        calling.gather = gather if self._gathers else None
        ticket, kept = self._issued[index]
        try:
            result = yield from calling.execute(ticket, kept)
        except BaseException as error:
            if calling.is_called or not isinstance(error, INTERRUPTS):
                del self._issued[index]
            raise
        del self._issued[index]
        return result

    def is_due(self) -> bool:
        """Whether an outcome has waited long enough."""
        return bool(self._returned) and uptime_seconds() - self._since >= GATHER_SECONDS

    def record(self) -> Flow[None]:
        """Record the outcomes of tools that have returned, in one commit."""
        returned, self._returned = self._returned, []
        if not returned:
            return
        ended = [(ticket, outcome) for _, ticket, outcome, _ in returned]
        try:
            try:
                recorded = yield from perform(Ledger.finish_all, self._ledger, ended)
            except HoldfastError:
                # One by one each is tried again for as long as it takes.
                recorded = [False] * len(ended)
            for (index, ticket, outcome, _), is_recorded in zip(returned, recorded, strict=True):
                if not is_recorded:
                    yield from self._record_alone(index, ticket, outcome)
        except INTERRUPTS:
            with contextlib.suppress(HoldfastError):
                yield from perform_to_the_end(Ledger.finish_all, self._ledger, ended)
            raise
        finally:
            for _, _, _, kept in returned:
                self._ledger.keeper.drop(kept)

    def _record_alone(self, index: int, ticket: Ticket, outcome: Outcome) -> Flow[None]:
        try:
            yield from finish(self._ledger, ticket, outcome)
        except LeaseLost as lost:
            self.lost[index] = lost

    def let_go(self) -> Flow[None]:
        """Record what has returned, and close what was issued and not called."""
        ended = [(ticket, outcome) for _, ticket, outcome, _ in self._returned]
        ids = [ticket.id for ticket, _ in self._issued.values()]
        if self._issue is not None:
            ids += self._issue.ids
        first = self._callings[0]
        with contextlib.suppress(HoldfastError):
            if ended:
                yield from perform_to_the_end(Ledger.finish_all, self._ledger, ended)
        with contextlib.suppress(HoldfastError):
            if ids:
                given = (first.place, first.request.guard, ids)
                yield from perform_to_the_end(Ledger.let_go, self._ledger, *given)
        for _, kept in self._issued.values():
            self._ledger.keeper.drop(kept)
        for _, _, _, kept in self._returned:
            self._ledger.keeper.drop(kept)

    @property
    def _is_async(self) -> bool:
        return self._ledger.runtime.is_async

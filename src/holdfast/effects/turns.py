"""Several calls of one turn: `session.call_all`, and the agent loop.

They take one commit for their intents, and as few as possible for their outcomes. Each has its own
row and lease, and is settled or in doubt on its own. The tools run in order, one at a time. A call
that would not be issued any more when its time comes, as its session has ended, is not made. An
outcome is held back while the next tool runs, to be written together with that one's; a crash
before that leaves its call in doubt.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, TypeAlias

from ..dataclass import dataclass
from ..errors import HoldfastError, LeaseLost
from ..kernel.flow import INTERRUPTS, Flow, Perform, perform, perform_to_the_end
from ..kernel.operation import Call
from ..kernel.signals import TREE_TOPIC
from ..leases import Kept, uptime_seconds
from .calls import FATAL_ERRORS, PreparedCall
from .ledger import Ledger, finish
from .statements import EffectOutcome, Result, Ticket
from .tools import Tool

# An outcome that has waited this long when the next tool returns is written then. An intent is
# looked at again after this time, or when this process knows of a change in its tree.
GATHER_SECONDS = 0.05

CallAnswer: TypeAlias = Result[Any] | Exception
OnAnswer: TypeAlias = Callable[[int, CallAnswer], Flow[None]]
"""Called with each answer; if it raises, calls that have not started are not made."""


@dataclass(frozen=True, slots=True)
class ToolUse:
    """One of several calls: a tool, its arguments, and the id that the model gave the call."""

    tool: Tool[..., Any]
    arguments: Mapping[str, Any]
    call_id: str | None = None


def call_all(
    calls: Sequence[PreparedCall], on_answer: OnAnswer | None = None, *, gathers: bool = True
) -> Flow[list[CallAnswer]]:
    """Return the result of each call, or the exception it raised.

    With `gathers=False`, each outcome is recorded before its answer is reported.
    """
    if not calls:
        return []
    turn = _Turn(calls, gathers)
    answers: list[CallAnswer] = []
    try:
        yield from turn.issue()
        for index in range(len(calls)):
            answer: CallAnswer
            try:
                answer = yield from turn.run(index)
            except FATAL_ERRORS:
                raise
            except Exception as error:
                answer = error
            answers.append(answer)
            if on_answer is not None:
                yield from on_answer(index, answer)
            yield from turn.record(only_if_due=True)
        yield from turn.record()
    except GeneratorExit:
        raise
    except BaseException:
        yield from turn.abort()
        raise
    return [turn.lost.get(index, answer) for index, answer in enumerate(answers)]


class _Turn:
    """The calls that are issued but not started, and the outcomes that are not recorded yet."""

    def __init__(self, calls: Sequence[PreparedCall], gathers: bool) -> None:
        self._calls = calls
        self._gathers = gathers
        self._ledger = calls[0].ledger
        self._issued: dict[int, tuple[Ticket, Kept]] = {}
        self._returned: list[tuple[int, Ticket, EffectOutcome, Kept]] = []
        self._since = 0.0
        self._topic = _topic_of(calls[0])
        self._looked = 0.0, 0
        self._issue: Call[list[Ticket | None]] | None = None
        self.lost: dict[int, LeaseLost] = {}
        """The calls that were taken over before their outcome was recorded."""

    def issue(self) -> Flow[None]:
        """Make the intents of new calls durable. Reads have none."""
        for call in self._calls:
            call.require_colour()
        acting = self._acting()
        if len(acting) < 2:
            return
        requests = [self._calls[n].request for n in acting]
        asked_at = uptime_seconds()
        self._issue = Call(Ledger.take_all, self._ledger, (requests,))
        tickets: list[Ticket | None] = yield Perform(self._issue)
        for index, ticket in zip(acting, tickets, strict=True):
            if ticket is not None:
                self._issued[index] = ticket, self._calls[index].keep(ticket, asked_at)
        self._issue = None
        self._note_look()

    def _note_look(self) -> None:
        """Remember when the issued calls were known to be allowed, and what was known to change."""
        self._looked = uptime_seconds(), self._ledger.signals.count(self._topic)

    def _require_allowed(self, index: int) -> Flow[None]:
        """Look whether an issued call may still be made; if not, none of the others is issued."""
        at, count = self._looked
        is_quick = uptime_seconds() - at < GATHER_SECONDS
        if is_quick and self._ledger.signals.count(self._topic) == count:
            return
        self._note_look()
        if not (yield from perform(Ledger.may_begin, self._ledger, self._issued[index][0])):
            yield from self._withdraw()

    def _acting(self) -> list[int]:
        """Return the calls with an intent, up to one that an earlier call of the turn decides.

        That is a read that counts what was changed before it, or the second use of a call id.
        """
        acting: list[int] = []
        used: set[str] = set()
        for number, call in enumerate(self._calls):
            request, call_id = call.request, call.request.call_id
            is_read = request.tool.effect == "read"
            if call_id in used or (is_read and request.policy == "latest"):
                break
            if call_id is not None:
                used.add(call_id)
            if not is_read:
                acting.append(number)
        return acting

    def run(self, index: int) -> Flow[Result[Any]]:
        """Run one call, or return the outcome that the ledger has."""
        call = self._calls[index]
        if index in self._issued:
            yield from self._require_allowed(index)
        if index not in self._issued:
            # It may equal an earlier call of this turn, and would wait for that one's outcome.
            yield from self.record()
            return (yield from call.run())
        call.gather = partial(self._gather, index) if self._gathers else None
        try:
            result = yield from call.execute(*self._issued[index])
        except BaseException as error:
            if call.is_called or not isinstance(error, INTERRUPTS):
                del self._issued[index]
            raise
        del self._issued[index]
        return result

    def _gather(self, index: int, ticket: Ticket, outcome: EffectOutcome, kept: Kept) -> None:
        if not self._returned:
            self._since = uptime_seconds()
        self._returned.append((index, ticket, outcome, kept))

    def record(self, *, only_if_due: bool = False) -> Flow[None]:
        """Record the outcomes of tools that have returned, in one commit."""
        if only_if_due and uptime_seconds() - self._since < GATHER_SECONDS:
            return
        returned, self._returned = self._returned, []
        if not returned:
            return
        ended = [(ticket, outcome) for _, ticket, outcome, _ in returned]
        try:
            try:
                recorded = yield from perform(Ledger.finish_all, self._ledger, ended)
            except HoldfastError:
                # `finish` retries each one by itself.
                recorded = [False] * len(ended)
            for (index, ticket, outcome, _), is_recorded in zip(returned, recorded, strict=True):
                if not is_recorded:
                    try:
                        yield from finish(self._ledger, ticket, outcome)
                    except LeaseLost as lost:
                        self.lost[index] = lost
        except INTERRUPTS:
            with contextlib.suppress(HoldfastError):
                yield from perform_to_the_end(Ledger.finish_all, self._ledger, ended)
            raise
        finally:
            for _, _, _, kept in returned:
                self._ledger.keeper.drop(kept)

    def abort(self) -> Flow[None]:
        """Record the outcomes of calls that returned, and close those that were never made."""
        ended = [(ticket, outcome) for _, ticket, outcome, _ in self._returned]
        with contextlib.suppress(HoldfastError):
            if ended:
                yield from perform_to_the_end(Ledger.finish_all, self._ledger, ended)
        yield from self._withdraw()
        for _, _, _, kept in self._returned:
            self._ledger.keeper.drop(kept)

    def _withdraw(self) -> Flow[None]:
        """Close the calls that are issued and were not made."""
        issued, self._issued = self._issued, {}
        ids = [ticket.id for ticket, _ in issued.values()]
        if self._issue is not None:
            ids += self._issue.ids
        request = self._calls[0].request
        with contextlib.suppress(HoldfastError):
            if ids:
                given = (request.place, request.guard, ids)
                yield from perform_to_the_end(Ledger.withdraw, self._ledger, *given)
        for _, kept in issued.values():
            self._ledger.keeper.drop(kept)


def _topic_of(call: PreparedCall) -> str:
    """Return what rings when something changes in a call's tree."""
    place = call.request.place
    return "" if place is None else TREE_TOPIC + place.root_id

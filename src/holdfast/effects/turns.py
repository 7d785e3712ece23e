"""Several calls of one turn: `session.call_all`, and the agent loop.

They take one commit for their intents, and as few as possible for their outcomes. Each has its own
row and lease, and is settled or in doubt on its own. The tools run in order, one at a time. A call
that would not be issued any more when its time comes, as its session has ended, is not made. An
outcome is held back for a moment, to be written together with those of the next tools; if these
take longer, the recorder's thread writes it while they run.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, TypeAlias, TypeVar

from ..dataclass import dataclass
from ..errors import CommitUnknown, HoldfastError, LeaseLost
from ..kernel.flow import (
    INTERRUPTS,
    INTERRUPTS_MAX,
    Flow,
    Perform,
    perform,
    perform_to_the_end,
    wait,
)
from ..kernel.operation import Call
from ..kernel.signals import LOCAL_TOPIC, TREE_TOPIC
from ..leases import Kept, uptime_seconds
from .calls import FATAL_ERRORS, POLL_SECONDS, PreparedCall
from .ledger import Ledger, finish
from .recorder import Recorder
from .statements import EffectOutcome, Result, Ticket
from .tools import Tool

WRITTEN = f"{LOCAL_TOPIC}outcomes"
# An intent is looked at again after this time, or when this process knows of a change in its tree.
LOOK_SECONDS = 0.05

R = TypeVar("R")
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
        yield from turn.record()
    except GeneratorExit:
        raise
    except BaseException:
        yield from turn.abort()
        raise
    finally:
        turn.forget()
    return [turn.lost.get(index, answer) for index, answer in enumerate(answers)]


@dataclass(frozen=True, slots=True)
class _Returned:
    """The outcome of a tool that has returned, and the lease to renew until it is recorded."""

    index: int
    ticket: Ticket
    outcome: EffectOutcome
    kept: Kept


class _Turn:
    """The calls that are issued but not started, and the outcomes that are not recorded yet."""

    def __init__(self, calls: Sequence[PreparedCall], gathers: bool) -> None:
        self._calls = calls
        self._gathers = gathers
        self._ledger = calls[0].ledger
        self._recorder = Recorder.of(self._ledger.runtime)
        self._issued: dict[int, tuple[Ticket, Kept]] = {}
        self._ids: list[str] = []
        self._held: deque[_Returned] = deque()
        """Who takes an outcome from here records it: the turn, or the recorder's thread."""
        self._is_watched = False
        self._is_writing = False
        """Whether the recorder's thread writes what it has taken."""
        self._unrecorded: deque[tuple[_Returned, CommitUnknown | None]] = deque()
        """Each with the error that leaves open whether it was recorded all the same."""
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
                self._ids.append(ticket.id)
                self._recorder.turns[ticket.id] = self
        self._issue = None
        self._note_look()

    def _note_look(self) -> None:
        """Remember when the issued calls were known to be allowed, and what was known to change."""
        self._looked = uptime_seconds(), self._ledger.signals.count(self._topic)

    def _require_allowed(self, ticket: Ticket) -> Flow[None]:
        """Look whether an issued call may still be made; if not, none of the others is issued."""
        at, count = self._looked
        is_quick = uptime_seconds() - at < LOOK_SECONDS
        if is_quick and self._ledger.signals.count(self._topic) == count:
            return
        self._note_look()
        if not (yield from perform(Ledger.may_begin, self._ledger, ticket)):
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
        call, issued = self._calls[index], self._issued.get(index)
        if issued is not None:
            yield from self._require_allowed(issued[0])
            call.gather = partial(self._gather, index) if self._gathers else None
            try:
                # Who takes an intent from here runs it, or closes it.
                if self._issued.pop(index, None) is not None:
                    return (yield from call.execute(*issued))
            except INTERRUPTS:
                if not call.is_called:
                    self._issued[index] = issued
                raise
            call.gather = None
        # It may equal an earlier call of this turn, and would wait for that one's outcome.
        yield from self.record()
        return (yield from call.run())

    def _gather(self, index: int, ticket: Ticket, outcome: EffectOutcome, kept: Kept) -> None:
        self._held.append(_Returned(index, ticket, outcome, kept))
        if not self._is_watched:
            self._is_watched = True
            self._recorder.watch(self._record_held)

    def _record_held(self) -> None:
        """Record what is held while the next tool runs; called by the recorder's thread."""
        self._is_watched = False
        # Whoever finds nothing held any more has to find this.
        self._is_writing = True
        returned = _taken(self._held)
        recorded, unknown = [False] * len(returned), None
        try:
            if returned:
                finish_all = Call(Ledger.finish_all, self._ledger, (_ended(returned),))
                recorded = self._ledger.runtime.run(finish_all)
        except CommitUnknown as error:
            unknown = error
            raise
        finally:
            self._note(returned, recorded, unknown)
            self._is_writing = False
            self._ledger.signals.ring_here(WRITTEN)

    def _note(
        self,
        returned: Sequence[_Returned],
        recorded: Sequence[bool],
        unknown: CommitUnknown | None,
    ) -> None:
        """Give up the leases on what is recorded, and remember what is not."""
        for each, is_recorded in zip(returned, recorded, strict=True):
            if is_recorded:
                self._ledger.keeper.drop(each.kept)
            else:
                self._unrecorded.append((each, unknown))

    def record(self) -> Flow[None]:
        """Record the outcomes of tools that have returned, in one commit."""
        yield from self._record_returned()
        while self._unrecorded:
            each, unknown = self._unrecorded.popleft()
            try:
                yield from finish(self._ledger, each.ticket, each.outcome, unknown)
            except LeaseLost as lost:
                self.lost[each.index] = lost
            finally:
                self._ledger.keeper.drop(each.kept)

    def _record_returned(self) -> Flow[None]:
        """Record what is held, and wait for what the recorder's thread writes."""
        while returned := _taken(self._held):
            yield from self._record_together(returned)
        yield from self._until_written()

    def _until_written(self) -> Flow[None]:
        seen = self._ledger.signals.count(WRITTEN)
        while self._is_writing:
            yield from wait(POLL_SECONDS, WRITTEN, seen)
            seen = self._ledger.signals.count(WRITTEN)

    def _record_together(self, returned: Sequence[_Returned]) -> Flow[None]:
        recorded, unknown = [False] * len(returned), None
        try:
            recorded = yield from perform(Ledger.finish_all, self._ledger, _ended(returned))
        except CommitUnknown as error:
            unknown = error
        except HoldfastError:
            pass  # The turn retries each one by itself.
        finally:
            self._note(returned, recorded, unknown)

    def abort(self) -> Flow[None]:
        """Record the outcomes of calls that returned, and close those that were never made.

        All of it, however often the caller is interrupted meanwhile.
        """
        interrupt: BaseException | None = None
        steps = [self._record_to_the_end, self._withdraw, self._until_written]
        for step in (*steps, self._record_to_the_end):
            for _ in range(INTERRUPTS_MAX):
                try:
                    yield from step()
                    break
                except INTERRUPTS as error:
                    interrupt = error
        if interrupt is not None:
            raise interrupt

    def _record_to_the_end(self) -> Flow[None]:
        returned = [*(each for each, _ in _taken(self._unrecorded)), *_taken(self._held)]
        try:
            if returned:
                with contextlib.suppress(HoldfastError):
                    given = _ended(returned)
                    yield from perform_to_the_end(Ledger.finish_all, self._ledger, given)
        finally:
            for each in returned:
                self._ledger.keeper.drop(each.kept)

    def forget(self) -> None:
        """Be found by no other caller any more."""
        for id in self._ids:
            self._recorder.turns.pop(id, None)

    def make_way(self, id: str) -> Flow[None]:
        """Let another caller look for one of the effects; see `Turn`."""
        if any(ticket.id == id for ticket, _ in list(self._issued.values())):
            yield from self._withdraw()
        else:
            yield from self._record_returned()

    def _withdraw(self) -> Flow[None]:
        """Close the calls that are issued and were not made."""
        issued: list[tuple[Ticket, Kept]] = []
        with contextlib.suppress(KeyError):
            while True:
                issued.insert(0, self._issued.popitem()[1])
        ids = [ticket.id for ticket, _ in issued]
        if self._issue is not None:
            ids += self._issue.ids
        request = self._calls[0].request
        try:
            with contextlib.suppress(HoldfastError):
                if ids:
                    given = (request.place, request.guard, ids)
                    yield from perform_to_the_end(Ledger.withdraw, self._ledger, *given)
        finally:
            for _, kept in issued:
                self._ledger.keeper.drop(kept)


def _taken(returned: deque[R]) -> list[R]:
    """Take all, each of which nobody else takes."""
    taken: list[R] = []
    with contextlib.suppress(IndexError):
        while True:
            taken.append(returned.popleft())
    return taken


def _ended(returned: Sequence[_Returned]) -> list[tuple[Ticket, EffectOutcome]]:
    return [(each.ticket, each.outcome) for each in returned]


def _topic_of(call: PreparedCall) -> str:
    """Return what rings when something changes in a call's tree."""
    place = call.request.place
    return "" if place is None else TREE_TOPIC + place.root_id

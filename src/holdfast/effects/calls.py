"""Calling a tool through the ledger: record the intent, run the tool, record the outcome."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import field
from typing import Any

from ..arguments import id_of_item, require_text
from ..codec import check
from ..dataclass import dataclass
from ..errors import (
    HoldfastError,
    InProgress,
    InvalidArgument,
    InvalidValue,
    LeaseLost,
    NotDone,
    SessionBusy,
    SessionEnded,
    StoreError,
    described,
)
from ..kernel.flow import (
    INTERRUPTS,
    CancelledAfterwards,
    Flow,
    Invoke,
    Perform,
    StillRunning,
    perform,
    perform_to_the_end,
    require_colour,
    wait,
)
from ..kernel.operation import Call, Op
from ..leases import Guard, Keeper, Kept, uptime_seconds
from ..records import Effect
from ..sessions.access import Place
from .ledger import (
    Busy,
    InDoubt,
    Known,
    Ledger,
    Owned,
    Unapproved,
    finish,
    settle,
    verify,
)
from .recorder import Recorder
from .requests import ApprovalUsed, EffectRequest, policy_of
from .statements import (
    EffectOutcome,
    Result,
    Ticket,
    failed_before,
    known_result,
    topic,
    unresolved,
)
from .tools import KEY, Landed, Tool, Unknown, Verdict, require_duration

log = logging.getLogger("holdfast.effects")

RENEWALS_MAX = 10
POLL_SECONDS = 0.1
POLL_SECONDS_MAX = 2.0
# After one of these, the session's other calls cannot be made either.
FATAL_ERRORS = (LeaseLost, SessionBusy, SessionEnded, StoreError)


@dataclass(slots=True, kw_only=True, weakref_slot=True)
class PreparedCall:
    """A call with checked arguments: its request, and what to pass to the function."""

    ledger: Ledger
    request: EffectRequest
    arguments: dict[str, Any]
    wait_seconds: float
    gather: Callable[[Ticket, EffectOutcome, Kept], None] | None = field(default=None, init=False)
    """Called with the outcome of a tool that returned, to record it together with others."""
    _issue: Call[Any] | None = field(default=None, init=False)
    """The operation that may have issued an attempt."""
    _invocation: Invoke | None = field(default=None, init=False)
    _is_handed_over: bool = field(default=False, init=False)
    """Whether someone else records the outcome, and then drops the lease."""
    needs_row: bool = field(default=False, init=False)
    """Whether the attempt that is run belongs to another call, so that this one needs a row."""

    @property
    def is_called(self) -> bool:
        """Whether the tool was called. If not, this makes sure that it never will be."""
        return self._invocation is not None and not self._invocation.withdraw()

    def require_colour(self) -> None:
        """Raise if a tool of a sync store has coroutine functions."""
        require_colour(self.ledger.runtime, self.request.tool.function, self.request.tool.verify)

    def run(self) -> Flow[Result[Any]]:
        """Return the stored result, wait for the call's owner, or run the tool."""
        self.require_colour()
        if self.request.tool.effect == "read":
            return (yield from self._read())
        try:
            taken = yield from self.take()
            if isinstance(taken, Result):
                return taken
            result = yield from self.execute(taken[0], self.keep(*taken))
            if self.needs_row:
                yield from self.keep_answer()
            return result
        except INTERRUPTS:
            yield from self.withdraw()
            raise

    def withdraw(self) -> Flow[None]:
        """Close the attempt of a caller that was interrupted before it called the tool."""
        if self._issue is not None and not self.is_called:
            given = (self.request.place, self.request.guard, self._issue.ids)
            with contextlib.suppress(HoldfastError):
                yield from perform_to_the_end(Ledger.withdraw, self.ledger, *given)

    def take(self) -> Flow[Result[Any] | tuple[Ticket, float]]:
        """Return the result if there is one, or a ticket to run the tool and when it was asked for.

        Waits while another owner runs it. Raises InProgress after `wait_seconds`, or ApprovalUsed.
        """
        deadline = uptime_seconds() + self.wait_seconds
        watched, pause = "", POLL_SECONDS
        while True:
            # Counted before the read, so that a signal sent after it cannot be missed.
            seen = self.ledger.signals.count(watched)
            asked_at = uptime_seconds()
            self._issue = Call(Ledger.take, self.ledger, (self.request,))
            match (yield Perform(self._issue)):
                case Owned(ticket):
                    return ticket, asked_at
                case Known(effect):
                    return known_result(effect)
                case Unapproved():
                    raise ApprovalUsed
                case InDoubt() as doubt:
                    settled = yield from self._settle(doubt, asked_at)
                    if settled is not None:
                        return settled
                case Busy(effect, wait_ms):
                    turn = Recorder.of(self.ledger.runtime).turns.pop(effect.id, None)
                    if turn is not None:
                        # A tool of that turn may make this call: it must not wait for its own end.
                        yield from turn.make_way(effect.id)
                        continue
                    if watched != topic(effect.id):
                        watched = topic(effect.id)
                        continue
                    left = deadline - uptime_seconds()
                    if left <= 0:
                        raise self._in_progress(effect)
                    # Also polled: an owner that exits may not get to send its signal.
                    yield from wait(min(left, pause, wait_ms / 1000 + 0.001), watched, seen)
                    pause = min(pause * 2, POLL_SECONDS_MAX)

    def _read(self) -> Flow[Result[Any]]:
        """Run a tool without effects, unless a completed read answers the call."""
        ledger, request = self.ledger, self.request
        if request.policy != "none":
            earlier = yield from self._known()
            if earlier is not None:
                return known_result(earlier)
        is_once = request.policy == "once"
        given = {"request": request.arguments} if is_once else self.arguments
        for name, value in given.items():
            check(value, ledger.codec.limits, name=name)
        try:
            value = yield self._invoke("")
        except Exception as error:
            failed = EffectOutcome("failed", "raised", error=described(error))
            yield from perform(Ledger.take, ledger, request, failed)
            raise
        outcome = ledger.statements.storable(value)
        if outcome.error is not None:
            outcome = EffectOutcome("failed", "not_storable", error=outcome.error)
        taken = yield from perform(Ledger.take, ledger, request, outcome)
        if isinstance(taken, Known):
            return known_result(taken.effect)
        if outcome.error is not None:
            raise _not_storable(self.request.tool, outcome.error)
        assert not isinstance(taken, Unapproved)
        return Result(value, taken.ticket.id if isinstance(taken, Owned) else taken.effect.id)

    def _known(self) -> Flow[Effect | None]:
        """Return the completed effect that answers the call, which has a row of its own then."""
        found = yield from perform(Ledger.find_completed, self.ledger, self.request)
        if found is None:
            return None
        earlier, needs_row = found
        if needs_row:
            same = EffectOutcome("completed", None, earlier.result)
            taken = yield from perform(Ledger.take, self.ledger, self.request, same)
            earlier = taken.effect if isinstance(taken, Known) else earlier
        return earlier

    def keep_answer(self) -> Flow[None]:
        """Give the call a row of its own; the attempt that was completed is another call's."""
        with contextlib.suppress(HoldfastError):
            yield from self._known()

    def keeping_answer(self) -> Op[None]:
        """Do the same within the current transaction."""
        with contextlib.suppress(HoldfastError):
            found = yield from Ledger.find_completed(self.ledger, self.request)
            if found is not None and found[1]:
                same = EffectOutcome("completed", None, found[0].result)
                yield from Ledger.take(self.ledger, self.request, same)

    def execute(self, ticket: Ticket, kept: Kept) -> Flow[Result[Any]]:
        """Run the tool while its lease is renewed, and record the outcome."""
        try:
            if kept.is_lost:
                yield from self.ensure_owned(kept, ticket)
            return (yield from self._run_owned(ticket, kept))
        except StillRunning as late:
            self._record_when_done(ticket, kept, late.ended)
            return (yield from self._timed_out(ticket, late))
        finally:
            # The lease lasts until the outcome is recorded, which may have to wait for the store.
            if not self._is_handed_over:
                self.ledger.keeper.drop(kept)

    def _run_owned(self, ticket: Ticket, kept: Kept) -> Flow[Result[Any]]:
        try:
            value = yield self._invoke(ticket.idempotency_key)
        except INTERRUPTS as interrupt:
            yield from self._interrupted(ticket, kept, interrupt)
            if isinstance(interrupt, CancelledAfterwards):
                raise asyncio.CancelledError from interrupt
            raise
        except (StillRunning, GeneratorExit):
            raise  # A tool's own GeneratorExit is a RuntimeError here.
        except BaseException as error:
            return (yield from self._raised(ticket, error))
        outcome = self.ledger.statements.storable(value)
        if self.gather is not None and outcome.error is None:
            self._is_handed_over = True
            self.gather(ticket, outcome, kept)
            return Result(value, ticket.id)
        yield from finish(self.ledger, ticket, outcome)
        if outcome.error is not None:
            raise _not_storable(self.request.tool, outcome.error)
        return Result(value, ticket.id)

    def _interrupted(self, ticket: Ticket, kept: Kept, interrupt: BaseException) -> Flow[None]:
        """Record what is known about a tool whose caller was interrupted."""
        if not self.is_called:
            return  # `withdraw` closes the attempt.
        assert self._invocation is not None
        ended = self._invocation.ended
        if ended is None:
            yield from finish(self.ledger, ticket, self._outcome_of(interrupt))
        elif ended.latch.is_set:
            yield from finish(self.ledger, ticket, self._outcome_of_future(ended))
        else:
            # Interrupted a second time while it waited for the tool's thread, which still runs.
            self._record_when_done(ticket, kept, ended)

    def _record_when_done(self, ticket: Ticket, kept: Kept, ended: Future[Any]) -> None:
        """Let the tool's own thread record the outcome when the tool returns."""
        self._is_handed_over = True
        ended.add_done_callback(lambda ended: self._record_late_outcome(ticket, kept, ended))

    def keep(self, ticket: Ticket, asked_at: float) -> Kept:
        """Keep renewing the lease on an effect until it is dropped, or this call is collected."""
        guard = Guard("effect", ticket.id, ticket.number, ticket.fence)
        return self.ledger.keeper.keep(
            Kept(self, guard, self.request.tool.lease_ms / 1000, asked_at)
        )

    def ensure_owned(self, kept: Kept, ticket: Ticket) -> Flow[None]:
        """Renew a lease that may have expired while the machine slept, or raise LeaseLost."""
        is_owned = False
        try:
            for _ in range(RENEWALS_MAX):
                asked_at = uptime_seconds()
                asked = [(kept.guard, kept.lease_seconds)]
                [renewed] = yield from perform(Keeper.renew, self.ledger.keeper, asked)
                kept.note_renewal(renewed, asked_at)
                if renewed is None:
                    break
                is_owned = not kept.is_lost
                if is_owned:
                    return
        finally:
            if not is_owned:
                self.ledger.keeper.drop(kept)
        raise ticket.lost()

    def _invoke(self, idempotency_key: str) -> Invoke:
        tool, given = self.request.tool, self.arguments
        given = {**given, KEY: idempotency_key} if tool.takes_key else given
        self._invocation = Invoke(tool.function, (), given, tool.timeout_seconds)
        return self._invocation

    def _raised(self, ticket: Ticket, error: BaseException) -> Flow[Result[Any]]:
        """Record that a tool raised; verify it first if it may have acted."""
        outcome = self._outcome_of(error)
        if outcome.status == "unknown" and isinstance(error, Exception):
            verdict = yield from self._verify_or_record(ticket, outcome, self._verify_later(ticket))
            outcome = self._settled(verdict, reason=outcome.reason, error=outcome.error)
            if isinstance(verdict, Landed):
                return (yield from self._landed(ticket, outcome))
        yield from finish(self.ledger, ticket, outcome)
        if outcome.status == "failed" or not isinstance(error, Exception):
            raise error
        raise self._unresolved(ticket, outcome) from error

    def _outcome_of(self, error: BaseException) -> EffectOutcome:
        """Return the outcome of a call whose tool raised an error."""
        is_certain = isinstance(error, NotDone) or (
            self.request.tool.atomic and isinstance(error, Exception)
        )
        if is_certain or self.request.tool.effect != "mutate":
            return EffectOutcome("failed", "raised", error=described(error))
        reason = "raised"
        if isinstance(error, INTERRUPTS):
            reason = "cancelled"
        elif isinstance(error, TimeoutError):
            reason = "timed_out"
        return EffectOutcome("unknown", reason, error=described(error))

    def _timed_out(self, ticket: Ticket, late: StillRunning) -> Flow[Result[Any]]:
        """Raise InProgress for a call whose thread still runs, unless it is verified as landed."""
        if self.request.tool.effect == "mutate":
            verdict = yield from self._verify_later(ticket)
            if isinstance(verdict, Landed):
                return (yield from self._landed(ticket, self._settled(verdict)))
        raise InProgress(
            f"{late}; it cannot be interrupted, so it is not run again while it runs, and its "
            "outcome is recorded when it returns",
            effect_id=ticket.id,
        ) from late

    def _outcome_of_future(self, ended: Future[Any]) -> EffectOutcome:
        """Return the outcome of a function that its caller stopped waiting for."""
        error = ended.exception()
        if error is not None:
            return self._outcome_of(error)
        return self.ledger.statements.storable(ended.result())

    def _record_late_outcome(self, ticket: Ticket, kept: Kept, ended: Future[Any]) -> None:
        """Record the outcome of a function that timed out, from its own thread."""
        given = (ticket, self._outcome_of_future(ended))
        try:
            if not self.ledger.runtime.run(Call(Ledger.finish, self.ledger, given)):
                self.ledger.runtime.run(Call(Ledger.keep_late, self.ledger, given))
        except HoldfastError as problem:
            # The store may be closed by now; the next caller finds the effect without an owner.
            log.warning("the outcome of effect %s could not be recorded: %s", ticket.id, problem)
        finally:
            self.ledger.keeper.drop(kept)

    def _settle(
        self, in_doubt: InDoubt, asked_at: float
    ) -> Flow[Result[Any] | tuple[Ticket, float] | None]:
        """Verify a dead owner's effect; return its result, or a ticket to run it again.

        None if the caller has to look it up once more.
        """
        ticket, effect, self.needs_row = in_doubt.ticket, in_doubt.effect, in_doubt.needs_row
        kept = self.keep(ticket, asked_at)
        try:
            doubt = EffectOutcome("unknown", effect.reason or "owner_died", error=effect.error)
            verdict = yield from self._verify_or_record(ticket, doubt, self._verify(ticket))
            outcome = self._settled(verdict, of=effect)
            if outcome.reason in {"not_landed", "abandoned"}:
                again_at = uptime_seconds()
                self._issue = Call(Ledger.run_again, self.ledger, (ticket, self.request, outcome))
                again: Ticket | None = yield Perform(self._issue)
                return None if again is None else (again, again_at)
            yield from finish(self.ledger, ticket, outcome)
        finally:
            self.ledger.keeper.drop(kept)
        if in_doubt.needs_row and outcome.status != "unknown":
            # The next lookup gives this call a row of its own.
            return None
        if isinstance(verdict, Landed):
            return self._verified(ticket, outcome, replay_of=ticket.id)
        if outcome.status == "failed":
            raise failed_before(self.request.tool.name, ticket.id, outcome.error)
        raise self._unresolved(ticket, outcome)

    def _settled(self, verdict: Verdict, **known: Any) -> EffectOutcome:
        return settle(self.ledger.statements, self.request.tool, verdict, **known)

    def _landed(self, ticket: Ticket, outcome: EffectOutcome) -> Flow[Result[Any]]:
        """Record that this call happened, and return its result."""
        yield from finish(self.ledger, ticket, outcome)
        return self._verified(ticket, outcome)

    def _verified(
        self, ticket: Ticket, outcome: EffectOutcome, replay_of: str | None = None
    ) -> Result[Any]:
        if outcome.error is not None:
            raise _not_storable(self.request.tool, outcome.error, "verify")
        return Result(outcome.result, ticket.id, replay_of)

    def _verify_or_record(
        self, ticket: Ticket, doubt: EffectOutcome, verifying: Flow[Verdict]
    ) -> Flow[Verdict]:
        """Return the verdict; if its hook is interrupted or exits, record the doubt first."""
        try:
            return (yield from verifying)
        except GeneratorExit:
            raise
        except BaseException:
            yield from finish(self.ledger, ticket, doubt)
            raise

    def _verify_later(self, ticket: Ticket) -> Flow[Verdict]:
        """Verify this process's own call, once its request can no longer be in flight."""
        if self.request.tool.verify is None:
            return Unknown()
        yield from wait(self.request.tool.settle_seconds)
        return (yield from self._verify(ticket))

    def _verify(self, ticket: Ticket) -> Flow[Verdict]:
        assert self.request.tool.verify is not None
        return (
            yield from verify(
                self.request.tool.verify, dict(self.arguments), ticket.idempotency_key
            )
        )

    def _unresolved(self, ticket: Ticket, outcome: EffectOutcome) -> Exception:
        error = self.ledger.statements.redactor.redact(outcome.error)
        return unresolved(self.request.tool.name, ticket.id, error)

    def _in_progress(self, effect: Effect) -> InProgress:
        hint = ""
        if effect.holder == self.request.holder:
            hint = (
                ". It was issued by this process: a tool must not wait for the call that it "
                "serves, nor through another store for a later call of the same turn"
            )
        return InProgress(
            f"{effect.tool} is run by {effect.holder!r} (effect {effect.id}) and did not return "
            f"within {self.wait_seconds:g} s; nothing was run here{hint}",
            effect_id=effect.id,
            holder=effect.holder,
            takeover_at=effect.takeover_at,
        )


def prepare(
    ledger: Ledger,
    tool: Tool[..., Any],
    arguments: Mapping[str, Any],
    /,
    *,
    place: Place | None = None,
    guard: Guard | None = None,
    holder: str | None = None,
    call_id: str | None = None,
    item: object = None,
    wait_seconds: float | None = None,
    **rules: Any,
) -> PreparedCall:
    """Check a call before anything is written; `rules` override fields of its request."""
    if call_id is not None:
        require_text("call_id", call_id)
    require_duration("wait_seconds", wait_seconds)
    given = tool.bind(arguments)
    if ledger.runtime.driver.is_joined:
        raise InvalidArgument(
            "inside a caller's own transaction nothing is durable yet, so no effect can be run; "
            "call the tool through the store itself"
        )
    ledger.tools[tool.name] = tool
    policy, distinct = policy_of(tool, given, call_id)
    ttl_ms = None if tool.ttl_seconds is None else round(tool.ttl_seconds * 1000)
    asked = {"arguments": given, "policy": policy, "distinct": distinct, "ttl_ms": ttl_ms, **rules}
    request = EffectRequest(
        tool=tool,
        holder=holder or ledger.holder,
        place=place,
        guard=guard if place is None else place.guard,
        call_id=call_id,
        item_id=id_of_item(item),
        **asked,
    )
    seconds = tool.wait_seconds if wait_seconds is None else wait_seconds
    return PreparedCall(ledger=ledger, request=request, arguments=given, wait_seconds=seconds)


def _not_storable(tool: Tool[..., Any], problem: str, source: str = "the tool") -> InvalidValue:
    return InvalidValue(
        f"{tool.name} ran, and that is recorded, but its result cannot be stored: "
        f"{problem.removesuffix('.')}; return plain data from {source}",
        path="result",
    )

"""Calling tools through the ledger: intent, run, outcome; and what to do when one is in doubt."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import Any, Generic, TypeVar

from ..arguments import require_text
from ..checkpoints.write import id_of_item
from ..codec import check
from ..errors import (
    CommitUnknown,
    EffectFailed,
    HoldfastError,
    InProgress,
    InvalidArgument,
    InvalidValue,
    NotDone,
    StoreBusy,
    StoreFull,
    StoreUnavailable,
)
from ..kernel.commit_settlement import MarkOps, parse_commit_id
from ..kernel.flow import (
    CancelledAfterwards,
    Flow,
    Invoke,
    Perform,
    StillRunning,
    is_async,
    needs_async_store,
    perform,
    perform_to_the_end,
    wait,
)
from ..kernel.operation import Call
from ..leases import Guard, Keeper, Kept, uptime_seconds
from ..records import Effect
from ..sessions.access import Place
from .doubt import ask_verdict, describe, doubt_of, landed, unknown_outcome, unresolved
from .ledger import Ledger, log
from .rows import Busy, InDoubt, Known, Outcome, Request, Run, Ticket, topic, unless_spent
from .tools import KEY, Landed, NotLanded, Tool, Unknown, Verdict, require_span

V = TypeVar("V")
FINISH_PAUSES_SECONDS = (0.1, 1.0, 5.0)
RENEWALS_MAX = 10
POLL_SECONDS = 0.1
POLL_SECONDS_MAX = 2.0
INTERRUPTS = (asyncio.CancelledError, KeyboardInterrupt, SystemExit)


@dataclass(frozen=True, slots=True)
class Result(Generic[V]):
    """What a tool returned, now or before.

    `replay_of` is the effect whose stored result this is; None when the tool has just run.
    """

    value: V
    effect_id: str
    replay_of: str | None = None

    @property
    def replayed(self) -> bool:
        """Whether the tool was not run for this call."""
        return self.replay_of is not None


@dataclass(slots=True, kw_only=True, weakref_slot=True)
class Calling:
    """One call on its way: which tool, with what, and for which session."""

    ledger: Ledger
    place: Place | None
    tool: Tool[..., Any]
    arguments: dict[str, Any]
    request: Request
    wait_seconds: float
    _issue: Call[Any] | None = field(default=None, init=False)
    """What may have issued an attempt."""
    _step: Invoke | None = field(default=None, init=False)
    """The call of the tool."""
    gather: Callable[[Ticket, Outcome, Kept], None] | None = field(default=None, init=False)
    """Takes the outcome of a tool that has returned, to record it with others."""
    _is_kept_on: bool = field(default=False, init=False)
    """Whether somebody else records the outcome, and drops the lease then."""

    @property
    def is_called(self) -> bool:
        """Whether the tool was called; if it was not, it will not be."""
        return self._step is not None and not self._step.withdraw()

    def asking(self, **changes: Any) -> Calling:
        """Return the same call with another request."""
        return replace(self, request=replace(self.request, **changes))

    def run(self) -> Flow[Result[Any]]:
        """Return the effect's result: run it if nobody has, wait if somebody does."""
        for function in (self.tool.function, self.tool.verify):
            if function is not None and is_async(function) and not self.ledger.runtime.is_async:
                raise needs_async_store(function)
        if self.tool.effect == "read":
            return (yield from self._read())
        return (yield from self.unless_interrupted(self._take_and_execute()))

    def unless_interrupted(self, steps: Flow[V]) -> Flow[V]:
        """Do what may issue an attempt; who is interrupted before its tool is called closes it."""
        try:
            return (yield from steps)
        except INTERRUPTS:
            if self._issue is not None and not self.is_called:
                with contextlib.suppress(HoldfastError):
                    given = (self.place, self.request.guard, self._issue.ids)
                    yield from perform_to_the_end(Ledger.let_go, self.ledger, *given)
            raise

    def _take_and_execute(self) -> Flow[Result[Any]]:
        taken = yield from self.take()
        if isinstance(taken, Result):
            return taken
        return (yield from self.execute(taken[0], self.keep(*taken)))

    def take(self) -> Flow[Result[Any] | tuple[Ticket, float]]:
        """Return the result that there is, or the right to run and when it was asked for."""
        deadline = uptime_seconds() + self.wait_seconds
        watched, pause = "", POLL_SECONDS
        while True:
            # Counted before each look, no ring that comes after the look can be missed.
            seen = self.ledger.signals.count(watched)
            asked_at = uptime_seconds()
            taking = Call(Ledger.take, self.ledger, (self.place, self.request))
            taken = yield from self._issuing(taking)
            match taken:
                case Run(ticket):
                    return ticket, asked_at
                case Known(effect):
                    return known_result(effect)
                case InDoubt(ticket, effect):
                    settled = yield from self._settle(ticket, effect, asked_at)
                    if settled is not None:
                        return settled
                case Busy(effect, wait_ms):
                    if watched != topic(effect.id):
                        watched = topic(effect.id)
                        continue
                    left = deadline - uptime_seconds()
                    if left <= 0:
                        raise self._in_progress(effect)
                    # Also polled: an owner that exits at once may leave its ring unsent.
                    yield from wait(min(left, pause, wait_ms / 1000 + 0.001), watched, seen)
                    pause = min(pause * 2, POLL_SECONDS_MAX)

    def _issuing(self, call: Call[V]) -> Flow[V]:
        self._issue = call
        result: V = yield Perform(call)
        return result

    def _read(self) -> Flow[Result[Any]]:
        """Run a tool without effects; a completed read of the same call id is returned."""
        asked = (self.ledger, self.place, self.request)
        if self.request.policy != "none":
            found = yield from perform(Ledger.find_read, *asked)
            if found is not None:
                earlier, is_own = found
                if not is_own:
                    # It answers another call, which gets a row that says so.
                    same = Outcome("completed", None, earlier.result)
                    _, logged = yield from perform(Ledger.log, *asked, same)
                    earlier = logged or earlier
                return known_result(earlier)
        given = self.arguments
        if self.request.policy == "once":
            given = {"request": self.request.arguments}
        for name, value in given.items():
            check(value, self.ledger.codec.limits, name=name)
        try:
            value = yield from self._invoke("")
        except Exception as error:
            failed = Outcome("failed", "raised", error=describe(error))
            yield from perform(Ledger.log, *asked, failed)
            raise
        outcome = self.ledger.storable(value)
        if outcome.error is not None:
            outcome = Outcome("failed", "not_storable", error=outcome.error)
        id, counted = yield from perform(Ledger.log, *asked, outcome)
        if counted is not None:
            return known_result(counted)
        if outcome.error is not None:
            raise _not_storable(self.tool, outcome.error)
        return Result(value, id)

    def execute(self, ticket: Ticket, kept: Kept) -> Flow[Result[Any]]:
        """Run the tool under a lease that is kept alive, and record what became of it."""
        try:
            yield from self.make_sure(kept, ticket)
            return (yield from self._run_owned(ticket, kept))
        except StillRunning as late:
            self._watch(ticket, kept, late.ended)
            return (yield from self._timed_out(ticket, late))
        finally:
            # It is owned until its outcome is recorded, which may have to wait for the store.
            if not self._is_kept_on:
                self.ledger.keeper.drop(kept)

    def _run_owned(self, ticket: Ticket, kept: Kept) -> Flow[Result[Any]]:
        try:
            value = yield from self._invoke(ticket.idempotency_key)
        except INTERRUPTS as interrupt:
            yield from self._interrupted(ticket, kept, interrupt)
            if isinstance(interrupt, CancelledAfterwards):
                raise asyncio.CancelledError from interrupt
            raise
        except (StillRunning, GeneratorExit):
            raise
        except BaseException as error:
            return (yield from self._raised(ticket, error))
        outcome = self.ledger.storable(value)
        if self.gather is not None and outcome.error is None:
            self._is_kept_on = True
            self.gather(ticket, outcome, kept)
            return Result(value, ticket.id)
        yield from self._finish(ticket, outcome)
        if outcome.error is not None:
            raise _not_storable(self.tool, outcome.error)
        return Result(value, ticket.id)

    def _interrupted(self, ticket: Ticket, kept: Kept, interrupt: BaseException) -> Flow[None]:
        """Record what is known of a tool whose caller was interrupted."""
        if not self.is_called:
            return  # It was not called, and is closed as such.
        assert self._step is not None
        ended = self._step.ended
        if ended is None:
            yield from self._finish(ticket, self._outcome_of(interrupt))
        elif ended.flag.is_set:
            yield from self._finish(ticket, self._outcome_at(ended))
        else:
            # Its caller was interrupted again and waits no longer; the thread goes on.
            self._watch(ticket, kept, ended)

    def _watch(self, ticket: Ticket, kept: Kept, ended: Future[Any]) -> None:
        """Leave an effect to the thread of its tool, which records the outcome when it ends."""
        self._is_kept_on = True
        ended.add_done_callback(lambda ended: self._record_late_end(ticket, kept, ended))

    def keep(self, ticket: Ticket, asked_at: float) -> Kept:
        """Keep the ownership of an effect alive until it is dropped, or this call is gone."""
        guard = Guard("effect", ticket.id, ticket.number, ticket.fence)
        return self.ledger.keeper.keep(Kept(self, guard, self.request.lease_ms / 1000, asked_at))

    def make_sure(self, kept: Kept, ticket: Ticket) -> Flow[None]:
        """Look whether the effect is still owned, if its owner slept since it asked for it."""
        is_owned = not kept.is_lost
        try:
            for _ in range(RENEWALS_MAX):
                if is_owned:
                    return
                asked_at = uptime_seconds()
                renewed = yield from perform(Keeper.renew, self.ledger.keeper, [kept])
                kept.take_in(renewed[kept], asked_at)
                if renewed[kept] is None:
                    break
                is_owned = not kept.is_lost
        finally:
            if not is_owned:
                self.ledger.keeper.drop(kept)
        raise ticket.lost()

    def _invoke(self, idempotency_key: str) -> Flow[Any]:
        given = {**self.arguments, KEY: idempotency_key} if self.tool.takes_key else self.arguments
        self._step = Invoke(self.tool.function, (), given, self.tool.timeout_seconds)
        return (yield self._step)

    def _finish(self, ticket: Ticket, outcome: Outcome) -> Flow[None]:
        return finish(self.ledger, ticket, outcome)

    def _raised(self, ticket: Ticket, error: BaseException) -> Flow[Result[Any]]:
        """Record that a tool raised; of one that may have acted, find out whether it did."""
        outcome = self._outcome_of(error)
        if outcome.status == "failed" or not isinstance(error, Exception):
            yield from self._finish(ticket, outcome)
            raise error
        return (yield from self._doubted(ticket, outcome, error))

    def _outcome_of(self, error: BaseException) -> Outcome:
        """Return what an error that came out of the tool says about the effect."""
        said = describe(error)
        is_certain = isinstance(error, NotDone) or (
            self.tool.atomic and isinstance(error, Exception)
        )
        if is_certain or self.tool.effect != "mutate":
            return Outcome("failed", "raised", error=said)
        reason = "raised"
        if isinstance(error, INTERRUPTS):
            reason = "cancelled"
        elif isinstance(error, TimeoutError):
            reason = "timed_out"
        return Outcome("unknown", reason, error=said)

    def _doubted(self, ticket: Ticket, outcome: Outcome, error: BaseException) -> Flow[Result[Any]]:
        """Settle a call that raised and may have acted: verified, or by the tool's own rule."""
        verdict: Verdict = Unknown()
        if self.tool.verify is not None:
            yield from wait(self.tool.settle_seconds)
            verdict = yield from self._verdict(ticket)
        match verdict:
            case Landed(result):
                yield from self._finish(ticket, landed(self.ledger, result))
                return Result(result, ticket.id)
            case NotLanded():
                outcome = Outcome("failed", "not_landed", error=outcome.error)
            case Unknown(why):
                said = "; ".join(filter(None, (outcome.error, why)))
                outcome = unknown_outcome(self.tool.on_unknown, outcome.reason, said)
        yield from self._finish(ticket, outcome)
        if outcome.status == "failed":
            raise error
        said = self.ledger.redactor.redact(outcome.error)
        raise unresolved(self.tool.name, ticket.id, said) from error

    def _timed_out(self, ticket: Ticket, late: StillRunning) -> Flow[Result[Any]]:
        """Say what is known of a call whose thread goes on; it stays owned until that ends."""
        if self.tool.verify is not None and self.tool.effect == "mutate":
            yield from wait(self.tool.settle_seconds)
            verdict = yield from self._verdict(ticket)
            if isinstance(verdict, Landed):
                yield from self._finish(ticket, landed(self.ledger, verdict.result))
                return Result(verdict.result, ticket.id)
        raise InProgress(
            f"{late}; it cannot be stopped, so it is not run again while it lives, and its "
            "outcome is recorded when it ends",
            effect_id=ticket.id,
        ) from late

    def _outcome_at(self, ended: Future[Any]) -> Outcome:
        """Return the outcome of a function that its caller did not wait for."""
        error = ended.exception()
        return self.ledger.storable(ended.result()) if error is None else self._outcome_of(error)

    def _record_late_end(self, ticket: Ticket, kept: Kept, ended: Future[Any]) -> None:
        """Record, from its own thread, the outcome of a function that had timed out."""
        outcome = self._outcome_at(ended)
        try:
            if not self.ledger.runtime.run(Call(Ledger.finish, self.ledger, (ticket, outcome))):
                self.ledger.runtime.run(Call(Ledger.keep_late, self.ledger, (ticket, outcome)))
        except HoldfastError as problem:
            # The store may be closed by now; the next caller finds the effect without an owner.
            log.warning("effect %s ended, which could not be recorded: %s", ticket.id, problem)
        finally:
            self.ledger.keeper.drop(kept)

    def _settle(
        self, ticket: Ticket, effect: Effect, asked_at: float
    ) -> Flow[Result[Any] | tuple[Ticket, float] | None]:
        """Verify what a dead owner left; return the result, or the right to run it."""
        kept = self.keep(ticket, asked_at)
        try:
            verdict = yield from self._verdict(ticket)
            if isinstance(verdict, Landed):
                yield from self._finish(ticket, landed(self.ledger, verdict.result))
                if self.request.call_id not in {None, effect.call_id}:
                    # Looked for once more, this call gets a row of its own.
                    return None
                return Result(verdict.result, ticket.id, ticket.id)
            closed = Outcome("failed", "not_landed")
            if isinstance(verdict, Unknown):
                closed = unknown_outcome(self.tool.on_unknown, effect.reason, verdict.why)
            most = self.tool.max_attempts
            closed = unless_spent(closed, effect.attempt, most, effect.reason)
            if closed.reason in {"not_landed", "abandoned"}:
                again_at = uptime_seconds()
                running = Call(Ledger.run_again, self.ledger, (ticket, self.request, closed))
                again = yield from self._issuing(running)
                return None if again is None else (again, again_at)
            yield from self._finish(ticket, closed)
        finally:
            self.ledger.keeper.drop(kept)
        if closed.status == "failed":
            raise _failed(self.tool.name, ticket.id, closed.error)
        raise unresolved(self.tool.name, ticket.id, self.ledger.redactor.redact(closed.error))

    def _verdict(self, ticket: Ticket) -> Flow[Verdict]:
        assert self.tool.verify is not None
        arguments = dict(self.arguments)
        return (yield from ask_verdict(self.tool.verify, arguments, ticket.idempotency_key))

    def _in_progress(self, effect: Effect) -> InProgress:
        return InProgress(
            f"{effect.tool} is being run by {effect.holder!r} (effect {effect.id}) and did not end "
            f"within {self.wait_seconds:g} s; nothing was run here",
            effect_id=effect.id,
            holder=effect.holder,
            takeover_at=effect.takeover_at,
        )


def prepare(
    ledger: Ledger,
    place: Place | None,
    tool: Tool[..., Any],
    arguments: Mapping[str, Any],
    *,
    call_id: str | None,
    item: object,
    wait_seconds: float | None,
    chain_id: str | None = None,
    holder: str | None = None,
    guard: Guard | None = None,
) -> Calling:
    """Check a call before anything is written, and say what makes it the same as another."""
    if call_id is not None:
        require_text("call_id", call_id)
    require_span("wait_seconds", wait_seconds)
    given = tool.bind(arguments)
    if ledger.runtime.driver.is_joined:
        raise InvalidArgument(
            "inside another's transaction nothing is durable yet, so no effect can be run; call "
            "the tool on the store itself"
        )
    ledger.tools[tool.name] = tool
    policy, distinct = _policy(tool, given, call_id)
    request = Request(
        tool=tool.name,
        effect=tool.effect,
        arguments=given,
        policy=policy,
        distinct=distinct,
        doubt=doubt_of(tool),
        call_id=call_id,
        item_id=id_of_item(item),
        chain_id=chain_id,
        is_irreversible=tool.is_irreversible,
        cache_failures=tool.cache_failures,
        holder=holder or ledger.holder,
        lease_ms=tool.lease_ms,
        timeout_ms=round((tool.timeout_seconds or 0) * 1000),
        settle_ms=round(tool.settle_seconds * 1000),
        max_attempts=tool.max_attempts,
        ttl_ms=None if tool.ttl_seconds is None else round(tool.ttl_seconds * 1000),
        guard=guard,
    )
    return Calling(
        ledger=ledger,
        place=place,
        tool=tool,
        arguments=given,
        request=request,
        wait_seconds=tool.wait_seconds if wait_seconds is None else wait_seconds,
    )


def finish(ledger: Ledger, ticket: Ticket, outcome: Outcome) -> Flow[None]:
    """Record an outcome; of one that comes too late, keep it beside the effect and raise.

    It is all that is known of what was done, so a store that is busy or away is waited for.
    """
    unknown: CommitUnknown | None = None
    for pause in (*FINISH_PAUSES_SECONDS, None):
        try:
            if unknown is not None and (yield from _is_committed(unknown)):
                ledger.signals.ring(topic(ticket.id))
                return
            if (yield from perform(Ledger.finish, ledger, ticket, outcome)):
                return
            break
        except INTERRUPTS:
            # Nobody else knows it. If it was written after all, that changes nothing.
            with contextlib.suppress(HoldfastError):
                yield from perform_to_the_end(Ledger.finish, ledger, ticket, outcome)
            raise
        except (StoreBusy, StoreUnavailable, StoreFull, CommitUnknown) as error:
            if pause is None:
                raise
            if isinstance(error, CommitUnknown):
                unknown = error
            yield from wait(pause)
    yield from perform(Ledger.keep_late, ledger, ticket, outcome)
    raise ticket.lost()


def known_result(effect: Effect) -> Result[Any]:
    """Return the result of a settled effect, or raise what there is instead."""
    match effect.status:
        case "completed" if effect.reason == "not_storable":
            raise _failed(effect.tool, effect.id, f"it happened, but {effect.error}")
        case "completed":
            return Result(effect.result, effect.id, effect.replay_of or effect.id)
        case "failed":
            raise _failed(effect.tool, effect.id, effect.error)
    raise unresolved(effect.tool, effect.id, effect.error)


def _is_committed(unknown: CommitUnknown) -> Flow[bool]:
    writer_id, batch = parse_commit_id(unknown.id)
    return (yield from perform(MarkOps.is_committed, MarkOps(), writer_id, batch))


def _policy(
    tool: Tool[..., Any], arguments: dict[str, Any], call_id: str | None
) -> tuple[str, Any]:
    if callable(tool.dedupe):
        return "session", ["chosen", tool.dedupe(dict(arguments))]
    if tool.dedupe == "call" and call_id is None:
        if tool.effect == "read":
            return "none", secrets.token_hex(16)
        raise InvalidArgument(f'{tool.name} has dedupe="call", so each call needs a call_id')
    if tool.dedupe == "call":
        return "call", ["call", call_id]
    return tool.dedupe, arguments


def _failed(tool: str, id: str, error: str | None) -> EffectFailed:
    return EffectFailed(
        f"{tool} failed before (effect {id}): {error or 'no reason was recorded'}", effect_id=id
    )


def _not_storable(tool: Tool[..., Any], problem: str) -> InvalidValue:
    return InvalidValue(
        f"{tool.name} ran, and that is recorded, but its result cannot be stored: {problem}; let "
        "the tool return plain data",
        path="result",
    )

"""Effects whose tools the caller runs itself: begin, then complete or fail."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any

from ..dataclass import dataclass
from ..errors import InvalidArgument
from ..kernel.flow import Flow, flow
from ..kernel.operation import AfterCommit, C, Handle, Op, Runtime
from ..leases import Kept
from ..records import EffectStatus
from ..wire import travels
from .calls import INTERRUPTS, PreparedCall, Result, finish
from .ledger import Ledger
from .statements import EffectOutcome, Ticket
from .verification import describe


@dataclass(frozen=True, slots=True)
class Replay:
    """The stored result of an effect that was run before."""

    result: Result[Any]


@travels
class Issued(Handle[C]):
    """An effect that the caller has to run, and then to complete or fail. Its intent is durable."""

    def __init__(self, runtime: Runtime, ticket: Ticket, kept: Kept | None) -> None:
        super().__init__(runtime)
        self.ticket = ticket
        self._drop: Callable[[], None] = lambda: None
        if kept is not None:
            # If this handle is collected, the lease must expire, which leaves the effect in doubt.
            kept.owner = weakref.ref(self)
            self._drop = functools.partial(Ledger.of(runtime).keeper.drop, kept)

    def _to_wire(self) -> tuple[Ticket]:
        """Return the right to record the outcome."""
        return (self.ticket,)

    @classmethod
    def _from_wire(cls, runtime: Runtime, ticket: Ticket) -> Issued[Any]:
        """Return it with that right; its lease is kept by the client."""
        return cls(runtime, ticket, None)

    @property
    def effect_id(self) -> str:
        """The id of the effect."""
        return self.ticket.id

    @property
    def idempotency_key(self) -> str:
        """The key to pass to the receiver; the same when the attempt is retried."""
        return self.ticket.idempotency_key

    @flow
    def complete(self, value: Any = None) -> Flow[Result[Any]]:
        """Record that it happened, with its result. Raises LeaseLost after a takeover."""
        yield from self._finish(self._completed(value))
        return Result(value, self.ticket.id)

    def completing(self, value: Any = None) -> Op[Result[Any]]:
        """Record it within the current transaction: `yield from issued.completing(value)`."""
        ended = [(self.ticket, self._completed(value))]
        if not all((yield from Ledger.of(self.runtime).finishing(ended))):
            raise self.ticket.lost()
        yield AfterCommit(self._drop)
        return Result(value, self.ticket.id)

    @flow
    def fail(self, error: BaseException | str, *, happened: bool | None = None) -> Flow[None]:
        """Record that it failed; `happened=False` if it certainly had no effect.

        Otherwise it is in doubt, and parked until it is resolved.
        """
        if happened is True:
            raise InvalidArgument("record an effect that happened with complete(result)")
        text = error if isinstance(error, str) else describe(error)
        status: EffectStatus = "failed" if happened is False else "unknown"
        yield from self._finish(EffectOutcome(status, "raised", error=text))

    def _completed(self, value: Any) -> EffectOutcome:
        self.runtime.codec.encode(value, name="result")
        return EffectOutcome("completed", None, value)

    def _finish(self, outcome: EffectOutcome) -> Flow[None]:
        yield from finish(Ledger.of(self.runtime), self.ticket, outcome)
        self._drop()


def begin(call: PreparedCall, handle: Handle[C]) -> Flow[Replay | Issued[C]]:
    """Return the stored outcome of a call, or the right to run it."""
    try:
        taken = yield from call.take()
        if isinstance(taken, Result):
            return Replay(taken)
        kept = call.keep(*taken)
        if kept.is_lost:
            yield from call.ensure_owned(kept, taken[0])
        return Issued(handle.runtime, taken[0], kept)
    except INTERRUPTS:
        yield from call.withdraw()
        raise

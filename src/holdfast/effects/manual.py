"""Effects whose tools a loop runs itself: the intent is taken here, the outcome told later."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ..errors import InvalidArgument
from ..kernel.flow import Flow, flow
from ..kernel.operation import AfterCommit, C, Handle, Op, Runtime
from ..leases import Kept
from .calls import INTERRUPTS, PreparedCall, Result, finish
from .ledger import Ledger
from .statements import EffectOutcome, Ticket
from .verification import describe


@dataclass(frozen=True, slots=True)
class Replay:
    """The effect was run before; `result` is its stored result."""

    result: Result[Any]


class Issued(Handle[C]):
    """An effect that is this caller's to run: its intent is durable, its outcome is to be told."""

    def __init__(self, runtime: Runtime, ticket: Ticket, kept: Kept | None) -> None:
        super().__init__(runtime)
        self.ticket = ticket
        self._drop: Callable[[], None] = lambda: None
        if kept is not None:
            # If it is forgotten, its lease must expire: then the effect is in doubt.
            kept.owner = weakref.ref(self)
            self._drop = functools.partial(Ledger.of(runtime).keeper.drop, kept)

    @property
    def effect_id(self) -> str:
        """The id of the effect."""
        return self.ticket.id

    @property
    def idempotency_key(self) -> str:
        """The key to pass on to the receiver; the same when the attempt is repeated."""
        return self.ticket.idempotency_key

    @flow
    def complete(self, value: Any = None) -> Flow[Result[Any]]:
        """Record that it happened, with its result. Raises LeaseLost if another took it over."""
        yield from self._finish(self._completed(value))
        return Result(value, self.ticket.id)

    def completing(self, value: Any = None) -> Op[Result[Any]]:
        """Record it inside another transaction: `yield from issued.completing(value)`."""
        ended = [(self.ticket, self._completed(value))]
        if not all((yield from Ledger.of(self.runtime).finishing(ended))):
            raise self.ticket.lost()
        yield AfterCommit(self._drop)
        return Result(value, self.ticket.id)

    @flow
    def fail(self, error: BaseException | str, *, happened: bool | None = None) -> Flow[None]:
        """Record that it failed; `happened=False` if it is certain that nothing was done.

        Otherwise it is in doubt, and parked until somebody decides.
        """
        if happened is True:
            raise InvalidArgument("what happened is recorded with complete(result)")
        said = error if isinstance(error, str) else describe(error)
        is_certain = happened is False
        yield from self._finish(
            EffectOutcome("failed" if is_certain else "unknown", "raised", error=said)
        )

    def _completed(self, value: Any) -> EffectOutcome:
        self.runtime.codec.encode(value, name="result")
        return EffectOutcome("completed", None, value)

    def _finish(self, outcome: EffectOutcome) -> Flow[None]:
        yield from finish(Ledger.of(self.runtime), self.ticket, outcome)
        self._drop()


def begin(call: PreparedCall, handle: Handle[C]) -> Flow[Replay | Issued[C]]:
    """Take a call for a caller that runs it itself."""
    try:
        taken = yield from call.take()
        if isinstance(taken, Result):
            return Replay(taken)
        kept = call.keep(*taken)
        if kept.is_lost:
            yield from call.make_sure(kept, taken[0])
        return Issued(handle.runtime, taken[0], kept)
    except INTERRUPTS:
        yield from call.withdraw()
        raise

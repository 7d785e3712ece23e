"""What the holder of a work item can do; every write checks the fence of its lease."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ..effects import Issued, Ledger, Result, Tool
from ..effects.calls import PreparedCall, prepare
from ..effects.requests import ONCE_SECONDS, once_rules, once_tool
from ..effects.tools import OnUnknown, Verify, require_tool
from ..errors import InvalidArgument, LeaseLost
from ..kernel.flow import Flow, flow
from ..kernel.operation import AfterCommit, C, Lock, Op, deciding, one, operation
from ..leases import lease_milliseconds
from ..records import EffectKind
from . import claims, transitions
from .claims import Beat
from .items import (
    READ_ITEM,
    STATUS_OF,
    Item,
    Submission,
    WorkStatus,
    context,
    error_text,
    require_delay,
)
from .submission import SUBMISSIONS_MAX
from .transitions import Transition

SET_PROGRESS = f"""
UPDATE hf_work SET progress = CAST(:progress AS BLOB), updated_at = :now, {claims.RENEWED}
WHERE number = :number AND fence = :fence AND state = 'in_progress'
RETURNING progress, heartbeat_at, lease_expires_at, cancel_requested, updated_at, session_number,
    driving_fence
"""  # noqa: S608


class ItemOps(Item[C]):
    """Operations on one item, and its tool calls through the ledger of effects."""

    @operation
    def heartbeat(self, *, lease_seconds: float | None = None) -> Op[Beat]:
        """Renew the lease, or raise LeaseLost. The answer tells whether to stop."""
        require_held([self])
        seconds = self.lease_seconds if lease_seconds is None else lease_seconds
        row = (yield from claims.heartbeat({self.number: self.fence}, seconds)).get(self.number)
        if row is None:
            raise (yield from transitions.lost(self))
        yield AfterCommit(lambda: self._take(row))
        return claims.beat(self, row)

    @deciding
    def complete(
        self,
        output: Any = None,
        *,
        checkpoint: Mapping[str, Any] | None = None,
        effect: tuple[Issued[Any], Any] | None = None,
        then: Sequence[Submission] = (),
    ) -> Op[None]:
        """Complete the item, with a checkpoint, an effect's result and follow-ups in one commit.

        `checkpoint` holds the arguments of `session.save`, `then` the items to submit. If it raises
        LeaseLost, nothing is written. Repeated with the same output, it changes nothing.
        """
        require_list("then", then)
        if checkpoint is not None and not isinstance(checkpoint, Mapping):
            raise InvalidArgument(f"checkpoint must be a dict, not {type(checkpoint).__name__}")
        issued = effect[0] if isinstance(effect, tuple) and len(effect) == 2 else None
        if effect is not None and not callable(getattr(issued, "completing", None)):
            raise InvalidArgument("effect must be a pair: the Issued of session.begin, and a value")
        require_held([self])
        body = self.runtime.codec.encode(output, name="output")
        change = Transition(
            "completed", "completed", body, checkpoint=checkpoint, effect=effect, then=then
        )
        try:
            yield from self._finish(change)
        except LeaseLost:
            if not (yield from self._is_completed_with(body)):
                raise

    def _is_completed_with(self, body: bytes) -> Op[bool]:
        """Whether this attempt was already completed with the same output."""
        row = yield from one(READ_ITEM, id=self.id)
        if row is None or (row["state"], row["fence"]) != ("completed", self.fence):
            return False
        stored = self.runtime.codec.unseal(row["output"], context=context(self.id, "output"))
        return stored == body

    @operation
    def fail(
        self, error: object, *, retry: bool = True, delay_seconds: float | None = None
    ) -> Op[WorkStatus]:
        """End the attempt with an error; return `pending` if it is retried, else `failed`.

        It is retried while retries are left and `retry` is true, after `delay_seconds` or with
        exponential backoff. SessionBusy, InProgress and StoreBusy do not use up a retry, nor does
        Unresolved, which parks the item until the effect is resolved.
        """
        if delay_seconds is not None:
            require_delay("delay_seconds", delay_seconds)
        text = error_text(error, self.runtime.redactor.redact)
        given: dict[str, Any] = {"retry": retry, "delay_seconds": delay_seconds}
        return (yield from self._finish(transitions.failed(self, error, text, **given)))

    @operation
    def release(self) -> Op[None]:
        """Return the item to its queue, ready at once, without using up a retry."""
        yield from self._finish(Transition("pending", "released", releases=1))

    @operation
    def cancel(self) -> Op[WorkStatus]:
        """Cancel the item. Called by another than its holder, ask the holder to stop."""
        if not self.is_held:
            return (yield from transitions.cancel(self))
        return (yield from self._finish(Transition("cancelled", "cancelled")))

    @operation
    def progress(self, note: Any, *, lease_seconds: float | None = None) -> Op[None]:
        """Record the attempt's progress, also in the session's history, and renew the lease."""
        require_held([self])
        note = self.runtime.redactor.redact(note)
        body = self.runtime.codec.encode(note, name="progress")
        seconds = self.lease_seconds if lease_seconds is None else lease_seconds
        lease_ms = lease_milliseconds(seconds)
        if self.root_id is not None:
            yield Lock(self.root_id)
        row = yield from one(
            SET_PROGRESS,
            number=self.number,
            fence=self.fence,
            progress=self.runtime.codec.seal(body, context=context(self.id, "progress")),
            lease_ms=lease_ms,
        )
        if row is None:
            raise (yield from transitions.lost(self))
        yield from claims.renew_sessions([row], lease_ms)
        yield from transitions.record(self, "manual_checkpoint", {"progress": note})
        yield AfterCommit(lambda: self._take(row))

    def _finish(self, change: Transition) -> Op[WorkStatus]:
        require_held([self])
        [row] = yield from transitions.finish([(self, change)])
        if row is None:
            raise (yield from transitions.lost(self))
        yield AfterCommit(lambda: self._take(row))
        return STATUS_OF[row["state"]]

    @flow
    def call(
        self,
        tool: Tool[..., Any],
        /,
        *,
        call_id: str | None = None,
        wait_seconds: float | None = None,
        **arguments: Any,
    ) -> Flow[Result[Any]]:
        """Run a tool once for this item: its retries and redrives get the stored result."""
        call = self._prepare(tool, arguments, call_id=call_id, wait_seconds=wait_seconds)
        return (yield from call.run())

    @flow
    def once(
        self,
        key: str,
        function: Callable[..., Any],
        *,
        request: Any = None,
        ttl_seconds: float | None = ONCE_SECONDS,
        effect: EffectKind = "mutate",
        verify: Verify | None = None,
        on_unknown: OnUnknown = "park",
        cache_failures: bool = False,
        wait_seconds: float | None = None,
    ) -> Flow[Result[Any]]:
        """Run a function once per key; keys are separate for each item."""
        tool, arguments = once_tool(function, request, effect, verify, on_unknown, cache_failures)
        rules = once_rules(key, request, ttl_seconds)
        call = self._prepare(tool, arguments, wait_seconds=wait_seconds, **rules)
        return (yield from call.run())

    def _prepare(
        self, tool: Tool[..., Any], arguments: Mapping[str, Any], /, **rules: Any
    ) -> PreparedCall:
        """Return a call in the item's scope, so that a retry or redrive finds it."""
        guard, fence = (self._guard(), self.driving_fence) if self.is_held else (None, None)
        return prepare(
            Ledger.of(self.runtime),
            require_tool(tool),
            arguments,
            place=self._place(fence, guard),
            guard=guard,
            holder=self.holder,
            item=self.id,
            chain_id=self.first_id or self.id,
            **rules,
        )


def require_list(label: str, given: object) -> None:
    """Raise unless the value is a list of acceptable length."""
    if not isinstance(given, list | tuple):
        raise InvalidArgument(f"{label} must be a list, not {type(given).__name__}")
    if len(given) > SUBMISSIONS_MAX:
        raise InvalidArgument(f"{label} takes at most {SUBMISSIONS_MAX} at once, not {len(given)}")


def require_held(items: Sequence[Item[Any]]) -> None:
    """Raise unless each item's handle holds a lease."""
    for item in items:
        if not isinstance(item, Item):
            raise InvalidArgument(f"a claimed work item is needed, not {type(item).__name__}")
        if not item.is_held:
            raise LeaseLost(
                f"this handle of work item {item.id} holds no lease; claim the item, or use "
                "work.get(id, fence=…) if you know its fence",
                id=item.id,
            )

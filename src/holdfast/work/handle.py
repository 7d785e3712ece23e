"""What the holder of a work item does with it; every write carries the fence of its lease."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ..effects import Issued, Ledger, Result, Tool
from ..effects.calls import ONCE_SECONDS, PreparedCall, once_rules, once_tool, prepare
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

SET_PROGRESS = """
UPDATE hf_work SET progress = CAST(:progress AS BLOB), heartbeat_at = :now, updated_at = :now,
    lease_expires_at = CASE
        WHEN lease_expires_at > :now + :lease_ms THEN lease_expires_at ELSE :now + :lease_ms END
WHERE number = :number AND fence = :fence AND state = 'in_progress'
RETURNING progress, heartbeat_at, lease_expires_at, cancel_requested, updated_at, session_number,
    driving_fence
"""


class ItemOps(Item[C]):
    """What one item's holder does with it, and through the ledger of effects."""

    @operation
    def heartbeat(self, *, lease_seconds: float | None = None) -> Op[Beat]:
        """Renew the lease, or raise LeaseLost; the answer says whether to stop."""
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

        `checkpoint` holds what `session.save` takes, `then` what to submit next. Raises LeaseLost,
        and then nothing of all this is written. Again with the same output it changes nothing.
        """
        require_list("then", then)
        if checkpoint is not None and not isinstance(checkpoint, Mapping):
            raise InvalidArgument(f"checkpoint must be a dict, not {type(checkpoint).__name__}")
        if effect is not None and (not isinstance(effect, tuple) or len(effect) != 2):
            raise InvalidArgument("effect must be a pair: what session.begin gave, and the value")
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
        """Whether this very attempt was completed with the same output before."""
        row = yield from one(READ_ITEM, id=self.id)
        if row is None or (row["state"], row["fence"]) != ("completed", self.fence):
            return False
        stored = self.runtime.codec.unseal(row["output"], context=context(self.id, "output"))
        return stored == body

    @operation
    def fail(
        self, error: object, *, retry: bool = True, delay_seconds: float | None = None
    ) -> Op[WorkStatus]:
        """End the attempt with an error; return `pending` if it is tried again, else `failed`.

        It is tried again while there are retries left and `retry` is true, after `delay_seconds`
        or, without them, with exponential backoff. No retry is spent by SessionBusy, InProgress
        and StoreBusy, nor by Unresolved, which parks the item until the effect is resolved.
        """
        if delay_seconds is not None:
            require_delay("delay_seconds", delay_seconds)
        text = error_text(error, self.runtime.redactor.redact)
        given: dict[str, Any] = {"retry": retry, "delay_seconds": delay_seconds}
        return (yield from self._finish(transitions.failed(self, error, text, **given)))

    @operation
    def release(self) -> Op[None]:
        """Give the item back for another to run at once; no retry is spent."""
        yield from self._finish(Transition("pending", "released", releases=1))

    @operation
    def cancel(self) -> Op[WorkStatus]:
        """Cancel the item: its holder ends it now, anybody else asks its holder to stop."""
        if not self.is_held:
            return (yield from transitions.cancel(self))
        return (yield from self._finish(Transition("cancelled", "cancelled")))

    @operation
    def progress(self, note: Any, *, lease_seconds: float | None = None) -> Op[None]:
        """Record the attempt's progress, as evidence in the session too; also a heartbeat."""
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
        """Run a tool once for this item: a retry or redrive of it gets the stored result."""
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
        """Run a function once per key of this item; another item's key is another."""
        tool, arguments = once_tool(function, request, effect, verify, on_unknown, cache_failures)
        rules = once_rules(key, request, ttl_seconds)
        call = self._prepare(tool, arguments, wait_seconds=wait_seconds, **rules)
        return (yield from call.run())

    def _prepare(
        self, tool: Tool[..., Any], arguments: Mapping[str, Any], /, **rules: Any
    ) -> PreparedCall:
        """Return a call whose key comes from the item, so that a retry or redrive finds it."""
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
    """Refuse what is no list, or too long a one."""
    if not isinstance(given, list | tuple):
        raise InvalidArgument(f"{label} must be a list, not {type(given).__name__}")
    if len(given) > SUBMISSIONS_MAX:
        raise InvalidArgument(f"{label} are at most {SUBMISSIONS_MAX} at once, not {len(given)}")


def require_held(items: Sequence[Item[Any]]) -> None:
    """Refuse handles that were never given a lease."""
    for item in items:
        if not isinstance(item, Item):
            raise InvalidArgument(f"a claimed work item is needed, not {type(item).__name__}")
        if not item.is_held:
            raise LeaseLost(
                f"this handle of work item {item.id} holds no lease; claim gives one, and "
                "work.get(id, fence=…) to a process that knows the fence",
                id=item.id,
            )

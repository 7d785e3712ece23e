"""What the holder of a work item does with it, under the item's lease."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ..errors import InvalidArgument, LeaseLost
from ..kernel.operation import AfterCommit, C, Lock, Op, Row, deciding, one, operation
from ..leases import lease_milliseconds
from . import claims, transitions
from .claims import Beat
from .driving import renew_driven
from .items import (
    READ,
    Item,
    Submission,
    WorkStatus,
    context,
    error_text,
    require_delay,
    status_of,
)
from .submission import SUBMISSIONS_MAX
from .transitions import Completable, Ending, Endings, failing

PROGRESS = """
UPDATE hf_work SET progress = CAST(:progress AS BLOB), heartbeat_at = :now, updated_at = :now,
    lease_expires_at = CASE
        WHEN lease_expires_at > :now + :lease_ms THEN lease_expires_at ELSE :now + :lease_ms END
WHERE number = :number AND fence = :fence AND state = 'in_progress'
RETURNING progress, heartbeat_at, lease_expires_at, cancel_requested, updated_at, session_number,
    driving_fence
"""


class ItemOps(Item[C]):
    """What the holder of one item does with it; every write carries the fence."""

    @operation
    def heartbeat(self, *, lease_seconds: float | None = None) -> Op[Beat]:
        """Prolong the lease, or raise LeaseLost; the answer says whether to stop."""
        require_held([self])
        seconds = self.lease_seconds if lease_seconds is None else lease_seconds
        found = yield from claims.heartbeat({self.number: self.fence}, seconds)
        row = found.get(self.number)
        if row is None:
            raise (yield from transitions.lost(self))
        yield AfterCommit(lambda: self._take(row))
        return Beat(
            id=self.id,
            is_lost=False,
            cancel_requested=bool(row["cancel_requested"]),
            lease_expires_at=row["lease_expires_at"],
        )

    @deciding
    def complete(
        self,
        output: Any = None,
        *,
        checkpoint: Mapping[str, Any] | None = None,
        effect: tuple[Completable, Any] | None = None,
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
        ending = Ending(
            "completed",
            "completed",
            output=self.runtime.codec.encode(output, name="output"),
            checkpoint=checkpoint,
            effect=effect,
            then=then,
        )
        try:
            if ending.is_plain:
                row = yield from Endings(self.runtime).complete(self, ending)
            else:
                [row] = yield from Endings(self.runtime).finish([(self, ending)])
            yield from self._ended(row)
        except LeaseLost:
            if not (yield from self._is_completed_with(ending)):
                raise

    def _is_completed_with(self, ending: Ending) -> Op[bool]:
        """Tell whether this very attempt was completed with the same output before."""
        row = yield from one(READ, id=self.id)
        if row is None or (row["state"], row["fence"]) != ("completed", self.fence):
            return False
        stored = self.runtime.codec.unseal(row["output"], context=context(self.id, "output"))
        return stored == ending.output

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
        ending = failing(self, error, text, retry=retry, delay_seconds=delay_seconds)
        return (yield from self._end(ending))

    @operation
    def release(self) -> Op[None]:
        """Give the item back for another to run at once; no retry is spent."""
        yield from self._end(Ending("pending", "released", releases=1))

    @operation
    def cancel(self) -> Op[WorkStatus]:
        """Cancel the item: its holder ends it now, anybody else asks its holder to stop."""
        if not self.is_held:
            return (yield from Endings(self.runtime).cancel(self))
        return (yield from self._end(Ending("cancelled", "cancelled")))

    @operation
    def progress(self, note: Any, *, lease_seconds: float | None = None) -> Op[None]:
        """Record how far the attempt is, as evidence in the session too; also a heartbeat."""
        require_held([self])
        note = self.runtime.redactor.redact(note)
        body = self.runtime.codec.encode(note, name="progress")
        seconds = self.lease_seconds if lease_seconds is None else lease_seconds
        lease_ms = lease_milliseconds(seconds)
        if self.root_id is not None:
            yield Lock(self.root_id)
        row = yield from one(
            PROGRESS,
            number=self.number,
            fence=self.fence,
            progress=self.runtime.codec.seal(body, context=context(self.id, "progress")),
            lease_ms=lease_ms,
        )
        if row is None:
            raise (yield from transitions.lost(self))
        yield from renew_driven([row], lease_ms)
        if self.root_id is not None:
            yield from Endings(self.runtime).record(self, "manual_checkpoint", {"progress": note})
        yield AfterCommit(lambda: self._take(row))

    def _end(self, ending: Ending) -> Op[WorkStatus]:
        require_held([self])
        [row] = yield from Endings(self.runtime).finish([(self, ending)])
        return (yield from self._ended(row))

    def _ended(self, row: Row | None) -> Op[WorkStatus]:
        if row is None:
            raise (yield from transitions.lost(self))
        yield AfterCommit(lambda: self._take(row))
        return status_of(row["state"])


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
                "work.get(id, fence=…) to who knows the fence",
                id=item.id,
            )

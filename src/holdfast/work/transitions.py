"""The one way out of an attempt: completed, failed, given back, expired or cancelled.

Whatever ends an attempt goes through `finish`: the row, the record of what went wrong, what was
to be saved with it, the follow-up items, the event and the wake-up, in one commit.
"""

from __future__ import annotations

import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from ..checkpoints.handle import CheckpointOps
from ..checkpoints.write import draft, write
from ..codec import Codec
from ..effects.rows import is_resolved
from ..errors import (
    InProgress,
    InvalidArgument,
    LeaseLost,
    NotFound,
    SessionBusy,
    StoreBusy,
    Unresolved,
)
from ..feed import event
from ..kernel.operation import Emit, Lock, Op, Query, Row, Runtime, batch, decide, one, rows
from ..leases import Keeper
from ..sessions.access import LOOK, Place
from .driving import give_back_driven
from .items import FINAL, Item, Submission, WorkStatus, context, status_of
from .submission import ring, submit_all

RETRY_SECONDS = 1.0
RETRY_SECONDS_MAX = 300.0
# What raises one of these is tried again soon and as often as it takes: it is busy, not wrong.
BUSY = (SessionBusy, InProgress, StoreBusy)
BUSY_MS_MAX = 10_000
BRIEF_CHARACTERS_MAX = 500

# A cancellation that was asked for wins over every further attempt.
FINISH = """
UPDATE hf_work SET
    state = CASE WHEN cancel_requested = 1 AND :is_final = 0
        THEN 'cancelled' ELSE CAST(:state AS TEXT) END,
    completed_at = CASE WHEN cancel_requested = 1 OR :is_final = 1 THEN :now END,
    available_at = CASE WHEN :is_final = 1 THEN available_at ELSE :now + :delay_ms END,
    output = CAST(:output AS BLOB), error = CAST(:error AS BLOB),
    waits_for_effect = CAST(:waits_for_effect AS TEXT),
    holder = NULL, lease_expires_at = NULL, fence = fence + :fences,
    retry_count = retry_count + CASE WHEN cancel_requested = 1 THEN 0 ELSE :retries END,
    failures = failures + :failures, rescues = rescues + :rescues, releases = releases + :releases,
    updated_at = :now
WHERE number = :number AND {condition}
RETURNING {columns}
"""
ENDED = """state, completed_at, available_at, output, error, holder, lease_expires_at, fence,
    retry_count, failures, rescues, releases, updated_at, session_number, driving_fence,
    waits_for_effect"""
WITH_FENCE = "fence = :fence AND state = 'in_progress'"
HELD = FINISH.format(columns=ENDED, condition=WITH_FENCE)
EXPIRED = FINISH.format(columns=ENDED, condition=f"{WITH_FENCE} AND lease_expires_at <= :now")
LIVE = FINISH.format(
    columns=ENDED, condition="state IN ('scheduled', 'pending', 'in_progress', 'review')"
)
IDLE = FINISH.format(columns=ENDED, condition="state IN ('scheduled', 'pending', 'review')")
# A completion alone says nothing but its output: fewer values to send for what is done most.
_SAID = {"state": "'completed'", "is_final": "1", "error": "NULL", "waits_for_effect": "NULL"}
_SAID |= dict.fromkeys(("fences", "delay_ms", "retries", "failures", "rescues", "releases"), "0")
_COMPLETE = re.sub(r":(\w+)", lambda name: _SAID.get(name[1], name[0]), HELD)
COMPLETE_UNREAD = _COMPLETE.replace(ENDED, "state, retry_count, session_number, driving_fence")
# One that drives has its session to give back as well, which takes more than one statement.
COMPLETE = _COMPLETE.replace(WITH_FENCE, f"{WITH_FENCE} AND driving_fence IS NULL")
READ_ENDED = f"SELECT {ENDED} FROM hf_work WHERE number = :number"  # noqa: S608
LOCK_ITEM = "SELECT state FROM hf_work WHERE number = :number /*pg FOR NO KEY UPDATE */"
ASK_TO_STOP = """
UPDATE hf_work SET cancel_requested = 1, updated_at = :now
WHERE number = :number AND state = 'in_progress' AND cancel_requested = 0
RETURNING holder
"""
# At least so many of the last errors of an item are kept.
ERRORS_KEPT = 20
KEEP_ERROR = """
INSERT INTO hf_attempts (work_number, attempt, holder, fence, reason, error, ended_at)
SELECT number, attempts, CAST(:holder AS TEXT), CAST(:fence AS INTEGER), CAST(:reason AS TEXT),
    CAST(:error AS BLOB), :now
FROM hf_work WHERE number = :number
"""
DROP_ERRORS = """
DELETE FROM hf_attempts WHERE work_number = :number AND attempt < (
    SELECT min(kept.attempt) FROM (
        SELECT attempt FROM hf_attempts WHERE work_number = :number
        ORDER BY attempt DESC LIMIT :limit
    ) AS kept
)
"""
STATE = "SELECT state, fence, holder FROM hf_work WHERE number = :number"
EVENTS = {
    "completed": "work_completed",
    "failed": "work_failed",
    "cancelled": "work_cancelled",
    "review": "work_parked",
    "pending": "work_requeued",
    "scheduled": "work_requeued",
}


class Completable(Protocol):
    """An effect under way, whose outcome can be written in another commit."""

    def completing(self, value: Any) -> Op[Any]:
        """Return the operation that stores the effect's result."""
        ...


@dataclass(frozen=True, slots=True)
class Ending:
    """What becomes of an item, and what is written with it."""

    state: str
    reason: str
    output: bytes | None = None
    error: str | None = None
    delay_ms: int = 0
    retries: int = 0
    failures: int = 0
    rescues: int = 0
    releases: int = 0
    fences: int = 0
    is_recorded: bool = True
    checkpoint: Mapping[str, Any] | None = None
    effect: tuple[Completable, Any] | None = None
    then: Sequence[Submission] = field(default=())
    waits_for_effect: str | None = None

    @property
    def is_failure(self) -> bool:
        """Whether an error of the handler or an expired lease ends the attempt."""
        return self.failures + self.rescues > 0

    @property
    def is_plain(self) -> bool:
        """Whether nothing is written with it."""
        return self.checkpoint is None and self.effect is None and not self.then

    def query(self, statement: str, item: Item[Any], codec: Codec) -> Query:
        """Return the statement that ends an attempt of an item in this way."""
        error = self.error
        sealed = None if error is None else codec.pack(error, context=context(item.id, "error"))
        output = self.output
        if output is not None:
            output = codec.seal(output, context=context(item.id, "output"))
        parameters = {
            "number": item.number,
            "fence": item.fence,
            "state": self.state,
            "is_final": int(self.state in FINAL),
            "output": output,
            "error": sealed,
            "delay_ms": self.delay_ms,
            "retries": self.retries,
            "failures": self.failures,
            "rescues": self.rescues,
            "releases": self.releases,
            "fences": self.fences,
            "waits_for_effect": self.waits_for_effect,
        }
        return Query(statement, parameters)


RESOLVED = Ending("pending", "effect resolved")


class Endings:
    """What `finish` needs of the store."""

    def __init__(self, runtime: Runtime) -> None:
        self.runtime = runtime
        self.codec = runtime.codec

    def finish(
        self, ended: Sequence[tuple[Item[Any], Ending]], statement: str = HELD
    ) -> Op[list[Row | None]]:
        """End the attempts of items; None for each that was not as the statement wants it."""
        return (yield from self.finish_and(ended, statement=statement))[0]

    def complete(self, item: Item[Any], ending: Ending) -> Op[Row | None]:
        """Complete an item with nothing beside it: on PostgreSQL in one round trip, if the call
        begins with it.
        """
        locks, emits = [], []
        if item.root_id is not None:
            locks = [Lock(item.root_id)]
            emits = [self._event(item, ending, ending.state, item.retry_count)]
        query = ending.query(COMPLETE, item, self.codec)
        again = Query(READ_ENDED, {"number": item.number})
        answers = yield from decide(*locks, query, emits=emits, again=again)
        if answers[-1]:
            return answers[-1][0]
        return (yield from self.finish([(item, ending)]))[0]

    def finish_and(
        self, ended: Sequence[tuple[Item[Any], Ending]], *beside: Query, statement: str = HELD
    ) -> Op[tuple[list[Row | None], list[list[Row]]]]:
        """End the attempts of items, and run statements that do not depend on it behind that."""
        for item, ending in ended:
            yield from self._save_with(item, ending)
        roots = sorted({item.root_id for item, _ in ended if item.root_id is not None})
        # One lock order for everybody who changes several items: by number.
        by_number = sorted(range(len(ended)), key=lambda index: ended[index][0].number)
        queries = [
            ended[index][1].query(statement, ended[index][0], self.codec) for index in by_number
        ]
        answers = yield from batch(*map(Lock, roots), *queries, *beside)
        found: list[Row | None] = [None] * len(ended)
        for index, answer in zip(by_number, answers[len(roots) :], strict=False):
            found[index] = answer[0] if answer else None
        yield from give_back_driven(filter(None, found))
        ready = set()
        for index in by_number:
            item, ending = ended[index]
            if (row := found[index]) is None:
                continue
            if row["state"] == "pending":
                ready.add(item.queue)
            yield from self._follow(item, ending, row)
            if row["state"] == "review" and (yield from is_resolved(ending.waits_for_effect)):
                [found[index]] = yield from self.finish([(item, RESOLVED)], IDLE)
        yield from ring(self.runtime.signals, ready)
        return found, answers[len(roots) + len(ended) :]

    def _save_with(self, item: Item[Any], ending: Ending) -> Op[None]:
        """Write what its holder wants to be written with the end, while the lease still lives."""
        if ending.is_plain:
            return
        if item.root_id is not None:
            yield Lock(item.root_id)
        yield from Keeper.of(self.runtime).check(item._guard())
        if ending.checkpoint is not None:
            yield from self._save(item, ending.checkpoint)
        if ending.effect is not None:
            issued, value = ending.effect
            yield from issued.completing(value)
        if ending.then:
            default = None if item.root_id is None else _place(item)
            yield from submit_all(self.runtime, ending.then, default=default)

    def _follow(self, item: Item[Any], ending: Ending, row: Row) -> Op[None]:
        """Write what follows from the end of an attempt: evidence of an error, and the event."""
        if ending.error is not None and ending.is_failure:
            yield from self._keep_error(item, ending.error, ending.reason)
        if item.root_id is None or item.session_id is None:
            return
        if ending.error is not None and ending.is_failure and ending.is_recorded:
            evidence = {
                "item": item.id,
                "type": item.type,
                "error": ending.error,
                "reason": ending.reason,
                "holder": item.holder,
                "fence": item.fence,
                "retry": row["retry_count"],
                "status": status_of(row["state"]),
            }
            yield from self.record(item, "error_boundary", evidence)
        yield self._event(item, ending, row["state"], row["retry_count"])

    def _keep_error(self, item: Item[Any], error: str, reason: str) -> Op[None]:
        """Keep when, by whom and why an attempt failed; the oldest of many such errors go."""
        brief = error if len(error) <= BRIEF_CHARACTERS_MAX else f"{error[:BRIEF_CHARACTERS_MAX]}…"
        kept = {
            "number": item.number,
            "holder": item.holder,
            "fence": item.fence,
            "reason": reason,
            "error": self.codec.pack(brief, context=context(item.id, "attempt")),
        }
        drop = {"number": item.number, "limit": ERRORS_KEPT}
        yield from batch(Query(KEEP_ERROR, kept), Query(DROP_ERRORS, drop))

    def _event(self, item: Item[Any], ending: Ending, state: str, retry_count: int) -> Emit:
        assert item.root_id is not None
        assert item.session_id is not None
        data = {
            "item": item.id,
            "type": item.type,
            "reason": ending.reason,
            "fence": item.fence,
            "retry_count": retry_count,
        }
        return event(self.codec, item.root_id, item.session_id, EVENTS[state], data)

    def _save(self, item: Item[Any], checkpoint: Mapping[str, Any]) -> Op[None]:
        if item.root_id is None:
            raise InvalidArgument(f"work item {item.id} has no session to save a checkpoint of")
        place = _place(item)
        session: CheckpointOps[Any] = CheckpointOps(
            self.runtime, place.session_id, place.number, place.root_id, fence=item.driving_fence
        )
        given = {"item": item.id, **checkpoint}
        channels = given.pop("channels", None)
        yield from CheckpointOps.save(session, channels, **given)

    def record(self, item: Item[Any], kind: str, data: dict[str, Any]) -> Op[None]:
        """Write evidence into the session's history; one that has ended takes none.

        It is the store's own, so it may stand between the writes of a driver.
        """
        here = _place(item)
        found = yield from rows(LOOK, number=here.number)
        if not found or found[0]["status"] not in {"active", "waiting"}:
            return
        is_driven = found[0]["holder"] is not None and found[0]["is_leased"]
        fence = found[0]["fence"] if is_driven else None
        place = Place(here.session_id, here.number, here.root_id, fence)
        ready = draft(self.codec, kind, {}, data, None, item.id, None)
        yield from write(self.runtime, place, ready)

    def cancel(self, item: Item[Any]) -> Op[WorkStatus]:
        """Cancel an item that nobody runs, or ask who runs it to stop; return its status."""
        if item.root_id is not None:
            yield Lock(item.root_id)
        found = yield from one(LOCK_ITEM, number=item.number)
        if found is None:
            raise not_found(item.id)
        if found["state"] == "in_progress":
            asked = yield from one(ASK_TO_STOP, number=item.number)
            if asked is not None and item.root_id is not None and item.session_id is not None:
                data = {"item": item.id, "type": item.type, "holder": asked["holder"]}
                where = (item.root_id, item.session_id)
                yield event(self.codec, *where, "work_cancel_requested", data)
        elif found["state"] not in FINAL:
            yield from self.finish([(item, Ending("cancelled", "cancelled"))], IDLE)
            return "cancelled"
        return status_of(found["state"])


def _place(item: Item[Any]) -> Place:
    assert item.session_id is not None
    assert item.session_number is not None
    assert item.root_id is not None
    return Place(item.session_id, item.session_number, item.root_id, None)


def failing(
    item: Item[Any], error: object, text: str, *, retry: bool, delay_seconds: float | None
) -> Ending:
    """Return what an error makes of an item: another attempt while there are retries left.

    An effect in doubt sends it to review, and something that is busy makes it wait; neither
    spends a retry.
    """
    if retry and isinstance(error, Unresolved):
        effect_id = error.fields.get("effect_id")
        waits_for = effect_id if isinstance(effect_id, str) else None
        return Ending("review", "unresolved", error=text, failures=1, waits_for_effect=waits_for)
    is_busy = isinstance(error, BUSY)
    if not retry or (item.retry_count >= item.max_retries and not is_busy):
        reason = "failed" if not retry else "retries used up"
        return Ending("failed", reason, error=text, failures=1)
    if delay_seconds is not None:
        delay_ms = round(delay_seconds * 1000)
    elif is_busy:
        delay_ms = min(backoff_ms(item.releases), BUSY_MS_MAX)
    else:
        delay_ms = backoff_ms(item.retry_count)
    state = "scheduled" if delay_ms else "pending"
    given: dict[str, Any] = {"error": text, "delay_ms": delay_ms}
    if is_busy:
        return Ending(state, "busy", releases=1, **given)
    return Ending(state, "failed", retries=1, failures=1, **given)


def expiring(item: Item[Any], *, is_recorded: bool = True) -> Ending:
    """Return what a lease that ran out makes of an item; that is the item's own choice."""
    text = f"lease expired: {item.holder} sent no heartbeat"
    given: dict[str, Any] = {"error": text, "rescues": 1, "is_recorded": is_recorded}
    if item.on_crash == "review":
        return Ending("review", "lease expired", **given)
    if item.on_crash == "fail" or item.retry_count >= item.max_retries:
        return Ending("failed", "lease expired", **given)
    delay_ms = backoff_ms(item.retry_count)
    return Ending("scheduled", "lease expired", delay_ms=delay_ms, retries=1, **given)


def backoff_ms(retry_count: int) -> int:
    """Return how long to wait before another attempt: exponential backoff with jitter."""
    longest = min(RETRY_SECONDS * 2 ** min(retry_count, 20), RETRY_SECONDS_MAX)
    return round(1000 * random.uniform(longest / 2, longest))


def lost(item: Item[Any]) -> Op[LeaseLost]:
    """Return the error of a holder whose fence is no longer the item's."""
    row = yield from one(STATE, number=item.number)
    if row is None:
        return _lost(item, "the item was deleted", None)
    why = f"the current fence is {row['fence']}"
    if row["state"] != "in_progress":
        why = f"the item is {status_of(row['state'])}"
    return _lost(item, why, row["fence"])


def _lost(item: Item[Any], why: str, current_fence: int | None) -> LeaseLost:
    return LeaseLost(
        f"work item {item.id}: the lease with fence {item.fence} is lost, {why}; stop this "
        "attempt, nothing was written",
        id=item.id,
        fence=item.fence,
        current_fence=current_fence,
    )


def not_found(id: str) -> NotFound:
    """Return the error for an id that no item has."""
    return NotFound(f"there is no work item {id!r}", id=id)

"""How an attempt ends: completed, failed, released, expired or cancelled.

Every end of an attempt goes through `finish`: the row, the stored error, the checkpoint and effect
saved with it, the follow-up items, the event and the signal, in one commit.
"""

from __future__ import annotations

import random
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, cast

from .. import errors
from ..checkpoints.write import CheckpointOps, write
from ..dataclass import dataclass
from ..effects import Issued
from ..effects.statements import is_settled
from ..feed import event
from ..kernel.nouns import Noun
from ..kernel.operation import (
    Decide,
    Emit,
    FreshId,
    Lock,
    Op,
    Query,
    Row,
    batch,
    deciding,
    one,
    together,
)
from ..leases import Keeper
from ..records import EndedItem, SessionRef
from ..sessions.access import LOCK_SESSION
from ..wire import travels
from .claims import Claim, in_order, release_sessions
from .items import FINAL, STATUS_OF, Item, Submission, WorkStatus, context
from .submission import ring, submit_all

RETRY_SECONDS = 1.0
RETRY_SECONDS_MAX = 300.0
# Attempts that raise one of these are retried soon, without using up a retry.
BUSY = (errors.SessionBusy, errors.InProgress, errors.StoreBusy)
BUSY_MS_MAX = 10_000
BRIEF_CHARACTERS_MAX = 500

# A requested cancellation wins over every further attempt.
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
FINISHED_COLUMNS = """state, completed_at, available_at, output, error, holder, lease_expires_at,
    fence, retry_count, failures, rescues, releases, updated_at, session_number, driving_fence,
    waits_for_effect"""


def _finish_where(condition: str) -> str:
    return FINISH.format(columns=FINISHED_COLUMNS, condition=condition)


WITH_FENCE = "fence = :fence AND state = 'in_progress'"
FINISH_HELD = _finish_where(WITH_FENCE)
FINISH_EXPIRED = _finish_where(f"{WITH_FENCE} AND lease_expires_at <= :now")
FINISH_LIVE = _finish_where("state IN ('scheduled', 'pending', 'in_progress', 'review')")
FINISH_IDLE = _finish_where("state IN ('scheduled', 'pending', 'review')")
# A completion sets only the output: the most frequent statement sends fewer values, and in a group
# reads fewer columns back.
_CONSTANTS = {"state": "'completed'", "is_final": "1", "error": "NULL", "waits_for_effect": "NULL"}
_CONSTANTS |= dict.fromkeys(
    ("fences", "delay_ms", "retries", "failures", "rescues", "releases"), "0"
)
_COMPLETE = re.sub(r":(\w+)", lambda name: _CONSTANTS.get(name[1], name[0]), FINISH_HELD)
COMPLETE_IN_GROUP = _COMPLETE.replace(
    FINISHED_COLUMNS, "state, retry_count, session_number, driving_fence"
)
# An item that drives its session must release it too, which takes more than one statement.
COMPLETE_ALONE = _COMPLETE.replace(WITH_FENCE, f"{WITH_FENCE} AND driving_fence IS NULL")
READ_FINISHED = f"SELECT {FINISHED_COLUMNS} FROM hf_work WHERE number = :number"  # noqa: S608
LOCK_ITEM = "SELECT state FROM hf_work WHERE number = :number /*pg FOR NO KEY UPDATE */"
REQUEST_CANCEL = """
UPDATE hf_work SET cancel_requested = 1, updated_at = :now
WHERE number = :number AND state = 'in_progress' AND cancel_requested = 0
RETURNING holder
"""
# How many of an item's last errors are kept.
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
READ_FENCE = "SELECT state, fence FROM hf_work WHERE number = :number"
EVENT_KINDS = {
    "completed": "work_completed",
    "failed": "work_failed",
    "cancelled": "work_cancelled",
    "review": "work_parked",
    "pending": "work_requeued",
    "scheduled": "work_requeued",
}


@travels
@dataclass(frozen=True, slots=True)
class Transition:
    """The end of an attempt: the item's next state, and what is written with it."""

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
    effect: tuple[Issued[Any], Any] | None = None
    then: Sequence[Submission] = ()
    waits_for_effect: str | None = None
    is_kept: bool = False
    """Whether its error is kept among the attempts, although it is not a failure."""
    is_followed: bool = True
    """Whether the noun that submitted the item is told of its end."""
    keeps_session: bool = False
    """Whether the session that the item drove is released by the caller, who still writes to it."""

    @property
    def is_failure(self) -> bool:
        """Whether the attempt ends by an error of the handler or an expired lease."""
        return self.failures + self.rescues > 0

    @property
    def is_plain_completion(self) -> bool:
        """Whether it completes the item and writes nothing else."""
        beside = self.checkpoint is not None or self.effect is not None or self.then
        return self.state == "completed" and not beside

    def query(self, statement: str, item: Item[Any]) -> Query:
        """Return the statement that applies it to an item."""
        codec = item.runtime.codec
        values = {"number": item.number, "fence": item.fence, "output": self.output}
        if self.output is not None:
            values["output"] = codec.seal(self.output, context=context(item.id, "output"))
        if statement not in {COMPLETE_ALONE, COMPLETE_IN_GROUP}:
            values |= {name: getattr(self, name) for name in _CONSTANTS if name != "is_final"}
            values["is_final"] = int(self.state in FINAL)
            if self.error is not None:
                values["error"] = codec.pack(self.error, context=context(item.id, "error"))
        return Query(statement, values)


Finished = Sequence[tuple[Item[Any], Transition]]
RESOLVED = Transition("pending", "effect resolved")


@deciding
def turn(_: object, ended: Finished, claim: Claim | None) -> Op[tuple[list[Row | None], list[Row]]]:
    """Complete items and claim the next ones in one commit, as a worker does."""
    if claim is None:
        return (yield from finish(ended)), []
    if not ended:
        return [], (yield from claim.take())
    query = claim.query((yield FreshId()))
    found, [taken] = yield from finish_each(ended, query)
    return found, in_order(taken)


def finish(ended: Finished, statement: str | None = None) -> Op[list[Row | None]]:
    """End the attempts of items; None for each whose row did not meet the statement's condition.

    A single plain completion costs one round trip on PostgreSQL if the call starts with it.
    """
    if statement is None and len(ended) == 1 and ended[0][1].is_plain_completion:
        [(item, change)] = ended
        if item.session_id is None or follower(item) is None:
            locks = [] if item.root_id is None else [Lock(item.root_id)]
            query = change.query(COMPLETE_ALONE, item)
            emits = _event(item, change, change.state, item.retry_count)
            again = Query(READ_FINISHED, {"number": item.number})
            answers = yield Decide([*locks, query], emits, again)
            if answers[-1]:
                return [answers[-1][0]]
        statement = FINISH_HELD
    return (yield from finish_each(ended, statement=statement))[0]


def finish_each(
    ended: Finished, *beside: Query, statement: str | None = None
) -> Op[tuple[list[Row | None], list[list[Row]]]]:
    """End attempts, and run independent statements in the same round trip."""
    ends = yield from ends_of(ended, statement)
    roots = sorted({item.root_id for item, _ in ended if item.root_id is not None})
    answers = yield from batch(*map(Lock, roots), *ends.queries, *beside)
    answers = answers[len(roots) :]
    count = len(ends.queries)
    return (yield from ends.conclude(answers[:count])), answers[count:]


def ends_of(ended: Finished, statement: str | None = None) -> Op[Ends]:
    """Return the ends of attempts, after saving what a completion brings along."""
    for item, change in ended:
        if change.checkpoint is not None or change.effect is not None or change.then:
            yield from _save_with(item, change)
    # Rows are locked by number, as everywhere, so that no two transactions deadlock.
    by_number = sorted(range(len(ended)), key=lambda index: ended[index][0].number)
    queries = []
    for item, change in (ended[index] for index in by_number):
        held = COMPLETE_IN_GROUP if change.is_plain_completion else FINISH_HELD
        queries.append(change.query(statement or held, item))
    # What follows a completion is read in the same round trip, and written side by side; what
    # follows those of one session, one after the other.
    sessions = Counter(item.session_number for item, _ in ended)
    followed = {
        index: follow
        for index in by_number
        if ended[index][1].is_plain_completion
        and sessions[ended[index][0].session_number] == 1
        and (follow := _following(*ended[index])) is not None
    }
    looks = [look for follow in followed.values() for look in follow.looks]
    return Ends(ended, by_number, followed, [*queries, *looks])


@dataclass(frozen=True, slots=True)
class Ends:
    """The ends of attempts: the statements that write them, and what follows from their rows."""

    ended: Finished
    by_number: Sequence[int]
    followed: Mapping[int, Following]
    queries: Sequence[Query]
    """To be run with the trees of the items locked."""

    def conclude(self, answers: Sequence[list[Row]]) -> Op[list[Row | None]]:
        """Write what follows; return the row of each attempt, None if its lease is lost."""
        ended, followed, rest = self.ended, self.followed, iter(answers)
        found: list[Row | None] = [None] * len(ended)
        for index in self.by_number:
            found[index] = next(iter(next(rest)), None)
        looked = {index: [next(rest) for _ in each.looks] for index, each in followed.items()}
        kept = followed.keys() | {i for i in self.by_number if ended[i][1].keeps_session}
        yield from release_sessions(
            row for index, row in enumerate(found) if row is not None and index not in kept
        )
        for index in self.by_number:
            item, change = ended[index]
            if (row := found[index]) is not None:
                found[index] = yield from _follow(item, change, row, is_told=index not in followed)
        done = {index: row for index in followed if (row := found[index]) is not None}
        told = yield from together(
            followed[index].tell(looked[index], done[index]) for index in done
        )
        # What followed was written with the lease of the session.
        ends = zip(done.values(), told, strict=True)
        yield from release_sessions(row for row, is_released in ends if not is_released)
        rows = enumerate(found)
        ready = {ended[n][0].queue for n, row in rows if row and row["state"] == "pending"}
        if ready:
            yield from ring(ended[0][0].runtime.signals, ready)
        return found


def _save_with(item: Item[Any], change: Transition) -> Op[None]:
    """Write the checkpoint, effect and follow-ups of a completion, if the lease is still held."""
    place = item._place()
    if place is not None:
        yield Lock(place.root_id)
    yield from Keeper.of(item.runtime).check(item._guard())
    if change.checkpoint is not None:
        if place is None:
            raise errors.InvalidArgument(
                f"work item {item.id} has no session to save a checkpoint of"
            )
        where = (place.session_id, place.number, place.root_id)
        session: CheckpointOps[Any] = CheckpointOps(item.runtime, *where, fence=item.driving_fence)
        given = {"item": item.id, **change.checkpoint}
        channels = given.pop("channels", None)
        yield from CheckpointOps.save(session, channels, **given)
    if change.effect is not None:
        issued, value = change.effect
        yield from issued.completing(value)
    if change.then:
        yield from submit_all(item.runtime, change.then, default=place)


def _follow(item: Item[Any], change: Transition, row: Row, *, is_told: bool) -> Op[Row | None]:
    """Record the error of an ended attempt, and emit its event; return the row as it is now."""
    if change.error is not None and (change.is_failure or change.is_kept):
        yield from _keep_error(item, change.error, change.reason)
        if change.is_failure and change.is_recorded:
            evidence = {
                "item": item.id,
                "type": item.type,
                "error": change.error,
                "reason": change.reason,
                "holder": item.holder,
                "fence": item.fence,
                "retry": row["retry_count"],
                "status": STATUS_OF[row["state"]],
            }
            yield from record(item, "error_boundary", evidence)
    yield from _event(item, change, row["state"], row["retry_count"])
    if is_told:
        yield from _tell(item, change, row)
    if row["state"] == "review" and (yield from is_settled(change.waits_for_effect)):
        [again] = yield from finish([(item, RESOLVED)], FINISH_IDLE)
        return again
    return row


def follower(item: Item[Any]) -> Noun | None:
    """Return the noun that has to know how an item ends, if there is one."""
    if item.session_id is None:
        return None
    return next((noun for noun in item.runtime.nouns if item.type in noun.item_types), None)


@dataclass(frozen=True, slots=True)
class Following:
    """The end of an item, the noun that has to know it, and what that reads first."""

    item: Item[Any]
    noun: Noun
    ended: EndedItem
    looks: Sequence[Query]

    def tell(self, looked: Sequence[list[Row]], row: Row) -> Op[bool]:
        """Tell the noun, with the rows it asked for; return whether it released the session."""
        where = (self.item.runtime, self.ended, looked)
        return (yield from self.noun.item_ended(*where, row["driving_fence"]))


def _following(item: Item[Any], change: Transition, state: str | None = None) -> Following | None:
    """Return what follows the end of an item; None if nobody has to know it."""
    state = state or change.state
    noun = follower(item) if change.is_followed and state in FINAL else None
    if noun is None:
        return None
    assert item.session_id is not None
    assert item.session_number is not None
    assert item.root_id is not None
    ended = EndedItem(
        id=item.id,
        type=item.type,
        session=SessionRef(item.session_id, item.session_number, item.root_id),
        status=cast("Any", state),
        output=change.output,
        error=change.error,
    )
    return Following(item, noun, ended, noun.item_looks(ended))


def _tell(item: Item[Any], change: Transition, row: Row) -> Op[None]:
    """Tell the noun that submitted an item of its end."""
    follow = _following(item, change, row["state"])
    if follow is not None:
        yield from follow.tell((yield from batch(*follow.looks)), row)


def _keep_error(item: Item[Any], error: str, reason: str) -> Op[None]:
    """Store the error of a failed attempt, and drop the item's oldest ones."""
    brief = error if len(error) <= BRIEF_CHARACTERS_MAX else f"{error[:BRIEF_CHARACTERS_MAX]}…"
    kept = {
        "number": item.number,
        "holder": item.holder,
        "fence": item.fence,
        "reason": reason,
        "error": item.runtime.codec.pack(brief, context=context(item.id, "attempt")),
    }
    drop = {"number": item.number, "limit": ERRORS_KEPT}
    yield from batch(Query(KEEP_ERROR, kept), Query(DROP_ERRORS, drop))


def _event(item: Item[Any], change: Transition, state: str, retry_count: int) -> list[Emit]:
    """Return the event of a transition; none for an item without a session."""
    if item.root_id is None or item.session_id is None:
        return []
    data = {
        "item": item.id,
        "type": item.type,
        "reason": change.reason,
        "fence": item.fence,
        "retry_count": retry_count,
    }
    return [event(item.runtime.codec, item.root_id, item.session_id, EVENT_KINDS[state], data)]


def record(item: Item[Any], kind: str, data: dict[str, Any]) -> Op[None]:
    """Write a record into the history of the item's session, unless that has ended.

    The store writes it itself, so the session may be leased by a driver.
    """
    if (place := item._place()) is None:
        return
    session = yield from one(LOCK_SESSION, number=place.number)
    if session is None or session["status"] not in {"active", "waiting"}:
        return
    if session["holder"] is not None and session["is_leased"]:
        place = item._place(session["fence"])
    assert place is not None
    yield from write(item.runtime, place, kind, {}, data, item=item.id)


def cancel(item: Item[Any]) -> Op[WorkStatus]:
    """Cancel an item that is not running, or ask its holder to stop; return its status."""
    if item.root_id is not None:
        yield Lock(item.root_id)
    found = yield from one(LOCK_ITEM, number=item.number)
    if found is None:
        raise not_found(item.id)
    if found["state"] == "in_progress":
        asked = yield from one(REQUEST_CANCEL, number=item.number)
        if asked is not None and item.root_id is not None and item.session_id is not None:
            data = {"item": item.id, "type": item.type, "holder": asked["holder"]}
            where = (item.root_id, item.session_id)
            yield event(item.runtime.codec, *where, "work_cancel_requested", data)
    elif found["state"] not in FINAL:
        yield from finish([(item, Transition("cancelled", "cancelled"))], FINISH_IDLE)
        return "cancelled"
    return STATUS_OF[found["state"]]


def failed(
    item: Item[Any], error: object, text: str, *, retry: bool, delay_seconds: float | None
) -> Transition:
    """Return the transition after an error: another attempt while retries are left.

    An effect with an unknown outcome parks the item for review, and a busy session, tool or store
    delays it; neither uses up a retry.
    """
    if retry and isinstance(error, errors.Unresolved):
        effect_id = error.fields.get("effect_id")
        waits_for = effect_id if isinstance(effect_id, str) else None
        return Transition(
            "review", "unresolved", error=text, failures=1, waits_for_effect=waits_for
        )
    is_busy = isinstance(error, BUSY)
    if not retry or (item.retry_count >= item.max_retries and not is_busy):
        reason = "failed" if not retry else "retries used up"
        return Transition("failed", reason, error=text, failures=1)
    if delay_seconds is not None:
        delay_ms = round(delay_seconds * 1000)
    elif is_busy:
        delay_ms = min(backoff_ms(item.releases), BUSY_MS_MAX)
    else:
        delay_ms = backoff_ms(item.retry_count)
    state = "scheduled" if delay_ms else "pending"
    if is_busy:
        return Transition(state, "busy", error=text, delay_ms=delay_ms, releases=1)
    return Transition(state, "failed", error=text, delay_ms=delay_ms, retries=1, failures=1)


def expired(item: Item[Any], *, is_recorded: bool = True) -> Transition:
    """Return the transition after an expired lease, as `on_crash` says."""
    text = f"lease expired: {item.holder} sent no heartbeat"
    given: dict[str, Any] = {"error": text, "rescues": 1, "is_recorded": is_recorded}
    if item.on_crash == "review":
        return Transition("review", "lease expired", **given)
    if item.on_crash == "fail" or item.retry_count >= item.max_retries:
        return Transition("failed", "lease expired", **given)
    delay_ms = backoff_ms(item.retry_count)
    return Transition("scheduled", "lease expired", delay_ms=delay_ms, retries=1, **given)


def backoff_ms(retry_count: int) -> int:
    """Return how long to wait before another attempt: exponential backoff with jitter."""
    longest = min(RETRY_SECONDS * 2 ** min(retry_count, 20), RETRY_SECONDS_MAX)
    return round(1000 * random.uniform(longest / 2, longest))


def lost(item: Item[Any]) -> Op[errors.LeaseLost]:
    """Return the error of a holder whose fence is no longer the item's."""
    row = yield from one(READ_FENCE, number=item.number)
    if row is None:
        why = "the item was deleted"
    elif row["state"] == "in_progress":
        why = f"the current fence is {row['fence']}"
    else:
        why = f"the item is {STATUS_OF[row['state']]}"
    return errors.LeaseLost(
        f"work item {item.id}: the lease with fence {item.fence} is lost, {why}; stop this "
        "attempt, nothing was written",
        id=item.id,
        fence=item.fence,
        current_fence=None if row is None else row["fence"],
    )


def not_found(id: str) -> errors.NotFound:
    """Return the error for an id that no item has."""
    return errors.NotFound(f"there is no work item {id!r}", id=id)

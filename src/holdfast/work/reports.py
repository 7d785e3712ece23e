"""Lists of items, counts by type and status, the health of leases, and why an item waits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..arguments import require_one_of, require_whole
from ..clock import iso
from ..codec import Codec
from ..kernel.operation import Op, Row, one, rows
from ..sessions.rows import ALL_SESSIONS
from .items import (
    ITEM_COLUMNS,
    SELECT_ITEMS,
    STATUS_OF,
    WORK_STATUSES,
    Item,
    WorkStatus,
    context,
    require_delay,
)

STALE_SECONDS = 120
AHEAD_MAX = 1_000

LIST_ITEMS = f"{SELECT_ITEMS} WHERE number < :before"
LIST_DEAD = f"""
{SELECT_ITEMS} d WHERE state = 'failed' AND number < :before
    AND NOT EXISTS (SELECT 1 FROM hf_work n WHERE n.redriven_from = d.id)
ORDER BY number DESC LIMIT :limit
"""  # noqa: S608
COUNT_ITEMS = """
SELECT type, state, count(*) AS items, sum(:now - created_at) AS age_ms,
    min(created_at) AS oldest, :now AS now
FROM hf_work {condition} GROUP BY type, state
"""
COUNT_ALL = COUNT_ITEMS.format(condition="")
# Each of these states has its partial index; finished items are counted along the table.
COUNT_LIVE = " UNION ALL ".join(
    COUNT_ITEMS.format(condition=f"WHERE state = '{state}'")
    for state in ("pending", "scheduled", "in_progress", "review")
)
LEASE_HEALTH = """
SELECT count(*) AS active,
    count(CASE WHEN lease_expires_at <= :now THEN 1 END) AS expired,
    count(CASE WHEN heartbeat_at < :now - :stale_ms THEN 1 END) AS stale,
    count(CASE WHEN cancel_requested = 1 THEN 1 END) AS cancelling,
    avg(:now - heartbeat_at) AS average_ms, max(:now - heartbeat_at) AS longest_ms
FROM hf_work WHERE state = 'in_progress'
"""
READ_ITEM_NOW = f"SELECT {ITEM_COLUMNS}, :now AS now FROM hf_work WHERE id = :id"  # noqa: S608
COUNT_AHEAD = """
SELECT count(*) AS items FROM (
    SELECT number FROM hf_work WHERE state = 'pending' AND queue = :queue
        AND (priority > :priority OR (priority = :priority AND number < :number))
    LIMIT :limit
) AS ahead
"""
LIST_ERRORS = """
SELECT attempt, holder, fence, reason, error, ended_at FROM hf_attempts
WHERE work_number = :number ORDER BY attempt DESC
"""
COUNT_RUNNING = """
SELECT count(*) AS items FROM hf_work WHERE state = 'in_progress' AND queue = :queue
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkCount:
    """How many items of a type have a status, and how long ago they were submitted."""

    type: str
    status: WorkStatus
    items: int
    average_age_seconds: float
    oldest_age_seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseHealth:
    """The leases of running items: how many, how many are stale, and the age of heartbeats."""

    active: int
    stale: int
    expired: int
    cancelling: int
    average_heartbeat_seconds: float
    longest_heartbeat_seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class FailedAttempt:
    """An attempt of an item that raised an error or whose lease expired: when, who, why."""

    attempt: int
    holder: str | None
    fence: int
    reason: str
    error: str
    ended_at: int


def statuses_of(status: WorkStatus | Sequence[WorkStatus]) -> tuple[WorkStatus, ...]:
    """Return the statuses that were asked for, one or several."""
    given: tuple[Any, ...] = tuple(status) if isinstance(status, list | tuple) else (status,)
    for each in given or (None,):
        require_one_of("status", each, WORK_STATUSES)
    return given


def page_of(given: Mapping[str, Any], statuses: Sequence[WorkStatus]) -> str:
    """Return the query of a listing: only the given conditions, so that each uses its index."""
    conditions = "".join(f" AND {name} = :{name}" for name in given)
    if "session_id" in given:
        # The index is by number, and a session's id is never given twice.
        found = f"(SELECT s.number FROM {ALL_SESSIONS} WHERE s.id = :session_id)"  # noqa: S608
        conditions += f" AND session_number = {found}"
    states = [state for state, status in STATUS_OF.items() if status in statuses]
    if "holder" in given and not states:
        states = ["in_progress"]
    if not states:
        return f"{LIST_ITEMS}{conditions} ORDER BY number DESC LIMIT :limit"
    # One branch per state, so that each is read along its own index.
    branches = " UNION ALL ".join(
        f"SELECT * FROM ({LIST_ITEMS}{conditions} AND state = '{state}' "  # noqa: S608
        f"ORDER BY number DESC LIMIT :limit) AS {state}_items"
        for state in states
    )
    return f"SELECT * FROM ({branches}) AS found ORDER BY number DESC LIMIT :limit"  # noqa: S608


def before_of(before: int | None) -> int:
    """Return the number below which a list begins; None is the newest."""
    return 2**62 if before is None else require_whole("before", before, 0, 2**62)


def errors(codec: Codec, item: Row) -> Op[list[FailedAttempt]]:
    """Return the last failed attempts of an item, the newest first."""
    place = context(item["id"], "attempt")
    return [
        FailedAttempt(**{**row, "error": codec.unpack(row["error"], context=place)})
        for row in (yield from rows(LIST_ERRORS, number=item["number"]))
    ]


def counts(*, finished: bool) -> Op[list[WorkCount]]:
    """Count items by type and status."""
    found: dict[tuple[str, WorkStatus], list[Row]] = {}
    for row in (yield from rows(COUNT_ALL if finished else COUNT_LIVE)):
        found.setdefault((row["type"], STATUS_OF[row["state"]]), []).append(row)
    counted = []
    for (type_, status), states in sorted(found.items()):
        items = sum(int(row["items"]) for row in states)
        age_ms = sum(float(row["age_ms"]) for row in states)
        oldest = min(row["oldest"] for row in states)
        counted.append(
            WorkCount(
                type=type_,
                status=status,
                items=items,
                average_age_seconds=age_ms / items / 1000,
                oldest_age_seconds=(states[0]["now"] - oldest) / 1000,
            )
        )
    return counted


def health(stale_seconds: float) -> Op[LeaseHealth]:
    """Look at the leases of the items that run now."""
    row = yield from one(LEASE_HEALTH, stale_ms=require_delay("stale_seconds", stale_seconds))
    assert row is not None
    return LeaseHealth(
        active=row["active"],
        stale=row["stale"],
        expired=row["expired"],
        cancelling=row["cancelling"],
        average_heartbeat_seconds=float(row["average_ms"] or 0) / 1000,
        longest_heartbeat_seconds=(row["longest_ms"] or 0) / 1000,
    )


def why(item: Item[Any], now: int) -> Op[str]:
    """Say in a sentence why an item runs or does not."""
    last = f" Last error: {item.error}." if item.error else ""
    retries = f"retry {item.retry_count} of {item.max_retries}"
    match item.stored_state:
        case "pending":
            return (yield from _ready(item)) + last
        case "scheduled" if item.available_at <= now:
            return (
                f"It has been due for {_ago(now, item.available_at)} and waits for a sweep.{last}"
            )
        case "scheduled":
            cause = f", before {retries}" if item.retry_count else ""
            wait = _seconds(item.available_at - now)
            return f"It waits until {iso(item.available_at)}, {wait} from now{cause}.{last}"
        case "review" if item.waits_for_effect is not None:
            return (
                f"It waits for effect {item.waits_for_effect} to be resolved, and is ready then: "
                f"holdfast effects show {item.waits_for_effect}."
            )
        case "review":
            return f"It waits for a person: look at it, then work.retry or work.cancel it.{last}"
        case "in_progress":
            return _running(item, now)
        case "completed":
            return f"It was completed {_ago(now, item.completed_at)} ago."
        case "failed":
            used = f" after {item.attempts} attempts" if item.attempts > 1 else ""
            return f"It failed for good{used}; work.redrive submits it again.{last}"
    return f"It was cancelled {_ago(now, item.completed_at)} ago."


def _ready(item: Item[Any]) -> Op[str]:
    place = {"queue": item.queue, "priority": item.priority, "number": item.number}
    ahead = yield from one(COUNT_AHEAD, **place, limit=AHEAD_MAX)
    running = yield from one(COUNT_RUNNING, queue=item.queue)
    assert ahead is not None
    assert running is not None
    count = ahead["items"]
    before = f"{count} items" if count < AHEAD_MAX else f"{AHEAD_MAX} items or more"
    before = {0: "nothing", 1: "1 item"}.get(count, before)
    hint = f"{running['items']} of the queue run now."
    if not running["items"]:
        hint = "none of the queue runs now: is a worker there that serves it?"
    return f"It is ready, with {before} before it in queue {item.queue!r}; {hint}"


def _running(item: Item[Any], now: int) -> str:
    held = f"{item.holder} has been running it for {_ago(now, item.lease_acquired_at)}"
    sign = f"last heartbeat {_ago(now, item.heartbeat_at)} ago"
    assert item.lease_expires_at is not None
    rest = f"its lease ends in {_seconds(item.lease_expires_at - now)}"
    if item.lease_expires_at <= now:
        rest = f"its lease ended {_ago(now, item.lease_expires_at)} ago: the next sweep takes it"
    asked = " It was asked to stop." if item.cancel_requested else ""
    return f"{held}, {sign}; {rest}.{asked}"


def _ago(now: int, moment: int | None) -> str:
    return _seconds(now - (now if moment is None else moment))


def _seconds(milliseconds: int) -> str:
    seconds = max(0, milliseconds) / 1000
    if seconds < 120:
        return f"{seconds:.1f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"

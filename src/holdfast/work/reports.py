"""Listings of items, counts by type and status, lease health, and why an item waits."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from ..arguments import require_one_of, require_whole
from ..clock import iso
from ..codec import Codec
from ..dataclass import dataclass
from ..errors import quoted
from ..kernel.operation import Op, Query, Row, batch, one, rows
from ..kernel.sql import along, merged
from ..sessions.rows import NUMBER_OF_SESSION, place_of_number
from ..wire import travels
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
COUNTED_MAX = 1_000
TYPES_MAX = 1_000
NEWEST = "number DESC"

# The filters of a listing that have an index, each with its column and value; the first given one
# decides which index is used. That of a session is on its number.
LEADING = {
    "session_id": ("session_number", NUMBER_OF_SESSION.format(id=":session_id")),
    **{name: (name, f":{name}") for name in ("root_id", "holder", "queue", "type")},
}
BEFORE = "number < :before"
LIST_DEAD = f"""
{SELECT_ITEMS} d WHERE state = 'failed' AND number < :before
    AND NOT EXISTS (SELECT 1 FROM hf_work n WHERE n.redriven_from = d.id)
ORDER BY number DESC LIMIT :limit
"""  # noqa: S608
# An item that was imported from a machine whose clock is ahead has no age yet.
COUNTED = """
count(*) AS items, sum(CASE WHEN created_at < :now THEN :now - created_at ELSE 0 END) AS age_ms,
    min(created_at) AS oldest, :now AS now
"""
COUNT_ITEMS = f"SELECT type, state, {COUNTED} FROM hf_work {{condition}} GROUP BY type, state"  # noqa: S608
COUNT_ALL = COUNT_ITEMS.format(condition="")
LIVE_STATES = ("pending", "scheduled", "in_progress", "review")
COUNT_LIVE = " UNION ALL ".join(
    COUNT_ITEMS.format(condition=f"WHERE state = '{state}'") for state in LIVE_STATES
)
# A skip scan: one index lookup per type, however many items it has.
LIST_TYPES = """
WITH RECURSIVE types (type) AS (
    SELECT min(type) FROM hf_work
    UNION ALL
    SELECT (SELECT min(w.type) FROM hf_work w WHERE w.type > t.type)
    FROM types t WHERE t.type IS NOT NULL
)
SELECT type FROM types WHERE type IS NOT NULL LIMIT :limit
"""
COUNT_SOME = f"""
SELECT {COUNTED} FROM (
    SELECT created_at FROM hf_work WHERE type = :type AND state = :state
    ORDER BY number LIMIT :limit
) AS counted
"""  # noqa: S608
LEASE_HEALTH = """
SELECT count(*) AS active,
    count(CASE WHEN lease_expires_at <= :now THEN 1 END) AS expired,
    count(CASE WHEN heartbeat_at < :now - :stale_ms THEN 1 END) AS stale,
    count(CASE WHEN cancel_requested = 1 THEN 1 END) AS cancelling,
    avg(:now - heartbeat_at) AS average_ms, max(:now - heartbeat_at) AS longest_ms
FROM (
    SELECT lease_expires_at, heartbeat_at, cancel_requested
    FROM hf_work INDEXED BY ix_work_sweep WHERE state = 'in_progress'
    ORDER BY sweep_at, number LIMIT :limit
) AS held
"""
READ_ITEM_NOW = f"SELECT {ITEM_COLUMNS}, :now AS now FROM hf_work WHERE id = :id"  # noqa: S608
COUNT_BEFORE = """
SELECT count(*) AS items FROM (
    SELECT number FROM hf_work WHERE state = '{state}' AND queue = :queue {before} LIMIT :limit
) AS counted
"""
COUNT_ABOVE = COUNT_BEFORE.format(state="pending", before="AND priority > :priority")
COUNT_OLDER = COUNT_BEFORE.format(
    state="pending", before="AND priority = :priority AND number < :number"
)
COUNT_RUNNING = COUNT_BEFORE.format(state="in_progress", before="")
LIST_ERRORS = """
SELECT attempt, holder, fence, reason, error, ended_at FROM hf_attempts
WHERE work_number = :number ORDER BY attempt DESC
"""


@travels
@dataclass(frozen=True, slots=True, kw_only=True)
class WorkCount:
    """The number of items with a type and status, and their age since submission."""

    type: str
    status: WorkStatus
    items: int
    average_age_seconds: float
    oldest_age_seconds: float
    is_more: bool = False
    """Whether counting stopped at a limit."""


@travels
@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseHealth:
    """The leases of running items: how many, how many are stale, and the age of heartbeats."""

    active: int
    stale: int
    expired: int
    cancelling: int
    average_heartbeat_seconds: float
    longest_heartbeat_seconds: float
    is_more: bool = False
    """Whether there are more leases, which expire later and were not looked at."""


@travels
@dataclass(frozen=True, slots=True, kw_only=True)
class FailedAttempt:
    """An attempt of an item that raised an error or whose lease expired."""

    attempt: int
    holder: str | None
    fence: int
    reason: str
    error: str
    ended_at: int


def statuses_of(status: WorkStatus | Sequence[WorkStatus]) -> tuple[WorkStatus, ...]:
    """Return one or several statuses as a tuple, checked."""
    given: tuple[Any, ...] = tuple(status) if isinstance(status, list | tuple) else (status,)
    for each in given or (None,):
        require_one_of("status", each, WORK_STATUSES)
    return given


def page_of(given: Collection[str], statuses: Collection[WorkStatus]) -> str:
    """Return the SQL of a listing that uses the index of the first leading filter."""
    states = [state for state, status in STATUS_OF.items() if status in statuses]
    leading, *others = [name for name in LEADING if name in given] or [""]
    # coalesce() keeps the planner from choosing another index for these.
    base = [f"{SELECT_ITEMS} WHERE true", *(f"coalesce({name}, '') = :{name}" for name in others)]
    columns = dict([LEADING[leading]] if leading else [])
    # These indexes are partial.
    is_partial = leading in {"session_id", "root_id", "holder"}
    base += [f"{each} IS NOT NULL" for each in columns if is_partial]
    if leading == "holder" or not (leading or states):
        listed = ", ".join(f"'{state}'" for state in states)
        base += [f"coalesce(state, '') IN ({listed})"] if states else []
        start = along(columns, BEFORE) if columns else BEFORE
        return merged([" AND ".join([*base, start])], NEWEST, columns)
    # The other indexes contain the state: one part per state.
    starts = [along({**columns, "state": f"'{state}'"}, BEFORE) for state in states or STATUS_OF]
    return merged([" AND ".join([*base, each]) for each in starts], NEWEST, [*columns, "state"])


def before_of(before: int | None) -> int:
    """Return the number below which a listing starts; None means the newest."""
    return 2**62 if before is None else require_whole("before", before, 0, 2**62)


def errors(codec: Codec, item: Row) -> Op[list[FailedAttempt]]:
    """Return the last failed attempts of an item, newest first."""
    place = context(item["id"], "attempt")
    return [
        FailedAttempt(**{**row, "error": codec.unpack(row["error"], context=place)})
        for row in (yield from rows(LIST_ERRORS, number=item["number"]))
    ]


def counts(*, finished: bool, at_most: int | None) -> Op[list[WorkCount]]:
    """Count items by type and status, each up to `at_most`."""
    found: dict[tuple[str, WorkStatus], list[Row]] = {}
    if at_most is None:
        seen = yield from rows(COUNT_ALL if finished else COUNT_LIVE)
    else:
        seen = yield from _count_some(tuple(STATUS_OF) if finished else LIVE_STATES, at_most)
    for row in seen:
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
                oldest_age_seconds=max(0, states[0]["now"] - oldest) / 1000,
                is_more=at_most is not None and any(row["items"] >= at_most for row in states),
            )
        )
    return counted


def _count_some(states: Sequence[str], at_most: int) -> Op[list[Row]]:
    require_whole("at_most", at_most, 1, 2**31)
    types = yield from rows(LIST_TYPES, limit=TYPES_MAX)
    asked = [{"type": row["type"], "state": state} for row in types for state in states]
    if not asked:
        return []
    # A plan for any type and state would look for the rare ones among all items.
    counting = (Query(COUNT_SOME, {**each, "limit": at_most}, is_listing=True) for each in asked)
    found = yield from batch(*counting)
    pairs = zip(asked, found, strict=True)
    return [{**each, **row} for each, [row] in pairs if row["items"]]


def health(stale_seconds: float, at_most: int) -> Op[LeaseHealth]:
    """Return the state of the leases of running items, of those that expire first."""
    stale_ms = require_delay("stale_seconds", stale_seconds)
    require_whole("at_most", at_most, 1, 2**31)
    row = yield from one(LEASE_HEALTH, stale_ms=stale_ms, limit=at_most)
    assert row is not None
    return LeaseHealth(
        active=row["active"],
        stale=row["stale"],
        expired=row["expired"],
        cancelling=row["cancelling"],
        average_heartbeat_seconds=float(row["average_ms"] or 0) / 1000,
        longest_heartbeat_seconds=(row["longest_ms"] or 0) / 1000,
        is_more=row["active"] >= at_most,
    )


def why(item: Item[Any], now: int) -> Op[str]:
    """Return a sentence that says why an item runs or does not."""
    error = quoted((item.error or "").rstrip(" .\n"))
    last = f" Last error: {error}." if error else ""
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
                f"see `holdfast effects show {item.waits_for_effect}`."
            )
        case "review":
            retry, cancel = (f"`holdfast work {do} {item.number}`" for do in ("retry", "cancel"))
            return f"It waits for a person: check it, then run {retry} or {cancel}.{last}"
        case "in_progress":
            return _running(item, now)
        case "completed":
            return f"It was completed {_ago(now, item.completed_at)} ago."
        case "failed":
            used = f" after {item.attempts} attempts" if item.attempts > 1 else ""
            return f"It failed permanently{used}; {(yield from _again(item))}.{last}"
    return f"It was cancelled {_ago(now, item.completed_at)} ago."


def _again(item: Item[Any]) -> Op[str]:
    """Return how a failed item is run again."""
    redrive = f"`holdfast work redrive {item.number}`"
    place = yield from place_of_number(item.session_number)
    if place is None or place["status"] not in {"completed", "failed", "cancelled"}:
        return f"{redrive} submits it again"
    reopen = f"`holdfast sessions reopen {place['id']}`"
    return (
        f"its session is {place['status']}, and a call that it served has its answer. To run it "
        f"nevertheless: {reopen}, then {redrive}"
    )


def _ready(item: Item[Any]) -> Op[str]:
    place = {"queue": item.queue, "priority": item.priority, "number": item.number}
    given = {**place, "limit": COUNTED_MAX}
    texts = (COUNT_ABOVE, COUNT_OLDER, COUNT_RUNNING)
    found = yield from batch(*(Query(text, given) for text in texts))
    above, older, running = (row["items"] for [row] in found)
    count = above + older
    before = f"{count} items" if count < COUNTED_MAX else f"{COUNTED_MAX} items or more"
    before = {0: "nothing", 1: "1 item"}.get(count, before)
    hint = f"{running}{'' if running < COUNTED_MAX else ' or more'} of the queue run now."
    if running == 1:
        hint = "1 of the queue runs now."
    if not running:
        hint = (
            "no item of the queue is leased now. Either no worker serves the queue, or all of its "
            "workers' slots are taken by handlers that did not stop after their items were "
            "cancelled or lost; their logs say so."
        )
    return f"It is ready, with {before} before it in queue {item.queue!r}; {hint}"


def _running(item: Item[Any], now: int) -> str:
    held = f"{item.holder} has been running it for {_ago(now, item.lease_acquired_at)}"
    heartbeat = f"last heartbeat {_ago(now, item.heartbeat_at)} ago"
    assert item.lease_expires_at is not None
    rest = f"its lease ends in {_seconds(item.lease_expires_at - now)}"
    if item.lease_expires_at <= now:
        rest = f"its lease ended {_ago(now, item.lease_expires_at)} ago: the next sweep takes it"
    asked = " It was asked to stop." if item.cancel_requested else ""
    return f"{held}, {heartbeat}; {rest}.{asked}"


def _ago(now: int, moment: int | None) -> str:
    return _seconds(now - (now if moment is None else moment))


def _seconds(milliseconds: int) -> str:
    seconds = max(0, milliseconds) / 1000
    if seconds < 120:
        return f"{seconds:.1f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"

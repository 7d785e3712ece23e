"""Pruning old events of trees that have ended; the floor is the last pruned position."""

from __future__ import annotations

from dataclasses import asdict
from itertools import takewhile

from ..clock import iso
from ..kernel.append_only import through_door
from ..kernel.files import archived
from ..kernel.flow import Flow, invoke, let_others_write, perform
from ..kernel.nouns import Retention
from ..kernel.operation import (
    Lock,
    Op,
    Query,
    Row,
    Runtime,
    large_query,
    operation,
    rows,
    whole_query,
)
from ..records import Event, Pruned
from .events import event_of

EVENTS_PER_PASS = 500
TREES_PER_PAGE = 100

OLD = "e.created_at <= :now - :history_ms"
LIST_OLD_FEEDS = f"""
SELECT t.root_id FROM hf_trees t
WHERE t.root_id > :after AND NOT {{is_open}} AND EXISTS (
    SELECT 1 FROM hf_events e
    WHERE e.root_id = t.root_id AND e.position = t.floor + 1 AND {OLD}
)
ORDER BY t.root_id LIMIT :limit
"""  # noqa: S608
NEXT_EVENTS = f"""
SELECT {{columns}}, {{place}} AS place, {OLD} AS is_old FROM hf_events e
WHERE e.root_id = :root_id AND NOT {{is_open}}
    AND e.position > (SELECT t.floor FROM hf_trees t WHERE t.root_id = :root_id)
ORDER BY e.position LIMIT :limit
"""  # noqa: S608
# What says where an event stands among those of all trees.
PLACES = {"sqlite": "e.number", "postgres": "e.transaction_id::text::bigint"}
RAISE_FEED_FLOOR = {
    "sqlite": """
        UPDATE hf_trees SET floor = :floor, pruned_number = max(pruned_number, :pruned),
            pruned_in = 1 + coalesce(
                (SELECT max(t.pruned_in) FROM hf_trees t WHERE t.pruned_in > 0), 0
            )
        WHERE root_id = :root_id
    """,
    "postgres": """
        UPDATE hf_trees
        SET floor = :floor, pruned_transaction = greatest(pruned_transaction, :pruned),
            pruned_in = pg_current_xact_id()::text::bigint
        WHERE root_id = :root_id
    """,
}
FORGET_FEED = "DELETE FROM hf_events WHERE root_id = :root_id AND position <= :floor"


def forget_feeds(runtime: Runtime, retention: Retention, is_open: str) -> Flow[Pruned]:
    """Remove old events of ended trees, oldest first, a bounded number in each transaction.

    `is_open` is the SQL condition on a root's id that its tree has not ended.
    """
    pruned, after = Pruned(), ""
    if retention.history_ms is None or retention.session is not None:
        return pruned
    work = FeedRetention(runtime, retention.history_ms, is_open)
    while page := (yield from perform(FeedRetention.page, work, after)):
        for root_id in page:
            pruned += yield from _forget_feed(work, retention, root_id)
        after = page[-1]
    return pruned


def _forget_feed(work: FeedRetention, retention: Retention, root_id: str) -> Flow[Pruned]:
    pruned = Pruned()
    while True:
        last, lines = None, []
        if retention.archive is not None:
            found = yield from perform(FeedRetention.read, work, root_id)
            lines = [_line(work.runtime, event) for event in found]
            last = found[-1].position if found else 0
            yield from invoke(retention.archive.append, lines)
        count = yield from perform(FeedRetention.forget, work, root_id, last)
        yield from let_others_write(work.runtime)
        pruned += Pruned(events=count, archived=len(lines))
        if count < EVENTS_PER_PASS:
            return pruned


def _line(runtime: Runtime, event: Event) -> str:
    record = {**asdict(event), "created_at": iso(event.created_at)}
    return archived(runtime.codec, "event", record)


class FeedRetention:
    """The transactions that remove old events."""

    def __init__(self, runtime: Runtime, history_ms: int, is_open: str) -> None:
        self.runtime = runtime
        self._history = {"history_ms": history_ms}
        self._dialect = runtime.driver.dialect
        self._list = LIST_OLD_FEEDS.format(is_open=is_open.format(root_id="t.root_id"))
        self._next = NEXT_EVENTS.replace("{is_open}", is_open.format(root_id=":root_id")).replace(
            "{place}", PLACES[self._dialect]
        )

    @whole_query
    def page(self, after: str) -> Op[list[str]]:
        """Return the next ended trees that have old events."""
        wanted = {**self._history, "after": after, "limit": TREES_PER_PAGE}
        return [row["root_id"] for row in (yield from rows(self._list, **wanted))]

    @large_query
    def read(self, root_id: str) -> Op[list[Event]]:
        """Return the oldest events of a tree that may be removed."""
        columns = "e.root_id, e.position, e.session_id, e.kind, e.data, e.created_at"
        found = yield from self._old(root_id, columns)
        return [event_of(self.runtime.codec, row, Event) for row in found]

    @operation
    def forget(self, root_id: str, last: int | None) -> Op[int]:
        """Remove the oldest events that may be removed, up to a position; return how many."""
        yield Lock(root_id)
        old = yield from self._old(root_id, "e.position")
        gone = [row for row in old if last is None or row["position"] <= last]
        if gone:
            root = {"root_id": root_id, "floor": gone[-1]["position"]}
            pruned = max(row["place"] for row in gone)
            yield from rows(RAISE_FEED_FLOOR[self._dialect], **root, pruned=pruned)
            yield from through_door(f"feed of {root_id}", Query(FORGET_FEED, root))
        return len(gone)

    def _old(self, root_id: str, columns: str) -> Op[list[Row]]:
        wanted = {**self._history, "root_id": root_id, "limit": EVENTS_PER_PASS}
        found = yield from rows(self._next.replace("{columns}", columns), **wanted)
        return list(takewhile(lambda row: row.pop("is_old"), found))

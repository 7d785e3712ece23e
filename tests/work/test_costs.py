"""What work costs: statements on both databases, round trips on PostgreSQL."""

from __future__ import annotations

import threading
from typing import Any

import pytest

import holdfast
from holdfast import Submission
from holdfast.kernel.driver import Hooks, Trace
from holdfast.kernel.postgres.pipeline import Link
from holdfast.testing.subject import Subject, done
from tests.checkpoints.colours import both_colours

# A change in one of these is a change of cost on every call: look before you update the number.
# The second number is for an item with a session, whose tree is locked and whose feed is told.
STATEMENTS = {
    "Work.submit": {1, 5},
    "Work.claim": {1},
    "Work.heartbeat": {1},
    "ItemOps.heartbeat": {1},
    "ItemOps.complete": {1, 4},
    "ItemOps.release": {1, 4},
    # The tree's lock, four items, and of the feed the counter and two events.
    "Work.complete_many": {7},
}


@both_colours
async def test_every_operation_costs_the_statements_it_should(subject: Subject) -> None:
    """With few items and with many."""
    traces: list[Trace] = []
    store = await subject.open(hooks=Hooks(trace=traces.append), durability="normal")
    session = await done(store.session("s"))
    for size in (1, 500):
        await done(store.work.submit_many([Submission("other")] * size))
        traces.clear()
        for place in (None, session):
            for end in ("release", "complete"):
                await done(store.work.submit("t", session=place))
                [item] = await done(store.work.claim("w", queues="t"))
                await done(item.heartbeat())
                await done(store.work.heartbeat([item]))
                await done(getattr(item, end)())
            [item] = await done(store.work.claim("w", queues="t"))
            await done(item.complete())
        for _ in range(2):
            await done(store.work.submit_many([Submission("u"), Submission("u", session=session)]))
        items = await done(store.work.claim("w", limit=4, queues="u"))
        await done(store.work.complete_many([(item, 1) for item in items]))
        seen: dict[str, set[int]] = {}
        for trace in traces:
            seen.setdefault(trace.call, set()).add(trace.statements)
        wanted = dict(STATEMENTS)
        if store.runtime.driver.dialect == "postgres":
            # The event is part of the statement that completes the item, and elsewhere of the one
            # that advances the feed.
            wanted |= {"ItemOps.complete": {1, 2}, "Work.complete_many": {6}}
            wanted |= {"Work.submit": {1, 4}, "ItemOps.release": {1, 3}}
        assert {name: seen[name] for name in wanted} == wanted


def test_hot_operations_are_one_round_trip_or_two(
    postgres_dsn: str, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One with BEGIN and all that is asked, one with the events and COMMIT; or both in one."""
    trips, caller = 0, threading.get_ident()
    exchange = Link.exchange

    def counted(self: Link, *arguments: Any) -> Any:
        nonlocal trips
        # Another thread tells other processes of ready items.
        trips += threading.get_ident() == caller
        return exchange(self, *arguments)

    monkeypatch.setattr(Link, "exchange", counted)
    with holdfast.open(postgres_dsn, namespace=namespace) as store:
        session = store.session("s")
        for place in (session, None):
            store.work.submit("warm", session=place)
            [item] = store.work.claim("w", queues="warm")
            item.complete()
            for n in range(2):
                store.work.submit("t", n, session=place)
            trips = 0
            [item] = store.work.claim("w", queues="t")
            assert trips == 1
            item.heartbeat()
            assert trips == 3
            item.complete({"ok": True})
            assert trips == 4
            items = store.work.claim("w", queues=["t", "u"], limit=9)
            assert (trips, len(items)) == (5, 1)
            store.work.heartbeat(items)
            assert trips == 7
            assert store.work.complete_many([(each, 1) for each in items]) == [True]
            assert trips == 9
            assert store.work.claim("w", queues="t") == []
            assert trips <= 11

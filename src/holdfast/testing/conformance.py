"""What every driver must do, in every colour: the same complete suite runs for each of them.

A case is a coroutine that takes a `Subject`: a place where stores can be opened, and a colour.
Sync stores run in the same cases; `done` awaits only what is awaitable.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from functools import partial
from typing import Any
from unittest import mock

from ..clock import VirtualClock
from ..errors import (
    HoldfastError,
    InvalidArgument,
    LeaseHeld,
    LeaseLost,
    LimitExceeded,
    NotFound,
    OperationNotRun,
    Refused,
    StoreClosed,
)
from ..kernel.driver import Hooks, Trace
from ..kernel.operation import Emit, Op, rows
from ..store import Transaction, open
from . import nouns
from .subject import CASES, Subject, case, done, raises

__all__ = ["CASES", "STATEMENTS"]

# A change in one of these changes the cost of every call: find out why before you update it.
STATEMENTS = {
    "Counter.plant": 1,
    "Counter.add": 4,
    "Counter.add_and_tell": 4,
    "Queue.submit": 4,
    "Queue.claim": 2,
    "Queue.heartbeat": 1,
    "Queue.complete": 5,
    "Queue.release": 1,
}
# On PostgreSQL events are part of the statement that advances the feed.
STATEMENTS_ON_POSTGRES = {
    "Counter.add": 3,
    "Counter.add_and_tell": 3,
    "Queue.submit": 3,
    "Queue.complete": 4,
}


@case
async def what_returned_is_there_after_reopening(subject: Subject) -> None:
    store = await subject.open()
    counter = await subject.planted(store)
    assert await done(counter.add(5)) == 5
    assert await done(counter.add(2, note="second")) == 7
    await done(store.close())
    again = await subject.open()
    assert await done(subject.counter(again).value()) == 7
    events = await done(again.events("root"))
    assert [event.data["note"] for event in events] == ["", "second"]


@case
async def an_operation_that_fails_leaves_nothing(subject: Subject) -> None:
    store = await subject.open()
    counter = await subject.planted(store)
    await done(counter.add(5))
    error = await raises(InvalidArgument, lambda: counter.add_below(6, 5))
    assert str(error) == "10 is above the limit 6"
    assert await done(counter.value()) == 5
    assert len(await done(store.events("root"))) == 1
    assert await done(counter.add_below(6, 1)) == 6


@case
async def failures_do_not_touch_their_neighbours(subject: Subject) -> None:
    store = await subject.open()
    counter = await subject.planted(store)

    async def one(number: int) -> str:
        try:
            await done(counter.add_below(-1) if number % 3 == 0 else counter.add())
        except InvalidArgument:
            return "refused"
        return "added"

    if subject.colour == "async":
        outcomes = await asyncio.gather(*(one(number) for number in range(90)))
    else:
        outcomes = await asyncio.gather(
            *(asyncio.to_thread(asyncio.run, one(number)) for number in range(90))
        )
    assert outcomes.count("refused") == 30
    assert await done(counter.value()) == 60
    positions = [event.position for event in await done(store.events("root"))]
    assert positions == list(range(1, 61))


@case
async def positions_are_dense_in_commit_order_under_concurrency(subject: Subject) -> None:
    store = await subject.open()
    counter = await subject.planted(store)
    values = await subject.together([counter.add] * 60)
    assert sorted(values) == list(range(1, 61))
    events = await done(store.events("root"))
    assert [event.position for event in events] == list(range(1, 61))
    assert [event.data["value"] for event in events] == list(range(1, 61))


@case
async def a_reader_of_the_feed_goes_on_where_it_was(subject: Subject) -> None:
    store = await subject.open()
    counter = await subject.planted(store)
    for _ in range(5):
        await done(counter.add())
    first = await done(store.events("root", limit=2))
    rest = await done(store.events("root", after=first[-1].position))
    assert [event.position for event in first + rest] == [1, 2, 3, 4, 5]
    assert await done(store.events("root", after=5)) == []
    assert await done(store.events("nobody")) == []
    await raises(InvalidArgument, lambda: store.events("root", limit=0))
    await raises(InvalidArgument, lambda: store.events("root", after=-1))


@case
async def an_event_of_a_missing_tree_undoes_its_operation(subject: Subject) -> None:
    store = await subject.open()
    error = await raises(NotFound, lambda: subject.counter(store, "nowhere").add())
    assert "nowhere" in str(error)

    def emits_without_a_tree(tx: Transaction) -> Op[None]:
        yield from rows("INSERT INTO hf_test_counters (id, value) VALUES ('lost', 1)")
        yield Emit("nowhere", "nowhere", "lost", store.runtime.codec.pack(None, context=("", "")))

    await raises(HoldfastError, lambda: store.run(emits_without_a_tree))
    assert await done(subject.counter(store, "lost").value()) == 0


@case
async def the_database_refuses_to_change_an_event(subject: Subject) -> None:
    store = await subject.open()
    counter = await subject.planted(store)
    await done(counter.add())

    def rewrite(tx: Transaction) -> Op[None]:
        yield from rows("UPDATE hf_events SET kind = 'forged'")

    error = await raises(Refused, lambda: store.run(rewrite))
    assert "append-only" in str(error)
    assert (await done(store.events("root")))[0].kind == "counter_added"


@case
async def a_query_sees_one_moment(subject: Subject) -> None:
    store = await subject.open()
    counter = await subject.planted(store)
    calls = [counter.add, counter.value_twice] * 40
    for seen in (await subject.together(calls))[1::2]:
        assert seen[0] == seen[1]
    assert await done(counter.all_values()) == {"root": 40}


@case
async def composed_operations_commit_together_or_not_at_all(subject: Subject) -> None:
    store = await subject.open()
    await subject.planted(store)
    await subject.planted(store, "other")

    def move(tx: Transaction, amount: int, *, fails: bool) -> Op[tuple[int, int]]:
        """Move an amount between two trees, locked in id order by the operations' order."""
        gained = yield from nouns.Counter(tx, "other").add(amount)
        lost = yield from nouns.Counter(tx, "root").add(-amount)
        if fails:
            raise KeyError("on purpose")
        return gained, lost

    assert await done(store.run(move, 3, fails=False)) == (3, -3)
    await raises(KeyError, lambda: store.run(move, 4, fails=True))
    assert await done(subject.counter(store).all_values()) == {"root": -3, "other": 3}
    assert len(await done(store.events("root"))) == len(await done(store.events("other"))) == 1


@case
async def run_refuses_what_it_cannot_keep(subject: Subject) -> None:
    store = await subject.open()
    counter = await subject.planted(store)

    def forgets(tx: Transaction) -> Op[None]:
        yield from nouns.Counter(tx).add(1)
        nouns.Counter(tx).add(10)

    def sleeps(tx: Transaction) -> Op[None]:
        yield from nouns.Counter(tx).add(1)
        time.sleep(0.02)

    def returns(tx: Transaction) -> Any:
        return 3

    error = await raises(OperationNotRun, lambda: store.run(forgets))
    assert error.operation == "Counter.add"
    with mock.patch("holdfast.store.COMPOSED_SECONDS_MAX", 0.02):
        await raises(LimitExceeded, lambda: store.run(sleeps))
    await raises(InvalidArgument, lambda: store.run(returns))
    assert await done(counter.value()) == 0


@case
async def hooks_run_once_after_the_commit(subject: Subject) -> None:
    store = await subject.open()
    counter = await subject.planted(store)
    told: list[str] = []
    await done(counter.add_and_tell(lambda: told.append("yes")))
    assert told == ["yes"]

    def fails(tx: Transaction) -> Op[None]:
        yield from nouns.Counter(tx).add_and_tell(lambda: told.append("no"))
        raise KeyError

    await raises(KeyError, lambda: store.run(fails))
    assert told == ["yes"]

    def fails_after_commit() -> None:
        raise KeyError

    log = logging.getLogger("holdfast.kernel")
    log.disabled = True
    try:
        assert await done(counter.add_and_tell(fails_after_commit)) == 2
    finally:
        log.disabled = False


@case
async def fresh_ids_are_different_and_sorted(subject: Subject) -> None:
    store = await subject.open()
    counter = await subject.planted(store)
    ids = [name for _ in range(20) for name in await done(counter.name_twice())]
    assert len(set(ids)) == 40
    assert ids == sorted(ids)


@case
async def a_lease_is_held_by_one_and_its_fence_only_grows(subject: Subject) -> None:
    clock = VirtualClock()
    store = await subject.open(clock=clock)
    await subject.planted(store)
    queue = subject.queue(store)
    item = await done(queue.submit("work"))
    first = await done(queue.acquire(item, "a", lease_seconds=10))
    assert (first.fence, first.expires_at) == (1, clock.now_ms() + 10_000)
    held = await raises(LeaseHeld, lambda: queue.acquire(item, "b", lease_seconds=10))
    assert (held.holder, held.expires_at) == ("a", first.expires_at)
    clock.advance(9.999)
    await raises(LeaseHeld, lambda: queue.acquire(item, "b", lease_seconds=10))
    clock.advance(0.001)
    second = await done(queue.acquire(item, "b", lease_seconds=10))
    assert second.fence == 2
    lost = await raises(LeaseLost, lambda: queue.complete(first))
    assert (lost.fence, lost.current_fence) == (1, 2)
    await raises(LeaseLost, lambda: queue.heartbeat(first))
    await raises(LeaseLost, lambda: queue.release(first))
    await done(queue.complete(second))
    await raises(LeaseLost, lambda: queue.complete(second))
    assert await done(queue.counts()) == {"done": 1}
    assert await done(queue.claim("c")) is None
    await raises(NotFound, lambda: queue.acquire("no such item", "a"))
    await raises(InvalidArgument, lambda: queue.acquire(item, "", lease_seconds=10))
    await raises(InvalidArgument, lambda: queue.acquire(item, "a", lease_seconds=0))


@case
async def a_holder_may_renew_until_another_takes_over(subject: Subject) -> None:
    clock = VirtualClock()
    store = await subject.open(clock=clock)
    await subject.planted(store)
    queue = subject.queue(store)
    await done(queue.submit("work"))
    lease = await done(queue.claim("a", lease_seconds=10))
    shorter = await done(queue.heartbeat(lease, lease_seconds=1))
    assert shorter.expires_at == lease.expires_at
    clock.advance(60)
    revived = await done(queue.heartbeat(lease, lease_seconds=10))
    assert (revived.fence, revived.expires_at) == (lease.fence, clock.now_ms() + 10_000)
    await done(queue.release(revived))
    await raises(LeaseLost, lambda: queue.heartbeat(revived))
    assert (await done(queue.claim("b"))).fence == 2


@case
async def an_item_is_claimed_by_one_of_many(subject: Subject) -> None:
    store = await subject.open()
    await subject.planted(store)
    queue = subject.queue(store)
    for number in range(10):
        await done(queue.submit(str(number)))
    claims = await subject.together([lambda: queue.claim("w")] * 30)
    won = [lease.id for lease in claims if lease is not None]
    assert len(won) == len(set(won)) == 10


@case
async def the_store_lives_by_its_clock(subject: Subject) -> None:
    clock = VirtualClock(1_900_000_000_000)
    store = await subject.open(clock=clock)
    counter = await subject.planted(store)
    await done(counter.add())
    clock.advance(3600)
    await done(counter.add())
    times = [event.created_at for event in await done(store.events("root"))]
    assert times == [1_900_000_000_000, 1_900_003_600_000]


@case
async def every_operation_costs_the_statements_it_should(subject: Subject) -> None:
    traces: list[Trace] = []
    store = await subject.open(hooks=Hooks(trace=traces.append))
    counter = await subject.planted(store)
    queue = subject.queue(store)
    await done(counter.add())
    await done(counter.add_and_tell(lambda: None))
    await done(queue.submit("a"))
    lease = await done(queue.claim("w"))
    await done(queue.heartbeat(lease))
    await done(queue.release(lease))
    await done(queue.complete(await done(queue.claim("w"))))
    counted = {trace.call: trace.statements for trace in traces if trace.call in STATEMENTS}
    is_postgres = store.runtime.driver.dialect == "postgres"
    assert counted == STATEMENTS | (STATEMENTS_ON_POSTGRES if is_postgres else {})
    assert {trace.attempts for trace in traces} == {1}


@case
async def what_a_statement_decides_is_all_written_or_nothing(subject: Subject) -> None:
    store = await subject.open()
    counter = await subject.planted(store)
    missing = partial(counter.add_at_once, 1, only_existing=True)
    assert "None" in str(await raises(InvalidArgument, missing))
    assert await done(counter.add_at_once(3, note="first", limit=4)) == 3
    refused = partial(counter.add_at_once, 2, note="never", limit=4)
    assert "has 3, the limit is 4" in str(await raises(InvalidArgument, refused))
    assert await done(counter.add_at_once(1, note="second", limit=4, only_existing=True)) == 4
    events = await done(store.events("root"))
    assert [(event.position, event.data) for event in events] == [
        (1, {"note": "first"}),
        (2, {"note": "second"}),
    ]
    nowhere = subject.counter(store, "no-tree")
    assert await done(nowhere.add_at_once(1)) == 1
    assert await done(store.events("no-tree")) == []


@case
async def a_deciding_operation_composes_with_others(subject: Subject) -> None:
    store = await subject.open()
    counter = await subject.planted(store)

    def both(transaction: Transaction, limit: int) -> Op[tuple[int, int]]:
        inside = nouns.Counter(transaction)
        first = yield from inside.add_at_once(1, note="first", limit=limit)
        second = yield from inside.add_at_once(1, note="second", limit=limit)
        return first, second

    assert await done(store.run(both, 2)) == (1, 2)
    await raises(InvalidArgument, lambda: store.run(both, 3))
    assert await done(counter.value()) == 2
    assert len(await done(store.events("root"))) == 2


@case
async def deciding_operations_at_the_same_time_lose_nothing(subject: Subject) -> None:
    store = await subject.open()
    counter = await subject.planted(store)

    async def add(number: int) -> int:
        try:
            return int(await done(counter.add_at_once(1, note=str(number), limit=30)))
        except InvalidArgument:
            return 0

    def add_in_thread(number: int) -> int:
        return asyncio.run(add(number))

    add_here: Any = add if subject.colour == "async" else add_in_thread
    values = await subject.together([partial(add_here, number) for number in range(40)])
    assert sorted(value for value in values if value) == list(range(1, 31))
    events = await done(store.events("root"))
    assert [event.position for event in events] == list(range(1, 31))


@case
async def bad_arguments_are_refused_before_anything_is_written(subject: Subject) -> None:
    store = await subject.open()
    counter = await subject.planted(store)
    for amount in (1.5, "1", None, True):
        await raises(InvalidArgument, partial(counter.add, amount))
    await raises(TypeError, lambda: counter.add(1, nothing=2))
    await raises(InvalidArgument, lambda: counter.add(1, note="\ud800"))
    assert await done(counter.value()) == 0
    assert await done(store.events("root")) == []


@case
async def values_come_back_as_they_went(subject: Subject) -> None:
    store = await subject.open()
    counter = await subject.planted(store)
    notes = ["", "ünïcødé 🐙", "a\0b", "%s %(x)s :now ? $1 '\" \\", "x" * 200_000]
    for note in notes:
        await done(counter.add(2**40, note=note))
    events = await done(store.events("root"))
    assert [event.data["note"] for event in events] == notes
    assert events[-1].data["value"] == 5 * 2**40


@case
async def a_closed_store_says_so(subject: Subject) -> None:
    store = await subject.open()
    counter = await subject.planted(store)
    await done(store.close())
    await done(store.close())
    await raises(StoreClosed, counter.add)
    await raises(StoreClosed, counter.value)


@case
async def settle_answers_for_good(subject: Subject) -> None:
    store = await subject.open()
    assert await done(store.settle("01900000-0000-7000-8000-000000000000:1")) is False
    for id in ("", "x", ":1", "a:b", "a:-1", None, 7):
        await raises(InvalidArgument, partial(store.settle, id))


@case
async def a_backup_is_a_store_of_one_moment(subject: Subject) -> None:
    store = await subject.open()
    counter = await subject.planted(store)
    await done(counter.add(5))
    target = subject.directory / "copy.db"
    seen: list[tuple[int, int]] = []
    await done(store.backup(target, progress=lambda done, total: seen.append((done, total))))
    await done(counter.add(1))
    assert seen[-1][0] == seen[-1][1] > 0
    assert target.stat().st_mode & 0o777 == 0o600
    with open(f"sqlite:///{target}") as copy:
        assert [event.data["value"] for event in copy.events("root")] == [5]
    await raises(InvalidArgument, lambda: store.backup(target))
    await raises(InvalidArgument, lambda: store.backup(target.parent / "none" / "copy.db"))


@case
async def a_ring_is_not_lost_between_looking_and_waiting(subject: Subject) -> None:
    signals = (await subject.open()).runtime.signals
    seen = signals.count("topic")
    signals.ring("topic")
    assert await signals.wait_async("topic", seen, 30) is True
    assert await asyncio.to_thread(signals.wait, "topic", seen, 30) is True
    assert await signals.wait_async(None, 0, 0.001) is False
    assert signals.wait(None, 0, 0.001) is False


@case
async def a_change_wakes_who_waits_at_another_store(subject: Subject) -> None:
    here, there = await subject.open(), await subject.open()
    counter = await subject.planted(here)
    for wait in (there.runtime.signals.wait_async, wait_in_thread(there.runtime.signals)):
        seen = there.runtime.signals.count("topic")
        waiting = asyncio.create_task(wait("topic", seen, 30))
        await asyncio.sleep(0.1)
        await done(counter.add())
        here.runtime.signals.ring("topic")
        assert await waiting is True


def wait_in_thread(signals: Any) -> Callable[..., Any]:
    """Return a wait that blocks a thread instead of the loop."""
    return lambda *arguments: asyncio.to_thread(signals.wait, *arguments)

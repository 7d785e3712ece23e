"""Tasks cancelled at random moments leave whole operations or none, and a usable store."""

from __future__ import annotations

import asyncio
import random
import threading
from typing import Any

import pytest

import holdfast
from holdfast.testing.nouns import Counter, Setup
from tests.internals import engine_of

CANCELLATIONS = 1_000


def test_a_cancelled_operation_is_whole_or_absent(
    place: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    outcomes = asyncio.run(cancel_at_random(place))
    assert outcomes["cancelled"] > CANCELLATIONS / 10, "the cancellations must hit something"
    with capsys.disabled():
        print(f"\n{place['url'].partition(':')[0]}: {outcomes}")


async def cancel_at_random(place: dict[str, Any]) -> dict[str, int]:
    chance = random.Random(3)
    async with await holdfast.aopen(**place) as store:
        await Setup(store).install()
        counter = Counter(store)
        await counter.plant()
        returned: set[str] = set()
        asked: list[str] = []

        async def one(note: str) -> None:
            await counter.add(1, note=note)
            returned.add(note)

        async def client(number: int) -> None:
            for turn in range(CANCELLATIONS // 10):
                note = f"{number}.{turn}"
                asked.append(note)
                task = asyncio.create_task(one(note))
                await asyncio.sleep(chance.choice([0, 0, 0.0003, 0.001, 0.003, 0.01]))
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)

        await asyncio.gather(*(client(number) for number in range(10)))
        assert len(asked) == CANCELLATIONS
        # Usable: as many operations at once as there are connections, and more.
        await asyncio.gather(*(one(f"after.{number}") for number in range(40)))
        events = await store.events("root", limit=10_000)
        notes = [event.data["note"] for event in events]
        assert [event.position for event in events] == list(range(1, len(events) + 1))
        assert len(set(notes)) == len(notes)
        assert returned <= set(notes)
        assert await counter.value() == len(notes)
        if store.runtime.driver.dialect == "postgres":
            connections: Any = engine_of(store).connections
            assert connections.lent == 0
        found = len(notes) - 40
        finished = len(returned) - 40
        return {
            "cancelled": CANCELLATIONS - finished,
            "whole": found - finished,
            "absent": CANCELLATIONS - found,
        }


def test_a_store_serves_only_the_loop_it_was_opened_in(place: dict[str, Any]) -> None:
    async def open_store() -> holdfast.AsyncStore:
        return await holdfast.aopen(**place)

    async def use(store: holdfast.AsyncStore) -> None:
        with pytest.raises(holdfast.InvalidArgument, match="only in the event loop"):
            await store.store_id()

    with asyncio.Runner() as first, asyncio.Runner() as second:
        store = first.run(open_store())
        second.run(use(store))
        first.run(store.close())


def test_a_cancelled_close_closes_the_store(place: dict[str, Any]) -> None:
    async def whole() -> holdfast.AsyncStore:
        store = await holdfast.aopen(**place)
        counter = Counter(store)
        await Setup(store).install()
        await counter.plant()
        await store.work.growth()
        closing = asyncio.create_task(store.close())
        await asyncio.sleep(0)
        while closing.cancel():  # noqa: ASYNC110 - every step of it is cancelled.
            await asyncio.sleep(0)
        with pytest.raises(asyncio.CancelledError):
            await closing
        with pytest.raises(holdfast.StoreClosed):
            await counter.add(1)
        return store

    before = threading.enumerate()
    closed = asyncio.run(whole())
    assert [each.name for each in threading.enumerate() if each not in before] == [], closed

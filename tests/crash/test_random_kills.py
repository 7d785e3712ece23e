"""Processes that are killed at random while many threads and tasks write: nothing is lost."""

from __future__ import annotations

import asyncio
import itertools
import random
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

import holdfast
from holdfast.testing import history
from holdfast.testing.nouns import Counter, Setup
from tests.crash.children import Child, run


def write_from_threads_and_tasks(place: dict[str, str], directory: Path) -> None:
    """Write until killed, from 4 threads and 8 tasks of one process."""
    record = history.History(directory)
    store = holdfast.open(**place)  # type: ignore[arg-type]

    def thread() -> None:
        counter = Counter(store)
        while True:
            with record.call("add") as call:
                call.result = counter.add(1, note=call.id)

    async def tasks() -> None:
        async with await holdfast.aopen(**place) as async_store:  # type: ignore[arg-type]
            counter = Counter(async_store)

            async def task() -> None:
                while True:
                    with record.call("add") as call:
                        call.result = await counter.add(1, note=call.id)

            await asyncio.gather(*(task() for _ in range(8)))

    for _ in range(4):
        threading.Thread(target=thread, daemon=True).start()
    asyncio.run(tasks())


def check_random_kills(
    place: dict[str, str], directory: Path, rounds: int, seed: int, *, least: int
) -> int:
    """Kill a writing process so often, and until so many writes were made; return how many."""

    def install(say: Callable[[str], None]) -> None:
        with holdfast.open(**place) as store:  # type: ignore[arg-type]
            Setup(store).install()
            Counter(store).plant()

    assert run(install)[0] == 0
    chance = random.Random(seed)

    def written() -> int:
        with holdfast.open(**place) as store:  # type: ignore[arg-type]
            return Counter(store).value()

    for kills in itertools.count():
        if kills >= rounds and written() >= least:
            break
        child = Child(lambda say: write_from_threads_and_tasks(place, directory))
        time.sleep(chance.uniform(0.05, 0.4))
        child.kill()
        child.wait()
    with holdfast.open(**place) as store:  # type: ignore[arg-type]
        found: list[str] = []
        position = 0
        while events := store.events("root", after=position, limit=10_000):
            assert [event.position for event in events] == list(
                range(position + 1, position + len(events) + 1)
            )
            found += [event.data["note"] for event in events]
            position = events[-1].position
        assert Counter(store).value() == len(found)
    calls = history.read(directory)
    assert history.lost_or_doubled(calls, found) == []
    assert history.out_of_order(calls, found) == []
    return len(found)


def test_random_kills_lose_and_double_nothing(
    place: dict[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    judged = check_random_kills(place, tmp_path, rounds=8, seed=7, least=21)
    with capsys.disabled():
        print(f"\n{place['url'].partition(':')[0]}: at least 8 kills, {judged} writes judged")


@pytest.mark.slow
def test_many_random_kills_lose_and_double_nothing(place: dict[str, str], tmp_path: Path) -> None:
    check_random_kills(place, tmp_path, rounds=300, seed=11, least=1_001)

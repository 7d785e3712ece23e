"""Tasks cancelled at random moments leave whole mutations of shared state, or none."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import pytest

import holdfast

CLIENTS = 6
TURNS = 40


def test_a_cancelled_mutation_is_whole_or_absent(
    place: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    told = asyncio.run(cancel_at_random(place))
    with capsys.disabled():
        print(f"\n{place['url'].partition(':')[0]}: {told}")


async def cancel_at_random(place: dict[str, Any]) -> str:
    chance, returned, cancelled = random.Random(5), set[str](), 0
    async with await holdfast.aopen(**place) as store:
        root = await store.session("root")
        await root.state.set_rule("sum", schema={"type": "integer"}, reducer="sum")

        async def change(name: str) -> None:
            await root.state.batch(
                [
                    {"op": "append", "key": "names", "items": [name]},
                    {"op": "reduce", "key": "sum", "value": 1},
                    {"op": "add", "key": f"set {len(name) % 3}", "item": name},
                ],
                idempotency_key=name,
            )
            returned.add(name)

        async def client(number: int) -> None:
            nonlocal cancelled
            for turn in range(TURNS):
                task = asyncio.create_task(change(f"{number}.{turn}"))
                await asyncio.sleep(chance.choice([0, 0, 0.0003, 0.001, 0.003, 0.01]))
                cancelled += task.cancel()
                await asyncio.gather(task, return_exceptions=True)

        await asyncio.gather(*(client(number) for number in range(CLIENTS)))
        await asyncio.gather(*(change(f"after.{number}") for number in range(CLIENTS)))
        found = await root.state.snapshot()
        names = found["names"]
        assert len(set(names)) == len(names) == found["sum"]
        assert returned <= set(names)
        assert found.version == 3 * len(names)
        events = await root.state.events(limit=1_000)
        assert [each.sequence for each in events] == list(range(1, found.version + 1))
        # Whoever asks again for what was cancelled does it once.
        for number in range(CLIENTS):
            for turn in range(TURNS):
                await change(f"{number}.{turn}")
        assert await root.state.get("sum") == CLIENTS * TURNS + CLIENTS
    assert cancelled > 0
    return f"{cancelled} cancelled, {len(names) - CLIENTS} of {CLIENTS * TURNS} whole"

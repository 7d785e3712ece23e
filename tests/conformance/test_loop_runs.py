"""Nothing blocks the event loop: closing waits for threads of its own in another thread."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import holdfast
from holdfast.kernel.driver import Hooks, Point
from holdfast.kernel.operation import C, Op, large_query, rows
from holdfast.testing.nouns import Counter

WAIT_SECONDS = 120.0


def test_closing_a_driven_session_lets_the_loop_run_while_its_heartbeat_ends(
    place: dict[str, Any],
) -> None:
    is_beating, may_end = threading.Event(), threading.Event()
    ended: list[bool] = []

    def probe(point: Point) -> None:
        if point.call.endswith(".renew") and not is_beating.is_set():
            is_beating.set()
            ended.append(may_end.wait(WAIT_SECONDS))

    async def run() -> None:
        async with await holdfast.aopen(**place, hooks=Hooks(probe=probe)) as store:
            session = await store.session("s")
            driven = await session.drive(lease_seconds=1)
            assert await asyncio.to_thread(is_beating.wait, WAIT_SECONDS)
            # Only the loop lets the heartbeat end: closing must not keep the loop from it.
            closing = asyncio.ensure_future(driven.close())
            asyncio.get_running_loop().call_later(0.05, may_end.set)
            await closing

    asyncio.run(run())
    assert ended == [True]


class Slow(Counter[C]):
    """A large read that lasts until it is let go."""

    @large_query
    def wait_for(self, begun: threading.Event, may_end: threading.Event) -> Op[bool]:
        """Read, and wait."""
        yield from rows("SELECT 1 AS one")
        begun.set()
        return may_end.wait(WAIT_SECONDS)


def test_closing_an_sqlite_store_lets_the_loop_run_while_a_large_read_ends(tmp_path: Any) -> None:
    async def run() -> None:
        begun, may_end = threading.Event(), threading.Event()
        store = await holdfast.aopen(f"sqlite:///{tmp_path}/store.db")
        reading = asyncio.ensure_future(Slow(store).wait_for(begun, may_end))
        assert await asyncio.to_thread(begun.wait, WAIT_SECONDS)
        asyncio.get_running_loop().call_later(0.05, may_end.set)
        await store.close()
        assert await reading

    asyncio.run(run())

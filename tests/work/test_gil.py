"""Handlers that block: they keep their lease, unless they keep Python itself from running."""

from __future__ import annotations

import asyncio
import ctypes
import logging
import threading
import time
from pathlib import Path
from typing import Any

import holdfast
from holdfast import Worker
from tests.work.fleet import Fleet, read_lines, wait_until, write_line

LEASE_SECONDS = 2.0
BLOCKED_SECONDS = 3 * LEASE_SECONDS


def sweep(place: dict[str, Any]) -> None:
    """Take away every lease that runs out, as soon as it does."""
    with holdfast.open(**place, durability="normal") as store:
        while True:
            store.work.sweep()
            time.sleep(0.05)


def blocks_without_the_gil(item: Any) -> str:
    time.sleep(BLOCKED_SECONDS)
    return "kept"


async def blocks_the_loop(item: Any) -> str:
    time.sleep(BLOCKED_SECONDS)  # noqa: ASYNC251
    return "kept"


def test_a_handler_that_blocks_in_c_keeps_its_lease(place: dict[str, Any]) -> None:
    with Fleet(sweep=sweep) as fleet, holdfast.open(**place, durability="normal") as store:
        fleet.start("sweep", place)
        item = store.work.submit("t")
        handlers = {"t": blocks_without_the_gil}
        worker = Worker(store, handlers, lease_seconds=LEASE_SECONDS)
        worker.run(until_empty=True)
        item = store.work.get(item.id)
    assert (item.output, item.fence, item.rescues) == ("kept", 1, 0)
    assert worker.counts == {"completed": 1}


def test_a_handler_that_blocks_the_event_loop_keeps_its_lease(place: dict[str, Any]) -> None:
    async def run() -> Any:
        async with await holdfast.aopen(**place, durability="normal") as store:
            item = await store.work.submit("t")
            worker = Worker(store, {"t": blocks_the_loop}, lease_seconds=LEASE_SECONDS)
            await worker.run(until_empty=True)
            return await store.work.get(item.id)

    with Fleet(sweep=sweep) as fleet:
        fleet.start("sweep", place)
        item = asyncio.run(run())
    assert (item.output, item.fence, item.rescues) == ("kept", 1, 0)


def hold_the_gil(place: dict[str, Any], said: str) -> None:
    """A worker whose handler lets no other thread of its process run."""
    logging.basicConfig(filename=said, format="%(message)s", force=True)

    def handler(item: Any) -> str:
        if item.attempts > 1:
            return "by another attempt"
        write_line(said, "started")
        ctypes.PyDLL(None).sleep(int(BLOCKED_SECONDS))
        return "too late"

    with holdfast.open(**place, durability="normal") as store:
        Worker(store, {"t": handler}, lease_seconds=LEASE_SECONDS, concurrency=2).run()


def test_a_handler_that_holds_the_gil_is_fenced_and_says_so(
    place: dict[str, Any], tmp_path: Path
) -> None:
    said = str(tmp_path / "said")
    with Fleet(sweep=sweep, worker=hold_the_gil) as fleet:
        fleet.start("sweep", place)
        with holdfast.open(**place, durability="normal") as store:
            id = store.work.submit("t").id
            fleet.start("worker", place, said)
            wait_until(lambda: store.work.get(id).status == "completed")
            item = store.work.get(id)
            lost = f"work item {id}: the lease with fence 1 is lost or was not renewed in time"
            wait_until(lambda: [line for line in read_lines(said) if line.startswith(lost)])
    assert (item.output, item.fence, item.rescues) == ("by another attempt", 2, 1)


def test_one_item_is_never_run_twice_at_once_in_a_process(
    place: dict[str, Any], tmp_path: Path
) -> None:
    """A lost attempt whose handler goes on is waited for before the next one begins here."""
    said = str(tmp_path / "said")

    def handler(item: Any) -> str:
        write_line(said, f"began {item.fence}")
        if item.fence == 1:
            # Fenced by recovery, then raised again by the next claim.
            wait_until(lambda: store.work.get(item.id).fence == 3, seconds=30)
            time.sleep(0.2)
        write_line(said, f"ended {item.fence}")
        return "done"

    options: dict[str, Any] = {"poll_seconds": 0.05, "sweep_interval_seconds": 0.1}
    with holdfast.open(**place, durability="normal") as store:
        item = store.work.submit("t")
        worker = Worker(store, {"t": handler}, instance="boot", lease_seconds=1, **options)
        thread = threading.Thread(target=worker.run, daemon=True)
        thread.start()
        wait_until(lambda: read_lines(said))
        # Another process claims to be this one.
        store.recover("another", instance="boot")
        wait_until(lambda: store.work.get(item.id).status == "completed")
        worker.stop()
        thread.join()
    assert read_lines(said) == ["began 1", "ended 1", "began 3", "ended 3"]
    assert worker.counts == {"lost": 1, "completed": 1}

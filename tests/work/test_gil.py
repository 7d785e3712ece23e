"""Handlers that block: they keep their lease, unless they keep Python itself from running."""

from __future__ import annotations

import asyncio
import ctypes
import logging
import os
import threading
import time
from pathlib import Path
from typing import Any

import holdfast
from holdfast import VirtualClock, Worker
from tests.work.fleet import Fleet, read_lines, wait_until, write_line
from tests.work.working import unhurried

LEASE_SECONDS = 0.6
GIL_LEASE_SECONDS = 3.0


class Blocking:
    """Handlers that block for three lengths of their lease, while expired leases are taken away."""

    def __init__(self, place: dict[str, Any]) -> None:
        self.place = {**place, "durability": "normal", "clock": VirtualClock()}

    def plain(self, item: Any) -> str:
        clock = self.place["clock"]
        with holdfast.open(**self.place) as store:

            def expires_at() -> int:
                return store.work.get(item.id).lease_expires_at or 0

            for _ in range(6):
                before = expires_at()
                clock.advance(LEASE_SECONDS / 2)
                wait_until(lambda: expires_at() > before)  # noqa: B023
                store.work.sweep()
        return "kept"

    async def in_the_loop(self, item: Any) -> str:
        return self.plain(item)


def test_a_handler_that_blocks_keeps_its_lease(place: dict[str, Any]) -> None:
    blocking = Blocking(place)
    with unhurried(), holdfast.open(**blocking.place) as store:
        item = store.work.submit("t")
        worker = Worker(store, {"t": blocking.plain}, lease_seconds=LEASE_SECONDS)
        worker.run(until_empty=True)
        item = store.work.get(item.id)
    assert (item.output, item.fence, item.rescues) == ("kept", 1, 0)
    assert worker.counts == {"completed": 1}


def test_a_handler_that_blocks_the_event_loop_keeps_its_lease(place: dict[str, Any]) -> None:
    blocking = Blocking(place)

    async def run() -> Any:
        async with await holdfast.aopen(**blocking.place) as store:
            item = await store.work.submit("t")
            worker = Worker(store, {"t": blocking.in_the_loop}, lease_seconds=LEASE_SECONDS)
            await worker.run(until_empty=True)
            return await store.work.get(item.id)

    with unhurried():
        item = asyncio.run(run())
    assert (item.output, item.fence, item.rescues) == ("kept", 1, 0)


def sweep(place: dict[str, Any]) -> None:
    """Take away every lease that runs out, as soon as it does."""
    with holdfast.open(**place, durability="normal") as store:
        while True:
            store.work.sweep()
            time.sleep(0.05)


def hold_the_gil(place: dict[str, Any], said: str, go_on: str) -> None:
    """A worker whose handler lets no other thread of its process run."""
    logging.basicConfig(filename=said, format="%(message)s", force=True)
    descriptor = os.open(go_on, os.O_RDONLY | os.O_NONBLOCK)
    os.set_blocking(descriptor, True)

    def handler(item: Any) -> str:
        if item.attempts > 1:
            return "by another attempt"
        write_line(said, "started")
        ctypes.PyDLL(None).read(descriptor, ctypes.create_string_buffer(1), 1)
        return "too late"

    with holdfast.open(**place, durability="normal") as store:
        Worker(store, {"t": handler}, lease_seconds=GIL_LEASE_SECONDS, concurrency=2).run()


def test_a_handler_that_holds_the_gil_is_fenced_and_says_so(
    place: dict[str, Any], tmp_path: Path
) -> None:
    said, go_on = str(tmp_path / "said"), str(tmp_path / "go")
    os.mkfifo(go_on)
    writer = os.open(go_on, os.O_RDWR)
    with Fleet(sweep=sweep, worker=hold_the_gil) as fleet:
        fleet.start("sweep", place)
        with holdfast.open(**place, durability="normal") as store:
            id = store.work.submit("t").id
            fleet.start("worker", place, said, go_on)
            wait_until(lambda: store.work.get(id).rescues)
            os.write(writer, b"x")
            wait_until(lambda: store.work.get(id).status == "completed")
            item = store.work.get(id)
            lost = f"work item {id}: the lease with fence 1 is lost or was not renewed in time"
            wait_until(lambda: [line for line in read_lines(said) if line.startswith(lost)])
    os.close(writer)
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
            wait_until(lambda: store.work.get(item.id).fence == 3)
            time.sleep(0.2)
        write_line(said, f"ended {item.fence}")
        return "done"

    options: dict[str, Any] = {"poll_seconds": 0.05, "sweep_interval_seconds": 0.1}
    with holdfast.open(**place, durability="normal") as store:
        item = store.work.submit("t")
        worker = Worker(store, {"t": handler}, instance="boot", lease_seconds=600, **options)
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

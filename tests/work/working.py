"""Workers beside a test, in both colours."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import holdfast
from holdfast import Worker
from holdfast.testing.subject import Subject, done

SECONDS_MAX = 180


async def opened(subject: Subject, **arguments: Any) -> Any:
    return await subject.open(durability="normal", **arguments)


async def work(store: Any, handlers: dict[str, Any], **arguments: Any) -> Worker[Any]:
    """Run a worker until nothing is ready and nothing runs."""
    worker = Worker(store, handlers, **arguments)
    await done(worker.run(until_empty=True))
    return worker


async def ended(store: Any, id: str) -> Any:
    """Wait until an item has ended, and return it."""
    return await until(lambda: store.work.get(id), lambda item: item.completed_at is not None)


async def until(look: Callable[[], Any], is_wanted: Callable[[Any], bool]) -> Any:
    deadline = time.monotonic() + SECONDS_MAX
    while not is_wanted(found := await done(look())):
        assert time.monotonic() < deadline, f"it took too long: {found!r}"
        await asyncio.sleep(0.01)
    return found


@contextlib.contextmanager
def unhurried() -> Iterator[None]:
    """Let no holder give its lease up by itself, however long the machine stands still."""
    with mock.patch("holdfast.leases.SELF_FENCE_SHARE", -1000.0):
        yield


@contextlib.asynccontextmanager
async def running(store: Any, handlers: dict[str, Any], **arguments: Any) -> Any:
    """Run a worker beside the test, and drain it at the end."""
    worker: Any = Worker(store, handlers, **arguments)
    is_async = isinstance(store, holdfast.AsyncStore)
    task = asyncio.ensure_future(worker.run() if is_async else asyncio.to_thread(worker.run))
    try:
        yield worker
    finally:
        worker.stop()
        await task

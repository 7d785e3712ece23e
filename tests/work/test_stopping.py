"""Handlers are cancelled and workers are stopped, and no retry is spent."""

from __future__ import annotations

import asyncio
import threading
import time
from typing import Any

import pytest

import holdfast
from holdfast import LeaseLost, Submission, VirtualClock, WorkCancelled, Worker
from holdfast.testing.subject import Subject, done
from tests.checkpoints.colours import both_colours
from tests.work.working import SECONDS_MAX, ended, opened, running, unhurried, until


@both_colours
async def test_a_worker_that_is_stopped_before_it_runs_takes_nothing(subject: Subject) -> None:
    store = await opened(subject)
    item = await done(store.work.submit("t"))
    worker: Any = Worker(store, {"t": lambda item: None})
    worker.stop()
    await done(worker.run())
    assert worker.is_stopping
    assert not worker.is_stopped_at_once
    assert (await done(store.work.get(item.id))).attempts == 0


@both_colours
async def test_a_cancellation_reaches_the_running_handler(subject: Subject) -> None:
    store = await opened(subject, clock=VirtualClock())
    started, heard = threading.Event(), []

    def plain(item: Any) -> None:
        started.set()
        deadline = time.monotonic() + SECONDS_MAX
        while time.monotonic() < deadline:
            try:
                item.check()
            except WorkCancelled:
                heard.append(item.is_cancelled)
                raise
            time.sleep(0.01)

    async def asynchronous(item: Any) -> None:
        started.set()
        try:
            await asyncio.sleep(SECONDS_MAX)
        except asyncio.CancelledError:
            heard.append(item.is_cancelled)
            raise

    handlers = {"plain": plain, "asynchronous": asynchronous}
    with unhurried():
        async with running(store, handlers, lease_seconds=0.6) as worker:
            for name in handlers:
                started.clear()
                item = await done(store.work.submit(name))
                await asyncio.to_thread(started.wait, SECONDS_MAX)
                assert await done(store.work.cancel(item.id)) == "in_progress"
                item = await ended(store, item.id)
                assert (item.status, item.retry_count) == ("cancelled", 0)
    assert heard == [True, True]
    assert worker.counts == {"cancelled": 2}


@both_colours
async def test_a_cancelled_session_stops_the_handlers_of_its_items(subject: Subject) -> None:
    store = await opened(subject, clock=VirtualClock())
    session = await done(store.session("s"))
    started, told = threading.Event(), threading.Event()

    def handler(item: Any) -> None:
        started.set()
        deadline = time.monotonic() + SECONDS_MAX
        while not item.is_lost and time.monotonic() < deadline:
            time.sleep(0.01)
        told.set()
        item.session.save(late=True)

    item = await done(store.work.submit("t", session=session))
    with unhurried():
        async with running(store, {"t": handler}, lease_seconds=0.6) as worker:
            await asyncio.to_thread(started.wait, SECONDS_MAX)
            await done(session.cancel())
            assert await asyncio.to_thread(told.wait, SECONDS_MAX)
    assert (await done(store.work.get(item.id))).status == "cancelled"
    assert worker.counts == {"lost": 1}
    assert (await done(session.latest())).channels == {}


@both_colours
async def test_stopping_gives_back_what_was_not_started(subject: Subject) -> None:
    store = await opened(subject)
    started, go_on = threading.Event(), threading.Event()

    def handler(item: Any) -> str:
        started.set()
        assert go_on.wait(SECONDS_MAX)
        return "drained" if item.is_draining else "too early"

    ids = [
        item.id
        for item in await done(store.work.submit_many([Submission("t", n) for n in range(5)]))
    ]
    async with running(store, {"t": handler}, concurrency=1, prefetch=4) as worker:
        await asyncio.to_thread(started.wait, SECONDS_MAX)
        worker.stop()
        look = lambda: store.work.list(status="pending")  # noqa: E731
        await until(look, lambda found: len(found) == 4)
        go_on.set()
        await until(lambda: store.work.get(ids[0]), lambda item: item.status == "completed")
    items = [await done(store.work.get(id)) for id in ids]
    assert items[0].output == "drained"
    assert [(each.retry_count, each.releases) for each in items[1:]] == [(0, 1)] * 4
    assert worker.counts == {"completed": 1, "released": 4}


@both_colours
async def test_stopping_twice_gives_everything_back_at_once(subject: Subject) -> None:
    """A plain handler cannot be stopped; what it does afterwards changes nothing."""
    store = await opened(subject)
    session = await done(store.session("s"))
    started, go_on = threading.Semaphore(0), threading.Event()
    refused: list[type] = []

    def plain(item: Any) -> str:
        started.release()
        assert go_on.wait(SECONDS_MAX)
        for write in (item.complete, lambda: item.session.save(late=1)):
            try:
                write()
            except LeaseLost as error:
                refused.append(type(error))
        return "too late"

    async def asynchronous(item: Any) -> None:
        started.release()
        await asyncio.sleep(SECONDS_MAX)

    ids = [
        (await done(store.work.submit(t, session=session))).id for t in ("plain", "asynchronous")
    ]
    async with running(store, {"plain": plain, "asynchronous": asynchronous}) as worker:
        for _ in ids:
            assert await asyncio.to_thread(started.acquire, timeout=SECONDS_MAX)
        worker.stop()
        worker.stop()
    items = [await done(store.work.get(id)) for id in ids]
    assert [(each.status, each.releases, each.retry_count) for each in items] == [
        ("pending", 1, 0)
    ] * 2
    assert worker.counts == {"released": 2}
    go_on.set()
    await until(lambda: refused, lambda found: len(found) == 2)
    assert await done(session.latest()) is None
    assert (await done(store.work.get(ids[0]))).status == "pending"


def test_a_cancelled_async_worker_drains(place: dict[str, Any]) -> None:
    async def run() -> None:
        async with await holdfast.aopen(**place) as store:
            started = asyncio.Event()

            async def handler(item: Any) -> str:
                started.set()
                await asyncio.sleep(0.2)
                return "finished"

            item = await store.work.submit("t")
            task = asyncio.ensure_future(Worker(store, {"t": handler}).run())
            await started.wait()
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert (await store.work.get(item.id)).output == "finished"

    asyncio.run(run())

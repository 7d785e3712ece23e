"""Handlers that do not stop: their slots go to other items, and what they do changes nothing."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

import holdfast
from holdfast import LeaseLost, Worker
from holdfast.testing.subject import Subject, done
from holdfast.worker.pools import ThreadPool
from tests.checkpoints.colours import both_colours
from tests.work.fleet import wait_until
from tests.work.working import SECONDS_MAX, ended, opened, running, until

# Long enough for a busy machine to renew it, short enough to notice a cancellation soon.
OPTIONS: dict[str, Any] = {"lease_seconds": 9, "poll_seconds": 0.05, "drain_seconds": 0.1}


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("holdfast.worker.loop.STOP_SECONDS", 0.05)
    monkeypatch.setattr("holdfast.work.transitions.RETRY_SECONDS", 0.02)


class Stubborn:
    """Handlers that go on until they are let go, whatever they are told."""

    def __init__(self) -> None:
        self.go_on = threading.Event()
        self.started = threading.Semaphore(0)
        self.refused: list[str] = []

    def plain(self, item: Any) -> str:
        if item.input == "healthy":
            return "served"
        self.started.release()
        assert self.go_on.wait(SECONDS_MAX)
        try:
            item.session.save(late=True)
        except LeaseLost as error:
            self.refused.append(type(error).__name__)
        return "too late"

    async def asynchronous(self, item: Any) -> str:
        if item.input == "healthy":
            return "served"
        self.started.release()
        until = time.monotonic() + SECONDS_MAX
        while not self.go_on.is_set():
            assert time.monotonic() < until
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.sleep(0.02)
        try:
            await done(item.session.save(late=True))
        except LeaseLost as error:
            self.refused.append(type(error).__name__)
        return "too late"

    async def begun(self, count: int) -> None:
        for _ in range(count):
            assert await asyncio.to_thread(self.started.acquire, timeout=SECONDS_MAX)


@contextlib.contextmanager
def logged() -> Iterator[list[str]]:
    """Collect what the worker logs."""
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(  # type: ignore[method-assign]
        f"{record.levelname} {record.getMessage()}"
    )
    log = logging.getLogger("holdfast.worker")
    before = log.level
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    try:
        yield lines
    finally:
        log.removeHandler(handler)
        log.setLevel(before)


async def _hung(store: Any, stubborn: Stubborn, count: int) -> list[Any]:
    """Submit items that hang, each of a session of its own, and wait until they run."""
    sessions = [await done(store.session(f"s{n}")) for n in range(count)]
    for session in sessions:
        await done(store.work.submit("t", session=session))
    await stubborn.begun(count)
    return sessions


@both_colours
async def test_the_slots_of_handlers_that_do_not_stop_go_to_other_items(subject: Subject) -> None:
    store = await opened(subject)
    stubborns = [Stubborn(), Stubborn()]
    handlers = [stubborns[0].plain, stubborns[1].asynchronous]
    for turn, (stubborn, handler) in enumerate(zip(stubborns, handlers, strict=True)):
        with logged() as lines:
            async with running(store, {"t": handler}, concurrency=2, **OPTIONS) as worker:
                for session in await _hung(store, stubborn, 2):
                    await done(session.cancel())
                healthy = await done(store.work.submit("t", "healthy"))
                assert (await ended(store, healthy.id)).output == "served"
                await until(lambda: worker.abandoned, lambda count: count == 2)
                # An item has ended in the database before the worker has counted it.
                await until(
                    lambda: worker.counts, lambda counts: counts == {"lost": 2, "completed": 1}
                )
                stubborn.go_on.set()
                await until(lambda: worker.abandoned, lambda count: count == 0)
                # Their threads are given back: only as many items as before run at once.
                again = await done(store.work.submit("t", "healthy"))
                assert (await ended(store, again.id)).output == "served"
            assert worker.counts == {"lost": 2, "completed": 2}
        assert stubborn.refused == ["LeaseLost"] * 2
        text = "\n".join(lines)
        assert "still runs after its item was cancelled; its slot is free again" in text
        assert "2 such handlers run now" in text
        assert "0 such handlers run now" in text
        assert "INFO work item" in text
        assert "is lost or was not renewed" not in text, turn
        for n in range(2):
            session = await done(store.find_session(f"s{n}"))
            assert (await done(session.latest())).channels == {}
            await done(session.delete(force=True))


@both_colours
async def test_an_item_whose_handler_ignores_a_cancellation_is_cancelled(subject: Subject) -> None:
    store = await opened(subject)
    for kind in ("plain", "asynchronous"):
        stubborn = Stubborn()
        with logged() as lines:
            handlers = {"t": getattr(stubborn, kind)}
            async with running(store, handlers, concurrency=1, **OPTIONS) as worker:
                session = await done(store.session(kind))
                item = await done(store.work.submit("t", session=session))
                await stubborn.begun(1)
                assert await done(store.work.cancel(item.id)) == "in_progress"
                item = await ended(store, item.id)
                assert (item.status, item.retry_count) == ("cancelled", 0)
                healthy = await done(store.work.submit("t", "healthy"))
                assert (await ended(store, healthy.id)).output == "served"
                stubborn.go_on.set()
                await until(lambda: worker.abandoned, lambda count: count == 0)
        assert worker.counts == {"cancelled": 1, "completed": 1}
        assert stubborn.refused == ["LeaseLost"]
        told = f"INFO work item {item.id} (t) was cancelled; its handler is told to stop"
        assert told in lines


@both_colours
async def test_at_most_as_many_are_abandoned_as_run_at_once(subject: Subject) -> None:
    store = await opened(subject)
    stubborn = Stubborn()
    with logged() as lines:
        async with running(store, {"t": stubborn.plain}, concurrency=1, **OPTIONS) as worker:
            for n in range(2):
                session = await done(store.session(f"s{n}"))
                await done(store.work.submit("t", session=session))
                await stubborn.begun(1)
                await done(session.cancel())
            healthy = await done(store.work.submit("t", "healthy"))
            full = "its slot stays taken, because 1 such handler runs already without a slot"
            await until(lambda: lines, lambda found: any(full in line for line in found))
            assert worker.abandoned == 1
            assert (await done(store.work.get(healthy.id))).attempts == 0
            stubborn.go_on.set()
            assert (await ended(store, healthy.id)).output == "served"
    assert len([line for line in lines if line.startswith("ERROR") and full in line]) == 1
    assert worker.counts == {"lost": 2, "completed": 1}


@both_colours
async def test_a_worker_ends_without_the_handlers_that_it_abandoned(subject: Subject) -> None:
    """Also one that runs until nothing is left."""
    store = await opened(subject)
    stubborn = Stubborn()
    session = await done(store.session("s"))
    await done(store.work.submit("t", session=session))
    worker: Any = Worker(store, {"t": stubborn.plain}, **OPTIONS)
    is_async = isinstance(store, holdfast.AsyncStore)
    run = worker.run(until_empty=True) if is_async else None
    with logged() as lines:
        task = asyncio.ensure_future(run or asyncio.to_thread(worker.run, until_empty=True))
        await stubborn.begun(1)
        await done(session.cancel())
        await asyncio.wait_for(task, SECONDS_MAX)
    assert worker.abandoned == 1
    assert any(line.endswith("; the worker ends without it") for line in lines)
    stubborn.go_on.set()
    await until(lambda: stubborn.refused, lambda found: found == ["LeaseLost"])


@both_colours
async def test_one_process_does_not_run_an_item_beside_its_abandoned_handler(
    subject: Subject,
) -> None:
    """The item is taken away, so it is ready again; only another process may run it now."""
    store = await opened(subject)
    started, go_on, runs = threading.Event(), threading.Event(), []

    def handler(item: Any) -> int:
        runs.append(item.fence)
        if len(runs) == 1:
            started.set()
            assert go_on.wait(SECONDS_MAX)
        assert go_on.is_set(), "it runs twice at once"
        return len(runs)

    item = await done(store.work.submit("t"))
    async with running(store, {"t": handler}, concurrency=2, **OPTIONS) as worker:
        assert await asyncio.to_thread(started.wait, SECONDS_MAX)
        await done(store.work.release(item.id, reason="it hangs"))
        await until(lambda: worker.abandoned, lambda count: count == 1)
        look = lambda: store.work.get(item.id)  # noqa: E731
        # Once for the attempt that waited for the handler, and again for the next one.
        await until(look, lambda found: found.releases >= 3 or len(runs) > 1)
        assert len(runs) == 1
        go_on.set()
        found = await ended(store, item.id)
    assert (found.status, found.retry_count) == ("completed", 0)


def test_a_pool_has_the_threads_that_it_may_have() -> None:
    go_on, at_once = threading.Semaphore(0), []

    def work(job: int) -> None:
        at_once.append(job)
        go_on.acquire()
        at_once.remove(job)

    pool: ThreadPool[int] = ThreadPool(1, work)
    pool.put(range(6))
    wait_until(lambda: at_once == [0])
    pool.resize(2)
    wait_until(lambda: sorted(at_once) == [0, 1])
    pool.resize(1)
    go_on.release()
    wait_until(lambda: len(at_once) == 1)
    pool.put([6])
    assert len(at_once) == 1
    for _ in range(6):
        go_on.release()
    wait_until(lambda: not at_once)
    pool.put([7])
    wait_until(lambda: at_once == [7])
    go_on.release()
    pool.close()


@both_colours
async def test_an_item_taken_away_twice_while_its_handler_runs_costs_no_slot(
    subject: Subject,
) -> None:
    """Attempts that wait for the handler of an earlier one end, whatever becomes of them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("holdfast.worker.loop.STOP_SECONDS", SECONDS_MAX)
        await _taken_away_twice(await opened(subject))


async def _taken_away_twice(store: Any) -> None:
    started, go_on, most = threading.Event(), threading.Event(), 0
    running_now: set[int] = set()

    def handler(item: Any) -> str:
        nonlocal most
        running_now.add(item.fence)
        most = max(most, len(running_now))
        started.set()
        assert go_on.wait(SECONDS_MAX)
        running_now.remove(item.fence)
        return "done"

    item = await done(store.work.submit("t"))
    worker: Any = Worker(store, {"t": handler}, concurrency=4, **OPTIONS)
    is_async = isinstance(store, holdfast.AsyncStore)
    run = worker.run(until_empty=True) if is_async else None
    task = asyncio.ensure_future(run or asyncio.to_thread(worker.run, until_empty=True))
    assert await asyncio.to_thread(started.wait, SECONDS_MAX)
    for attempts in (2, 3):
        await done(store.work.release(item.id, reason="it hangs"))
        await until(
            lambda: store.work.get(item.id),
            lambda found, least=attempts: found.attempts >= least,  # type: ignore[misc]
        )
    go_on.set()
    await asyncio.wait_for(task, SECONDS_MAX)
    found = await done(store.work.get(item.id))
    assert (found.status, found.output) == ("completed", "done")
    assert worker.counts == {"lost": 2, "completed": 1}
    assert most == 1, "it ran twice at once"

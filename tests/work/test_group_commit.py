"""Completions that come together are written together, and none harms another."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import psycopg
import pytest

import holdfast
from holdfast import StoreUnavailable, Submission, Worker
from holdfast.kernel.driver import Hooks, Point, Trace
from holdfast.testing.subject import Subject, done
from holdfast.worker.pools import GroupCommit, TaskPool, ThreadPool
from tests.checkpoints.colours import both_colours
from tests.work.fleet import Fleet, read_lines, wait_until, write_line
from tests.work.test_outages import locked
from tests.work.working import SECONDS_MAX, opened, running, until

ITEMS = 10
# How long what has returned needs at most to be handed over.
HANDED_OVER_SECONDS = 0.3


class Handlers:
    """Handlers of both kinds that begin, and return once they may."""

    def __init__(self) -> None:
        self._begun = threading.Semaphore(0)
        self._returned = threading.Semaphore(0)
        self._go = threading.Event()
        self.runs: Counter[Any] = Counter()

    def plain(self, item: Any) -> Any:
        self.runs[item.input] += 1
        self._begun.release()
        assert self._go.wait(SECONDS_MAX)
        self._returned.release()
        return item.input

    async def asynchronous(self, item: Any) -> Any:
        self.runs[item.input] += 1
        self._begun.release()
        while not self._go.is_set():  # noqa: ASYNC110 - it is set by another thread
            await asyncio.sleep(0.01)
        self._returned.release()
        return item.input

    async def all_begun(self) -> None:
        await _acquired(self._begun, ITEMS)

    async def all_return(self) -> None:
        """Let them return, and wait until they have."""
        self._go.set()
        await _acquired(self._returned, ITEMS)
        await asyncio.sleep(HANDED_OVER_SECONDS)


async def _acquired(semaphore: threading.Semaphore, count: int) -> None:
    for _ in range(count):
        assert await asyncio.to_thread(semaphore.acquire, timeout=SECONDS_MAX)


def completed(store: Any, type_: str) -> Callable[[], Any]:
    return lambda: store.work.list(status="completed", type=type_)


def is_full(found: Any) -> bool:
    return len(found) == ITEMS


async def submitted(store: Any, kind: str, *, in_session: bool) -> tuple[str, list[Any]]:
    """Submit items of a type of their own; return it and them."""
    type_ = f"{kind} {in_session}"
    session = await done(store.session(type_)) if in_session else None
    wanted = [Submission(type_, n, session=session) for n in range(ITEMS)]
    return type_, await done(store.work.submit_many(wanted))


KINDS = [(kind, in_session) for kind in ("plain", "asynchronous") for in_session in (False, True)]


@both_colours
async def test_what_returns_together_is_completed_in_one_commit(subject: Subject) -> None:
    traces: list[Trace] = []
    store = await opened(subject, hooks=Hooks(trace=traces.append))
    for kind, in_session in KINDS:
        handlers = Handlers()
        type_, _ = await submitted(store, kind, in_session=in_session)
        async with running(store, {type_: getattr(handlers, kind)}, concurrency=ITEMS) as worker:
            await handlers.all_begun()
            traces.clear()
            with locked(subject.place):
                await handlers.all_return()
            found = await until(completed(store, type_), is_full)
            # A trace is told after its commit.
            turns = await until(lambda: [t for t in traces if t.call == "turn"], bool)
            # The first may have gone ahead of the others, and a claim that found nothing follows.
            assert len(turns) <= 3, (kind, in_session)
        assert {item.output for item in found} == set(range(ITEMS))
        assert worker.counts == {"completed": ITEMS}
        if in_session:
            events = [event.kind for event in await done(store.events(type_, limit=100))]
            assert events.count("work_completed") == ITEMS


@both_colours
async def test_one_lost_lease_among_ten_harms_no_other(subject: Subject) -> None:
    store = await opened(subject)
    for kind, in_session in KINDS:
        handlers = Handlers()
        type_, items = await submitted(store, kind, in_session=in_session)
        async with running(store, {type_: getattr(handlers, kind)}, concurrency=ITEMS) as worker:
            await handlers.all_begun()
            stolen = await done(store.work.get(items[3].id, fence=1))
            await done(stolen.release())
            with locked(subject.place):
                await handlers.all_return()
            found = await until(completed(store, type_), is_full)
        assert worker.counts == {"completed": ITEMS, "lost": 1}, (kind, in_session)
        attempts = {item.input: (item.attempts, item.retry_count) for item in found}
        assert attempts == dict.fromkeys(range(ITEMS), (1, 0)) | {3: (2, 0)}
        assert handlers.runs == dict.fromkeys(range(ITEMS), 1) | {3: 2}


@both_colours
async def test_after_a_commit_that_failed_each_is_completed_by_itself(subject: Subject) -> None:
    fails: list[Point] = []
    is_armed = threading.Event()

    def probe(point: Point) -> None:
        if point.call == "turn" and point.boundary == "commit" and is_armed.is_set():
            is_armed.clear()
            fails.append(point)
            raise StoreUnavailable("the disk is away; nothing was written")

    store = await opened(subject, hooks=Hooks(probe=probe))
    for kind, in_session in KINDS:
        handlers = Handlers()
        type_, _ = await submitted(store, kind, in_session=in_session)
        async with running(store, {type_: getattr(handlers, kind)}, concurrency=ITEMS) as worker:
            await handlers.all_begun()
            is_armed.set()
            with locked(subject.place):
                await handlers.all_return()
            found = await until(completed(store, type_), is_full)
        assert worker.counts == {"completed": ITEMS}, (kind, in_session)
        assert {item.attempts for item in found} == {1}
    assert len(fails) == len(KINDS)


@both_colours
async def test_a_worker_that_drains_completes_what_has_returned(subject: Subject) -> None:
    store = await opened(subject)
    for kind, in_session in KINDS:
        handlers = Handlers()
        type_, _ = await submitted(store, kind, in_session=in_session)
        async with running(store, {type_: getattr(handlers, kind)}, concurrency=ITEMS) as worker:
            await handlers.all_begun()
            lock = contextlib.ExitStack()
            lock.enter_context(locked(subject.place))
            await handlers.all_return()
            # Once it is being stopped.
            asyncio.get_running_loop().call_later(HANDED_OVER_SECONDS, lock.close)
        assert worker.counts == {"completed": ITEMS}, (kind, in_session)
        assert is_full(await done(completed(store, type_)()))


def test_an_item_that_cannot_be_completed_now_keeps_no_other_waiting(
    postgres_dsn: str, namespace: str
) -> None:
    """Somebody holds its row for longer than a commit may wait."""

    async def run() -> None:
        place = {"url": postgres_dsn, "namespace": namespace}
        # Stores of one server are made one after the other.
        holdfast.open(**place).close()  # type: ignore[arg-type]
        with holdfast.open(**place, busy_timeout_seconds=0.3) as store:  # type: ignore[arg-type]
            handlers = Handlers()
            type_, items = await submitted(store, "plain", in_session=False)
            hold = f'SELECT 1 FROM "{namespace}".hf_work WHERE id = %s FOR UPDATE'
            async with running(store, {type_: handlers.plain}, concurrency=ITEMS) as worker:
                await handlers.all_begun()
                with psycopg.connect(postgres_dsn) as other:
                    other.execute(hold.encode(), [items[3].id])
                    await handlers.all_return()
                    rest = await until(completed(store, type_), lambda f: len(f) == ITEMS - 1)
                    assert items[3].id not in {item.id for item in rest}
                found = await until(completed(store, type_), is_full)
            assert worker.counts == {"completed": ITEMS}
            assert {item.attempts for item in found} == {1}

    asyncio.run(run())


def work(place: dict[str, Any], runs: str, kind: str) -> None:
    """A worker process with many short items at once, until it is told to stop."""

    def plain(item: Any) -> int:
        write_line(runs, item.id)
        return int(item.input)

    async def asynchronous(item: Any) -> int:
        return plain(item)

    options: dict[str, Any] = {"concurrency": 8, "prefetch": 8, "lease_seconds": 300}
    if kind == "plain":
        with holdfast.open(**place) as store:
            Worker(store, {"t": plain}, **options).run()
        return

    async def run() -> None:
        async with await holdfast.aopen(**place) as store:
            await Worker(store, {"t": asynchronous}, **options).run()

    asyncio.run(run())


@pytest.mark.parametrize("kind", ["plain", "asynchronous"])
def test_a_worker_that_is_terminated_leaves_nothing_half_done(
    place: dict[str, Any], tmp_path: Path, kind: str
) -> None:
    """What its handlers have returned is completed, the rest is given back at once."""
    runs, items = str(tmp_path / "runs"), 2_000
    with Fleet(work=work) as fleet, holdfast.open(**place, durability="normal") as store:
        store.work.submit_many([Submission("t", n) for n in range(items)])
        pid = fleet.start("work", place, runs, kind)
        wait_until(lambda: len(read_lines(runs)) > 50)
        os.kill(pid, signal.SIGTERM)
        wait_until(lambda: not fleet.is_alive(pid))
        counts = {count.status: count.items for count in store.work.counts()}
        ran = read_lines(runs)
        assert len(ran) == len(set(ran)) == counts["completed"] >= 50
        assert set(counts) <= {"completed", "pending"}
        assert sum(counts.values()) == items
        assert {store.work.get(id).status for id in ran[-50:]} == {"completed"}


# The parts


def test_a_pool_runs_so_many_at_once_and_the_rest_in_order() -> None:
    meeting = threading.Barrier(3, timeout=SECONDS_MAX)
    ran: list[int] = []
    ended = threading.Semaphore(0)

    def job(number: int) -> None:
        ran.append(number)
        meeting.wait()
        ended.release()

    pool = ThreadPool(3, job)
    pool.put(range(9))
    assert all(ended.acquire(timeout=SECONDS_MAX) for _ in range(9))
    assert sorted(ran[:3]) == [0, 1, 2]
    assert sorted(ran) == list(range(9))
    pool.close()
    pool.put([10])
    time.sleep(0.05)
    assert 10 not in ran


def test_a_pool_in_a_loop_runs_so_many_at_once() -> None:
    async def run() -> None:
        now, most, ended = 0, 0, asyncio.Semaphore(0)

        async def job(_: int) -> None:
            nonlocal now, most
            now += 1
            most = max(most, now)
            await asyncio.sleep(0.001)
            now -= 1
            ended.release()

        pool = TaskPool(3, job, asyncio.get_running_loop())
        await asyncio.to_thread(pool.put, range(9))
        async with asyncio.timeout(SECONDS_MAX):
            for _ in range(9):
                await ended.acquire()
        assert most == 3

    asyncio.run(run())


def test_what_comes_while_a_group_is_written_is_the_next_group() -> None:
    written: list[list[str]] = []
    is_writing, go_on = threading.Event(), threading.Event()

    def write(group: Sequence[str]) -> None:
        written.append(list(group))
        if group == ["first"]:
            is_writing.set()
            assert go_on.wait(SECONDS_MAX)

    group = GroupCommit(write)
    leader = threading.Thread(target=group.add, args=("key", "first"))
    leader.start()
    assert is_writing.wait(SECONDS_MAX)
    group.add("key", "second")
    group.add("key", "third")
    group.add("other", "elsewhere")
    go_on.set()
    leader.join()
    group.add("key", "last")
    assert written == [["first"], ["elsewhere"], ["second", "third"], ["last"]]

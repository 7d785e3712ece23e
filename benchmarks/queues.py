"""Who keeps work: the contract of a queue, a fleet of worker processes, and Holdfast.

An item carries its number and is handled by noting the time in a slot of shared memory: so it is
known when each item was begun, by whichever process, and that none was lost.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import multiprocessing
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeAlias
from urllib.parse import urlsplit, urlunsplit

import psycopg

import holdfast

from .keepers import Place

Slots: TypeAlias = Any
"""Shared memory: when each item was begun, 0.0 for none."""

Serve: TypeAlias = Callable[[Place, Callable[[], None], Slots], None]
"""What a worker process does: get ready, call the function, and then work until it is ended."""

HOLDFAST, HOLDFAST_ASYNC = "Holdfast", "Holdfast async"
QUEUE = "bench"
BATCH = 10
START_SECONDS_MAX = 60.0
WORK_SECONDS_MAX = 60.0
POLL_SECONDS = 0.0005
FINISH_POLL_SECONDS = 0.02


class Queue:
    """Somebody who keeps work, on a place of its own."""

    name: str
    serve: Serve
    """How a worker process of it is run; a function of a module."""

    beside: str | None = HOLDFAST
    """Whose figures its own are a multiple of: an event loop is compared with an event loop."""

    claims_by_hand = True
    claims_many = True
    """What it offers below its own worker; its worker is measured in any case."""

    fleet_items = 2_000
    """How many items a fleet is given: enough for a second or two."""

    def __init__(self, place: Place, runner: asyncio.Runner) -> None:
        self.place = place
        self.runner = runner
        self._stack = contextlib.ExitStack()

    def open(self) -> None:
        """Make the tables, and open what enqueues and claims."""
        raise NotImplementedError

    def close(self) -> None:
        """Let go of the place."""
        self._stack.close()

    def enqueue(self, number: int) -> Any:
        """Put one item; the answer may have to be awaited."""
        raise NotImplementedError

    def enqueue_many(self, numbers: Sequence[int]) -> Any:
        """Put many items, as quickly as this queue can."""
        for number in numbers:
            self.enqueue(number)

    def work(self, limit: int) -> Any:
        """Claim up to so many items and complete them; return how many there were."""
        raise NotImplementedError

    def do(self, work: Callable[[], Any]) -> Any:
        """Do something once, in the event loop if it is to be awaited."""
        return self.times(work, 1)[1][-1]

    def times(self, work: Callable[[], Any], count: int) -> tuple[list[float], list[Any]]:
        """Do something so often; return the seconds and the answer of each time."""
        started = time.perf_counter()
        answer = work()
        if inspect.isawaitable(answer):
            return self.runner.run(_awaited(answer, work, count))
        spent, answers = [time.perf_counter() - started], [answer]
        for _ in range(count - 1):
            started = time.perf_counter()
            answers.append(work())
            spent.append(time.perf_counter() - started)
        return spent, answers

    def unfinished(self) -> int:
        """Return how many items are not completed yet."""
        raise NotImplementedError

    def drain(self) -> None:
        """Take out what is left."""
        while self.claims_by_hand and self.do(lambda: self.work(BATCH if self.claims_many else 1)):
            pass


async def _awaited(
    first: Any, work: Callable[[], Any], count: int
) -> tuple[list[float], list[Any]]:
    started = time.perf_counter()
    answers = [await first]
    spent = [time.perf_counter() - started]
    for _ in range(count - 1):
        started = time.perf_counter()
        answers.append(await work())
        spent.append(time.perf_counter() - started)
    return spent, answers


class Fleet:
    """Worker processes of one queue, which begin together."""

    def __init__(self, queue: Queue, count: int, slots: int) -> None:
        context = multiprocessing.get_context("spawn")
        self._queue = queue
        self.slots = context.RawArray("d", slots)
        self._go, ready = context.Event(), context.Semaphore(0)
        arguments = (type(queue).serve, queue.place, ready, self._go, self.slots)
        self._processes = [
            context.Process(target=_worker, args=arguments, daemon=True) for _ in range(count)
        ]
        for process in self._processes:
            process.start()
        for _ in self._processes:
            if not ready.acquire(timeout=START_SECONDS_MAX):
                self.stop()
                raise TimeoutError(f"a worker of {queue.name} did not start")

    def go(self) -> None:
        """Let them work."""
        self._go.set()

    def wait(self, slots: Sequence[int]) -> list[float]:
        """Wait until these items were begun; return when, in that order."""
        deadline = time.monotonic() + WORK_SECONDS_MAX
        waiting = list(slots)
        while waiting:
            time.sleep(POLL_SECONDS if len(slots) == 1 else 0.01)
            waiting = [slot for slot in waiting if not self.slots[slot]]
            if time.monotonic() > deadline:
                raise TimeoutError(f"{self._queue.name}: {len(waiting)} items were not begun")
        return sorted(self.slots[slot] for slot in slots)

    def finish(self) -> float:
        """Wait until nothing is left to be completed; return when that was."""
        deadline = time.monotonic() + WORK_SECONDS_MAX
        while left := self._queue.unfinished():
            if time.monotonic() > deadline:
                raise TimeoutError(f"{self._queue.name}: {left} items were not completed")
            time.sleep(FINISH_POLL_SECONDS)
        return time.monotonic()

    def stop(self) -> None:
        """End the processes, as a deployment does."""
        for process in self._processes:
            process.terminate()
        for process in self._processes:
            process.join(5)
            if process.is_alive():
                process.kill()
                process.join()

    def __enter__(self) -> Fleet:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


def _worker(serve: Serve, place: Place, ready: Any, go: Any, slots: Slots) -> None:
    def hold() -> None:
        ready.release()
        go.wait()

    serve(place, hold, slots)


@contextlib.contextmanager
def database(dsn: str) -> Iterator[Place]:
    """Yield a new database of a server, and drop it in the end."""
    name = f"bench_{uuid.uuid4().hex[:20]}"
    with psycopg.connect(dsn, autocommit=True) as connection:
        connection.execute(f'CREATE DATABASE "{name}"'.encode())
    try:
        yield Place(dsn=urlunsplit(urlsplit(dsn)._replace(path=f"/{name}")))
    finally:
        with psycopg.connect(dsn, autocommit=True) as connection:
            connection.execute(f'DROP DATABASE "{name}" WITH (FORCE)'.encode())


# Holdfast


def serve_holdfast(place: Place, hold: Callable[[], None], slots: Slots) -> None:
    """Run its worker, ten items at a time, each in a thread."""

    def handle(item: Any) -> None:
        slots[item.input] = time.monotonic()

    with holdfast.open(place.url) as store:
        worker = holdfast.Worker(store, {QUEUE: handle}, concurrency=BATCH)
        hold()
        worker.run()


def serve_holdfast_async(place: Place, hold: Callable[[], None], slots: Slots) -> None:
    """Run its worker, ten items at a time, in an event loop."""

    async def handle(item: Any) -> None:
        slots[item.input] = time.monotonic()

    async def work() -> None:
        async with await holdfast.aopen(place.url) as store:
            worker = holdfast.Worker(store, {QUEUE: handle}, concurrency=BATCH)
            hold()
            await worker.run()

    asyncio.run(work())


class HoldfastQueue(Queue):
    """`store.work`: one commit for a claim, one for a completion, or for ten of them."""

    name = HOLDFAST
    beside = None
    serve = staticmethod(serve_holdfast)

    def open(self) -> None:
        """Open the store."""
        self.store = self._stack.enter_context(holdfast.open(self.place.url))

    def enqueue(self, number: int) -> None:
        """Submit an item."""
        self.store.work.submit(QUEUE, number)

    def enqueue_many(self, numbers: Sequence[int]) -> None:
        """Submit items, a thousand in a commit."""
        for start in range(0, len(numbers), 1_000):
            part = numbers[start : start + 1_000]
            self.store.work.submit_many([holdfast.Submission(QUEUE, number) for number in part])

    def work(self, limit: int) -> int:
        """Claim and complete."""
        items = self.store.work.claim("bench", limit=limit, queues=QUEUE)
        if limit == 1:
            for item in items:
                item.complete()
        elif items:
            self.store.work.complete_many([(item, None) for item in items])
        return len(items)

    def unfinished(self) -> int:
        """Count what lives."""
        return sum(count.items for count in self.store.work.counts(finished=False))


class AsyncHoldfastQueue(Queue):
    """`store.work` in an event loop."""

    name = HOLDFAST_ASYNC
    serve = staticmethod(serve_holdfast_async)

    def open(self) -> None:
        """Open the store."""
        self.store = self.runner.run(holdfast.aopen(self.place.url))
        self._stack.callback(lambda: self.runner.run(self.store.close()))

    async def enqueue(self, number: int) -> None:
        """Submit an item."""
        await self.store.work.submit(QUEUE, number)

    async def enqueue_many(self, numbers: Sequence[int]) -> None:
        """Submit items in one commit."""
        await self.store.work.submit_many([holdfast.Submission(QUEUE, n) for n in numbers])

    async def work(self, limit: int) -> int:
        """Claim and complete."""
        items = await self.store.work.claim("bench", limit=limit, queues=QUEUE)
        if limit == 1:
            for item in items:
                await item.complete()
        elif items:
            await self.store.work.complete_many([(item, None) for item in items])
        return len(items)

    def unfinished(self) -> int:
        """Count what lives."""
        counts = self.do(lambda: self.store.work.counts(finished=False))
        return sum(count.items for count in counts)

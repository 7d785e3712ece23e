"""Load that stops by itself: tasks in an event loop, threads, and processes."""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import TypeAlias

from .measure import RATE, TIME, Figures, percentile
from .peers import Async, Sync

TICK_SECONDS = 0.001
GRACE_SECONDS = 180.0

Opener: TypeAlias = Callable[[], contextlib.AbstractContextManager[Sync]]
"""Opens a contestant in a worker process."""


def timed(operation: Sync, seconds: float) -> Figures:
    """Call an operation again and again and return its median latency."""
    latencies: list[float] = []
    deadline = time.perf_counter() + seconds
    while (started := time.perf_counter()) < deadline:
        operation()
        latencies.append(time.perf_counter() - started)
    return {TIME: statistics.median(latencies) * 1e6}


async def timed_async(operation: Async, seconds: float) -> Figures:
    """Await an operation again and again and return its median latency."""
    latencies: list[float] = []
    await repeat(operation, time.perf_counter() + seconds, latencies)
    return {TIME: statistics.median(latencies) * 1e6}


async def repeat(operation: Async, deadline: float, latencies: list[float]) -> None:
    """Await an operation again and again until the deadline."""
    while (started := time.perf_counter()) < deadline:
        await operation()
        latencies.append(time.perf_counter() - started)


async def tick(deadline: float) -> float:
    """Sleep a millisecond at a time and return the worst lateness: the loop's longest stall."""
    worst = 0.0
    while (started := time.perf_counter()) < deadline:
        await asyncio.sleep(TICK_SECONDS)
        worst = max(worst, time.perf_counter() - started - TICK_SECONDS)
    return worst


async def run_tasks(operations: Sequence[Async], seconds: float) -> list[float]:
    """Repeat every operation in a task of its own and return the latencies of all."""
    latencies: list[float] = []
    deadline = time.perf_counter() + seconds
    await asyncio.gather(*(repeat(operation, deadline, latencies) for operation in operations))
    return latencies


async def many_tasks(operations: Sequence[Async], seconds: float) -> Figures:
    """Repeat every operation in a task of its own, with a ticker beside them."""
    started = time.perf_counter()
    ticker = asyncio.create_task(tick(started + seconds))
    latencies = await run_tasks(operations, seconds)
    spent = time.perf_counter() - started
    return rates(latencies, spent) | {"stall ms": await ticker * 1e3}


async def only_tick(seconds: float) -> Figures:
    """Run the ticker alone: what the machine itself adds to a stall."""
    return {"stall ms": await tick(time.perf_counter() + seconds) * 1e3}


def rates(latencies: Sequence[float], seconds: float) -> Figures:
    """Return the rate and the latencies of some operations."""
    return {
        RATE: len(latencies) / seconds,
        "p50 ms": percentile(latencies, 0.5) * 1e3,
        "p99 ms": percentile(latencies, 0.99) * 1e3,
        "worst ms": max(latencies) * 1e3,
    }


def run_threads(operations: Sequence[Sync], seconds: float) -> list[float]:
    """Repeat every operation in a thread of its own and return the latencies of all."""

    def work(operation: Sync) -> list[float]:
        latencies: list[float] = []
        deadline = time.perf_counter() + seconds
        while (started := time.perf_counter()) < deadline:
            operation()
            latencies.append(time.perf_counter() - started)
        return latencies

    with ThreadPoolExecutor(len(operations)) as threads:
        return [latency for found in threads.map(work, operations) for latency in found]


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one process did in one round."""

    commits: int
    worst_seconds: float
    spent_seconds: float


class Workers:
    """Processes that wait for orders, so that all contestants are ready and take turns."""

    def __init__(self, openers: Sequence[Mapping[str, Opener]]) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipes: list[Connection] = []
        self._processes = []
        for mapping in openers:
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(theirs, mapping), daemon=True)
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)
        for pipe in self._pipes:
            _answer(pipe, GRACE_SECONDS)

    def round(self, name: str, count: int, seconds: float) -> Figures:
        """Let the first `count` processes write at once."""
        start_at = time.monotonic() + 0.05
        chosen = self._pipes[:count]
        for pipe in chosen:
            pipe.send((name, start_at, seconds))
        outcomes = [_answer(pipe, seconds + GRACE_SECONDS) for pipe in chosen]
        commits = [outcome.commits for outcome in outcomes]
        return {
            RATE: sum(commits) / max(outcome.spent_seconds for outcome in outcomes),
            "slowest": min(commits),
            "fastest": max(commits),
            "share": min(commits) / max(*commits, 1),
            "worst ms": max(outcome.worst_seconds for outcome in outcomes) * 1e3,
        }

    def close(self) -> None:
        """Stop the processes; one that does not stop is ended."""
        for pipe in self._pipes:
            with contextlib.suppress(OSError):
                pipe.send(None)
            pipe.close()
        for process in self._processes:
            process.join(5)
            if process.is_alive():
                process.kill()
                process.join()

    def __enter__(self) -> Workers:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@contextlib.contextmanager
def opened(openers: Mapping[str, Opener]) -> Iterator[dict[str, Sync]]:
    """Open every contestant of a process."""
    with contextlib.ExitStack() as stack:
        yield {name: stack.enter_context(opener()) for name, opener in openers.items()}


def _serve(pipe: Connection, openers: Mapping[str, Opener]) -> None:
    with contextlib.suppress(EOFError, KeyboardInterrupt), opened(openers) as operations:
        pipe.send(Outcome(0, 0, 0))
        while (order := pipe.recv()) is not None:
            name, start_at, seconds = order
            time.sleep(max(0.0, start_at - time.monotonic()))
            pipe.send(_work(operations[name], seconds))


def _work(operation: Sync, seconds: float) -> Outcome:
    commits, worst = 0, 0.0
    started = before = time.perf_counter()
    while before - started < seconds:
        operation()
        after = time.perf_counter()
        worst = max(worst, after - before)
        commits += 1
        before = after
    return Outcome(commits, worst, before - started)


def _answer(pipe: Connection, seconds: float) -> Outcome:
    if not pipe.poll(seconds):
        raise TimeoutError(f"a worker process gave no answer for {seconds:.0f} seconds")
    answer = pipe.recv()
    assert isinstance(answer, Outcome)
    return answer

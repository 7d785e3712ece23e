"""Who runs handlers: threads, or coroutines in an event loop."""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable, Coroutine, Iterable
from typing import Any, Generic, TypeVar

from ..kernel.threads import Thread

J = TypeVar("J")


class Crew(Generic[J]):
    """Up to `size` threads that take jobs in order, each as soon as a thread is free.

    One thread is woken at a time, and wakes the next if jobs are left once it has taken its own:
    so jobs that take no time are all done by the first, and nobody is woken in vain.
    """

    def __init__(self, size: int, work: Callable[[J], None]) -> None:
        self._size = size
        self._work = work
        self._jobs: deque[J] = deque()
        self._changed = threading.Condition(threading.Lock())
        self._threads = 0
        self._idle = 0
        self._is_waking = False
        self._is_closed = False

    def put(self, jobs: Iterable[J]) -> None:
        """Have jobs done."""
        with self._changed:
            self._jobs.extend(jobs)
            self._wake()

    def close(self) -> None:
        """Begin nothing more; what is under way is not waited for."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()

    def _wake(self) -> None:
        if not self._jobs or self._is_waking or self._is_closed:
            return
        if self._idle:
            self._is_waking = True
            self._changed.notify()
        elif self._threads < self._size:
            self._is_waking = True
            self._threads += 1
            name = f"holdfast-worker-{self._threads}"
            Thread(self._serve, name).start()

    def _serve(self) -> None:
        is_woken = True
        while True:
            with self._changed:
                if is_woken:
                    self._is_waking = is_woken = False
                while not self._jobs and not self._is_closed:
                    self._idle += 1
                    self._changed.wait()
                    self._idle -= 1
                    self._is_waking = False
                if self._is_closed:
                    return
                job = self._jobs.popleft()
                self._wake()
            self._work(job)


class LoopCrew(Generic[J]):
    """Up to `size` coroutines at once in an event loop, without a thread for each."""

    def __init__(
        self,
        size: int,
        work: Callable[[J], Coroutine[Any, Any, None]],
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        self._size = size
        self._work = work
        self._loop = loop
        self._jobs: deque[J] = deque()
        self._tasks: set[asyncio.Task[None]] = set()
        self._is_closed = False

    def put(self, jobs: Iterable[J]) -> None:
        """Have jobs done; from any thread."""
        self._loop.call_soon_threadsafe(self._add, jobs)

    def close(self) -> None:
        """Begin nothing more; what is under way is not waited for."""
        self._is_closed = True

    def _add(self, jobs: Iterable[J]) -> None:
        self._jobs.extend(jobs)
        self._fill()

    def _fill(self) -> None:
        while self._jobs and len(self._tasks) < self._size and not self._is_closed:
            task = self._loop.create_task(self._work(self._jobs.popleft()))
            self._tasks.add(task)
            task.add_done_callback(self._done)

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        self._fill()

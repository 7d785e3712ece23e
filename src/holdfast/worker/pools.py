"""Pools of threads and of coroutines that run handlers, and group commit for their results."""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable, Coroutine, Iterable, Sequence
from typing import Any, Generic, TypeVar

from ..kernel.threads import Thread

J = TypeVar("J")


class ThreadPool(Generic[J]):
    """Up to `size` threads that run jobs in order.

    One thread is woken at a time, and wakes the next if jobs are left after it has taken its own.
    So short jobs are all run by the first thread, and no thread is woken without need.
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
        """Run jobs as soon as threads are free."""
        with self._changed:
            self._jobs.extend(jobs)
            self._wake()

    def resize(self, size: int) -> None:
        """Change how many threads there may be; those too many end when they are idle."""
        with self._changed:
            self._size = size
            self._changed.notify_all()
            self._wake()

    def close(self) -> None:
        """Start no more jobs; do not wait for running ones."""
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
            Thread(self._serve, f"holdfast-worker-{self._threads}").start()

    def _serve(self) -> None:
        is_woken = True
        while True:
            with self._changed:
                if is_woken:
                    self._is_waking = is_woken = False
                while not self._jobs and not self._is_closed and self._threads <= self._size:
                    self._idle += 1
                    self._changed.wait()
                    self._idle -= 1
                    self._is_waking = False
                if self._is_closed or self._threads > self._size:
                    self._threads -= 1
                    self._wake()
                    return
                job = self._jobs.popleft()
                self._wake()
            self._work(job)


class TaskPool(Generic[J]):
    """Up to `size` concurrent coroutines in an event loop."""

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
        """Run jobs as soon as tasks are free. Thread-safe."""
        self._loop.call_soon_threadsafe(self._fill, jobs)

    def resize(self, size: int) -> None:
        """Change how many coroutines may run at once. Thread-safe."""
        self._size = size
        self._loop.call_soon_threadsafe(self._fill)

    def close(self) -> None:
        """Start no more jobs; do not wait for running ones."""
        self._is_closed = True

    def _fill(self, jobs: Iterable[J] = ()) -> None:
        self._jobs.extend(jobs)
        while self._jobs and len(self._tasks) < self._size and not self._is_closed:
            task = self._loop.create_task(self._work(self._jobs.popleft()))
            self._tasks.add(task)
            task.add_done_callback(self._done)

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        self._fill()


class GroupCommit(Generic[J]):
    """Writes results in groups by key; no key waits for another.

    The thread that adds the first result writes it, and then all that other threads have added
    meanwhile, which need not wait.
    """

    def __init__(self, write: Callable[[Sequence[J]], object]) -> None:
        self._write = write
        self._lock = threading.Lock()
        self._waiting: dict[str, list[J]] = {}

    def add(self, key: str, result: J) -> None:
        """Write a result, or leave it to the thread that is writing another one of this key."""
        with self._lock:
            is_writing = key in self._waiting
            self._waiting.setdefault(key, []).append(result)
        while not is_writing:
            with self._lock:
                if not (group := self._waiting[key]):
                    del self._waiting[key]
                    return
                self._waiting[key] = []
            self._write(group)


def within(seconds: float, function: Callable[[], object]) -> None:
    """Run a function in a thread, and wait for it at most this long."""
    thread = Thread(function, "holdfast-stopping")
    thread.start()
    thread.join(seconds)

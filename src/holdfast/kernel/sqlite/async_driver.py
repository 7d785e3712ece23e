"""The async SQLite driver: many calls of one event loop share a commit of the writer thread."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import ClassVar, TypeVar

import msgspec

from ..driver import AsyncDriver, DialectName, Execution
from ..flow import finish, require_loop
from ..operation import Call
from .connection import IDLE_READERS_MAX
from .driver import SqliteDriver
from .readonly import SqliteReader
from .transactions import Job

R = TypeVar("R")


class AsyncSqliteDriver(AsyncDriver):
    """Runs calls in an event loop: writes go to the writer thread, small reads run inline."""

    dialect: ClassVar[DialectName] = "sqlite"

    def __init__(self, twin: SqliteDriver | SqliteReader) -> None:
        super().__init__(twin)
        self._loop = asyncio.get_running_loop()
        self._readers = ThreadPoolExecutor(IDLE_READERS_MAX, "holdfast-reader")
        # Ordered by deadline, so that one timer serves them all.
        self._waiting: deque[_AsyncJob] = deque()
        self._timer: asyncio.TimerHandle | None = None

    async def run(self, call: Call[R]) -> R:
        """Run a call and return its result once it is durable."""
        twin, settings = self._twin, self.settings
        twin.require_usable()
        require_loop(self._loop)
        if call.operation.mode == "read_large":
            return await self._loop.run_in_executor(self._readers, twin.run, call)
        if call.operation.mode == "read" or not isinstance(twin, SqliteDriver):
            return twin.run(call)
        job = _AsyncJob(Execution(call, settings.services, has_all=True))
        job.execution.advance()
        job.wake = self._wake
        job.deadline = self._loop.time() + settings.busy_timeout_seconds
        twin.enqueue(job)
        self._waiting.append(job)
        if self._timer is None:
            self._timer = self._loop.call_at(job.deadline, self._give_up)
        await job.wait()
        if job.error is not None:
            raise job.error
        result: R = job.execution.result
        return result

    async def close(self) -> None:
        """Close the file."""
        try:
            await finish(asyncio.to_thread(self._twin.close))
        finally:
            if self._timer is not None:
                self._timer.cancel()
            await finish(asyncio.to_thread(self._readers.shutdown))

    def _wake(self, jobs: Sequence[Job]) -> None:
        """Notify the loop that a batch is done; called by the writer once per batch."""
        for job in jobs:
            if isinstance(job, _AsyncJob):
                job.has_outcome = True
        # The loop may be closed if the program ends while a job is in progress.
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._hand_out, jobs)

    def _hand_out(self, jobs: Sequence[Job]) -> None:
        try:
            for job in jobs:
                if isinstance(job, _AsyncJob):
                    job.set_done()
            while self._waiting and self._waiting[0].is_done:
                self._waiting.popleft()
        except BaseException:
            # Ctrl-C: a loop that goes on wakes the others.
            self._loop.call_soon(self._hand_out, jobs)
            raise

    def _give_up(self) -> None:
        """Withdraw the jobs whose deadline has passed."""
        now, waiting = self._loop.time(), self._waiting
        while waiting and (waiting[0].is_done or waiting[0].deadline <= now):
            job = waiting.popleft()
            if not job.is_done and job.claim():
                assert isinstance(self._twin, SqliteDriver)
                job.error = self._twin.busy()
                job.set_done()
        self._timer = self._loop.call_at(waiting[0].deadline, self._give_up) if waiting else None


def _future() -> asyncio.Future[None]:
    return asyncio.get_running_loop().create_future()


class _AsyncJob(Job, eq=False):
    """A job whose caller waits in an event loop."""

    is_done: bool = False
    has_outcome: bool = False
    """Set by the writer, before the loop is told."""
    deadline: float = 0.0
    _done: asyncio.Future[None] = msgspec.field(default_factory=_future)

    async def wait(self) -> None:
        """Wait for the outcome. After a cancellation the job has run completely or not at all."""
        cancelled: asyncio.CancelledError | None = None
        while not self.is_done:
            try:
                await self._done
            except asyncio.CancelledError as error:
                if self.claim():
                    self.is_done = True
                    raise
                cancelled = error
                if self.has_outcome:
                    # An interrupt of the loop may have cost what would tell.
                    break
                self._done = _future()
        if cancelled is not None:
            raise cancelled

    def set_done(self) -> None:
        """Wake the caller; called in its loop."""
        self.is_done = True
        if not self._done.done():
            self._done.set_result(None)

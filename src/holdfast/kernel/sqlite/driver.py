"""The SQLite driver: calls run inline when the writer is free, otherwise many share one commit."""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import os
import queue
import shutil
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import apsw

from ...errors import StoreBusy, StoreClosed, StoreForked, StoreUnavailable
from ..driver import DialectName, Progress, Settings, StoreMode, SyncDriver
from ..execution import Entrance, Execution
from ..flow import finish, require_loop
from ..operation import Call
from ..signals import Signals
from ..sql import Dialect
from ..threads import Thread
from . import fork
from .clock import store_clock
from .connection import (
    IDLE_READERS_MAX,
    connect,
    copy_pages,
    read_all,
    require_safe_library,
    translate,
    vacuum,
)
from .readonly import SqliteReader
from .watch import Watch
from .writer import Job, Writer

R = TypeVar("R")

BATCH_JOBS_MAX = 256
READ_TRIES_MAX = 2
_writing: weakref.WeakSet[SqliteEngine] = weakref.WeakSet()


class SqliteEngine:
    """One open file: its writer with the queue before it, and its readers."""

    def __init__(
        self,
        path: Path,
        settings: Settings,
        vfs: str | None = None,
        *,
        removed_on_close: Path | None = None,
    ) -> None:
        require_safe_library()
        fork.close_inherited()
        self.path = path
        self._texts = Dialect(None)
        self.settings = settings
        self.signals = Signals(listen=self._start_watch)
        self.entrance = Entrance()
        self._vfs = vfs
        self._pid = os.getpid()
        self._closed = False
        self._queue: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._starting = threading.Lock()
        self._idle_readers: list[apsw.Connection] = []
        self._watch: Watch[apsw.Connection] | None = None
        self._removed_on_close = removed_on_close
        self.writer = Writer(path, settings, self._texts, vfs)
        self._open_writer()
        fork.register(self)

    def run(self, call: Call[R]) -> R:
        """Run a call on this thread if the writer is free at once, else through the queue."""
        self.require_usable()
        return self.entrance.run(self._change if call.mode == "write" else self._read, call)

    def _change(self, call: Call[R]) -> R:
        job = Job(call, Execution(call, self.settings.services))
        try:
            if not self._run_inline(job):
                self._run_queued(job)
        except BaseException:
            job.claim()
            self._let_go()
            raise
        result: R = job.result
        return result

    def keep_time(self) -> None:
        """Go by the clock that all processes of this boot share, unless a clock was given."""
        if not self.settings.is_clock_virtual:
            self.writer.clock = store_clock(self) or self.settings.clock

    def enqueue(self, job: Job) -> None:
        """Hand a job to the writer thread; `job.deliver` is called there when it is durable."""
        # Under this lock nothing can be put behind the end of the queue that closing puts there.
        with self._starting:
            self._require_open()
            self._queue.put(job)
            if self._running_thread() is None:
                self._start_thread()

    def finish(self, job: Job) -> None:
        """Run what follows a durable commit, before its result is delivered."""
        if job.error is None:
            job.attempt.run_hooks()
        self.settings.hooks.tell(job.attempt, job.attempts, job.error)

    def read(self, call: Call[R]) -> R:
        """Run a query on a connection of its own, in one snapshot."""
        self.require_usable()
        return self.entrance.run(self._read, call)

    def _read(self, call: Call[R]) -> R:
        attempt = Execution(call, self.settings.services)
        tries, error = 0, None
        while tries < READ_TRIES_MAX:
            tries += 1
            error = self._read_once(attempt)
            # A passing I/O error is given one more chance, on a new connection.
            if not isinstance(error, StoreUnavailable):
                break
            attempt.restart()
        self.settings.hooks.tell(attempt, tries, error)
        if error is not None:
            try:
                raise error
            finally:
                del error
        return attempt.result

    def copy_to(self, target: Path, progress: Progress | None) -> None:
        """Copy the live database into a new file, one snapshot of it, while others write."""
        self.require_usable()
        os.close(os.open(target, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600))
        try:
            with self._reader() as source:
                copy_pages(source, target, progress)
        except apsw.Error as error:
            raise translate(error, target) from error

    def vacuum(self) -> None:
        """Rewrite the file without its free pages; writers wait meanwhile, readers do not."""
        self.require_usable()
        self.entrance.run(self._vacuum, self.path)

    def _vacuum(self, path: Path) -> None:
        try:
            with self._locked():
                vacuum(path, self.settings.durability, self._vfs)
        except BaseException:
            self._let_go()
            raise

    @contextlib.contextmanager
    def bulk(self) -> Iterator[apsw.Connection]:
        """Lend the writing connection for one large transaction."""
        self.require_usable()
        with self._locked(), self.writer.lend() as connection:
            yield connection

    def require_usable(self) -> None:
        """Refuse a closed store, and one that a forked child fork."""
        if os.getpid() != self._pid:
            raise StoreForked(
                f"process {os.getpid()} inherited {self.path} by fork; open the store again in it",
            )
        if self.writer.files.is_moved:
            self.writer.files.require_in_place()
        self._require_open()

    def _require_open(self) -> None:
        if self._closed:
            raise StoreClosed(f"the store {self.path} is closed; open it again")

    def close(self) -> None:
        """Finish what was handed over, then close; in a forked child this does nothing.

        Behind a stopped process that holds the lock, what is under way is left to end by itself.
        """
        if os.getpid() != self._pid:
            return
        self.entrance.require_outside()
        with self._starting:
            if self._closed:
                return
            self._closed = True
            self._queue.put(None)
            thread = self._thread = self._running_thread()
        if self._watch is not None:
            self._watch.stop()
        if thread is None:
            self._shut()
        else:
            thread.join(self.settings.busy_timeout_seconds)

    def resting_locks(self) -> list[Any]:
        """Return the locks under which no connection but a reader's is in use."""
        return [self.writer.mutex, *([] if self._watch is None else [self._watch.looking])]

    def abandon(self) -> None:
        """In a forked child: let go of the side lock, and keep SQLite from touching the file."""
        with contextlib.suppress(OSError):
            self.writer.side_lock.close()
        at_rest = [*self._idle_readers]
        if fork.is_held(self.writer.mutex):
            at_rest += self.writer.at_rest()
        watch = self._watch
        if watch is not None and watch.lent and fork.is_held(watch.looking):
            at_rest.append(watch.lent)
        fork.keep(self, at_rest)

    def _open_writer(self) -> None:
        try:
            if not self.writer.side_lock.acquire_within(self.settings.busy_timeout_seconds):
                raise busy(self.path, self.settings)
            self.writer.open()
            self.writer.side_lock.release()
        except BaseException:
            self.writer.side_lock.close()
            raise

    def _shut(self) -> None:
        side_lock = self.writer.side_lock
        try:
            with self.writer.mutex:
                side_lock.acquire_within(self.settings.busy_timeout_seconds)
                while self._idle_readers:
                    self.writer.part_with(self._idle_readers.pop())
                self.writer.close()
        finally:
            side_lock.close()
            fork.forget(self)
        if self._removed_on_close is not None:
            shutil.rmtree(self._removed_on_close, ignore_errors=True)

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        with self.writer.mutex:
            self.writer.side_lock.acquire()
            try:
                yield
            finally:
                self.writer.side_lock.release()

    def _run_inline(self, job: Job) -> bool:
        writer = self.writer
        if not self._queue.empty() or not writer.mutex.acquire(blocking=False):
            return False
        try:
            self._require_open()
            try:
                if not writer.side_lock.try_acquire():
                    return False
                writer.commit([job])
            finally:
                writer.side_lock.release()
        finally:
            writer.mutex.release()
        self.finish(job)
        return True

    def _let_go(self) -> None:
        """Free what an interrupt has left taken, between taking a lock and the block around it."""
        if self.writer.mutex._is_owned():  # type: ignore[attr-defined]
            try:
                if not self._closed:
                    self.writer.side_lock.release()
            finally:
                self.writer.mutex.release()

    def _run_queued(self, job: Job) -> None:
        done = threading.Lock()
        done.acquire()
        job.deliver = done.release
        self.enqueue(job)
        if not done.acquire(timeout=self.settings.busy_timeout_seconds):
            if job.claim():
                raise busy(self.path, self.settings)
            done.acquire()

    def _start_thread(self) -> None:
        name = f"holdfast-writer-{self.path.name}"
        self._thread = Thread(self._write, name)
        _writing.add(self)
        self._thread.start()

    def _running_thread(self) -> threading.Thread | None:
        """Return the writer thread; None if there is none, or an interrupt kept it from running."""
        thread = self._thread
        return thread if thread is not None and thread.ident is not None else None

    def _write(self) -> None:
        """The writer thread: gather what waits, commit it together, deliver; at the end, shut."""
        with self._starting:
            # An interrupt may have hit who started it: then another has taken its place.
            is_stopping = self._thread is not threading.current_thread()
        if is_stopping:
            return
        while not is_stopping and (first := self._queue.get()) is not None:
            is_stopping = self.entrance.run(self._write_batch, first)
        self._shut()

    def _write_batch(self, first: Job) -> bool:
        """Commit a job and those that wait behind it; say whether the end of the queue came."""
        with self._locked():
            jobs, is_stopping = self._gather(first)
            if jobs:
                self.writer.commit(jobs)
        for job in jobs:
            self.finish(job)
        for job in jobs:
            if job.deliver is not None:
                job.deliver()
        for wake in {job.wake for job in jobs if job.wake is not None}:
            wake(jobs)
        return is_stopping

    def _gather(self, first: Job) -> tuple[list[Job], bool]:
        """Take the jobs that wait, now that the locks are held and the batch is about to start."""
        jobs = [first] if first.claim() else []
        while len(jobs) < BATCH_JOBS_MAX:
            try:
                job = self._queue.get_nowait()
            except queue.Empty:
                break
            if job is None:
                return jobs, True
            if job.claim():
                jobs.append(job)
        return jobs, False

    def _read_once(self, attempt: Execution[Any]) -> Exception | None:
        try:
            with self._reader() as connection:
                read_all(connection, attempt, self._texts, self.writer.clock.now_ms())
        except apsw.Error as error:
            translated = translate(error, self.path)
            translated.__cause__ = error
            return translated
        except Exception as error:
            return error
        return None

    def _reader(self) -> _Reader:
        return _Reader(self)

    def take_reader(self) -> apsw.Connection:
        """Return an idle connection that reads, or a new one."""
        try:
            return self._idle_readers.pop()
        except IndexError:
            connection = connect(
                self.path, durability=self.settings.durability, vfs=self._vfs, read_only=True
            )
            self.writer.files.require_in_place()
            return connection

    def give_reader_back(self, connection: apsw.Connection, *, is_sound: bool) -> None:
        """Keep a connection for the next read; close one that may not have recovered."""
        if is_sound and connection.in_transaction:
            connection.execute("ROLLBACK")
        if is_sound and len(self._idle_readers) < IDLE_READERS_MAX and not self._closed:
            self._idle_readers.append(connection)
        else:
            self.writer.part_with(connection)

    def _start_watch(self) -> None:
        """Ring all topics when another connection has committed, from the first wait on."""
        if self._watch is None:
            self.entrance.run(self._watch_with, lambda: self.signals.ring_here(None))

    def _watch_with(self, ring: Callable[[], None]) -> None:
        with self._starting:
            if self._watch is None and not self._closed:
                self._watch = Watch(self.path, self._reader, _data_version, ring)


def busy(path: Path, settings: Settings) -> StoreBusy:
    """Return the error for a job that was withdrawn before it started."""
    seconds = settings.busy_timeout_seconds
    return StoreBusy(f"{path} was busy for {seconds:g} seconds; nothing was written")


def _data_version(connection: apsw.Connection) -> object:
    return connection.pragma("data_version")


class _Reader:
    """Lends a connection that reads; a class, because a generator would cost a tenth of a read."""

    __slots__ = ("_connection", "_engine")

    def __init__(self, engine: SqliteEngine) -> None:
        self._engine = engine

    def __enter__(self) -> apsw.Connection:
        self._connection = self._engine.take_reader()
        return self._connection

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        is_sound = kind is None or not issubclass(kind, apsw.Error)
        self._engine.give_reader_back(self._connection, is_sound=is_sound)


class _Common:
    """What both faces of an engine have."""

    dialect: DialectName = "sqlite"
    is_joined = False

    def __init__(self, engine: SqliteEngine | SqliteReader) -> None:
        self.engine = engine
        self.mode: StoreMode = engine.settings.mode
        self.entrance = engine.entrance
        self.signals = engine.signals

    def require_own(self, what: str) -> None:
        """Refuse a closed store, and one that a forked child fork."""
        self.engine.require_usable()

    def copy_to(self, path: Path, progress: Progress | None) -> None:
        """Copy the live database into a new file, one snapshot of it, while others write."""
        self.engine.copy_to(path, progress)

    def vacuum(self) -> None:
        """Rewrite the file without its free pages; writers wait meanwhile, readers do not."""
        self.engine.vacuum()


class SqliteDriver(_Common):
    """The sync face of an engine."""

    def run(self, call: Call[R]) -> R:
        """Run a call and return its result once it is durable."""
        return self.engine.run(call)

    def twin(self) -> SyncDriver:
        """Return a sync driver on the same store, for threads of our own."""
        return self

    def close(self) -> None:
        """Close the file."""
        self.engine.close()


class AsyncSqliteDriver(_Common):
    """The async face of an engine: writes go to the writer thread, small reads run inline."""

    def __init__(self, engine: SqliteEngine | SqliteReader) -> None:
        super().__init__(engine)
        self._loop = asyncio.get_running_loop()
        self._readers = ThreadPoolExecutor(IDLE_READERS_MAX, "holdfast-reader")
        # In the order of their deadlines, so that one timer serves them all.
        self._waiting: deque[_AsyncJob] = deque()
        self._timer: asyncio.TimerHandle | None = None

    async def run(self, call: Call[R]) -> R:
        """Run a call and return its result once it is durable."""
        self.engine.require_usable()
        require_loop(self._loop)
        if call.mode == "read":
            return self.engine.read(call)
        if call.mode == "read_large":
            return await self._loop.run_in_executor(self._readers, self.engine.read, call)
        settings = self.engine.settings
        job = _AsyncJob(call, Execution(call, settings.services), self._loop)
        job.wake = self._wake
        job.deadline = self._loop.time() + settings.busy_timeout_seconds
        self.engine.enqueue(job)
        self._waiting.append(job)
        if self._timer is None:
            self._timer = self._loop.call_at(job.deadline, self._give_up)
        await job.wait()
        result: R = job.result
        return result

    def twin(self) -> SyncDriver:
        """Return a sync driver on the same store, for threads of our own."""
        return SqliteDriver(self.engine)

    async def close(self) -> None:
        """Close the file."""
        await finish(asyncio.to_thread(self.engine.close))
        if self._timer is not None:
            self._timer.cancel()
        await finish(asyncio.to_thread(self._readers.shutdown))

    def _wake(self, jobs: Sequence[Job]) -> None:
        """Tell the loop that a batch is done; called by the writer, once for all of it."""
        # The loop may be gone when the program ends while a job is under way.
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._hand_out, jobs)

    def _hand_out(self, jobs: Sequence[Job]) -> None:
        for job in jobs:
            if isinstance(job, _AsyncJob):
                job.set_done()
        while self._waiting and self._waiting[0].is_done:
            self._waiting.popleft()

    def _give_up(self) -> None:
        """Withdraw the jobs that have waited too long."""
        now, waiting = self._loop.time(), self._waiting
        while waiting and (waiting[0].is_done or waiting[0].deadline <= now):
            job = waiting.popleft()
            if not job.is_done:
                job.withdraw(busy(self.engine.path, self.engine.settings))
        self._timer = self._loop.call_at(waiting[0].deadline, self._give_up) if waiting else None


class _AsyncJob(Job):
    """A job whose caller waits in an event loop."""

    __slots__ = ("_done", "_loop", "deadline", "is_done")

    def __init__(self, call: Call[Any], attempt: Execution[Any], loop: asyncio.AbstractEventLoop):
        super().__init__(call, attempt)
        self._loop = loop
        self._done = loop.create_future()
        self.is_done = False
        self.deadline = 0.0

    async def wait(self) -> None:
        """Wait for the outcome. A cancelled caller leaves a job that never ran, or a whole one."""
        cancelled: asyncio.CancelledError | None = None
        while not self.is_done:
            try:
                await self._done
            except asyncio.CancelledError as error:
                if self.claim():
                    self.is_done = True
                    raise
                cancelled = error
                self._done = self._loop.create_future()
        if cancelled is not None:
            raise cancelled

    def set_done(self) -> None:
        """Let the caller go on; called in its loop."""
        self.is_done = True
        if not self._done.done():
            self._done.set_result(None)

    def withdraw(self, error: StoreBusy) -> None:
        """Give up if the writer has not started; called in the loop."""
        if self.claim():
            self.error = error
            self.set_done()


@atexit.register
def _close_at_exit() -> None:
    # A daemon thread would die in the middle of a commit when the process exits.
    for engine in list(_writing):
        engine.close()

"""The SQLite driver: a write runs inline if the writer is free, else it joins a group commit."""

from __future__ import annotations

import atexit
import contextlib
import queue
import shutil
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import apsw

from ...errors import HoldfastError, StoreBusy, StoreUnavailable
from ..driver import Execution, Settings
from ..operation import Call
from ..threads import Thread
from . import open_file
from .clock import store_clock
from .connection import IDLE_READERS_MAX, connect, require_safe_library, translate, vacuum
from .transactions import Job, Writer, read_all

R = TypeVar("R")

BATCH_JOBS_MAX = 256
READ_TRIES_MAX = 2
_writing: weakref.WeakSet[SqliteDriver] = weakref.WeakSet()


class SqliteDriver(open_file.OpenFile):
    """One open file: its writer and the writer's queue, and its readers."""

    def __init__(
        self,
        path: Path,
        settings: Settings,
        vfs: str | None = None,
        *,
        removed_on_close: Path | None = None,
    ) -> None:
        require_safe_library()
        super().__init__(path, settings, vfs)
        self._queue: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._idle_readers: list[apsw.Connection] = []
        self._removed_on_close = removed_on_close
        self.writer = Writer(path, settings, self._texts, vfs)
        # First, so that a child that is forked meanwhile cannot keep the lock.
        open_file.register(self)
        self._open_writer()

    def _execute(self, call: Call[R]) -> R:
        """Run a call on this thread if the writer is free, else through the queue."""
        if self.writer.files.is_moved:
            self.require_usable()
        if call.operation.mode != "write":
            return self._read(call)
        job = Job(Execution(call, self.settings.services, has_all=True))
        job.execution.advance()
        try:
            if not self._run_inline(job):
                self._run_queued(job)
        except BaseException:
            job.claim()
            self._let_go()
            raise
        if job.error is not None:
            raise job.error
        result: R = job.execution.result
        return result

    def _run_inline(self, job: Job) -> bool:
        """Run a job on this thread; return False if another writer is active."""
        writer = self.writer
        if not self._queue.empty() or not writer.mutex.acquire(blocking=False):
            return False
        try:
            if self.is_closed:
                self.require_usable()
            try:
                # Who rests lets others go first; who does not is next, and is not overtaken.
                is_next = time.monotonic() >= writer.rest_until
                if not writer.side_lock.try_acquire(keeps_turn=is_next):
                    return False
                writer.commit([job])
            finally:
                writer.side_lock.release()
        finally:
            writer.mutex.release()
        self._finish(job)
        if writer.is_wal_due:
            self._move_wal()
        return True

    def _move_wal(self) -> None:
        """Move the write-ahead log into the database, now that nothing is locked."""
        # What was written is durable; what is wrong with the files is told to the next call.
        with contextlib.suppress(apsw.Error, HoldfastError), Reader(self) as connection:
            self.writer.move_wal_beside(connection)

    @property
    def keeps_others_waiting(self) -> bool:
        """Whether others write too, between transactions of this store."""
        return self.writer.has_others

    def rest_seconds(self) -> float:
        """Return how long to let others write after a transaction of maintenance."""
        return self.writer.give_way()

    def _let_go(self) -> None:
        """Release locks that an interrupt left held, between acquiring one and its `try`."""
        if not self.is_closed:
            self.writer.side_lock.release_turn()
        if self.writer.mutex._is_owned():  # type: ignore[attr-defined]
            try:
                if not self.is_closed:
                    self.writer.side_lock.release()
            finally:
                self.writer.mutex.release()

    def _finish(self, job: Job) -> None:
        """Run hooks after a durable commit, before the result is delivered."""
        if job.error is None and (job.execution.hooks or job.execution.emits):
            job.execution.finish(self.signals)
        if self.settings.hooks.trace is not None:
            try:
                self.settings.hooks.report(job.execution, job.attempts, job.error)
            except BaseException as error:
                # It goes to the caller: this thread may be the writer thread, which must go on.
                job.error = error

    def require_usable(self) -> None:
        """Refuse a closed store, one inherited by a forked child, and one that was moved."""
        if self.writer.files.is_moved and not self.is_inherited:
            self.writer.files.require_in_place()
        super().require_usable()

    def keep_time(self) -> None:
        """Use the clock that all processes of this boot share, unless a clock was given."""
        if not self.settings.is_clock_virtual:
            self.writer.clock = store_clock(self.run) or self.settings.clock

    # Reading

    def _read(self, call: Call[R]) -> R:
        """Run a query on a separate connection, in one snapshot."""
        tries = 0
        while True:
            tries += 1
            execution = Execution(call, self.settings.services)
            execution.advance()
            try:
                self._read_once(execution)
            except Exception as error:
                # A transient I/O error is retried once, on a new connection.
                if isinstance(error, StoreUnavailable) and tries < READ_TRIES_MAX:
                    continue
                self.settings.hooks.report(execution, tries, error)
                raise
            self.settings.hooks.report(execution, tries, None)
            return execution.result

    def _read_once(self, execution: Execution[Any]) -> None:
        try:
            with Reader(self) as connection:
                read_all(connection, execution, self._texts, self.writer.clock.now_ms())
        except apsw.Error as error:
            raise translate(error, self.path) from error

    def _lend(self) -> Reader:
        return Reader(self)

    def _with_reader(self, read: Callable[[apsw.Connection], None]) -> None:
        with Reader(self) as connection:
            read(connection)

    def _version(self, lent: apsw.Connection) -> object:
        return lent.pragma("data_version")

    def take_reader(self) -> apsw.Connection:
        """Return an idle read connection, or a new one."""
        try:
            return self._idle_readers.pop()
        except IndexError:
            connection = connect(
                self.path, durability=self.settings.durability, vfs=self._vfs, read_only=True
            )
            self.writer.files.require_in_place()
            return connection

    def give_reader_back(self, connection: apsw.Connection, *, is_sound: bool) -> None:
        """Keep a connection for the next read; close one that is not sound."""
        if is_sound and connection.in_transaction:
            connection.execute("ROLLBACK")
        if is_sound and len(self._idle_readers) < IDLE_READERS_MAX and not self.is_closed:
            self._idle_readers.append(connection)
        else:
            self.writer.part_with(connection)

    # Outside the transactions of calls

    def vacuum(self) -> None:
        """Rewrite the file without its free pages; blocks writers, not readers."""
        self.require_usable()
        self.run(self.path, self._vacuum)

    def _vacuum(self, path: Path) -> None:
        try:
            with self._locked(self.settings.busy_timeout_seconds):
                vacuum(path, self.settings.durability, self._vfs)
        except BaseException:
            self._let_go()
            raise

    @contextlib.contextmanager
    def bulk(self) -> Iterator[apsw.Connection]:
        """Lend the writing connection for one large transaction."""
        self.require_usable()
        seconds = self.settings.busy_timeout_seconds
        with self._locked(seconds), self.writer.lend() as connection:
            yield connection

    @contextlib.contextmanager
    def _locked(self, within: float | None = None) -> Iterator[None]:
        """Hold both locks; raise StoreBusy if that takes longer than `within` seconds."""
        writer, started = self.writer, time.monotonic()
        if not writer.mutex.acquire(timeout=-1 if within is None else within):
            raise self.busy()
        try:
            try:
                if not writer.side_lock.try_acquire(keeps_turn=True):
                    if (seconds := writer.rest_until - time.monotonic()) > 0:
                        writer.side_lock.release_turn()
                        time.sleep(seconds)
                    if within is None:
                        writer.side_lock.acquire()
                    elif not writer.side_lock.acquire_by(started + within):
                        raise self.busy()
                yield
            finally:
                writer.side_lock.release()
        finally:
            writer.mutex.release()

    # The writer thread

    def enqueue(self, job: Job) -> None:
        """Pass a job to the writer thread, which calls `job.deliver` when it is durable."""
        # Under this lock, no job can be queued behind the end mark of `close`.
        with self._starting:
            super().require_usable()
            self._queue.put(job)
            if self._running_thread() is None:
                self._thread = Thread(self._run_writer, f"holdfast-writer-{self.path.name}")
                _writing.add(self)
                self._thread.start()

    def busy(self) -> StoreBusy:
        """Return the error for a job that was withdrawn before it started."""
        seconds = self.settings.busy_timeout_seconds
        return StoreBusy(f"{self.path} was busy for {seconds:g} seconds; nothing was written")

    def _run_queued(self, job: Job) -> None:
        done = threading.Lock()
        done.acquire()
        job.deliver = done.release
        self.enqueue(job)
        if not done.acquire(timeout=self.settings.busy_timeout_seconds):
            if job.claim():
                raise self.busy()
            done.acquire()

    def _running_thread(self) -> threading.Thread | None:
        """Return the writer thread; None if there is none, or its start was interrupted."""
        thread = self._thread
        return thread if thread is not None and thread.ident is not None else None

    def _run_writer(self) -> None:
        """Gather waiting jobs, commit them together, deliver; at the end, shut down."""
        with self._starting:
            # If its start was interrupted, another thread has replaced it.
            is_stopping = self._thread is not threading.current_thread()
        if is_stopping:
            return
        while not is_stopping and (first := self._queue.get()) is not None:
            is_stopping = self.run(first, self._write_batch)
        self._shut()

    def _write_batch(self, first: Job) -> bool:
        """Commit a job and those queued behind it; return whether the queue has ended."""
        with self._locked():
            jobs, is_stopping = self._gather(first)
            if jobs:
                self.writer.commit(jobs)
        for job in jobs:
            self._finish(job)
        for job in jobs:
            if job.deliver is not None:
                job.deliver()
        for wake in {job.wake for job in jobs if job.wake is not None}:
            wake(jobs)
        if self.writer.is_wal_due:
            self._move_wal()
        return is_stopping

    def _gather(self, first: Job) -> tuple[list[Job], bool]:
        """Claim the queued jobs, now that the locks are held and the batch is about to start."""
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

    # Opening, closing and forking

    def _open_writer(self) -> None:
        side_lock = self.writer.side_lock
        try:
            if not side_lock.acquire_within(self.settings.busy_timeout_seconds):
                raise self.busy()
            self.writer.open()
            side_lock.release()
        except BaseException:
            side_lock.close()
            open_file.forget(self)
            raise

    def close(self) -> None:
        """Finish the queued jobs, then close; does nothing in a forked child.

        If a stopped process holds the lock, jobs are left to finish in the background.
        """
        if self.is_inherited:
            return
        self.require_outside()
        with self._starting:
            # A signal handler may close the store too, but not between these two.
            was_closed, self.is_closed = self.is_closed, True
            if was_closed:
                return
            self._queue.put(None)
            thread = self._thread = self._running_thread()
        if self._watch is not None:
            self._watch.stop()
        if thread is None:
            self._shut()
        else:
            thread.join(self.settings.busy_timeout_seconds)

    def _shut(self) -> None:
        side_lock = self.writer.side_lock
        try:
            with self.writer.mutex:
                with contextlib.suppress(StoreUnavailable):
                    side_lock.acquire_within(self.settings.busy_timeout_seconds)
                while self._idle_readers:
                    self.writer.part_with(self._idle_readers.pop())
                self.writer.close()
        finally:
            side_lock.close()
            open_file.forget(self)
        if self._removed_on_close is not None:
            shutil.rmtree(self._removed_on_close, ignore_errors=True)

    def resting_locks(self) -> list[Any]:
        """Return the locks that keep all connections but those of readers at rest."""
        return [self.writer.mutex, *super().resting_locks()]

    def connections_at_rest(self) -> list[apsw.Connection]:
        """In a forked child: close the side lock too, so that it cannot hold the parent's."""
        with contextlib.suppress(OSError):
            self.writer.side_lock.close_in_child()
        at_rest = [*self._idle_readers, *self._lent_at_rest()]
        connection = self.writer.connection
        if connection is not None and open_file.is_held(self.writer.mutex):
            at_rest.append(connection)
        return at_rest


class Reader:
    """Lends a read connection; a class, because a generator would cost a tenth of a read."""

    __slots__ = ("_connection", "_driver")

    def __init__(self, driver: SqliteDriver) -> None:
        self._driver = driver

    def __enter__(self) -> apsw.Connection:
        self._connection = self._driver.take_reader()
        return self._connection

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        is_sound = kind is None or not issubclass(kind, apsw.Error)
        self._driver.give_reader_back(self._connection, is_sound=is_sound)


@atexit.register
def _close_at_exit() -> None:
    # At exit a daemon thread would be killed in the middle of a commit.
    for driver in list(_writing):
        driver.close()

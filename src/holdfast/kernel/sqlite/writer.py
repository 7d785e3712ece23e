"""The one writer of an SQLite file in this process: batches, savepoints, and settled commits.

Who holds the writer's mutex and the file's side lock may write. A batch is one transaction with
a savepoint per call, so many calls share one sync of the disk and fail alone. Nothing, neither
result nor error, is delivered before the batch is durable.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import apsw

from ...clock import Clock
from ...errors import (
    CommitUnknown,
    HoldfastError,
    StoreBusy,
    StoreError,
    StoreMoved,
    StoreUnavailable,
)
from ..commit_settlement import FORGET, LOOK_UP, MARK, SETTLE, WRITER_KEPT_MS, commit_id, is_there
from ..driver import Settings
from ..execution import Boundary, Execution, Point
from ..operation import Call, Query, Row
from ..sql import Dialect
from ..threads import Thread
from .connection import connect, fetch, lock_error, prepare_file, translate
from .files import Files


class SideLock:
    """A lock file beside the database: writers of all processes queue here, in the kernel."""

    def __init__(self, path: Path) -> None:
        try:
            # A file object closes itself should an interrupt hit who opened it.
            self._file = open(path, "ab", buffering=0, opener=_private)  # noqa: SIM115
        except OSError as error:
            raise lock_error(path, error) from error
        self._descriptor = self._file.fileno()
        # One call into C: an interrupt comes before or after it.
        self.release = functools.partial(fcntl.flock, self._descriptor, fcntl.LOCK_UN)

    def acquire(self) -> None:
        """Wait for the lock; it is never polled, so nobody starves."""
        fcntl.flock(self._descriptor, fcntl.LOCK_EX)

    def try_acquire(self) -> bool:
        """Take the lock if it is free at once."""
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def acquire_within(self, seconds: float) -> bool:
        """Wait for the lock, but not for ever: a stopped process may hold it."""
        if self.try_acquire():
            return True
        decision, acquired = threading.Lock(), threading.Event()

        def wait() -> None:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            if decision.acquire(blocking=False):
                acquired.set()
            else:
                fcntl.flock(descriptor, fcntl.LOCK_UN)
            os.close(descriptor)

        descriptor = os.dup(self._descriptor)
        Thread(wait, "holdfast-lock").start()
        return acquired.wait(seconds) or not decision.acquire(blocking=False)

    def close(self) -> None:
        """Close the file; a forked child does this so that it cannot hold the parent's lock."""
        self._file.close()


def _private(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NOFOLLOW, 0o600)


class Job:
    """One call on its way through the writer, with its outcome."""

    __slots__ = ("_gate", "attempt", "attempts", "call", "deliver", "error", "wake")

    def __init__(self, call: Call[Any], attempt: Execution[Any]) -> None:
        self.call = call
        self.attempt = attempt
        self.error: BaseException | None = None
        self.attempts = 1
        self.deliver: Callable[[], None] | None = None
        """Called when the outcome is there."""
        self.wake: Callable[[Sequence[Job]], None] | None = None
        """Called with the whole batch, once for all jobs that have the same one."""
        self._gate = threading.Lock()

    def claim(self) -> bool:
        """Decide, once, who has the job: the writer that starts it or the caller that gave up."""
        return self._gate.acquire(blocking=False)

    @property
    def result(self) -> Any:
        """The call's result, or its error raised."""
        if self.error is not None:
            raise self.error
        return self.attempt.result


class TransactionEnded(Exception):
    """SQLite itself ended the whole transaction: disk full, I/O error, out of memory."""


class Writer:
    """Owns the connection that writes. Its caller holds `mutex` and `side_lock`."""

    def __init__(self, path: Path, settings: Settings, dialect: Dialect, vfs: str | None) -> None:
        self.path = path
        self.mutex = threading.RLock()
        self.clock: Clock = settings.clock
        self._settings = settings
        self._dialect = dialect
        self._vfs = vfs
        self._probe = settings.hooks.probe
        self._connection: apsw.Connection | None = None
        self._writer_id: str | None = None
        self._batch = 0
        self._now_ms = 0
        self._changes_before = 0
        self._is_wal_moved = False
        self._runs_uncounted = False
        self.files = Files(path)
        prepare_file(path, vfs)
        self.side_lock = SideLock(path.with_name(path.name + "-lock"))

    def open(self) -> None:
        """Connect; the first connection to a new file also turns it into a WAL database."""
        if self._connection is None:
            self._connection = connect(
                self.path, durability=self._settings.durability, vfs=self._vfs
            )
            self._is_wal_moved = False
            self.files.require_in_place()
            self.files.note()

    def close(self) -> None:
        """Close the connection; what SQLite cannot move into the database stays in the WAL."""
        self._drop()

    def at_rest(self) -> list[apsw.Connection]:
        """Return the connection, if there is one; the caller holds the mutex."""
        return [] if self._connection is None else [self._connection]

    def part_with(self, connection: apsw.Connection) -> None:
        """Close a connection. Files that have taken the place of its own stay as they are."""
        with contextlib.suppress(apsw.Error):
            try:
                self.files.require_in_place()
            except StoreMoved:
                self._part_with_moved(connection)
            connection.close(force=True)

    def _part_with_moved(self, connection: apsw.Connection) -> None:
        if self.files.are_replaced_beside():
            # The last connection would remove them by name.
            connection.config(apsw.SQLITE_DBCONFIG_NO_CKPT_ON_CLOSE, 1)
        elif self.files.is_database_gone():
            # A renamed file gets what was acknowledged: its new name has no WAL.
            connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()

    def commit(self, jobs: Sequence[Job]) -> None:
        """Run the jobs in one transaction and leave each with its outcome, durable.

        If SQLite ends the transaction as a whole, each job is run again in one of its own.
        """
        try:
            self._transact(jobs)
        except TransactionEnded as ended:
            if len(jobs) == 1:
                jobs[0].error = ended.__cause__
            else:
                for job in jobs:
                    self._run_alone(job)
        except CommitUnknown as unknown:
            for job in jobs:
                # A call that failed by itself wrote nothing, whatever became of its neighbours.
                job.error = unknown if job.error is None else self._failed_beside(unknown)
        except BaseException as error:
            for job in jobs:
                job.error = error
            # An interrupt may have hit the first try.
            self._rollback()

    def execute(self, query: Query, call: str) -> list[Row]:
        """Run one statement of the open transaction and return all its rows."""
        statement = self._dialect.statement(query.sql)
        if not statement.counts_changes and statement.may_change:
            self._runs_uncounted = True
        connection = self._connection or self._open_connection()
        if not connection.in_transaction:
            # By itself it would be committed at once, without what came before it.
            raise TransactionEnded from StoreUnavailable(
                f"{self.path}: the transaction of {call} ended before all of it was done; "
                "nothing was written"
            )
        if self._probe is None:
            return fetch(connection, statement, query, self._now_ms)
        self._probe(Point("statement", "before", call, statement.text))
        found = fetch(connection, statement, query, self._now_ms)
        self._probe(Point("statement", "after", call, statement.text))
        return found

    @contextlib.contextmanager
    def lend(self) -> Iterator[apsw.Connection]:
        """Lend the connection for one transaction of many rows."""
        self.open()
        connection = self._open_connection()
        try:
            with connection:
                yield connection
        except apsw.Error as error:
            raise translate(error, self.path) from error

    def _transact(self, jobs: Sequence[Job]) -> None:
        self.open()
        try:
            self._begin(jobs[0].call.name)
            has_success = False
            for job in jobs:
                self._run(job, alone=len(jobs) == 1)
                has_success |= job.error is None
            if has_success and self._has_changed():
                self._commit(jobs)
        except apsw.Error as error:
            self._drop()
            raise TransactionEnded from translate(error, self.path)
        finally:
            self._rollback()

    def _begin(self, call: str) -> None:
        self.files.require_in_place()
        self._move_wal()
        try:
            self._control("BEGIN IMMEDIATE", call, "begin")
        except apsw.BusyError as error:
            raise translate(error, self.path) from error
        self.files.note_new()
        self._changes_before = self._open_connection().total_changes()
        self._runs_uncounted = False
        # The clock is read once the lock is held, and never goes back within a store.
        self._now_ms = max(self._now_ms, self.clock.now_ms())

    def _has_changed(self) -> bool:
        """Tell whether there is anything to commit; a batch that only looked costs no sync."""
        changes = self._open_connection().total_changes()
        return self._runs_uncounted or changes != self._changes_before

    def _run(self, job: Job, *, alone: bool) -> None:
        """Run one job, in a savepoint unless it has the transaction for itself."""
        if not alone:
            self._control("SAVEPOINT job", job.call.name)
        try:
            self._pump(job)
        except BaseException as error:
            if not self._open_connection().in_transaction:
                raise
            self._fail(job, error)
        if not alone:
            if job.error is not None:
                self._control("ROLLBACK TO job", job.call.name)
            self._control("RELEASE job", job.call.name)

    def _pump(self, job: Job) -> None:
        attempt, call = job.attempt, job.call.name
        while attempt.queries:
            attempt.reply([self.execute(query, call) for query in attempt.queries])
        for query in attempt.closing():
            self.execute(query, call)

    def _fail(self, job: Job, error: BaseException) -> None:
        if isinstance(error, apsw.Error):
            job.error = translate(error, self.path)
            job.error.__cause__ = error
            job.attempt.fail(job.error)
        else:
            job.error = error

    def _run_alone(self, job: Job) -> None:
        job.attempts += 1
        job.error = None
        try:
            job.attempt.restart()
        except BaseException as error:
            job.error = error
        else:
            self.commit([job])

    def _commit(self, jobs: Sequence[Job]) -> None:
        """Mark the batch and commit it; a COMMIT that fails is settled, never guessed."""
        if jobs[0].call.is_marked:
            self._mark()
        try:
            self._control("COMMIT", jobs[0].call.name, "commit")
        except apsw.Error as error:
            self._settle_commit(error)

    def _mark(self) -> None:
        try:
            self._mark_as(self._writer_id)
        except apsw.ConstraintError:
            # Its row was closed: somebody asked for a batch that was never made. It has another.
            self._mark_as(None)

    def _mark_as(self, writer_id: str | None) -> None:
        if writer_id is None:
            self._batch = 0
            writer_id = self._writer_id = self._settings.services.new_id()
            self.execute(Query(FORGET, {"age_ms": WRITER_KEPT_MS}), "kernel")
        self._batch += 1
        self.execute(Query(MARK, {"writer_id": writer_id, "batch": self._batch}), "kernel")

    def _settle_commit(self, error: apsw.Error) -> None:
        """Find out whether the batch is there. The side lock is held, so nobody wrote since.

        Frames that reached the WAL without their sync could come back after a crash. The answer
        is therefore committed itself, in their place. A batch that is visible after all is moved
        into the database, because the disk has failed to sync the WAL that holds it, and a second
        commit makes the emptied WAL durable.
        """
        writer_id, batch = self._writer_id, self._batch
        self._drop()
        self._writer_id = None  # The old row stays as it is, so that the answer never changes.
        if writer_id is None:
            raise error
        is_committed: bool | None = None
        try:
            self.open()
            is_committed = self._is_visible(writer_id, batch)
            self._commit_answer(writer_id, batch)
            if is_committed:
                self._checkpoint()
                self._commit_answer(writer_id, batch)
        except (apsw.Error, HoldfastError) as again:
            self._drop()
            # SQLite writes a transaction's end last: where there was no room for it, it is not.
            lacks_room = isinstance(error, apsw.FullError) and isinstance(again, apsw.FullError)
            if is_committed is not False or not lacks_room:
                raise CommitUnknown(
                    f"{self.path}: {error}, and the file cannot be used to see whether the change "
                    "was committed; ask store.settle(id)",
                    id=commit_id(writer_id, batch),
                ) from again
        if not is_committed:
            raise error

    def _failed_beside(self, unknown: CommitUnknown) -> StoreUnavailable:
        message = f"{self.path} failed during COMMIT: {unknown.__cause__}; nothing was written"
        return StoreUnavailable(message)

    def _is_visible(self, writer_id: str, batch: int) -> bool:
        query = Query(LOOK_UP, {"writer_id": writer_id})
        statement = self._dialect.statement(query.sql)
        found = fetch(self._open_connection(), statement, query, self._now_ms)
        return bool(found) and is_there(batch, found[0]["batch"])

    def _commit_answer(self, writer_id: str, batch: int) -> None:
        self._move_wal()
        self._control("BEGIN IMMEDIATE", "settle")
        self.execute(Query(SETTLE, {"writer_id": writer_id, "batch": batch}), "settle")
        self._control("COMMIT", "settle")

    def _move_wal(self) -> None:
        """Move what this connection found in the WAL into the database before building on it.

        It may hold what the disk has failed to sync: lost later, it would take along all that
        was committed behind it. A database that has no room to grow must do without.
        """
        if not self._is_wal_moved:
            with contextlib.suppress(apsw.FullError):
                self._open_connection().execute("PRAGMA wal_checkpoint(PASSIVE)").fetchall()
                self._is_wal_moved = True

    def _checkpoint(self) -> None:
        (outcome,) = self._open_connection().execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
        if outcome[0]:
            raise StoreBusy(f"{self.path}: readers keep the WAL from being moved")

    def _control(self, sql: str, call: str, boundary: Boundary = "statement") -> None:
        if self._probe is None:
            self._open_connection().execute(sql)
            return
        self._probe(Point(boundary, "before", call, sql))
        self._open_connection().execute(sql)
        self._probe(Point(boundary, "after", call, sql))

    def _rollback(self) -> None:
        if self._connection is not None and self._connection.in_transaction:
            self._connection.execute("ROLLBACK")

    def _drop(self) -> None:
        """Close a connection that met an error it may not have recovered from."""
        connection, self._connection = self._connection, None
        if connection is not None:
            self.part_with(connection)
            self.files.forget_beside()

    def _open_connection(self) -> apsw.Connection:
        if self._connection is None:
            raise StoreError(f"{self.path} is not open")
        return self._connection

"""Transactions of an SQLite file: queries in one snapshot, and the one writer of this process.

Writing requires the writer's mutex and the file's side lock. A batch is one transaction with a
savepoint per call: many calls share one fsync, and each can fail alone. No result or error is
delivered before the batch is durable.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar, cast

import apsw
import msgspec

from ...clock import Clock, wall_ms
from ...errors import (
    CommitUnknown,
    HoldfastError,
    StoreBusy,
    StoreMoved,
    StoreUnavailable,
)
from ..commit_settlement import (
    MARK_BATCH,
    READ_WRITER,
    SETTLE_BATCH,
    commit_id,
    forget_oldest,
    is_there,
)
from ..driver import Boundary, Execution, Point, Settings
from ..operation import Query, Row
from ..sql import Dialect, Statement
from .connection import BUSY_MS, connect, prepare_file, translate
from .side_lock import SideLock

R = TypeVar("R")

# File systems keep time in ticks of up to two seconds, and a second change within one tick does
# not show. The next change of a directory that changed longer ago does.
SETTLED_MS = 3_000
# The WAL is moved into the database when it has grown by this many pages; after a long
# transaction earlier, so that the short ones of others seldom have to.
WAL_PAGES = 2_000
WAL_PAGES_AFTER_LONG = 750
# From this many on, what was written while it was moved is moved too, while others wait.
WAL_PAGES_BEGUN_AGAIN = 1_500
# A WAL larger than this is truncated; checked this often, waiting this long for readers.
WAL_BYTES_KEPT = 16 * 2**20
WAL_LOOK_SECONDS = 1.0
WAL_WAIT_MS = 5
# After statements that took more CPU time than this (a batch of many calls) a process lets others
# write for as long as it has written itself. Waiting for the disk or for a processor does not
# count: a single write never rests. After a pass of maintenance it rests in any case, long enough
# for a call of two transactions, which would otherwise wait for two passes, one before each.
LONG_SECONDS = 0.0007
REST_SECONDS_MIN = 0.0015
REST_SECONDS_MAX = 0.02


def fetch(
    connection: apsw.Connection, statement: Statement, query: Query, now_ms: int
) -> list[Row]:
    """Run one statement and fetch all its rows: only then does RETURNING take effect."""
    at = statement.now_at
    if query.each:
        rows = (_timed(statement.values(each), at, now_ms) for each in query.each)
        cursor = connection.executemany(statement.text, rows)
    else:
        values = statement.values(query.parameters)
        if at is not None:
            values = (*values[:at], now_ms, *values[at:])
        cursor = connection.execute(statement.text, values)
    try:
        first = next(cursor, None)
        if first is None:
            return []
        columns = statement.columns
        if not columns:
            # The description is available only while there is a row. Threads share the statement,
            # so its names are replaced as a whole: two that add to them would double them.
            columns[:] = [column[0] for column in cursor.get_description()]
        found = [dict(zip(columns, first, strict=True))]
        for row in cursor:
            found.append(dict(zip(columns, row, strict=True)))
        return found
    except BaseException:
        # A traceback would keep the statement open, and an open statement blocks COMMIT.
        cursor.close(True)
        raise


def _timed(values: tuple[object, ...], at: int | None, now_ms: int) -> tuple[object, ...]:
    return values if at is None else (*values[:at], now_ms, *values[at:])


def read_all(
    connection: apsw.Connection, execution: Execution[R], texts: Dialect, now_ms: int
) -> R:
    """Run a query in one snapshot; the caller ends the transaction."""
    if execution.queries:
        connection.execute("BEGIN")
    while queries := execution.queries:
        execution.advance(
            [fetch(connection, texts.statement(query.sql), query, now_ms) for query in queries]
        )
    return execution.result


def file_status(name: str) -> tuple[int, ...] | None:
    """Return a file's device, inode, size, mtime and ctime; None if there is none."""
    try:
        found = os.stat(name)
    except OSError:
        return None
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns


class Files:
    """The files of one open database: itself, its `-wal` and its `-shm`."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._directory = str(path.parent)
        self._names = [f"{path}{suffix}" for suffix in ("", "-wal", "-shm")]
        self.known: list[tuple[int, ...] | None] = [None, None, None]
        """Device and inode of the open files; None for those a new database lacks."""
        self._settled: tuple[int, ...] | None = None
        self.is_moved = False

    def note(self) -> None:
        """Record the current files as the open ones."""
        self.known = self._found()
        self._settled = None

    def forget_beside(self) -> None:
        """Note that SQLite has removed the `-wal` and `-shm` files."""
        self.known[1:] = [None, None]

    def require_in_place(self) -> None:
        """Raise StoreMoved if a database file was deleted, renamed or replaced.

        Writes to the open files would be lost, or would destroy the files in their place.
        """
        # One stat of the directory costs less than three of the files.
        directory = file_status(self._directory)
        if directory is not None and directory == self._settled and not self.is_moved:
            return
        changed = [
            name
            for name, known in zip(self._names, self.known, strict=True)
            if known is not None and known != (file_status(name) or ())[:2]
        ]
        self.is_moved |= bool(changed)
        if self.is_moved:
            were, them = ("were", "them") if len(changed) > 1 else ("was", "it")
            raise StoreMoved(
                f"{' and '.join(changed) or self._path} {were} deleted, renamed or replaced while "
                f"the store was open; nothing was written; put {them} back and open the store again"
            )
        age_ms = 0 if directory is None else wall_ms() - directory[-1] // 1_000_000
        self._settled = directory if abs(age_ms) > SETTLED_MS else None

    def are_replaced_beside(self) -> bool:
        """Whether `-wal` or `-shm` is not the open one."""
        return self._found()[1:] != self.known[1:]

    def is_database_gone(self) -> bool:
        """Whether no file has the database's name."""
        return self._found()[0] is None

    def _found(self) -> list[tuple[int, ...] | None]:
        """Return device and inode of each file, None where there is none."""
        return [status and status[:2] for status in map(file_status, self._names)]


class Job(msgspec.Struct, eq=False):
    """One call queued for the writer, with its outcome."""

    execution: Execution[Any]
    error: BaseException | None = None
    attempts: int = 1
    deliver: Callable[[], None] | None = None
    """Called when the outcome is set."""
    wake: Callable[[Sequence[Job]], None] | None = None
    """Called with the whole batch, once for all jobs that share it."""
    _gate: threading.Lock = msgspec.field(default_factory=threading.Lock)

    def claim(self) -> bool:
        """Claim the job, once: for the writer that starts it or the caller that gives up."""
        return self._gate.acquire(blocking=False)


class TransactionEnded(Exception):
    """SQLite itself ended the whole transaction: disk full, I/O error, out of memory."""


class Writer:
    """Owns the write connection. Its caller holds `mutex` and `side_lock`."""

    def __init__(self, path: Path, settings: Settings, dialect: Dialect, vfs: str | None) -> None:
        self.path = path
        self.mutex = threading.RLock()
        self.clock: Clock = settings.clock
        self.connection: apsw.Connection | None = None
        self._settings = settings
        self._dialect = dialect
        self._vfs = vfs
        self._probe = settings.hooks.probe
        self._writer_id: str | None = None
        self._batch = 0
        self._now_ms = 0
        self._is_wal_moved = False
        self._wal_pages = 0
        self._wal_pages_seen = 0
        self._wal_look_at = 0.0
        self.is_wal_due = False
        """Whether the WAL should be moved, once nothing is locked any more."""
        self._runs_uncounted = False
        self.rest_until = 0.0
        """When to ask for the lock again if others want it, in monotonic time."""
        self.has_others = False
        """Whether something else was written between the last two transactions."""
        self._version_after = -1
        self._ended = self._took = 0.0
        self.files = Files(path)
        prepare_file(path, vfs)
        self.side_lock = SideLock(path)

    def open(self) -> apsw.Connection:
        """Return the connection, opened if needed; the first one enables WAL mode."""
        if self.connection is None:
            self.connection = connect(
                self.path, durability=self._settings.durability, vfs=self._vfs
            )
            self._is_wal_moved = False
            # Replaces the checkpoints that SQLite makes inside a COMMIT, while others wait.
            self.connection.set_wal_hook(self._count_wal)
            self.files.require_in_place()
            self.files.note()
        return self.connection

    def close(self) -> None:
        """Close the connection, also a broken one; what cannot be checkpointed stays in the WAL."""
        connection, self.connection = self.connection, None
        if connection is not None:
            self.part_with(connection)
            self.files.forget_beside()

    def part_with(self, connection: apsw.Connection) -> None:
        """Close a connection, without touching files that have replaced its own."""
        with contextlib.suppress(apsw.Error):
            try:
                self.files.require_in_place()
            except StoreMoved:
                self._part_with_moved(connection)
            connection.close(force=True)

    def _part_with_moved(self, connection: apsw.Connection) -> None:
        if self.files.are_replaced_beside():
            # The last connection would delete them by name.
            connection.config(apsw.SQLITE_DBCONFIG_NO_CKPT_ON_CLOSE, 1)
        elif self.files.is_database_gone():
            # The renamed file has no WAL: checkpoint acknowledged commits into it.
            connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()

    def commit(self, jobs: Sequence[Job]) -> None:
        """Run the jobs in one transaction and set the durable outcome of each.

        If SQLite ends the whole transaction, each job is run again in its own.
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
                # A call that failed alone wrote nothing, whatever the outcome of the batch.
                job.error = unknown if job.error is None else self._failed_beside(unknown)
        except BaseException as error:
            for job in jobs:
                job.error = error
            # The rollback in `_transact` may have been interrupted.
            self._rollback()

    def execute(self, queries: Sequence[Query], call: str) -> list[list[Row]]:
        """Run statements of the open transaction in order; return the rows of each."""
        connection, probe, found = self.connection, self._probe, []
        compiled, now_ms = self._dialect.statement, self._now_ms
        for query in queries:
            statement = compiled(query.sql)
            if statement.is_uncounted:
                self._runs_uncounted = True
            if connection is None or not connection.in_transaction:
                # Outside a transaction it would be committed at once, without the earlier
                # statements.
                raise TransactionEnded from StoreUnavailable(
                    f"{self.path}: the transaction of {call} ended early; nothing was written"
                )
            if probe is not None:
                probe(Point("statement", "before", call, statement.text))
            found.append(fetch(connection, statement, query, now_ms))
            if probe is not None:
                probe(Point("statement", "after", call, statement.text))
        return found

    @contextlib.contextmanager
    def lend(self) -> Iterator[apsw.Connection]:
        """Lend the connection for one bulk transaction."""
        connection = self.open()
        try:
            with connection:
                yield connection
        except apsw.Error as error:
            raise translate(error, self.path) from error

    def give_way(self) -> float:
        """Let others go first after a pass of maintenance; return for how many seconds."""
        rest = max(self._took, REST_SECONDS_MIN)
        self.rest_until = max(self.rest_until, self._ended + rest)
        return max(0.0, self.rest_until - time.monotonic())

    def _transact(self, jobs: Sequence[Job]) -> None:
        started, worked = time.monotonic(), time.thread_time()
        try:
            connection = self.connection or self.open()
            changes_before = self._begin(connection, jobs[0])
            version_before = connection.data_version()
            for job in jobs:
                self._run(job, is_alone=len(jobs) == 1)
            worked = time.thread_time() - worked
            # A batch that changed nothing costs no fsync.
            has_changed = self._runs_uncounted or connection.total_changes() != changes_before
            if has_changed and any(job.error is None for job in jobs):
                self._commit(connection, jobs[0])
                limit = WAL_PAGES if worked <= LONG_SECONDS else WAL_PAGES_AFTER_LONG
                self.is_wal_due = self._wal_pages - self._wal_pages_seen >= limit
                if time.monotonic() >= self._wal_look_at:
                    self._wal_look_at = time.monotonic() + WAL_LOOK_SECONDS
                    self.is_wal_due |= self._is_wal_long()
            self._ended = time.monotonic()
            self._took = min(self._ended - started, REST_SECONDS_MAX)
            if worked > LONG_SECONDS:
                self.rest_until = self._ended + self._took
            self.has_others = version_before != self._version_after
            # A COMMIT that had to be settled has closed the connection.
            if connection is self.connection:
                self._version_after = connection.data_version()
        except apsw.Error as error:
            self.close()
            raise TransactionEnded from translate(error, self.path)
        finally:
            if self.connection is not None and self.connection.in_transaction:
                self._rollback()

    def _begin(self, connection: apsw.Connection, first: Job) -> int:
        """Begin a transaction; return how many rows the connection had changed before."""
        self.files.require_in_place()
        if not self._is_wal_moved:
            self._move_wal()
        try:
            if self._probe is None:
                connection.execute("BEGIN IMMEDIATE")
            else:
                self._control("BEGIN IMMEDIATE", first, "begin")
        except apsw.BusyError as error:
            raise translate(error, self.path) from error
        if None in self.files.known:
            self.files.note()
        self._runs_uncounted = False
        # Read while the lock is held; it never goes back within a store.
        self._now_ms = max(self._now_ms, self.clock.now_ms())
        return connection.total_changes()

    def _run(self, job: Job, *, is_alone: bool) -> None:
        """Run one job, in a savepoint unless it is alone in the transaction."""
        execution, call = job.execution, job.execution.call.operation.__qualname__
        if not is_alone:
            self._control("SAVEPOINT job", job)
        try:
            while execution.queries:
                execution.advance(self.execute(execution.queries, call))
            if execution.emits or execution.deferred:
                self.execute(execution.closing(), call)
        except BaseException as error:
            if self.connection is None or not self.connection.in_transaction:
                raise
            job.error = error
            if isinstance(error, apsw.Error):
                job.error = translate(error, self.path)
                job.error.__cause__ = error
                execution.fail(job.error)
        if not is_alone:
            if job.error is not None:
                self._control("ROLLBACK TO job", job)
            self._control("RELEASE job", job)

    def _run_alone(self, job: Job) -> None:
        job.attempts += 1
        job.error = None
        try:
            call, services = job.execution.call, self._settings.services
            job.execution = Execution(call, services, has_all=True)
            job.execution.advance()
        except BaseException as error:
            job.error = error
        else:
            self.commit([job])

    def _commit(self, connection: apsw.Connection, first: Job) -> None:
        """Mark the batch and commit it; if COMMIT fails, find out whether it took effect."""
        is_marked = not first.execution.call.operation.is_marked
        while not is_marked:
            is_new = self._writer_id is None
            if is_new:
                self._batch = 0
                self._writer_id = self._settings.services.new_id()
                self.execute([forget_oldest()], "kernel")
            self._batch += 1
            mark = {"writer_id": self._writer_id, "batch": self._batch}
            try:
                self.execute([Query(MARK_BATCH, mark)], "kernel")
                is_marked = True
            except apsw.ConstraintError:
                # The row was closed by a `settle` of a batch that was never committed.
                if is_new:
                    raise
                self._writer_id = None
        try:
            if self._probe is None:
                connection.execute("COMMIT")
            else:
                self._control("COMMIT", first, "commit")
        except apsw.Error as error:
            self._settle_commit(error)

    def _settle_commit(self, error: apsw.Error) -> None:
        """Determine whether the batch was committed. The side lock is held: nobody wrote since.

        Frames that reached the WAL without a sync could reappear after a crash, so the answer is
        committed in their place. A batch that is visible is checkpointed into the database, because
        the WAL that holds it was not synced, and a second commit makes the emptied WAL durable.
        """
        writer_id, batch = self._writer_id, self._batch
        self.close()
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
            self.close()
            # SQLite writes the commit frame last: without space for it, there is none.
            lacks_room = isinstance(error, apsw.FullError) and isinstance(again, apsw.FullError)
            if is_committed is not False or not lacks_room:
                raise CommitUnknown(
                    f"{self.path}: {error}, and the file cannot be read to determine whether the "
                    "change was committed; call store.settle(id) later",
                    id=commit_id(writer_id, batch),
                ) from again
        if not is_committed:
            raise error

    def _failed_beside(self, unknown: CommitUnknown) -> StoreUnavailable:
        message = f"{self.path} failed during COMMIT: {unknown.__cause__}; nothing was written"
        return StoreUnavailable(message)

    def _is_visible(self, writer_id: str, batch: int) -> bool:
        query = Query(READ_WRITER, {"writer_id": writer_id})
        statement = self._dialect.statement(query.sql)
        found = fetch(self.open(), statement, query, self._now_ms)
        return bool(found) and is_there(batch, found[0]["batch"])

    def _commit_answer(self, writer_id: str, batch: int) -> None:
        if not self._is_wal_moved:
            self._move_wal()
        settle = Query(SETTLE_BATCH, {"writer_id": writer_id, "batch": batch})
        for query in (Query("BEGIN IMMEDIATE", {}), settle, Query("COMMIT", {})):
            fetch(self.open(), self._dialect.statement(query.sql), query, self._now_ms)

    def _count_wal(self, _: apsw.Connection, _name: str, pages: int) -> int:
        if pages < self._wal_pages:
            self._wal_pages_seen = 0  # It was begun again.
        self._wal_pages = pages
        return apsw.SQLITE_OK

    def _is_wal_long(self) -> bool:
        wal = file_status(f"{self.path}-wal")
        return wal is not None and wal[2] > WAL_BYTES_KEPT

    def move_wal_beside(self, reader: apsw.Connection) -> None:
        """Move the WAL into the database while others may write; the caller holds no lock.

        Pages written meanwhile are left. SQLite begins the WAL again only when none is left; so
        when it has become long the next transaction moves those, unless a reader needs the WAL.
        """
        self.is_wal_due = False
        self._wal_pages_seen = self._wal_pages
        (outcome,) = reader.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchall()
        is_busy, pages, moved = cast("tuple[int, int, int]", outcome)
        is_long = pages >= WAL_PAGES_BEGUN_AGAIN or self._is_wal_long()
        if is_long and not is_busy and pages == moved:
            self._is_wal_moved = False

    def _move_wal(self) -> None:
        """Checkpoint what is in the WAL before writing behind it; truncate a long one.

        When the connection is new, the WAL may hold frames that were never synced; if they are
        lost later, all commits behind them are lost too. Skipped if the database has no space to
        grow. Truncating waits for readers, but only briefly: others wait for the lock.
        """
        connection, is_long = self.open(), self._is_wal_long()
        connection.set_busy_timeout(WAL_WAIT_MS if is_long else BUSY_MS)
        try:
            mode = "TRUNCATE" if is_long else "PASSIVE"
            connection.execute(f"PRAGMA wal_checkpoint({mode})").fetchall()
            self._is_wal_moved = True
        except apsw.FullError:
            pass
        finally:
            connection.set_busy_timeout(BUSY_MS)

    def _checkpoint(self) -> None:
        (outcome,) = self.open().execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
        if outcome[0]:
            raise StoreBusy(f"{self.path}: readers prevent the checkpoint of the WAL")

    def _control(self, sql: str, job: Job, boundary: Boundary = "statement") -> None:
        connection, call = self.connection, job.execution.call
        assert connection is not None
        if self._probe is None:
            connection.execute(sql)
            return
        self._probe(Point(boundary, "before", call.name, sql))
        connection.execute(sql)
        self._probe(Point(boundary, "after", call.name, sql))

    def _rollback(self) -> None:
        if self.connection is not None and self.connection.in_transaction:
            self.connection.execute("ROLLBACK")

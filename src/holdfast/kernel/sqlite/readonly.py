"""Reading an SQLite file without writing to it, creating files or waiting for writers.

With a live writer, a read-only connection shares the write-ahead log. If there is no log, or it
cannot be shared, the file is read without locks; a result is then used only if the files did not
change meanwhile.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import TypeVar
from urllib.parse import quote

import apsw

from ...clock import Clock, wall_ms
from ...errors import HoldfastError, StoreBusy, StoreMoved, StoreReadOnly, StoreUnavailable
from ..driver import Execution, Settings
from ..operation import Call
from . import open_file
from .clock import seen_clock
from .connection import (
    BUSY_MS,
    IDLE_READERS_MAX,
    STATEMENTS_CACHED,
    lacks_shared_memory,
    require_place,
    require_store,
    translate,
)
from .transactions import file_status, read_all

R = TypeVar("R")

TRIES_MAX = 20
# Of two changes within one tick of the file system's clock, only the first may be noticed.
TICK_SECONDS = 0.02

FileStatus = tuple[int, ...] | None


class View:
    """A read connection, and the state of the files when it was opened."""

    connection: apsw.Connection

    def __init__(self, path: Path, vfs: str | None, *, may_share: bool = True) -> None:
        self._path = path
        self._vfs = vfs
        self._names = [f"{path}{suffix}" for suffix in ("", "-wal", "-shm", "-journal")]
        self._seen = [file_status(name) for name in self._names]
        _, self._wal, shm, journal = self._seen
        self.is_shared = journal is not None
        """Whether it uses SQLite's locks; otherwise the files must not change meanwhile."""
        if self._wal is not None:
            # Without a shared-memory file that exists or can be created, nobody is writing.
            can_share = may_share and (shm is not None or os.access(path.parent, os.W_OK))
            self.is_shared = can_share or vfs is not None

    def outlast_tick(self) -> None:
        """Wait until another change of the files would be noticed."""
        changed_ns = max((status[-1] for status in self._seen if status is not None), default=0)
        if not self.is_shared and abs(wall_ms() - changed_ns / 1e6) < TICK_SECONDS * 1e3:
            time.sleep(TICK_SECONDS)

    def open(self) -> None:
        """Connect; creates nothing but the shared memory of a log that a crash left behind."""
        name, flags, vfs = str(self._path), apsw.SQLITE_OPEN_READONLY, self._vfs
        is_alone = not self.is_shared and self._wal is not None
        if is_alone:
            vfs = "unix-none"
        elif not self.is_shared:
            name, flags = f"file:{quote(name)}?immutable=1", flags | apsw.SQLITE_OPEN_URI
        self.connection = apsw.Connection(
            name, flags=flags, vfs=vfs, statementcachesize=STATEMENTS_CACHED
        )
        try:
            self._configure(is_alone=is_alone)
        except BaseException:
            self.connection.close()
            raise
        found = self._look()
        # Run by root, SQLite sets the owner of a log that it opens, which changes no content.
        if self.is_shared or (is_alone and _contents(found) == _contents(self._seen)):
            self._seen = found

    def _configure(self, *, is_alone: bool) -> None:
        connection = self.connection
        connection.set_busy_timeout(BUSY_MS)
        connection.config(apsw.SQLITE_DBCONFIG_NO_CKPT_ON_CLOSE, 1)
        connection.config(apsw.SQLITE_DBCONFIG_ENABLE_QPSG, 1)
        connection.limit(apsw.SQLITE_LIMIT_ATTACHED, 0)
        if is_alone:
            # The index of the log is then built on the heap, without shared memory.
            connection.pragma("locking_mode", "exclusive")
        for name, value in {"query_only": 1, "trusted_schema": 0, "temp_store": 2}.items():
            connection.pragma(name, value)
        require_store(connection)

    @property
    def is_current(self) -> bool:
        """Whether the files are unchanged."""
        return self._look() == self._seen

    @property
    def is_sound(self) -> bool:
        """Whether everything read is from one state of the store."""
        return self.is_shared or self.is_current

    @property
    def file(self) -> FileStatus:
        """Device and inode of the opened file."""
        return self._seen[0] and self._seen[0][:2]

    def version(self) -> object:
        """Return a value that changes when another connection commits; raise if outdated."""
        if not self.is_current:
            raise StoreUnavailable(f"{self._path} was replaced; it must be opened again")
        return self.connection.pragma("data_version")

    def _look(self) -> list[FileStatus]:
        """Return which files exist and, if they must not change, also their last change."""
        found = [file_status(name) for name in self._names]
        return [each and each[:2] for each in found[:3]] if self.is_shared else found


def _contents(found: list[FileStatus]) -> list[FileStatus]:
    """Return the status of files without the time of the last change of their owner or mode."""
    return [each and each[:-1] for each in found]


class SqliteReader(open_file.OpenFile):
    """One file opened for reading; of any format, possibly damaged or not a store."""

    def __init__(self, path: Path, settings: Settings, vfs: str | None = None) -> None:
        super().__init__(path, settings, vfs)
        self._clock: Clock = settings.clock
        self._idle: list[View] = []
        self._file: FileStatus = None
        require_place(path, vfs)
        self._verified(lambda connection: None)
        open_file.register(self)

    def _execute(self, call: Call[R]) -> R:
        """Run a query in one snapshot; refuse a call that writes."""
        if call.operation.mode == "write":
            raise StoreReadOnly(operation=call.name)
        tries = 0
        execution = Execution(call, self.settings.services)
        execution.advance()

        def read(connection: apsw.Connection) -> None:
            nonlocal tries, execution
            tries += 1
            if tries > 1:
                execution = Execution(call, self.settings.services)
                execution.advance()
            self._run(connection, execution)

        try:
            self._verified(read)
        except Exception as error:
            self.settings.hooks.report(execution, tries, error)
            raise
        self.settings.hooks.report(execution, tries, None)
        return execution.result

    def pragma(self, name: str, value: int | None = None) -> list[tuple[object, ...]]:
        """Set or read a pragma and return its rows."""
        text = f"PRAGMA {name}" if value is None else f"PRAGMA {name}({value})"
        return self._verified(lambda connection: list(connection.execute(text)))

    def vacuum(self) -> None:
        """Refuse: it rewrites the file."""
        raise StoreReadOnly(operation="vacuum")

    def close(self) -> None:
        """Close the file; does nothing in a forked child."""
        if self.is_inherited:
            return
        self.require_outside()
        self.is_closed = True
        if self._watch is not None:
            self._watch.stop()
            self._watch = None
        while self._idle:
            self._idle.pop().connection.close()
        open_file.forget(self)

    def connections_at_rest(self) -> list[apsw.Connection]:
        """Return the connections that no thread was using when the process forked."""
        return [view.connection for view in [*self._idle, *self._lent_at_rest()]]

    def _with_reader(self, read: Callable[[apsw.Connection], None]) -> None:
        self._verified(read)

    def _version(self, lent: View) -> object:
        return lent.version()

    def _verified(self, read: Callable[[apsw.Connection], R]) -> R:
        """Read without locks, and retry if the files changed meanwhile."""
        for _ in range(TRIES_MAX):
            with suppress(_Torn), self._lend() as view:
                return _whole(view, read)
            time.sleep(TICK_SECONDS)
        raise StoreBusy(f"{self.path} was changed {TRIES_MAX} times while it was read")

    @contextmanager
    def _lend(self) -> Iterator[View]:
        view = self._take()
        is_kept = False
        try:
            yield view
            is_kept = True
        except HoldfastError:
            is_kept = True
            raise
        except apsw.Error as error:
            raise translate(error, self.path) from error
        finally:
            if is_kept and view.connection.in_transaction:
                view.connection.execute("ROLLBACK")
            has_room = len(self._idle) < IDLE_READERS_MAX and not self.is_closed
            if is_kept and has_room and view.is_current:
                self._idle.append(view)
            else:
                view.connection.close()

    def _take(self) -> View:
        with suppress(IndexError):
            while True:
                view = self._idle.pop()
                if view.is_current:
                    return view
                view.connection.close()
        return self._open()

    def _open(self) -> View:
        view = View(self.path, self._vfs)
        try:
            try:
                self._connect(view)
            except apsw.IOError as error:
                if not (view.is_shared and lacks_shared_memory(error)):
                    raise
                # The disk is full, and nobody has shared memory for the log.
                view = View(self.path, self._vfs, may_share=False)
                self._connect(view)
        except apsw.Error as error:
            if not view.is_sound:
                raise _Torn from error
            if not isinstance(error, apsw.ReadOnlyError):
                raise translate(error, self.path) from error
            raise StoreUnavailable(
                f"{self.path} has an interrupted transaction, which must be rolled back first; "
                "open the store for writing once"
            ) from error
        if self._file not in {None, view.file}:
            view.connection.close()
            raise StoreMoved(f"{self.path} was replaced while the store was open; open it again")
        self._file = view.file
        # The clock cannot be read from a damaged file or another format.
        with suppress(HoldfastError, apsw.Error):
            if self.settings.mode == "read" and not self.settings.is_clock_virtual:
                self._clock = seen_clock(partial(self._ask, view.connection)) or self._clock
        return view

    def _connect(self, view: View) -> None:
        # Before opening for writing, only the format is read.
        if self.settings.mode == "read":
            view.outlast_tick()
        view.open()

    def _ask(self, connection: apsw.Connection, call: Call[R]) -> R:
        execution = Execution(call, self.settings.services)
        execution.advance()
        return self._run(connection, execution)

    def _run(self, connection: apsw.Connection, execution: Execution[R]) -> R:
        try:
            return read_all(connection, execution, self._texts, self._clock.now_ms())
        finally:
            if connection.in_transaction:
                connection.execute("ROLLBACK")


class _Torn(StoreUnavailable):
    """The files changed while they were read."""


def _whole(view: View, read: Callable[[apsw.Connection], R]) -> R:
    """Return the result or raise the error of `read`; raise _Torn if the files changed."""
    try:
        result = read(view.connection)
    except Exception as error:
        if not view.is_sound:
            raise _Torn from error
        raise
    if not view.is_sound:
        raise _Torn
    return result

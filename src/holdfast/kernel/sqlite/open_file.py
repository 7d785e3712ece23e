"""An open SQLite file, and what happens to its connections when the process forks.

SQLite keeps one record of locks per file and process. A child inherits the record but not the
locks: its own connections would rely on locks that nobody holds, or wait for a write that nobody
makes. So a fork waits for the current write, and the child closes the connections that were at rest
before it opens a database itself.
"""

from __future__ import annotations

import contextlib
import os
import threading
import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, ClassVar

import apsw

from ..driver import DialectName, Progress, Settings, SyncDriver
from ..signals import Signals
from ..sql import Dialect
from .connection import copy_pages, translate
from .watch import Watch

FORK_SECONDS = 1.0

_open_files: weakref.WeakSet[OpenFile] = weakref.WeakSet()
_inherited: list[tuple[OpenFile, Sequence[apsw.Connection]]] = []
_forking = threading.local()


class OpenFile(SyncDriver):
    """The common part of the driver that writes and the one that only reads."""

    dialect: ClassVar[DialectName] = "sqlite"

    def __init__(self, path: Path, settings: Settings, vfs: str | None) -> None:
        super().__init__(settings, Signals(listen=self._start_watch), f"the store {path}")
        close_inherited()
        self.path = path
        self._vfs = vfs
        self._texts = Dialect(None)
        self._watch: Watch[Any] | None = None
        # A signal handler may enter while its thread holds the lock.
        self._starting = threading.RLock()

    def copy_to(self, path: Path, progress: Progress | None) -> None:
        """Copy one snapshot of the live database into a new file, while others write."""
        self.require_usable()
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600))
        try:
            self._with_reader(lambda source: copy_pages(source, path, progress))
        except apsw.Error as error:
            raise translate(error, path) from error

    def _with_reader(self, read: Callable[[apsw.Connection], None]) -> None:
        raise NotImplementedError

    def _lend(self) -> AbstractContextManager[Any]:
        """Lend a reader to the thread that watches for commits of others."""
        raise NotImplementedError

    def _version(self, lent: Any) -> object:
        """Return a value that changes when another connection commits."""
        raise NotImplementedError

    def _start_watch(self, _topic: str) -> None:
        """From the first wait on, ring all topics when another connection commits."""
        if self._watch is None:
            self.run(lambda: self.signals.ring_here(None), self._watch_with)

    def _watch_with(self, ring: Callable[[], None]) -> None:
        with self._starting:
            if self._watch is None and not self.is_closed:
                self._watch = Watch(self.path, self._lend, self._version, ring)

    def resting_locks(self) -> list[Any]:
        """Return the locks that keep all connections but those of readers at rest."""
        return [] if self._watch is None else [self._watch.looking]

    def _lent_at_rest(self) -> list[Any]:
        """Return what the watching thread has borrowed, unless it was using it."""
        watch = self._watch
        if watch is None or watch.lent is None or not is_held(watch.looking):
            return []
        return [watch.lent]

    def connections_at_rest(self) -> list[apsw.Connection]:
        """Return the connections that no thread was using when the process forked."""
        raise NotImplementedError


def register(file: OpenFile) -> None:
    """Protect a file's connections across forks."""
    _open_files.add(file)


def forget(file: OpenFile) -> None:
    """Note that a file has no connections any more."""
    _open_files.discard(file)


def is_held(lock: Any) -> bool:
    """Whether a lock was taken for the fork."""
    return lock in getattr(_forking, "held", ()) and lock._is_owned()


def _before_fork() -> None:
    """Wait until all connections are at rest, with a timeout."""
    held = _forking.held = []
    for lock in [lock for file in list(_open_files) for lock in file.resting_locks()]:
        # If this thread owns it, it forks in the middle of a write.
        if not lock._is_owned():
            # Noted first, in case of an interrupt in between.
            held.append(lock)
            lock.acquire(timeout=FORK_SECONDS)


def _after_fork_in_parent() -> None:
    for lock in getattr(_forking, "held", ()):
        if lock._is_owned():
            lock.release()
    _forking.held = []


def _after_fork_in_child() -> None:
    """Keep all connections from finalizers, those in the middle of a write included.

    Nothing is closed yet: a child that opens no database must not wait for SQLite's mutexes.
    """
    for file in list(_open_files):
        _inherited.append((file, file.connections_at_rest()))
        _open_files.discard(file)
    _after_fork_in_parent()


def close_inherited() -> None:
    """Close the connections that were at rest at the fork, without changing their files."""
    for _, connections in _inherited:
        for connection in connections:
            with contextlib.suppress(apsw.Error):
                connection.config(apsw.SQLITE_DBCONFIG_NO_CKPT_ON_CLOSE, 1)
                connection.close(force=True)
    _inherited[:] = [(file, ()) for file, _ in _inherited]


os.register_at_fork(
    before=_before_fork,
    after_in_parent=_after_fork_in_parent,
    after_in_child=_after_fork_in_child,
)

"""Noticing commits to a file by other connections, of any process."""

from __future__ import annotations

import ctypes
import os
import select
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Generic, TypeVar

import apsw

from ...errors import StoreError
from ..threads import Latch, Thread

T = TypeVar("T")

POLL_SECONDS = 0.05
# With inotify, polling is only a fallback.
POLL_NOTIFIED_SECONDS = 0.25
# A write is notified before its commit becomes visible: check with these pauses.
RETRY_SECONDS = (0.0, 0.0005, 0.001, 0.002, 0.004, 0.008, 0.016, 0.032, 0.064)
# While commits come fast, waiters are woken no more often than this.
QUIET_SECONDS = 0.02
_IN_MODIFY = 0x2


class Watch(Generic[T]):
    """A thread that calls `ring` after commits of other connections."""

    def __init__(
        self,
        path: Path,
        reader: Callable[[], AbstractContextManager[T]],
        version: Callable[[T], object],
        ring: Callable[[], None],
    ) -> None:
        self._wal = f"{path}-wal"
        self._reader = reader
        self._version_of = version
        self._ring = ring
        self._stopping = Latch()
        self.lent: T | None = None
        self.looking = threading.RLock()
        """Holding it keeps the connection at rest."""
        self._stop_read, self._stop_write = os.pipe()
        name = f"holdfast-poller-{path.name}"
        self._thread = Thread(self._run, name)
        self._thread.start()

    def stop(self) -> None:
        """End the thread."""
        self._stopping.set()
        os.write(self._stop_write, b"!")
        self._thread.join()
        os.close(self._stop_read)
        os.close(self._stop_write)

    def _run(self) -> None:
        while not self._stopping.is_set:
            writes = -1
            try:
                with self._reader() as self.lent:
                    seen = self._version(self.lent)
                    writes = _watch_writes(self._wal)
                    # A commit between a waiter's read and ours may have been missed.
                    self._ring()
                    self._watch(self.lent, seen, writes)
            except (apsw.Error, StoreError):
                self._stopping.wait(POLL_SECONDS)
            finally:
                self.lent = None
                if writes >= 0:
                    os.close(writes)

    def _watch(self, lent: T, seen: object, writes: int) -> None:
        while not self._stopping.is_set:
            for pause in RETRY_SECONDS if self._wait(writes) else (0.0,):
                self._stopping.wait(pause)
                if (version := self._version(lent)) != seen:
                    seen = version
                    self._ring()
                    self._stopping.wait(QUIET_SECONDS)
                    break

    def _version(self, lent: T) -> object:
        with self.looking:
            return self._version_of(lent)

    def _wait(self, writes: int) -> bool:
        """Wait for a write to the file or until the next poll; return whether there was one."""
        poll = select.poll()
        poll.register(self._stop_read, select.POLLIN)
        if writes >= 0:
            poll.register(writes, select.POLLIN)
        seconds = POLL_SECONDS if writes < 0 else POLL_NOTIFIED_SECONDS
        is_written = writes in dict(poll.poll(seconds * 1000))
        if is_written:
            os.read(writes, 4096)
        return is_written


def _watch_writes(path: str) -> int:
    """Return an inotify descriptor that is readable after writes to a file; -1 without inotify."""
    try:
        libc = ctypes.CDLL(None)
        descriptor: int = libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
        if (
            descriptor >= 0
            and libc.inotify_add_watch(descriptor, os.fsencode(path), _IN_MODIFY) < 0
        ):
            os.close(descriptor)
            return -1
    except (AttributeError, OSError):
        return -1
    return descriptor

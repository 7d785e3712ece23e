"""Noticing that other connections, of whichever process, have committed to a file."""

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
from ..threads import Flag, Thread

T = TypeVar("T")

POLL_SECONDS = 0.05
# Where the system tells of writes, looking without being told is for the unforeseen only.
POLL_TOLD_SECONDS = 0.25
# Who is told of a write looks until its commit, which comes after the write, can be seen.
LOOK_SECONDS = (0.0, 0.0005, 0.001, 0.002, 0.004, 0.008, 0.016, 0.032, 0.064)
# While commits come fast, who waits is woken no more often than this.
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
        self._stopping = Flag()
        self.lent: T | None = None
        self.looking = threading.RLock()
        """Whoever holds it keeps the connection at rest."""
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
            told = -1
            try:
                with self._reader() as self.lent:
                    seen = self._version(self.lent)
                    told = _told_of_writes(self._wal)
                    # A commit between somebody's look and ours may have been missed.
                    self._ring()
                    self._watch(self.lent, seen, told)
            except (apsw.Error, StoreError):
                self._stopping.wait(POLL_SECONDS)
            finally:
                self.lent = None
                if told >= 0:
                    os.close(told)

    def _watch(self, lent: T, seen: object, told: int) -> None:
        while not self._stopping.is_set:
            for pause in LOOK_SECONDS if self._wait(told) else (0.0,):
                self._stopping.wait(pause)
                if (version := self._version(lent)) != seen:
                    seen = version
                    self._ring()
                    self._stopping.wait(QUIET_SECONDS)
                    break

    def _version(self, lent: T) -> object:
        with self.looking:
            return self._version_of(lent)

    def _wait(self, told: int) -> bool:
        """Wait until the file is written to, or for a while; say whether it was."""
        poll = select.poll()
        poll.register(self._stop_read, select.POLLIN)
        if told >= 0:
            poll.register(told, select.POLLIN)
        seconds = POLL_SECONDS if told < 0 else POLL_TOLD_SECONDS
        is_told = told in dict(poll.poll(seconds * 1000))
        if is_told:
            os.read(told, 4096)
        return is_told


def _told_of_writes(path: str) -> int:
    """Return a descriptor that is readable after writes to a file; -1 where nobody tells us."""
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

"""The lock of the writers of all processes, in files beside the database.

`flock` wakes those that wait, but gives the lock to the first that asks again: a process that
writes without a pause takes it back before the others are awake, dozens of times in a row. So
there are two locks. Only the process that has the turn asks for the lock of the writers, and it
keeps the turn until it has that lock: nobody can overtake it. A process that was stopped while it
waits keeps the turn too; the others then go on without turns for a while.
"""

from __future__ import annotations

import fcntl
import functools
import os
import threading
import time
from pathlib import Path

from ..threads import Thread
from .connection import lock_error

# A turn that does not come within this time is not waited for.
TURN_SECONDS = 0.5
# How long nobody's turn is waited for then.
UNFAIR_SECONDS = 10.0


class FileLock:
    """A lock between processes, on a file of its own."""

    def __init__(self, path: Path) -> None:
        try:
            # A file object is closed by its finalizer if the caller is interrupted.
            self._file = open(path, "ab", buffering=0, opener=_private)  # noqa: SIM115
        except OSError as error:
            raise lock_error(path, error) from error
        self._descriptor = self._file.fileno()
        # One C call each, so an interrupt comes before or after it.
        self.release = functools.partial(fcntl.flock, self._descriptor, fcntl.LOCK_UN)
        self.take = functools.partial(fcntl.flock, self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        """Take the lock if it is free, else raise BlockingIOError."""

    def acquire(self) -> None:
        """Wait for the lock, without polling."""
        fcntl.flock(self._descriptor, fcntl.LOCK_EX)

    def try_acquire(self) -> bool:
        """Take the lock if it is free."""
        try:
            self.take()
        except BlockingIOError:
            return False
        return True

    def acquire_within(self, seconds: float) -> bool:
        """Wait for the lock with a timeout: a stopped process may hold it."""
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
        """Close the file, which releases the lock."""
        self._file.close()


class SideLock:
    """The lock of a database's writers, which is given to them in turn."""

    def __init__(self, database: Path) -> None:
        self._lock = FileLock(database.with_name(f"{database.name}-lock"))
        self._turn = FileLock(database.with_name(f"{database.name}-turn"))
        self.release = self._lock.release
        self._unfair_until = 0.0

    def acquire(self) -> None:
        """Wait for the lock."""
        try:
            self._wait_for_turn(TURN_SECONDS)
            self._lock.acquire()
        finally:
            self._turn.release()

    def try_acquire(self) -> bool:
        """Take the lock if it is free and nobody waits for it."""
        try:
            if time.monotonic() >= self._unfair_until:
                self._turn.take()
            self._lock.take()
        except BlockingIOError:
            return False
        finally:
            self._turn.release()
        return True

    def acquire_within(self, seconds: float) -> bool:
        """Wait for the lock with a timeout."""
        until = time.monotonic() + seconds
        try:
            self._wait_for_turn(min(seconds, TURN_SECONDS))
            return self._lock.acquire_within(until - time.monotonic())
        finally:
            self._turn.release()

    def _wait_for_turn(self, seconds: float) -> None:
        if time.monotonic() >= self._unfair_until and not self._turn.acquire_within(seconds):
            self._unfair_until = time.monotonic() + UNFAIR_SECONDS

    def close(self) -> None:
        """Close the files; a forked child does this so that it cannot hold the parent's lock."""
        self._turn.close()
        self._lock.close()


def _private(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NOFOLLOW, 0o600)

"""The lock of the writers of all processes, in files beside the database.

`flock` wakes those that wait, but gives the lock to the first that asks again: a process that
writes without a pause takes it back before the others are awake, dozens of times in a row. So
there are two locks. Only the process that has the turn asks for the lock of the writers, and it
keeps the turn until it has that lock: nobody can overtake it. A process that was stopped while it
waits keeps the turn too; the others then go on without turns until it is given back.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import functools
import os
import threading
import time
from pathlib import Path

from ...errors import StoreUnavailable
from ..threads import Latch, Thread
from .connection import lock_error

# A turn that does not come within this time is not waited for.
TURN_SECONDS = 0.5
POLL_SECONDS = 0.005


class FileLock:
    """A lock between processes, on a file of its own."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.wait: Wait | None = None
        """The last wait with a timeout; one that was given up may still last."""
        try:
            # A file object is closed by its finalizer if the caller is interrupted.
            self._file = open(path, "ab", buffering=0, opener=_private)  # noqa: SIM115
        except OSError as error:
            raise lock_error(path, error) from error
        self._descriptor = self._file.fileno()
        found = os.fstat(self._descriptor)
        self._inode = found.st_dev, found.st_ino
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
        """Wait for the lock with a timeout: a stopped process may hold it.

        A wait that is given up takes the lock later and releases it at once, whoever of this
        process has it then. Until it does, no other wait for that file is begun, but the lock is
        tried again and again: waits that nobody ends must not add up. Raises StoreUnavailable if a
        wait cannot begin.
        """
        until = time.monotonic() + seconds
        while not self.try_acquire():
            left = until - time.monotonic()
            earlier = _given_up.get(self._inode)
            if earlier is None or not earlier.is_on:
                return self._wait_within(left)
            if left <= 0:
                return False
            time.sleep(min(left, POLL_SECONDS))
        return True

    def _wait_within(self, seconds: float) -> bool:
        try:
            wait = self.wait = Wait(self._descriptor)
        except OSError as error:
            raise lock_error(self._path, error) from error
        try:
            wait.begin()
            has_lock = wait.has_ended_within(seconds)
            if not has_lock:
                _given_up[self._inode] = wait
            return has_lock
        except BaseException as error:
            if wait.give_up():
                _given_up[self._inode] = wait
            else:
                self.release()
            if isinstance(error, RuntimeError):
                self.wait = None
                reason = OSError(errno.EAGAIN, str(error))
                raise lock_error(self._path, reason) from error
            raise

    def close(self) -> None:
        """Close the file, which releases the lock."""
        self._file.close()

    def close_in_child(self) -> None:
        """Close all that a forked child has inherited, without releasing the parent's lock."""
        self.close()
        if self.wait is not None:
            self.wait.file.close()


class Wait:
    """A wait for a file's lock in a thread of its own: `flock` has no timeout."""

    def __init__(self, descriptor: int) -> None:
        # A descriptor of its own, because the lock may be closed meanwhile.
        self.file = os.fdopen(os.dup(descriptor), "ab", buffering=0)
        self._thread = Thread(self._run, "holdfast-lock")
        self._decision = threading.Lock()
        self._has_lock = Latch()
        self._is_over = False

    @property
    def is_on(self) -> bool:
        """Whether it has begun, and not ended."""
        return self._thread.ident is not None and not self._is_over

    def begin(self) -> None:
        """Begin to wait. Raises RuntimeError if there can be no more threads."""
        self._thread.start()

    def has_ended_within(self, seconds: float) -> bool:
        """Whether the lock is taken in time; else it is given up."""
        return self._has_lock.wait(max(0, seconds)) or not self.give_up()

    def give_up(self) -> bool:
        """Give the wait up; False if the lock is taken already."""
        return self._decision.acquire(blocking=False)

    def _run(self) -> None:
        try:
            fcntl.flock(self.file, fcntl.LOCK_EX)
            if self._decision.acquire(blocking=False):
                self._has_lock.set()
            else:
                fcntl.flock(self.file, fcntl.LOCK_UN)
            self.file.close()
        finally:
            self._is_over = True


_given_up: dict[tuple[int, int], Wait] = {}
"""The last wait for each file that was given up."""


def _forget_in_child() -> None:
    for wait in _given_up.values():
        wait.file.close()
    _given_up.clear()


os.register_at_fork(after_in_child=_forget_in_child)


class SideLock:
    """The lock of a database's writers, which is given to them in turn."""

    def __init__(self, database: Path) -> None:
        self._lock = FileLock(database.with_name(f"{database.name}-lock"))
        try:
            self._turn = FileLock(database.with_name(f"{database.name}-turn"))
        except BaseException:
            self._lock.close()
            raise
        self.release = self._lock.release
        self.release_turn = self._turn.release

    def acquire(self) -> None:
        """Wait for the lock."""
        try:
            self._wait_for_turn(TURN_SECONDS)
            self._lock.acquire()
        finally:
            self._turn.release()

    def try_acquire(self, *, keeps_turn: bool = False) -> bool:
        """Take the lock if it is free and nobody waits for it.

        If not, `keeps_turn` keeps the turn, so that nobody overtakes before `acquire` is called.
        """
        is_taken = False
        try:
            if self._turn.wait is None or not self._turn.wait.is_on:
                self._turn.take()
            self._lock.take()
            is_taken = True
        except BlockingIOError:
            return False
        finally:
            if is_taken or not keeps_turn:
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

    def acquire_by(self, deadline: float) -> bool:
        """Wait for the lock until a monotonic time, by polling.

        Unlike `acquire_within`, a wait that is given up leaves nothing behind that could release
        the lock of another thread of this process.
        """
        try:
            self._wait_for_turn(min(deadline - time.monotonic(), TURN_SECONDS))
            while not (is_taken := self._lock.try_acquire()) and time.monotonic() < deadline:
                time.sleep(POLL_SECONDS)
            return is_taken
        finally:
            self._turn.release()

    def _wait_for_turn(self, seconds: float) -> None:
        # As long as an earlier wait lasts, the turn is with a process that was stopped.
        if self._turn.wait is None or not self._turn.wait.is_on:
            # Without threads or descriptors to wait with, there is no turn.
            with contextlib.suppress(StoreUnavailable):
                self._turn.acquire_within(seconds)

    def close(self) -> None:
        """Close the files."""
        self._turn.close()
        self._lock.close()

    def close_in_child(self) -> None:
        """Close the files in a forked child, so that it cannot hold the parent's lock."""
        self._turn.close_in_child()
        self._lock.close_in_child()


def _private(path: str, flags: int) -> int:
    # Opening a pipe would wait for its reader; locks of files are waited for all the same.
    return os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK, 0o600)

"""Connections that a forked child inherits: it closes them before it opens a database itself.

SQLite keeps one record of locks for each file in a process. A child inherits the record, but not
the locks: a connection of its own would rely on locks that nobody holds, or wait for a write that
nobody is making. So a fork waits for the write that is under way, and what was at rest is closed.
"""

from __future__ import annotations

import contextlib
import os
import threading
import weakref
from collections.abc import Sequence
from typing import Any, Protocol

import apsw

FORK_SECONDS = 1.0


class Engine(Protocol):
    """What has connections to a file."""

    def resting_locks(self) -> list[Any]:
        """Return the locks under which no connection but a reader's is in use."""
        ...

    def abandon(self) -> None:
        """In a forked child: keep what must not be closed, by `keep`."""
        ...


_engines: weakref.WeakSet[Engine] = weakref.WeakSet()
_inherited: list[tuple[object, Sequence[apsw.Connection]]] = []
_forking = threading.local()


def register(engine: Engine) -> None:
    """Have an engine's connections taken care of in forked children."""
    _engines.add(engine)


def forget(engine: Engine) -> None:
    """The engine has no connections any more."""
    _engines.discard(engine)


def _hold() -> None:
    """Before a fork: wait until all connections are at rest, but not for ever."""
    held = _forking.held = []
    for lock in [lock for engine in list(_engines) for lock in engine.resting_locks()]:
        # Its owner is this thread: it forks in the middle of a write.
        if not lock._is_owned():
            # Noted first: an interrupt may come between.
            held.append(lock)
            lock.acquire(timeout=FORK_SECONDS)


def is_held(lock: Any) -> bool:
    """Tell whether a lock was taken for the fork."""
    return lock in getattr(_forking, "held", ()) and lock._is_owned()


def _release() -> None:
    """After a fork, in the parent."""
    for lock in getattr(_forking, "held", ()):
        if lock._is_owned():
            lock.release()
    _forking.held = []


def _abandon() -> None:
    """After a fork, in the child."""
    for engine in list(_engines):
        engine.abandon()
        _engines.discard(engine)
    _release()


def keep(owner: object, at_rest: Sequence[apsw.Connection]) -> None:
    """In the child: keep what a finalizer would close, also what may be in the middle of a write.

    Nothing is done yet: a child that opens no database must not wait for SQLite's mutexes.
    """
    _inherited.append((owner, at_rest))


def close_inherited() -> None:
    """Close the connections that were at rest at the fork, and leave their files as they are."""
    for _, connections in _inherited:
        for connection in connections:
            with contextlib.suppress(apsw.Error):
                connection.config(apsw.SQLITE_DBCONFIG_NO_CKPT_ON_CLOSE, 1)
                connection.close(force=True)
    _inherited[:] = [(owner, ()) for owner, _ in _inherited]


os.register_at_fork(before=_hold, after_in_parent=_release, after_in_child=_abandon)

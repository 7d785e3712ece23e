"""The connection pool of one store; each connection is used by one call at a time.

A connection is owned by whatever refers to it. When an interrupt ends a call between any two
instructions, its reference is dropped, the connection closes and its slot is free again: slots are
counted by weak references, so the count cannot go wrong.
"""

from __future__ import annotations

import math
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from contextlib import closing
from typing import Any

import psycopg

from ...errors import HoldfastError, InvalidArgument, StoreClosed, StoreUnavailable
from ..operation import Row
from ..url import PostgresTarget, without_values
from .pipeline import Link, Message, Slot

CONNECTIONS_MAX = 16
CONNECT_SECONDS_MAX = 10
IDLE_SECONDS_MAX = 600.0
LIFE_SECONDS_MAX = 3600.0
OPTIONS: dict[str, Any] = {
    "keepalives_idle": 10,
    "keepalives_interval": 5,
    "keepalives_count": 3,
    "tcp_user_timeout": 20_000,
}
STILL_THERE = Message("SELECT 1")


class Connection(psycopg.Connection[Any]):
    """A connection that closes with its last reference, without a warning."""

    def __del__(self, _: Any = None, /) -> None:
        """Leave closing to libpq."""


class Turn:
    """A position in the queue for a connection."""

    def __init__(self) -> None:
        self.link: Link | None = None
        self.has_come = False
        """Set together with `link`, or without one if a slot may be free."""
        self.wake: Callable[[], object] | None = None

    def come(self, link: Link | None) -> None:
        """Wake the waiter."""
        self.link = link
        self.has_come = True
        if self.wake is not None:
            self.wake()


def options(seconds: float, name: str) -> dict[str, Any]:
    """Return the arguments of a connection that is made within some seconds, at least two."""
    return {
        **OPTIONS,
        "connect_timeout": max(2, math.ceil(min(CONNECT_SECONDS_MAX, seconds))),
        "application_name": name,
        "autocommit": True,
        "prepare_threshold": None,
    }


def connect(dsn: str, seconds: float, name: str) -> Connection:
    """Connect within a time limit; raises psycopg's errors."""
    return Connection.connect(dsn, **options(seconds, name))


def connect_error(error: psycopg.Error, dsn: str) -> HoldfastError:
    """Return our error for a failed first connection."""
    reason = " ".join(str(error).split())
    if isinstance(error, psycopg.ProgrammingError):
        reason = without_values(reason, dsn)
        return InvalidArgument(f"the PostgreSQL URL is not usable: {reason}")
    refused = "FATAL:" in reason  # The server answered: there is no such database, for example.
    what = "refused the connection" if refused else "cannot be reached"
    return StoreUnavailable(f"PostgreSQL {what}: {reason}")


class Connections:
    """A pool with a fair queue. Its methods never block, except `connect`."""

    def __init__(self, target: PostgresTarget) -> None:
        self.idle: list[Link] = []
        self.retired: list[str] = []
        """Writers whose connection was closed while idle: none of their commits is in doubt."""
        self._target = target
        self.dsn = target.dsn
        self._places: list[weakref.ref[Slot]] = []
        self._waiting: deque[Turn] = deque()
        # A signal handler may enter while its thread holds the lock.
        self._lock = threading.RLock()
        self._is_closed = False

    @property
    def lent(self) -> int:
        """How many connections are in use or being opened."""
        with self._lock:
            self._places = [
                place for place in self._places if (found := place()) and not found.is_free
            ]
            return len(self._places) - len(self.idle)

    def take(self) -> Link | Slot | None:
        """Return a connection, or a slot for a new one, or None if all are in use."""
        with self._lock:
            if self._is_closed:
                raise StoreClosed("the PostgreSQL store is closed; open it again")
            while self.idle:
                link = self.idle.pop()
                # Input on an idle connection means that the server closed it.
                if link.is_quiet():
                    return link
                link.close()
            if self.lent >= CONNECTIONS_MAX:
                return None
            place = Slot()
            self._places.append(weakref.ref(place))
            return place

    def connect(self, place: Slot, seconds: float) -> Link:
        """Open a connection in a slot; blocks. The caller frees the slot on failure."""
        connection = connect(self._target.dsn, seconds, "holdfast")
        # Old poolers cannot keep prepared statements from one transaction to the next.
        return Link(connection, place, prepares=self._target.prepares)

    def answer(self, message: Message, seconds: float) -> list[Row] | None:
        """Return the server's answer on a connection that is opened for this; blocks.

        None if it does not answer.
        """
        try:
            with closing(self.connect(Slot(), seconds)) as link:
                return link.run([message], seconds)[0].rows
        except psycopg.Error:
            return None

    def give(self, link: Link) -> None:
        """Take a connection back, or hand it to the first in the queue."""
        now = time.monotonic()
        with self._lock:
            while self.idle and self.idle[0].used_at < now - IDLE_SECONDS_MAX:
                self._retire(self.idle.pop(0))
            if self._is_closed or link.made_at < now - LIFE_SECONDS_MAX:
                self._retire(link)
                return
            link.used_at = now
            if self._waiting:
                self._waiting.popleft().come(link)
            else:
                self.idle.append(link)

    def _retire(self, link: Link) -> None:
        if link.writer_id:
            self.retired.append(link.writer_id)
        self.discard(link)

    def discard(self, link: Link, *, is_server_away: bool = False) -> None:
        """Close a broken connection, and with `is_server_away` all idle ones too."""
        link.close()
        with self._lock:
            while is_server_away and self.idle:
                self.idle.pop().close()
            if self._waiting:
                self._waiting.popleft().come(None)

    def join_line(self) -> Turn:
        """Join the queue for a connection."""
        turn = Turn()
        with self._lock:
            self._waiting.append(turn)
        return turn

    def leave_line(self, turn: Turn) -> None:
        """Leave the queue; a connection that has just arrived goes to the next."""
        with self._lock:
            if turn in self._waiting:
                self._waiting.remove(turn)
            if turn.link is not None:
                self.give(turn.link)

    def last(self) -> Link | None:
        """Retire all idle connections but one, and return that if writers are to be removed."""
        with self._lock:
            while len(self.idle) > 1:
                self._retire(self.idle.pop())
            self.retired += [link.writer_id for link in self.idle if link.writer_id]
            return self.idle[0] if self.retired and self.idle else None

    def close(self) -> None:
        """Close idle connections; those in use are closed when they are given back."""
        with self._lock:
            self._is_closed = True
            while self.idle:
                self.idle.pop().close()
            while self._waiting:
                self._waiting.popleft().come(None)

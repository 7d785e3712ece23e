"""Leases: a time-limited right to write one row, with a fence that only grows.

A noun that can be leased has the columns `holder`, `fence` and `lease_expires_at` in its own
table. A lease is expired iff `lease_expires_at <= now`; its holder may still renew it with the
right fence until another takes it. Every protected write checks the fence in its own transaction.
"""

from __future__ import annotations

import functools
import logging
import os
import queue
import socket
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from .arguments import require_seconds, require_text, shown
from .clock import uptime_ms
from .errors import (
    HoldfastError,
    InvalidArgument,
    LeaseHeld,
    LeaseLost,
    NotFound,
    StoreClosed,
    StoreForked,
)
from .kernel.operation import Op, Query, Row, one
from .kernel.threads import Flag, Thread
from .records import Lease

LEASE_SECONDS_MAX = 7 * 24 * 3600
SELF_FENCE_SHARE = 0.2
LEAVE_SECONDS_MAX = 2.0
log = logging.getLogger("holdfast.leases")

# The holder `boots…`, where `boots` is an instance's name, but not the boot that is running now.
EARLIER_BOOT = """holder <> :holder
    AND substr(holder, 1, length(CAST(:boots AS TEXT))) = :boots"""
ACQUIRE = """
UPDATE {table} SET holder = :holder, fence = fence + 1, lease_expires_at = :now + :lease_ms
WHERE id = :id AND (holder IS NULL OR lease_expires_at <= :now)
RETURNING id, holder, fence, lease_expires_at
"""
RENEW = """
UPDATE {table}
SET lease_expires_at = CASE
    WHEN lease_expires_at > :now + :lease_ms THEN lease_expires_at ELSE :now + :lease_ms END
WHERE id = :id AND fence = :fence AND holder IS NOT NULL
RETURNING id, holder, fence, lease_expires_at
"""
RELEASE = """
UPDATE {table} SET holder = NULL, lease_expires_at = NULL
WHERE id = :id AND fence = :fence AND holder IS NOT NULL RETURNING id
"""
LOOK = """
SELECT id, holder, fence, lease_expires_at FROM {table} WHERE id = :id /*pg FOR NO KEY UPDATE */
"""


class LeasedTable:
    """The lease rules over one table."""

    def __init__(self, table: str, noun: str) -> None:
        if not table.isidentifier():
            raise InvalidArgument(f"{shown(table)} is not a table name")
        self._noun = noun
        self._acquire = ACQUIRE.format(table=table)
        self._renew = RENEW.format(table=table)
        self._release = RELEASE.format(table=table)
        self._look = LOOK.format(table=table)

    def acquire(self, id: str, holder: str, lease_seconds: float) -> Op[Lease]:
        """Take the lease and raise its fence. Raises LeaseHeld while another's is alive."""
        lease_ms = lease_milliseconds(lease_seconds)
        require_text("holder", holder)
        row = yield from one(self._acquire, id=id, holder=holder, lease_ms=lease_ms)
        if row is not None:
            return _lease(row)
        current = yield from self._current(id)
        raise LeaseHeld(
            f"{self._noun} {id} is leased by {current['holder']!r}",
            id=id,
            holder=current["holder"],
            expires_at=current["lease_expires_at"],
        )

    def renew(self, lease: Lease, lease_seconds: float) -> Op[Lease]:
        """Prolong the lease, never shorten it. Raises LeaseLost under an old fence."""
        lease_ms = lease_milliseconds(lease_seconds)
        _require_lease(lease)
        row = yield from one(self._renew, id=lease.id, fence=lease.fence, lease_ms=lease_ms)
        if row is None:
            raise (yield from self._lost(lease))
        return _lease(row)

    def check(self, lease: Lease) -> Op[None]:
        """Lock the row and make sure that the fence is still the lease's, or raise LeaseLost."""
        _require_lease(lease)
        current = yield from self._current(lease.id)
        if current["fence"] != lease.fence or current["holder"] is None:
            raise self._error(lease, current)

    def release(self, lease: Lease) -> Op[None]:
        """Give the lease back. Raises LeaseLost under an old fence."""
        _require_lease(lease)
        if (yield from one(self._release, id=lease.id, fence=lease.fence)) is None:
            raise (yield from self._lost(lease))

    def _current(self, id: str) -> Op[Row]:
        row = yield from one(self._look, id=id)
        if row is None:
            raise NotFound(f"there is no {self._noun} {id!r}", id=id)
        return row

    def _lost(self, lease: Lease) -> Op[LeaseLost]:
        return self._error(lease, (yield from self._current(lease.id)))

    def _error(self, lease: Lease, current: Row) -> LeaseLost:
        reason = f"the current fence is {current['fence']}"
        if current["fence"] == lease.fence:
            reason = "it was given back"
        return LeaseLost(
            f"{self._noun} {lease.id}: {lease.holder!r} lost its lease with fence {lease.fence}, "
            f"{reason}; stop this attempt, nothing was written",
            id=lease.id,
            fence=lease.fence,
            current_fence=current["fence"],
        )


@dataclass(frozen=True, slots=True)
class Guard:
    """A lease that every write through a handle needs.

    `look` locks its row and finds nothing once the fence is old; it goes out with the first
    statements of the write, in the same transaction. `is_lost` is what the holder itself knows.
    """

    noun: str
    id: str
    fence: int
    look: Query
    is_lost: Callable[[], bool] | None = None

    def require_known(self) -> None:
        """Raise LeaseLost if its holder knows that it is lost."""
        if self.is_lost is not None and self.is_lost():
            self.require([])

    def require(self, found: Sequence[Row]) -> None:
        """Raise LeaseLost unless the look found the row."""
        if not found or (self.is_lost is not None and self.is_lost()):
            raise LeaseLost(
                f"{self.noun} {self.id}: the lease with fence {self.fence} is lost; stop this "
                "attempt, nothing was written",
                id=self.id,
                fence=self.fence,
            )

    def check(self) -> Op[None]:
        """Lock the row and make sure that the lease still lives, or raise LeaseLost."""
        self.require((yield self.look))


class Leasing(Protocol):
    """One lease that a heartbeat takes, renews and gives back, each in a call of its own."""

    lease_seconds: float

    def take(self) -> Lease:
        """Take the lease, or raise why it cannot be had."""
        ...

    def renew(self, lease: Lease) -> object:
        """Prolong it, or raise LeaseLost."""
        ...

    def release(self, lease: Lease) -> object:
        """Give it back, or raise LeaseLost."""
        ...


class Heartbeat:
    """A thread that takes a lease, renews it at a third of its length, and gives it back.

    An interrupt or a cancellation hits whoever asked for the lease, never this thread. So no lease
    is taken of which nobody knows, and it is given back as soon as it is stopped or `owner` is
    gone. `is_lost` turns true as soon as another holder is seen, and also by itself shortly before
    the lease would expire without an answer: the holder must then stop.
    """

    def __init__(self, owner: object, leasing: Leasing) -> None:
        self._leasing = leasing
        # Whatever is put here stops it. To put is one call of a function written in C, which an
        # interrupt cannot cut in two, nor the clearing of `owner` drop.
        self.stops: queue.SimpleQueue[object] = queue.SimpleQueue()
        self._owner = weakref.ref(owner, self.stops.put)
        self._lease: Lease | None = None
        self._error: BaseException | None = None
        self._taken = Flag()
        self._ended = Flag()
        self._is_taken_over = False
        self._renewed_at = uptime_seconds()
        self._pid = os.getpid()
        self._thread = Thread(self._run, "holdfast-heartbeat")

    @property
    def is_lost(self) -> bool:
        """Whether the lease must be taken for lost."""
        margin = self._leasing.lease_seconds * (1 - SELF_FENCE_SHARE)
        return self._is_taken_over or uptime_seconds() - self._renewed_at > margin

    def take(self) -> Lease:
        """Start, and return the lease once it is taken; raise why it cannot be had."""
        self._thread.start()
        self._taken.wait(threading.TIMEOUT_MAX)
        self._raise_error()
        assert self._lease is not None, "it was stopped before it began"
        return self._lease

    def leave(self) -> None:
        """After a stop, wait for the lease to be given back, but not for long."""
        # One that has not begun will find that it was stopped.
        if self._thread.ident is not None:
            self._ended.wait(LEAVE_SECONDS_MAX)

    def finish(self) -> None:
        """After a stop, wait until the lease is given back; raise why it was not.

        An interrupt is raised once that is done; a second one at once, and it is still done.
        """
        if os.getpid() != self._pid:
            self._give_back()
        elif self._thread.ident is not None:
            try:
                while not self._ended.wait(1.0):
                    pass
            except BaseException:
                self.leave()
                raise
        self._raise_error()

    def _raise_error(self) -> None:
        error, self._error = self._error, None
        try:
            if error is not None:
                raise error
        finally:
            del error

    def _run(self) -> None:
        try:
            if self.stops.empty():
                self._renewed_at = uptime_seconds()
                self._lease = self._leasing.take()
        except BaseException as error:
            self._error = error
        finally:
            self._taken.set()
        try:
            while self._lease is not None and not self._is_taken_over and not self._is_stopped():
                self._beat(self._lease)
            self._give_back()
        finally:
            self._ended.set()

    def _is_stopped(self) -> bool:
        """Wait for a third of the lease, or until it is stopped."""
        try:
            self.stops.get(timeout=self._leasing.lease_seconds / 3)
        except queue.Empty:
            return False
        return True

    def _beat(self, lease: Lease) -> None:
        began = uptime_seconds()
        try:
            self._leasing.renew(lease)
        except (LeaseLost, NotFound, StoreClosed, StoreForked):
            self._is_taken_over = True
        except HoldfastError:
            log.warning("a lease could not be renewed; trying again", exc_info=True)
        else:
            self._renewed_at = began

    def _give_back(self) -> None:
        """Give the lease back; one that is lost already is not an error."""
        if self._lease is None:
            return
        try:
            self._leasing.release(self._lease)
        except (LeaseLost, NotFound):
            return
        except BaseException as error:
            self._error = error
            if self._owner() is None:
                log.warning("a lease could not be given back; it will expire", exc_info=True)


class Kept:
    """One of the leases that a Keeper keeps alive."""

    __slots__ = ("_is_lost", "_owner", "fence", "lease_seconds", "number", "renewed_at")

    def __init__(
        self, owner: object, number: int, fence: int, lease_seconds: float, renewed_at: float
    ) -> None:
        self._owner = weakref.ref(owner)
        self.number = number
        self.fence = fence
        self.lease_seconds = lease_seconds
        self.renewed_at = renewed_at
        self._is_lost = False

    @property
    def is_lost(self) -> bool:
        """Whether the lease must be taken for lost: another has it, or it is about to expire."""
        margin = self.lease_seconds * (1 - SELF_FENCE_SHARE)
        return self._is_lost or uptime_seconds() - self.renewed_at > margin

    @property
    def due_at(self) -> float:
        """When it is to be renewed."""
        return self.renewed_at + self.lease_seconds / 3

    @property
    def is_used(self) -> bool:
        """Whether anybody is left who holds it: an interrupt may have hit who was to drop it."""
        return self._owner() is not None

    def belong_to(self, owner: object) -> None:
        """Let another object be who holds it."""
        self._owner = weakref.ref(owner)

    def lose(self) -> None:
        """Another holder has it."""
        self._is_lost = True


class Keeper:
    """One thread that renews many leases, those that are due in one call.

    `renew` is given leases and returns those that it could renew. The thread starts with the
    first lease and ends when the keeper is closed.
    """

    def __init__(self, renew: Callable[[Sequence[Kept]], Sequence[Kept]]) -> None:
        self._renew = renew
        self._kept: set[Kept] = set()
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._wakes_at = 0.0
        self._idle_seconds = 60.0
        self._thread: threading.Thread | None = None
        self._is_closed = False

    def keep(
        self, owner: object, number: int, fence: int, lease_seconds: float, taken_at: float
    ) -> Kept:
        """Keep a lease alive that was asked for at `taken_at`, until it is dropped.

        Once its owner is gone it is kept no longer: the owner may be the call that uses it.
        """
        kept = Kept(owner, number, fence, lease_seconds, taken_at)
        with self._lock:
            self._kept.add(kept)
            # Idle, the thread wakes in time for any lease of this length: none need wake it.
            self._idle_seconds = min(self._idle_seconds, lease_seconds / 3)
            # An interrupt may have come between making the thread and starting it.
            if not self._is_closed and (self._thread is None or self._thread.ident is None):
                self._wakes_at = kept.due_at
                self._thread = Thread(self._run, "holdfast-keeper")
                self._thread.start()
            elif kept.due_at < self._wakes_at:
                self._changed.notify()
        return kept

    def drop(self, kept: Kept) -> None:
        """Renew a lease no longer."""
        with self._lock:
            self._kept.discard(kept)

    def close(self) -> None:
        """End the thread; what was kept expires by itself."""
        with self._lock:
            self._is_closed = True
            self._changed.notify()
            thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join()

    def _run(self) -> None:
        while due := self._wait():
            began = uptime_seconds()
            try:
                renewed = set(self._renew(due))
            except Exception:
                log.warning("leases could not be renewed; trying again", exc_info=True)
                time.sleep(min(1.0, min(kept.lease_seconds for kept in due) / 10))
                continue
            for kept in due:
                if kept in renewed:
                    kept.renewed_at = began
                else:
                    kept.lose()
                    self.drop(kept)

    def _wait(self) -> list[Kept]:
        """Return the leases that are due, once there are some; none when the keeper is closed."""
        with self._lock:
            while not self._is_closed:
                now = uptime_seconds()
                self._kept = {kept for kept in self._kept if kept.is_used}
                due = [kept for kept in self._kept if kept.due_at <= now]
                if due:
                    return due
                self._wakes_at = min(
                    (kept.due_at for kept in self._kept), default=now + self._idle_seconds
                )
                self._changed.wait(self._wakes_at - now)
        return []


def uptime_seconds() -> float:
    """Return the seconds since the machine booted, those spent asleep included where it tells."""
    return uptime_ms() / 1000


def default_holder() -> str:
    """Return this process's name, which no other process, on this machine or another, has."""
    return _name_of_process(os.getpid())


@functools.cache
def _name_of_process(pid: int) -> str:
    return f"{socket.gethostname()}:{pid}:{os.urandom(4).hex()}"


def _lease(row: Row) -> Lease:
    return Lease(
        id=row["id"],
        holder=row["holder"],
        fence=row["fence"],
        expires_at=row["lease_expires_at"],
    )


def lease_milliseconds(lease_seconds: float) -> int:
    """Return a lease's length in milliseconds, or refuse it."""
    most = LEASE_SECONDS_MAX
    return max(1, require_seconds("lease_seconds", lease_seconds, most, may_be_least=False))


def _require_lease(lease: object) -> None:
    if not isinstance(lease, Lease):
        raise InvalidArgument(f"lease must be a Lease, not {type(lease).__name__}")

"""Leases: a time-limited right to write one row, with a fence that only grows.

A noun that can be leased has the columns `holder`, `fence` and `lease_expires_at` in its table. A
lease has expired iff `lease_expires_at <= now`; its holder may still renew it with the right fence
until another takes it over. Every protected write checks the fence in its own transaction.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import math
import os
import queue
import socket
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from operator import attrgetter
from typing import Any

from .arguments import require_seconds, require_text, shown
from .clock import uptime_ms
from .dataclass import dataclass
from .errors import InvalidArgument, LeaseHeld, LeaseLost, NotFound, StoreBusy, StoreError
from .kernel.opening import open_driver
from .kernel.operation import Call, Op, PerStore, Query, Row, Runtime, batch, one, operation
from .kernel.threads import Latch, Thread
from .kernel.url import SqliteTarget
from .records import Lease
from .wire import travels

LEASE_SECONDS_MAX = 7 * 24 * 3600
SELF_FENCE_SHARE = 0.2
LEAVE_SECONDS_MAX = 2.0
# How long a renewal waits for a locked row.
LOCKED_SECONDS_MAX = 1.0
RENEWED_MAX = 1_000
log = logging.getLogger("holdfast.leases")

# The holder is an earlier boot of the instance named by the prefix `boots`.
EARLIER_BOOT = """holder <> :holder
    AND substr(holder, 1, length(CAST(:boots AS TEXT))) = :boots"""
ACQUIRE_LEASE = """
UPDATE {table} SET holder = :holder, fence = fence + 1, lease_expires_at = :now + :lease_ms
WHERE id = :id AND (holder IS NULL OR lease_expires_at <= :now)
RETURNING id, holder, fence, lease_expires_at
"""
RENEW_LEASE = """
UPDATE {table}
SET lease_expires_at = CASE
    WHEN lease_expires_at > :now + :lease_ms THEN lease_expires_at ELSE :now + :lease_ms END
WHERE id = :id AND fence = :fence AND holder IS NOT NULL
RETURNING id, holder, fence, lease_expires_at
"""
RELEASE_LEASE = """
UPDATE {table} SET holder = NULL, lease_expires_at = NULL
WHERE id = :id AND fence = :fence AND holder IS NOT NULL RETURNING id
"""
LOCK_LEASE = """
SELECT id, holder, fence, lease_expires_at FROM {table} WHERE id = :id /*pg FOR NO KEY UPDATE */
"""


class LeasedTable:
    """The lease operations on one table."""

    def __init__(self, table: str, noun: str) -> None:
        if not table.isidentifier():
            raise InvalidArgument(f"{shown(table)} is not a table name")
        self._noun = noun
        self._acquire = ACQUIRE_LEASE.format(table=table)
        self._renew = RENEW_LEASE.format(table=table)
        self._release = RELEASE_LEASE.format(table=table)
        self._lock = LOCK_LEASE.format(table=table)

    def acquire(self, id: str, holder: str, lease_seconds: float) -> Op[Lease]:
        """Take the lease and raise its fence. Raises LeaseHeld while another holder has it."""
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
        """Extend the lease, never shorten it. Raises LeaseLost if the fence is old."""
        lease_ms = lease_milliseconds(lease_seconds)
        _require_lease(lease)
        row = yield from one(self._renew, id=lease.id, fence=lease.fence, lease_ms=lease_ms)
        if row is None:
            raise (yield from self._lost(lease))
        return _lease(row)

    def check(self, lease: Lease) -> Op[None]:
        """Lock the row and check the fence; raise LeaseLost if it is old."""
        _require_lease(lease)
        current = yield from self._current(lease.id)
        if current["fence"] != lease.fence or current["holder"] is None:
            raise self._error(lease, current)

    def release(self, lease: Lease) -> Op[None]:
        """Release the lease. Raises LeaseLost if the fence is old."""
        _require_lease(lease)
        if (yield from one(self._release, id=lease.id, fence=lease.fence)) is None:
            raise (yield from self._lost(lease))

    def _current(self, id: str) -> Op[Row]:
        row = yield from one(self._lock, id=id)
        if row is None:
            raise NotFound(f"there is no {self._noun} {id!r}", id=id)
        return row

    def _lost(self, lease: Lease) -> Op[LeaseLost]:
        return self._error(lease, (yield from self._current(lease.id)))

    def _error(self, lease: Lease, current: Row) -> LeaseLost:
        reason = f"the current fence is {current['fence']}"
        if current["fence"] == lease.fence:
            reason = "it was released"
        return LeaseLost(
            f"{self._noun} {lease.id}: {lease.holder!r} lost its lease with fence {lease.fence}, "
            f"{reason}; stop this attempt, nothing was written",
            id=lease.id,
            fence=lease.fence,
            current_fence=current["fence"],
        )


@travels
@dataclass(frozen=True, slots=True)
class Guard:
    """A lease that every write through a handle needs, as data that the keeper checks."""

    noun: str
    id: str
    number: int
    fence: int

    def lost(self) -> LeaseLost:
        """Return the error for a holder that lost its lease."""
        return LeaseLost(
            f"{self.noun} {self.id}: the lease with fence {self.fence} is lost or was not renewed "
            "in time; stop this attempt, nothing was written",
            id=self.id,
            fence=self.fence,
        )


NOT_TAKEN = Guard("", "", 0, 0)


class Kept:
    """A lease that the keeper renews until it is dropped or its owner is garbage-collected.

    `on_renewal` is called with the owner and the renewed row, or None once the lease is lost.
    """

    def __init__(
        self,
        owner: object,
        guard: Guard,
        lease_seconds: float,
        taken_at: float,
        on_renewal: Callable[[Any, Row | None], None] | None = None,
    ) -> None:
        self.owner: weakref.ref[Any] = weakref.ref(owner)
        self.guard = guard
        self.lease_seconds = lease_seconds
        self.renewed_at = taken_at
        self.is_stopped = False
        self._on_renewal = on_renewal
        self._is_lost = False

    @property
    def is_lost(self) -> bool:
        """Whether the lease must be considered lost: taken over, or about to expire."""
        margin = self.lease_seconds * (1 - SELF_FENCE_SHARE)
        return self._is_lost or uptime_seconds() - self.renewed_at > margin

    @property
    def due_at(self) -> float:
        """When to renew it; never, once it is lost."""
        return math.inf if self._is_lost else self.renewed_at + self.lease_seconds / 3

    def lose(self) -> None:
        """Mark it as lost for good."""
        self._is_lost = True

    def note_renewal(self, row: Row | None, sent_at: float) -> None:
        """Record the result of a renewal that was sent at `sent_at`."""
        if row is None:
            self.lose()
        else:
            self.renewed_at = sent_at
        owner = self.owner()
        if self._on_renewal is not None and owner is not None:
            self._on_renewal(owner, row)


class Held(Kept):
    """A lease that the keeper also takes and releases, on threads that no interrupt hits.

    It is released when it is stopped or `owner` is garbage-collected. So no interrupt or
    cancellation of the caller can leak a lease.
    """

    def __init__(
        self,
        owner: object,
        keeper: Keeper,
        lease_seconds: float,
        take: Callable[[], tuple[Guard, Lease]],
        release: Callable[[Lease], object],
    ) -> None:
        super().__init__(owner, NOT_TAKEN, lease_seconds, uptime_seconds())
        # `inbox.put(held)` stops it: one C call, which an interrupt cannot split.
        self.inbox = keeper.inbox
        self.owner = weakref.ref(owner, self.inbox.put)
        self.take = take
        self.release = release
        self.lease: Lease | None = None
        self.has_begun = False
        self.error: BaseException | None = None
        self.ended = Latch()

    def give_back(self) -> None:
        """Release it and wake the waiter; it is not an error if it was lost before."""
        try:
            if self.lease is not None:
                self.release(self.lease)
        except (LeaseLost, NotFound):
            self.lose()
        except BaseException as error:
            self.error = error
            if self.owner() is None:
                log.warning("a lease could not be released; it will expire", exc_info=True)
        finally:
            self.ended.set()

    def leave(self) -> None:
        """After a stop, wait briefly for the lease to be released."""
        if self.has_begun:
            self.ended.wait(LEAVE_SECONDS_MAX)


@travels
class Keeper(PerStore):
    """One thread that renews the leases of a store, all that are due in one call.

    It starts with the first lease and ends when the keeper is closed. A lease is renewed after a
    third of its length, and considered lost shortly before it would expire without a renewal.
    """

    def __init__(self, runtime: Runtime) -> None:
        self.inbox: queue.SimpleQueue[object] = queue.SimpleQueue()
        """Wakes the thread; a `Held` that is put here is released."""
        self._runtime = runtime
        self._kept: dict[Guard, Kept] = {}
        self._wakes_at = 0.0
        self._idle_seconds = 60.0
        self._pauses_until = 0.0
        # A signal handler may enter while its thread holds the lock.
        self._lock = threading.RLock()
        self._thread: threading.Thread | None = None
        self._leaving: list[threading.Thread] = []
        self._is_closed = False
        self._driver: Any = None
        self._closers: list[Callable[[], None]] = []

    # Guards

    def is_lost(self, guard: Guard) -> bool:
        """Whether a lease kept here is known to be lost."""
        kept = self._kept.get(guard)
        return kept is not None and kept.is_lost

    def is_kept(self, guard: Guard) -> bool:
        """Whether this process keeps a lease."""
        return guard in self._kept

    def looks(self, guard: Guard | None) -> list[Query]:
        """Return the query that locks the lease's row and must return it for a write to proceed."""
        if guard is None:
            return []
        given = {"number": guard.number, "fence": guard.fence}
        return [Query(self._noun(guard.noun).guard, given, must_find=True)]

    def require(self, guard: Guard | None, answers: list[list[Row]]) -> list[list[Row]]:
        """Raise LeaseLost if the guard query returned nothing; return the other answers."""
        if guard is None:
            return answers
        if not answers[0] or self.is_lost(guard):
            raise guard.lost()
        return answers[1:]

    def require_known(self, guard: Guard | None) -> None:
        """Raise LeaseLost if the lease is known to be lost."""
        if guard is not None and self.is_lost(guard):
            raise guard.lost()

    def check(self, guard: Guard | None) -> Op[None]:
        """Lock the row and check the lease, or raise LeaseLost."""
        if guard is not None:
            self.require(guard, (yield from batch(*self.looks(guard))))

    def _noun(self, name: str) -> Any:
        return next(noun for noun in self._runtime.nouns if noun.name == name)

    # Keeping

    def keep(self, kept: Kept) -> Kept:
        """Renew a lease until it is dropped or its owner is garbage-collected."""
        self._kept[kept.guard] = kept
        # An idle thread wakes in time for any lease of this length.
        self._idle_seconds = min(self._idle_seconds, kept.lease_seconds / 3)
        with self._lock:
            # An earlier call may have been interrupted before it started the thread.
            if not self._is_closed and (self._thread is None or self._thread.ident is None):
                self._thread = Thread(self._run, "holdfast-keeper")
                self._thread.start()
        # It may have been stopped, or have lost its owner, before the thread could see it.
        if kept.due_at < self._wakes_at or kept.is_stopped or kept.owner() is None:
            self.inbox.put(None)
        return kept

    def drop(self, kept: Kept) -> None:
        """Stop renewing a lease. One that is lost stays known as lost to its handles."""
        if kept.is_lost:
            kept.lose()
        else:
            self._kept.pop(kept.guard, None)

    def take(self, held: Held) -> Lease:
        """Take a lease and keep it; called on a background thread, which no interrupt hits."""
        held.has_begun, held.renewed_at = True, uptime_seconds()
        try:
            held.guard, lease = held.take()
            held.lease = lease
            self.keep(held)
        except BaseException:
            held.give_back()
            raise
        return lease

    def finish(self, held: Held) -> None:
        """After a stop, wait until the lease is released; raise the error if that failed.

        An interrupt is raised afterwards; a second one at once, and the lease is still released.
        """
        try:
            while not held.ended.wait(1.0 if self._is_running else 0.0):
                # The store is closed, or this is a forked child.
                if not self._is_running:
                    held.give_back()
        except BaseException:
            held.leave()
            raise
        error, held.error = held.error, None
        if error is not None:
            raise error

    def at_close(self, close: Callable[[], None]) -> None:
        """Call a function before the thread ends, while leases are still renewed."""
        self._closers.append(close)

    def close(self) -> None:
        """End the thread; leases still kept expire by themselves."""
        for close in self._closers:
            close()
        with self._lock:
            self._is_closed = True
            thread = self._thread
        self.inbox.put(None)
        if thread is not None and thread.ident not in {None, threading.get_ident()}:
            thread.join()

    @operation
    def renew(self, due: Sequence[tuple[Guard, float]]) -> Op[list[Row | None]]:
        """Renew leases, those of one noun and length together; None for a lost one."""
        groups: dict[tuple[str, float], list[Guard]] = {}
        for guard, lease_seconds in due:
            groups.setdefault((guard.noun, lease_seconds), []).append(guard)
        renewed: dict[Guard, Row | None] = {}
        # In the lock order of all operations: items, sessions, effects.
        for (noun, lease_seconds), group in sorted(groups.items(), reverse=True):
            # A holder that lost its lease may still run beside the next one: the newest fence wins.
            held = {guard.number: guard.fence for guard in sorted(group, key=attrgetter("fence"))}
            found = yield from self._noun(noun).renew(held, lease_seconds)
            for guard in group:
                is_newest = held[guard.number] == guard.fence
                renewed[guard] = found.get(guard.number) if is_newest else None
        return [renewed[guard] for guard, _ in due]

    # The thread

    @property
    def _is_running(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def _run(self) -> None:
        while not self._is_closed:
            if self._thread is not threading.current_thread():
                return
            due, idle_seconds = self._look()
            if due:
                self._renew_due(due)
            self._receive(idle_seconds)
        self._look()
        for thread in self._leaving:
            thread.join(LEAVE_SECONDS_MAX)
        if self._driver is not None:
            self._driver.close()

    def _receive(self, seconds: float) -> None:
        """Wait for a message, and process all that have arrived."""
        with contextlib.suppress(queue.Empty):
            message = self.inbox.get(timeout=seconds)
            while True:
                if isinstance(message, Held):
                    message.is_stopped = True
                message = self.inbox.get_nowait()

    def _look(self) -> tuple[list[Kept], float]:
        """Release leases without an owner; return those due for renewal, or how long to sleep."""
        # Adding a lease meanwhile wakes the thread.
        self._wakes_at = math.inf
        for kept in list(self._kept.values()):
            if kept.is_stopped or kept.owner() is None:
                self._kept.pop(kept.guard, None)
                if isinstance(kept, Held):
                    self._let_go(kept)
        now, all_kept = uptime_seconds(), list(self._kept.values())
        next_at = min((kept.due_at for kept in all_kept), default=math.inf)
        next_at = max(next_at, self._pauses_until)
        if next_at > now:
            self._wakes_at = min(next_at, now + self._idle_seconds)
            return [], self._wakes_at - now
        # Including those due soon, so that all of one length end up being renewed together.
        due = [kept for kept in all_kept if kept.due_at - kept.lease_seconds / 6 <= now]
        return sorted(due, key=lambda kept: kept.due_at)[:RENEWED_MAX], 0.0

    def _renew_due(self, due: Sequence[Kept]) -> None:
        began = uptime_seconds()
        try:
            for kept, row in self._send(due):
                kept.note_renewal(row, began)
        except Exception as error:
            # A store that is away for a while is an event, not a fault to look for in the code.
            is_fault = not isinstance(error, StoreError)
            log.warning("leases could not be renewed; retrying: %s", error, exc_info=is_fault)
            pause_seconds = min(1.0, min(kept.lease_seconds for kept in due) / 10)
            self._pauses_until = uptime_seconds() + pause_seconds

    def _send(self, due: Sequence[Kept]) -> Iterator[tuple[Kept, Row | None]]:
        run: Callable[[Call[Any]], list[Row | None]] = self._connected().run
        try:
            yield from zip(due, run(self._renewal(due)), strict=True)
        except StoreBusy:
            if self._driver is None or len(due) == 1:
                raise
        else:
            return
        # One row is locked; renew the others without waiting for it.
        for kept in due:
            with contextlib.suppress(StoreBusy):
                yield kept, run(self._renewal([kept]))[0]

    def _renewal(self, due: Sequence[Kept]) -> Call[list[Row | None]]:
        return Call(Keeper.renew, self, ([(kept.guard, kept.lease_seconds) for kept in due],))

    def _connected(self) -> Any:
        """Return the driver for renewals, which no other calls can keep busy."""
        runtime = self._runtime
        if isinstance(runtime.target, SqliteTarget):
            # All writers of a file share one lock, so a separate driver would not help.
            return runtime.driver.twin()
        if self._driver is None:
            seconds = min(runtime.settings.busy_timeout_seconds, LOCKED_SECONDS_MAX)
            settings = replace(runtime.settings, busy_timeout_seconds=seconds)
            self._driver = open_driver(runtime.target, settings, migrate=False)
        return self._driver

    def _let_go(self, held: Held) -> None:
        """Release a lease; on PostgreSQL on its own thread, because it may wait for a row."""
        if isinstance(self._runtime.target, SqliteTarget):
            return held.give_back()
        self._leaving = [thread for thread in self._leaving if thread.is_alive()]
        thread = Thread(held.give_back, "holdfast-release")
        try:
            thread.start()
        except RuntimeError:
            held.give_back()
        else:
            self._leaving.append(thread)


def uptime_seconds() -> float:
    """Return the seconds since boot, including sleep where the system reports it."""
    return uptime_ms() / 1000


def default_holder() -> str:
    """Return a name for this process that is unique across machines."""
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

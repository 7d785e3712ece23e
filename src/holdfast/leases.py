"""Leases: a time-limited right to write one row, with a fence that only grows.

A noun that can be leased has the columns `holder`, `fence` and `lease_expires_at` in its own
table. A lease is expired iff `lease_expires_at <= now`; its holder may still renew it with the
right fence until another takes it. Every protected write checks the fence in its own transaction.
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
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from .arguments import require_seconds, require_text, shown
from .clock import uptime_ms
from .errors import InvalidArgument, LeaseHeld, LeaseLost, NotFound, StoreBusy
from .kernel.opening import open_driver
from .kernel.operation import Call, Op, PerStore, Query, Row, Runtime, batch, one, operation
from .kernel.threads import Flag, Thread
from .kernel.url import SqliteTarget
from .records import Lease

LEASE_SECONDS_MAX = 7 * 24 * 3600
SELF_FENCE_SHARE = 0.2
LEAVE_SECONDS_MAX = 2.0
# How long a renewal waits for a row that somebody has locked.
LOCKED_SECONDS_MAX = 1.0
RENEWED_MAX = 1_000
log = logging.getLogger("holdfast.leases")

# The holder `boots…`, where `boots` is an instance's name, but not the boot that is running now.
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
    """The lease rules over one table."""

    def __init__(self, table: str, noun: str) -> None:
        if not table.isidentifier():
            raise InvalidArgument(f"{shown(table)} is not a table name")
        self._noun = noun
        self._acquire = ACQUIRE_LEASE.format(table=table)
        self._renew = RENEW_LEASE.format(table=table)
        self._release = RELEASE_LEASE.format(table=table)
        self._look = LOCK_LEASE.format(table=table)

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
    """A lease that every write through a handle needs; plain data, which the keeper checks."""

    noun: str
    id: str
    number: int
    fence: int

    def lost(self) -> LeaseLost:
        """Return the error of a holder whose lease is lost."""
        return LeaseLost(
            f"{self.noun} {self.id}: the lease with fence {self.fence} is lost or was not renewed "
            "in time; stop this attempt, nothing was written",
            id=self.id,
            fence=self.fence,
        )


NOT_TAKEN = Guard("", "", 0, 0)


class Kept:
    """A lease that the keeper renews until it is dropped, or its owner is gone.

    `told` is called with the owner and the row of each renewal, None once the lease is lost.
    """

    def __init__(
        self,
        owner: object,
        guard: Guard,
        lease_seconds: float,
        taken_at: float,
        told: Callable[[Any, Row | None], None] | None = None,
    ) -> None:
        self.owner: weakref.ref[Any] = weakref.ref(owner)
        self.guard = guard
        self.lease_seconds = lease_seconds
        self.renewed_at = taken_at
        self.is_stopped = False
        self._told = told
        self._is_lost = False

    @property
    def is_lost(self) -> bool:
        """Whether the lease must be taken for lost: another has it, or it is about to expire."""
        margin = self.lease_seconds * (1 - SELF_FENCE_SHARE)
        return self._is_lost or uptime_seconds() - self.renewed_at > margin

    @property
    def due_at(self) -> float:
        """When it is to be renewed; never, once it is lost for good."""
        return math.inf if self._is_lost else self.renewed_at + self.lease_seconds / 3

    def lose(self) -> None:
        """Take it for lost for good: another holder has it."""
        self._is_lost = True

    def take_in(self, row: Row | None, asked_at: float) -> None:
        """Take in what a renewal that was asked for at `asked_at` has brought."""
        if row is None:
            self.lose()
        else:
            self.renewed_at = asked_at
        owner = self.owner()
        if self._told is not None and owner is not None:
            self._told(owner, row)


class Held(Kept):
    """A lease that the keeper also takes and gives back, on threads that no interrupt hits.

    It is given back when it is stopped and when `owner` is gone. So whatever interrupts or cancels
    who asked for it, there is no lease of which nobody knows.
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
        # `inbox.put(held)` stops it: one call of a function written in C, which an interrupt cannot
        # cut in two, nor the clearing of `owner` drop.
        self.inbox = keeper.inbox
        self.owner = weakref.ref(owner, self.inbox.put)
        self.take = take
        self.release = release
        self.lease: Lease | None = None
        self.has_begun = False
        self.error: BaseException | None = None
        self.ended = Flag()

    def give_back(self) -> None:
        """Give it back, and say so to who waits; one that is lost already is not an error."""
        try:
            if self.lease is not None:
                self.release(self.lease)
        except (LeaseLost, NotFound):
            self.lose()
        except BaseException as error:
            self.error = error
            if self.owner() is None:
                log.warning("a lease could not be given back; it will expire", exc_info=True)
        finally:
            self.ended.set()

    def leave(self) -> None:
        """After a stop, wait for the lease to be given back, but not for long."""
        if self.has_begun:
            self.ended.wait(LEAVE_SECONDS_MAX)


class Keeper(PerStore):
    """One thread that renews the leases of a store, all that are due in one call.

    It starts with the first lease and ends when the keeper is closed. A lease is renewed at a third
    of its length, and taken for lost shortly before it would expire without an answer.
    """

    def __init__(self, runtime: Runtime) -> None:
        self.inbox: queue.SimpleQueue[object] = queue.SimpleQueue()
        """Wakes the thread; what is held and put here is given back."""
        self._runtime = runtime
        self._kept: dict[Guard, Kept] = {}
        self._wakes_at = 0.0
        self._idle_seconds = 60.0
        self._pauses_until = 0.0
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._leaving: list[threading.Thread] = []
        self._is_closed = False
        self._driver: Any = None

    # Guards

    def is_lost(self, guard: Guard) -> bool:
        """Whether a lease that this store keeps is known to be lost."""
        kept = self._kept.get(guard)
        return kept is not None and kept.is_lost

    def is_kept(self, guard: Guard) -> bool:
        """Whether this store keeps a lease."""
        return guard in self._kept

    def looks(self, guard: Guard | None) -> list[Query]:
        """Return what must find something for a write to be allowed; it locks the lease's row."""
        if guard is None:
            return []
        given = {"number": guard.number, "fence": guard.fence}
        return [Query(self._noun(guard.noun).guard, given, must_find=True)]

    def require(self, guard: Guard | None, answers: list[list[Row]]) -> list[list[Row]]:
        """Raise LeaseLost if the look found nothing; return the answers behind it."""
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
        """Lock the row and make sure that the lease still lives, or raise LeaseLost."""
        if guard is not None:
            self.require(guard, (yield from batch(*self.looks(guard))))

    def _noun(self, name: str) -> Any:
        return next(noun for noun in self._runtime.nouns if noun.name == name)

    # Keeping

    def keep(self, kept: Kept) -> Kept:
        """Keep a lease alive until it is dropped, or its owner is gone."""
        self._kept[kept.guard] = kept
        # Idle, the thread wakes in time for any lease of this length: none need wake it.
        self._idle_seconds = min(self._idle_seconds, kept.lease_seconds / 3)
        with self._lock:
            # An interrupt may have come between making the thread and starting it.
            if not self._is_closed and (self._thread is None or self._thread.ident is None):
                self._thread = Thread(self._run, "holdfast-keeper")
                self._thread.start()
        # It may have been stopped, or lost its owner, before the thread could see it here.
        if kept.due_at < self._wakes_at or kept.is_stopped or kept.owner() is None:
            self.inbox.put(None)
        return kept

    def drop(self, kept: Kept) -> None:
        """Renew a lease no longer. One that is lost stays known as such to who still has it."""
        if kept.is_lost:
            kept.lose()
        else:
            self._kept.pop(kept.guard, None)

    def take(self, held: Held) -> Lease:
        """Take a lease and keep it; on a thread of our own, where no interrupt comes."""
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
        """After a stop, wait until the lease is given back; raise why it was not.

        An interrupt is raised once that is done; a second one at once, and it is still done.
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

    def close(self) -> None:
        """End the thread; what is still kept expires by itself."""
        with self._lock:
            self._is_closed = True
            thread = self._thread
        self.inbox.put(None)
        if thread is not None and thread.ident not in {None, threading.get_ident()}:
            thread.join()

    @operation
    def renew(self, due: Sequence[Kept]) -> Op[dict[Kept, Row | None]]:
        """Prolong leases, those of one noun and length in one statement; None for a lost one."""
        groups: dict[tuple[str, float], list[Kept]] = {}
        for kept in due:
            groups.setdefault((kept.guard.noun, kept.lease_seconds), []).append(kept)
        renewed: dict[Kept, Row | None] = {}
        # As everybody locks them: items, then sessions, then effects.
        for (noun, lease_seconds), group in sorted(groups.items(), reverse=True):
            # Whoever lost a lease may still run beside the next holder; the newest fence counts.
            in_order = sorted(group, key=lambda kept: kept.guard.fence)
            held = {kept.guard.number: kept.guard.fence for kept in in_order}
            found = yield from self._noun(noun).renew(held, lease_seconds)
            for kept in group:
                is_newest = held[kept.guard.number] == kept.guard.fence
                renewed[kept] = found.get(kept.guard.number) if is_newest else None
        return renewed

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
                self._beat(due)
            self._receive(idle_seconds)
        self._look()
        for thread in self._leaving:
            thread.join(LEAVE_SECONDS_MAX)
        if self._driver is not None:
            self._driver.close()

    def _receive(self, seconds: float) -> None:
        """Wait for a message, and take in all that have come."""
        with contextlib.suppress(queue.Empty):
            message = self.inbox.get(timeout=seconds)
            while True:
                if isinstance(message, Held):
                    message.is_stopped = True
                message = self.inbox.get_nowait()

    def _look(self) -> tuple[list[Kept], float]:
        """Let go of what nobody holds; return what is to be renewed, or how long nothing is."""
        # Whoever adds a lease meanwhile wakes the thread.
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
        # With those that are due soon: in the end all of one length are renewed at once.
        due = [kept for kept in all_kept if kept.due_at - kept.lease_seconds / 6 <= now]
        return sorted(due, key=lambda kept: kept.due_at)[:RENEWED_MAX], 0.0

    def _beat(self, due: Sequence[Kept]) -> None:
        began = uptime_seconds()
        try:
            for kept, row in self._ask(due).items():
                kept.take_in(row, began)
        except Exception:
            log.warning("leases could not be renewed; trying again", exc_info=True)
            pause_seconds = min(1.0, min(kept.lease_seconds for kept in due) / 10)
            self._pauses_until = uptime_seconds() + pause_seconds

    def _ask(self, due: Sequence[Kept]) -> dict[Kept, Row | None]:
        run: Callable[[Call[Any]], dict[Kept, Row | None]] = self._connected().run
        try:
            return run(Call(Keeper.renew, self, (due,)))
        except StoreBusy:
            if self._driver is None or len(due) == 1:
                raise
        # Somebody keeps a row locked; the others shall not wait for it.
        renewed: dict[Kept, Row | None] = {}
        for kept in due:
            with contextlib.suppress(StoreBusy):
                renewed |= run(Call(Keeper.renew, self, ([kept],)))
        return renewed

    def _connected(self) -> Any:
        """Return the driver that leases are renewed with, which nothing else can keep busy."""
        runtime = self._runtime
        if isinstance(runtime.target, SqliteTarget):
            # All writers of a file wait for one lock; another connection would only wait as well.
            return runtime.driver.twin()
        if self._driver is None:
            seconds = min(runtime.settings.busy_timeout_seconds, LOCKED_SECONDS_MAX)
            settings = replace(runtime.settings, busy_timeout_seconds=seconds)
            self._driver = open_driver(runtime.target, settings, migrate=False)
        return self._driver

    def _let_go(self, held: Held) -> None:
        """Give a lease back, on a thread of its own if it may wait where renewals need not."""
        if isinstance(self._runtime.target, SqliteTarget):
            # All writers of a file wait for one lock.
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

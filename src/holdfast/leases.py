"""Leases: a time-limited right to write one row, with a fence that only grows.

A noun that can be leased has the columns `holder`, `fence` and `lease_expires_at` in its own
table. A lease is expired iff `lease_expires_at <= now`; its holder may still renew it with the
right fence until another takes it. Every protected write checks the fence in its own transaction.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from .errors import HoldfastError, InvalidArgument, LeaseHeld, LeaseLost, NotFound
from .kernel.operation import Op, Row, one
from .records import Lease

LEASE_SECONDS_MAX = 7 * 24 * 3600
HOLDER_CHARACTERS_MAX = 256
SELF_FENCE_SHARE = 0.2
log = logging.getLogger("holdfast.leases")

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
            raise InvalidArgument(f"{table!r} is not a table name")
        self._noun = noun
        self._acquire = ACQUIRE.format(table=table)
        self._renew = RENEW.format(table=table)
        self._release = RELEASE.format(table=table)
        self._look = LOOK.format(table=table)

    def acquire(self, id: str, holder: str, lease_seconds: float) -> Op[Lease]:
        """Take the lease and raise its fence. Raises LeaseHeld while another's is alive."""
        lease_ms = _milliseconds(lease_seconds)
        _require_holder(holder)
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
        lease_ms = _milliseconds(lease_seconds)
        row = yield from one(self._renew, id=lease.id, fence=lease.fence, lease_ms=lease_ms)
        if row is None:
            raise (yield from self._lost(lease))
        return _lease(row)

    def check(self, lease: Lease) -> Op[None]:
        """Lock the row and make sure that the fence is still the lease's, or raise LeaseLost."""
        current = yield from self._current(lease.id)
        if current["fence"] != lease.fence or current["holder"] is None:
            raise self._error(lease, current)

    def release(self, lease: Lease) -> Op[None]:
        """Give the lease back. Raises LeaseLost under an old fence."""
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


class Heartbeat:
    """A thread that renews a lease at a third of its length, and stops when it is lost.

    `is_lost` turns true as soon as another holder is seen, and also by itself shortly before the
    lease would expire without an answer: who holds it must then stop.
    """

    def __init__(self, beat: Callable[[], object], lease_seconds: float) -> None:
        self._beat = beat
        self._lease_seconds = lease_seconds
        self._stopping = threading.Event()
        self._lost = threading.Event()
        self._renewed_at = time.monotonic()
        self._thread = threading.Thread(target=self._run, name="holdfast-heartbeat", daemon=True)
        self._thread.start()

    @property
    def is_lost(self) -> bool:
        """Whether the lease must be taken for lost."""
        margin = self._lease_seconds * (1 - SELF_FENCE_SHARE)
        return self._lost.is_set() or time.monotonic() - self._renewed_at > margin

    def stop(self) -> None:
        """Stop beating and wait for a beat under way."""
        self._stopping.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stopping.wait(self._lease_seconds / 3):
            began = time.monotonic()
            try:
                self._beat()
            except (LeaseLost, NotFound):
                self._lost.set()
                return
            except HoldfastError:
                log.warning("a lease could not be renewed; trying again", exc_info=True)
            else:
                self._renewed_at = began


def _lease(row: Row) -> Lease:
    return Lease(
        id=row["id"],
        holder=row["holder"],
        fence=row["fence"],
        expires_at=row["lease_expires_at"],
    )


def _milliseconds(lease_seconds: float) -> int:
    is_number = type(lease_seconds) in (int, float)
    if not is_number or not 0 < lease_seconds <= LEASE_SECONDS_MAX:
        raise InvalidArgument(
            f"lease_seconds must be above 0 and at most {LEASE_SECONDS_MAX}, not {lease_seconds!r}"
        )
    return max(1, round(lease_seconds * 1000))


def _require_holder(holder: str) -> None:
    is_text = isinstance(holder, str) and 0 < len(holder) <= HOLDER_CHARACTERS_MAX
    if not is_text or not holder.isprintable():
        raise InvalidArgument(
            f"holder must be text of 1 to {HOLDER_CHARACTERS_MAX} printable characters, "
            f"not {holder!r}"
        )

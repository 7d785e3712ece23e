"""The only module that reads the time, and the sortable ids made from it."""

from __future__ import annotations

import functools
import os
import threading
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Protocol

_UPTIME: int | None = getattr(time, "CLOCK_BOOTTIME", None)
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")

EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
# The last moment that ISO-8601 has a text for.
TIME_MS_MAX = 253_402_300_799_999


def wall_ms() -> int:
    """Return the wall time in integer milliseconds UTC; it may step."""
    return time.time_ns() // 1_000_000


def uptime_ms() -> int:
    """Return the milliseconds since boot, including sleep where the system reports it."""
    nanoseconds = time.monotonic_ns() if _UPTIME is None else time.clock_gettime_ns(_UPTIME)
    return nanoseconds // 1_000_000


@functools.cache
def boot_id() -> str | None:
    """Return the id of this boot; None where uptimes cannot be compared."""
    try:
        return None if _UPTIME is None else _BOOT_ID.read_text("ascii").strip()
    except OSError:
        return None


class Clock(Protocol):
    """Tells the time as integer milliseconds UTC."""

    def now_ms(self) -> int:
        """Return the current time."""
        ...


class SystemClock:
    """The machine's clock. On PostgreSQL the database's own clock decides instead."""

    now_ms = staticmethod(wall_ms)


class UptimeClock:
    """A clock that runs with the machine's uptime: a step of the wall clock does not move it."""

    def __init__(self, booted_at_ms: int) -> None:
        self._booted_at_ms = booted_at_ms

    def now_ms(self) -> int:
        """Return the time of the boot, as the store knows it, and the uptime since."""
        return self._booted_at_ms + uptime_ms()


class VirtualClock:
    """A clock that stands still until it is advanced. It also replaces PostgreSQL's clock."""

    def __init__(self, now_ms: int = 1_800_000_000_000) -> None:
        self._now_ms = now_ms

    def now_ms(self) -> int:
        """Return the time it was set to."""
        return self._now_ms

    def advance(self, seconds: float) -> None:
        """Move the clock; a negative number moves it back."""
        self._now_ms += round(seconds * 1000)


def iso(milliseconds: int) -> str:
    """Return a moment as ISO-8601 with a trailing Z.

    One before 1970 or after the year 9999, which only a clock or a database that is wrong can have
    given, becomes the nearest.
    """
    moment = EPOCH + timedelta(milliseconds=min(max(0, milliseconds), TIME_MS_MAX))
    return moment.isoformat(timespec="milliseconds").replace("+00:00", "Z")


class IdSource:
    """Makes sortable ids in the form of UUIDv7; within one source each is greater than the last."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._last = 0

    def __call__(self) -> str:
        """Return a new id."""
        with self._lock:
            # The 60 sorting bits are the milliseconds and a 12-bit counter. When the clock stands
            # still or goes back, the counter carries into the milliseconds.
            self._last = max(self._last + 1, self._clock.now_ms() << 12)
            stamp = self._last
        head = (stamp >> 12) << 16 | 0x7000 | stamp & 0xFFF
        tail = 1 << 63 | int.from_bytes(os.urandom(8)) >> 2
        digits = (head << 64 | tail).to_bytes(16).hex()
        return f"{digits[:8]}-{digits[8:12]}-{digits[12:16]}-{digits[16:20]}-{digits[20:]}"


def random_id(fresh: str) -> int:
    """Return the random part of a fresh id as a number, which identifies a head."""
    return int(fresh[-17:].replace("-", ""), 16) & (2**63 - 1)

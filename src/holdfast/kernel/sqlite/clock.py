"""The time of an SQLite store: wall time when the machine booted, and the uptime since.

Processes of one boot share what the first of them wrote down, so that leases and deadlines stand
still when the wall clock is stepped. The next boot begins with the wall time, but never before the
last write: what had expired stays expired.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ... import clock
from ..operation import Call, Op, one, query, rows, unmarked

READ_BOOT = "SELECT value FROM hf_meta WHERE name = 'boot'"
READ_LAST_WRITE = "SELECT max(updated_at) AS at FROM hf_writers"
SET_BOOT = """
INSERT INTO hf_meta (name, value) VALUES ('boot', :value)
ON CONFLICT (name) DO UPDATE SET value = excluded.value
"""


class TimeOps:
    """Reads and writes when the machine booted, as the store knows it."""

    def __init__(self, boot: str) -> None:
        self._boot = boot

    @query
    def booted_at(self) -> Op[int | None]:
        """Return what a process of this boot wrote down, or None."""
        return (yield from self._booted_at())

    @unmarked
    def begin(self, wall: int, uptime: int) -> Op[int]:
        """Write it down, unless another process was first."""
        known = yield from self._booted_at()
        if known is not None:
            return known
        booted_at = yield from self._first(wall, uptime)
        yield from rows(SET_BOOT, value=f"{self._boot} {booted_at}")
        return booted_at

    @query
    def seen(self, wall: int, uptime: int) -> Op[int]:
        """Return what is written down, or what would be; nothing is written."""
        known = yield from self._booted_at()
        return (yield from self._first(wall, uptime)) if known is None else known

    def _first(self, wall: int, uptime: int) -> Op[int]:
        row = yield from one(READ_LAST_WRITE)
        last_write: int = (row["at"] if row else None) or 0
        return max(wall, last_write) - uptime

    def _booted_at(self) -> Op[int | None]:
        row = yield from one(READ_BOOT)
        boot, _, booted_at = str(row["value"]).partition(" ") if row else ("", "", "")
        return int(booted_at) if boot == self._boot else None


def seen_clock(run: Callable[[Call[int]], int]) -> clock.UptimeClock | None:
    """Return that clock for somebody who only looks at the store."""
    boot = clock.boot_id()
    if boot is None:
        return None
    asked = (clock.wall_ms(), clock.uptime_ms())
    return clock.UptimeClock(run(Call(TimeOps.seen, TimeOps(boot), asked)))


def store_clock(run: Callable[[Call[Any]], Any]) -> clock.UptimeClock | None:
    """Return the clock that all processes of this boot share; None where there is no such thing."""
    boot = clock.boot_id()
    if boot is None:
        return None
    ops = TimeOps(boot)
    booted_at = run(Call(TimeOps.booted_at, ops))
    if booted_at is None:
        booted_at = run(Call(TimeOps.begin, ops, (clock.wall_ms(), clock.uptime_ms())))
    return clock.UptimeClock(booted_at)

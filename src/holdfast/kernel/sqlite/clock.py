"""The time of an SQLite store: the wall time of the machine's boot plus the uptime since.

All processes of one boot use the boot time that the first of them recorded, so that a step of the
wall clock moves no lease or deadline. The next boot begins with the wall time, but never before the
last write: an expired lease stays expired.
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
    """Reads and records the boot time."""

    def __init__(self, boot: str) -> None:
        self._boot = boot

    @query
    def booted_at(self) -> Op[int | None]:
        """Return the recorded time of this boot, or None."""
        return (yield from self._booted_at())

    @unmarked
    def begin(self, wall: int, uptime: int) -> Op[int]:
        """Record the time of this boot, unless another process was first; return it."""
        known = yield from self._booted_at()
        if known is not None:
            return known
        booted_at = yield from self._first(wall, uptime)
        yield from rows(SET_BOOT, value=f"{self._boot} {booted_at}")
        return booted_at

    @query
    def seen(self, wall: int, uptime: int) -> Op[int]:
        """Return the recorded time of this boot, or the one that would be; writes nothing."""
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
    """Return the clock of a store that is opened for reading."""
    boot = clock.boot_id()
    if boot is None:
        return None
    asked = (clock.wall_ms(), clock.uptime_ms())
    return clock.UptimeClock(run(Call(TimeOps.seen, TimeOps(boot), asked)))


def store_clock(run: Callable[[Call[Any]], Any]) -> clock.UptimeClock | None:
    """Return the clock that all processes of this boot share; None if boots have no id."""
    boot = clock.boot_id()
    if boot is None:
        return None
    ops = TimeOps(boot)
    booted_at = run(Call(TimeOps.booted_at, ops))
    if booted_at is None:
        booted_at = run(Call(TimeOps.begin, ops, (clock.wall_ms(), clock.uptime_ms())))
    return clock.UptimeClock(booted_at)

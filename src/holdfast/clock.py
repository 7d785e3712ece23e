"""The one place that asks what time it is."""

from __future__ import annotations

import time
from datetime import UTC, datetime, timedelta
from typing import Protocol

from .errors import InvalidArgument

TIME_MAX = 2**53
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


class Clock(Protocol):
    """Tells the time as integer milliseconds UTC."""

    def now_ms(self) -> int:
        """Return the current time."""
        ...


class SystemClock:
    """The machine's clock. On PostgreSQL the database's own clock decides instead."""

    def now_ms(self) -> int:
        """Return the machine's time."""
        return time.time_ns() // 1_000_000


class VirtualClock:
    """A clock that stands still until it is moved. It also decides PostgreSQL's time."""

    def __init__(self, now_ms: int = 1_800_000_000_000) -> None:
        self._now_ms = now_ms

    def now_ms(self) -> int:
        """Return the time it was set to."""
        return self._now_ms

    def advance(self, seconds: float) -> None:
        """Move the clock; a negative number moves it back."""
        self._now_ms += round(seconds * 1000)


def milliseconds_of(label: str, moment: object) -> int:
    """Return a moment in milliseconds UTC; it is given as that, or as a datetime with a zone."""
    milliseconds = moment
    if isinstance(moment, datetime):
        if moment.utcoffset() is None:
            raise InvalidArgument(f"{label} needs a time zone, like datetime.now(UTC): {moment!r}")
        milliseconds = (moment - _EPOCH) // timedelta(milliseconds=1)
    if type(milliseconds) is not int or not 0 <= milliseconds <= TIME_MAX:
        raise InvalidArgument(
            f"{label} must be a datetime, or a time in milliseconds UTC, not {moment!r}"
        )
    return milliseconds


def iso(milliseconds: int) -> str:
    """Return a moment as ISO-8601 with a trailing Z."""
    moment = datetime.fromtimestamp(milliseconds / 1000, UTC)
    return moment.isoformat(timespec="milliseconds").replace("+00:00", "Z")

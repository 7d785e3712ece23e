"""The age of the oldest waiting work item, minute by minute, since this server started."""

from __future__ import annotations

from collections.abc import Iterable

from ..work.reports import WorkCount

MINUTES = 60
MINUTE_MS = 60_000


class QueueAges:
    """The age of the oldest waiting item in each of the last minutes."""

    def __init__(self) -> None:
        self._by_minute: dict[int, float] = {}

    def note(self, now_ms: int, counts: Iterable[WorkCount]) -> None:
        """Record the age of the oldest waiting item."""
        ages = [each.oldest_age_seconds for each in counts if each.status == "pending"]
        minute = now_ms // MINUTE_MS
        kept = {each: age for each, age in self._by_minute.items() if each > minute - MINUTES}
        kept[minute] = max([kept.get(minute, 0.0), *ages])
        self._by_minute = kept

    def seconds(self, now_ms: int) -> list[float]:
        """Return the ages of the last minutes, the oldest minute first."""
        last = now_ms // MINUTE_MS
        return [self._by_minute.get(each, 0.0) for each in range(last - MINUTES + 1, last + 1)]

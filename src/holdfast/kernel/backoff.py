"""Pauses between attempts to reach something."""

from __future__ import annotations

import random

# Of its own: background threads must not disturb what a program makes of its seed.
_chance = random.Random()


class Backoff:
    """Pauses with jitter, each about twice the one before, up to a longest one."""

    def __init__(self, shortest_seconds: float, longest_seconds: float) -> None:
        self._shortest = shortest_seconds
        self._longest = longest_seconds
        self._next = shortest_seconds

    def pause_seconds(self) -> float:
        """Return how long to wait before the next attempt."""
        pause, self._next = self._next, min(self._next * 2, self._longest)
        return _chance.uniform(pause / 2, pause)

    def forget(self, lasted_seconds: float) -> None:
        """Begin with a short pause again, if what was reached lasted longer than any pause."""
        if lasted_seconds > self._longest:
            self._next = self._shortest

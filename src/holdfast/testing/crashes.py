"""Crashing on purpose: raise, or kill this process, at the k-th place where a store can crash.

Every statement, BEGIN and COMMIT has a place before it and one after it. Counting them first and
then crashing at each in turn covers every crash that can happen in a short flow.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from typing import Literal

from ..kernel.driver import Hooks, Point

Action = Literal["kill", "raise"]


class InjectedCrash(BaseException):
    """Raised instead of killing the process; a BaseException, so that no code handles it."""


class CrashPoints:
    """Counts the places that a flow passes, and crashes at the chosen one (counted from 1)."""

    def __init__(
        self,
        die_at: int | None = None,
        action: Action = "kill",
        error: Callable[[Point], BaseException] | None = None,
    ) -> None:
        self.points: list[Point] = []
        self.is_armed = True
        self._die_at = die_at
        self._action = action
        self._error = error or (lambda point: InjectedCrash(f"{point.moment} {point.sql}"))

    @property
    def hooks(self) -> Hooks:
        """The hooks to open the store with."""
        return Hooks(probe=self.visit)

    def visit(self, point: Point) -> None:
        """Pass a place, or crash there."""
        if not self.is_armed:
            return
        self.points.append(point)
        if len(self.points) == self._die_at:
            if self._action == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            raise self._error(point)

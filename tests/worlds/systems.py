"""Systems of the tests' own: one that fails when told to, and one that is a stack."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from holdfast.worlds import MemorySystem, System


class Fault(Exception):
    """What a failing system raises."""


class Failing(MemorySystem):
    """Data whose operations fail while they are in `fails`; a failing rollback has half moved."""

    is_in_process = False

    def __init__(self, data: dict[str, Any] | None = None) -> None:
        super().__init__(data)
        self.fails: dict[str, Callable[[], bool]] = {}
        self.kept: list[bytes] = []

    def _go(self, what: str) -> None:
        if what in self.fails and self.fails[what]():
            raise Fault(f"no {what} today")

    def fail(self, what: str, *, times: int = -1) -> None:
        """Fail an operation so many times, or always."""
        left = times

        def again() -> bool:
            nonlocal left
            left -= 1
            return left >= 0 or times < 0

        self.fails[what] = again

    def checkpoint(self, name: str) -> bytes:
        self._go("checkpoint")
        token = super().checkpoint(name)
        self.kept.append(token)
        return token

    def prepare(self, token: bytes) -> None:
        self._go("prepare")

    def rollback(self, token: bytes) -> None:
        if "rollback" in self.fails:
            self.data["half"] = "moved"
        self._go("rollback")
        super().rollback(token)

    def release(self, token: bytes) -> None:
        self.kept.remove(token)
        self._go("release")


class Stack(System):
    """Data under savepoints: going back to one destroys those above it."""

    rollback_order = "stack"

    def __init__(self) -> None:
        self.data: dict[str, Any] = {}
        self.savepoints: dict[int, dict[str, Any]] = {}
        self._next = 0

    def checkpoint(self, name: str) -> int:
        self._next += 1
        self.savepoints[self._next] = dict(self.data)
        return self._next

    def rollback(self, token: int) -> None:
        self.data = dict(self.savepoints[token])
        self.savepoints = {key: kept for key, kept in self.savepoints.items() if key <= token}

    def release(self, token: int) -> None:
        del self.savepoints[token]

    def observe(self) -> object:
        return dict(self.data)

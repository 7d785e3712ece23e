"""Group commit without waiting: what ends while a commit runs goes into the next one."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

E = TypeVar("E")


class Gathering(Generic[E]):
    """Writes endings, those under one key together.

    Who brings the first one writes it, and everything that others bring meanwhile, which they
    need not wait for. Keys do not wait for each other.
    """

    def __init__(self, write: Callable[[Sequence[E]], object]) -> None:
        self._write = write
        self._lock = threading.Lock()
        self._waiting: dict[str, list[E]] = {}

    def add(self, key: str, ending: E) -> None:
        """Write an ending, or leave it to who is writing another of this key."""
        with self._lock:
            if (waiting := self._waiting.get(key)) is not None:
                waiting.append(ending)
                return
            self._waiting[key] = []
        group = [ending]
        while group:
            self._write(group)
            with self._lock:
                group = self._waiting[key]
                if group:
                    self._waiting[key] = []
                else:
                    del self._waiting[key]

"""Ids and the small records that every noun shares."""

from __future__ import annotations

import os
import threading
from dataclasses import dataclass
from typing import Any

from .clock import Clock


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """One committed change in a session tree's feed."""

    root_id: str
    position: int
    session_id: str
    kind: str
    data: Any
    created_at: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Lease:
    """A time-limited right to write a row, and its fence: a number that only grows."""

    id: str
    holder: str
    fence: int
    expires_at: int


class IdSource:
    """Makes sortable ids in the form of UUIDv7; within one source each is greater than the last."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._last = 0

    def __call__(self) -> str:
        """Return a new id."""
        with self._lock:
            # The 60 bits that sort are the milliseconds and a 12-bit counter. When the clock
            # stands still or goes back, the counter carries over into the milliseconds.
            self._last = max(self._last + 1, self._clock.now_ms() << 12)
            stamp = self._last
        tail = os.urandom(8)
        digits = (
            f"{stamp >> 12:012x}7{stamp & 0xFFF:03x}{0x80 | tail[0] & 0x3F:02x}{tail[1:].hex()}"
        )
        return f"{digits[:8]}-{digits[8:12]}-{digits[12:16]}-{digits[16:20]}-{digits[20:]}"
